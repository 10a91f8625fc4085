"""Derivatives under no_grad, in inference_mode or in a backward pass equal plain derivatives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import gradtools.torch as gt

pytestmark = pytest.mark.torch
REAL = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, dtype=REAL, generator=GENERATOR)
X = torch.tensor([0.3, -0.7, 1.1], dtype=REAL)
T = torch.tensor([1.0, -2.0, 0.5], dtype=REAL)
WEIGHTS = {"constant weights": W, "trainable weights": W.clone().requires_grad_()}
NET = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).to(REAL)

cube = gt.custom_rule(lambda x: x**3)
cube.defvjp(lambda x: (cube(x), x), lambda x, c: (gt.vjp(lambda x: x**3, x)[1](c)[0],))
Program = Callable[[Any, torch.Tensor], Any]


def along(g: Any) -> Program:
    """Return a program that computes the jvp of `g(f)` at x."""
    return lambda f, x: gt.jvp(g(f), (x,), (T,))


def around(g: Any) -> Program:
    """Return a program that computes a jvp of `g(f, x)`, which captures x."""
    return lambda f, x: gt.jvp(g(f, x), (T,), (2 * T,))


def rows(r: torch.Tensor) -> torch.Tensor:
    return r.sin() * r


PROGRAMS: dict[str, Program] = {
    "grad": lambda f, x: gt.grad(f)(x),
    "vjp": lambda f, x: gt.vjp(lambda x: f(x) * x, x)[1](T),
    "jvp": lambda f, x: gt.jvp(f, (x,), (T,)),
    "linearize": lambda f, x: gt.linearize(f, x)[1](T),
    "forward jacobian": lambda f, x: gt.jacobian(lambda x: f(x) * x, mode="forward")(x),
    "hvp": lambda f, x: gt.hvp(f, (x,), (T,)),
    "forward over reverse": lambda f, x: gt.hvp(f, (x,), (T,), mode="forward_over_reverse"),
    "hessian": lambda f, x: gt.hessian(f)(x),
    "mixed_partial": lambda f, x: gt.mixed_partial(
        lambda y, g: (f(y) * g.sum()) ** 2, rows, x, x * 2, T
    ),
    "jvp of grad": along(gt.grad),
    "jvp of hessian": along(gt.hessian),
    "jvp of jacobian": along(lambda f: gt.jacobian(lambda x: f(x) * x)),
    "jvp of linearize": along(lambda f: lambda x: gt.linearize(f, x)[1](T)),
    "jvp of a checkpoint": along(lambda f: gt.grad(gt.checkpoint(f))),
    "jvp of chunks": along(lambda f: gt.grad(lambda x: gt.chunked(rows, 1)(x).prod() * f(x))),
    "jvp of per_example_grad": along(
        lambda f: lambda x: gt.per_example_grad(lambda s, x: f(x) * s)(x.sum(), torch.stack([x, x]))
    ),
    "jvp of a pullback": lambda f, x: gt.jvp(gt.vjp(lambda x: f(x) * x, x)[1], (T,), (2 * T,)),
    "jvp of torch.func.grad": along(torch.func.grad),
    "jvp of a rule by gt.vjp": along(lambda f: gt.grad(lambda x: cube(x).sum() * f(x))),
    "vmap of jvp of grad": lambda f, x: gt.vmap(
        lambda s: gt.jvp(gt.grad(lambda x: f(x) * s), (x,), (T,))
    )(T),
    "grad of jvp": lambda f, x: gt.grad(lambda x: gt.jvp(f, (x,), (T,))[1])(x),
    "forward jacobian of grad": lambda f, x: gt.jacobian(gt.grad(f), mode="forward")(x),
    "jvp around vjp": around(lambda f, x: lambda c: gt.vjp(lambda x: f(x) * x, x)[1](c)),
    "jvp around grad": around(lambda f, x: lambda s: gt.grad(lambda w: f(w * s))(x)),
    "jvp around hvp": around(lambda f, x: lambda s: gt.hvp(lambda w: f(w * s), (x,), (s,))),
    "jvp around frozen": around(
        lambda f, x: lambda s: gt.grad(lambda w: f(gt.frozen(rows)(w) * s))(x)
    ),
    "jvp around a module": around(
        lambda f, x: lambda s: gt.grad(lambda net: net(s * x).sum() * f(s))(NET)
    ),
}


class Asking(torch.autograd.Function):
    """A Function whose backward pass computes a derivative with a given program."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, program: Any, results: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.program, ctx.results = program, results
        return x.sum()

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.results.append(ctx.program(x))
        return torch.zeros_like(x), None, None


