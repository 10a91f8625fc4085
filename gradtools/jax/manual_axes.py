"""Arrays that vary over manual axes of a mesh, as their types say under `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def varying_alike(xs: Sequence[Any]) -> list[Any]:
    """Under shard_map, all inputs varying over the same mesh axes.

    The derivative of that is the sum over the axes, which the cotangent of an input that does
    not vary needs.
    """
    union = frozenset().union(*map(varies, xs))
    return [varying(x, union) for x in xs] if union else list(xs)


def varying(x: Any, axes: frozenset[Any]) -> Any:
    """x, typed as varying over these mesh axes too."""
    missing = axes - varies(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def varies(x: Any) -> frozenset[Any]:
    """The mesh axes over which x is typed as different."""
    aval: Any = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    return frozenset(aval.manual_axis_type.varying)


@jax.custom_jvp
def with_varying_tangent(x: Any) -> Any:
    """x; its tangent varies as it does. A jaxpr that is evaluated again relies on that."""
    return x


@with_varying_tangent.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return with_varying_tangent(x), varying(dx, varies(x))
