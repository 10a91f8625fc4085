"""Tests derivatives of custom rules in JAX after the elimination of unused outputs.

The expected values come from JAX's own `custom_jvp` and `custom_vjp`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval as pe

import gradtools.jax as gt

X, Y = jnp.array([0.5, -1.5]), jnp.array([1.0, 2.0])
ONES = jnp.ones(2)


def two(x, y):
    return jnp.sin(x), x + jnp.cos(y)


def forward(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return two(x, y), (2 * jnp.cos(x) * dx, 1.5 * dx - 0.5 * jnp.sin(y) * dy)


def fwd(x, y):
    return two(x, y), (jnp.cos(x), jnp.sin(y))


def bwd(saved, cts):
    (cos, sin), (a, b) = saved, cts
    return 2 * cos * a + 1.5 * b, -0.5 * sin * b


def by_jvp(new):
    f = new(two)
    f.defjvp(forward)
    return f


def by_vjp(new):
    f = new(two)
    f.defvjp(fwd, bwd)
    return f


NATIVE = {by_jvp: jax.custom_jvp, by_vjp: jax.custom_vjp}
both = pytest.mark.parametrize("given", [by_jvp, by_vjp])


# --- unused outputs


def part(f, used, args=(X, Y)):
    """Return f without its unused outputs as a jaxpr and as a function (dead code elimination)."""
    jaxpr, _ = pe.dce_jaxpr(jax.make_jaxpr(f)(*args).jaxpr, used)
    return jaxpr, lambda *xs: jax.core.eval_jaxpr(jaxpr, [], *xs)


@pytest.mark.slow_at("by_jvp")
@pytest.mark.sweep_at("first")
@both
@pytest.mark.parametrize("used", [(True, False), (False, True)], ids=["first", "second"])
def test_derivatives_of_a_rule_whose_outputs_are_not_all_used_are_those_of_jax(given, used):
    _, ours = part(given(gt.custom_rule), used)
    _, native = part(given(NATIVE[given]), used)
    grad = lambda f: jax.grad(lambda *xs: f(*xs)[0].sum(), (0, 1))
    for derive in (
        lambda f: f,
        jax.jit,
        grad,
        lambda f: jax.jit(grad(f)),
        lambda f: lambda x, y: jax.vmap(grad(f))(jnp.stack([x, y]), jnp.stack([y, x])),
        lambda f: jax.grad(lambda x, y: (grad(f)(x, y)[0] ** 2).sum(), (0, 1)),
        lambda f: grad(lambda x, y: jax.vmap(f)(x[None], y[None])),
    ):
        found, expected = derive(ours)(X, Y), derive(native)(X, Y)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    found = jax.jvp(lambda *xs: ours(*xs)[0], (X, Y), (ONES, Y))[1]
    cos, sin = jnp.cos(X), jnp.sin(Y)
    np.testing.assert_allclose(found, 2 * cos if used[0] else 1.5 - 0.5 * sin * Y, rtol=1e-6)
