"""Gather and scatter of JAX as indexing with integer arrays.

A gather reads, for each place b of its indices, a window of its operand x that starts there::

    out[b, o] = x[start(b) + o]        o within the window

An axis of x is *taken whole* (its window is all of it), *batched* (b itself says where), or
*picked*: its entry is ``start(b)``, plus a count where the window is longer than one. Picked
and batched axes become one integer array each, over the axes of b and of those windows; then
``out = index(x, *arrays)`` with its axes put in place. A scatter writes to the same places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.seeing.jax.translating.tables import Params, axes_of, updated, window


@dataclass(frozen=True)
class _Places:
    """Where a gather reads or a scatter writes.

    Attributes:
        indices: The integer array of each picked or batched axis, all over the same axes.
        axes: These axes of the operand.
        shape: The shape over which the indices run: the batch, then the long windows.
        batch: How many axes of it are the batch.
        windows: The axes of the operand with long windows, in their order.
    """

    indices: list[int]
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    batch: int
    windows: tuple[int, ...]

    def order(self, kept: Sequence[int]) -> list[int]:
        """For each kept axis of the operand its place in the result of `index`."""
        whole = [a for a in kept if a not in self.axes]
        place = {a: self.batch + k for k, a in enumerate(self.windows)}
        place |= {a: len(self.shape) + k for k, a in enumerate(whole)}
        return [place[a] for a in kept if a in place]


def gathered(w: Any, p: Params, x: int, indices: int) -> Any:
    """The translation of ``gather``."""
    d, sizes = p["dimension_numbers"], axes_of(p, "slice_sizes")
    picked = axes_of(vars_of(d), "start_index_map")
    result = _read(w, d, sizes, picked, x, indices)
    if _is_within(w, _mode(p) != "FILL_OR_DROP", w.shape(x), sizes, picked, indices):
        return result
    batch = [k for k in range(len(w.shape(result))) if k not in d.offset_dims]
    valid = _valid(w, indices, [w.shape(x)[a] - sizes[a] for a in picked])
    valid = w("broadcast", valid, shape=w.shape(result), axes=tuple(batch))
    fill = math.nan if p["fill_value"] is None else p["fill_value"]
    return w("where", valid, result, w.constant(fill)) if w.is_inexact(result) else None


def _valid(w: Any, indices: int, most: Sequence[int]) -> int:
    """Where all indices of a place are within bounds."""
    known = w.value(indices)
    if known is not None:
        return w.constant(np.all((known >= 0) & (known <= np.array(most)), axis=-1))
    limits = w.constant(np.array(most))
    low = w("compare", indices, w.constant(0), relation=">=")
    both = w("logical_and", low, w("compare", indices, limits, relation="<="))
    return w("all", both, axes=(len(w.shape(indices)) - 1,))


def _read(w: Any, d: Any, sizes: Any, picked: Sequence[int], x: int, indices: int) -> int:
    """What is read, indices beyond bounds being moved inside."""
    shape = w.shape(x)
    batched = axes_of(vars_of(d), "operand_batching_dims")
    over = axes_of(vars_of(d), "start_indices_batching_dims")
    collapsed = set(d.collapsed_slice_dims) | set(batched)
    kept = [a for a in range(len(shape)) if a not in collapsed]
    if len(w.shape(indices)) == 1 and any(sizes[a] != 1 for a in picked):
        result = window(w, {"slice_sizes": sizes}, x, *_starts(w, shape, picked, indices))
        return w("reshape", result, shape=tuple(sizes[a] for a in kept))
    places = _places(w, shape, sizes, picked, batched, over, indices)
    result = _taken_along(w, x, places, sizes, kept) or _indexed(w, x, places)
    return _laid_out(w, result, places, kept, sizes, d.offset_dims)


def _starts(w: Any, shape: Sequence[int], picked: Sequence[int], indices: int) -> list[int]:
    """Where one window starts, for each axis."""
    known = {a: _component(w, indices, k) for k, a in enumerate(picked)}
    return [known[a] if a in known else w.constant(0) for a in range(len(shape))]


def vars_of(numbers: Any) -> dict[str, Any]:
    """The fields of JAX's dimension numbers, by name."""
    return (
        {name: getattr(numbers, name) for name in numbers.__dataclass_fields__}
        if hasattr(numbers, "__dataclass_fields__")
        else numbers._asdict()
    )


def _mode(p: Params) -> str:
    mode = p["mode"]
    return getattr(mode, "name", str(mode))


