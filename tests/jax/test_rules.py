"""Tests custom rules in JAX: shard_map, named axes, residuals, closures and transposition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools.jax.rules.installing import apply_rule
from gradtools.rules import Rule
from tests.support.devices import on_devices

CUBE = {
    "tangent": lambda xs, dxs: [3 * xs[0] ** 2 * dxs[0]],
    "cotangent": lambda xs, cts: [3 * xs[0] ** 2 * cts[0]],
}
RULES = {
    "both": Rule("cube", lambda x: [x**3], **CUBE),
    "forward": Rule("cube", lambda x: [x**3], tangent=CUBE["tangent"]),
    "reverse": Rule("cube", lambda x: [x**3], cotangent=CUBE["cotangent"]),
}
X = jnp.array([0.5, -1.5, 2.0])
EDITS = {
    "reverse": lambda x: gt.reverse_gradient(x, 0.5),
    "scale": lambda x: gt.scale_gradient(x, 3.0),
    "stop": lambda x: x * gt.stop_gradient(x),
    "clip": lambda x: gt.clip_gradient(x, max_norm=1.0, max_value=0.5),
    "transform": lambda x: gt.transform_gradient(x, lambda c: c * 2),
    "known": lambda x: gt.replace_gradient(x, gt.stop_gradient(x)),
    "straight_through": lambda x: gt.straight_through(jnp.round, jnp.sin)(x),
    **{f"rule {name}": lambda x, rule=rule: apply_rule(rule, x)[0] for name, rule in RULES.items()},
}


@pytest.mark.slow_at(("clip", "False"))
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("name", EDITS)
def test_a_gradient_inside_shard_map(name, check):
    edit = EDITS[name]
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    gradient = gt.grad(lambda x: (edit(x) ** 2).sum())
    sharded = jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
    assert jax.jit(sharded)(X).tolist() == gradient(X).tolist()


def _ruled(f, mode):
    """Return f with a custom rule for one or both modes, or `gt.frozen(f)`."""
    rule = gt.custom_rule(f)
    if "reverse" in mode:
        rule.defvjp(lambda x: jax.vjp(f, x), lambda pull, c: pull(c))
    if "forward" in mode:
        rule.defjvp(lambda p, t: jax.jvp(f, p, t))
    return gt.frozen(f) if mode == "frozen" else rule


DERIVATIVES = {
    "reverse": lambda f, x: jax.grad(lambda x: f(x).prod())(x),
    "forward": lambda f, x: jax.jvp(f, (x,), (jnp.cos(x),))[1],
    "forward over reverse": lambda f, x: jax.jvp(
        jax.grad(lambda x: f(x).prod()), (x,), (jnp.cos(x),)
    )[1],
}
modes = pytest.mark.parametrize("mode", ["reverse", "forward", "reverse and forward", "frozen"])
derivatives = pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)


@pytest.mark.sampled(4, 24)
@pytest.mark.parametrize("varies", ["captured", "argument"])
@derivatives
@modes
def test_a_rule_closes_over_an_array_under_shard_map(mode, derivative, varies):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    batch, spec = jnp.outer(X, X)[:2], jax.sharding.PartitionSpec

    def found(make):
        def of(w, b):
            if varies == "captured":
                return jax.lax.psum(derivative(make(lambda w: jnp.tanh(b @ w)), w), "i")
            return jax.lax.psum(derivative(make(lambda b: jnp.tanh(b @ w)), b), "i")

        axes = {"in_specs": (spec(), spec("i")), "out_specs": spec()}
        return jax.jit(jax.shard_map(of, mesh=mesh, **axes))(X, batch)

    np.testing.assert_allclose(found(lambda f: _ruled(f, mode)), found(lambda f: f), rtol=1e-12)


@pytest.mark.sampled(1, 12)
@derivatives
@modes
def test_a_rule_reduces_over_the_axis_that_vmap_names(mode, derivative):
    f = lambda x: x**2 * jax.lax.psum(jnp.sin(x), "i") * (1 + jax.lax.axis_index("i"))
    over = lambda make: jax.vmap(lambda x: derivative(make(f), x), axis_name="i")
    found, right = over(lambda f: _ruled(f, mode)), over(lambda f: f)
    xs = jnp.outer(X, X)
    np.testing.assert_allclose(found(xs), right(xs), rtol=1e-12)
    np.testing.assert_allclose(jax.jit(found)(xs), right(xs), rtol=1e-12)


def test_a_scan_over_reversals_keeps_no_x():
    """The backward pass reads only the scale, so the scan saves no copies of x."""

    def loss(x):
        turn = lambda c, _: (gt.reverse_gradient(c, 0.5) * 2.0, None)
        return jax.lax.scan(turn, x, None, length=7)[0].sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones(13)))
    assert "[7,13]" not in text and "[13]" in text


def _scaled_exp(c):
    """Return exp(c x) with a custom rule that calls its primal function, which closes over c."""
    f = gt.custom_rule(lambda x: jnp.exp(c * x))
    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * c * f(x),))
    return f


WITHIN = {
    "a known point": lambda f: lambda c: jax.grad(jax.grad(f(c)))(0.5),
    "a batch": lambda f: lambda c: jax.hessian(lambda x: jnp.sum(jax.vmap(f(c))(x) ** 2))(X),
    "a batch of batches": lambda f: (
        lambda c: jax.grad(
            lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jax.vmap(jax.vmap(f(c)))(x)))(x))
        )(jnp.outer(X, X))
    ),
    "third order": lambda f: lambda c: jax.grad(jax.grad(jax.grad(f(c))))(0.5),
}


@pytest.mark.slow_at("jit", "a known point")
@pytest.mark.sweep_at(("a batch", "vmap"), ("a batch of batches", "vmap"))
@pytest.mark.parametrize("transform", ["jit", "vmap"])
@pytest.mark.parametrize("within", WITHIN)
def test_a_rule_that_uses_itself_may_close_over_an_array_of_a_trace(within, transform):
    at = 0.7 if transform == "jit" else jnp.array([0.7, 0.2])
    ours, plain = (
        getattr(jax, transform)(WITHIN[within](f))(at)
        for f in (_scaled_exp, lambda c: lambda x: jnp.exp(c * x))
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-5)


def test_an_extra_that_reads_no_mapped_input_of_a_rule_that_closes_over_an_array():
    def slope(f):
        total = lambda c, y: jax.vmap(f(c), (0, None))(X, y).sum()
        return jax.jit(jax.grad(total, 1))(0.7, 0.3)

    def plain(c):
        return lambda x, y: c * jnp.sin(x) * jnp.exp(y)

    def ruled(c):
        f = gt.custom_rule(plain(c))
        fwd = lambda x, y: (plain(c)(x, y), (x, jnp.exp(y)))

        def bwd(saved, ct):
            x, e = saved
            return c * jnp.cos(x) * e * ct, c * jnp.sin(x) * e * ct

        f.defvjp(fwd, bwd)
        return f

    np.testing.assert_allclose(slope(ruled), slope(plain), rtol=1e-6)


def test_a_tangent_of_what_an_edit_does_not_differentiate_runs_no_map():
    x = jnp.arange(3.0)

    def moved(scale, tangent):
        return jax.jvp(lambda s: gt.scale_gradient(x, s), (scale,), (tangent,))

    names = [e.primitive.name for e in jax.make_jaxpr(moved)(2.0, 1.0).jaxpr.eqns]
    assert [name for name in names if "gradtools" in name] == ["gradtools_primal"]


def test_a_rule_is_transposed_by_its_pullback_after_it_was_linearized():
    double = gt.custom_rule(lambda x: 2 * x)
    # This rule is deliberately wrong.
    double.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))
    x = jnp.ones(3)
    slope = jax.grad(lambda x: double(x).sum())(x)
    (transposed,) = jax.linear_transpose(double, x)(x)
    np.testing.assert_array_equal(slope, 3 * x)
    np.testing.assert_array_equal(transposed, 3 * x)


@pytest.mark.slow_at("True")
@pytest.mark.parametrize("is_summed", [True, False])
def test_a_backward_pass_under_shard_map_may_sum_a_shared_cotangent_itself(is_summed):
    """`jax.custom_vjp` requires a psum in this bwd; a custom_rule works with and without it."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    f = lambda w, x: jnp.sin(w * x)

    def bwd(res, c):
        slope = c * jnp.cos(res[0] * res[1])
        total = (slope * res[1]).sum()
        return jax.lax.psum(total, "d") if is_summed else total, slope * res[0]

    rule = gt.custom_rule(f)
    rule.defvjp(lambda w, x: (f(w, x), (w, x)), bwd)
    loss = jax.shard_map(
        lambda w, x: jax.lax.psum(rule(w, x).sum(), "d"),
        mesh=mesh,
        in_specs=(spec(), spec("d")),
        out_specs=spec(),
    )
    w, x = jnp.asarray(1.5), jnp.arange(2.0)
    plain = lambda w: f(w, x).sum()
    np.testing.assert_allclose(jax.grad(loss)(w, x), jax.grad(plain)(w), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(jax.grad(loss))(w, x), jax.hessian(plain)(w), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(loss, 1)(w, x), w * jnp.cos(w * x), rtol=1e-5)


