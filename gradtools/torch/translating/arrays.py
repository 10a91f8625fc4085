"""Aten's shapes, indexing, reductions and sources of numbers, in the vocabulary of the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradtools.torch.translating.recorder import DRAWN
from gradtools.torch.translating.writer import Ref, Writer, as_said, axes_of

Translation = Callable[[Writer, Any], Any]
ARRAYS: dict[str, Translation] = {}


def operation(*names: str) -> Callable[[Translation], Translation]:
    """Enters a translation under aten's names."""

    def enter(translation: Translation) -> Translation:
        ARRAYS.update(dict.fromkeys(names, translation))
        return translation

    return enter


# --- where numbers come from -------------------------------------------------------------

_HELD = """
    zeros ones full empty arange linspace logspace eye zeros_like ones_like full_like empty_like
    new_zeros new_ones new_full new_empty scalar_tensor tril_indices triu_indices empty_strided
    new_empty_strided nonzero _efficientzerotensor bincount histc searchsorted bucketize
    hann_window empty_permuted isinf isneginf isposinf signbit local_scalar_dense
"""


def _held(w: Writer, o: Any) -> Any:
    """What it gave, as a constant."""
    return [o.recorder.constant(y) for y in o.outs]


def _draw(w: Writer, o: Any) -> Any:
    """A draw, with the value that was drawn."""
    drawn = o.recorder.constant(o.outs[0])
    value = o.recorder.writer.frames[0].pop().attributes["value"]
    shape, dtype = drawn.shape, o.likes[0][1]
    name = "m" if "bernoulli" in w.native else "ε"
    return w("random", shape=shape, dtype=dtype, name=name, value=value)


ARRAYS |= dict.fromkeys(_HELD.split(), _held)
ARRAYS |= dict.fromkeys(DRAWN, _draw)


# --- shapes ------------------------------------------------------------------------------

# These are said as the graph says them.
_WORDS = """
    view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten _reshape_copy view_copy
    t transpose permute expand slice select flip triu tril constant_pad_nd
    sum mean prod logsumexp any all amax amin cumsum cumprod logcumsumexp var std gather
"""
ARRAYS |= dict.fromkeys(_WORDS.split(), as_said)


@operation("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk")
def _split(w: Writer, o: Any) -> Any:
    axis = o.dim % o.self.ndim
    result, place = [], 0
    for shape, _ in o.likes:
        result.append(w.cut(o.self, axis, place, place + shape[axis]))
        place += shape[axis]
    return result


@operation("unbind")
def _unbind(w: Writer, o: Any) -> Any:
    axis = o.dim % o.self.ndim
    return [w.reshape(w.cut(o.self, axis, k, k + 1), shape) for k, (shape, _) in enumerate(o.likes)]


@operation("cat", "concatenate")
def _cat(w: Writer, o: Any) -> Ref:
    shape, dtype = o.likes[0]
    parts = [x for x in o.tensors if x.shape != (0,) or len(shape) == 1]
    parts = [w.cast(x, dtype) for x in parts]
    return w("concatenate", *parts, shape=shape, dtype=dtype, axis=o.dim % len(shape))


@operation("stack")
def _stack(w: Writer, o: Any) -> Ref:
    shape, dtype = o.likes[0]
    parts = [w.cast(x, dtype) for x in o.tensors]
    return w("stack", *parts, shape=shape, dtype=dtype, axis=o.dim % len(shape))


@operation("roll")
def _roll(w: Writer, o: Any) -> Ref | None:
    if not o.dims:
        flat = w.reshape(o.self, (o.self.size,))
        return w.reshape(w("roll", flat, shifts=tuple(o.shifts), axes=(0,)), o.self.shape)
    return as_said(w, o)


@operation("diagonal")
def _diagonal(w: Writer, o: Any) -> Ref:
    axes = (o.dim1 % o.self.ndim, o.dim2 % o.self.ndim)
    given: dict[str, Any] = {"offset": o.offset or None, "axes": axes}
    return w("diagonal", o.self, shape=o.likes[0][0], **given)


@operation("diag_embed")
def _diag_embed(w: Writer, o: Any) -> Ref:
    rank = o.self.ndim + 1
    a, b = o.dim1 % rank, o.dim2 % rank
    n = o.self.shape[-1] + abs(o.offset)
    shape = (*o.self.shape[:-1], n, n)
    result = w("diagonal_matrix", o.self, shape=shape, offset=o.offset or None)
    order: list[Any] = list(range(rank - 2))
    for place, axis in sorted([(a, rank - 2), (b, rank - 1)]):
        order.insert(place, axis)
    return w.permute(result, order)


def _padded_by_index(mode: str) -> Translation:
    def translated(w: Writer, o: Any) -> Ref:
        x, count = o.self, len(o.padding) // 2
        for k in range(count):
            axis = x.ndim - 1 - k
            low, high = o.padding[2 * k], o.padding[2 * k + 1]  # less than zero: cut off
            places = np.arange(x.shape[axis])
            at = np.pad(places, (max(0, low), max(0, high)), mode=mode)  # type: ignore[call-overload]
            at = at[max(0, -low) : len(at) - max(0, -high)]
            x = _taken(w, x, axis, w.constant(at))
        return x

    return translated


ARRAYS |= {f"reflection_pad{n}d": _padded_by_index("reflect") for n in (1, 2, 3)}
ARRAYS |= {f"replication_pad{n}d": _padded_by_index("edge") for n in (1, 2, 3)}


def _taken(w: Writer, x: Ref, axis: int, i: Ref) -> Ref:
    """Entries along one axis; the axes of i stand in its place."""
    result = w.take(x, i, axes=(axis,))
    rest = range(i.ndim, i.ndim + axis)
    return w.permute(result, (*rest, *range(i.ndim), *range(i.ndim + axis, result.ndim)))


