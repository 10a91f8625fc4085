"""cond, scan and map of PyTorch: their tangents, which PyTorch drops in silence, are right here."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import scan, while_loop
from torch.utils.checkpoint import checkpoint

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
WAYS = {
    "jvp": lambda f: gt.jvp(f, (X,), (T,))[1],
    "beside another term": lambda f: gt.jvp(lambda x: f(x) + x.sum(), (X,), (T,))[1],
    "under no_grad": lambda f: torch.no_grad()(lambda: gt.jvp(f, (X,), (T,))[1])(),
    "linearize": lambda f: gt.linearize(f, X)[1](T),
    "grad of jvp": lambda f: gt.grad(lambda x: gt.jvp(f, (x,), (T,))[1])(X),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_tangent_goes_through_an_operator_of_functions(name, way):
    hidden, plain = PAIRS[name]
    torch.testing.assert_close(WAYS[way](hidden), WAYS[way](plain), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["cond", "map", "scan"])
def test_its_second_derivative_is_right_forward_over_reverse_and_else_refused(name):
    hidden, plain = PAIRS[name]
    hvp = lambda f, mode: gt.hvp(f, (X,), (T,), mode=mode)[1][0]
    forward, reverse = "forward_over_reverse", "reverse_over_reverse"
    torch.testing.assert_close(hvp(hidden, forward), hvp(plain, forward), rtol=1e-12, atol=1e-12)
    with pytest.raises(GradtoolsError, match="AutogradOp, whose gradient"):
        hvp(hidden, reverse)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["cond", "map"])
def test_a_tangent_through_one_is_trained(name, checkpointed):
    """PyTorch's forward rule of logsumexp writes in place what a second derivative needs."""
    w = torch.arange(9.0, dtype=torch.float64).reshape(3, 3).sin().requires_grad_()
    body = lambda h, w: torch.logsumexp(h @ w, -1, keepdim=True) * (h @ w)
    operators = {
        "cond": lambda h: torch.cond(torch.tensor(True), body, lambda h, w: h @ w * 1.0, (h, w)),
        "map": lambda h: map_(body, h, w),
    }
    rows, along = torch.stack([X, X.cos()]), torch.stack([T, T.sin()])

    def gradient(f):
        g = (lambda h: checkpoint(f, h, use_reentrant=False)) if checkpointed else f
        tangent = gt.jvp(g, (rows,), (along,))[1]
        return torch.autograd.grad(tangent.square().sum(), w)[0]

    torch.testing.assert_close(gradient(operators[name]), gradient(lambda h: body(h, w)))
