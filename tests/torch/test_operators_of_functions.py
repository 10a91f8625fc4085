"""cond, map, scan and while_loop of PyTorch: PyTorch's own derivatives and limits, unchanged."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import scan, while_loop
from torch.autograd import forward_ad

import gradtools.torch as gt
from gradtools.errors import GradtoolsError

map_ = mapped.map if hasattr(mapped, "map") else mapped
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # dynamo compiles each
X = torch.tensor([0.3, 0.7, 1.1], dtype=torch.float64)
T = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def branch(x):
    return torch.cond(x.sum() > 0, lambda x: torch.sin(x) * x, lambda x: torch.cos(x), (x,)).sum()


def rows(x):
    return map_(lambda r: torch.sin(r) * r, x).sum()


def plain_rows(x):
    return (torch.sin(x) * x).sum()


def carried(x):
    carry, ys = scan(lambda c, a: (c * a + torch.sin(c), c * a), x[0] * 1, x)
    return carry + ys.sum()


def plain_carried(x):
    carry, total = x[0], 0
    for a in x:
        carry, total = carry * a + torch.sin(carry), total + carry * a
    return carry + total


def looped(x):
    step = lambda i, x: (i + 1, torch.sin(x))
    return while_loop(lambda i, x: i < 2, step, (torch.tensor(0), x))[1].sum()


def plain_looped(x):
    return torch.sin(torch.sin(x)).sum()


PAIRS = {
    "cond": (branch, plain_rows),
    "map": (rows, plain_rows),
    "scan": (carried, plain_carried),
    "while_loop": (looped, plain_looped),
}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_the_gradient_of_an_operator_of_functions_is_right(name):
    hidden, plain = PAIRS[name]
    close(gt.grad(hidden)(X), gt.grad(plain)(X))


@pytest.mark.parametrize("name", ["map", "scan", "while_loop"])
def test_its_linear_map_transposes_the_pullback(name):
    """The pullback of cond has no graph at all, so its transpose is zero."""
    hidden, plain = PAIRS[name]
    close(gt.linearize(hidden, X)[1](T), gt.jvp(plain, (X,), (T,))[1])


@pytest.mark.parametrize("name", PAIRS)
def test_its_tangent_is_lost_as_in_pytorch(name):
    """It fails when PyTorch pushes tangents through the operator."""
    hidden, _ = PAIRS[name]
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(hidden(forward_ad.make_dual(X, T))).tangent is None
    close(gt.jvp(hidden, (X,), (T,))[1], torch.zeros_like(T[0]))
    close(gt.jvp(lambda x: hidden(x) + x.sum(), (X,), (T,))[1], T.sum())
    with pytest.raises(GradtoolsError, match=r"^hvp: f holds .* has no forward mode"):
        gt.hvp(hidden, (X,), (T,), mode="forward_over_reverse")


@pytest.mark.parametrize("name", PAIRS)
def test_its_second_derivative_is_that_of_pytorch(name):
    """Of map alone it is right: the others lose terms in PyTorch's double backward."""
    hidden, plain = PAIRS[name]
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(hidden(x), x, create_graph=True)
    theirs = torch.zeros_like(X)
    if gradient.requires_grad:
        (theirs,) = torch.autograd.grad(gradient, x, T)
    hvp = lambda f: gt.hvp(f, (X,), (T,), mode="reverse_over_reverse")[1][0]
    close(hvp(hidden), theirs)
    assert torch.allclose(hvp(hidden), hvp(plain)) is (name == "map")
