"""Translations of aten's operations on arrays that take more than another name.

All others are said as the graph says them (`as_said`). A translation is given the writer and the
call's arguments by aten's own names. Linear algebra, normalisation and losses stand in `layers.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtools.seeing.torch.translating.writer import (
    Ref,
    Translation,
    Writer,
    as_said,
    axes_of,
    enters,
)

ARRAYS: dict[str, Translation] = {}
operation = enters(ARRAYS)


# --- where numbers come from -------------------------------------------------------------


@operation("histc", "linspace", "logspace", "bincount", "searchsorted", "bucketize")
def _held(w: Writer, o: Any) -> Any:
    """What it gave, as a constant."""
    return [o.recorder.constant(y) for y in o.outs]


# --- elementwise -------------------------------------------------------------------------


@operation("copy", "fill", "zero")
def _copied(w: Writer, o: Any) -> Ref:
    """What is written into an array, in its dtype and shape."""
    shape, dtype = o.likes[0]
    x = w.ref(getattr(o, "src", getattr(o, "value", 0.0)))
    return w.cast(w.broadcast(x, shape), dtype)


@operation("rrelu_with_noise", "rrelu_with_noise_functional")
def _rrelu(w: Writer, o: Any) -> Ref | None:
    """Training draws the slopes below zero, which are what they were."""
    if not o.training:
        return w("leaky_relu", o.self, negative_slope=float(o.lower + o.upper) / 2)
    slopes = o.writes[0] if o.writes else o.outs[1]
    return w.mul(o.self, o.recorder.constant(slopes))


@operation("log_sigmoid_forward")
def _log_sigmoid(w: Writer, o: Any) -> Any:
    return [w("log_sigmoid", o.self), w("exp", w("negate", w("abs", o.self)))]


@operation("hardsigmoid")
def _hardsigmoid(w: Writer, o: Any) -> Any:
    o.recorder.narrow = "float32"  # PyTorch's backward kernel has 1/6 in float32
    return as_said(w, o)


# --- shapes ------------------------------------------------------------------------------


@operation("as_strided")
def _as_strided(w: Writer, o: Any) -> Ref:
    return o.recorder.met(o.outs[0])  # type: ignore[no-any-return]


@operation("unfold", "pixel_shuffle", "pixel_unshuffle", "im2col", "channel_shuffle")
@operation("unfold_copy", "repeat_interleave", "take", "masked_select", "narrow_copy")
def _picked(w: Writer, o: Any) -> Ref:
    """Entries of x, wherever they come from: what is done to their numbers tells."""
    places = o.recorder.places_of(o)
    flat = w.reshape(o.self, (o.self.size,))
    if (places >= 0).all():
        return w.take(flat, w.constant(places), axes=(0,))
    more = w.pad(flat, [0], [1])
    return w.take(more, w.constant(np.where(places < 0, o.self.size, places)), axes=(0,))


def _taken(w: Writer, x: Ref, axis: int, i: Ref) -> Ref:
    """Entries along one axis; the axes of i stand in its place."""
    result = w.take(x, i, axes=(axis,))
    rest = range(i.ndim, i.ndim + axis)
    return w.permute(result, (*rest, *range(i.ndim), *range(i.ndim + axis, result.ndim)))


# --- indexing ----------------------------------------------------------------------------


def _indices(w: Writer, o: Any, x: Ref, given: Any) -> tuple[list[Ref], list[int]]:
    """Integer arrays and their axes; masks become the places at which they are true."""
    result: list[Ref] = []
    axes: list[int] = []
    axis = 0
    for i in given:
        if i is None:
            axis += 1
        elif i.kind == 0:
            for places in o.recorder.true_places(i):
                result.append(w.constant(places))
                axes.append(axis)
                axis += 1
        else:
            result.append(_not_negative(w, o, i, x.shape[axis]))
            axes.append(axis)
            axis += 1
    return result, axes


def _not_negative(w: Writer, o: Any, i: Ref, n: int) -> Ref:
    """Counted from the start; an array that is known holds no negative ones afterwards."""
    value = o.recorder.value_of(i)
    if value is None or not (value < 0).any():
        return i
    return w.where(w.compare(i, "<", 0), w.add(i, n), i)


@operation("index", "_unsafe_index")
def _index(w: Writer, o: Any) -> Ref:
    indices, axes = _indices(w, o, o.self, o.indices)
    result = w.take(o.self, *indices, axes=axes)
    lead = result.ndim - (o.self.ndim - len(axes))
    first = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0
    order = [*range(lead, lead + first), *range(lead), *range(lead + first, result.ndim)]
    return w.permute(result, order)


@operation("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(w: Writer, o: Any) -> Ref:
    indices, axes = _indices(w, o, o.self, o.indices)
    lead = np.broadcast_shapes(*(i.shape for i in indices))
    rest = [n for a, n in enumerate(o.self.shape) if a not in axes]
    first = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0
    shape = (*rest[:first], *lead, *rest[first:])
    values = w.broadcast(w.cast(o.values, o.self.dtype), shape)
    mid = range(first, first + len(lead))
    others = [a for a in range(len(shape)) if a not in mid]
    u = w.permute(values, [*mid, *others])
    return _scattered(w, o.self, u, indices, axes, "add" if o.accumulate else "set")


def _scattered(w: Writer, x: Ref, u: Ref, indices: Any, axes: Any, mode: str) -> Ref:
    given = {"axes": tuple(axes), "mode": mode}
    return w("scatter", x, u, *indices, shape=x.shape, dtype=x.dtype, **given)


@operation("scatter", "scatter_add")
def _scatter(w: Writer, o: Any) -> Ref:
    src = getattr(o, "src", None)
    u = w.constant(o.value) if src is None else src
    if src is not None and u.shape != o.index.shape:
        u = w.window(u, [0] * u.ndim, o.index.shape, [1] * u.ndim)
    u = w.broadcast(u, o.index.shape)
    adds = "scatter_add" in w.native or getattr(o, "reduce", None) == "add"
    given = {"axis": o.dim % max(1, o.self.ndim), "mode": "add" if adds else "set"}
    return w("scatter_along", o.self, o.index, u, shape=o.self.shape, dtype=o.self.dtype, **given)


@operation("index_select")
def _index_select(w: Writer, o: Any) -> Ref:
    if not o.self.ndim:
        return o.self  # type: ignore[no-any-return]
    return _taken(w, o.self, o.dim % o.self.ndim, o.index)


def _placed(mode: str, name: str) -> Translation:
    def translated(w: Writer, o: Any) -> Ref:
        u = getattr(o, name)
        if not o.self.ndim:
            u = w.reshape(w.times(getattr(o, "alpha", 1), w.cast(w.ref(u), o.self.dtype)), ())
            return w.add(o.self, u) if mode == "add" else u
        axis = o.dim % o.self.ndim
        if not isinstance(u, Ref) or not u.ndim:
            shape = list(o.self.shape)
            shape[axis] = o.index.size
            u = w.broadcast(w.ref(u), shape)
        u = w.times(getattr(o, "alpha", 1), w.cast(u, o.self.dtype))
        others = [a for a in range(u.ndim) if a != axis]
        index = w.reshape(o.index, (o.index.size,))
        return _scattered(w, o.self, w.permute(u, [axis, *others]), [index], [axis], mode)

    return translated


ARRAYS["index_add"] = _placed("add", "source")
ARRAYS["index_copy"] = _placed("set", "source")
ARRAYS["index_fill"] = _placed("set", "value")


# --- reductions --------------------------------------------------------------------------


def _extreme(word: str) -> Translation:
    """Of all entries, or along an axis with the place of each; also of two arrays."""

    def translated(w: Writer, o: Any) -> Any:
        if getattr(o, "other", None) is not None:
            return w(f"{word}imum", o.self, o.other)
        if len(o.likes) == 1:
            return w.reduce(word, o.self, None)
        axis = o.dim % max(1, o.self.ndim)
        shape = o.likes[0][0]
        if not o.self.ndim:
            return [o.self, w.constant(0)]
        kept: dict[str, Any] = {"shape": _kept_shape(o.self, axis), "keep": True}
        at = w(f"arg{word}", o.self, dtype="int64", axis=axis, **kept)
        picked = w("take_along", o.self, at, shape=at.shape, dtype=o.self.dtype, axis=axis)
        return [w.reshape(picked, shape), w.reshape(at, shape)]

    return translated


def _kept_shape(x: Ref, axis: int) -> list[int]:
    return [1 if a == axis else n for a, n in enumerate(x.shape)]


ARRAYS["max"], ARRAYS["min"] = _extreme("max"), _extreme("min")


@operation("var_mean", "std_mean")
def _moment_and_mean(w: Writer, o: Any) -> Any:
    keep = bool(getattr(o, "keepdim", False))
    (moment, *_) = as_said(w, o) or [None]
    return [moment, w.mean(o.self, getattr(o, "dim", None), keep)]


__all__ = ["ARRAYS", "axes_of"]
