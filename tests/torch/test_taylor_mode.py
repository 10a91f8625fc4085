"""Taylor mode in PyTorch: what its function mode does not see, stops or must not do twice."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

import gradtools.torch as gt
from gradtools.torch import taylor

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


Y = torch.tensor([0.3, -0.5, 0.9, -1.7], dtype=torch.float64)
M = torch.linspace(-1, 1.2, 16, dtype=torch.float64).reshape(4, 4)
TERMS = [torch.roll(Y, k).sin() for k in range(4)]
RULES = {
    "differences": lambda x: 1 - x**2 + torch.rsub(x**2, 3.0, alpha=2),
    "relu": lambda x: functional.relu(x) * x,
    "gelu": lambda x: functional.gelu(x) + functional.gelu(x, approximate="tanh"),
    "softplus": lambda x: functional.softplus(x) + functional.softplus(x, 2.0, 1.0),
    "silu": functional.silu,
    "logarithms and exponentials": lambda x: torch.log1p(x**2) * torch.expm1(x) * torch.exp2(x),
    "a number to a power": lambda x: 2**x,
    "erf": torch.erf,
    "clamped": lambda x: x.clamp(-0.6, 0.6) * x + torch.clamp_max(x**2, max=0.5),
    "lerp": lambda x: torch.lerp(x, x**2, 0.3),
    "where": lambda x: torch.where(x > 0, x**2, x.sin()) + x.where(x > 0, x**3),
    "where one stands still": lambda x: torch.where((x > 0)[:, None], M, x**3),
    "where infinity is masked": lambda x: torch.softmax(
        torch.where(M > 0, x[:, None] * x, torch.full_like(M, -math.inf)), 0
    ),
    "masked": lambda x: torch.softmax((x[:, None] * x).masked_fill(M > 0, -1e9), -1) @ x,
    "einsum": lambda x: torch.einsum("i,ij->j", x**2, M * x) * torch.einsum("i,i->", x, x),
    "norms": lambda x: x.norm() * functional.normalize(x[:, None] * M, dim=-1),
}


@pytest.mark.sampled(5, 16)
@pytest.mark.slow_at("norms")
@pytest.mark.parametrize("f", RULES.values(), ids=RULES)
def test_ordinary_operations_have_rules(f, monkeypatch):
    def curve(t):
        return f(Y + sum(c * t**k / math.factorial(k) for k, c in enumerate(TERMS, 1)))

    wanted, zero, one = [], 0 * Y[0], torch.ones_like(Y[0])
    for _ in TERMS:
        curve = (lambda g: lambda t: gt.jvp(g, (t,), (one,))[1])(curve)
        wanted.append(curve(zero))
    total = lambda x: f(x).sum()
    trace = lambda x: gt.hessian(total)(x).trace()
    expected = trace(Y), gt.grad(trace)(Y)
    monkeypatch.setattr(taylor._Operation, "any", None)  # nested forward mode
    value, series = gt.jet(f, (Y,), (TERMS,))
    torch.testing.assert_close(value, f(Y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(list(series), wanted, rtol=1e-9, atol=1e-10)
    found = gt.laplacian(total)(Y), gt.grad(gt.laplacian(total))(Y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_compiled_code_follows_the_rules():
    f = lambda x: torch.cat([rule(x).flatten() for rule in RULES.values()])

    def both(x):
        return *gt.jet(f, (x,), (TERMS[:2],))[1], gt.laplacian(lambda x: f(x).sum())(x)

    torch.testing.assert_close(torch.compile(both, backend="eager")(Y), both(Y))


def test_a_norm_at_zero_has_a_slope_of_zero():
    zero = torch.zeros(3, dtype=torch.float64)
    _, (first, second) = gt.jet(torch.linalg.vector_norm, (zero,), ([X, zero],))
    assert (first, second) == (0, 0)


@pytest.mark.parametrize("mode", ["forward_over_reverse", "reverse_over_reverse"])
@pytest.mark.parametrize(
    "norm", [functional.layer_norm, functional.rms_norm, lambda x, _: functional.group_norm(x, 3)]
)
def test_a_laplacian_of_a_norm_is_differentiated_in_every_mode(norm, mode):
    """Its plain program takes dual numbers apart, which is no operation on values."""
    x = torch.stack([X, X.sin()])
    f = lambda x: norm(x.cos(), (3,)).pow(3).sum()
    by_taylor = lambda x: gt.laplacian(f)(x) ** 2
    by_hessian = lambda x: gt.hessian(f)(x).reshape(6, 6).trace() ** 2
    product = gt.hvp(by_taylor, (x,), (x.exp(),), mode=mode)[1][0]
    torch.testing.assert_close(product, gt.hvp(by_hessian, (x,), (x.exp(),))[1][0])


def broken(x):
    raise ZeroDivisionError


@pytest.mark.parametrize("end", [torch.exp, stopped, broken])
def test_series_die_with_the_call(end):
    seen = []

    def f(x):
        y = torch.tanh(x)  # the graph of its series saves y itself
        seen.append(weakref.ref(y))
        return end(torch.sigmoid(y) * y)

    for call in (lambda: gt.jet(f, (X,), ((X, X),)), lambda: gt.laplacian(lambda x: f(x).sum())(X)):
        with pytest.raises(ZeroDivisionError) if end is broken else nullcontext():
            call()
    gc.collect()
    assert len(seen) > 1 and not [y for y in seen if y() is not None]
