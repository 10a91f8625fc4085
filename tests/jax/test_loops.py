"""Loops over a batch outside of any trace: compiled once for bodies that do the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools.jax import compiled_once
from gradtools.jax.engines import stage
from gradtools.jax.slicing import map_batch

X = np.array([0.3, -1.2, 0.7])


def programs() -> int:
    return len(jax.devices()[0].client.live_executables())


def diagonal(f):
    """The diagonal of f's Jacobian, one row at a time; f works entry by entry."""
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


def test_what_a_body_closes_over_is_read_anew():
    for shift in (0.0, 1.0, 2.0):
        array = jnp.asarray(X + shift)
        np.testing.assert_allclose(diagonal(lambda x: x * x * array), 2 * X * (X + shift))


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("order", [(1.0, 3.0), (3.0, 1.0)])
def test_bodies_that_differ_in_a_number_are_two(order):
    for factor in order:
        f = lambda x: jnp.where(x > 0, x * factor, 0.0) + x**2
        np.testing.assert_allclose(diagonal(f), (X > 0) * factor + 2 * X)


def test_bodies_that_differ_in_an_inner_function_are_two():
    for outer, slope in ((jnp.sin, np.cos), (jnp.cos, lambda x: -np.sin(x))):
        inner = jax.jit(outer)
        np.testing.assert_allclose(diagonal(lambda x: inner(x) + 0.0), slope(X))


def test_bodies_that_differ_in_a_rule_are_two():
    for factor in (2.0, 5.0):
        rule = gt.custom_rule(jnp.sin)
        rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, c, k=factor: (k * c,))
        np.testing.assert_allclose(diagonal(rule), factor)


def test_bodies_that_differ_in_the_number_of_their_results_are_two():
    for count in (1, 2):
        found = map_batch(lambda x, n=count: [x * 2] * n, [jnp.asarray(X)], None)
        assert len(found) == count


def test_within_a_trace_the_loop_is_part_of_it():
    f = lambda x: gt.jacobian(jnp.sin, chunk_size=2)(x)
    np.testing.assert_allclose(np.diag(jax.jit(f)(jnp.asarray(X))), np.cos(X))


def test_a_wide_jacobian_of_a_rule_without_forward_mode_is_pulled_back():
    f = lambda x: jnp.tile(gt.clip_gradient(x, max_value=0.5) ** 2, 3)
    x = jnp.asarray([0.2, 3.0])
    expected = gt.jacobian(f, mode="reverse")(x)
    np.testing.assert_array_equal(gt.jacobian(f)(x), expected)


def test_a_loop_that_no_argument_moves_leaves_the_jacobian_to_reverse_mode():
    drawn = lambda x: (x * jax.random.gamma(jax.random.key(0), 2.0, x.shape)).sum()
    solved = lambda x: jax.scipy.sparse.linalg.cg(lambda v: v * (2 + x), jnp.ones(3))[0].sum()
    for f in (drawn, solved):
        staged = stage(lambda x, f=f: ([f(x)], []), [jnp.ones(3)])
        assert staged.jacobian_mode == "reverse"
        np.testing.assert_allclose(gt.jacobian(f)(jnp.ones(3)), jax.grad(f)(jnp.ones(3)), rtol=1e-6)
