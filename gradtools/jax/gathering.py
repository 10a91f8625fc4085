"""Implements collectives in JAX along a named axis: `all_gather`, and sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.errors import GradtoolsError
from gradtools.jax.shardings import names, varies, varying


def all_gather(x: Any, axis_name: Any, group: Any) -> Any:
    """Concatenates the rows of all devices along axis 0. The transpose is a reduce-scatter."""
    check_axis("all_gather", axis_name, group)
    if any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(x)):
        raise GradtoolsError(
            "all_gather: got an array of shape (); expected arrays with rows along axis 0. For one "
            "number per device pass x[None]."
        )
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, axis_name, tiled=True), x)


def sum_over_ranks(xs: Sequence[Any], axis_name: Any) -> list[Any]:
    """Sums arrays over the devices along a named axis."""
    axes = frozenset(names(axis_name)) & tracked_axes(axis_name)
    return [jax.lax.psum(varying(jnp.asarray(x), axes), axis_name) for x in xs]


def tracked_axes(axis_name: Any) -> frozenset[Any]:
    """Returns the axes for which types record whether values vary (shard_map with check_vma)."""
    return frozenset().union(*[varies(jax.lax.axis_index(name)) for name in names(axis_name)])


def check_axis(caller: str, axis_name: Any, group: Any) -> None:
    """Raises an error if axis_name does not name mapped axes, or if a group is given."""
    if group is not None:
        raise GradtoolsError(
            f"{caller}: group is an argument for PyTorch; in JAX pass axis_name, a mapped axis."
        )
    if axis_name is None:
        raise GradtoolsError(
            f"{caller}: axis_name is missing; expected the name of an axis that shard_map, vmap or "
            "pmap maps, or a tuple of names."
        )
    try:
        jax.lax.psum(1, axis_name)  # the size of the axes, a constant
    except NameError:
        raise GradtoolsError(
            f"{caller}: {axis_name!r} is not a mapped axis here. Call {caller} in a function that "
            "shard_map, vmap or pmap maps over an axis with this name."
        ) from None
