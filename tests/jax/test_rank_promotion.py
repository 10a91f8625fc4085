"""gradtools works with jax_numpy_rank_promotion="raise" and with jax_debug_nans=True."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
PROGRAMS = {
    "chunked": lambda x: gt.chunked(lambda x: x * x, 3)(x).sum(),
    "frozen": lambda x: (gt.frozen(jnp.tanh)(x) ** 2).sum(),
    "microbatched": lambda x: gt.microbatched_value_and_grad(lambda w, x: (w * x).mean(), 3)(
        x[:, 0].sum(), X
    )[0],
    "scale_gradient": lambda x: (gt.scale_gradient(x, 0.5) ** 2).sum(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_make_no_nan_of_their_own(name):
    with jax.debug_nans(True):
        gt.value_and_grad(PROGRAMS[name])(X)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_need_no_rank_promotion(name):
    f = PROGRAMS[name]
    with jax.numpy_rank_promotion("allow"):
        value, slope = gt.value_and_grad(f)(X)
    with jax.numpy_rank_promotion("raise"):
        checked, product = gt.value_and_grad(f)(X), gt.hvp(f, (X,), (X,))
    np.testing.assert_array_equal(checked[0], value)
    np.testing.assert_array_equal(checked[1], slope)
    assert bool(jnp.isfinite(product[1][0]).all())
