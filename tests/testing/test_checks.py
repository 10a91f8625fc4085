"""check_derivatives and check_rule pass what is right and name what is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gradtools import GradtoolsError
from gradtools.testing import AgreementError, check_derivatives, check_rule
from gradtools.testing.checking.slopes import find_jump, slope

X = np.random.default_rng(1).normal(size=(3, 4))
Y = np.random.default_rng(2).normal(size=(3, 4))


def refused(check, *args, **kwargs):
    """The report of a check that fails."""
    with pytest.raises(AgreementError) as caught:
        check(*args, **kwargs)
    return caught.value.report


def quantities(report):
    return {c.quantity for c in report}


# --- what is right passes

HEALTHY = {
    "a network's layer": (lambda xp: lambda x, w: xp.tanh(x @ w), (X, Y.T)),
    "its float32": (
        lambda xp: lambda x, w: xp.tanh(x @ w),
        (X.astype(np.float32), Y.T.astype(np.float32)),
    ),
    "a pytree with an integer": (
        lambda xp: lambda d, n: {"a": xp.sin(d["x"]) * d["y"] * n, "n": n},
        ({"x": X, "y": np.float64(2)}, np.int64(3)),
    ),
    "a logarithm near the end of its domain": (
        lambda xp: lambda x: xp.log(x).sum(),
        (np.array([1e-9, 1.0, 100.0]),),
    ),
    "complex numbers, not holomorphic": (
        lambda xp: lambda z: (z * z * xp.conj(z)).sum() + xp.abs(z).sum(),
        (X + 1j * Y,),
    ),
    "complex64": (
        lambda xp: lambda z: (z * z * xp.conj(z)).sum(),
        ((X + 1j * Y).astype(np.complex64),),
    ),
    "kinks on the way": (lambda xp: lambda x: xp.where(x > 0, x, 0 * x).sum(), (X,)),
    "a maximum": (lambda xp: lambda x: xp.max(x) + (x**2).sum(), (X,)),
    "a linear function": (lambda xp: lambda x: 3 * x, (X,)),
    "tiny numbers": (lambda xp: lambda x: (x**3).sum(), (1e-9 * X,)),
    "huge numbers": (lambda xp: lambda x: (x**3).sum(), (1e9 * X,)),
    "tiny numbers in float32": (
        lambda xp: lambda x: (x**2).sum(),
        (1e-9 * X.astype(np.float32),),
    ),
    "a pole beside it": (lambda xp: lambda x: (1 / x).sum(), (np.array([0.01, -1.0, 2.0]),)),
    "a root near zero": (lambda xp: lambda x: xp.sqrt(x).sum(), (np.array([1e-7, 1.0, 4.0]),)),
    "an argument that does not reach the output": (lambda xp: lambda x, y: x**2 + 0, (X, Y)),
}


@pytest.mark.slow_at("float64", "jax")
@pytest.mark.sweep_at(("float64", "jax"))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_zero_but_for_rounding_passes(gt, dtype):
    def centred(x):
        away = x - gt.xp.mean(x, axis=1, keepdims=True)
        return (away / gt.xp.sqrt(gt.xp.mean(away**2, axis=1, keepdims=True))).sum()

    assert check_derivatives(centred, (X.astype(dtype),), gt)


@pytest.mark.slow_at("jax")
def test_a_rule_that_is_as_small_as_rounding_and_wrong_is_refused(gt):
    f = gt.custom_rule(lambda x: 1e-15 * (x**2).sum())
    f.defjvp(lambda p, t: (f(p[0]), 2e-15 * (p[0] * t[0]).sum()))
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (3e-15 * ct * x,))
    report = refused(check_derivatives, f, (X,), gt, order=1, numeric=False)
    assert report.first.quantity == "reverse | forward"


@pytest.mark.slow_at("0.0", "jax")
@pytest.mark.sweep_at(("0.0", "jax"))
@pytest.mark.parametrize("factor", [0.0, 4.0])
def test_rounding_beside_a_large_constant_is_no_kink(gt, factor):
    f = gt.custom_rule(lambda x: 1e3 + 1e-6 * (x**2).sum())
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (factor * 1e-6 * ct * x,))
    refused(check_derivatives, f, (X[0],), gt, order=1)


@pytest.mark.slow_at("jax")
def test_a_kink_beside_a_large_constant_passes(gt):
    f = lambda x: 1e3 + 1e-6 * gt.xp.abs(x).sum()
    assert check_derivatives(f, (np.array([0.0, 1.0, -2.0]),), gt, order=1)


@pytest.mark.sweep_at("jax")
def test_every_mode_and_property_is_compared(gt):
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
    } <= quantities(check_derivatives(lambda x: x**3, (X,), gt))


@pytest.mark.slow_at("jax")
def test_order_one_takes_no_second_derivative(gt):
    report = check_derivatives(lambda x: x**3, (X,), gt, order=1)
    assert all(c.order == 1 for c in report)


@pytest.mark.sweep_at("jax")
def test_the_error_of_what_agrees_is_a_share_of_its_tolerance(gt):
    report = check_derivatives(lambda x: gt.xp.exp(x), (X.astype(np.float32),), gt)
    assert 0 < report.worst.error < 1


@pytest.mark.sweep_at("jax")
def test_a_kink_under_foot_takes_any_slope_between(gt):
    report = check_derivatives(lambda x: gt.xp.abs(x).sum(), (np.array([0.0, 1.0]),), gt)
    assert report
    assert all(c.cause == "a kink" for c in report.conventions)


@pytest.mark.sweep_at("jax")
def test_arrays_of_the_backend_and_its_name_do_as_well(gt, backend_name):
    x = gt.asarray(X.astype(np.float32))
    assert check_derivatives(lambda x: x**2, (x,), backend_name)


@pytest.mark.sweep_at("jax")
def test_double_precision_is_on_for_the_check_alone(gt, backend_name, default_precision):
    seen = []

    def f(x):
        seen.append(str(x.dtype))
        return x**2

    assert check_derivatives(f, (X,), gt)
    assert all("float64" in name for name in seen)
    if backend_name == "jax":
        import jax

        assert not jax.config.jax_enable_x64


# --- what is wrong is named

STAIRCASES = {
    "round": (lambda xp: lambda x: xp.round(x).sum(), (X,)),
    "round of small numbers": (lambda xp: lambda x: xp.round(x).sum(), (np.array([0.2, 0.01]),)),
    "round in float32": (lambda xp: lambda x: xp.round(8 * x), (X.astype(np.float32),)),
    "argmax indexing": (lambda xp: lambda x, t: t[xp.argmax(x)] + 0 * x.sum(), (X[0], Y[0])),
    "a comparison": (lambda xp: lambda x: xp.where(x > 0.5, 1.0, 0.0 * x).mean(), (X,)),
}


@pytest.mark.slow_at("jax", "argmax indexing", "a comparison")
@pytest.mark.sweep_at(("jax", "argmax indexing"), ("jax", "a comparison"))
@pytest.mark.parametrize("name", STAIRCASES)
def test_a_staircase_is_refused(gt, name):
    f, args = STAIRCASES[name]
    first = refused(check_derivatives, f(gt.xp), args, gt).first
    assert first.path == "argument 0"
    assert first.cause == "a staircase: the derivative is zero, the function jumps"
    assert first.first == 0 and first.second != 0
    assert "straight_through" in first.detail


@pytest.mark.slow_at("jax")
def test_a_staircase_under_a_slope_is_refused(gt):
    report = refused(check_derivatives, lambda x: x.sum() + gt.xp.round(20 * x).sum(), (X,), gt)
    assert report.cause == "f jumps, and its derivative leaves that out"


@pytest.mark.sweep_at("jax")
def test_a_sawtooth_passes_where_jumps_are_meant(gt):
    f = lambda x: (x - gt.stop_gradient(gt.xp.floor(x))).sum()
    refused(check_derivatives, f, (5 * X,), gt)
    assert check_derivatives(f, (5 * X,), gt, allow_jumps=True)


@pytest.mark.slow
@pytest.mark.sweep_at("jax")
def test_a_stopped_gradient_is_named(gt):
    f = lambda x, y: (gt.stop_gradient(x["a"]) * y).sum()
    first = refused(check_derivatives, f, ({"a": X}, Y), gt).first
    assert "argument 0['a']" in first.path
    assert first.cause == "the derivative is zero: a gradient is stopped"


@pytest.mark.sweep_at("jax")
def test_a_factor_is_named_with_its_place_and_both_values(gt):
    f = lambda x, y: (gt.scale_gradient(x, 2.0) * y).sum()
    report = refused(check_derivatives, f, (X, Y), gt, modes=("reverse", "reverse_over_reverse"))
    first = report.first
    assert (first.quantity, first.path) == ("reverse | finite differences", "argument 0")
    assert first.cause.startswith("constant factor 2")
    assert first.ratio == pytest.approx(2) and len(first.place) == 2
    assert "Analytic" in first.detail and "numeric" in first.detail


@pytest.mark.sweep_at("jax")
def test_a_conjugate_is_a_wrong_derivative(gt):
    conjugated = lambda z: gt.transform_gradient(z, gt.xp.conj)
    f = lambda z: gt.xp.abs(conjugated(z) - (1 + 2j)) ** 2
    report = refused(check_derivatives, f, (X[0] + 1j * Y[0],), gt, order=1)
    assert report.first.quantity == "reverse | finite differences"


@pytest.mark.sweep_at("-1e-06", "jax")
@pytest.mark.parametrize("off", [1e-6, -1e-6])
def test_a_derivative_wrong_in_its_sixth_digit_is_refused(gt, off):
    f = lambda x: gt.xp.exp(gt.scale_gradient(x, 1 + off)).sum()
    refused(check_derivatives, f, (X,), gt, order=1)


@pytest.mark.sweep_at("jax")
def test_a_complex_gradient_is_named_entry_by_entry(gt):
    f = lambda z: gt.xp.abs(gt.scale_gradient(z, 3.0) - (1 + 2j)).sum()
    first = refused(
        check_derivatives, f, (X[0] + 1j * Y[0],), gt, order=1, modes=("reverse",)
    ).first
    assert first.cause == "constant factor 3" and len(first.place) == 1


@pytest.mark.sweep_at("jax")
def test_a_gradient_that_is_no_gradient_has_no_symmetric_hessian(gt):
    curl = lambda x: gt.xp.concat([x[1:], 0 * x[:1]])
    f = gt.custom_rule(lambda x: (x**2).sum())
    f.defvjp(lambda x: ((x**2).sum(), x), lambda x, ct: (ct * curl(x),))
    report = refused(check_derivatives, f, (X[0],), gt, numeric=False)
    assert report.cause == "the Hessian is not symmetric"


def test_modes_that_are_not_adjoint_are_named(gt):
    f = gt.custom_rule(lambda x: x**2)
    f.defjvp(lambda p, t: (p[0] ** 2, 2 * p[0] * t[0]))
    f.defvjp(lambda x: (x**2, x), lambda x, ct: (3 * x * ct,))
    report = refused(check_derivatives, f, (X[0],), gt, order=1, numeric=False)
    assert report.first.quantity == "reverse | forward"
    assert report.cause.startswith("the dot-product test fails")


@pytest.mark.slow_at("jax")
def test_two_mixes_of_modes_that_differ_are_named(gt):
    slope = gt.custom_rule(lambda x: 3 * x**2)
    slope.defjvp(lambda p, t: (3 * p[0] ** 2, 12 * p[0] * t[0]))
    slope.defvjp(lambda x: (3 * x**2, x), lambda x, ct: (6 * x * ct,))
    cube = gt.custom_rule(lambda x: x**3)
    cube.defvjp(lambda x: (x**3, x), lambda x, ct: (slope(x) * ct,))
    report = refused(check_derivatives, cube, (X[0],), gt, numeric=False)
    first = report.first
    assert first.quantity == "forward over reverse | reverse over reverse"
    assert (first.cause, first.ratio) == ("two mixes of modes differ", pytest.approx(2))


@pytest.mark.slow_at("jax")
def test_a_pullback_that_is_homogeneous_but_not_additive_is_named(gt):
    cubic = lambda c: c**3 / (c**2).sum()
    f = lambda x: gt.transform_gradient(x, cubic)
    report = refused(check_derivatives, f, (X,), gt, order=1, numeric=False)
    assert report.first.quantity == "reverse of a sum of cotangents | sum"
    assert report.cause == "not linear in the cotangent"


@pytest.mark.sweep_at("jax")
def test_a_pullback_that_is_not_linear_is_named(gt):
    f = lambda x: gt.clip_gradient(x, max_value=1.5)
    report = refused(check_derivatives, f, (X,), gt)
    assert report.cause == "not linear in the cotangent"


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

    @jax.custom_vjp
    def exp(x):
        return jax.numpy.exp(x)

    exp.defvjp(
        lambda x: (jax.numpy.exp(x), jax.lax.stop_gradient(jax.numpy.exp(x))),
        lambda y, ct: (ct * y,),
    )
    return exp


@pytest.mark.sweep_at("jax")
def test_a_rule_right_at_first_and_wrong_at_second_order_is_refused(gt, backend_name):
    f = wrong_at_second_order(backend_name)
    loss = lambda x, y: (f(x) * y).sum()
    assert check_derivatives(loss, (X, Y), gt, order=1)
    first = refused(check_derivatives, loss, (X, Y), gt).first
    assert first.order == 2 and first.path == "argument 0"
    assert first.quantity == "reverse over reverse | finite differences"
    assert first.cause.startswith("right at first order, wrong at second")


def test_a_mode_that_f_lacks_is_said_and_refused_if_asked_for(gt):
    f = lambda x: gt.replace_gradient(x, gt.asarray(np.ones_like(X))) * 1.0
    with pytest.raises(GradtoolsError, match="forward mode: "):
        check_derivatives(f, (X,), gt, modes=("forward",))


@pytest.mark.sweep_at("jax")
def test_a_function_without_forward_mode_lists_it_as_left_out(gt):
    plain = gt.transform_gradient
    report = check_derivatives(lambda x: plain(x, lambda c: 1.0 * c) ** 2, (X,), gt)
    assert report
    assert any(reason.startswith("forward mode: ") for reason in report.left_out)
    assert "reverse over reverse | finite differences" in quantities(report)


def test_a_broken_rule_is_not_taken_for_a_missing_mode(gt):
    def broken(c):
        raise KeyError("the user's own mistake")

    f = lambda x: gt.transform_gradient(x, broken) ** 2
    with pytest.raises((GradtoolsError, KeyError), match="the user's own mistake"):
        check_derivatives(f, (X,), gt)


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
    ],
)
def test_wrong_questions_are_answered_in_words(gt, kwargs, words):
    given = {"f": lambda x: x, "args": (X,), "backend": gt, **kwargs}
    with pytest.raises(GradtoolsError, match=words):
        check_derivatives(**given)


def test_a_random_function_is_refused(gt):
    rng = np.random.default_rng(0)
    with pytest.raises(GradtoolsError, match=r"two calls of f .* different values"):
        check_derivatives(lambda x: x * float(rng.normal()), (X,), gt)


# --- where finite differences cannot decide


def undecided(report):
    return [reason for reason in report.left_out if "finite differences cannot decide" in reason]


@pytest.mark.sweep_at("jax")
def test_what_finite_differences_cannot_decide_is_said(gt):
    report = check_derivatives(lambda x: gt.xp.sqrt(x), (np.array([0.0, 1.0]),), gt, order=1)
    forward, reverse = undecided(report)
    assert forward.startswith("forward of output by argument 0: ") and "1 of 2 entries" in forward
    assert reverse.startswith("reverse of argument 0: ") and "1 of 2 entries" in reverse
    assert {"reverse | forward", "reverse | finite differences"} <= quantities(report)


@pytest.mark.sweep_at("forward", "jax")
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_an_entry_at_the_edge_of_the_domain_hides_no_other(gt, mode):
    x = np.array([0.0, 1.0, 4.0])
    f = lambda x: gt.scale_gradient(gt.xp.sqrt(x), 2.0)
    report = refused(check_derivatives, f, (x,), gt, order=1, modes=(mode,))
    assert report.cause.startswith("constant factor 2") and undecided(report)


@pytest.mark.sweep_at("jax")
def test_a_wrong_gradient_beside_an_output_that_is_nan_is_refused(gt):
    f = lambda x, y: gt.xp.log(x) * gt.scale_gradient(y, 3.0)
    args = (np.array([-1.0, 2.0]), np.array([1.0, 2.0]))
    report = refused(check_derivatives, f, args, gt, order=1, modes=("reverse",))
    assert "argument 1" in {c.path for c in report.disagreements}
    assert any("1 of 2 entries of output are not finite" in reason for reason in report.left_out)


@pytest.mark.sweep_at("jax")
def test_a_nan_that_finite_differences_do_not_see_is_refused(gt):
    f = lambda x: (gt.xp.sqrt(x) * gt.xp.sqrt(x)).sum()
    report = refused(check_derivatives, f, (np.array([0.0, 1.0]),), gt, order=1)
    assert report.cause == "the derivative is not finite"


@pytest.mark.slow_at("jax")
def test_a_slope_that_drowns_in_rounding_decides_nothing_and_that_is_said(gt):
    report = check_derivatives(lambda x: x.sum() + 1e17, (np.ones(2),), gt, order=1)
    assert len(undecided(report)) == 2


@pytest.mark.slow_at("jax")
def test_a_function_that_is_another_in_smaller_steps_is_left_undecided(gt):
    hilbert = 1 / (np.arange(6)[:, None] + np.arange(6) + 1.0)
    f = lambda a, b: gt.xp.linalg.solve(a, b[:, None])
    assert undecided(check_derivatives(f, (hilbert, X.ravel()[:6]), gt, order=1))


@pytest.mark.slow_at("jax")
def test_a_stopped_gradient_that_drowns_in_rounding_is_not_said_to_be_checked(gt):
    f = lambda x: 1e3 + gt.stop_gradient(1e-2 * (x**2).sum()) + 0 * x.sum()
    report = check_derivatives(f, (X[0].astype(np.float32),), gt, order=1)
    assert undecided(report)


@pytest.mark.sweep_at("jax")
def test_two_modes_whose_products_are_nan_are_said_not_to_be_compared(gt):
    f = lambda x: gt.xp.sqrt(x).sum() + gt.xp.sqrt(2 * x).sum()
    stop = lambda x: f(x) - f(x)
    report = refused(check_derivatives, stop, (np.array([0.0, 1.0]),), gt, order=1)
    said = [r for r in report.left_out if r.startswith("reverse | forward") and "NaN" in r]
    assert len(said) == 1


# --- check_rule


def Rule(gt, fun, fwd=None, bwd=None, jvp=None, static_argnames=()):
    """A custom rule of these parts."""
    rule = gt.custom_rule(fun, static_argnames)
    rule.fwd, rule.bwd, rule.jvp = fwd, bwd, jvp
    return rule


@pytest.fixture
def product(gt):
    """The parts of (x, y) -> x exp(y)."""
    exp = gt.xp.exp
    fun = lambda x, y: x * exp(y)
    return SimpleNamespace(
        exp=exp,
        fun=fun,
        fwd=lambda x, y: (fun(x, y), (x, exp(y))),
        bwd=lambda res, ct: (ct * res[1], ct * res[0] * res[1]),
        jvp=lambda p, t: (fun(*p), t[0] * exp(p[1]) + p[0] * exp(p[1]) * t[1]),
    )


@pytest.mark.sweep_at("jax")
def test_a_right_rule_passes(gt, product):
    report = check_rule(Rule(gt, product.fun, product.fwd, product.bwd, product.jvp), (X, Y), gt)
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
def test_a_residual_that_lost_its_derivative_is_named(gt, product):
    fwd = lambda x, y: (product.fun(x, y), (x, gt.stop_gradient(product.exp(y))))
    first = refused(check_rule, Rule(gt, product.fun, fwd, product.bwd), (X, Y), gt).first
    assert first.path == "residual [1] by argument 1"
    assert first.cause.startswith("a residual's derivative is lost")


@pytest.mark.sweep_at("jax")
def test_a_bwd_that_takes_a_residual_as_constant_is_named(gt, product):
    bwd = lambda res, ct: (ct * gt.stop_gradient(res[1]), ct * res[0] * res[1])
    first = refused(check_rule, Rule(gt, product.fun, product.fwd, bwd), (X, Y), gt).first
    assert first.path == "bwd's cotangent of argument 0 by argument 1"
    assert first.cause.startswith("right at first order, wrong at second")
    assert check_rule(Rule(gt, product.fun, product.fwd, bwd), (X, Y), gt, order=1)


@pytest.mark.sweep_at("jax")
def test_a_jvp_that_takes_a_primal_as_constant_is_named(gt, product):
    exp, stop = product.exp, gt.stop_gradient
    jvp = lambda p, t: (product.fun(*p), t[0] * exp(stop(p[1])) + p[0] * exp(p[1]) * t[1])
    first = refused(check_rule, Rule(gt, product.fun, jvp=jvp), (X, Y), gt).first
    assert first.path == "jvp's tangent of output by argument 1"


@pytest.mark.sweep_at("jax")
def test_a_wrong_entry_of_bwd_is_named_by_its_argument(gt, product):
    bwd = lambda res, ct: (ct * res[1], 2 * ct * res[0] * res[1])
    first = refused(check_rule, Rule(gt, product.fun, product.fwd, bwd), (X, Y), gt).first
    assert (first.quantity, first.path) == ("bwd | finite differences", "argument 1")
    assert first.cause.startswith("constant factor 2")


@pytest.mark.slow_at("jax")
def test_a_wrong_value_of_fwd_is_named(gt, product):
    fwd = lambda x, y: (product.fun(x, y) + 1e-6, (x, product.exp(y)))
    first = refused(check_rule, Rule(gt, product.fun, fwd, product.bwd), (X, Y), gt).first
    assert first.quantity == "fwd's value | fun's value"


@pytest.mark.sweep_at("jax")
def test_a_value_in_another_dtype_is_named(gt, product):
    to32 = lambda x: gt._api._backend.cast(x, gt.asarray(np.float32(0)))
    fwd = lambda x, y: (to32(product.fun(to32(x), to32(y))), (x, product.exp(y)))
    rule = Rule(gt, lambda x, y: product.fun(x, y) * 0 + 1.0, fwd, product.bwd)
    report = refused(check_rule, rule, (X, Y), gt)
    assert report.first.quantity == "fwd's value | fun's value"


@pytest.mark.slow_at("jax")
def test_rules_that_disagree_are_named(gt, product):
    jvp = lambda p, t: (product.fun(*p), t[0] * product.exp(p[1]))
    report = refused(check_rule, Rule(gt, product.fun, product.fwd, product.bwd, jvp), (X, Y), gt)
    named = {(c.quantity, c.path) for c in report.disagreements}
    assert ("jvp | finite differences", "output by argument 1") in named
    assert ("bwd | jvp", "argument 1") in named
    assert ("bwd | finite differences", "argument 1") not in named


@pytest.mark.slow_at("jax")
def test_a_bwd_that_is_not_linear_is_named(gt, product):
    bwd = lambda res, ct: (gt.xp.clip(ct, -10, 10) * res[1], ct * res[0] * res[1])
    first = refused(check_rule, Rule(gt, product.fun, product.fwd, bwd), (X, Y), gt).first
    assert (first.path, first.cause) == ("argument 0", "not linear in the cotangent")


def test_entries_of_bwd_are_counted_and_measured(gt, product):
    one = lambda res, ct: (ct * res[1],)
    with pytest.raises(GradtoolsError, match=r"bwd returned .*, expected a tuple of 2"):
        check_rule(Rule(gt, product.fun, product.fwd, one), (X, Y), gt)
    row = lambda res, ct: (ct * res[1], (ct * res[0] * res[1])[0])
    with pytest.raises(GradtoolsError, match=r"cotangent of array 1 has shape \(4,\).*\(3, 4\)"):
        check_rule(Rule(gt, product.fun, product.fwd, row), (X, Y), gt)


@pytest.mark.sweep_at("jax")
def test_none_stands_for_a_zero_and_for_an_integer(gt):
    rule = Rule(gt, lambda x, n: x * n, lambda x, n: (x * n, n), lambda n, ct: (ct * n, None))
    assert check_rule(rule, (X, np.int64(3)), gt)


@pytest.mark.sweep_at("jax")
def test_static_arguments_lead(gt):
    rule = Rule(
        gt,
        lambda x, power: x**power,
        lambda power, x: (x**power, x),
        lambda power, x, ct: (power * ct * x ** (power - 1),),
    )
    rule.static_argnames = ("power",)
    assert check_rule(rule, (X, 3), gt)


def test_a_plain_function_is_no_rule(gt):
    with pytest.raises(GradtoolsError, match="got a function, which is no rule"):
        check_rule(lambda x: x, (X,), gt)


# --- the numeric half, against closed forms


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


def test_a_jump_is_found_where_it_is_and_a_kink_is_none():
    step = lambda t: np.array([2.0 * t + (t > 0.0371)])
    found = find_jump(step, lambda t: np.array([2.0]), 0.1, 2.0**-52)
    assert found.at == pytest.approx(0.0371) and found.size == pytest.approx(1)
    kink = lambda t: np.array([max(t - 0.0371, 0.0)])
    assert find_jump(kink, lambda t: np.array([float(t > 0.0371)]), 0.1, 2.0**-52) is None
    steep = lambda t: np.array([np.tanh(1e9 * (t - 0.0371))])
    assert find_jump(steep, lambda t: 1e9 * (1 - steep(t) ** 2), 0.1, 2.0**-52) is None
    late = lambda t: np.array([max(t - 0.99, 0.0)])  # its slope is zero at all points looked at
    assert find_jump(late, lambda t: np.array([float(t > 0.99)]), 1.0, 2.0**-52, flat=True) is None


def test_a_pole_is_no_jump():
    assert (
        find_jump(
            lambda t: np.array([1 / (t + 0.03)]),
            lambda t: np.array([-1 / (t + 0.03) ** 2]),
            -0.1,
            2.0**-52,
        )
        is None
    )
