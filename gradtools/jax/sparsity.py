"""Builds the sparse arrays (BCOO) that `gradtools.sparse_jacobians` returns."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO


def sparse_array(index: np.ndarray, values: jax.Array, shape: Sequence[int]) -> BCOO:
    """Creates a BCOO array. `index` has one row per axis, and has sorted and unique columns."""
    indices = jnp.asarray(index.T, np.int32)
    return BCOO((values, indices), shape=tuple(shape), indices_sorted=True, unique_indices=True)


def summed(groups: np.ndarray, terms: jax.Array, like: jax.Array) -> jax.Array:
    """Sums the terms of each group. The result has the shape and dtype of `like`."""
    return jnp.zeros_like(like).at[groups].add(terms)
