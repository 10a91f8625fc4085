"""Tests `checked` with autograd.Functions at kinks, at ties and in low precision.

Each case of the table differentiates one function at one point in one dtype, with `grad` and `hvp`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from gradtools.testing import checked

torch = pytest.importorskip("torch")

import gradtools.torch as gt  # noqa: E402


def function(forward: Any, backward: Any) -> Any:
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx, g):
            return backward(ctx.saved_tensors[0], g)

    return Made.apply


def _softmax_backward(x: Any, g: Any) -> Any:
    s = x.softmax(-1)
    return s * (g - (g * s).sum(-1, keepdim=True))


FUNCTIONS = {
    "squared ReLU": function(lambda x: x.clamp(min=0) ** 2, lambda x, g: 2 * g * x.clamp(min=0)),
    "Huber": function(
        lambda x: torch.where(x.abs() < 1, x * x / 2, x.abs() - 0.5),
        lambda x, g: g * x.clamp(-1, 1),
    ),
    "softmax": function(lambda x: x.softmax(-1), _softmax_backward),
    "ReLU": function(lambda x: x.clamp(min=0), lambda x, g: g * (x > 0)),
    "ReLU with slope 1 at 0": function(lambda x: x.clamp(min=0), lambda x, g: g * (x >= 0)),
    "absolute value": function(lambda x: x.abs(), lambda x, g: g * x.sign()),
    "sort": lambda x: x.sort(-1)[0],
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
}
_G = torch.Generator().manual_seed(0)
_N = torch.randn(4, 5, generator=_G)
POINTS = {
    "normal": _N,
    "exact zeros": _N.relu(),
    "zeros": torch.zeros(4, 5),
    "ones": torch.ones(4, 5),
    "integers": torch.randint(-2, 3, (4, 5), generator=_G).float(),
    "a mask": _N + torch.tensor([0.0, 0.0, 0.0, -1e9, -1e9]),
    "hundreds": 100 * _N,
    "tiny": 1e-6 * _N,
}
DTYPES = {str(d)[6:]: d for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
CASES = [*product(FUNCTIONS, POINTS, DTYPES)]


@pytest.mark.sampled(40, 448)
@pytest.mark.parametrize(("name", "point", "dtype"), CASES)
def test_no_alarm_is_raised_at_right_code(name, point, dtype):
    torch.manual_seed(0)
    f, x = FUNCTIONS[name], POINTS[point].to(DTYPES[dtype])
    loss = lambda x: (f(x) ** 2).sum()
    with checked():
        gt.grad(lambda x: f(x).sum())(x)
        gt.grad(loss)(x)
        gt.hvp(loss, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize(("name", "point"), [("absolute value", "exact zeros"), ("sort", "ones")])
def test_a_derivative_at_a_kink_or_a_tie_is_no_error(name, point):
    f, x = FUNCTIONS[name], POINTS[point].double()
    with checked() as report:
        gt.hvp(lambda x: (f(x) ** 2).sum(), (x,), (torch.ones_like(x),))
        gt.grad(lambda x: (f(x) * torch.arange(1.0, 1 + f(x).shape[-1])).sum())(x)
    assert report.compared == 3


def test_large_numbers_move_by_hundreds_at_most():
    x = POINTS["a mask"].double()
    with checked() as report:
        gt.grad(lambda x: (x * 1e-3).sin().sum())(x)
    assert report.compared == 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gross_fault_is_named_in_coarse_dtypes(dtype):
    from gradtools.testing import DerivativeError

    reversal = function(lambda x: x.sin(), lambda x, g: -g * x.cos())
    x = POINTS["normal"].to(DTYPES[dtype])
    with pytest.raises(DerivativeError), checked():
        gt.grad(lambda x: reversal(x).sum())(x)


def test_a_derivative_of_nan_is_named_where_differences_are_finite():
    from gradtools.testing import DerivativeError

    x = POINTS["exact zeros"].double()
    with pytest.raises(DerivativeError, match="it is nan, and central differences"), checked():
        gt.grad(lambda x: torch.where(x > 0, x.sqrt() * x, 0 * x).sum())(x)


def test_a_fault_at_a_kink_is_named_nearby():
    from gradtools.testing import DerivativeError

    kinked = FUNCTIONS["ReLU with slope 1 at 0"]
    wrong = function(lambda x: x.sin(), lambda x, g: 1.5 * g * x.cos())
    with pytest.raises(DerivativeError, match="argument 0"), checked():
        gt.grad(lambda x: (kinked(x) + wrong(x)).sum())(POINTS["zeros"].double())


def test_a_derivative_that_differences_do_not_resolve_is_counted_as_not_compared():
    with checked() as report:
        gt.grad(lambda x: (1e9 * x).cos().sum())(POINTS["normal"])
    assert (report.compared, dict(report.skipped)) == (
        0,
        {"inconclusive because of rounding noise": 1},
    )
