"""Slices arrays into chunks and concatenates outputs, along an axis that may be sharded.

Interleaved chunks are the columns of a table of shape (rows per chunk, chunks). Rows that do not
fit into the table follow the table, one row for each of the first chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.arguments.chunks import Partition
from gradtools.backend import Array
from gradtools.jax import shardings
from gradtools.jax.compiled_once import run_compiled
from gradtools.jax.jaxprs import marked_as_chunk
from gradtools.jax.trees import is_inexact


class Split:
    """An array that is split into chunks along an axis."""

    def __init__(self, x: Array, axis: int, cut: Partition) -> None:
        self.x, self.axis, self.cut, self.inexact = x, axis, cut, is_inexact(x)
        self.entry = shardings.entries(x)[axis]
        self._rows = x if self.entry is None else shardings.whole(x, axis)
        if cut.interleaved:  # the table of shape (rows per chunk, chunks)
            self._least = cut.size // cut.count
            even = cut.size == self._least * cut.count
            part = x if even else _part(self._rows, 0, self._least * cut.count, axis)
            self._table = parted(part, axis, self._least, cut.count, (0, self.entry))

    def piece(self, index: Any, size: int, slot: Array | None) -> Array:
        """Returns the rows of a chunk, whose cotangent is routed to the slot."""
        piece = self.at(index, size)
        return piece if slot is None else routed(piece, slot)

    def at(self, index: Any, size: int) -> Array:
        if size == self.cut.size:
            return self.x
        if not self.cut.interleaved:
            rows = _slice(self._rows, index * self.cut.chunk_size, size, self.axis)
            return shardings.placed(rows, self.axis, self.entry)
        rows = _slice(self._table, index, 1, self.axis + 1).squeeze(self.axis + 1)
        if size == self._least:
            return rows
        last = _slice(self._rows, self._least * self.cut.count + index, 1, self.axis)
        rows = jnp.concatenate([shardings.whole(rows, self.axis), last], self.axis)
        return shardings.placed(rows, self.axis, self.entry)

    def stacked(self, first: int, count: int, size: int) -> Array:
        """Returns the chunks from `first` to `first + count - 1`, stacked along a new axis 0."""
        axis = self.axis
        if not self.cut.interleaved:
            start = first * self.cut.chunk_size
            part = _part(self._rows, start, count * size, axis)
            rows = jnp.moveaxis(parted(part, axis, count, size, (1, self.entry)), axis, 0)
            return shardings.placed(rows, axis + 1, self.entry)
        rows = _part(self._table, first, count, axis + 1)
        rows = jnp.moveaxis(rows, axis + 1, 0)
        if size == self._least:
            return rows
        start = self._least * self.cut.count + first
        last = _part(self._rows, start, count, axis)
        last = jnp.expand_dims(jnp.moveaxis(last, axis, 0), axis + 1)
        rows = jnp.concatenate([shardings.whole(rows, axis + 1), last], axis + 1)
        return shardings.placed(rows, axis + 1, self.entry)


@jax.custom_jvp
@marked_as_chunk
def routed(piece: Array, slot: Array) -> Array:
    """Returns the piece. The cotangent of the piece becomes the cotangent of the slot.

    If the body of a scan slices an array, each step of the transposed scan adds a cotangent of the
    size of the whole array. For an array in the xs of a scan, the cotangents of the steps are
    stacked instead. The cotangent is therefore routed to a slot in the xs. The slot's value is
    unused, so XLA removes the slot and the copy of the batch in the xs.
    """
    return piece


@routed.defjvp
def _routed_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    return routed(*primals), tangents[1].astype(primals[0].dtype)


def _slice(x: Array, start: Any, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)


def _part(x: Array, start: int, size: int, axis: int) -> Array:
    return jax.lax.slice_in_dim(x, start, start + size, axis=axis)


def joined(cut: Partition, axis: int, parts: Sequence[Array], entry: Any) -> Array:
    """Concatenates the stacked outputs of runs along the axis, in the order of the batch.

    On a mesh with Explicit axes the result is sharded like the batch.
    """
    axis %= parts[0].ndim - 1
    if not cut.interleaved:
        rows = [merged(jnp.moveaxis(x, 0, axis), axis) for x in parts]
        return shardings.placed(_concatenated(rows, axis), axis, entry)
    least = cut.size // cut.count
    columns = [jnp.moveaxis(x, 0, axis + 1) for x in parts]
    if any(x.shape[axis] > least for x in columns):
        columns = [shardings.whole(x, axis) for x in columns]
    table = [_part(x, 0, least, axis) for x in columns]
    rows = [merged(_concatenated(table, axis + 1), axis)]
    more = [(x, x.shape[axis] - least) for x in columns]
    rows += [merged(_part(x, least, n, axis), axis) for x, n in more if n and x.size]
    return shardings.placed(_concatenated(rows, axis), axis, entry)


def parted(x: Array, axis: int, m: int, n: int, entry: tuple[int, Any]) -> Array:
    """Splits an axis of x into two axes, one of which may be sharded."""
    shape = (*x.shape[:axis], m, n, *x.shape[axis + 1 :])
    return shardings.reshaped(x, shape, axis, 2, entry)


def merged(x: Array, axis: int) -> Array:
    """Merges an axis of x with the next axis."""
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    first, second = shardings.entries(x)[axis : axis + 2]
    return shardings.reshaped(x, shape, axis, 1, (0, second if first is None else first))


def _concatenated(parts: list[Array], axis: int) -> Array:
    if len(parts) == 1:
        return parts[0]
    if len({shardings.entries(x) for x in parts}) > 1:
        parts = [
            shardings.like(shardings.whole(x, axis), shardings.whole(parts[0], axis)) for x in parts
        ]
    return jnp.concatenate(parts, axis)


def map_batch(f: Callable[..., Any], batch: Sequence[Array], size: int | None) -> Any:
    """Maps f over the rows of the arrays in `batch`, in chunks of `size` rows (None means 1).

    If rows are sharded over a mesh with Explicit axes, the chunks are interleaved, so that all
    devices process each chunk.
    """
    name = next((e for e in (shardings.entries(x)[0] for x in batch) if e is not None), None)

    def mapped(batch: Sequence[Array]) -> Any:
        if size is None and name is None:
            return jax.lax.map(lambda xs: f(*xs), batch)
        cut, first, parts = Partition(batch[0].shape[0], size or 1, name is not None), 0, []
        splits = [Split(x, 0, cut) for x in batch]
        runs = [(rows, len(list(chunks))) for rows, chunks in groupby(cut.sizes)]
        for rows, count in [(cut.chunk_size, cut.count)] if cut.is_symbolic else runs:
            stacked = [s.stacked(first, count, rows) for s in splits]
            parts.append(jax.lax.map(lambda xs: jax.vmap(f)(*xs), stacked))
            first += count
        return jax.tree.map(lambda *ys: joined(cut, 0, ys, name), *parts)

    # f may be a new object in each call
    return run_compiled(mapped, list(batch)) if name is None else mapped(batch)
