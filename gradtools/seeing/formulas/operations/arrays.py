"""Constants, contractions (all of them `einsum`), reshapes and slices.

A gather whose indices are known (a slice, a selection by a mask) is one linear operation,
``arrange``; ``restore`` is its adjoint::

    arrange   y[i] = x[places[i]]        restore   its transpose
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    array,
    broadcast,
    conj,
    einsum,
    imag,
    matmul,
    number,
    product,
    real,
    reshape,
    transpose,
    unsqueeze,
)
from gradtools.seeing.formulas.expressions import (
    DTYPES,
    ArrayValue,
    Expr,
    Shape,
    expr,
    widest,
)
from gradtools.seeing.formulas.operations.entering import makes, operation, tie_first, word

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes, Axis
    from gradtools.seeing.formulas.writing import ExpressionWriter


# Constants.


@makes("constant")
def constant(*, value: Any) -> Expr:
    """A captured number or array."""
    value = np.asarray(value)
    if value.ndim or value.dtype.kind == "b":
        return array(value)
    return number(value[()])


operation("number", lambda y: np.asarray(y["value"]))
operation("array", lambda y: y["value"].array, form=lambda w, x: ts.Written("c"))

# Contractions.


def _einsum(y: Expr, *arrays: np.ndarray) -> np.ndarray:
    """Coefficient times the einsum of the factors, broadcast to the shape."""
    coefficient, labels = y["coefficient"], y["labels"]
    if not arrays:
        return np.full(y.shape, coefficient)
    kept = tuple(l for l in range(len(y.shape)) if any(l in names for names in labels))
    operands: list[Any] = []
    for a, names in zip(arrays, labels, strict=True):
        operands += [a + 0.0 if a.dtype.kind in "bui" else a, list(names)]
    if len(arrays) > 1 and not any(l >= len(y.shape) for names in labels for l in names):
        value = _aligned_product(arrays, labels, kept)
    else:
        value = np.einsum(*operands, list(kept), optimize=len(arrays) > 2)
    place = tuple(slice(None) if l in kept else None for l in range(len(y.shape)))
    result = np.broadcast_to(np.asarray(coefficient * value)[place], y.shape)
    return result if y.is_inexact else result.astype(DTYPES[y.kind])


def _aligned_product(
    arrays: Sequence[np.ndarray], labels: Sequence[Shape], kept: Shape
) -> np.ndarray:
    """A product without sums, by NumPy's multiplication: it is faster and exact for infinities."""
    result: Any = 1.0
    for a, names in zip(arrays, labels, strict=True):
        place = tuple(slice(None) if l in names else None for l in kept)
        operands: list[Any] = [a + 0.0, list(names), [l for l in kept if l in names]]
        result = result * np.einsum(*operands)[place]
    return result


def _einsum_cotangent(y: Expr, g: Expr, k: int) -> Expr:
    """The cotangent of factor k."""
    others = [j for j in range(len(y.args)) if j != k]
    return product(
        [g, *(conj(y.args[j]) for j in others)],
        [tuple(range(y.rank)), *(y["labels"][j] for j in others)],
        y["labels"][k],
        y.args[k].shape,
        np.conj(y["coefficient"]),
    )


def _tie_einsum(axes: Axes, y: Expr) -> None:
    first: dict[int, Axis] = {l: (y, l) for l in range(y.rank)}
    for a, names in zip(y.args, y["labels"], strict=True):
        for k, l in enumerate(names):
            axes.tie(first.setdefault(l, (a, k)), (a, k))


# As numpy.einsum, with "->" and no "..."; no label twice in the result.
operation(
    "einsum",
    _einsum,
    lambda y, g, *args: [_einsum_cotangent(y, g, k) for k in range(len(args))],
    ties=_tie_einsum,
    make=lambda *xs, subscripts: einsum(subscripts, *xs),
)
word("matmul", lambda a, b: matmul(a, b))
word("outer", lambda a, b: einsum("i,j->ij", a, b))
word("vdot", lambda a, b: conj(a) @ b)


# Axes.


def permuted(x: Expr, permutation: Sequence[int]) -> Expr:
    """numpy.transpose; x itself for the identity permutation."""
    return x if tuple(permutation) == tuple(range(x.rank)) else transpose(x, permutation)


def _reshape_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    if x.shape == tuple(n for n in x.args[0].shape if n != 1):
        return w.operand(x.args[0])
    w.note("reshape: row-major")
    return ts.function("reshape", [w.operand(x.args[0])], "x".join(map(str, x.shape)))


def _tie_reshape(axes: Axes, y: Expr) -> None:
    (x,) = y.args
    place = {prod(x.shape[:k]): k for k, n in enumerate(x.shape) if n != 1}
    for k, n in enumerate(y.shape):
        same = place.get(prod(y.shape[:k]))
        if same is not None and x.shape[same] == n:
            axes.tie((x, same), (y, k))


word("transpose", lambda x, *, permutation: permuted(x, permutation))
operation(  # row-major; also flatten, squeeze, unsqueeze
    "reshape",
    lambda y, x: np.reshape(x, y.shape),
    lambda y, g, x: [reshape(g, x.shape)],
    form=_reshape_form,
    ties=_tie_reshape,
    make=lambda x, *, shape: reshape(x, shape),
)
# Axis i of x becomes axes[i]; default the last ones.
word("broadcast", lambda x, *, shape, axes=None: broadcast(x, shape, axes))


# Gather and scatter at known places.


def arrange(x: Expr, places: np.ndarray) -> Expr:
    """Gather: the entries at places of the flattened x."""
    places = np.asarray(places, np.int64)
    if np.array_equal(places.ravel(), np.arange(np.prod(x.shape, dtype=int))):
        return reshape(x, places.shape)
    return expr("arrange", (x,), places.shape, x.kind, places=ArrayValue(places), into=x.shape)