def _is_within(
    w: Any, clipped: bool, shape: Any, sizes: Any, picked: Sequence[int], indices: int
) -> bool:
    """Whether all indices are within bounds, or come there by themselves.

    What they are in loops is not known here; the comparison of the formula tells.
    """
    known = w.concrete(indices)
    if clipped or known is None or not known.size:
        return True
    most = np.array([shape[a] - sizes[a] for a in picked])
    return bool(np.all((known >= 0) & (known <= most)))


def _places(
    w: Any,
    shape: Sequence[int],
    sizes: Sequence[int],
    picked: Sequence[int],
    batched: Sequence[int],
    over: Sequence[int],
    indices: int,
) -> _Places:
    batch = w.shape(indices)[:-1]
    windows = tuple(
        a for a in range(len(shape)) if sizes[a] != 1 and (a in picked or sizes[a] != shape[a])
    )
    full = (*batch, *(sizes[a] for a in windows))
    arrays = {}
    for k, a in enumerate(picked):
        start = w.within(_component(w, indices, k), shape[a] - sizes[a])
        arrays[a] = _started(w, start, full, len(batch), windows.index(a) if a in windows else None)
    for a, b in zip(batched, over, strict=True):
        arrays[a] = w.constant(_counting(full, b))
    for k, a in enumerate(windows):
        if a not in arrays:
            arrays[a] = w.constant(_counting(full, len(batch) + k))
    for a in range(len(shape)):
        if a not in arrays and sizes[a] != shape[a]:
            arrays[a] = w.constant(np.zeros(full, np.int64))
    axes = tuple(sorted(arrays))
    return _Places([arrays[a] for a in axes], axes, full, len(batch), windows)


def _component(w: Any, indices: int, k: int) -> int:
    """The indices along one axis: entry k of their last axis."""
    shape, known = w.shape(indices), w.value(indices)
    if known is not None:
        return w.constant(known[..., k])
    parts = w.parts_of(indices)
    if parts is not None and len(parts) == shape[-1]:
        return w("reshape", parts[k], shape=shape[:-1])
    if shape[-1] > 1:
        start, limit = [0] * len(shape), list(shape)
        start[-1], limit[-1] = k, k + 1
        indices = w("slice", indices, start=tuple(start), limit=tuple(limit))
    return w("reshape", indices, shape=shape[:-1])


def _started(w: Any, start: int, full: Sequence[int], batch: int, window: int | None) -> int:
    """The start, plus the count within the window, over all axes."""
    if len(full) == batch:
        return start
    start = w("broadcast", start, shape=tuple(full), axes=tuple(range(batch)))
    if window is None:
        return start
    return w.folded("add", start, w.constant(_counting(full, batch + window)))


def _counting(shape: Sequence[int], axis: int) -> np.ndarray:
    lie = [n if a == axis else 1 for a, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[axis]).reshape(lie), tuple(shape)).astype(np.int64)


def _indexed(w: Any, x: int, places: _Places) -> int:
    return w("index", x, *places.indices, axes=places.axes) if places.axes else x


def _taken_along(
    w: Any, x: int, places: _Places, sizes: Sequence[int], kept: Sequence[int]
) -> int | None:
    """One entry along one axis for each place of the others: `take_along`."""
    rank = len(w.shape(x))
    if places.windows or len(places.axes) != rank or len(places.shape) != rank or rank < 2:
        return None
    moving = [k for k, i in enumerate(places.indices) if not _is_own_place(w, i, places.shape, k)]
    if len(moving) != 1:
        return None
    axis = places.axes[moving[0]]
    same = all(
        n == m for a, (n, m) in enumerate(zip(w.shape(x), places.shape, strict=True)) if a != axis
    )
    return w("take_along", x, places.indices[moving[0]], axis=axis) if same else None


def _is_own_place(w: Any, i: int, shape: Sequence[int], axis: int) -> bool:
    known = w.value(i)
    return known is not None and np.array_equal(known, _counting(shape, axis))


def _laid_out(
    w: Any, found: int, places: _Places, kept: Any, sizes: Any, offset_dims: Sequence[int]
) -> int:
    """The axes of the result where the gather has them."""
    source = places.order(kept)
    rank = places.batch + len(kept)
    order, batch, window = [], iter(range(places.batch)), iter(kept)
    place = dict(zip([a for a in kept if _is_there(a, places)], source, strict=True))
    shape = []
    for out in range(rank):
        if out in offset_dims:
            a = next(window)
            order += [place[a]] if a in place else []
            shape.append(sizes[a])
        else:
            k = next(batch)
            order.append(k)
            shape.append(places.shape[k])
    found = found if order == sorted(order) else w("transpose", found, permutation=tuple(order))
    return found if w.shape(found) == tuple(shape) else w("reshape", found, shape=tuple(shape))


def _is_there(a: int, places: _Places) -> bool:
    return a in places.windows or a not in places.axes


