"""Custom code in JAX under every derivative: right numbers or a loud error, never a silent zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.experimental import pallas as pl

import gradtools.jax as gt
from gradtools.errors import DisconnectedInputError, GradtoolsError

X, T = jnp.array([0.3, 0.7, 1.1]), jnp.array([1.0, 2.0, -0.5])
SPEC = jax.ShapeDtypeStruct((3,), np.float64)
FOR, ROR = "forward_over_reverse", "reverse_over_reverse"


def pure(x):
    return jax.pure_callback(np.sin, SPEC, x, vmap_method="sequential")


def io(x):
    return io_callback(np.sin, SPEC, x)


def ffi(x):
    return jax.ffi.ffi_call("gradtools_no_such_kernel", SPEC)(x)


def kernel(x, out):
    out[...] = jnp.sin(x[...])


def pallas(x):
    return pl.pallas_call(kernel, out_shape=SPEC, interpret=True)(x)


@custom_vmap
def own_batching(x):
    return jnp.sin(x)


own_batching.def_vmap(lambda size, batched, x: (jnp.sin(x), True))


@jax.custom_jvp
def kernel_in_a_rule(x):
    return pure(x)


@kernel_in_a_rule.defjvp
def _(primals, tangents):
    slope = jax.pure_callback(np.cos, SPEC, *primals, vmap_method="sequential")
    return kernel_in_a_rule(*primals), slope * tangents[0]


@jax.custom_vjp
def reverse_only(x):
    return jnp.sin(x)


reverse_only.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


def host(x):
    return jnp.asarray(np.sin(np.asarray(x)))


def loop(x):
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


def squares(f):
    return lambda *xs: (f(*xs) ** 2).sum()


FIRST = {
    "grad": lambda f: gt.grad(squares(f))(X),
    "jit of grad": lambda f: jax.jit(gt.grad(squares(f)))(X),
    "vjp": lambda f: gt.vjp(f, X)[1](2 * jnp.sin(X))[0],
    "jvp": lambda f: gt.jvp(f, (X,), (2 * jnp.sin(X),))[1],
    "linearize": lambda f: gt.linearize(f, X)[1](2 * jnp.sin(X)),
    "jacobian, forward": lambda f: 2 * gt.jacobian(f, mode="forward")(X) @ jnp.sin(X),
    "jacobian, reverse": lambda f: 2 * gt.jacobian(f, mode="reverse")(X) @ jnp.sin(X),
    "frozen": lambda f: gt.grad(squares(gt.frozen(f)))(X),
    "checkpoint": lambda f: gt.grad(squares(gt.checkpoint(f)))(X),
    "chunked": lambda f: gt.grad(squares(gt.chunked(jax.vmap(f), 1)))(X[None])[0],
    "mixed_partial": lambda f: gt.mixed_partial(
        lambda y, g: y * (g**2).sum() / 2, f, jnp.array(1.0), X, jnp.ones(3)
    ),
}
SECOND = {
    "hvp, forward over reverse": lambda f: gt.hvp(squares(f), (X,), (T,), mode=FOR)[1][0],
    "hvp, reverse over reverse": lambda f: gt.hvp(squares(f), (X,), (T,), mode=ROR)[1][0],
    "hessian": lambda f: gt.hessian(squares(f))(X) @ T,
    "grad of grad": lambda f: gt.grad(lambda x: gt.grad(squares(f))(x) @ T)(X),
    "frozen": lambda f: gt.hvp(squares(gt.frozen(f)), (X,), (T,), mode=ROR)[1][0],
}
SLOPE = np.sin(2 * np.array(X))
EXPECTED = {"mixed_partial": SLOPE.sum() / 2}
CURVED = 2 * np.cos(2 * np.array(X)) * np.array(T)
CODE = (pure, io, ffi, pallas, own_batching, kernel_in_a_rule, reverse_only, host)
LOUD = (GradtoolsError, ValueError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError)
RIGHT_AT_FIRST_ORDER = {
    kernel_in_a_rule: set(FIRST),
    reverse_only: set(FIRST) - {"jvp", "linearize", "jacobian, forward", "mixed_partial"},
    pallas: {"jvp", "jacobian, forward", "mixed_partial"},
    own_batching: {"jvp", "jacobian, forward", "mixed_partial"},
}


@pytest.mark.slow_at(("jacobian, forward", "pallas"))
@pytest.mark.sweep_at(("jvp", "pallas"))
@pytest.mark.parametrize("f", CODE)
@pytest.mark.parametrize("way", FIRST)
@pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")
def test_a_first_derivative_of_custom_code_is_right_or_raises(f, way):
    try:
        found = FIRST[way](f)
    except LOUD:
        assert way not in RIGHT_AT_FIRST_ORDER.get(f, ())
    else:
        np.testing.assert_allclose(found, EXPECTED.get(way, SLOPE), rtol=1e-12)


@pytest.mark.parametrize("f", CODE)
@pytest.mark.parametrize("way", SECOND)
@pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")
def test_a_second_derivative_of_custom_code_is_right_or_raises(f, way):
    try:
        found = SECOND[way](f)
    except LOUD:
        assert f is not reverse_only
    else:
        np.testing.assert_allclose(found, CURVED, rtol=1e-12)


REFUSED = {
    pure: "host_function.*Pure callbacks",
    io: "host_function.*IO callbacks",
    ffi: "host_function.*FFI call",
    pallas: "forward rule only.*Linearization failed",
    loop: "trips is known only when it runs.*Reverse-mode differentiation",
}
IN_REVERSE = [w for w in FIRST if w not in RIGHT_AT_FIRST_ORDER[pallas] | {"checkpoint", "chunked"}]


@pytest.mark.slow_at(("grad", "loop"), ("jacobian, reverse", "loop"), ("frozen", "loop"))
@pytest.mark.parametrize("f", REFUSED)
@pytest.mark.parametrize("way", IN_REVERSE)
@pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")
def test_what_jax_does_not_differentiate_is_refused_in_words_with_a_mend(f, way):
    if f is loop and way == "linearize":  # which is pushed
        np.testing.assert_allclose(FIRST[way](f), SLOPE, rtol=1e-12)
        return
    with pytest.raises(GradtoolsError, match=rf"(?s)^\w+: f .*{REFUSED[f]}") as raised:
        FIRST[way](f)
    assert isinstance(raised.value, ValueError)  # as JAX's own


def test_an_error_of_the_users_with_jaxs_words_stays_the_users():
    def f(x):
        raise ValueError("Pure callbacks do not support JVP in my code")

    with pytest.raises(ValueError, match="in my code") as raised:
        gt.grad(f)(X)
    assert not isinstance(raised.value, GradtoolsError)


def test_a_callback_that_is_reached_by_stopped_inputs_alone_is_a_cut():
    with pytest.raises(DisconnectedInputError, match=r"cut by (pure_callback|stop_gradient)"):
        gt.grad(lambda x: pure(jax.lax.stop_gradient(x)).sum())(X)


def test_a_float_that_went_through_integers_is_a_cut():
    with pytest.raises(DisconnectedInputError, match="cut by"):
        gt.grad(lambda x: (x * 100).astype(int).astype(float).sum())(X)
    there = lambda x: jax.lax.bitcast_convert_type(x, jnp.int64)
    with pytest.raises(DisconnectedInputError, match="cut by bitcast_convert_type"):
        gt.grad(lambda x: jax.lax.bitcast_convert_type(there(x), jnp.float64).sum())(X)


def test_a_custom_vmap_is_drawn():
    assert "custom_vmap_call" in str(gt.gradient_graph(own_batching, X, order=0))


Z, DZ = jnp.array([1.0 + 1.0j, 2.0 - 1.0j]), jnp.array([0.3 - 0.4j, 0.6 + 0.2j])


def test_a_derivative_through_the_sign_of_complex_numbers_is_jaxs():
    """JAX before 0.11 takes the derivative of z / |z| for zero; that is JAX's to tell."""
    f = lambda z: jnp.real(z * jnp.sign(z)).sum()
    np.testing.assert_array_equal(gt.grad(f)(Z), jnp.conj(jax.grad(f)(Z)))
    np.testing.assert_array_equal(gt.jvp(f, (Z,), (DZ,))[1], jax.jvp(f, (Z,), (DZ,))[1])


def test_why_zero_looks_at_a_program_whose_inner_program_holds_constants():
    report = gt.why_zero(lambda x: jax.scipy.special.spence(x).sum(), X[:2])
    assert not report