def restore(g: Expr, y: Expr) -> Expr:
    """Scatter-add, the transpose of `arrange`: each entry is added to the place it came from."""
    return expr("restore", (g,), y["into"], g.kind, places=y["places"], into=y["into"])


def _restore_value(y: Expr, g: np.ndarray) -> np.ndarray:
    out = np.zeros(int(np.prod(y["into"])), g.dtype)
    np.add.at(out, y["places"].array.ravel(), g.ravel())
    return out.reshape(y["into"])


def slices_of(places: np.ndarray, shape: Shape) -> str:
    """The slices that take these places of a flattened array; "c" where slices do not."""
    if not places.size or not shape:
        return "c"
    taken = [np.unique(at) for at in np.unravel_index(places.ravel(), shape)]
    box = np.arange(int(np.prod(shape))).reshape(shape)[np.ix_(*taken)]
    regular = all(len(set(np.diff(at))) <= 1 for at in taken)
    if not regular or not np.array_equal(box.squeeze(), places.squeeze()):
        return "c"
    return ", ".join(_slice_text(at, n) for at, n in zip(taken, shape, strict=True))


def _slice_text(taken: np.ndarray, n: int) -> str:
    """The slice of an axis of length n that takes these indices, which are evenly spaced."""
    first, last = int(taken[0]), int(taken[-1])
    step = int(taken[1]) - first if len(taken) > 1 else 1
    if len(taken) == 1 and n > 1:
        return str(first)
    stop = "" if last + step >= n else str(last + 1)
    return f"{first or ''}:{stop}" + f":{step}" * (step > 1)


def _arrange_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    """A part of the array, or zeros with that part."""
    inner, where = w.operand(x.args[0]), slices_of(x["places"].array, x["into"])
    if where == "c":
        w.note("[c]: at the places that f selects, by constant indices or by a mask")
    if x.op == "arrange":
        return part_of(inner, where)
    w.note("into[...](x): zeros with x at these places")
    return placed("into", where, inner)


def part_of(x: ts.Written, where: str) -> ts.Written:
    """x[where]."""
    return ts.Written(f"{x.at(ts.ATOM).text}[{where}]")


def placed(name: str, where: str, inner: ts.Written) -> ts.Written:
    """name[where](inner)."""
    return ts.Written(f"{name}[{where}]({inner.text})")


operation(
    "arrange",
    lambda y, x: x.ravel()[y["places"].array],
    lambda y, g, x: [restore(g, y)],
    form=_arrange_form,
    ties=tie_first,
)
operation(
    "restore",
    _restore_value,
    lambda y, g, x: [arrange(g, y["places"].array)],
    form=_arrange_form,
    ties=tie_first,
)


@makes("slice")
def sliced(x: Expr, *, start: Any, limit: Any, stride: Any = None, drop: Any = ()) -> Expr:
    """The slice start:limit:stride of each axis, stride > 0, without the length-1 axes in drop."""
    stride = stride or (1,) * x.rank
    bounds = [slice(a, max(a, b), s) for a, b, s in zip(start, limit, stride, strict=True)]
    part = arrange(x, np.arange(int(np.prod(x.shape))).reshape(x.shape)[tuple(bounds)])
    return reshape(part, [n for a, n in enumerate(part.shape) if a not in drop])


@makes("split")
def split(x: Expr, *, sizes: Sequence[int], axis: int) -> list[Expr]:
    """Consecutive slices of these sizes."""
    ends = [int(n) for n in np.cumsum(sizes)]
    low, high = [0] * x.rank, list(x.shape)
    at = lambda of, n: [*of[:axis], n, *of[axis + 1 :]]
    pairs = zip(sizes, ends, strict=True)
    return [sliced(x, start=at(low, end - n), limit=at(high, end)) for n, end in pairs]


@makes("unbind")
def unbind(x: Expr, *, axis: int) -> list[Expr]:
    """The slices along an axis, each without it."""
    shape = [n for a, n in enumerate(x.shape) if a != axis]
    return [reshape(part, shape) for part in split(x, sizes=(1,) * x.shape[axis], axis=axis)]


def _concatenate_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    first = x["axis"] == 0
    pieces = [w.operand(a) for a in x.args]
    inside = ts.join(pieces, "; " if first else ", ", ts.SUM)
    return ts.Written(f"[{inside.text}]")


@makes(
    "concatenate",
    operation,
    lambda y, *xs: np.concatenate(xs, y["axis"]),
    lambda y, g, *xs: split(g, sizes=[x.shape[y["axis"]] for x in xs], axis=y["axis"]),
    form=_concatenate_form,
    ties=tie_first,
)
def concatenate(*xs: Expr, axis: int) -> Expr:
    """numpy.concatenate."""
    xs = tuple(x for x in xs if x.shape != (0,)) or xs
    if len(xs) == 1:
        return xs[0]
    shape = list(xs[0].shape)
    shape[axis] = sum(x.shape[axis] for x in xs)
    return expr("concatenate", xs, shape, widest(*(x.kind for x in xs)), axis=axis)


word("stack", lambda *xs, axis: concatenate(*(unsqueeze(x, [axis]) for x in xs), axis=axis))

word(
    "view_as_real",
    lambda x: concatenate(*(unsqueeze(y, [x.rank]) for y in (real(x), imag(x))), axis=x.rank),
)


@makes("view_as_complex")
def _view_as_complex(x: Expr) -> Expr:
    """torch.view_as_complex: the last axis holds the real and the imaginary part."""
    re, im = unbind(x, axis=x.rank - 1)
    return re + 1j * im
