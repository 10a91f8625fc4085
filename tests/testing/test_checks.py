"""check_derivatives accepts correct programs and reports wrong derivatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gradtools.testing import AgreementError, check_derivatives
from gradtools.testing.checking.slopes import slope

X = np.random.default_rng(1).normal(size=(3, 4))
Y = np.random.default_rng(2).normal(size=(3, 4))
ROW, SINGLE = X[0], X.astype(np.float32)


def refused(check, *args, **kwargs):
    """Return the report in the error that a failing check raises."""
    with pytest.raises(AgreementError) as caught:
        check(*args, **kwargs)
    return caught.value.report


def quantities(report):
    return {c.quantity for c in report}


# --- correct programs pass


def centred(gt, x):
    away = x - gt.xp.mean(x, axis=1, keepdims=True)
    return (away / gt.xp.sqrt(gt.xp.mean(away**2, axis=1, keepdims=True))).sum()


HEALTHY = {  # Each entry contains a program and its arguments.
    "a layer": (lambda gt, x, w: gt.xp.tanh(x @ w), X, Y.T),
    "a layer in float32": (lambda gt, x, w: gt.xp.tanh(x @ w), SINGLE, Y.T.astype(np.float32)),
    "a pytree with an integer": (
        lambda gt, d, n: {"a": gt.xp.sin(d["x"]) * d["y"] * n, "n": n},
        {"x": X, "y": np.float64(2)},
        np.int64(3),
    ),
    "the boundary of a domain": (lambda gt, x: gt.xp.log(x).sum(), np.array([1e-9, 1.0, 100.0])),
    "complex, not holomorphic": (
        lambda gt, z: (z * z * gt.xp.conj(z)).sum() + gt.xp.abs(z).sum(),
        X + 1j * Y,
    ),
    "a linear function": (lambda gt, x: 3 * x, X),
    "tiny numbers": (lambda gt, x: (x**3).sum(), 1e-9 * X),
    "huge numbers": (lambda gt, x: (x**3).sum(), 1e9 * X),
    "an unused argument": (lambda gt, x, y: x**2 + 0, X, Y),
    "zero up to rounding": (centred, X),
    "kinks of many outputs": (lambda gt, x: gt.xp.clip(x, -1, 1), np.array([1.0, -1.0, 0.5, 3.0])),
    "a kink of the gradient": (lambda gt, x: gt.xp.abs(x) * x, np.array([0.0, 1.0, 0.0])),
    "a kink plus a large constant": (
        lambda gt, x: 1e3 + 1e-6 * gt.xp.abs(x).sum(),
        np.array([0.0, 1.0, -2.0]),
    ),
}


@pytest.mark.sampled(torch=(16, 16), jax=(3, 8))
@pytest.mark.parametrize("name", HEALTHY)
def test_a_right_derivative_passes(gt, name):
    f, *args = HEALTHY[name]
    assert check_derivatives(lambda *xs: f(gt, *xs), tuple(args), gt)


@pytest.mark.sweep_at("jax")
def test_every_mode_and_property_is_compared(gt):
    report = check_derivatives(lambda x: x**3, (X,), gt)
    assert {
        "forward | finite differences",
        "reverse | finite differences",
        "reverse | forward",
        "reverse of a sum of cotangents | the sum of the results",
        "forward of a sum of tangents | the sum of the results",
        "forward over reverse | finite differences",
        "reverse over reverse | finite differences",
        "reverse over forward | finite differences",
        "forward over forward | finite differences",
    } <= quantities(report)
    assert 0 <= report.worst.error < 1
    assert all(c.order == 1 for c in check_derivatives(lambda x: x**3, (X,), gt, order=1))


@pytest.mark.sweep_at("jax")
def test_a_kink_under_foot_takes_any_slope_between(gt):
    report = check_derivatives(lambda x: gt.xp.abs(x).sum(), (np.array([0.0, 1.0]),), gt)
    assert report and all(c.cause == "a kink" for c in report.conventions)


# --- errors are named


@dataclass(frozen=True)
class Wrong:
    """A program with a wrong derivative, and the quantity, leaf and cause that the report names."""

    f: Any
    args: tuple[Any, ...]
    quantity: str
    cause: str
    path: str = "argument 0"
    options: dict[str, Any] = field(default_factory=lambda: {"order": 1})


def ruled(gt, fun, bwd=None, jvp=None):
    """Return a custom rule that saves its arguments as residuals."""
    f = gt.custom_rule(fun)
    if jvp:
        f.defjvp(jvp)
    if bwd:
        f.defvjp(lambda *xs: (fun(*xs), xs), bwd)
    return f


def two_mixes(gt):
    slope = ruled(
        gt,
        lambda x: 3 * x**2,
        lambda res, ct: (6 * res[0] * ct,),
        lambda p, t: (3 * p[0] ** 2, 12 * p[0] * t[0]),
    )
    return ruled(gt, lambda x: x**3, lambda res, ct: (slope(res[0]) * ct,))


FORWARD, REVERSE = "forward | finite differences", "reverse | finite differences"
WRONG = {
    "a stop": Wrong(
        lambda gt: lambda x, y: (gt.stop_gradient(x["a"]) * y).sum(),
        ({"a": X}, Y),
        FORWARD,
        "the derivative is zero: a gradient is stopped",
        "output by argument 0['a']",
    ),
    "a factor": Wrong(
        lambda gt: lambda x, y: (gt.scale_gradient(x, 2.0) * y).sum(),
        (X, Y),
        REVERSE,
        "constant factor 2",
        options={"modes": ("reverse", "reverse_over_reverse")},
    ),
    "a factor at a kink": Wrong(
        lambda gt: lambda x: gt.scale_gradient(gt.xp.where(x > 0, x, 0 * x), 1.02),
        (np.zeros(4),),
        FORWARD,
        "",
        "output by argument 0",
    ),
    "a factor wrong in the sixth digit": Wrong(
        lambda gt: lambda x: gt.xp.exp(gt.scale_gradient(x, 1 + 1e-6)).sum(),
        (X,),
        FORWARD,
        "",
        "output by argument 0",
    ),
    "two mixes of modes": Wrong(
        two_mixes,
        (ROW,),
        "forward over reverse | finite differences",
        "correct at first order, wrong at second order",
        options={},
    ),
    "not linear": Wrong(
        lambda gt: lambda x: gt.clip_gradient(x, max_value=1.5),
        (X,),
        "reverse of a sum of cotangents | the sum of the results",
        "not linear in the cotangent",
    ),
    "NaN": Wrong(
        lambda gt: lambda x: (gt.xp.sqrt(x) * gt.xp.sqrt(x)).sum(),
        (np.array([0.0, 1.0]),),
        FORWARD,
        "the derivative is not finite",
        "output by argument 0",
    ),
    "next to the edge of a domain": Wrong(
        lambda gt: lambda x: gt.scale_gradient(gt.xp.sqrt(x), 2.0),
        (np.array([0.0, 1.0, 4.0]),),
        FORWARD,
        "constant factor 2",
        "output by argument 0",
        {"order": 1, "modes": ("forward",)},
    ),
}


@pytest.mark.sampled(torch=(16, 16), jax=(3, 8))
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_derivative_is_named(gt, name):
    wrong = WRONG[name]
    first = refused(check_derivatives, wrong.f(gt), wrong.args, gt, **wrong.options).first
    assert (first.quantity, first.path) == (wrong.quantity, wrong.path)
    assert first.cause.startswith(wrong.cause)
    if "finite differences" in first.quantity:
        assert "Analytic" in first.detail and "numeric" in first.detail


def wrong_at_second_order(backend_name):
    """Return exp with a rule that saves its output detached, so second derivatives are wrong."""
    if backend_name == "torch":
        import torch

        class Exp(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.y = x.exp().detach()
                return x.exp()

            @staticmethod
            def backward(ctx, ct):
                return ct * ctx.y

        return Exp.apply
    import jax

    stopped = lambda x: jax.lax.stop_gradient(jax.numpy.exp(x))
    exp = jax.custom_vjp(jax.numpy.exp)
    exp.defvjp(lambda x: (jax.numpy.exp(x), stopped(x)), lambda y, ct: (ct * y,))
    return exp


@pytest.mark.sweep_at("jax")
def test_a_rule_right_at_first_and_wrong_at_second_order_is_refused(gt, backend_name):
    f = wrong_at_second_order(backend_name)
    loss = lambda x, y: (f(x) * y).sum()
    assert check_derivatives(loss, (X, Y), gt, order=1)
    first = refused(check_derivatives, loss, (X, Y), gt).first
    assert (first.order, first.path) == (2, "argument 0")
    assert first.quantity == "reverse over reverse | finite differences"
    assert first.cause.startswith("correct at first order, wrong at second order")


# --- cases that finite differences cannot decide

HILBERT = 1 / (np.arange(6)[:, None] + np.arange(6) + 1.0)
UNDECIDED = {
    "the edge of a domain": (lambda gt, x: gt.xp.sqrt(x), np.array([0.0, 1.0])),
    "a slope below the rounding error": (lambda gt, x: x.sum() + 1e17, np.ones(2)),
    "a different function at smaller steps": (
        lambda gt, a, b: gt.xp.linalg.solve(a, b[:, None]),
        HILBERT,
        X.ravel()[:6],
    ),
    "a stopped term below the rounding error": (
        lambda gt, x: 1e3 + gt.stop_gradient(1e-2 * (x**2).sum()) + 0 * x.sum(),
        SINGLE[0],
    ),
}


@pytest.mark.sweep_at("jax")
def test_the_reason_for_a_mode_left_out_is_whole_and_public(gt, backend_name):
    f = lambda x: gt.xp.sum(gt.clip_gradient(x, max_norm=1e9) ** 2)
    report = check_derivatives(f, (np.array([1.0, 2.0]),), backend_name, order=1)
    [reason] = report.left_out
    assert reason.startswith("forward mode: ") and reason.endswith(".")
    assert "Refusal" not in reason and "mode='reverse'" in reason


def test_a_tangent_that_pytorch_cannot_differentiate_is_left_out():
    torch = pytest.importorskip("torch")
    f = lambda x: torch.nn.functional.cross_entropy(x, torch.tensor([0, 1]))
    report = check_derivatives(f, (np.linspace(-1, 1, 6).reshape(2, 3),), "torch")
    assert report and any("reverse over forward mode" in line for line in report.left_out)


def test_a_nan_of_second_order_is_not_told_as_a_constant(gt, backend_name):
    square = gt.custom_rule(lambda x: x**2)
    nothing = lambda x: 0 * gt.xp.sqrt((x - 1) ** 2)  # the derivative is NaN at 1
    square.defvjp(lambda x: (x**2, x), lambda x, ct: (ct * (2 * x + nothing(x)),))
    f = lambda x: gt.xp.sum(square(x))
    first = refused(check_derivatives, f, (np.array([1.0, 2.0]),), backend_name).first
    assert first.cause.startswith("correct at first order, wrong at second order")
    assert "Analytic nan" in first.detail and "constant" not in first.detail


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_finite_differences_cannot_decide_is_said(gt, name):
    f, *args = UNDECIDED[name]
    # with the directions of seed 0, finite differences detect the stopped gradient
    seed = 2 if "stop" in name else 0
    report = check_derivatives(lambda *xs: f(gt, *xs), tuple(args), gt, order=1, seed=seed)
    undecided = [x for x in report.left_out if "finite differences cannot decide" in x]
    assert report and undecided
    assert name != "the edge of a domain" or all("1 of 2 entries" in x for x in undecided)


@pytest.mark.sweep_at("jax")
def test_two_modes_whose_products_are_nan_are_said_not_to_be_compared(gt):
    f = lambda x: gt.xp.sqrt(x).sum() + gt.xp.sqrt(2 * x).sum()
    report = refused(check_derivatives, lambda x: f(x) - f(x), (np.array([0.0, 1.0]),), gt, order=1)
    said = [r for r in report.left_out if r.startswith("reverse | forward") and "NaN" in r]
    assert len(said) == 1


# --- the finite-difference derivative against closed forms


@pytest.mark.parametrize("eps", [2.0**-52, 2.0**-23])
def test_slopes_keep_half_of_the_digits_and_know_it(eps):
    dtype = np.float64 if eps < 1e-10 else np.float32
    f = lambda t: np.sin(np.array([1.0, 2.0, 30.0]) + dtype(t)).astype(dtype).astype(np.float64)
    found = slope(f, eps)
    off = np.abs(found.value - np.cos([1.0, 2.0, 30.0]))
    assert np.all(off <= 10 * found.error + 1e-15) and np.all(off < 40 * np.sqrt(eps))
    assert np.all(found.error < 40 * np.sqrt(eps))


def test_steps_shrink_until_they_stay_in_the_domain():
    found = slope(lambda t: np.log(np.array([1e-9 + t])), 2.0**-52)
    assert found.value == pytest.approx(1e9, rel=1e-3)
