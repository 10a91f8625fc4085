"""Parts of arrays: slices, windows, integer indices, and what puts a part back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gradtools.seeing.formulas.algebra import zeros
from gradtools.seeing.formulas.constructors import (
    along_set,
    cut,
    dynamic_pad,
    dynamic_slice,
    dynamic_update,
    index,
    index_add,
    index_set,
    pad,
    put_along,
    take_along,
    unbroadcast,
)
from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.primitives.record import Form, Primitive, linear, tie_first, tie_same
from gradtools.seeing.formulas.typesetting import ATOM, SUM, Written, function, join

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

# --- values, in NumPy


def _cut(y, x):
    """A slice."""
    slices = zip(y["start"], y["limit"], y["stride"], strict=True)
    return x[tuple(slice(a, b, s) for a, b, s in slices)]


def _pad(y, x):
    """Zeros around and between."""
    out = np.zeros(y.shape, x.dtype)
    place = tuple(
        slice(a, a + n + max(n - 1, 0) * i, i + 1)
        for a, n, i in zip(y["low"], x.shape, y["interior"], strict=True)
    )
    out[place] = x
    return out


def _one_hot(y, i):
    """A last axis with 1 at i."""
    i = np.asarray(i)
    if y.get("from_the_end"):
        return np.eye(y["size"])[i.astype(np.int64)]
    return (i[..., None] == np.arange(y["size"])) * 1.0


def _places(rank, axes, indices):
    """The _index that has the integer arrays at axes; the axes that are left come last."""
    order = [*axes, *(a for a in range(rank) if a not in axes)]
    return order, tuple(np.asarray(i).astype(np.int64, copy=False) for i in indices)


def _index(y, x, *indices):
    """X at integer arrays."""
    order, at = _places(x.ndim, y["axes"], indices)
    return np.transpose(x, order)[at]


def _index_add(y, u, *indices):
    """Zeros with u added."""
    order, at = _places(len(y.shape), y["axes"], indices)
    out = np.zeros(y.shape, u.dtype)
    np.add.at(np.transpose(out, order), at, u)
    return out


def _index_set(y, x, u, *indices):
    """X with u put in."""
    order, at = _places(x.ndim, y["axes"], indices)
    out = np.array(x, np.result_type(x, u))
    np.transpose(out, order)[at] = u
    return out


def _put_along(y, u, i):
    """Zeros with u added along an axis."""
    out = np.zeros(y.shape, u.dtype)
    at = list(np.indices(i.shape, sparse=True))
    at[y["axis"]] = i.astype(np.int64, copy=False)
    np.add.at(out, tuple(at), np.broadcast_to(u, i.shape))
    return out


def _along_set(y, x, i, u):
    """X with u put in along an axis."""
    out = np.array(x, np.result_type(x, u))
    np.put_along_axis(out, np.asarray(i).astype(np.int64, copy=False), u, y["axis"])
    return out


def _window_of(starts, sizes, shape):
    """JAX's and XLA's rule: a window is moved inside."""
    begins = [min(max(int(s), 0), n - k) for s, k, n in zip(starts, sizes, shape, strict=True)]
    return tuple(slice(b, b + k) for b, k in zip(begins, sizes, strict=True))


def _dynamic_pad(y, u, *starts):
    """Zeros with a window."""
    out = np.zeros(y.shape, u.dtype)
    out[_window_of(starts, u.shape, y.shape)] = u
    return out


def _dynamic_update(y, x, u, *starts):
    """X with a window."""
    out = np.array(x, np.result_type(x, u))
    out[_window_of(starts, u.shape, x.shape)] = u
    return out


# --- cotangents of the arguments


def _slice_pullback(y, g, x):
    """The slice of zeros becomes the cotangent."""
    interior = tuple(s - 1 for s in y["stride"])
    high = tuple(
        n - a - (m - 1) * s - 1 if m else n - a
        for n, m, a, s in zip(x.shape, y.shape, y["start"], y["stride"], strict=True)
    )
    return [pad(g, y["start"], high, interior)]


def _pad_pullback(y, g, x):
    """The padding is cut off again."""
    stride = tuple(i + 1 for i in y["interior"])
    limit = tuple(n - b for n, b in zip(y.shape, y["high"], strict=True))
    return [cut(g, y["low"], limit, stride)]


def _index_set_pullback(y, g, x, u, *indices):
    """X keeps what was not overwritten; u gets what was."""
    kept = index_set(g, zeros(u.shape), indices, y["axes"])
    return [kept, unbroadcast(index(g, indices, y["axes"]), u.shape)] + [None] * len(indices)


def _along_set_pullback(y, g, x, i, u):
    """X keeps what was not overwritten; u gets what was."""
    kept = along_set(g, i, zeros(u.shape), y["axis"])
    return [kept, None, take_along(g, i, y["axis"])]


def _dynamic_update_pullback(y, g, x, u, *starts):
    """X keeps what was not overwritten; u gets the window."""
    kept = dynamic_update(g, zeros(u.shape), starts)
    return [kept, dynamic_slice(g, starts, u.shape)] + [None] * len(starts)


# --- notation


def _ranges(x: Expr, lows: Sequence[int], highs: Sequence[int], strides=None) -> str:
    strides = strides or (1,) * len(lows)
    said = []
    for n, a, b, s in zip(x.shape, lows, highs, strides, strict=True):
        if (a, b, s) == (0, n, 1):
            said.append(":")
        elif b == a + 1:
            said.append(str(a))
        else:
            said.append(f"{a or ''}:{'' if b == n else b}" + (f":{s}" if s != 1 else ""))
    return ", ".join(said)


def _slice_form(w: ExpressionWriter, x: Expr) -> Written:
    a = x.args[0]
    where = _ranges(a, x["start"], x["limit"], x["stride"])
    return _part(w.whole(a), Written(where, where))


def _part(x: Written, where: Written) -> Written:
    """Entries of x, in square brackets."""
    x = x.at(ATOM)
    return Written(f"{x.text}[{where.text}]", rf"{x.latex}\left[{where.latex}\right]")


def _pad_form(w: ExpressionWriter, x: Expr) -> Written:
    a = x.args[0]
    highs = [
        low + n + max(n - 1, 0) * i
        for n, low, i in zip(a.shape, x["low"], x["interior"], strict=True)
    ]
    where = _ranges(x, x["low"], highs, [i + 1 for i in x["interior"]])
    note = "into[...](x): zeros with x at these places"
    return _at(w, "into", note, Written(where, where), [a])


def _places_form(w: ExpressionWriter, x: Expr, whole_rank: int, indices: Sequence[Expr]) -> Written:
    said: list[Written] = [Written(":", ":")] * whole_rank
    for axis, i in zip(x["axes"], indices, strict=True):
        said[axis] = w.whole(i)
    while said and said[-1].text == ":":
        said.pop()
    return join(said, ", ", ", ", SUM)


def _index_form(w: ExpressionWriter, x: Expr) -> Written:
    where = _places_form(w, x, x.args[0].rank, x.args[1:])
    return _part(w.whole(x.args[0]), where)


_ADDED = "add_at[i](u): zeros with u added at the places i"
_SET = "set_at[i](x, u): x with u at the places i"


def _index_add_form(w: ExpressionWriter, x: Expr) -> Written:
    where = _places_form(w, x, x.rank, x.args[1:])
    return _at(w, "add_at", _ADDED, where, x.args[:1])


def _index_set_form(w: ExpressionWriter, x: Expr) -> Written:
    where = _places_form(w, x, x.rank, x.args[2:])
    return _at(w, "set_at", _SET, where, x.args[:2])


def _at(
    w: ExpressionWriter, name: str, note: str, where: Written, arrays: Sequence[Expr]
) -> Written:
    w.note(note)
    inside = join([w.whole(a) for a in arrays], ", ", ", ", SUM)
    command = name.replace("_", r"\_")
    return Written(
        f"{name}[{where.text}]({inside.text})",
        rf"\operatorname{{{command}}}_{{[{where.latex}]}}\left({inside.latex}\right)",
    )


def _take_along_form(w: ExpressionWriter, x: Expr) -> Written:
    where = w.whole(x.args[1])
    return _part(w.whole(x.args[0]), where)


def _window_form(name: str, arrays: int, note: str) -> Form:
    def form(w: ExpressionWriter, x: Expr) -> Written:
        where = join([w.whole(s) for s in x.args[arrays:]], ", ", ", ", SUM)
        return _at(w, name, note, where, x.args[:arrays])

    return form


# --- axes that are the same


def _tie_one_hot(axes: Axes, y: Expr) -> None:
    for k in range(y.rank - 1):
        axes.tie((y, k), (y.args[0], k))


def _tie_index(axes: Axes, y: Expr) -> None:
    _tie_indexed(axes, y, y.args[0], y, y.args[1:])


def _tie_index_add(axes: Axes, y: Expr) -> None:
    _tie_indexed(axes, y, y, y.args[0], y.args[1:])


def _tie_indexed(axes: Axes, y: Expr, whole: Expr, part: Expr, indices: Sequence[Expr]) -> None:
    """The integer arrays' axes lead in the part, those of the whole that are left follow."""
    left = [a for a in range(whole.rank) if a not in y["axes"]]
    lead = part.rank - len(left)
    for k, a in enumerate(left):
        axes.tie((part, lead + k), (whole, a))
    for i in indices:
        for k in range(i.rank):
            axes.tie((part, lead - i.rank + k), (i, k))


