"""Constants, contractions, reshapes, slices, and one-hot factors.

A gather whose places are known (a slice, constant indices, a mask) is one linear operation,
``arrange``; ``restore`` is its adjoint. Labels choose one entry of each row by a one-hot factor::

    arrange   y[i] = x[places[i]]          restore     its transpose
    picked    y[i] = sum over j of  x[i, j] onehot(labels)[i, j]
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    conj,
    contracts,
    product,
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
    operation,
    widest,
)

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import Writer


def constant(value: Any) -> Expr:
    """A captured number or array."""
    value = np.asarray(value)
    return array(value) if value.ndim or value.dtype.kind == "b" else number(value[()])


# --- contractions and reshapes


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


def _pull_einsum(y: Expr, g: Expr, *factors: Expr) -> list[Expr]:
    """For each factor g times the conjugates of all others."""
    result = []
    entries = [(conj(f), names) for f, names in zip(factors, y["labels"], strict=True)]
    for k, factor in enumerate(factors):
        others = [(g, range(y.rank)), *entries[:k], *entries[k + 1 :]]
        result.append(product(others, y["labels"][k], factor.shape, np.conj(y["coefficient"])))
    return result


def _write_reshape(w: Writer, x: Expr) -> ts.Written:
    if x.shape == tuple(n for n in x.args[0].shape if n != 1):
        return w.operand(x.args[0])
    w.note("reshape: row-major")
    return ts.function("reshape", [w.operand(x.args[0])], "x".join(map(str, x.shape)))


def _reshape_labels(y: Expr) -> list[list[int | None]]:
    """Axes before which equally many entries lie correspond, if they are of equal length."""
    (x,) = y.args
    place = {prod(y.shape[:k]): k for k, n in enumerate(y.shape) if n != 1}
    return [[place.get(prod(x.shape[:k])) for k in range(x.rank)]]


operation("number", lambda y: np.asarray(y["value"]))
operation("array", lambda y: y["value"].array, form=lambda w, x: ts.Written("c"))
operation("einsum", _einsum, _pull_einsum, labels=lambda y: y["labels"])
operation(
    "reshape",
    lambda y, x: np.reshape(x, y.shape),
    lambda y, g, x: [reshape(g, x.shape)],
    form=_write_reshape,
    labels=_reshape_labels,
)


# --- gather and scatter at known places


def arrange(x: Expr, places: np.ndarray) -> Expr:
    """Gather: the entries at places of the flattened x."""
    places = np.asarray(places, np.int64)
    if np.array_equal(places.ravel(), np.arange(prod(x.shape))):
        return reshape(x, places.shape)
    return expr("arrange", (x,), places.shape, x.kind, places=ArrayValue(places), into=x.shape)


def _restored(y: Expr, g: np.ndarray) -> np.ndarray:
    out = np.zeros(prod(y["into"]), g.dtype)
    np.add.at(out, y["places"].array.ravel(), g.ravel())  # a place may occur twice
    return out.reshape(y["into"])


def slices_of(places: np.ndarray, shape: Shape) -> str:
    """The slices that take these places of a flattened array; "c" where slices do not."""
    if not places.size or not shape:
        return "c"
    taken = [np.unique(at) for at in np.unravel_index(places.ravel(), shape)]
    box = np.arange(prod(shape)).reshape(shape)[np.ix_(*taken)]
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


def _write_part(w: Writer, x: Expr) -> ts.Written:
    """A part of the array, or zeros with that part."""
    inner, places = w.operand(x.args[0]), slices_of(x["places"].array, x["into"])
    if places == "c":
        w.note("[c]: at the places that f selects, by constant indices or by a mask")
    if x.op == "arrange":
        return ts.Written(f"{inner.at(ts.ATOM).text}[{places}]")
    w.note("into[...](x): zeros with x at these places")
    return ts.Written(f"into[{places}]({inner.text})")


operation(
    "arrange",
    lambda y, x: x.ravel()[y["places"].array],
    lambda y, g, x: [expr("restore", (g,), y["into"], g.kind, places=y["places"], into=y["into"])],
    form=_write_part,
)
operation("restore", _restored, lambda y, g, x: [arrange(g, y["places"].array)], form=_write_part)


def sliced(x: Expr, *, start: Any, limit: Any, stride: Any = None, drop: Any = ()) -> Expr:
    """The slice start:limit:stride of each axis, stride > 0, without the length-1 axes in drop."""
    stride = stride or (1,) * x.rank
    bounds = [slice(a, max(a, b), s) for a, b, s in zip(start, limit, stride, strict=True)]
    part = arrange(x, np.arange(prod(x.shape)).reshape(x.shape)[tuple(bounds)])
    return reshape(part, [n for a, n in enumerate(part.shape) if a not in drop])


def split(x: Expr, *, sizes: Sequence[int], axis: int) -> list[Expr]:
    """Consecutive slices of these sizes."""
    ends = np.cumsum(sizes)
    places = np.split(np.arange(prod(x.shape)).reshape(x.shape), ends[:-1], axis)
    return [arrange(x, part) for part in places]


operation(
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


def stack(*xs: Expr, axis: int) -> Expr:
    """numpy.stack."""
    return concatenate(*(unsqueeze(x, [axis]) for x in xs), axis=axis)


# --- one entry of each row


operation(
    "one_hot",  # a last axis with 1 at i; a negative index counts from the end
    lambda y, i: (np.asarray(i)[..., None] % y["size"] == np.arange(y["size"])) * 1.0,
    form=lambda w, x: ts.function("onehot", [w.write(x.args[0])]),
    labels=lambda y: [range(y.rank - 1)],
)


def one_hot(i: Expr, *, size: int) -> Expr:
    """A last axis with 1 at i."""
    return expr("one_hot", (i,), (*i.shape, size), REAL, size=size)


def picked(x: Expr, i: Expr) -> Expr:
    """The entry of each row of x that i names: the last axis is summed with a one-hot factor."""
    i = from_the_end(i, x.shape[-1])
    return total(x * one_hot(i, size=x.shape[-1]), [x.rank - 1])


def from_the_end(i: Expr, n: int) -> Expr:
    """The i of ``where(i < 0, i + n, i)``: a negative index counts from the end anyway."""
    if i.op in ("reshape", "einsum") and len(i.args) == 1 and i.args[0].op == "where":
        inner = from_the_end(i.args[0], n)
        if i.op == "reshape":
            return reshape(inner, i.shape)
        return product([(inner, *i["labels"])], range(i.rank), i.shape, i["coefficient"])
    if i.op != "where" or i.args[0].op != "compare" or i.args[0].args[0] is not i.args[2]:
        return i
    wrapped = i.args[1].args[0] if i.args[1].op == "cast" else i.args[1]
    return i.args[2] if wrapped is i.args[2] + n else i


def take_along(x: Expr, i: Expr, *, axis: int) -> Expr | None:
    """numpy.take_along_axis with one entry of each row; None for other shapes."""
    rest = lambda of: (*of.shape[:axis], *of.shape[axis + 1 :])
    if not (x.rank and i.rank) or i.shape[axis] != 1 or rest(x) != rest(i):
        return None
    last = transpose(x, [*(a for a in range(x.rank) if a != axis), axis])
    return reshape(picked(last, reshape(i, rest(i))), i.shape)
