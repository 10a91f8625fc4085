"""`all_gather` in JAX: a differentiable all-gather along a named axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gradtools.errors import GradtoolsError


def all_gather(x: Any, axis_name: Any, group: Any) -> Any:
    """The rows of all devices along axis 0; the derivative is the adjoint, a sum-scatter."""
    if group is not None:
        raise GradtoolsError(
            "all_gather: group is PyTorch's; in JAX name a mapped axis, axis_name."
        )
    if axis_name is None:
        raise GradtoolsError(
            "all_gather: axis_name is missing; expected the mapped axis, or a tuple of them, that "
            "shard_map, vmap or pmap gave its name to."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.shape(leaf):
            raise GradtoolsError(
                f"all_gather: x{jax.tree_util.keystr(path)} is a single number; expected an array "
                "with the local rows along axis 0."
            )
    try:
        return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, axis_name, tiled=True), x)
    except NameError as error:
        raise GradtoolsError(
            f"all_gather: no axis is named {axis_name!r} here ({error}). Call it inside shard_map, "
            "vmap or pmap with an axis of that name."
        ) from error
