"""Pytrees and dtypes in JAX, as the waist speaks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.containers import Containers, OpenedTree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure: JAX's own, or one with containers."""
    return _CONTAINERS.opened(*jax.tree.flatten(tree))


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    """The tree with these leaves."""
    if type(treedef) is OpenedTree:
        return _CONTAINERS.closed(treedef, leaves)
    return jax.tree.unflatten(treedef, leaves)


def leaf_paths(tree: Any) -> list[str]:
    """Where each leaf stands, such as `['w'][0]`."""
    return _CONTAINERS.paths(tree)


def _leaf_paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


_CONTAINERS = Containers(jax.tree.flatten, jax.tree.unflatten, _leaf_paths, _is_array)


def is_inexact(x: Any) -> bool:
    """Whether x has a floating or complex dtype."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def conj(x: Any) -> Any:
    """The complex conjugate; a real array as it is."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
