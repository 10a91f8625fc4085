"""A random key shared by all chunks raises an error; key_argnums derives a key per chunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError

X, KEY = jnp.ones((8, 4)), jax.random.key(0)


def drop(x, key):
    return x * jax.random.bernoulli(key, 0.5, x.shape) * 2


SHARED = {
    "captured": lambda x: drop(x, KEY),
    "a legacy key": lambda x: drop(x, jax.random.PRNGKey(0)),
    "a key split over the examples": lambda x: jax.vmap(drop)(x, jax.random.split(KEY, len(x))),
    "a key split over a loop": lambda x: jax.lax.scan(
        lambda c, k: (drop(c, k), None), x, jax.random.split(KEY, 2)
    )[0],
}
HEALTHY = {
    "random features": lambda x: x @ jax.random.normal(KEY, (4, 3)),
    "a mask of weights": lambda x: x @ drop(jnp.ones((4, 3)), KEY),
    "folded with data": lambda x: jax.vmap(
        lambda x: drop(x, jax.random.fold_in(KEY, x[0].astype(int)))
    )(x),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", SHARED)
def test_a_key_that_all_chunks_share_is_refused(name, size, wrap):
    with pytest.raises(GradtoolsError, match=r"chunked: .* name it in key_argnums"):
        wrap(gt.chunked(SHARED[name], size))(X)
    with pytest.raises(
        GradtoolsError, match=r"microbatched_value_and_grad: .* name it in key_argnums"
    ):
        wrap(
            gt.microbatched_value_and_grad(
                lambda w, x: (w * SHARED[name](x)).sum(), size, reduction="sum"
            )
        )(1.0, X)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_drawn_for_the_whole_batch_passes(name, size):
    np.testing.assert_allclose(gt.chunked(HEALTHY[name], size)(X), HEALTHY[name](X), rtol=1e-6)


def test_a_key_that_is_named_carried_or_split_passes():
    named = gt.chunked(drop, 2, in_axes=(0, None), key_argnums=1)(X, KEY)
    want = [drop(X[:2], jax.random.fold_in(KEY, i)) for i in range(4)]
    np.testing.assert_array_equal(named, jnp.concatenate(want))
    of_examples = gt.chunked(lambda x, k: jax.vmap(drop)(x, k), 2)
    keys = jax.random.split(KEY, 8)
    np.testing.assert_array_equal(of_examples(X, keys), jax.vmap(drop)(X, keys))
    carried = lambda x, k: (drop(x, k), jax.random.split(k)[0])
    out, _ = gt.chunked(carried, 4, in_axes=(0, None), carry_argnums=1)(X, KEY)
    assert (out[:4] != out[4:]).any()
