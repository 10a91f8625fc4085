"""Indexing by integers: entries of one axis, and one entry of each row by a one-hot factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import apply, product, reshape, total
from gradtools.seeing.formulas.expressions import REAL, Expr, expr
from gradtools.seeing.formulas.operations.arrays import part_of, permuted, placed
from gradtools.seeing.formulas.operations.entering import operation, word

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter


def _tie_one_hot(axes: Axes, y: Expr) -> None:
    for k in range(y.rank - 1):
        axes.tie((y, k), (y.args[0], k))


operation(
    "one_hot",  # a last axis with 1 at i; a negative index counts from the end
    lambda y, i: (np.asarray(i)[..., None] % y["size"] == np.arange(y["size"])) * 1.0,
    make=lambda i, *, size: apply("one_hot", i, size=size),
    result=lambda i, size: ((*i.shape, size), REAL),
    form=lambda w, x: ts.function("onehot", [w.whole(x.args[0])]),
    ties=_tie_one_hot,
)


def picked(x: Expr, i: Expr) -> Expr:
    """The entry of each row of x that i names: the last axis is summed with a one-hot factor."""
    i = meant(i, x.shape[-1])
    return total(x * apply("one_hot", i, size=x.shape[-1]), [x.rank - 1])


def _index_add_value(y: Expr, u: np.ndarray, i: np.ndarray) -> np.ndarray:
    out = np.zeros(y.shape, u.dtype)
    np.add.at(np.moveaxis(out, y["axis"], 0), i.astype(np.int64, copy=False), u)
    return out


def _index_where(w: ExpressionWriter, x: Expr) -> str:
    return ":, " * x["axis"] + w.whole(x.args[1]).text


def _tie_index(axes: Axes, y: Expr) -> None:
    """The axes of the indices lead in the part, those of the whole that are left follow."""
    whole, part = (y.args[0], y) if y.op == "index" else (y, y.args[0])
    i = y.args[1]
    for k in range(i.rank):
        axes.tie((part, k), (i, k))
    for k, a in enumerate(a for a in range(whole.rank) if a != y["axis"]):
        axes.tie((part, i.rank + k), (whole, a))


def _index_add_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    w.note("add_at[i](u): zeros with u added at the places i")
    return placed("add_at", _index_where(w, x), w.operand(x.args[0]))


def index_add(u: Expr, i: Expr, axis: int, shape: Sequence[int]) -> Expr:
    """Zeros of this shape with u added at the indices along the axis; the transpose of index."""
    return expr("index_add", (u, i), shape, u.kind, axis=axis)


# Entries of one axis by integers, whose axes lead in the result.
operation(
    "index",
    lambda y, x, i: np.moveaxis(x, y["axis"], 0)[i.astype(np.int64, copy=False)],
    lambda y, g, x, i: [index_add(g, i, y["axis"], x.shape), None],
    result=lambda x, i, axis: ((*i.shape, *x.shape[:axis], *x.shape[axis + 1 :]), x.kind),
    form=lambda w, x: part_of(w.operand(x.args[0]), _index_where(w, x)),
    ties=_tie_index,
)
operation(
    "index_add",
    _index_add_value,
    lambda y, g, u, i: [apply("index", g, i, axis=y["axis"]), None],
    form=_index_add_form,
    ties=_tie_index,
)


def meant(i: Expr, n: int) -> Expr:
    """The i of ``where(i < 0, i + n, i)``: a negative index counts from the end anyway."""
    if i.op in ("reshape", "einsum") and len(i.args) == 1 and i.args[0].op == "where":
        inner = meant(i.args[0], n)
        if inner is i.args[0]:
            return i
        if i.op == "reshape":
            return reshape(inner, i.shape)
        return product([inner], i["labels"], range(i.rank), i.shape, i["coefficient"])
    if i.op != "where" or i.args[0].op != "compare" or i.args[0].args[0] is not i.args[2]:
        return i
    wrapped = i.args[1].args[0] if i.args[1].op == "cast" else i.args[1]
    return i.args[2] if wrapped is i.args[2] + n else i


def taken(x: Expr, i: Expr, axis: int) -> Expr:
    """Entries along one axis; the axes of i stand in its place."""
    i = meant(i, x.shape[axis])
    result = apply("index", x, i, axis=axis)
    order = [*range(i.rank, i.rank + axis), *range(i.rank), *range(i.rank + axis, result.rank)]
    return permuted(result, order)


word("embedding", lambda table, i: taken(table, i, 0))


def take_along(x: Expr, i: Expr, axis: int) -> Expr | None:
    """numpy.take_along_axis with one entry of each row; None for other shapes."""
    rest = lambda of: (*of.shape[:axis], *of.shape[axis + 1 :])
    if i.shape[axis] != 1 or rest(x) != rest(i):
        return None
    last = permuted(x, [*(a for a in range(x.rank) if a != axis), axis])
    return reshape(picked(last, reshape(i, rest(i))), i.shape)
