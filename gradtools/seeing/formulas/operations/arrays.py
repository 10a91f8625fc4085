"""Constants, contractions (all of them `einsum`), reshapes and slices.

A gather whose indices are known (a slice, padding with zeros, a flip, a diagonal) is one linear
operation, ``arrange``, which keeps the name of the framework's operation; ``restore`` is its
adjoint::

    arrange   y[i] = x[places[i]], 0 where there is none        restore   its transpose
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
    zeros,
)
from gradtools.seeing.formulas.expressions import (
    DTYPES,
    ArrayValue,
    Expr,
    Shape,
    expr,
    widest,
)
from gradtools.seeing.formulas.operation_record import Cotangents
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
        return w.whole(x.args[0])
    w.note("reshape: row-major")
    shape = "x".join(map(str, x.shape))
    return ts.function("reshape", [w.whole(x.args[0])], shape)


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


def arrange(x: Expr, places: np.ndarray, name: str) -> Expr:
    """Gather: the entries at places of the flattened x, zero where a place is negative."""
    places = np.asarray(places, np.int64)
    if np.array_equal(places.ravel(), np.arange(np.prod(x.shape, dtype=int))):
        return reshape(x, places.shape)
    if x.op == "array":
        return array(np.append(x["value"].array, 0)[places])
    if x.op == "arrange":
        inner = np.append(x["places"].array, -1)[places]
        if np.array_equal(inner.ravel(), np.arange(np.prod(x["into"], dtype=int))):
            return reshape(x.args[0], places.shape)
    if x.op == "update":
        inner = _back(x)[places]
        if (inner >= 0).all():  # reads updated entries only
            return arrange(x.args[1], inner, name)
        if (inner < 0).all():  # reads the other entries only
            return arrange(x.args[0], places, name)
    kept = ArrayValue(places)
    return expr("arrange", (x,), places.shape, x.kind, name=name, places=kept, into=x.shape)


def written(x: Expr, u: Expr, places: np.ndarray, name: str) -> Expr:
    """X with the entries of u at places of the flattened x, as it is written in place."""
    if places.size == np.prod(x.shape):
        back = np.argsort(places.ravel()).reshape(x.shape)
        return arrange(u, back, "entries")
    kept = ArrayValue(places)
    again = x.op == "update" and x["places"] == kept
    before = x.args[0] if again else x
    kind = widest(x.kind, u.kind)
    return expr("update", (before, u), x.shape, kind, name=name, places=kept)


def _back(y: Expr) -> np.ndarray:
    """For each entry of an update its index in u; -1 for an entry of x."""
    result = np.append(np.full(int(np.prod(y.shape)), -1), -1)
    places = y["places"].array.ravel()
    result[places] = np.arange(places.size)
    return result


def _update_value(y: Expr, x: np.ndarray, u: np.ndarray) -> np.ndarray:
    out = np.array(x, np.result_type(x, u), order="C")
    out.reshape(-1)[y["places"].array.ravel()] = u.ravel()
    return out


def _update_pullback(y: Expr, g: Expr, x: Expr, u: Expr) -> Cotangents:
    """The cotangent of x is zero at the places; that of u is gathered from them."""
    places = y["places"].array.reshape(u.shape)
    kept = written(g, zeros(u.shape), places, y["name"])
    return [kept, arrange(g, places, y["name"])]


def _update_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    w.note("set_at[...](x, u): x with u at these places")
    inside = ts.join([w.whole(a) for a in x.args], ", ", ts.SUM)
    return placed("set_at", x["name"].strip("[]"), inside)


operation("update", _update_value, _update_pullback, form=_update_form, ties=tie_first)


def restore(g: Expr, y: Expr) -> Expr:
    """Scatter-add, the transpose of `arrange`: each entry is added to the place it came from."""
    places = y["places"].array.ravel()
    counts = np.arange(places.size)
    if places.size == np.prod(y["into"]) and np.array_equal(np.append(places, 0)[places], counts):
        involution = arrange(g, y["places"].array, y["name"])  # such as flip
        return reshape(involution, y["into"])
    attributes = {"name": y["name"], "places": y["places"], "into": y["into"]}
    return expr("restore", (g,), y["into"], g.kind, **attributes)


def _restore_value(y: Expr, g: np.ndarray) -> np.ndarray:
    places = y["places"].array
    out = np.zeros(int(np.prod(y["into"])) + 1, g.dtype)
    np.add.at(out, places.ravel(), g.ravel())
    return out[:-1].reshape(y["into"])


def _arrange_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    """A slice in square brackets, else the name of the operation."""
    inner, name = w.whole(x.args[0]), x["name"]
    forward = x.op == "arrange"
    if not name.startswith("["):
        if not forward:
            w.note("fᵀ: the transpose of the linear f")
        return ts.function(name + "ᵀ" * (not forward), [inner])
    if "c" in name:
        w.note("[c]: at the places that f selects, by constant indices or by a mask")
    if forward:
        return part_of(inner, name[1:-1])
    w.note("into[...](x): zeros with x at these places")
    return placed("into", name[1:-1], inner)


def part_of(x: ts.Written, where: str) -> ts.Written:
    """x[where]."""
    return ts.Written(f"{x.at(ts.ATOM).text}[{where}]")


def placed(name: str, where: str, inner: ts.Written) -> ts.Written:
    """name[where](inner)."""
    return ts.Written(f"{name}[{where}]({inner.text})")


operation(
    "arrange",
    lambda y, x: np.append(x, 0)[y["places"].array].astype(x.dtype, copy=False),
    lambda y, g, x: [restore(g, y)],
    form=_arrange_form,
    ties=tie_first,
)
operation(
    "restore",
    _restore_value,
    lambda y, g, x: [arrange(g, y["places"].array, y["name"])],
    form=_arrange_form,
    ties=tie_first,
)


@makes("slice")
def sliced(x: Expr, *, start: Any, limit: Any, stride: Any = None, drop: Any = ()) -> Expr:
    """The slice start:limit:stride of each axis, stride > 0, without the length-1 axes in drop."""
    stride = stride or (1,) * x.rank
    if x.op == "concatenate" and (part := _within(x, start, limit)) is not None:
        x, start, limit = part
    bounds = [slice(a, max(a, b), s) for a, b, s in zip(start, limit, stride, strict=True)]
    counts = np.arange(int(np.prod(x.shape))).reshape(x.shape)[tuple(bounds)]
    part = arrange(x, counts, _slices_text(x.shape, bounds))
    return reshape(part, [n for a, n in enumerate(part.shape) if a not in drop])


def _within(x: Expr, start: Any, limit: Any) -> tuple[Expr, list[int], list[int]] | None:
    """The operand of a concatenation that contains the slice, with its start and limit there."""
    axis, low = x["axis"], 0
    for part in x.args:
        high = low + part.shape[axis]
        if low <= start[axis] and limit[axis] <= high:
            begin, end = [*start], [*limit]
            begin[axis] -= low
            end[axis] -= low
            return part, begin, end
        low = high
    return None


def _slices_text(shape: Sequence[int], bounds: Sequence[slice]) -> str:
    said = []
    for n, s in zip(shape, bounds, strict=True):
        if (s.start, s.stop, s.step) == (0, n, 1):
            said.append(":")
        elif s.stop == s.start + 1:
            said.append(str(s.start))
        else:
            step = f":{s.step}" if s.step != 1 else ""
            said.append(f"{s.start or ''}:{'' if s.stop == n else s.stop}{step}")
    return "[" + ", ".join(said) + "]"


@makes("flip")
def _flip(x: Expr, *, axes: Sequence[int] = ()) -> Expr:
    """Reversed along axes."""
    counts = np.arange(int(np.prod(x.shape))).reshape(x.shape)
    return arrange(x, np.flip(counts, tuple(axes)), "flip")


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
    pieces = [w.whole(a) for a in x.args]
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
