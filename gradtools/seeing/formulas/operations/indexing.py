"""Integer indices: gathering, scattering, one-hot factors, and sorting."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    apply,
    array,
    broadcast,
    broadcast_shape,
    number,
    reshape,
    unbroadcast,
    unsqueeze,
    zeros,
)
from gradtools.seeing.formulas.expressions import INTEGER, REAL, Expr, expr, widest
from gradtools.seeing.formulas.operation_record import Cotangents
from gradtools.seeing.formulas.operations.arrays import permuted
from gradtools.seeing.formulas.operations.entering import (
    called,
    linear,
    lowers,
    operation,
    tie_first,
    tie_same,
    word,
)
from gradtools.seeing.formulas.operations.nonnegative_indices import (
    meant,
    of_known,
    of_rows,
    picked,
)
from gradtools.seeing.formulas.operations.reductions import along_form
from gradtools.seeing.formulas.operations.slicing import (
    cut,
    dynamic_update,
    pad,
    part_of,
    placed,
    span,
)

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

Places = tuple[list[int], tuple[np.ndarray, ...]]  # axes, and integer arrays at the first of them


def _as_wide(x: Expr, u: Expr, *rest: Expr, **attributes: Any) -> tuple[Any, str]:
    return x.shape, widest(x.kind, u.kind)


def _with_length(x: Expr, axis: int, n: int) -> tuple[int, ...]:
    return (*x.shape[:axis], n, *x.shape[axis + 1 :])


def _one_hot_value(y: Expr, i: np.ndarray) -> np.ndarray:
    """A last axis with 1 at i."""
    i = np.asarray(i)
    if y.get("from_the_end"):
        return np.eye(y["size"])[i.astype(np.int64)]
    return (i[..., None] == np.arange(y["size"])) * 1.0


def _tie_one_hot(axes: Axes, y: Expr) -> None:
    for k in range(y.rank - 1):
        axes.tie((y, k), (y.args[0], k))


operation(
    "one_hot(i; size)",
    _one_hot_value,
    result=lambda i, size, from_the_end=False: ((*i.shape, size), REAL),
    form=called("onehot"),
    ties=_tie_one_hot,
)

# Indices at some axes, whose axes lead.


def _places(rank: int, axes: Sequence[int], indices: Sequence[np.ndarray]) -> Places:
    """The _index_value that has the integer arrays at axes; the axes that are left come last."""
    order = [*axes, *(a for a in range(rank) if a not in axes)]
    return order, tuple(np.asarray(i).astype(np.int64, copy=False) for i in indices)


def _index_value(y: Expr, x: np.ndarray, *indices: np.ndarray) -> np.ndarray:
    """X at integer arrays."""
    order, at = _places(x.ndim, y["axes"], indices)
    return np.transpose(x, order)[at]


def _places_form(
    w: ExpressionWriter, x: Expr, whole_rank: int, indices: Sequence[Expr]
) -> ts.Written:
    said: list[ts.Written] = [ts.Written(":", ":")] * whole_rank
    for axis, i in zip(x["axes"], indices, strict=True):
        said[axis] = w.whole(i)
    while said and said[-1].text == ":":
        said.pop()
    return ts.join(said, ", ", ", ", ts.SUM)


def _tie_indexed(axes: Axes, y: Expr, whole: Expr, part: Expr, indices: Sequence[Expr]) -> None:
    """The integer arrays' axes lead in the part, those of the whole that are left follow."""
    left = [a for a in range(whole.rank) if a not in y["axes"]]
    lead = part.rank - len(left)
    for k, a in enumerate(left):
        axes.tie((part, lead + k), (whole, a))
    for i in indices:
        for k in range(i.rank):
            axes.tie((part, lead - i.rank + k), (i, k))


def _index_shape(x: Expr, *indices: Expr, axes: Sequence[int]) -> tuple[Any, str]:
    lead = broadcast_shape(*(i.shape for i in indices))
    return lead + tuple(n for a, n in enumerate(x.shape) if a not in axes), x.kind


