"""Pytrees and dtypes in JAX, as the waist speaks of them.

A pullback is a pytree of what it keeps, as `jax.vjp`'s is: it passes through jit, scan and rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.boundary import user_facing
from gradtools.integrations.containers import Containers, OpenedTree
from gradtools.jax import shardings


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure: JAX's own, or one with containers."""
    if isinstance(tree, jax.Array):
        return [tree], _LEAF
    return _CONTAINERS.opened(*jax.tree.flatten(tree))


def flatten_arrays(tree: Any) -> tuple[list[Any], Any, list[str | None]]:
    """The leaves and the structure, and whether each leaf is real, complex, exact or no array."""
    leaves, treedef = flatten(tree)
    kinds: list[str | None] = []
    for x in leaves:
        kind = None
        if is_array(x):
            kind = "exact"
            if jnp.issubdtype(x.dtype, jnp.inexact):
                kind = "complex" if jnp.issubdtype(x.dtype, jnp.complexfloating) else "real"
        kinds.append(kind)
    return leaves, treedef, kinds


_LEAF = jax.tree.structure(0)


def is_array(x: Any) -> bool:
    # A literal of a program that is traced, a float with a dtype, says that it is one too.
    return isinstance(x, jax.Array) and not isinstance(x, int | float | complex)


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    if type(treedef) is OpenedTree:
        return _CONTAINERS.closed(treedef, leaves)
    return jax.tree.unflatten(treedef, leaves)


def leaf_paths(tree: Any) -> list[str]:
    return _CONTAINERS.paths(tree)


def _leaf_paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


_CONTAINERS = Containers(jax.tree.flatten, jax.tree.unflatten, _leaf_paths, _is_array)


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def conj(x: Any) -> Any:
    """The complex conjugate; a real array as it is."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def zeros_of(aval: Any) -> Any:
    """Zeros like an abstract array: sharded as it is, varying under shard_map as it does."""
    zeros = shardings.like(jnp.zeros(aval.shape, aval.dtype), aval)
    return shardings.varying(zeros, shardings.varies(aval))


class LinearMap:
    """A pullback or pushforward: a function that holds no arrays, and JAX's own, which does.

    Two are of one structure where the function is the same.
    """

    def __init__(self, run: Callable[..., Any], native: Any) -> None:
        self.run, self.native = run, native

    @user_facing
    def __call__(self, *args: Any) -> Any:
        return self.run(self.native, *args)

    def __repr__(self) -> str:
        return f"<{getattr(self.run, '__name__', 'linear map')}>"


jax.tree_util.register_pytree_node(
    LinearMap,
    lambda linear: ((linear.native,), linear.run),
    lambda run, children: LinearMap(run, *children),
)


def likes_of(xs: Sequence[Any]) -> list[Any]:
    """What each array looks like; None for one that is not differentiated."""
    avals = [jax.typeof(x) for x in xs]
    return [aval.update(weak_type=False) if is_inexact(aval) else None for aval in avals]


def without_none(xs: Sequence[Any]) -> list[Any]:
    return [x for x in xs if x is not None]


def filled(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """`values` with zeros for None, where there is something to be zero."""
    pairs = zip(values, likes, strict=True)
    return [zeros_of(like) if v is None and like is not None else v for v, like in pairs]


def struct_of(aval: Any) -> Any:
    """Shape, dtype and sharding of an array or its type."""
    sharding = aval.sharding if any(shardings.entries(aval)) else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def all_known(xs: Sequence[Any]) -> bool:
    return not any(isinstance(x, jax.core.Tracer) for x in xs)