@operation("repeat")
def _repeat(w: Writer, o: Any) -> Ref:
    shape = (1,) * (len(o.repeats) - o.self.ndim) + o.self.shape
    once = w.reshape(o.self, [n for m in shape for n in (1, m)])
    pairs = zip(o.repeats, shape, strict=True)
    wide = w.broadcast(once, [n for r, m in pairs for n in (r, m)])
    return w.reshape(wide, o.likes[0][0])


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


@operation("view_as_real", "view_as_real_copy")
def _view_as_real(w: Writer, o: Any) -> Ref:
    parts = w("real", o.self, dtype="float64"), w("imag", o.self, dtype="float64")
    return w("stack", *parts, shape=o.likes[0][0], axis=o.self.ndim)


@operation("view_as_complex", "view_as_complex_copy")
def _view_as_complex(w: Writer, o: Any) -> Ref:
    last, shape = o.self.ndim - 1, o.likes[0][0]
    parts = [w.reshape(w.cut(o.self, last, k, k + 1), shape) for k in (0, 1)]
    return w("complex", *parts, dtype="complex128")


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


@operation("embedding")
def _embedding(w: Writer, o: Any) -> Ref:
    return w("embedding", o.weight, o.indices, shape=o.likes[0][0], dtype=o.weight.dtype)


@operation("sort", "msort")
def _sort(w: Writer, o: Any) -> Any:
    return _sorted(w, o.self, getattr(o, "dim", 0), o.likes, bool(getattr(o, "descending", False)))


def _sorted(w: Writer, x: Ref, dim: int, likes: Any, descending: bool) -> list[Ref]:
    axis = dim % max(1, x.ndim)
    outs = [(x.shape, x.dtype), (x.shape, "int64")]
    result = w.node("sort", [x], outs, axis=axis, descending=descending or None)
    return result[: len(likes)]


@operation("argsort")
def _argsort(w: Writer, o: Any) -> Ref:
    outs = [None, None]
    return _sorted(w, o.self, o.dim, outs, bool(o.descending))[1]


@operation("topk")
def _topk(w: Writer, o: Any) -> Any:
    largest, axis = None if o.largest else False, o.dim % max(1, o.self.ndim)
    return w.node("topk", [o.self], o.likes, k=o.k, axis=axis, largest=largest)


@operation("kthvalue")
def _kthvalue(w: Writer, o: Any) -> Any:
    return _at_rank(w, o.self, o.dim % max(1, o.self.ndim), o.k - 1, o.likes)


@operation("median")
def _median(w: Writer, o: Any) -> Any:
    if len(o.likes) == 1:
        flat = w.reshape(o.self, (o.self.size,))
        return _at_rank(w, flat, 0, (o.self.size - 1) // 2, o.likes)[:1]
    axis = o.dim % max(1, o.self.ndim)
    size = o.self.shape[axis] if o.self.ndim else 1
    return _at_rank(w, o.self, axis, (size - 1) // 2, o.likes)


def _at_rank(w: Writer, x: Ref, axis: int, k: int, likes: Any) -> list[Ref]:
    """The entry that stands at a place of the sorted ones, and where it stood."""
    both = _sorted(w, x, axis, [None, None], False)
    if not x.ndim:
        return both
    return [w.reshape(w.cut(y, axis, k, k + 1), likes[0][0]) for y in both]


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


def _argument(word: str) -> Translation:
    def translated(w: Writer, o: Any) -> Ref:
        x = o.self
        axis = 0 if o.dim is None else o.dim % max(1, x.ndim)
        if o.dim is None or not x.ndim:
            x = w.reshape(x, (x.size,))
        kept: dict[str, Any] = {"shape": _kept_shape(x, axis), "keep": True}
        if o.dim is None or not o.keepdim:
            kept = {"shape": [n for a, n in enumerate(x.shape) if a != axis]}
        result = w(word, x, dtype="int64", axis=axis, **kept)
        return w.reshape(result, o.likes[0][0])

    return translated


ARRAYS["argmax"], ARRAYS["argmin"] = _argument("argmax"), _argument("argmin")


@operation("var_mean", "std_mean")
def _moment_and_mean(w: Writer, o: Any) -> Any:
    keep = bool(getattr(o, "keepdim", False))
    return [as_said(w, o), w.mean(o.self, getattr(o, "dim", None), keep)]


@operation("linalg_vector_norm", "norm")
def _norm(w: Writer, o: Any) -> Ref | None:
    order = getattr(o, "ord", getattr(o, "p", 2))
    keep, dim = bool(getattr(o, "keepdim", False)), getattr(o, "dim", None)
    if order == 0:
        return w.total(w.cast(w.compare(o.self, "!=", 0.0), "float64"), dim, keep)
    if order == float("-inf"):
        return w.reduce("min", w("abs", o.self, dtype="float64"), dim, keep)
    return as_said(w, o)


def _cumulative_extreme(word: str) -> Translation:
    def translated(w: Writer, o: Any) -> Any:
        values = w(word, o.self, axis=o.dim % max(1, o.self.ndim))
        return [values, o.recorder.constant(o.outs[1])]

    return translated


ARRAYS["cummax"], ARRAYS["cummin"] = _cumulative_extreme("cummax"), _cumulative_extreme("cummin")
ARRAYS["_cummax_helper"] = ARRAYS["_cummin_helper"] = lambda w, o: None


@operation("count_nonzero")
def _count_nonzero(w: Writer, o: Any) -> Ref:
    there = w.cast(w.compare(o.self, "!=", 0), "int64")
    return w.total(there, getattr(o, "dim", None))


__all__ = ["ARRAYS", "axes_of"]
