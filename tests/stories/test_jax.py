"""Tests programs from public reports about JAX, each with its source and the correct result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError
from tests.support.scenarios import Table

STORIES = Table()


def near(result: Any, expected: Any, rtol: float = 1e-10) -> None:
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def kinds(f: Callable[..., Any], *args: Any) -> set[str]:
    return {finding.kind for finding in gt.why_zero(f, *args).findings}


# --- NaN


@STORIES.add(source="jax-ml/jax#5798")
def where_hides_a_value_and_not_a_slope():
    f = lambda x: jnp.where(x < 1, x, jnp.sqrt(x))
    assert bool(jnp.isnan(gt.grad(f)(0.0)))
    assert "nan" in kinds(f, jnp.asarray(0.0))
    safe = lambda x: jnp.where(x < 1, x, jnp.sqrt(jnp.where(x < 1, 1.0, x)))
    near(gt.grad(safe)(0.0), 1.0)
    near(gt.grad(safe)(4.0), 0.25)


@STORIES.add(source="jax-ml/jax#1052")
def the_logarithm_of_the_branch_not_taken():
    f = lambda x: jnp.where(x > 0, jnp.log(x), 0.0)
    assert bool(jnp.isnan(gt.grad(f)(0.0)))
    assert "nan" in kinds(f, jnp.asarray(0.0))


@STORIES.add(source="jax-ml/jax#6484")
def the_squared_norm_at_equal_points():
    distance = lambda x, y: jnp.linalg.norm(x - y) ** 2
    x = jnp.array([1.0, 2.0, 3.0])
    assert bool(jnp.isnan(gt.grad(distance)(x, x)).all())
    assert "nan" in kinds(lambda x: distance(x, jnp.array([1.0, 2.0, 3.0])), x)
    near(gt.grad(lambda x, y: ((x - y) ** 2).sum())(x, x), jnp.zeros(3))


@STORIES.add(source="jax-ml/jax#26248")
def a_scale_before_and_after_the_norm():
    """Two forms of one function have different gradients with respect to the scale: NaN and 0."""
    x = jnp.zeros(2)
    inside, outside = (
        lambda a: jnp.linalg.norm(a * x),
        lambda a: jnp.abs(a) * jnp.linalg.norm(x),
    )
    assert bool(jnp.isnan(gt.grad(inside)(1.3)))
    near(gt.grad(outside)(1.3), 0.0)
    assert "nan" in kinds(inside, jnp.asarray(1.3))


@STORIES.add(source="jax-ml/jax#654")
def distances_of_charges_to_themselves():
    """A mask after the division gives a NaN gradient unless the distance is also masked."""
    charges, points = draw(4), draw(4, 3, seed=1)
    keep = 1 - jnp.eye(4)

    def energy(points, safe):
        square = ((points[:, None] - points[None]) ** 2).sum(-1)
        distance = jnp.sqrt(jnp.where(keep, square, 1.0) if safe else square)
        pairs = charges[:, None] * charges[None]
        return jnp.where(keep, pairs / distance, 0.0).sum()

    assert bool(jnp.isnan(gt.grad(energy)(points, False)).any())
    assert "nan" in kinds(lambda p: energy(p, False), points)
    reverse = gt.jacobian(lambda p: energy(p, True), mode="reverse")(points)
    near(gt.jacobian(lambda p: energy(p, True), mode="forward")(points), reverse)
    assert bool(jnp.isfinite(reverse).all())


# --- complex numbers


@STORIES.add(source="jax-ml/jax#4891")
def a_gradient_is_what_the_inner_product_says():
    """For every v, Re vdot(grad, v) equals jvp(v)."""
    f = lambda z: jnp.abs(jnp.sin(z).sum()) ** 2
    z, v = draw(3) + 1j * draw(3, seed=1), draw(3, seed=2) + 1j * draw(3, seed=3)
    near(jnp.vdot(gt.grad(f)(z), v).real, gt.jvp(f, (z,), (v,))[1])


# --- second order and mixed modes


@STORIES.add(source="google-research/t5x#351")
def a_reverse_rule_for_a_loss_serves_hessians():
    def value(logits, label):
        return jax.nn.logsumexp(logits) - logits[label]

    loss = gt.custom_rule(value)
    loss.defvjp(
        lambda z, t: (value(z, t), (z, t)),
        lambda res, c: (c * (jax.nn.softmax(res[0]) - jax.nn.one_hot(res[1], 4)), None),
    )
    z = draw(4)
    near(jax.jacfwd(jax.grad(loss))(z, 2), jax.hessian(value)(z, 2))
    near(gt.hessian(loss)(z, 2), jax.hessian(value)(z, 2))


@STORIES.add(source="google/jaxopt#474")
def the_hessian_of_a_ridge_solution():
    """Compute a Hessian in forward-over-reverse mode through a rule that solves a linear system."""
    x, y = draw(8, 3), draw(8, seed=1)
    solve = lambda theta: jnp.linalg.solve(x.T @ x + theta * jnp.eye(3), x.T @ y)
    ridge = gt.custom_rule(solve)

    def bwd(res, ct):
        theta, w = res
        u = jnp.linalg.solve(x.T @ x + theta * jnp.eye(3), ct)
        return (-(u @ w),)

    ridge.defvjp(lambda theta: ((w := ridge(theta)), (theta, w)), bwd)
    loss = lambda f: lambda theta: ((x @ f(theta) - y) ** 2).sum()
    near(jax.hessian(loss(ridge))(0.7), jax.hessian(loss(solve))(0.7), rtol=1e-8)


@STORIES.add(source="jax-ml/jax#3727")
def forward_mode_under_vmap_of_a_reverse_rule():
    f = gt.custom_rule(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, c: (jnp.cos(x) * c,))
    x = draw(3)
    near(jax.jacfwd(f)(x), jnp.diag(jnp.cos(x)))
    near(jax.vmap(jax.jacfwd(f))(draw(2, 3)), jax.vmap(jax.jacfwd(jnp.sin))(draw(2, 3)))


# --- rules


@STORIES.add(source="jax-ml/jax#2912")
def an_array_among_the_arguments_that_have_no_derivative():
    """A traced array leaks a tracer if it is in `nondiff_argnums`, but not as a plain argument."""
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
    """Forward mode of a linear transform transposes the reverse rule, which is the adjoint."""
    matrix = draw(5, 4) + 1j * draw(5, 4, seed=1)
    transform = gt.custom_rule(lambda x: matrix @ x)
    transform.defvjp(lambda x: (matrix @ x, None), lambda _, c: (matrix.conj().T @ c,))
    x, dx = draw(4, seed=2) + 0j, draw(4, seed=3) + 1j * draw(4, seed=4)
    near(gt.jvp(transform, (x,), (dx,))[1], matrix @ dx)


# --- chunks and accumulation


@STORIES.add(source="jax-ml/jax#3646")
def one_key_for_several_draws():
    """A key shared by all chunks raises an error; key_argnums derives a key for each chunk."""
    drop = lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape)
    x, key = jnp.ones((6, 8)), jax.random.key(0)
    with pytest.raises(GradtoolsError, match="key that chunks share"):
        gt.chunked(lambda x: drop(x, key), 2)(x)
    rows = gt.chunked(drop, 2, key_argnums=1)(x, key)
    assert not bool((rows[:2] == rows[2:4]).all())


# --- devices


@STORIES.add(source="jax-ml/jax#7047")
def a_rule_that_sums_over_a_mapped_axis():
    f = gt.custom_rule(lambda x: jax.lax.psum(x, "i"))
    f.defvjp(lambda x: (jax.lax.psum(x, "i"), None), lambda _, c: (c,))
    near(jax.vmap(f, axis_name="i")(jnp.arange(4.0)), jnp.full(4, 6.0))


@pytest.mark.slow_at(
    "the hessian of a ridge solution",
    "a reverse rule for a loss serves hessians",
    "distances of charges to themselves",
)
@pytest.mark.sampled(24, 100)
@pytest.mark.parametrize("story", STORIES.cases())
def test_the_program_gives_what_is_true(story):
    story.program()
