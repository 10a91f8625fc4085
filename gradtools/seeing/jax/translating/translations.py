"""Translations of JAX primitives and functions whose neutral form differs by more than the name.

All others keep the graph's name and attributes (`../operands.py`), or become opaque. A translation
receives the translator, the equation's parameters and its operands, and returns None if it does not
apply. Gathers are translated if they take rows by integers, or one entry of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gradtools.seeing.formulas.algebra import apply, reshape
from gradtools.seeing.formulas.expressions import Expr, kind_of
from gradtools.seeing.formulas.operation_record import OPERATIONS
from gradtools.seeing.formulas.operations.arrays import meant, permuted, picked, take_along
from gradtools.seeing.formulas.operations.elementwise import cast, is_integer, where

Params = Mapping[str, Any]
Translation = Callable[..., Any]


def _cast(w: Any, p: Params, x: Expr) -> Expr:
    dtype = str(np.dtype(p["new_dtype"]))
    return x if kind_of(dtype) == x.kind else cast(x, dtype=dtype)


def _selected(w: Any, p: Params, which: Expr, *cases: Expr) -> Expr | None:
    """A selection; a constant mask may select one case."""
    if len(cases) != 2 or which.kind != "boolean":
        return None
    no, yes = cases
    mask = which["value"].array if which.op == "array" else None
    if mask is not None and mask.all():
        return yes
    if mask is not None and not mask.any():
        return no
    return where(which, yes, no)


def _gathered(w: Any, p: Params, x: Expr, indices: Expr) -> Expr | None:
    """Rows by integers, one entry of each row, or constant places; else None."""
    if indices.turn[0]:
        return w.arranged(x)
    known = w.concrete(indices)
    if known is None or not indices.rank:
        return None
    d, sizes = p["dimension_numbers"], tuple(int(n) for n in p["slice_sizes"])
    axes = tuple(d.start_index_map)
    limits = [x.shape[a] - sizes[a] for a in axes]
    if not bool(np.all((known >= 0) & (known <= np.array(limits)))):
        return None
    batched = tuple(getattr(d, "operand_batching_dims", ()))
    over = tuple(getattr(d, "start_indices_batching_dims", ()))
    i = reshape(indices, indices.shape[:-1]) if len(axes) == 1 else None
    if batched and i is not None and len(batched) == x.rank - 1 == i.rank - 1 and batched == over:
        return take_along(x, i, axes[0]) if not d.offset_dims else None
    if batched or tuple(d.collapsed_slice_dims) != axes:
        return None
    if i is not None and all(sizes[a] == n for a, n in enumerate(x.shape) if a != axes[0]):
        return _rows(x, i, axes[0], d.offset_dims)
    return _of_each(x, indices) if axes == (0, 1) and x.rank == 2 else None


def _rows(x: Expr, i: Expr, axis: int, offset_dims: Sequence[int]) -> Expr:
    """x indexed along one axis, with the axes of the indices where `offset_dims` has none."""
    result = apply("index", x, meant(i, x.shape[axis]), axis=axis)
    lead, rest = iter(range(i.rank)), iter(range(i.rank, result.rank))
    order = [next(rest) if a in offset_dims else next(lead) for a in range(result.rank)]
    return permuted(result, order)


def _of_each(x: Expr, indices: Expr) -> Expr | None:
    """x[0, i[0]], x[1, i[1]], ..."""
    if indices.op != "concatenate" or len(indices.args) != 2 or indices.rank != 2:
        return None
    counting, i = indices.args
    value = counting["value"].array.ravel() if counting.op == "array" else None
    if value is None or not np.array_equal(value, np.arange(x.shape[0])):
        return None
    return picked(x, reshape(i, (x.shape[0],)))


# Primitives that have no neutral name, or a meaning beyond it.
PRIMITIVES: dict[str, Translation] = {
    "optimization_barrier": lambda w, p, *xs: list(xs),
    "reduce_precision": lambda w, p, x: x,
    "convert_element_type": _cast,
    "div": lambda w, p, a, b: None if is_integer(a) else a / b,  # integers' division truncates
    "select_n": _selected,
    "gather": _gathered,
}


# --- functions of JAX's own --------------------------------------------------------------


def _one_hot(w: Any, jaxpr: Any, i: Expr) -> Expr | None:
    out = jaxpr.outvars[0].aval
    fits = out.shape[:-1] == i.shape
    return apply("one_hot", i, size=out.shape[-1]) if fits else None


WORDS: dict[str, Translation] = {
    "one_hot": _one_hot,
    "_one_hot": _one_hot,
    "logaddexp": lambda w, jaxpr, *xs: OPERATIONS["logaddexp"].make(*xs),  # type: ignore[misc]
}
