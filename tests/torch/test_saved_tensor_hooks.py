"""Compares derivatives inside of saved-tensor hooks with derivatives without hooks."""

from __future__ import annotations

from collections.abc import Callable
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


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "jvp": lambda f: lambda x: gt.jvp(f, (x,), (V,))[1],
    "linearize": lambda f: lambda x: gt.linearize(f, x)[1](V),
    "grad": lambda f: gt.grad(total(f)),
}


def cubic(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x**2


def chained(chain: tuple[str, ...], f: Function) -> Function:
    for name in reversed(chain):
        f = TRANSFORMS[name](f)
    return f


def outcome(f: Function) -> Any:
    """Return f(x) and the gradient of a loss of f(x), as a training step computes them."""
    x = X.clone().requires_grad_()
    y = tree_leaves(f(x))
    loss = sum((y.sin() * y).sum() for y in y)
    if not loss.requires_grad:
        return [*y]
    return [*y, *torch.autograd.grad(loss, x, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("hooks", ["save_on_cpu", "through NumPy", "torch's checkpoint"])
@pytest.mark.parametrize("chain", [("jvp", "grad"), ("jvp", "jvp"), ("linearize", "grad")])
def test_derivatives_inside_of_hooks_on_saved_tensors(chain, hooks):
    """Hooks process the saved tensors of the derivative; a checkpoint recomputes the derivative."""
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
