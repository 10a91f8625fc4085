"""check_derivatives and check_rule pass what is right and name what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradtools import GradtoolsError
from gradtools.testing import AgreementError, check_derivatives, check_rule
from gradtools.testing.checking.slopes import slope

X = np.random.default_rng(1).normal(size=(3, 4))
Y = np.random.default_rng(2).normal(size=(3, 4))
ROW, Z, SINGLE = X[0], X[0] + 1j * Y[0], X.astype(np.float32)


def refused(check, *args, **kwargs):
    """The report of a check that fails."""
    with pytest.raises(AgreementError) as caught:
        check(*args, **kwargs)
    return caught.value.report


def quantities(report):
    return {c.quantity for c in report}


# --- what is right passes


def centred(gt, x):
    away = x - gt.xp.mean(x, axis=1, keepdims=True)
    return (away / gt.xp.sqrt(gt.xp.mean(away**2, axis=1, keepdims=True))).sum()


HEALTHY = {  # the program, and its arguments
    "a layer": (lambda gt, x, w: gt.xp.tanh(x @ w), X, Y.T),
    "a layer in float32": (lambda gt, x, w: gt.xp.tanh(x @ w), SINGLE, Y.T.astype(np.float32)),
    "a pytree with an integer": (
        lambda gt, d, n: {"a": gt.xp.sin(d["x"]) * d["y"] * n, "n": n},
        {"x": X, "y": np.float64(2)},
        np.int64(3),
    ),
    "the end of a domain": (lambda gt, x: gt.xp.log(x).sum(), np.array([1e-9, 1.0, 100.0])),
    "complex, not holomorphic": (
        lambda gt, z: (z * z * gt.xp.conj(z)).sum() + gt.xp.abs(z).sum(),
        X + 1j * Y,
    ),
    "complex64": (lambda gt, z: (z * z * gt.xp.conj(z)).sum(), (X + 1j * Y).astype(np.complex64)),
    "kinks on the way": (lambda gt, x: gt.xp.where(x > 0, x, 0 * x).sum(), X),
    "a linear function": (lambda gt, x: 3 * x, X),
    "tiny numbers": (lambda gt, x: (x**3).sum(), 1e-9 * X),
    "huge numbers": (lambda gt, x: (x**3).sum(), 1e9 * X),
    "tiny numbers in float32": (lambda gt, x: (x**2).sum(), 1e-9 * SINGLE),
    "a pole beside it": (lambda gt, x: (1 / x).sum(), np.array([0.01, -1.0, 2.0])),
    "an unused argument": (lambda gt, x, y: x**2 + 0, X, Y),
    "zero but for rounding": (centred, X),
    "zero but for rounding in float32": (centred, SINGLE),
    "a kink beside a large constant": (
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
        "reverse of -4096 cotangents | -4096 times it",
        "reverse of a sum of cotangents | sum",
        "forward of -4096 tangents | -4096 times it",
        "forward of a sum of tangents | sum",
        "forward over reverse | finite differences",
        "reverse over reverse | finite differences",
        "reverse over forward | finite differences",
        "forward over reverse | reverse over reverse",
        "forward over forward | reverse over forward",
        "forward over reverse: <w, H u> | <u, H w>",
    } <= quantities(report)
    assert 0 <= report.worst.error < 1
    assert all(c.order == 1 for c in check_derivatives(lambda x: x**3, (X,), gt, order=1))


@pytest.mark.sweep_at("jax")
def test_a_kink_under_foot_takes_any_slope_between(gt):
    report = check_derivatives(lambda x: gt.xp.abs(x).sum(), (np.array([0.0, 1.0]),), gt)
    assert report and all(c.cause == "a kink" for c in report.conventions)


@pytest.mark.sweep_at("jax")
def test_double_precision_is_on_for_the_check_alone(gt, backend_name, default_precision):
    seen = []

    def f(x):
        seen.append(str(x.dtype))
        return x**2

    assert check_derivatives(f, (X,), backend_name)
    assert all("float64" in name for name in seen)
    if backend_name == "jax":
        import jax

        assert not jax.config.jax_enable_x64


# --- what is wrong is named


@dataclass(frozen=True)
class Wrong:
    """A program with a wrong derivative: the first comparison that fails, its leaf and cause."""

    f: Any
    args: tuple[Any, ...]
    quantity: str
    cause: str
    path: str = "argument 0"
    options: dict[str, Any] = field(default_factory=lambda: {"order": 1})


def ruled(gt, fun, bwd=None, jvp=None):
    """A custom rule that saves its arguments."""
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
UNSEEN = {"order": 1, "numeric": False}
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
    "a factor of complex numbers": Wrong(
        lambda gt: lambda z: gt.xp.abs(gt.scale_gradient(z, 3.0) - (1 + 2j)).sum(),
        (Z,),
        REVERSE,
        "constant factor 3",
        options={"order": 1, "modes": ("reverse",)},
    ),
    "a conjugate": Wrong(
        lambda gt: lambda z: gt.xp.abs(gt.transform_gradient(z, gt.xp.conj) - (1 + 2j)) ** 2,
        (Z,),
        REVERSE,
        "",
    ),
    "the sixth digit": Wrong(
        lambda gt: lambda x: gt.xp.exp(gt.scale_gradient(x, 1 + 1e-6)).sum(),
        (X,),
        FORWARD,
        "",
        "output by argument 0",
    ),
    "as small as rounding": Wrong(
        lambda gt: ruled(
            gt,
            lambda x: 1e-15 * (x**2).sum(),
            lambda res, ct: (3e-15 * ct * res[0],),
            lambda p, t: (1e-15 * (p[0] ** 2).sum(), 2e-15 * (p[0] * t[0]).sum()),
        ),
        (X,),
        "reverse | forward",
        "the dot-product test fails",
        options=UNSEEN,
    ),
    "zero beside a large constant": Wrong(
        lambda gt: ruled(
            gt, lambda x: 1e3 + 1e-6 * (x**2).sum(), lambda res, ct: (0 * ct * res[0],)
        ),
        (ROW,),
        FORWARD,
        "the derivative is zero",
        "output by argument 0",
    ),
    "no adjoint": Wrong(
        lambda gt: ruled(
            gt,
            lambda x: x**2,
            lambda res, ct: (3 * res[0] * ct,),
            lambda p, t: (p[0] ** 2, 2 * p[0] * t[0]),
        ),
        (ROW,),
        "reverse | forward",
        "the dot-product test fails: the two modes are not adjoint",
        options=UNSEEN,
    ),
    "no symmetric Hessian": Wrong(
        lambda gt: ruled(
            gt,
            lambda x: (x**2).sum(),
            lambda res, ct: (ct * gt.xp.concat([res[0][1:], 0 * res[0][:1]]),),
        ),
        (ROW,),
        "reverse over reverse: <w, H u> | <u, H w>",
        "the Hessian is not symmetric",
        "all arguments",
        {"numeric": False, "modes": ("reverse", "reverse_over_reverse")},
    ),
    "two mixes of modes": Wrong(
        two_mixes,
        (ROW,),
        "forward over reverse | reverse over reverse",
        "two mixes of modes differ",
        options={"numeric": False},
    ),
    "homogeneous but not additive": Wrong(
        lambda gt: lambda x: gt.transform_gradient(x, lambda c: c**3 / (c**2).sum()),
        (X,),
        "reverse of a sum of cotangents | sum",
        "not linear in the cotangent",
        options=UNSEEN,
    ),
    "not linear": Wrong(
        lambda gt: lambda x: gt.clip_gradient(x, max_value=1.5),
        (X,),
        "reverse of -4096 cotangents | -4096 times it",
        "not linear in the cotangent",
    ),
    "NaN": Wrong(
        lambda gt: lambda x: (gt.xp.sqrt(x) * gt.xp.sqrt(x)).sum(),
        (np.array([0.0, 1.0]),),
        FORWARD,
        "the derivative is not finite",
        "output by argument 0",
    ),
    "beside the edge of a domain": Wrong(
        lambda gt: lambda x: gt.scale_gradient(gt.xp.sqrt(x), 2.0),
        (np.array([0.0, 1.0, 4.0]),),
        FORWARD,
        "constant factor 2",
        "output by argument 0",
        {"order": 1, "modes": ("forward",)},
    ),
    "beside an output that is NaN": Wrong(
        lambda gt: lambda x, y: gt.xp.log(x) * gt.scale_gradient(y, 3.0),
        (np.array([-1.0, 2.0]), np.array([1.0, 2.0])),
        REVERSE,
        "constant factor 3",
        "argument 1",
        {"order": 1, "modes": ("reverse",)},
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


@pytest.mark.sweep_at("jax")
def test_an_edit_is_checked_without_its_values(gt):
    f = lambda x: (gt.reverse_gradient(x) ** 2).sum()
    refused(check_derivatives, f, (X,), gt)
    assert check_derivatives(f, (X,), gt, numeric=False)


def wrong_at_second_order(backend_name):
    """x -> exp(x) whose rule saves its output, detached."""
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
    assert first.cause.startswith("right at first order, wrong at second")


@pytest.mark.sweep_at("jax")
def test_a_mode_that_f_lacks_is_left_out_or_refused_if_asked_for(gt):
    f = lambda x: gt.transform_gradient(x, lambda c: 1.0 * c) ** 2
    report = check_derivatives(f, (X,), gt)
    assert report and any(reason.startswith("forward mode: ") for reason in report.left_out)
    assert "reverse over reverse | finite differences" in quantities(report)
    with pytest.raises(GradtoolsError, match="forward mode: "):
        check_derivatives(f, (X,), gt, modes=("forward",))


def test_a_broken_rule_is_not_taken_for_a_missing_mode(gt):
    def broken(c):
        raise KeyError("the user's own mistake")

    f = lambda x: gt.transform_gradient(x, broken) ** 2
    with pytest.raises((GradtoolsError, KeyError), match="the user's own mistake"):
        check_derivatives(f, (X,), gt)


def noisy():
    rng = np.random.default_rng(0)
    return lambda x: x * float(rng.normal())


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"args": X}, r"args must be a tuple .* got a ndarray"),
        ({"args": ()}, "args must be a tuple .* an empty one"),
        ({"args": (np.arange(3),)}, "no argument holds a floating or complex array"),
        ({"backend": "numpy"}, "backend is 'numpy'; expected"),
        ({"order": 3}, "order is 3; expected 1 or 2"),
        ({"modes": ("sideways",)}, "modes is .*sideways.*; expected a tuple of forward, reverse"),
        ({"f": 3}, "f must be a function, got 3"),
        ({"f": lambda x: None}, "f returned no floating or complex array"),
        ({"f": noisy()}, r"two calls of f .* different values"),
    ],
)
def test_wrong_arguments_are_refused_in_words(gt, kwargs, words):
    given = {"f": lambda x: x, "args": (X,), "backend": gt, **kwargs}
    with pytest.raises(GradtoolsError, match=words):
        check_derivatives(**given)


# --- where finite differences cannot decide

HILBERT = 1 / (np.arange(6)[:, None] + np.arange(6) + 1.0)
UNDECIDED = {
    "the edge of a domain": (lambda gt, x: gt.xp.sqrt(x), np.array([0.0, 1.0])),
    "a slope that drowns in rounding": (lambda gt, x: x.sum() + 1e17, np.ones(2)),
    "another function in smaller steps": (
        lambda gt, a, b: gt.xp.linalg.solve(a, b[:, None]),
        HILBERT,
        X.ravel()[:6],
    ),
    "a stop that drowns in rounding": (
        lambda gt, x: 1e3 + gt.stop_gradient(1e-2 * (x**2).sum()) + 0 * x.sum(),
        SINGLE[0],
    ),
}


@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("name", UNDECIDED)
def test_what_finite_differences_cannot_decide_is_said(gt, name):
    f, *args = UNDECIDED[name]
    seed = 2 if "stop" in name else 0  # another direction tells that it is wrong
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


# --- check_rule; `tests/both/test_rule_mistakes.py` has forty mistakes


@pytest.fixture
def product(gt):
    """The parts of (x, y) -> x exp(y), and what makes a rule of them."""
    exp = gt.xp.exp
    fun = lambda x, y: x * exp(y)

    def rule(**parts):
        made = gt.custom_rule(fun)
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    return SimpleNamespace(
        exp=exp,
        fun=fun,
        rule=rule,
        fwd=lambda x, y: (fun(x, y), (x, exp(y))),
        bwd=lambda res, ct: (ct * res[1], ct * res[0] * res[1]),
        jvp=lambda p, t: (fun(*p), t[0] * exp(p[1]) + p[0] * exp(p[1]) * t[1]),
    )


@pytest.mark.sweep_at("jax")
def test_a_right_rule_passes(gt, product):
    rule = product.rule(fwd=product.fwd, bwd=product.bwd, jvp=product.jvp)
    report = check_rule(rule, (X, Y), gt)
    assert report and not report.left_out
    assert {
        "fwd's value | fun's value",
        "bwd | finite differences",
        "jvp | finite differences",
        "bwd | jvp",
        "residual | finite differences",
        "forward mode over bwd | finite differences",
        "forward mode over jvp | finite differences",
    } <= quantities(report)


@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("part", ["residual", "bwd", "jvp"])
def test_what_is_taken_as_constant_at_second_order_is_named(gt, product, part):
    exp, stop = product.exp, gt.stop_gradient
    fwd = lambda x, y: (product.fun(x, y), (x, stop(exp(y))))
    bwd = lambda res, ct: (ct * stop(res[1]), ct * res[0] * res[1])
    jvp = lambda p, t: (product.fun(*p), t[0] * exp(stop(p[1])) + p[0] * exp(p[1]) * t[1])
    rule, path, cause = {
        "residual": (
            product.rule(fwd=fwd, bwd=product.bwd),
            "residual [1] by argument 1",
            "a residual's derivative is lost",
        ),
        "bwd": (
            product.rule(fwd=product.fwd, bwd=bwd),
            "bwd's cotangent of argument 0 by argument 1",
            "right at first order, wrong at second",
        ),
        "jvp": (
            product.rule(jvp=jvp),
            "jvp's tangent of output by argument 1",
            "right at first order, wrong at second",
        ),
    }[part]
    first = refused(check_rule, rule, (X, Y), gt).first
    assert first.path == path and first.cause.startswith(cause)
    assert check_rule(rule, (X, Y), gt, order=1)


@pytest.mark.slow_at("jax")
def test_rules_that_disagree_are_named(gt, product):
    jvp = lambda p, t: (product.fun(*p), t[0] * product.exp(p[1]))
    report = refused(
        check_rule, product.rule(fwd=product.fwd, bwd=product.bwd, jvp=jvp), (X, Y), gt
    )
    named = {(c.quantity, c.path) for c in report.disagreements}
    assert ("jvp | finite differences", "output by argument 1") in named
    assert ("bwd | jvp", "argument 1") in named
    assert ("bwd | finite differences", "argument 1") not in named


@pytest.mark.sweep_at("jax")
def test_static_arguments_and_integers_are_no_arguments_of_the_derivative(gt):
    times = gt.custom_rule(lambda x, n: x * n)
    times.defvjp(lambda x, n: (x * n, n), lambda n, ct: (ct * n, None))
    assert check_rule(times, (X, np.int64(3)), gt)
    power = gt.custom_rule(lambda x, power: x**power, "power")
    power.defvjp(
        lambda power, x: (x**power, x), lambda power, x, ct: (power * ct * x ** (power - 1),)
    )
    assert check_rule(power, (X, 3), gt)


def test_a_plain_function_is_no_rule(gt):
    with pytest.raises(GradtoolsError, match="got a function, which is no rule"):
        check_rule(lambda x: x, (X,), gt)


# --- slopes, against closed forms


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