@lowers(
    "index",
    operation,
    _index_value,
    linear(lambda y, g, x, *i: index_add(g, i, y["axes"], x.shape)),
    result=_index_shape,
    form=lambda w, x: part_of(w.whole(x.args[0]), _places_form(w, x, x.args[0].rank, x.args[1:])),
    ties=lambda axes, y: _tie_indexed(axes, y, y.args[0], y, y.args[1:]),
)
def _index(x: Expr, *indices: Expr, axes: Sequence[int]) -> Expr:
    """Integer arrays i at axes; their axes lead, the others follow."""
    axes = tuple(axes)
    indices = tuple(meant(i, x.shape[a]) for i, a in zip(indices, axes, strict=True))
    for special in (of_rows, of_known):
        result = special(x, indices, axes)
        if result is not None:
            return result
    return apply("index", x, *indices, axes=axes)


def taken(x: Expr, i: Expr, axis: int) -> Expr:
    """Entries along one axis; the axes of i stand in its place."""
    result = _index(x, i, axes=(axis,))
    rest = range(i.rank, i.rank + axis)
    return permuted(result, (*rest, *range(i.rank), *range(i.rank + axis, result.rank)))


word("embedding", lambda table, i: _index(table, i, axes=(0,)))


def _padded_by_index(x: Expr, padding: Sequence[int], mode: str) -> Expr:
    """What lies inside repeated outside; less than zero is cut off."""
    for k in range(len(padding) // 2):
        axis, (low, high) = x.rank - 1 - k, padding[2 * k : 2 * k + 2]
        at = np.pad(np.arange(x.shape[axis]), (max(0, low), max(0, high)), mode=mode)  # type: ignore[call-overload]
        x = taken(x, array(at[max(0, -low) : len(at) - max(0, -high)]), axis)
    return x


# PyTorch's: from the last axis on, mirrored at the edge or with the edge repeated.
word("reflection_pad", lambda x, *, padding: _padded_by_index(x, padding, "reflect"))
word("replication_pad", lambda x, *, padding: _padded_by_index(x, padding, "edge"))


def index_add(u: Expr, indices: Sequence[Expr], axes: Sequence[int], shape: Sequence[int]) -> Expr:
    """Zeros of this shape, with u added at the integer arrays."""
    return expr("index_add", (u, *indices), shape, u.kind, axes=tuple(axes))


_ADDED = "add_at[i](u): zeros with u added at the places i"
_SET = "set_at[i](x, u): x with u at the places i"


def _index_add_value(y: Expr, u: np.ndarray, *indices: np.ndarray) -> np.ndarray:
    """Zeros with u added."""
    order, at = _places(len(y.shape), y["axes"], indices)
    out = np.zeros(y.shape, u.dtype)
    np.add.at(np.transpose(out, order), at, u)
    return out


operation(
    "index_add",
    _index_add_value,
    linear(lambda y, g, u, *i: apply("index", g, *i, axes=y["axes"])),
    form=lambda w, x: placed(
        w, "add_at", _ADDED, _places_form(w, x, x.rank, x.args[1:]), x.args[:1]
    ),
    ties=lambda axes, y: _tie_indexed(axes, y, y, y.args[0], y.args[1:]),
)


def _index_set_value(y: Expr, x: np.ndarray, u: np.ndarray, *indices: np.ndarray) -> np.ndarray:
    """X with u put in."""
    order, at = _places(x.ndim, y["axes"], indices)
    out = np.array(x, np.result_type(x, u))
    np.transpose(out, order)[at] = u
    return out


def _index_set_pullback(y: Expr, g: Expr, x: Expr, u: Expr, *indices: Expr) -> Cotangents:
    """X keeps what was not overwritten; u gets what was."""
    kept = apply("index_set", g, zeros(u.shape), *indices, axes=y["axes"])
    of_u = unbroadcast(apply("index", g, *indices, axes=y["axes"]), u.shape)
    return [kept, of_u, *[None] * len(indices)]


operation(
    "index_set",
    _index_set_value,
    _index_set_pullback,
    result=_as_wide,
    form=lambda w, x: placed(w, "set_at", _SET, _places_form(w, x, x.rank, x.args[2:]), x.args[:2]),
    ties=tie_same,
)


@lowers("scatter")
def _scatter(x: Expr, u: Expr, *indices: Expr, axes: Any, mode: str) -> Expr:
    """index(x, *i) is replaced by u ("set") or has u added ("add")."""
    lead = broadcast_shape(*(i.shape for i in indices))
    rest = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    indices = tuple(meant(i, x.shape[a]) for i, a in zip(indices, axes, strict=True))
    u = broadcast(u, (*lead, *rest))
    if mode == "add":
        return x + index_add(u, indices, tuple(axes), x.shape)
    if mode == "set":
        return apply("index_set", x, u, *indices, axes=tuple(axes))
    raise GradtoolsError(f"formula: scatter knows the modes 'add' and 'set', not {mode!r}")


# Indices along one axis.


def _beside(x: Expr, i: Expr, axis: int) -> Expr:
    """X as long as the indices on the other axes."""
    limit = [n if a == axis else m for a, (n, m) in enumerate(zip(x.shape, i.shape, strict=True))]
    return cut(x, [0] * x.rank, limit)


def _tie_along(axes: Axes, y: Expr) -> None:
    x, i = y.args[:2]
    for k in range(y.rank):
        axes.tie((y, k), (i if y.op == "take_along" else x, k))
        if k != y["axis"]:
            axes.tie((y, k), (x, k))


@lowers(
    "take_along",
    operation,
    lambda y, x, i: np.take_along_axis(x, i.astype(np.int64, copy=False), y["axis"]),
    linear(lambda y, g, x, i: put_along(g, i, y["axis"], x.shape[y["axis"]])),
    result=lambda x, i, axis: (_with_length(x, axis, i.shape[axis]), x.kind),
    form=lambda w, x: part_of(w.whole(x.args[0]), w.whole(x.args[1])),
    ties=_tie_along,
)
def _take_along(x: Expr, i: Expr, *, axis: int) -> Expr:
    """numpy.take_along_axis; i has the rank of x."""
    if not x.rank:
        return reshape(x, i.shape)
    if axis == x.rank - 1 and i.shape[axis] == 1 and i.shape[:-1] == x.shape[:-1] and x.rank > 1:
        place = meant(reshape(i, i.shape[:-1]), x.shape[axis])
        return unsqueeze(picked(x, place), [axis])
    i = meant(i, x.shape[axis])
    return apply("take_along", _beside(x, i, axis), i, axis=axis)


def put_along(u: Expr, i: Expr, axis: int, size: int) -> Expr:
    """Zeros, with u added where i says along the axis."""
    return expr("put_along", (u, i), _with_length(u, axis, size), u.kind, axis=axis)


def _put_along_value(y: Expr, u: np.ndarray, i: np.ndarray) -> np.ndarray:
    """Zeros with u added along an axis."""
    out = np.zeros(y.shape, u.dtype)
    at: list[np.ndarray] = list(np.indices(i.shape, sparse=True))
    at[y["axis"]] = i.astype(np.int64, copy=False)
    np.add.at(out, tuple(at), np.broadcast_to(u, i.shape))
    return out


operation(
    "put_along",
    _put_along_value,
    linear(lambda y, g, u, i: apply("take_along", g, i, axis=y["axis"])),
    form=lambda w, x: placed(w, "add_at", _ADDED, w.whole(x.args[1]), x.args[:1]),
    ties=_tie_along,
)


def _along_set_value(y: Expr, x: np.ndarray, i: np.ndarray, u: np.ndarray) -> np.ndarray:
    """X with u put in along an axis."""
    out = np.array(x, np.result_type(x, u))
    np.put_along_axis(out, np.asarray(i).astype(np.int64, copy=False), u, y["axis"])
    return out


def _along_set_pullback(y: Expr, g: Expr, x: Expr, i: Expr, u: Expr) -> Cotangents:
    """X keeps what was not overwritten; u gets what was."""
    kept = apply("along_set", g, i, zeros(u.shape), axis=y["axis"])
    return [kept, None, apply("take_along", g, i, axis=y["axis"])]


operation(
    "along_set",
    _along_set_value,
    _along_set_pullback,
    result=lambda x, i, u, axis: _as_wide(x, u),
    form=lambda w, x: placed(w, "set_at", _SET, w.whole(x.args[1]), x.args[::2]),
    ties=tie_first,
)


@lowers("scatter_along")
def _scatter_along(x: Expr, i: Expr, u: Expr, *, axis: int, mode: str) -> Expr:
    """The same for take_along."""
    if not x.rank:
        return x + u if mode == "add" else u
    u, i = broadcast(u, i.shape), meant(i, x.shape[axis])
    inner = _beside(x, i, axis)
    if mode == "add":
        added = put_along(u, i, axis, x.shape[axis])
        high = [n - m for n, m in zip(x.shape, added.shape, strict=True)]
        return x + pad(added, [0] * x.rank, high)
    if mode != "set":
        raise GradtoolsError(
            f"formula: scatter_along knows the modes 'add' and 'set', not {mode!r}"
        )
    window = apply("along_set", inner, i, u, axis=axis)
    if window.shape == x.shape:
        return window
    return dynamic_update(x, window, [number(0)] * x.rank)


# Sorting.


def _argsort_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """The stable order."""
    return np.argsort(x, y["axis"], kind="stable")


@lowers(
    "argsort",
    operation,
    _argsort_value,
    result=lambda x, **_: (x.shape, INTEGER),
    form=along_form("argsort"),
    ties=tie_same,
)
def _argsort(x: Expr, *, axis: int, descending: bool = False, stable: bool = False) -> Expr:
    """Integers."""
    return apply("argsort", -x if descending else x, axis=axis)


@lowers("sort -> values indices")
def _sort(x: Expr, *, axis: int, descending: bool = False, stable: bool = False) -> list[Expr]:
    """Values, and where they stood."""
    if not x.rank:
        return [x, number(0)]
    i = _argsort(x, axis=axis, descending=descending)
    return [apply("take_along", x, i, axis=axis), i]


@lowers("kthvalue -> values indices")
def _kth(x: Expr, *, k: int, axis: int, keep: bool = False) -> list[Expr]:
    """The k-th smallest along an axis, and where it stood."""
    both = _sort(x, axis=axis)
    if not x.rank:
        return both
    shape = (*x.shape[:axis], *[1] * keep, *x.shape[axis + 1 :])
    return [reshape(span(y, axis, k - 1, k), shape) for y in both]


@lowers("median -> values*")
def _median(x: Expr, *, axis: int | None = None, keep: bool = False) -> list[Expr]:
    """The lower of the two in the middle; along an axis, where it stood, too."""
    if axis is None:
        return _median(reshape(x, (prod(x.shape),)), axis=0)[:1]
    return _kth(x, k=(x.shape[axis] + 1) // 2 if x.rank else 1, axis=axis, keep=keep)


@lowers("topk -> values indices")
def _topk(x: Expr, *, k: int, axis: int, largest: bool = True, sorted: bool = True) -> list[Expr]:
    """Sorted, and where they stood."""
    if not x.rank:
        return [x, number(0)]
    i = _argsort(x, axis=axis, descending=largest)
    i = span(i, axis, 0, k)
    return [apply("take_along", x, i, axis=axis), i]
