"""What plain JAX does to a rule of one's own, and what ours does in its place.

Each test holds the upstream limit as it is today: it fails, and so tells, when upstream is mended.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt

X = jnp.array([0.5, -1.5, 2.0])
ONES = jnp.ones(3)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0)


def callback(x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.asarray(x) ** 3, like, x, vmap_method="sequential")


def derivative(primals, tangents):
    (x,), (dx,) = primals, tangents
    return x**3, 3 * x**2 * dx


def gradient(f):
    return jax.grad(lambda x: f(x).sum())


def test_3996_a_function_with_a_reverse_rule_has_no_forward_mode():
    plain = jax.custom_vjp(lambda x: x**3)
    plain.defvjp(lambda x: (x**3, x), lambda x, c: (3 * x**2 * c,))
    with pytest.raises(TypeError, match="can't apply forward-mode"):
        jax.jvp(plain, (X,), (ONES,))
    ours = gt.custom_rule(lambda x: jax.lax.stop_gradient(x) ** 3)
    ours.defvjp(lambda x: (x**3, x), lambda x, c: (3 * x**2 * c,))
    close(jax.jvp(ours, (X,), (ONES,))[1], 3 * X**2)
    close(jax.jacfwd(jax.jacfwd(lambda x: ours(x).sum()))(X), np.diag(6 * X))


def test_3996_of_a_forward_and_a_reverse_rule_on_one_function_one_is_lost():
    """The rules differ on purpose, so that what was used shows."""
    hundred = lambda f: f.defvjp(lambda x: (x**3, None), lambda _, c: (100 * c,))
    inner = jax.custom_vjp(lambda x: x**3)
    hundred(inner)
    jvp_outside = jax.custom_jvp(lambda x: inner(x))
    jvp_outside.defjvp(derivative)
    close(gradient(jvp_outside)(X), 3 * X**2)  # not the reverse rule's 100

    forward = jax.custom_jvp(lambda x: x**3)
    forward.defjvp(derivative)
    vjp_outside = jax.custom_vjp(lambda x: forward(x))
    hundred(vjp_outside)
    with pytest.raises(TypeError, match="can't apply forward-mode"):
        jax.jvp(vjp_outside, (X,), (ONES,))

    ours = gt.custom_rule(lambda x: x**3)
    hundred(ours)
    ours.defjvp(derivative)
    close(gradient(ours)(X), 100 * ONES)
    close(jax.jvp(ours, (X,), (ONES,))[1], 3 * X**2)


def test_30401_a_host_callback_has_no_derivative():
    for differentiated in (gradient(callback), lambda x: jax.jvp(callback, (x,), (ONES,))):
        with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
            differentiated(X)
    ours = gt.host_function(lambda x: x**3)
    ours.defvjp(lambda x: (ours(x), x), lambda x, c: (3 * x**2 * c,))
    close(gradient(ours)(X), 3 * X**2)
    close(jax.jvp(ours, (X,), (ONES,))[1], 3 * X**2)
    close(jax.hessian(lambda x: ours(x).sum())(X), np.diag(6 * X))


def test_a_scan_drops_the_rule_around_a_callback_at_second_order():
    plain = jax.custom_jvp(callback)
    plain.defjvp(lambda xs, dxs: (plain(*xs), 3 * xs[0] ** 2 * dxs[0]))
    ours = gt.host_function(lambda x: x**3)
    ours.defjvp(lambda xs, dxs: (ours(*xs), 3 * xs[0] ** 2 * dxs[0]))

    def scanned(f):
        return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0].sum()

    close(jax.hessian(lambda x: plain(x).sum())(X), np.diag(6 * X))  # without a scan it is there
    close(jax.grad(scanned(plain))(X), 9 * X**8)
    for second in (jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        if jax.__version_info__ < (0, 12):  # mended there
            with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
                second(scanned(plain))(X)
        else:
            close(second(scanned(plain))(X), np.diag(72 * X**7))
        close(second(scanned(ours))(X), np.diag(72 * X**7))
