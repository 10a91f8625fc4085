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
from gradtools.jax.reachability import complex_sign_is_a_step

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
    if f is loop and way in ("linearize", "frozen"):  # the one is pushed, the other has a way
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


def test_the_sign_of_a_complex_number_is_refused_where_jax_takes_its_derivative_for_zero():
    """The derivative of z / |z| along i z is i z / |z|. JAX 0.10 takes zero, 0.12 knows it."""
    z = jnp.array(1.0 + 1.0j)
    pushed = jax.jvp(jnp.sign, (z,), (1j * z,))[1]
    if pushed != 0:
        np.testing.assert_allclose(pushed, 1j * z / abs(z), rtol=1e-6)
        found = gt.jvp(jnp.sign, (z,), (1j * z,))[1]
        np.testing.assert_allclose(found, pushed)
        gt.grad(lambda z: jnp.sign(z).real)(z)
        return
    with pytest.raises(GradtoolsError, match="grad: f takes the sign of complex numbers at test_"):
        gt.grad(lambda z: jnp.sign(z).real)(z)


def turned(z):
    """z s(z), of which JAX 0.10 loses the term z ds."""
    return jnp.real(z * jnp.sign(z)).sum()


Z, DZ = jnp.array([1.0 + 1.0j, 2.0 - 1.0j]), jnp.array([0.3 - 0.4j, 0.6 + 0.2j])
THROUGH_A_SIGN = {
    "grad": lambda f: gt.grad(f)(Z),
    "value_and_grad": lambda f: gt.value_and_grad(f)(Z),
    "zeros": lambda f: gt.grad(f, disconnected_inputs="zeros")(Z),
    "vjp": lambda f: gt.vjp(f, Z),
    "jvp": lambda f: gt.jvp(f, (Z,), (DZ,)),
    "linearize": lambda f: gt.linearize(f, Z),
    "hvp": lambda f: gt.hvp(f, (Z,), (DZ,)),
    "hvp, reverse": lambda f: gt.hvp(f, (Z,), (DZ,), mode="reverse_over_reverse"),
    "jit": lambda f: jax.jit(gt.grad(f))(Z),
    "vmap": lambda f: jax.vmap(gt.grad(f))(Z),
    "scan": lambda f: gt.grad(lambda z: jax.lax.scan(lambda c, _: (c + f(z), c), 0.0, None, 2)[0])(
        Z
    ),
    "of real arguments": lambda f: gt.grad(lambda x: f(x + 1j * x**2))(Z.real),
}


@pytest.mark.skipif(not complex_sign_is_a_step(), reason="JAX has mended it")
@pytest.mark.parametrize("way", THROUGH_A_SIGN)
def test_a_derivative_that_goes_through_the_sign_of_complex_numbers_is_refused(way):
    with pytest.raises(GradtoolsError, match=r"sign of complex numbers at test_.* z / jnp\.abs"):
        THROUGH_A_SIGN[way](turned)


@pytest.mark.slow_at("zeros", "jvp", "hvp, reverse", "scan")
@pytest.mark.sweep_at("grad")
@pytest.mark.parametrize("way", THROUGH_A_SIGN)
def test_what_the_refusal_of_a_complex_sign_advises_works(way):
    THROUGH_A_SIGN[way](lambda z: jnp.real(z * (z / jnp.abs(z))).sum())
    THROUGH_A_SIGN[way](lambda z: jnp.real(z * gt.stop_gradient(jnp.sign(z))).sum())


def test_the_derivative_of_z_times_its_phase_is_that_of_finite_differences():
    """By z / |z|, which the refusal advises."""
    with jax.enable_x64(True):
        z, dz = (jnp.asarray(x, jnp.complex128) for x in (Z, DZ))
        f = lambda z: jnp.real(z * (z / jnp.abs(z))).sum()
        slope = (f(z + 1e-6 * dz) - f(z - 1e-6 * dz)) / 2e-6
        np.testing.assert_allclose(gt.jvp(f, (z,), (dz,))[1], slope, rtol=1e-8)


def test_a_complex_sign_that_no_derivative_goes_through_is_no_concern():
    gt.grad(lambda z: jnp.real(jax.nn.logsumexp(z)))(Z)  # computes one that it does not use
    gt.grad(lambda z, s: jnp.real(z * jnp.sign(s)).sum())(Z, 1j * Z)
    gt.grad(lambda x: (x * jnp.sign(x)).sum())(X)


def test_a_complex_function_is_traced_once_for_its_signs():
    runs = []

    def f(z):
        runs.append(1)
        return jnp.sin(z)

    for _ in range(3):
        gt.jvp(f, (Z,), (DZ,))
    assert len(runs) == 1 + 3 if complex_sign_is_a_step() else 3


def test_why_zero_looks_at_a_program_whose_inner_program_holds_constants():
    report = gt.why_zero(lambda x: jax.scipy.special.spence(x).sum(), X[:2])
    assert not report