def in_a_backward_pass(program: Any, x: torch.Tensor, create_graph: bool = False) -> Any:
    results: list[Any] = []
    x = x if x.requires_grad else x.requires_grad_()
    out = Asking.apply(x, program, results)
    torch.autograd.grad(out, x, create_graph=create_graph)
    return results[0]


def inside(mode: Any) -> Any:
    def run(program: Any, x: torch.Tensor) -> Any:
        with mode():
            return program(x)

    return run


MODES = {
    "with gradients": inside(nullcontext),
    "no_grad": inside(torch.no_grad),
    "inference_mode": inside(torch.inference_mode),
    "set_grad_enabled": inside(lambda: torch.set_grad_enabled(False)),
    "in a backward pass": in_a_backward_pass,
    "in a backward pass with create_graph": lambda p, x: in_a_backward_pass(p, x, True),
}


@pytest.mark.sampled(28, 64)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_derivative_is_the_same_number_in_every_grad_mode(program: Program, weights: Any):
    f = lambda x: (torch.tanh(weights @ x) * x.square()).sum()
    wanted = [y.detach().clone() for y in tree_leaves(program(f, X.clone()))]
    assert any(y.abs().sum() > 1e-3 for y in wanted)
    arguments = {
        "a constant": X.clone,
        "a leaf": lambda: X.clone().requires_grad_(),
        "computed": lambda: X.clone().requires_grad_() * 1.0,
    }
    for mode, run in MODES.items():
        for kind, argument in arguments.items():
            found = tree_leaves(run(lambda x: program(f, x), argument()))
            assert len(found) == len(wanted), (mode, kind)
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(
                    a.detach(), b, rtol=1e-9, atol=1e-11, msg=lambda m: f"{mode}, {kind}: {m}"
                )


# --- every public operator -----------------------------------------------------------------------


def test_a_pushforward_without_a_graph_records_none_after_a_block_under_no_grad():
    saved, x = [], torch.ones(3, dtype=torch.float64)
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)

    def f(x):
        with torch.no_grad():
            scale = x.sum()
        with hooks:
            return (x * w).sin() * scale

    with torch.no_grad():
        gt.jvp(f, (x,), (x,))
    assert not saved


@pytest.mark.parametrize("depth", [3, 30])
def test_inside_of_hooks_a_pushforward_without_a_graph_saves_nothing_of_the_network(depth):
    """The saved-tensor hooks drop tangents, so values inside of G must not be saved."""
    saved: list[int] = []
    f = lambda y, g: (y * g).sin().sum()

    def G(z: torch.Tensor) -> torch.Tensor:
        slope = gt.grad(lambda z: (z**3).sum())(z)
        for _ in range(depth):
            slope = torch.tanh(W @ slope)
        return slope

    def pack(x: torch.Tensor) -> np.ndarray:
        saved.append(x.nbytes)
        return x.detach().numpy().copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        result = gt.mixed_partial(f, G, 0.5 * X, X, T)
    torch.testing.assert_close(result, gt.mixed_partial(f, G, 0.5 * X, X, T))
    assert len(saved) <= 21


def test_a_checkpoint_around_a_pushforward_without_a_graph_computes_it_again():
    y, z = (x.clone().requires_grad_() for x in (0.5 * X, X))
    G = lambda z: torch.tanh(W @ gt.grad(lambda z: (z**3).sum())(z))
    partial = lambda y, z: gt.mixed_partial(lambda y, g: (y * g).sin().sum(), G, y, z, T)
    inner = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    def hooked(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        with inner:
            return partial(y, z)

    expected = torch.autograd.grad((partial(y, z) ** 2).sum(), (y, z))
    for f in (partial, hooked):
        result = torch.utils.checkpoint.checkpoint(f, y, z, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad((result**2).sum(), (y, z)), expected)


@pytest.mark.parametrize("operator", ["grad", "vjp", "hvp", "jvp", "linearize"])
def test_grad_mode_that_is_on_in_inference_mode_changes_no_number(operator):
    f, x = lambda x: (x.sin() * x).sum(), torch.linspace(0.0, 1.0, 4)
    uses = {
        "grad": lambda x: gt.grad(f)(x),
        "vjp": lambda x: gt.vjp(f, x)[1](torch.ones(()))[0],
        "hvp": lambda x: gt.hvp(f, (x,), (x,))[1][0],
        "jvp": lambda x: gt.jvp(f, (x,), (x,))[1],
        "linearize": lambda x: gt.linearize(f, x)[1](x),
    }
    wanted = uses[operator](x)
    with torch.inference_mode(), torch.enable_grad():
        found = uses[operator](x.clone())
    assert torch.equal(found, wanted) and not found.requires_grad
