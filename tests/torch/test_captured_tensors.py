"""In operators that recompute f, tensors that f captures become inputs or cause an error.

In eager code, gradtools finds captured leaf tensors in the graph of f. A captured result of other
operations, and every captured tensor inside of torch.func, becomes an input of f's node, and the
recomputation of f reads this input.
"""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError

pytestmark = pytest.mark.filterwarnings("ignore:.*is not recomputed")


class Square(torch.autograd.Function):
    """A Function that computes x w^2."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, ct):
        x, w = ctx.saved_tensors
        return ct * w * w, 2 * ct * x * w


@gt.custom_rule
def doubled(x):
    return torch.sinh(x)


doubled.defvjp(lambda x: (torch.sinh(x), x), lambda x, ct: (2 * ct * torch.cosh(x),))
cube = lambda w: (w**3).sum()


def without_grad(w):
    with torch.no_grad():
        return w.abs().max()


READ = {
    "operations": lambda x, w: x * w * w.detach(),
    "values": lambda x, w: x * w * without_grad(w),
    "an edit": lambda x, w: gt.reverse_gradient(w) * x * w,
    "a scaled edit": lambda x, w: gt.scale_gradient(w, 2.0) * x,
    "straight_through": lambda x, w: gt.straight_through(torch.round)(w) * x,
    "a rule": lambda x, w: doubled(w) * x,
    "grad": lambda x, w: gt.grad(cube)(w) * x,
    "hvp": lambda x, w: gt.hvp(cube, (w,), (w,))[1][0] * x,
    "hessian": lambda x, w: gt.hessian(cube)(w).sum(0) * x,
    "jacobian": lambda x, w: gt.jacobian(lambda w: w**3)(w).sum(0) * x,
    "linearize": lambda x, w: gt.linearize(lambda w: w**3, w)[1](w) * x,
    "jvp": lambda x, w: gt.jvp(lambda w: w**3, (w,), (w,))[1] * x,
    "frozen": lambda x, w: gt.frozen(lambda w: w**3)(w) * x,
    "checkpoint": lambda x, w: gt.checkpoint(lambda x: w * w * x)(x),
    "chunked": lambda x, w: gt.chunked(lambda w: w**3, 1)(w) * x,
}
REFUSED = {
    "a Function": lambda x, w: Square.apply(x, w),
    "a Function and an operation": lambda x, w: Square.apply(x, w) * w,
    "torch.func.grad": lambda x, w: torch.func.grad(cube)(w) * x,
}
WAYS = {"a leaf": lambda q: q, "a result": torch.exp}


def gradients(operator, body, captured, x, q):
    """Return functions that differentiate the loss with respect to q by autograd and torch.func."""

    def loss(q):
        w = captured(q)
        return operator(lambda x: torch.tanh(body(x, w)).sum(-1) ** 2)(x).sum() ** 2

    square = lambda q: (torch.func.grad(loss)(q) ** 2).sum()

    def autograd():
        leaf = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        return first.detach(), *torch.autograd.grad((first**2).sum(), leaf)

    return {
        "autograd": autograd,
        "torch.func": lambda: (torch.func.grad(loss)(q),),
        "torch.func twice": lambda: (torch.func.grad(square)(q),),
    }


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)


OPERATORS = {"checkpoint": gt.checkpoint, "chunked": lambda f: gt.chunked(f, 2)}


@pytest.mark.parametrize("captured", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("body", READ.values(), ids=READ)
def test_own_operators_read_captured_tensors(data, body, operator, captured):
    plain = gradients(lambda f: f, body, captured, *data)
    for way, found in gradients(operator, body, captured, *data).items():
        for a, b in zip(found(), plain[way](), strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-9, atol=1e-11, msg=lambda m, w=way: f"{w}: {m}"
            )


@pytest.mark.parametrize("captured", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_what_no_mode_sees_is_right_or_refused(data, body, captured):
    plain = gradients(lambda f: f, body, captured, *data)
    for way, found in gradients(gt.checkpoint, body, captured, *data).items():
        if way == "autograd" and captured is WAYS["a leaf"]:
            for a, b in zip(found(), plain[way](), strict=True):
                torch.testing.assert_close(a, b)
            continue
        with pytest.raises(GradtoolsError, match="captures"):
            found()
