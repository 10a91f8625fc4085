"""Eager loops over a batch compile once for bodies that compute the same function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import gradtools.jax as gt
from gradtools.jax import compiled_once

X = np.array([0.3, -1.2, 0.7])


def programs() -> int:
    return len(jax.devices()[0].client.live_executables())


def diagonal(f):
    """Return the diagonal of f's Jacobian, computed row by row; f is elementwise."""
    return np.diag(np.asarray(gt.jacobian(f, chunk_size=1)(jnp.asarray(X))))


def test_a_body_that_does_the_same_is_not_compiled_again():
    def run(array):
        diagonal(lambda x: jnp.sin(x) * array)

    run(jnp.asarray(X))
    run(jnp.asarray(X + 1))
    before, kept = programs(), compiled_once._derived.cache_info().currsize
    for shift in (2.0, 3.0):
        run(jnp.asarray(X + shift))
    assert programs() == before
    assert compiled_once._derived.cache_info().currsize == kept


def test_bodies_that_differ_in_a_rule_are_two():
    for factor in (2.0, 5.0):
        rule = gt.custom_rule(jnp.sin)
        rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, c, k=factor: (k * c,))
        np.testing.assert_allclose(diagonal(rule), factor)


def test_a_wide_jacobian_of_a_rule_without_forward_mode_is_pulled_back():
    f = lambda x: jnp.tile(gt.clip_gradient(x, max_value=0.5) ** 2, 3)
    x = jnp.asarray([0.2, 3.0])
    expected = gt.jacobian(f, mode="reverse")(x)
    np.testing.assert_array_equal(gt.jacobian(f)(x), expected)