ON_FOUR_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
import gradtools.jax as gt
P, psum = jax.sharding.PartitionSpec, lambda x: jax.lax.psum(x, "i")
mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
X, W = jnp.linspace(0.5, 2, 8).reshape(4, 2), jnp.array([0.3, -0.7])
shared = lambda w, b: jnp.tanh(b * w).sum(-1) + (w**2).sum()  # w is replicated
summed = lambda x: psum(jnp.sin(x))  # the output is replicated

def ruled(f, mode, fwd=None, bwd=None):
    if mode == "frozen":
        return gt.frozen(f)
    rule = gt.custom_rule(f)
    if "vjp" in mode:
        rule.defvjp(fwd or (lambda *xs: jax.vjp(f, *xs)), bwd or (lambda pull, c: pull(c)))
    if "jvp" in mode:
        rule.defjvp(lambda p, t: jax.jvp(f, p, t))
    return rule

loss = lambda f, b: lambda w: psum((f(w, b) ** 2).sum())
OF_SHARED = {
    "sum": lambda f: lambda w, b: jax.grad(loss(f, b))(w),
    "local": lambda f: lambda w, b: jax.grad(lambda w: f(w, b).sum())(w),
    "b": lambda f: lambda w, b: psum(jax.grad(lambda b: f(w, b).sum())(b).sum(0)),
    "jvp": lambda f: lambda w, b: psum(jax.jvp(f, (w, b), (w * 2, b + 1))[1].sum()),
    "jvp in w": lambda f: lambda w, b: psum(jax.jvp(lambda w: f(w, b), (w,), (w,))[1].sum()),
    "hessian": lambda f: lambda w, b: jax.hessian(loss(f, b))(w),
    "twice": lambda f: lambda w, b: jax.grad(lambda w: (jax.grad(loss(f, b))(w) ** 2).sum())(w),
}
square = lambda f: lambda b: (f(b) ** 2).sum()
OF_SUMMED = {
    "grad": lambda f: jax.grad(square(f)),
    "jvp": lambda f: lambda b: jax.jvp(f, (b,), (b * 2,))[1] + 0 * b,
    "hvp": lambda f: lambda b: jax.jvp(jax.grad(square(f)), (b,), (b * 2,))[1],
}
by_hand = {"fwd": lambda x: (summed(x), x), "bwd": lambda x, c: (c * jnp.cos(x),)}
for of, f, args, specs, out, modes, more in (
    (OF_SHARED, shared, (W, X), (P(), P("i")), P(), ("vjp", "jvp", "vjp, jvp", "frozen"), {}),
    (OF_SUMMED, summed, (X,), (P("i"),), P("i"), ("vjp", "jvp", "vjp, jvp"), by_hand),
):
    for name, derivative in of.items():
        run = lambda f: jax.jit(
            jax.shard_map(derivative(f), mesh=mesh, in_specs=specs, out_specs=out))(*args)
        for mode in modes:
            np.testing.assert_allclose(run(ruled(f, mode, **more)), run(f), 1e-12, err_msg=name)
