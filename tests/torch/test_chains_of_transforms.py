"""Every chain of three transforms, gradtools' and PyTorch's own, around each operator.

The expected values are those of gradtools' transforms alone, without checkpoints and without the
operator, which changes no derivative. A chain that does not run without it either is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import gradtools.torch as gt

pytestmark = pytest.mark.torch

X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
V = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
Function = Callable[[torch.Tensor], torch.Tensor]


def total(f: Function) -> Function:
    return lambda x: sum(y.sum() for y in tree_leaves(f(x)))


def rows(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, 2 * x.sin()])


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "jvp": lambda f: lambda x: gt.jvp(f, (x,), (V,))[1],
    "linearize": lambda f: lambda x: gt.linearize(f, x)[1](V),
    "grad": lambda f: gt.grad(total(f)),
    "vmap": lambda f: lambda x: gt.vmap(f)(rows(x)),
    "checkpoint": gt.checkpoint,
    "torch's jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (V,))[1],
    "torch's grad": lambda f: torch.func.grad(total(f)),
    "torch's vmap": lambda f: lambda x: torch.vmap(f)(rows(x)),
    "torch's checkpoint": lambda f: (
        lambda x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    ),
}


def by_rule(f: Function) -> Function:
    rule = gt.custom_rule(f)
    rule.defvjp(lambda x: (f(x), x), lambda x, c: (gt.vjp(f, x)[1](c)[0],))
    return rule


def by_pullback(f: Function) -> Function:
    rule = gt.custom_rule(f)
    rule.defvjp(lambda x: gt.vjp(f, x), lambda pullback, c: pullback(c))
    return rule


def by_forward_rule(f: Function) -> Function:
    rule = gt.custom_rule(f)
    rule.defjvp(lambda xs, dxs: (f(*xs), gt.jvp(f, xs, dxs)[1]))
    return rule


OPERATORS: dict[str, Callable[[Function], Function]] = {
    "checkpoint": gt.checkpoint,
    "chunked": lambda f: gt.chunked(f, 1),
    "frozen": gt.frozen,
    "rule": by_rule,
    "rule that saves a pullback": by_pullback,
    "forward rule": by_forward_rule,
    "reversed twice": lambda f: lambda x: gt.reverse_gradient(gt.reverse_gradient(f(x))),
    "straight_through": lambda f: gt.straight_through(f, f),
}


def cubic(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x**2


def chained(chain: tuple[str, ...], f: Function) -> Function:
    for name in reversed(chain):
        f = TRANSFORMS[name](f)
    return f


def outcome(f: Function) -> Any:
    """The value, and the gradient of a loss of it by backward, as a training step takes it."""
    x = X.clone().requires_grad_()
    y = tree_leaves(f(x))
    loss = sum((y.sin() * y).sum() for y in y)
    if not loss.requires_grad:
        return [*y]
    return [*y, *torch.autograd.grad(loss, x, allow_unused=True, materialize_grads=True)]


PUSHED = ("jvp", "torch's grad")


def limit(operator: str, chain: tuple[str, ...]) -> str:
    """Why a chain may be refused that runs without the operator; empty if it may not."""
    if "torch's checkpoint" in chain:
        return "torch.func refuses hooks on saved tensors, and a recomputation must save as many"
    level = "torch's jvp" in chain or (operator == "forward rule" and chain[:2] == PUSHED)
    if level and "checkpoint" in chain:
        return (
            "a jvp in it takes dual numbers only outside of the level, where it is computed again"
        )
    if operator == "checkpoint" and chain[:2] == ("checkpoint", "jvp") and "vmap" in chain[2]:
        return "a checkpoint under vmap and jvp has another graph when it is computed again"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("outermost", TRANSFORMS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_chain_is_as_without_the_operator(operator, outermost):
    wrong, count = [], 0
    for inner in product(TRANSFORMS, repeat=2):
        chain = (outermost, *inner)
        try:
            result = outcome(chained(chain, OPERATORS[operator](cubic)))
        except Exception as error:
            if not runs(chain):
                continue  # nor without the operator
            if not limit(operator, chain):
                wrong.append((chain, f"{type(error).__name__}: {error}"[:200]))
            continue
        count += 1
        own = [name.removeprefix("torch's ") for name in chain]
        plain = tuple([name for name in own if name != "checkpoint"])
        expected = outcome(chained(plain, cubic))
        if len(result) != len(expected) or not all(map(torch.allclose, result, expected)):
            wrong.append((chain, "numbers differ"))
    assert not wrong
    assert count > 15


def runs(chain: tuple[str, ...]) -> bool:
    """Whether a chain runs without the operator."""
    try:
        outcome(chained(chain, cubic))
    except Exception:
        return False
    return True


@pytest.mark.parametrize("hooks", ["save_on_cpu", "through NumPy", "torch's checkpoint"])
@pytest.mark.parametrize("chain", [("jvp", "grad"), ("jvp", "jvp"), ("linearize", "grad")])
def test_derivatives_inside_of_hooks_on_saved_tensors(chain, hooks):
    """The hooks see what the derivative saves, and a checkpoint computes the derivative again."""
    f = chained(chain, cubic)

    def hooked(x: torch.Tensor) -> torch.Tensor:
        if hooks == "torch's checkpoint":
            return torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
        pair = (lambda t: t.detach().numpy().copy(), torch.from_numpy)
        save = torch.autograd.graph.saved_tensors_hooks
        with torch.autograd.graph.save_on_cpu() if hooks == "save_on_cpu" else save(*pair):
            return f(x)

    torch.testing.assert_close(outcome(hooked), outcome(f))


@pytest.mark.parametrize("order", ["per_example_grad", "vmap of hvp"])
def test_batches_of_derivatives_inside_of_hooks_on_saved_tensors(order):
    w = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    rows = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(4, 3)
    loss = lambda w, x: torch.tanh(w @ x).square().sum()
    product = lambda w, x: gt.hvp(lambda w: loss(w, x), (w,), (torch.ones_like(w),))[1][0]
    program = {
        "per_example_grad": lambda: gt.per_example_grad(loss)(w, rows),
        "vmap of hvp": lambda: gt.vmap(lambda x: product(w, x))(rows),
    }[order]
    plain = program()
    with torch.autograd.graph.save_on_cpu():
        hooked = program()
    results = [(y, *torch.autograd.grad(y.square().sum(), w)) for y in (hooked, plain)]
    torch.testing.assert_close(*results)
