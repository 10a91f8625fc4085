"""What plain PyTorch does to a rule of one's own, and what ours does in its place.

Each test holds the upstream bug as it is today: it fails, and so tells, when upstream is mended.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import gradtools.torch as gt
from gradtools import GradtoolsError, GradtoolsWarning
from tests.support.torch_functions import Cube

X = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
ONES = torch.ones_like(X)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def compiled(f):
    torch._dynamo.reset()
    return torch.compile(f, backend="aot_eager", fullgraph=True)


class PlainSinh(torch.autograd.Function):
    """It saves the intermediate exp(x), as tutorials do."""

    @staticmethod
    def forward(ctx, x):
        e = torch.exp(x)
        ctx.save_for_backward(e)
        return (e - 1 / e) / 2

    @staticmethod
    def backward(ctx, c):
        (e,) = ctx.saved_tensors
        return c * (e + 1 / e) / 2


def our_sinh():
    sinh = gt.custom_rule(lambda x: torch.sinh(x.detach()))

    def fwd(x):
        e = torch.exp(x)
        return (e - 1 / e) / 2, e

    sinh.defvjp(fwd, lambda e, c: (c * (e + 1 / e) / 2,))
    return sinh


def second_derivative(f):
    """Of the sum of f(x)^2."""
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad((f(x) ** 2).sum(), x, create_graph=True)
    return torch.autograd.grad(g.sum(), x)[0]


def test_76185_the_double_backward_of_a_saved_intermediate_is_wrong_in_silence():
    right = 2 * torch.cosh(2 * X)
    of_the_output_alone = 2 * torch.cosh(X) ** 2  # the intermediate is taken for a constant
    close(second_derivative(PlainSinh.apply), of_the_output_alone)
    close(second_derivative(our_sinh()), right)


def our_cube():
    cube = gt.custom_rule(lambda x: x.detach() ** 3)
    cube.defvjp(lambda x: (x**3, x), lambda x, c: (3 * x**2 * c,))
    return cube


def test_197867_nested_forward_mode_is_wrong_in_silence():
    def twice(f):
        inner = lambda x: torch.func.jvp(f, (x,), (ONES,))[1]
        return torch.func.jvp(inner, (X,), (ONES,))

    first, second = twice(Cube.apply)
    close(first, 3 * X**2)
    assert torch.equal(second, torch.zeros_like(X))
    first, second = twice(our_cube())
    close(first, 3 * X**2)
    close(second, 6 * X)


class Hundred(torch.autograd.Function):
    """A rule that nobody can mistake for the function's own derivative."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, c):
        return 100 * c

    @staticmethod
    def jvp(ctx, t):
        return 100 * t


def our_hundred():
    cube = gt.custom_rule(lambda x: x**3)
    cube.defvjp(lambda x: (x**3, None), lambda _, c: (100 * c,))
    return cube


def gradient(f):
    return torch.func.grad(lambda x: f(x).sum())


def pushed(f):
    return lambda x: torch.func.jvp(f, (x,), (ONES,))[1]


@pytest.mark.sweep_at("192985 jvp")
@pytest.mark.parametrize("of", [gradient, pushed], ids=["193279 grad", "192985 jvp"])
def test_a_rule_is_dropped_in_silence_where_its_derivative_is_compiled(of):
    close(of(Hundred.apply)(X), 100 * ONES)
    close(compiled(of(Hundred.apply))(X), 3 * X**2)  # autodiff of the value
    ours = our_hundred()
    close(of(ours)(X), 100 * ONES)
    close(compiled(of(ours))(X), 100 * ONES)


def test_168393_an_operator_with_a_registered_derivative_has_a_forward_mode_of_zero():
    operator = torch.library.custom_op(
        "own_rules_upstream::cube",
        lambda x: x**3,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    operator.register_autograd(
        lambda ctx, c: 3 * ctx.saved_tensors[0] ** 2 * c,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert torch.equal(torch.func.jvp(operator, (X,), (ONES,))[1], torch.zeros_like(X))
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
        gradient(operator)(X)
    cube = our_cube()
    close(torch.func.jvp(cube, (X,), (ONES,))[1], 3 * X**2)
    close(gradient(cube)(X), 3 * X**2)


@pytest.mark.slow
def test_91469_there_is_no_compiled_double_backward():
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(compiled(lambda x: (x**3).sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(g.sum(), x)
    cube = our_cube()
    loss = lambda x: cube(x).sum()
    second = lambda f: gt.grad(lambda x: gt.grad(f)(x).sum())
    run = compiled(loss)
    alias = x.view_as(x)  # at a tensor that is no leaf PyTorch raises nothing
    (g,) = torch.autograd.grad(run(alias), alias, create_graph=True)
    assert torch.autograd.grad(g.sum(), x, allow_unused=True) == (None,)
    with pytest.raises(GradtoolsError, match="no compiled double backward"):
        second(run)(X)
    torch._dynamo.reset()
    with pytest.warns(GradtoolsWarning, match="run again outside of the compiled graph"):
        close(second(gt.compile(loss, backend="aot_eager"))(X), 6 * X)
    close(compiled(second(loss))(X), 6 * X)


def test_a_compiled_function_has_its_tangent_beside_a_graph():
    run = gt.compile(lambda x: torch.sin(x) * x, backend="eager")
    with forward_ad.dual_level():
        y = run(forward_ad.make_dual(X.clone().requires_grad_(), torch.ones_like(X)))
        close(forward_ad.unpack_dual(y).tangent, torch.cos(X) * X + torch.sin(X))
        assert y.requires_grad


@pytest.mark.slow_at("False")
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_function_has_its_tangent_after_its_value_was_compiled(whole):
    torch._dynamo.reset()
    run = gt.compile(lambda x: x * x, backend="aot_eager", fullgraph=whole)
    for _ in range(2):
        run(X)
    close(gt.jvp(run, (X,), (torch.ones_like(X),))[1], 2 * X)
    with torch.no_grad():
        close(gt.jvp(run, (X,), (torch.ones_like(X),))[1], 2 * X)