print("right")
"""


@pytest.mark.slow
def test_a_rule_of_inputs_or_outputs_that_devices_share_has_the_derivatives_of_its_code():
    assert on_devices(ON_FOUR_DEVICES, 4) == "right"


FIRST_IN_SHARD_MAP = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import gradtools.jax as gt
from gradtools import GradtoolsError

mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def sine(constant=0.0):
    rule = gt.custom_rule(lambda x: jnp.sin(x))
    rule.defvjp(lambda x: (rule(x), x), lambda x, ct: (jnp.cos(x) * ct + constant,))
    return rule


def mapped(f, check):
    return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check)


x = jnp.arange(1.0, 5.0)
second = lambda f: lambda x: gt.hvp(lambda x: (f(x) ** 2).sum(), (x,), (x,))[1][0]
for check in (True, False):
    found = mapped(second(sine()), check)(x)
    assert jnp.allclose(found, second(jnp.sin)(x), rtol=1e-5), found
    try:
        mapped(lambda x: gt.jvp(sine(1.0), (x,), (x,))[1], check)(x)
    except GradtoolsError as error:
        assert "is not zero where every cotangent is zero" in str(error), error
    else:
        raise AssertionError("an affine bwd was transposed")
print("right")
"""


@pytest.mark.slow
def test_a_map_is_checked_at_its_first_transposition_inside_of_shard_map():
    assert on_devices(FIRST_IN_SHARD_MAP, 2) == "right"


def _called_back(x):
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.sin, spec, x, vmap_method="sequential")


def _with_a_callback():
    f = gt.custom_rule(_called_back)
    f.defvjp(lambda x: (_called_back(x), x), lambda x, ct: (ct * jnp.cos(x),))
    return f


HOST_CODE = {
    "linear host function": (
        gt.host_function(lambda x: 2 * x, adjoint=lambda ct: 2 * ct),
        lambda x: 2 * x,
    ),
    "callback in fwd": (_with_a_callback(), jnp.sin),
}


@pytest.mark.parametrize("which", HOST_CODE)
def test_a_second_derivative_of_jitted_code_does_not_differentiate_fwd(which):
    def second(f):
        gradient = jax.jit(jax.grad(lambda x: (f(x) ** 3).sum()))
        return jax.grad(lambda x: gradient(x).sum())(X)

    found, expected = map(second, HOST_CODE[which])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