# --- scatter -----------------------------------------------------------------------------


def scattered(w: Any, p: Params, mode: str, x: int, indices: int, u: int) -> Any:
    """The translation of a ``scatter`` that sets, adds, or combines otherwise."""
    d = p["dimension_numbers"]
    shape, names = w.shape(x), vars_of(d)
    batched = axes_of(names, "operand_batching_dims")
    over = axes_of(names, "scatter_indices_batching_dims")
    picked = axes_of(names, "scatter_dims_to_operand_dims")
    gone = {*axes_of(names, "inserted_window_dims"), *batched}
    kept = [a for a in range(len(shape)) if a not in gone]
    lengths = [w.shape(u)[k] for k in d.update_window_dims]
    sizes = [1] * len(shape)
    for a, n in zip(kept, lengths, strict=True):
        sizes[a] = n
    if not _is_within(w, _mode(p) == "CLIP", shape, sizes, picked, indices):
        return None
    if mode == "set" and len(w.shape(indices)) == 1 and any(sizes[a] != 1 for a in picked):
        window = w("reshape", u, shape=tuple(sizes))
        return updated(w, {}, x, window, *_starts(w, shape, picked, indices))
    places = _places(w, shape, sizes, picked, batched, over, indices)
    u = _update_in_order(w, u, places, kept, d.update_window_dims)
    if not places.axes:
        return w("add", x, u) if mode == "add" else u if mode == "set" else None
    return _written(w, mode, x, u, places)


def _update_in_order(
    w: Any, u: int, places: _Places, kept: Sequence[int], window_dims: Sequence[int]
) -> int:
    """The update as `index` would give it: batch, long windows, whole axes."""
    rank = len(w.shape(u))
    batch = [k for k in range(rank) if k not in window_dims]
    place = dict(zip(kept, window_dims, strict=True))
    windows = [place[a] for a in places.windows]
    whole = [place[a] for a in kept if a not in places.axes]
    ones = [place[a] for a in kept if a in places.axes and a not in places.windows]
    order = (*batch, *windows, *whole, *ones)
    turned = u if order == tuple(range(rank)) else w("transpose", u, permutation=order)
    shape = w.shape(turned)[: rank - len(ones)]
    return turned if not ones else w("reshape", turned, shape=shape)


def _written(w: Any, mode: str, x: int, u: int, places: _Places) -> int | None:
    given = {"axes": places.axes}
    if mode == "set":
        u, indices = _last(w, u, places)
        return w("scatter", x, u, *indices, mode="set", **given)
    if mode == "add":
        return w("scatter", x, u, *places.indices, mode="add", **given)
    if mode == "sub":
        return w("scatter", x, w("negate", u), *places.indices, mode="add", **given)
    if not _are_different(w, places):
        return None
    now = w("index", x, *places.indices, **given)
    return w("scatter", x, w(mode, now, u), *places.indices, mode="set", **given)


def _are_different(w: Any, places: _Places) -> bool:
    """Whether no place is written twice."""
    rows = _rows(w, places)
    return rows is not None and np.unique(rows, axis=1).shape[1] == rows.shape[1]


def _rows(w: Any, places: _Places) -> np.ndarray | None:
    """The places, one in each column; None where they are not known."""
    known = [w.concrete(i) for i in places.indices]
    if any(k is None for k in known):
        return None
    return np.stack([np.broadcast_to(k, places.shape).ravel() for k in known])


def _last(w: Any, u: int, places: _Places) -> tuple[int, list[int]]:
    """What stays of an update that writes some places twice, and where: the last of each."""
    rows = _rows(w, places)
    if rows is None or np.unique(rows, axis=1).shape[1] == rows.shape[1]:
        return u, places.indices
    first = np.unique(rows[:, ::-1], axis=1, return_index=True)[1]
    kept = np.sort(rows.shape[1] - 1 - first)
    rest = w.shape(u)[len(places.shape) :]
    flat = w("reshape", u, shape=(rows.shape[1], *rest))
    held = [w.constant(at) for at in (kept, *rows[:, kept])]
    return w("index", flat, held[0], axes=(0,)), held[1:]


def _scatter(mode: str) -> Any:
    return lambda w, p, x, i, u: scattered(w, p, mode, x, i, u)


INDEXING = {
    "gather": gathered,
    "scatter": _scatter("set"),
    "scatter-add": _scatter("add"),
    "scatter-sub": _scatter("sub"),
    "scatter-mul": _scatter("multiply"),
    "scatter_mul": _scatter("multiply"),
    "scatter-max": _scatter("maximum"),
    "scatter-min": _scatter("minimum"),
}
