"""Programs from public reports about JAX, retold, each with its source and its truth.

Part two: rules, host functions, chunks, accumulation, losses over all pairs, flax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError
from tests.stories.test_jax_first import draw, near
from tests.support.scenarios import Table

STORIES = Table()


# --- rules


@STORIES.add(source="jax-ml/jax#2912")
def an_array_among_the_arguments_that_have_no_derivative():
    """`nondiff_argnums` of a traced array leaks a tracer; here it is an argument like another."""
    f = gt.custom_rule(lambda s, p: s * p)
    f.defvjp(lambda s, p: (s * p, s), lambda s, c: (None, s * c))
    g = jax.jit(lambda s, p: f(s, p))
    near(gt.grad(lambda p: g(0.2, p))(0.1), 0.2)


@STORIES.add(source="jax-ml/jax#20889")
def a_mask_in_a_scan():
    func = gt.custom_rule(lambda x, mask: x * mask)
    func.defjvp(lambda xs, dxs: (func(*xs), dxs[0] * xs[1]))

    def loss(x, mask):
        step = lambda carry, _: (func(carry, mask), None)
        return jax.lax.scan(step, x, None, length=2)[0].sum()

    x, mask = jnp.ones(6), jnp.arange(6) % 2 == 0
    near(gt.grad(loss)(x, mask), mask * 1.0)
    near(jax.jit(jax.grad(loss))(x, mask), mask * 1.0)


@STORIES.add(source="jax-ml/jax#4008")
def a_differentiated_value_that_a_rule_closes_over_is_refused():
    def f(w, x):
        scaled = gt.custom_rule(lambda x: w * x)
        scaled.defvjp(lambda x: (w * x, None), lambda _, c: (w * c,))
        return scaled(x)

    near(jax.jit(jax.vmap(f))(jnp.array([2.0, 3.0]), jnp.ones(2)), jnp.array([2.0, 3.0]))
    near(gt.grad(f, 1)(2.0, 1.0), 2.0)
    with pytest.raises(GradtoolsError, match="closes over"):
        gt.grad(f)(2.0, 1.0)


@STORIES.add(source="astro-informatics/s2fft#165")
def forward_mode_of_a_transform_with_its_own_adjoint():
    """A linear transform whose reverse rule is its adjoint, pushed by transposing it."""
    matrix = draw(5, 4) + 1j * draw(5, 4, seed=1)
    transform = gt.custom_rule(lambda x: matrix @ x)
    transform.defvjp(lambda x: (matrix @ x, None), lambda _, c: (matrix.conj().T @ c,))
    x, dx = draw(4, seed=2) + 0j, draw(4, seed=3) + 1j * draw(4, seed=4)
    near(gt.jvp(transform, (x,), (dx,))[1], matrix @ dx)


# --- chunks and accumulation


@STORIES.add(source="jax-ml/jax#3646")
def one_key_for_several_draws():
    """The same key for each chunk is refused; a key that is named is folded for each chunk."""
    drop = lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape)
    x, key = jnp.ones((6, 8)), jax.random.key(0)
    with pytest.raises(GradtoolsError, match="key that all chunks share"):
        gt.chunked(lambda x: drop(x, key), 2)(x)
    rows = gt.chunked(drop, 2, key_argnums=1)(x, key)
    assert not bool((rows[:2] == rows[2:4]).all())


# --- devices


@STORIES.add(source="jax-ml/jax#7047")
def a_rule_that_sums_over_a_mapped_axis():
    f = gt.custom_rule(lambda x: jax.lax.psum(x, "i"))
    f.defvjp(lambda x: (jax.lax.psum(x, "i"), None), lambda _, c: (c,))
    near(jax.vmap(f, axis_name="i")(jnp.arange(4.0)), jnp.full(4, 6.0))


@pytest.mark.sampled(16, 100)
@pytest.mark.parametrize("story", STORIES.cases())
def test_the_program_gives_what_is_true(story):
    story.program()
