"""Code that JAX cannot differentiate raises an error that explains the fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl

import gradtools.jax as gt
from gradtools.errors import DisconnectedInputError, GradtoolsError

X = jnp.array([0.3, 0.7, 1.1])
SPEC = jax.ShapeDtypeStruct((3,), np.float64)


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


def loop(x):
    return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


def squares(f):
    return lambda *xs: (f(*xs) ** 2).sum()


FIRST = {
    "grad": lambda f: gt.grad(squares(f))(X),
    "jit of grad": lambda f: jax.jit(gt.grad(squares(f)))(X),
    "vjp": lambda f: gt.vjp(f, X)[1](2 * jnp.sin(X))[0],
    "linearize": lambda f: gt.linearize(f, X)[1](2 * jnp.sin(X)),
    "jacobian, reverse": lambda f: 2 * gt.jacobian(f, mode="reverse")(X) @ jnp.sin(X),
    "frozen": lambda f: gt.grad(squares(gt.frozen(f)))(X),
}
SLOPE = np.sin(2 * np.array(X))
REFUSED = {
    pure: "host_function.*Pure callbacks",
    io: "host_function.*IO callbacks",
    ffi: "host_function.*FFI call",
    pallas: "forward rule only.*Linearization failed",
    loop: "unknown number of iterations.*Reverse-mode differentiation",
}
IN_REVERSE = ["grad", "jit of grad", "vjp", "linearize", "jacobian, reverse", "frozen"]


@pytest.mark.slow_at(("grad", "loop"), ("jacobian, reverse", "loop"), ("frozen", "loop"))
@pytest.mark.parametrize("f", REFUSED)
@pytest.mark.parametrize("way", IN_REVERSE)
@pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")
def test_what_jax_does_not_differentiate_is_refused_in_words_with_a_mend(f, way):
    if f is loop and way == "linearize":  # linearize propagates tangents through the loop
        np.testing.assert_allclose(FIRST[way](f), SLOPE, rtol=1e-12)
        return
    with pytest.raises(GradtoolsError, match=rf"(?s)^\w+: [fG] .*{REFUSED[f]}") as raised:
        FIRST[way](f)
    assert isinstance(raised.value, ValueError)  # the error of JAX is also a ValueError


def test_a_callback_that_is_reached_by_stopped_inputs_alone_is_a_cut():
    with pytest.raises(DisconnectedInputError, match="argument 0 does not reach"):
        gt.grad(lambda x: pure(jax.lax.stop_gradient(x)).sum())(X)