def _tie_along(axes: Axes, y: Expr) -> None:
    x, i = y.args[:2]
    for k in range(y.rank):
        axes.tie((y, k), (i if y.op == "take_along" else x, k))
        if k != y["axis"]:
            axes.tie((y, k), (x, k))


INDEXING: dict[str, Primitive] = {
    "slice": Primitive(_cut, _slice_pullback, form=_slice_form, ties=tie_first),
    "pad": Primitive(_pad, _pad_pullback, form=_pad_form, ties=tie_first),
    "one_hot": Primitive(
        _one_hot, form=lambda w, x: function("onehot", [w.whole(x.args[0])]), ties=_tie_one_hot
    ),
    "index": Primitive(
        _index,
        linear(lambda y, g, x, *i: index_add(g, i, y["axes"], x.shape)),
        form=_index_form,
        ties=_tie_index,
    ),
    "index_add": Primitive(
        _index_add,
        linear(lambda y, g, u, *i: index(g, i, y["axes"])),
        form=_index_add_form,
        ties=_tie_index_add,
    ),
    "index_set": Primitive(_index_set, _index_set_pullback, form=_index_set_form, ties=tie_same),
    "take_along": Primitive(
        lambda y, x, i: np.take_along_axis(x, i.astype(np.int64, copy=False), y["axis"]),
        linear(lambda y, g, x, i: put_along(g, i, y["axis"], x.shape[y["axis"]])),
        form=_take_along_form,
        ties=_tie_along,
    ),
    "put_along": Primitive(
        _put_along,
        linear(lambda y, g, u, i: take_along(g, i, y["axis"])),
        form=lambda w, x: _at(w, "add_at", _ADDED, w.whole(x.args[1]), x.args[:1]),
        ties=_tie_along,
    ),
    "along_set": Primitive(
        _along_set,
        _along_set_pullback,
        form=lambda w, x: _at(w, "set_at", _SET, w.whole(x.args[1]), x.args[::2]),
        ties=tie_first,
    ),
    "dynamic_slice": Primitive(
        lambda y, x, *starts: x[_window_of(starts, y.shape, x.shape)],
        linear(lambda y, g, x, *s: dynamic_pad(g, s, x.shape)),
        form=_window_form("window", 1, "window[i](x): the part of x that starts at i"),
    ),
    "dynamic_pad": Primitive(
        _dynamic_pad,
        linear(lambda y, g, u, *s: dynamic_slice(g, s, u.shape)),
        form=_window_form("into", 1, "into[i](u): zeros with u in the window that starts at i"),
    ),
    "dynamic_update": Primitive(
        _dynamic_update,
        _dynamic_update_pullback,
        form=_window_form("set_at", 2, "set_at[i](x, u): x with u in the window that starts at i"),
        ties=tie_same,
    ),
}
