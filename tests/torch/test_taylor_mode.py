"""Taylor mode in PyTorch: what its function mode does not see, stops or must not do twice."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt

X = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, ct):
        return 3 * ctx.saved_tensors[0] ** 2 * ct

    @staticmethod
    def jvp(ctx, dx):
        return 3 * ctx.saved_tensors[0] ** 2 * dx


def stopped(x):
    with torch.no_grad():
        c = x**2
    return (c * x * x).sum()


def written(x):
    y = torch.zeros(3, dtype=torch.float64)
    y[:] = x**3
    return y.sum()


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: (Cube.apply(x) * x).sum(), (12 * X**2).sum()),
        (lambda x: Cube.apply(x).sum(), (6 * X).sum()),
        (stopped, (2 * X**2).sum()),
        (written, (6 * X).sum()),
    ],
    ids=["a Function in between", "a Function", "no_grad", "written in place"],
)
def test_what_no_rule_follows_is_right(f, expected):
    torch.testing.assert_close(gt.laplacian(f)(X), expected)
    _, (first, second) = gt.jet(f, (X,), ([X, 0 * X],))
    torch.testing.assert_close(first, gt.jvp(f, (X,), (X,))[1])
    one = torch.ones((), dtype=torch.float64)
    slope = lambda t: gt.jvp(lambda t: f(X + t * X), (t,), (one,))[1]
    torch.testing.assert_close(second, gt.jvp(slope, (0 * one,), (one,))[1])


def test_what_is_drawn_is_drawn_once():
    f = lambda x: (torch.nn.functional.rrelu(x - 0.6, training=True) ** 3).sum()
    torch.manual_seed(5)
    found, after = gt.laplacian(f)(X), torch.rand(1)
    torch.manual_seed(5)
    slopes = torch.autograd.functional.jacobian(f, X)
    assert torch.equal(torch.rand(1), after)
    torch.testing.assert_close(found, (2 * slopes / (X - 0.6)).sum())


class ReverseOnly(torch.autograd.Function):
    forward, setup_context, backward = Cube.forward, Cube.setup_context, Cube.backward


def test_a_function_without_forward_mode_is_refused_in_the_name_of_the_operator():
    f = lambda x: ReverseOnly.apply(x).sum()
    with pytest.raises(NotImplementedError, match=r"^jet: f holds a function with a reverse rule"):
        gt.jet(f, (X,), ([X, 0 * X],))
    with pytest.raises(NotImplementedError, match=r"^laplacian: f holds a function"):
        gt.laplacian(f)(X)
