"""Constants, contractions (all of them `einsum`), reshapes, slices, and indexing by integers.

A gather whose indices are known (a slice, a selection by a mask) is one linear operation,
``arrange``; ``restore`` is its adjoint. Integers of the program index one axis, or choose one entry
of each row by a one-hot factor::

    arrange   y[i] = x[places[i]]        restore     its transpose
    index     y[i, ...] = x[j[i], ...]   index_add   its transpose
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    apply,
    broadcast,
    conj,
    contracts,
    einsum,
    imag,
    matmul,
    product,
    real,
    reshape,
    total,
    transpose,
    unsqueeze,
)
from gradtools.seeing.formulas.expressions import (
    DTYPES,
    REAL,
    ArrayValue,
    Expr,
    Shape,
    array,
    expr,
    number,
    widest,
)
from gradtools.seeing.formulas.operation_record import operation, word

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import ExpressionWriter


# Constants.


@operation("constant")
def constant(*, value: Any) -> Expr:
    """A captured number or array."""
    value = np.asarray(value)
    return array(value) if value.ndim or value.dtype.kind == "b" else number(value[()])


operation("number", lambda y: np.asarray(y["value"]))
operation("array", lambda y: y["value"].array, form=lambda w, x: ts.Written("c"))

# Contractions.


def _einsum(y: Expr, *arrays: np.ndarray) -> np.ndarray:
    """Coefficient times the einsum of the factors, broadcast to the shape."""
    einsum: Any = np.einsum  # NumPy's types lack the form with lists of labels
    axes = range(y.rank)
    spread = lambda x, own: np.asarray(x)[tuple(slice(None) if l in own else None for l in axes)]
    numbers = [a + 0.0 if a.dtype.kind in "bui" else a for a in arrays]
    pairs = [*zip(numbers, y["labels"], strict=True)]
    value: Any = 1.0
    if len(arrays) == 1 or contracts(y):
        kept = [l for l in axes if any(l in names for names in y["labels"])]
        operands = [part for pair in pairs for part in pair]
        value = spread(einsum(*operands, kept, optimize=len(arrays) > 2), kept)
    else:  # without sums NumPy's multiplication is faster, and exact for infinities
        for a, names in pairs:
            own = sorted(set(names))
            value = value * spread(einsum(a, names, own), own)
    result = np.broadcast_to(y["coefficient"] * value, y.shape)
    return result if y.is_inexact else result.astype(DTYPES[y.kind])


def _einsum_pullback(y: Expr, g: Expr, *factors: Expr) -> list[Expr]:
    """For each factor g times the conjugates of all others."""
    result = []
    entries = [(conj(f), names) for f, names in zip(factors, y["labels"], strict=True)]
    for k, factor in enumerate(factors):
        others = [(g, range(y.rank)), *entries[:k], *entries[k + 1 :]]
        result.append(product(others, y["labels"][k], factor.shape, np.conj(y["coefficient"])))
    return result


# As numpy.einsum, with "->" and no "..."; no label twice in the result.
operation(
    "einsum",
    _einsum,
    _einsum_pullback,
    labels=lambda y: y["labels"],
    make=lambda *xs, subscripts: einsum(subscripts, *xs),
)
word("matmul", lambda a, b: matmul(a, b))
word("outer", lambda a, b: einsum("i,j->ij", a, b))
word("vdot", lambda a, b: conj(a) @ b)


# Axes.


def _reshape_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    if x.shape == tuple(n for n in x.args[0].shape if n != 1):
        return w.operand(x.args[0])
    w.note("reshape: row-major")
    return ts.function("reshape", [w.operand(x.args[0])], "x".join(map(str, x.shape)))


def _reshape_labels(y: Expr) -> list[list[int | None]]:
    """Axes before which equally many entries lie correspond, if they are of equal length."""
    (x,) = y.args
    place = {prod(y.shape[:k]): k for k, n in enumerate(y.shape) if n != 1}
    return [[place.get(prod(x.shape[:k])) for k in range(x.rank)]]


word("transpose", lambda x, *, permutation: transpose(x, permutation))
operation(  # row-major; also flatten, squeeze, unsqueeze
    "reshape",
    lambda y, x: np.reshape(x, y.shape),
    lambda y, g, x: [reshape(g, x.shape)],
    form=_reshape_form,
    labels=_reshape_labels,
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
    result = []
    for at, n in zip(taken, shape, strict=True):
        first, last = int(at[0]), int(at[-1])
        if first == last and n > 1:
            result.append(str(first))
            continue
        step = int(at[1]) - first if len(at) > 1 else 1
        stop = "" if last + step >= n else str(last + 1)
        result.append(f"{first or ''}:{stop}" + f":{step}" * (step > 1))
    return ", ".join(result)


def _arrange_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    """A part of the array, or zeros with that part."""
    inner, where = w.operand(x.args[0]), slices_of(x["places"].array, x["into"])
    if where == "c":
        w.note("[c]: at the places that f selects, by constant indices or by a mask")
    if x.op == "arrange":
        return ts.part(inner, where)
    w.note("into[...](x): zeros with x at these places")
    return ts.Written(f"into[{where}]({inner.text})")


operation(
    "arrange",
    lambda y, x: x.ravel()[y["places"].array],
    lambda y, g, x: [expr("restore", (g,), y["into"], g.kind, places=y["places"], into=y["into"])],
    form=_arrange_form,
)
operation(  # each entry is added to the place it came from
    "restore",
    _restore_value,
    lambda y, g, x: [arrange(g, y["places"].array)],
    form=_arrange_form,
)


@operation("slice")
def sliced(x: Expr, *, start: Any, limit: Any, stride: Any = None, drop: Any = ()) -> Expr:
    """The slice start:limit:stride of each axis, stride > 0, without the length-1 axes in drop."""
    stride = stride or (1,) * x.rank
    bounds = [slice(a, max(a, b), s) for a, b, s in zip(start, limit, stride, strict=True)]
    part = arrange(x, np.arange(int(np.prod(x.shape))).reshape(x.shape)[tuple(bounds)])
    return reshape(part, [n for a, n in enumerate(part.shape) if a not in drop])


@operation("split")
def split(x: Expr, *, sizes: Sequence[int], axis: int) -> list[Expr]:
    """Consecutive slices of these sizes."""
    result, start = [], 0
    for n in sizes:
        low, high = [0] * x.rank, list(x.shape)
        low[axis], high[axis] = start, start + n
        result.append(sliced(x, start=low, limit=high))
        start += n
    return result


@operation("unbind")
def unbind(x: Expr, *, axis: int) -> list[Expr]:
    """The slices along an axis, each without it."""
    shape = [n for a, n in enumerate(x.shape) if a != axis]
    return [reshape(part, shape) for part in split(x, sizes=(1,) * x.shape[axis], axis=axis)]


@operation(
    "concatenate",
    lambda y, *xs: np.concatenate(xs, y["axis"]),
    lambda y, g, *xs: split(g, sizes=[x.shape[y["axis"]] for x in xs], axis=y["axis"]),
    form=lambda w, x: ts.Written(
        "[" + ("; " if x["axis"] == 0 else ", ").join(w.operand(a).text for a in x.args) + "]"
    ),
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


@operation("view_as_complex")
def _view_as_complex(x: Expr) -> Expr:
    """torch.view_as_complex: the last axis holds the real and the imaginary part."""
    re, im = unbind(x, axis=x.rank - 1)
    return re + 1j * im


# Indexing by integers of the program.

operation(
    "one_hot",  # a last axis with 1 at i; a negative index counts from the end
    lambda y, i: (np.asarray(i)[..., None] % y["size"] == np.arange(y["size"])) * 1.0,
    make=lambda i, *, size: apply("one_hot", i, size=size),
    result=lambda i, size: ((*i.shape, size), REAL),
    form=lambda w, x: ts.function("onehot", [w.whole(x.args[0])]),
    labels=lambda y: [range(y.rank - 1)],
)


def picked(x: Expr, i: Expr) -> Expr:
    """The entry of each row of x that i names: the last axis is summed with a one-hot factor."""
    i = meant(i, x.shape[-1])
    return total(x * apply("one_hot", i, size=x.shape[-1]), [x.rank - 1])


def _index_add_value(y: Expr, u: np.ndarray, i: np.ndarray) -> np.ndarray:
    out = np.zeros(y.shape, u.dtype)
    np.add.at(np.moveaxis(out, y["axis"], 0), i.astype(np.int64, copy=False), u)
    return out


def _index_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    """A part of the array, or zeros to which that part is added."""
    if x.op == "index_add":
        w.note("add_at[i](u): zeros with u added at the places i")
    inner, where = w.operand(x.args[0]), ":, " * x["axis"] + w.whole(x.args[1]).text
    return (
        ts.part(inner, where) if x.op == "index" else ts.Written(f"add_at[{where}]({inner.text})")
    )


def _index_labels(y: Expr) -> list[Sequence[int | None]]:
    """The axes of the indices lead in the part, those of the whole that are left follow."""
    rank = y.args[1].rank
    if y.op == "index":
        others = list(range(rank, y.rank))
        return [[*others[: y["axis"]], None, *others[y["axis"] :]], range(rank)]
    lead = range(y.rank, y.rank + rank)
    return [[*lead, *(a for a in range(y.rank) if a != y["axis"])], lead]


# Entries of one axis by integers, whose axes lead in the result.
operation(
    "index",
    lambda y, x, i: np.moveaxis(x, y["axis"], 0)[i.astype(np.int64, copy=False)],
    lambda y, g, x, i: [expr("index_add", (g, i), x.shape, g.kind, axis=y["axis"]), None],
    result=lambda x, i, axis: ((*i.shape, *x.shape[:axis], *x.shape[axis + 1 :]), x.kind),
    form=_index_form,
    labels=_index_labels,
)
operation(
    "index_add",
    _index_add_value,
    lambda y, g, u, i: [apply("index", g, i, axis=y["axis"]), None],
    form=_index_form,
    labels=_index_labels,
)


def meant(i: Expr, n: int) -> Expr:
    """The i of ``where(i < 0, i + n, i)``: a negative index counts from the end anyway."""
    if i.op in ("reshape", "einsum") and len(i.args) == 1 and i.args[0].op == "where":
        inner = meant(i.args[0], n)
        if inner is i.args[0]:
            return i
        if i.op == "reshape":
            return reshape(inner, i.shape)
        return product([(inner, *i["labels"])], range(i.rank), i.shape, i["coefficient"])
    if i.op != "where" or i.args[0].op != "compare" or i.args[0].args[0] is not i.args[2]:
        return i
    wrapped = i.args[1].args[0] if i.args[1].op == "cast" else i.args[1]
    return i.args[2] if wrapped is i.args[2] + n else i


def taken(x: Expr, i: Expr, axis: int) -> Expr:
    """Entries along one axis; the axes of i stand in its place."""
    i = meant(i, x.shape[axis])
    result = apply("index", x, i, axis=axis)
    order = [*range(i.rank, i.rank + axis), *range(i.rank), *range(i.rank + axis, result.rank)]
    return transpose(result, order)


word("embedding", lambda table, i: taken(table, i, 0))


@operation("take_along")
def take_along(x: Expr, i: Expr, *, axis: int) -> Expr | None:
    """numpy.take_along_axis with one entry of each row; None for other shapes."""
    rest = lambda of: (*of.shape[:axis], *of.shape[axis + 1 :])
    if not (x.rank and i.rank) or i.shape[axis] != 1 or rest(x) != rest(i):
        return None
    last = transpose(x, [*(a for a in range(x.rank) if a != axis), axis])
    return reshape(picked(last, reshape(i, rest(i))), i.shape)
