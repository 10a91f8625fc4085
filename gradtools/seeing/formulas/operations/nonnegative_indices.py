"""Indices without the wrap-around of negative ones, which a formula does not show.

``X[i]`` counts negative places from the end by itself, in NumPy and here. A framework that cannot
writes ``{i + n if i < 0; i otherwise}`` first, and a second time ``modulo n``. Indexing reads
through both. An index beyond the end is refused when the formula is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradtools.seeing.formulas.algebra import apply, constant_of, full, product, reshape, transpose
from gradtools.seeing.formulas.expressions import INTEGER, Expr
from gradtools.seeing.formulas.operations.elementwise import indicator
from gradtools.seeing.formulas.operations.slicing import cut


def meant(i: Expr, size: int) -> Expr:
    """The index into an axis of this size."""
    for wrapped in (i, *i.args):
        if wrapped is i or _modulo(wrapped, size) is i:
            result = _counted_from_the_end(wrapped, size)
            if result is not None:
                return result
    return i


def _counted_from_the_end(i: Expr, size: int) -> Expr | None:
    """J, if i is {j + size if j < 0; j otherwise}."""
    if i.op != "where":
        return None
    condition, below, j = i.args
    if below.op == "cast" and j.kind == INTEGER:
        below = below.args[0]
    negative = indicator(j, "<", full(0.0, j.shape))
    twice = indicator(negative, "!=", full(0.0, j.shape))
    is_it = condition in (negative, twice) and below is j + full(float(size), j.shape)
    return j if is_it else None


def _modulo(i: Expr, size: int) -> Expr:
    n = full(float(size), i.shape)
    return i - n * apply("floor", i / n)


def picked(x: Expr, i: Expr) -> Expr:
    """The entry at i of the last axis, for each of the others."""
    labels = tuple(range(x.rank))
    chosen = apply("one_hot", i, size=x.shape[-1], from_the_end=True)
    return product([x, chosen], [labels, labels], labels[:-1], i.shape)


def of_rows(x: Expr, indices: Sequence[Expr], axes: tuple[int, ...]) -> Expr | None:
    """X[0, 1, 2, ...; i] is the sum over the last axis of x times the one-hot of i."""
    if axes != (0, 1) or x.rank != 2:
        return None
    rows, columns = indices
    count = x.shape[0]
    if rows.shape != columns.shape or not _counts(rows, count):
        return None
    return reshape(picked(x, reshape(columns, (count,))), rows.shape)


def _counts(i: Expr, n: int) -> bool:
    """Whether it is 0, 1, ..., n - 1."""
    if sorted(i.shape) != [1] * (i.rank - 1) + [n]:
        return False
    if i.op == "array":
        return bool(np.array_equal(np.ravel(i["value"].array), np.arange(n)))
    return i.op == "iota" and i.rank == 1


def of_known(x: Expr, indices: Sequence[Expr], axes: tuple[int, ...]) -> Expr | None:
    """X at one known place of an axis, or at evenly spaced ones, is a slice."""
    at = known(indices[0]) if len(indices) == 1 else None
    if at is None or at.ndim > 1 or not at.size:
        return None
    (axis,), places = axes, at.reshape(-1)
    step = int(places[1] - places[0]) if places.size > 1 else 1
    inside = places[0] >= 0 and places[-1] < x.shape[axis]
    if step < 1 or not inside or (np.diff(places) != step).any():
        return None
    start, limit, stride = [0] * x.rank, list(x.shape), [1] * x.rank
    start[axis], limit[axis], stride[axis] = int(places[0]), int(places[-1]) + 1, step
    lead = [axis, *(k for k in range(x.rank) if k != axis)]
    part = transpose(cut(x, start, limit, stride), lead)
    return reshape(part, (*at.shape, *part.shape[1:]))


def known(i: Expr) -> np.ndarray | None:
    """The indices, if the program holds them."""
    if i.op == "array":
        return np.asarray(i["value"].array)
    value = constant_of(i)
    return None if value is None else np.full(i.shape, int(value.real))
