"""Implements the functions of the backend interface on pytrees and dtypes in JAX.

Like the pullback of `jax.vjp`, a pullback is a pytree whose leaves are residuals, so it can be
passed to and returned from jit, scan and custom rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.boundary import repr_of_linear, user_facing
from gradtools.integrations.containers import Containers, OpenedTree
from gradtools.jax import shardings


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Flattens a tree.

    The structure is a JAX treedef, or an `OpenedTree` if user-defined containers were flattened.
    """
    if isinstance(tree, jax.Array):
        return [tree], _LEAF
    return _CONTAINERS.opened(*jax.tree.flatten(tree))


def flatten_arrays(tree: Any) -> tuple[list[Any], Any, list[str | None]]:
    """Implements `Backend.flatten_arrays`.

    Every derivative calls this function, so it must be fast.
    """
    leaves, treedef = flatten(tree)
    kinds: list[str | None] = [None] * len(leaves)
    for i, x in enumerate(leaves):
        if is_array(x):
            is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
            is_real = jnp.issubdtype(x.dtype, jnp.floating)
            kinds[i] = "complex" if is_complex else "real" if is_real else "exact"
    return leaves, treedef, kinds


_LEAF = jax.tree.structure(0)


def is_array(x: Any) -> bool:
    # A TypedFloat, a literal of a jaxpr, is also registered as a jax.Array.
    return isinstance(x, jax.Array) and not isinstance(x, int | float | complex)


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    if type(treedef) is OpenedTree:
        return _CONTAINERS.closed(treedef, leaves)
    return jax.tree.unflatten(treedef, leaves)


def entries_of(treedef: Any, leaves: Sequence[Any]) -> list[tuple[list[Any], Any]]:
    """Implements `Backend.entries_of` without calling constructors, which may inspect leaves."""
    if type(treedef) is OpenedTree:
        return [flatten(x) for x in unflatten(treedef, leaves)]
    left = iter(leaves)
    return [([next(left) for _ in range(t.num_leaves)], t) for t in treedef.children()]


_CONTAINERS = Containers(
    "jax",
    jax.tree.flatten,
    jax.tree.unflatten,
    lambda tree: [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)],
    lambda x: isinstance(x, jax.Array | np.ndarray),
)
leaf_paths = _CONTAINERS.paths


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def conj(x: Any) -> Any:
    """Returns the complex conjugate of an array. Real arrays are unchanged."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def zeros_of(aval: Any) -> Any:
    """Returns zeros with the shape, dtype, sharding and varying axes of an aval."""
    zeros = shardings.like(jnp.zeros(aval.shape, aval.dtype), aval)
    return shardings.varying(zeros, shardings.varies(aval))


@jax.tree_util.register_dataclass
@dataclass(eq=False, repr=False)
class LinearMap:
    """A pullback or pushforward as a pytree: a static function, and a JAX map with residuals.

    Two maps have the same structure if their functions are the same object.
    """

    run: Callable[..., Any] = field(metadata={"static": True})
    native: Any
    __doc__ = property(lambda self: self.run.__doc__)  # type: ignore[assignment]

    @user_facing
    def __call__(self, *args: Any) -> Any:
        return self.run(self.native, *args)

    def __repr__(self) -> str:
        return repr_of_linear(self.run)


def likes_of(xs: Sequence[Any]) -> list[Any]:
    """Returns the aval of each inexact array, and None for other values."""
    avals = [jax.typeof(x) for x in xs]
    return [aval.update(weak_type=False) if is_inexact(aval) else None for aval in avals]


def without_none(xs: Sequence[Any]) -> list[Any]:
    return [x for x in xs if x is not None]


def filled(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """Replaces None in `values` with zeros, unless the entry of `likes` is None."""
    pairs = zip(values, likes, strict=True)
    return [zeros_of(like) if v is None and like is not None else v for v, like in pairs]


def zero_cotangent(y: Any) -> Any:
    """Returns zeros for an output y (an array or aval). For an integer, the dtype is float0."""
    return zeros_of(y) if is_inexact(y) else np.zeros(y.shape, jax.dtypes.float0)


def struct_of(aval: Any) -> Any:
    """Returns the `ShapeDtypeStruct` of an array or aval, with its sharding."""
    sharding = aval.sharding if any(shardings.entries(aval)) else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def all_known(xs: Sequence[Any]) -> bool:
    return not any(isinstance(x, jax.core.Tracer) for x in xs)
