"""Constants, contractions (all of them `einsum`), reshapes, and what else arranges axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    array,
    axis_groups,
    broadcast,
    conj,
    einsum,
    identity,
    matmul,
    number,
    product,
    reshape,
    total,
    transpose,
)
from gradtools.seeing.formulas.expressions import INTEGER, Expr, Shape, expr
from gradtools.seeing.formulas.operations.elementwise import scaled
from gradtools.seeing.formulas.operations.entering import Lowering, lowers, operation, word

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes, Axis
    from gradtools.seeing.formulas.writing import ExpressionWriter


# Constants.


@lowers("constant")
def _constant(*, value: Any) -> Expr:
    """A number or an array that the program holds."""
    value = np.asarray(value)
    if value.ndim or value.dtype.kind == "b":
        return array(value)
    return number(value[()])


operation("number", lambda y: np.asarray(y["value"]))
operation("array", lambda y: y["value"].array, form=lambda w, x: ts.Written("c", "c"))
operation("unit_matrix", lambda y: np.eye(y.shape[0]), form=lambda w, x: ts.Written("I", "I"))


def _iota(y: Expr) -> np.ndarray:
    """Counting along an axis."""
    after = (1,) * (y.rank - y["axis"] - 1)
    return np.broadcast_to(np.arange(y.shape[y["axis"]]).reshape(-1, *after), y.shape)


def _iota_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    n = x.shape[x["axis"]]
    return ts.Written(f"(0..{n - 1})", rf"(0, \dots, {n - 1})")


operation(
    "iota",
    _iota,
    form=_iota_form,
    lower=lambda *, shape, axis: expr("iota", (), shape, INTEGER, axis=axis),
)

# Contractions.


def _einsum(y: Expr, *arrays: np.ndarray) -> np.ndarray:
    """Coefficient times factors, summed and broadcast."""
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
    return np.broadcast_to(np.asarray(coefficient * value)[place], y.shape)


def _aligned_product(
    arrays: Sequence[np.ndarray], labels: Sequence[Shape], kept: Shape
) -> np.ndarray:
    """Products without sums keep NumPy's own rules for infinities, and its speed."""
    result: Any = 1.0
    for a, names in zip(arrays, labels, strict=True):
        place = tuple(slice(None) if l in names else None for l in kept)
        operands: list[Any] = [a + 0.0, list(names), [l for l in kept if l in names]]
        result = result * np.einsum(*operands)[place]
    return result


def _einsum_cotangent(y: Expr, g: Expr, k: int) -> Expr:
    """Of the k-th factor; a repeated label is written as a unit matrix between two labels."""
    own = list(y["labels"][k])
    names, extra, factors = list(own), [], []
    for place, name in enumerate(own):
        if name in own[:place]:
            names[place] = ("copy", place)
            extra.append((name, ("copy", place)))
            factors.append(identity(y.args[k].shape[place]))
    others = [j for j in range(len(y.args)) if j != k]
    return product(
        [g, *(conj(y.args[j]) for j in others), *factors],
        [tuple(range(y.rank)), *(y["labels"][j] for j in others), *extra],
        names,
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
    lower=lambda *xs, subscripts: einsum(subscripts, *xs),
)
word("matmul", matmul)


@lowers("outer")
def _outer(a: Expr, b: Expr) -> Expr:
    """numpy.outer of two vectors."""
    return einsum("i,j->ij", a, b)


word("vdot", lambda a, b: conj(a) @ b)


def _plus_product(multiplied: Lowering) -> Lowering:
    """Beta x + alpha a b, without x where beta is 0."""

    def lowered(x: Expr, a: Expr, b: Expr, *, beta: float = 1, alpha: float = 1) -> Expr:
        product_ = scaled(alpha, multiplied(a, b))
        return product_ if beta == 0 else product_ + scaled(beta, x)

    return lowered


word("addmm", _plus_product(matmul))
word("baddbmm", _plus_product(matmul))
word("addmv", _plus_product(matmul))
word("addbmm", _plus_product(lambda a, b: total(a @ b, (0,))))
word("addr", _plus_product(_outer))

# Axes.


def permuted(x: Expr, permutation: Sequence[int]) -> Expr:
    """numpy.transpose; x itself where nothing moves."""
    return x if tuple(permutation) == tuple(range(x.rank)) else transpose(x, permutation)


word("transpose(x; permutation)", permuted)


def _reshape_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    if x.shape == tuple(n for n in x.args[0].shape if n != 1):
        return w.whole(x.args[0])
    shape = "x".join(map(str, x.shape))
    inner = w.whole(x.args[0])
    w.note("reshape: row-major")
    return ts.function("reshape", [inner], f"{shape}", r"\operatorname{reshape}")


def _tie_reshape(axes: Axes, y: Expr) -> None:
    (x,) = y.args
    for old, new in axis_groups(x.shape, y.shape) or []:
        if len(old) == len(new) == 1:
            axes.tie((x, old[0]), (y, new[0]))


# Row-major; also flatten, squeeze, unsqueeze.
operation(
    "reshape(x; shape)",
    lambda y, x: np.reshape(x, y.shape),
    lambda y, g, x: [reshape(g, x.shape)],
    form=_reshape_form,
    ties=_tie_reshape,
    lower=reshape,
)
# Axis i of x becomes axes[i]; default the last ones.
word("broadcast(x; shape, axes?)", broadcast)


@lowers("tile")
def _tile(x: Expr, *, reps: Sequence[int]) -> Expr:
    """numpy.tile."""
    shape = (1,) * (len(reps) - x.rank) + x.shape
    once = reshape(x, [n for m in shape for n in (1, m)])
    pairs = [*zip(reps, shape, strict=True)]
    wide = broadcast(once, tuple(n for pair in pairs for n in pair))
    return reshape(wide, [r * n for r, n in pairs])
