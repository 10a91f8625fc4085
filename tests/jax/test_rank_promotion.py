"""A project may make an error of rank promotion, or of NaN: gradtools itself makes neither."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt


def rows(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape))


X, W, BIAS, LABELS, IDS = rows(4, 3), rows(5, 3), rows(5), jnp.arange(4), jnp.arange(4) // 2
Q = rows(2, 3, 4, 3)

PROGRAMS = {
    "contrastive_loss": lambda x: gt.contrastive_loss(x, X),
    "ids and negatives": lambda x: gt.contrastive_loss(x, X, ids=IDS, negatives=W),
    "sigmoid": lambda x: gt.contrastive_loss(x, X, ids=IDS, sigmoid=True, tile_size=2),
    "linear_cross_entropy": lambda x: gt.linear_cross_entropy(x, W, LABELS, BIAS),
    "smoothed": lambda x: gt.linear_cross_entropy(x, W, LABELS, label_smoothing=0.1),
    "chunked": lambda x: gt.chunked(lambda x: x * x, 3)(x).sum(),
    "logsumexp": lambda x: gt.pairwise_reduce(lambda x, y: x @ y.T, "logsumexp", 2)(x, W).sum(),
    "laplacian": lambda x: gt.laplacian(lambda x: jnp.tanh(x / 3).sum())(x),
    "max": lambda x: gt.pairwise_reduce(lambda x, y: x @ y.T, "max", 2)(x, W).sum(),
}
MASKS = {"none": None, "rows": rows(4, 1), "columns": rows(2, 1, 1, 4), "pairs": rows(4, 4)}


@pytest.mark.sampled(2, 9)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_make_no_nan_of_their_own(name):
    with jax.debug_nans(True):
        gt.value_and_grad(PROGRAMS[name])(X)


def test_debug_nans_names_a_target_outside_of_the_classes():
    outside = jnp.asarray([0, 7, 1, 2])
    loss = lambda labels: gt.linear_cross_entropy(X, W, labels)
    assert bool(jnp.isnan(loss(outside)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        loss(outside)
    ignored = gt.linear_cross_entropy(X, W, jnp.asarray([0, -100, 1, 2]))
    np.testing.assert_allclose(ignored, gt.linear_cross_entropy(X[LABELS != 1], W, jnp.arange(3)))


@pytest.mark.sampled(2, 9)
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_need_no_rank_promotion(name):
    f = PROGRAMS[name]
    with jax.numpy_rank_promotion("allow"):
        value, slope = gt.value_and_grad(f)(X)
    with jax.numpy_rank_promotion("raise"):
        checked, product = gt.value_and_grad(f)(X), gt.hvp(f, (X,), (X,))
    np.testing.assert_array_equal(checked[0], value)
    np.testing.assert_array_equal(checked[1], slope)
    assert bool(jnp.isfinite(product[1][0]).all())


@pytest.mark.sampled(2, 8)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("boolean", [False, True])
def test_attention_needs_no_rank_promotion(kind, boolean):
    mask = MASKS[kind]
    if boolean and mask is not None:
        mask = mask > -1
    f = lambda q: gt.attention(q, Q, Q, mask, is_causal=True, layout="heads_first").sum()
    expected = gt.grad(f)(Q)
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(gt.grad(f)(Q), expected)
