"""Shards arrays over a mesh with Explicit axes, where the type of an array contains its sharding.

Each operation must determine the sharding of its result: the axis of a scan is replicated, a slice
of a sharded axis must be divisible by the number of devices, and the sharding of a carry must not
change. A batch axis is therefore resharded before it is cut into chunks and after chunks are
joined. A chunk is sharded like the batch if its size is divisible by the number of devices;
otherwise the chunk is replicated. For Auto and Manual axes, or without a mesh, types contain no
sharding, and the functions of this module do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gradtools.backend import Array
from gradtools.jax._upstream import as_varying, varying_axes


def entries(x: Any) -> tuple[Any, ...]:
    """Returns, for each axis of an array or aval, the mesh axes over which the axis is sharded."""
    aval = _aval(x)
    return padded(getattr(getattr(aval, "sharding", None), "spec", ()), aval.ndim)


def padded(spec: Any, ndim: int) -> tuple[Any, ...]:
    """Pads a PartitionSpec with None, so that it has one entry for each of `ndim` axes."""
    return (*spec, *[None] * (ndim - len(spec)))


def placed(x: Array, axis: int, entry: Any) -> Array:
    """Shards an axis of x over the mesh axes `entry` if possible; otherwise replicates the axis."""
    result = list(entries(x))
    mesh = _aval(x).sharding.mesh
    if entry is not None and (mesh.empty or not _fits(x, axis, entry, result, mesh)):
        entry = None
    if result[axis] == entry:
        return x
    result[axis] = entry
    return on_mesh(x, mesh, result)


def on_mesh(x: Array, mesh: Any, entries: Sequence[Any]) -> Array:
    """Shards each axis of x over the mesh axes in the corresponding entry."""
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))


def whole(x: Array, axis: int) -> Array:
    return placed(x, axis, None)


def like(x: Array, other: Any) -> Array:
    """Reshards x so that it has the sharding of another array or aval."""
    wanted = entries(other)
    if entries(x) == wanted:
        return x
    return on_mesh(x, _aval(other if any(wanted) else x).sharding.mesh, wanted)


def of_result(shape: Any, batch: Any, xs: Any) -> tuple[Any, ...]:
    """Returns the sharding of the result of a callback, which JAX cannot infer.

    The sharding has one entry per axis, copied from the first argument of the same shape or, for a
    leading batch axis, from the first argument that is sharded along the axis.

    xs: The shape of each argument, and the mesh axes over which each axis is sharded.
    """
    n = len(batch)
    like = next((e for s, e in xs if tuple(s[n:]) == tuple(shape[n:])), ())
    leading = [next((e[i] for _, e in xs if e[i] is not None), None) for i in range(n)]
    return (*leading, *padded(like[n:], len(shape) - n))


def sharded_like(y: Array, batch: Any, xs: Any) -> Array:
    """Shards a result y of a callback with arguments xs according to `of_result`."""
    sharded = [x for x in xs if any(entries(x))]
    if not sharded:
        return y
    result = of_result(y.shape, batch, [(x.shape, entries(x)) for x in sharded])
    mesh = _aval(sharded[0]).sharding.mesh
    return on_mesh(y, mesh, result)


def reshaped(x: Array, shape: tuple[int, ...], at: int, count: int, entry: Any) -> Array:
    """Reshapes x so that axes at position `at` become `count` axes, one of which may be sharded.

    entry: The position of the sharded axis among the new axes, and its mesh axes.
    """
    result = entries(x)
    if not any(result):
        return x.reshape(shape)
    behind = len(shape) - at - count
    which, name = entry
    new = [*result[:at], *[None] * count, *(result[-behind:] if behind else ())]
    mesh = jax.typeof(x).sharding.mesh
    if name is not None and shape[at + which] % device_count(mesh, name) == 0:
        new[at + which] = name
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*new)))


def without_axis(aval: Any, axis: int) -> Any:
    left = lambda xs: (*xs[:axis], *xs[axis + 1 :])
    return _resized(aval, left(aval.shape), left(entries(aval)), aval)


def with_leading(aval: Any, size: int, like: Any) -> Any:
    """Adds an axis 0 to the aval, sharded like axis 0 of `like`."""
    entry = entries(like)[0]
    spec = entry, *entries(aval)
    return _resized(aval, (size, *aval.shape), spec, aval if entry is None else like)


def stacked(aval: Any, count: int) -> Any:
    """Adds an axis 0 to the aval, which is not sharded."""
    return _resized(aval, (count, *aval.shape), (None, *entries(aval)), aval)


def _resized(aval: Any, shape: tuple[int, ...], spec: tuple[Any, ...], on: Any) -> Any:
    """Returns the aval with the given shape and sharding, over the mesh of `on`."""
    if not any((*spec, *entries(aval))):
        return aval.update(shape=shape)
    sharding = NamedSharding(_aval(on).sharding.mesh, PartitionSpec(*spec))
    return aval.update(shape=shape, sharding=sharding)


def spread(x: Array, size: int, like: Array) -> Array:
    """Broadcasts x along a new axis 0, which is sharded like axis 0 of `like`."""
    return placed(jax.numpy.broadcast_to(x, (size, *x.shape)), 0, entries(like)[0])


def _aval(x: Any) -> Any:
    return x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)


def _fits(x: Array, axis: int, entry: Any, entries: list[Any], mesh: Any) -> bool:
    others = {name for i, e in enumerate(entries) if i != axis for name in names(e)}
    return x.shape[axis] % device_count(mesh, entry) == 0 and not others & set(names(entry))


def device_count(mesh: Any, entry: Any) -> int:
    """Returns the number of devices along the mesh axes in `entry`."""
    return prod(mesh.shape[name] for name in names(entry))


def names(entry: Any) -> tuple[Any, ...]:
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


# --- manual axes: under `shard_map` a type contains the mesh axes over which an array varies -----


def varying(x: Any, axes: frozenset[Any]) -> Any:
    """Casts x to vary over the given mesh axes and over all axes over which x already varies."""
    missing = axes - varies(x)
    return as_varying(x, sorted(missing)) if missing else x


def varies(x: Any) -> frozenset[Any]:
    """Returns the mesh axes over which x varies, according to its type."""
    return varying_axes(_aval(x))


@jax.custom_jvp
def with_varying_tangent(x: Any) -> Any:
    """Returns x. The tangent is cast to vary over the mesh axes of x, as `eval_jaxpr` requires."""
    return x


@with_varying_tangent.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return with_varying_tangent(x), varying(dx, varies(x))
