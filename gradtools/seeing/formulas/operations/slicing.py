"""Parts of arrays and arrays of parts: slices, padding, windows, concatenation, diagonals.

Linear operations come in adjoint pairs, such as slice and pad.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, SupportsInt

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    apply,
    array,
    broadcast,
    broadcast_shape,
    constant_of,
    diagonal_matrix,
    imag,
    is_zero,
    number,
    product,
    real,
    reshape,
    unsqueeze,
    zeros,
)
from gradtools.seeing.formulas.expressions import Expr, expr, widest
from gradtools.seeing.formulas.operation_record import Cotangents, Form
from gradtools.seeing.formulas.operations.arrays import permuted
from gradtools.seeing.formulas.operations.entering import (
    linear,
    listed,
    lowers,
    operation,
    tie_first,
    tie_same,
    word,
)

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import ExpressionWriter

PerAxis = Sequence[int]  # one number for each axis

# Slices and padding.


def cut(x: Expr, start: PerAxis, limit: PerAxis, stride: PerAxis | None = None) -> Expr:
    """A slice: one start, limit and stride for each axis."""
    stride = tuple(stride or (1,) * x.rank)
    shape = tuple(-(-(b - a) // s) for a, b, s in zip(start, limit, stride, strict=True))
    if shape == x.shape and not any(start):
        return x
    seen = _seen_through(x, start, limit)
    if seen is not None:
        inner, offset = seen
        start, limit = ([n - k for n, k in zip(of, offset, strict=True)] for of in (start, limit))
        return cut(inner, start, limit, stride)
    return expr("slice", (x,), shape, x.kind, start=tuple(start), limit=tuple(limit), stride=stride)


def span(x: Expr, axis: int, start: int, limit: int) -> Expr:
    """A slice of one axis."""
    low, high = [0] * x.rank, list(x.shape)
    low[axis], high[axis] = start, limit
    return cut(x, low, high)


def _seen_through(x: Expr, start: PerAxis, limit: PerAxis) -> tuple[Expr, list[int]] | None:
    """What of an update a slice shows, the update alone or nothing of it; and where it begins."""
    if x.op != "dynamic_update":
        return None
    base, u, *starts = x.args
    low = _fixed(starts, u.shape, x.shape)
    if low is None:
        return None
    axes = list(zip(start, limit, low, u.shape, strict=True))
    if all(a >= p and b <= p + n for a, b, p, n in axes) and u.kind == x.kind:
        return u, low
    if any(b <= p or a >= p + n for a, b, p, n in axes) and base.kind == x.kind:
        return base, [0] * x.rank
    return None


def _slice_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """A slice."""
    slices = zip(y["start"], y["limit"], y["stride"], strict=True)
    return x[tuple(slice(a, b, s) for a, b, s in slices)]


def _slice_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """The slice of zeros becomes the cotangent."""
    interior = tuple(s - 1 for s in y["stride"])
    high = tuple(
        n - a - (m - 1) * s - 1 if m else n - a
        for n, m, a, s in zip(x.shape, y.shape, y["start"], y["stride"], strict=True)
    )
    return [pad(g, y["start"], high, interior)]


def _ranges(x: Expr, lows: PerAxis, highs: PerAxis, strides: PerAxis | None = None) -> str:
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


def _slice_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    a = x.args[0]
    where = _ranges(a, x["start"], x["limit"], x["stride"])
    return part_of(w.whole(a), ts.Written(where, where))


def part_of(x: ts.Written, where: ts.Written) -> ts.Written:
    """Entries of x, in square brackets."""
    x = x.at(ts.ATOM)
    return ts.Written(f"{x.text}[{where.text}]", rf"{x.latex}\left[{where.latex}\right]")


@lowers("slice", operation, _slice_value, _slice_pullback, form=_slice_form, ties=tie_first)
def sliced(x: Expr, *, start: Any, limit: Any, stride: Any = None, drop: Any = ()) -> Expr:
    """One number for each axis; stride > 0; axes of length 1 are dropped."""
    limit = [min(b, n) for b, n in zip(limit, x.shape, strict=True)]
    limit = [max(a, b) for a, b in zip(start, limit, strict=True)]
    part = cut(x, start, limit, stride)
    return reshape(part, [n for a, n in enumerate(part.shape) if a not in drop])


def pad(x: Expr, low: PerAxis, high: PerAxis, interior: PerAxis | None = None) -> Expr:
    """Zeros around x and between its entries."""
    interior = tuple(interior or (0,) * x.rank)
    shape = tuple(
        a + n + max(n - 1, 0) * i + b
        for n, a, b, i in zip(x.shape, low, high, interior, strict=True)
    )
    if shape == x.shape:
        return x
    low, high = tuple(low), tuple(high)
    return expr("pad", (x,), shape, x.kind, low=low, high=high, interior=interior)


def _inside(low: PerAxis, sizes: PerAxis, interior: PerAxis) -> tuple[slice, ...]:
    """Where the entries stand among the padding."""
    each = zip(low, sizes, interior, strict=True)
    return tuple(slice(a, a + n + max(n - 1, 0) * i, i + 1) for a, n, i in each)


def _pad_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """Zeros around and between."""
    out = np.zeros(y.shape, x.dtype)
    out[_inside(y["low"], x.shape, y["interior"])] = x
    return out


def _pad_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """The padding is cut off again."""
    stride = tuple(i + 1 for i in y["interior"])
    limit = tuple(n - b for n, b in zip(y.shape, y["high"], strict=True))
    return [cut(g, y["low"], limit, stride)]


def _pad_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    a = x.args[0]
    inside = _inside(x["low"], a.shape, x["interior"])
    where = _ranges(x, x["low"], [s.stop for s in inside], [s.step for s in inside])
    note = "into[...](x): zeros with x at these places"
    return placed(w, "into", note, ts.Written(where, where), [a])


def placed(
    w: ExpressionWriter, name: str, note: str, where: ts.Written, arrays: Sequence[Expr]
) -> ts.Written:
    """Arrays put together at some places."""
    w.note(note)
    inside = ts.join([w.whole(a) for a in arrays], ", ", ", ", ts.SUM)
    command = name.replace("_", r"\_")
    return ts.Written(
        f"{name}[{where.text}]({inside.text})",
        rf"\operatorname{{{command}}}_{{[{where.latex}]}}\left({inside.latex}\right)",
    )


@lowers("pad", operation, _pad_value, _pad_pullback, form=_pad_form, ties=tie_first)
def pad_with(
    x: Expr,
    around: Expr | None = None,
    *,
    low: Any,
    high: Any,
    interior: Any = None,
    value: Any = 0,
) -> Expr:
    """As in jax.lax.pad; negative low, high cut off."""
    around = number(value) if around is None else around
    interior = tuple(interior or (0,) * x.rank)
    grow = lambda ns: [max(n, 0) for n in ns]
    padded = pad(x, grow(low), grow(high), interior)
    if not is_zero(around):
        outside = np.ones(padded.shape)
        outside[_inside(grow(low), x.shape, interior)] = 0
        padded = padded + array(outside) * around
    start = [max(-a, 0) for a in low]
    limit = [n - max(-b, 0) for n, b in zip(padded.shape, high, strict=True)]
    return cut(padded, start, limit)


# Windows that start at integers.


def _begins(starts: Iterable[SupportsInt], sizes: PerAxis, shape: PerAxis) -> list[int]:
    """JAX's and XLA's rule: a window is moved inside."""
    return [min(max(int(s), 0), n - k) for s, k, n in zip(starts, sizes, shape, strict=True)]


def _window_of(starts: Iterable[np.ndarray], sizes: PerAxis, shape: PerAxis) -> tuple[slice, ...]:
    begins = _begins(starts, sizes, shape)
    return tuple(slice(b, b + k) for b, k in zip(begins, sizes, strict=True))


def _fixed(starts: Iterable[Expr], sizes: PerAxis, shape: PerAxis) -> list[int] | None:
    """Where a window starts whose place is known."""
    known = [constant_of(start) for start in starts]
    return None if None in known else _begins(known, sizes, shape)


def _window_form(name: str, arrays: int, note: str) -> Form:
    def form(w: ExpressionWriter, x: Expr) -> ts.Written:
        where = ts.join([w.whole(s) for s in x.args[arrays:]], ", ", ", ", ts.SUM)
        return placed(w, name, note, where, x.args[:arrays])

    return form


def dynamic_slice(x: Expr, starts: Sequence[Expr], sizes: PerAxis) -> Expr:
    """A window that starts at integers."""
    known = _fixed(starts, sizes, x.shape)
    if known is not None:
        return cut(x, known, [a + n for a, n in zip(known, sizes, strict=True)])
    return expr("dynamic_slice", (x, *starts), sizes, x.kind)


# The starts s are integers, one for each axis.
operation(
    "dynamic_slice",
    lambda y, x, *starts: x[_window_of(starts, y.shape, x.shape)],
    linear(lambda y, g, x, *s: dynamic_pad(g, s, x.shape)),
    form=_window_form("window", 1, "window[i](x): the part of x that starts at i"),
    lower=lambda x, *starts, sizes: dynamic_slice(x, starts, sizes),
)


def dynamic_pad(u: Expr, starts: Sequence[Expr], shape: PerAxis) -> Expr:
    """Zeros, with u in the window that starts at integers."""
    known = _fixed(starts, u.shape, shape)
    if known is not None:
        high = [n - a - k for n, a, k in zip(shape, known, u.shape, strict=True)]
        return pad(u, known, high)
    return expr("dynamic_pad", (u, *starts), shape, u.kind)


def _dynamic_pad_value(y: Expr, u: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    """Zeros with a window."""
    out = np.zeros(y.shape, u.dtype)
    out[_window_of(starts, u.shape, y.shape)] = u
    return out


operation(
    "dynamic_pad",
    _dynamic_pad_value,
    linear(lambda y, g, u, *s: dynamic_slice(g, s, u.shape)),
    form=_window_form("into", 1, "into[i](u): zeros with u in the window that starts at i"),
)


def dynamic_update(x: Expr, u: Expr, starts: Sequence[Expr]) -> Expr:
    """X with u in the window; what is overwritten as a whole is not read."""
    kind = widest(x.kind, u.kind)
    if u.shape == x.shape and u.kind == kind:
        return u
    before = x.args[0] if x.op == "dynamic_update" else x
    same = before is not x and x.args[1].shape == u.shape and x.args[2:] == tuple(starts)
    return expr("dynamic_update", (before if same else x, u, *starts), x.shape, kind)


def _dynamic_update_value(y: Expr, x: np.ndarray, u: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    """X with a window."""
    out = np.array(x, np.result_type(x, u))
    out[_window_of(starts, u.shape, x.shape)] = u
    return out


def _dynamic_update_pullback(y: Expr, g: Expr, x: Expr, u: Expr, *starts: Expr) -> Cotangents:
    """X keeps what was not overwritten; u gets the window."""
    kept = dynamic_update(g, zeros(u.shape), starts)
    return [kept, dynamic_slice(g, starts, u.shape)] + [None] * len(starts)


operation(
    "dynamic_update",
    _dynamic_update_value,
    _dynamic_update_pullback,
    form=_window_form("set_at", 2, "set_at[i](x, u): x with u in the window that starts at i"),
    ties=tie_same,
    lower=lambda x, u, *starts: dynamic_update(x, u, starts),
)

# Concatenation and what is cut apart.


@lowers("split -> part*")
def split(x: Expr, *, sizes: Sequence[int], axis: int) -> list[Expr]:
    """Consecutive parts, as many as sizes."""
    ends = accumulate(sizes)
    return [span(x, axis, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def concatenate(xs: Iterable[Expr], axis: int) -> Expr:
    """One after the other."""
    xs = tuple(xs)
    if len(xs) == 1:
        return xs[0]
    shape = list(xs[0].shape)
    shape[axis] = sum(x.shape[axis] for x in xs)
    return expr("concatenate", xs, shape, widest(*(x.kind for x in xs)), axis=axis)


def _concatenate_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    pieces = [w.whole(a) for a in x.args]
    between = "; " if x["axis"] == 0 else ", "
    latex = r";\; " if x["axis"] == 0 else r",\; "
    inside = ts.join(pieces, between, latex, ts.SUM)
    return ts.Written(f"[{inside.text}]", rf"\left[{inside.latex}\right]")


@lowers(
    "concatenate",
    operation,
    lambda y, *xs: np.concatenate(xs, y["axis"]),
    lambda y, g, *xs: split(g, sizes=[x.shape[y["axis"]] for x in xs], axis=y["axis"]),
    form=_concatenate_form,
    ties=tie_first,
)
def _concatenate(*xs: Expr, axis: int) -> Expr:
    """numpy.concatenate."""
    some = [x for x in xs if x.shape != (0,)]
    return concatenate(some if some and some[0].rank > 1 else xs, axis)


@lowers("stack")
def _stack(*xs: Expr, axis: int) -> Expr:
    """numpy.stack."""
    return concatenate([unsqueeze(x, [axis]) for x in xs], axis)


@lowers("unbind -> part*")
def _unbind(x: Expr, *, axis: int) -> list[Expr]:
    """What stands along an axis, each without it."""
    shape = [n for a, n in enumerate(x.shape) if a != axis]
    return [reshape(part, shape) for part in split(x, sizes=(1,) * x.shape[axis], axis=axis)]


word("view_as_real", lambda x: _stack(real(x), imag(x), axis=x.rank))


@lowers("view_as_complex")
def _view_as_complex(x: Expr) -> Expr:
    """The complex numbers of which these are the parts."""
    re, im = _unbind(x, axis=x.rank - 1)
    return re + 1j * im


# Reversed and shifted.


def flip(x: Expr, axes: Iterable[int]) -> Expr:
    """Reversed along axes."""
    axes = tuple(a for a in axes if x.shape[a] > 1)
    return expr("flip", (x,), x.shape, x.kind, axes=axes) if axes else x


operation(
    "flip",
    lambda y, x: np.flip(x, y["axes"]),
    lambda y, g, x: [flip(g, y["axes"])],
    form=lambda w, x: ts.function(
        "flip", [w.whole(x.args[0])], w.axis_names(x, x["axes"]) if x.rank > 1 else ""
    ),
    ties=tie_same,
    lower=lambda x, *, axes=(): flip(x, axes) if x.rank else x,
)


def roll(x: Expr, shifts: Iterable[int], axes: Iterable[int]) -> Expr:
    """numpy.roll."""
    return expr("roll", (x,), x.shape, x.kind, shifts=tuple(shifts), axes=tuple(axes))


@lowers(
    "roll",
    operation,
    lambda y, x: np.roll(x, y["shifts"], y["axes"]),
    lambda y, g, x: [roll(g, [-s for s in y["shifts"]], y["axes"])],
    form=lambda w, x: ts.function("roll", [w.whole(x.args[0])], listed(x["shifts"])),
    ties=tie_same,
)
def _roll(x: Expr, *, shifts: Sequence[int], axes: Sequence[int]) -> Expr:
    """numpy.roll."""
    if x.rank and not axes:
        return reshape(roll(reshape(x, (prod(x.shape),)), shifts, (0,)), x.shape)
    return roll(x, shifts, axes) if x.rank else x


@lowers("cross")
def _cross(a: Expr, b: Expr, *, axis: int) -> Expr:
    """numpy.cross along an axis of length 3."""
    shape = broadcast_shape(a.shape, b.shape)
    a, b = broadcast(a, shape), broadcast(b, shape)
    turn = lambda x, k: roll(x, [k], [axis])
    return turn(a, -1) * turn(b, -2) - turn(a, -2) * turn(b, -1)


# Triangles and diagonals.


def _triangle_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    name = "triu" if x["upper"] else "tril"
    return ts.function(name, [w.whole(x.args[0])], str(x["offset"]) if x["offset"] else "")


@lowers(
    "triangle",
    operation,
    lambda y, x: (np.triu if y["upper"] else np.tril)(x, y["offset"]),
    lambda y, g, x: [apply("triangle", g, **dict(y.attributes))],
    form=_triangle_form,
    ties=tie_same,
)
def triangle(x: Expr, *, upper: bool, offset: int = 0) -> Expr:
    """Triu or tril of the last two axes."""
    return apply("triangle", x, upper=bool(upper), offset=int(offset))


@lowers("diagonal")
def _diagonal(x: Expr, *, offset: int = 0, axes: Any = None) -> Expr:
    """numpy.diagonal; axes default to the last two."""
    first, second = axes or (x.rank - 2, x.rank - 1)
    n, m = x.shape[first], x.shape[second]
    a, b = max(-offset, 0), max(offset, 0)
    length = max(min(n - a, m - b), 0)
    start, limit = [0] * x.rank, list(x.shape)
    start[first], limit[first] = a, a + length
    start[second], limit[second] = b, b + length
    square = cut(x, start, limit)
    labels = ["d" if k in (first, second) else k for k in range(x.rank)]
    left = [k for k in range(x.rank) if k not in (first, second)]
    return product([square], [labels], [*left, "d"], [*(x.shape[k] for k in left), length])


@lowers("diagonal_matrix")
def _diagonal_matrix(x: Expr, *, offset: int = 0, axes: Any = None) -> Expr:
    """The last axis becomes a diagonal along axes."""
    square, rank = diagonal_matrix(x), x.rank + 1
    if offset:
        a, b = max(-offset, 0), max(offset, 0)
        lead = (0,) * (x.rank - 1)
        square = pad(square, (*lead, a, b), (*lead, b, a))
    order = [*range(rank - 2)]
    for place, axis in sorted(zip(axes or (rank - 2, rank - 1), (rank - 2, rank - 1), strict=True)):
        order.insert(place, axis)
    return permuted(square, order)


@lowers("trace")
def _trace(x: Expr) -> Expr:
    """Of the last two axes."""
    batch, least = x.shape[:-2], min(x.shape[-2:])
    axes = tuple(range(len(batch)))
    square = cut(x, [0] * x.rank, [*batch, least, least])
    return product([square], [(*axes, "d", "d")], axes, batch)
