"""Lowering of shapes, indexing, reductions and contractions of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formula import algebra, making, places
from gradtools.seeing.formula.algebra import (
    array,
    broadcast,
    einsum,
    mean,
    plus,
    power,
    product,
    reshape,
    subtract,
    times,
    total,
    transpose,
    unsqueeze,
)
from gradtools.seeing.formula.expressions import BOOLEAN, INTEGER, Expr, expr
from gradtools.seeing.formula.primitives.elementwise import apply
from gradtools.seeing.formula.vocabulary.elementwise import apply_cast
from gradtools.seeing.formula.vocabulary.record import words

Lowering = Callable[..., Any]


def _all_axes(x: Expr, axes: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(range(x.rank)) if axes is None else tuple(axes)


def _kept(result: Expr, axes: Sequence[int], keep: bool) -> Expr:
    return unsqueeze(result, axes) if keep else result


def _stack(*xs: Expr, axis: int) -> Expr:
    return making.concatenate([unsqueeze(x, [axis]) for x in xs], axis)


def _split(x: Expr, sizes: Sequence[int], axis: int) -> list[Expr]:
    result, place = [], 0
    for size in sizes:
        start, limit = [0] * x.rank, list(x.shape)
        start[axis], limit[axis] = place, place + size
        result.append(making.cut(x, start, limit))
        place += size
    return result


def _slice(x: Expr, start: Any, limit: Any, stride: Any = None) -> Expr:
    limit = [min(b, n) for b, n in zip(limit, x.shape, strict=True)]
    limit = [max(a, b) for a, b in zip(start, limit, strict=True)]
    return making.cut(x, start, limit, stride)


def _pad(x: Expr, low: Any, high: Any, interior: Any = None, value: Any = 0) -> Expr:
    interior = tuple(interior or (0,) * x.rank)
    grow = lambda ns: [max(n, 0) for n in ns]
    padded = making.pad(x, grow(low), grow(high), interior)
    if value != 0:
        outside = 1 - _where_padded(x, padded, low, interior)
        padded = plus(padded, times(array(outside), algebra.number(value)))
    start = [max(-a, 0) for a in low]
    limit = [n - max(-b, 0) for n, b in zip(padded.shape, high, strict=True)]
    return making.cut(padded, start, limit)


def _where_padded(x: Expr, padded: Expr, low: Any, interior: Any) -> np.ndarray:
    inside = np.zeros(padded.shape)
    place = tuple(
        slice(max(a, 0), max(a, 0) + max(n + (n - 1) * i, 0), i + 1)
        for a, n, i in zip(low, x.shape, interior, strict=True)
    )
    inside[place] = 1
    return inside


def _diagonal(x: Expr, offset: int = 0, axes: Any = None) -> Expr:
    first, second = axes or (x.rank - 2, x.rank - 1)
    n, m = x.shape[first], x.shape[second]
    a, b = max(-offset, 0), max(offset, 0)
    length = max(min(n - a, m - b), 0)
    start, limit = [0] * x.rank, list(x.shape)
    start[first], limit[first] = a, a + length
    start[second], limit[second] = b, b + length
    square = making.cut(x, start, limit)
    labels = ["d" if k in (first, second) else k for k in range(x.rank)]
    left = [k for k in range(x.rank) if k not in (first, second)]
    return product([square], [labels], [*left, "d"], [*(x.shape[k] for k in left), length])


def _diagonal_matrix(x: Expr, offset: int = 0) -> Expr:
    square = making.diagonal_matrix(x)
    if not offset:
        return square
    a, b = max(-offset, 0), max(offset, 0)
    lead = (0,) * (x.rank - 1)
    return making.pad(square, (*lead, a, b), (*lead, b, a))


def _triangle(x: Expr, upper: bool, offset: int = 0) -> Expr:
    return making.triangle(x, bool(upper), int(offset))


# Indexing.


def _index(x: Expr, *indices: Expr, axes: Sequence[int]) -> Expr:
    axes = tuple(axes)
    indices = tuple(places.meant(i, x.shape[a]) for i, a in zip(indices, axes, strict=True))
    for special in (places.of_rows, places.of_known):
        result = special(x, indices, axes)
        if result is not None:
            return result
    return making.index(x, indices, axes)


def _take_along(x: Expr, i: Expr, axis: int) -> Expr:
    """One entry of the last axis is picked by a one-hot factor; others are taken."""
    if axis == x.rank - 1 and i.shape[axis] == 1 and i.shape[:-1] == x.shape[:-1] and x.rank > 1:
        place = places.meant(reshape(i, i.shape[:-1]), x.shape[axis])
        return unsqueeze(places.picked(x, place), [axis])
    i = places.meant(i, x.shape[axis])
    return making.take_along(_beside(x, i, axis), i, axis)


def _beside(x: Expr, i: Expr, axis: int) -> Expr:
    """X as long as the indices on the other axes."""
    limit = [n if a == axis else m for a, (n, m) in enumerate(zip(x.shape, i.shape, strict=True))]
    return making.cut(x, [0] * x.rank, limit)


def _scatter(x: Expr, u: Expr, *indices: Expr, axes: Any, mode: str) -> Expr:
    lead = algebra.broadcast_shape(*(i.shape for i in indices))
    rest = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    indices = tuple(places.meant(i, x.shape[a]) for i, a in zip(indices, axes, strict=True))
    u = broadcast(u, (*lead, *rest))
    if mode == "add":
        return plus(x, making.index_add(u, indices, tuple(axes), x.shape))
    if mode == "set":
        return making.index_set(x, u, indices, tuple(axes))
    raise GradtoolsError(f"formula: scatter knows the modes 'add' and 'set', not {mode!r}")


def _scatter_along(x: Expr, i: Expr, u: Expr, axis: int, mode: str) -> Expr:
    if not x.rank:
        return plus(x, u) if mode == "add" else u
    u, i = broadcast(u, i.shape), places.meant(i, x.shape[axis])
    inner = _beside(x, i, axis)
    if mode == "add":
        added = making.put_along(u, i, axis, x.shape[axis])
        high = [n - m for n, m in zip(x.shape, added.shape, strict=True)]
        return plus(x, making.pad(added, [0] * x.rank, high))
    if mode != "set":
        raise GradtoolsError(
            f"formula: scatter_along knows the modes 'add' and 'set', not {mode!r}"
        )
    window = making.along_set(inner, i, u, axis)
    if window.shape == x.shape:
        return window
    return making.dynamic_update(x, window, [algebra.number(0)] * x.rank)


def _argsort(x: Expr, axis: int, descending: bool = False) -> Expr:
    return making.along("argsort", x, axis, INTEGER, descending=bool(descending))


def _sort(x: Expr, axis: int, descending: bool = False) -> list[Expr]:
    if not x.rank:
        return [x, algebra.number(0)]
    i = _argsort(x, axis, descending)
    return [making.take_along(x, i, axis), i]


def _topk(x: Expr, k: int, axis: int, largest: bool = True) -> list[Expr]:
    if not x.rank:
        return [x, algebra.number(0)]
    i = _argsort(x, axis, largest)
    limit = [k if a == axis else n for a, n in enumerate(x.shape)]
    i = making.cut(i, [0] * x.rank, limit)
    return [making.take_along(x, i, axis), i]


# Reductions.


def _reduction(name: str, kind: str | None = None) -> Lowering:
    def lowered(x: Expr, axes: Any = None, keep: bool = False) -> Expr:
        axes = _all_axes(x, axes)
        if not axes:
            return x
        return _kept(making.reduced(name, x, axes, kind), axes, keep)

    return lowered


def _sum(x: Expr, axes: Any = None, keep: bool = False) -> Expr:
    result = total(x, _all_axes(x, axes), keep)
    return apply_cast(result, INTEGER) if x.kind in (INTEGER, BOOLEAN) else result


def _argmax(x: Expr, axis: int, keep: bool = False) -> Expr:
    shape = [n for a, n in enumerate(x.shape) if a != axis]
    return _kept(expr("argmax", (x,), shape, INTEGER, axis=axis), [axis], keep)


def _variance(x: Expr, axes: Any = None, correction: float = 0, keep: bool = False) -> Expr:
    axes = _all_axes(x, axes)
    return _kept(making.variance(x, axes, float(correction)), axes, keep)


def _deviation(
    x: Expr, axes: Any = None, correction: float = 0, keep: bool = False, eps: float = 0.0
) -> Expr:
    axes = _all_axes(x, axes)
    return _kept(making.deviation(x, axes, float(eps), float(correction)), axes, keep)


def _norm(x: Expr, axes: Any = None, ord: Any = 2, keep: bool = False) -> Expr:
    axes = _all_axes(x, axes)
    size = apply("abs", x)
    if ord == 2:
        result = making.norm(x, axes)
    elif ord == np.inf:
        result = making.reduced("max", size, axes)
    elif ord == 1:
        result = total(size, axes)
    elif ord == 0:
        result = total(apply("abs", apply("sign", x)), axes)
    else:
        result = power(total(power(size, ord), axes), 1 / ord)
    return _kept(result, axes, keep)


def _cumulative(name: str) -> Lowering:
    return lambda x, axis, reverse=False: making.along(name, x, axis, reverse=bool(reverse))


def _cumulative_extreme(sign: float) -> Lowering:
    def lowered(x: Expr, axis: int, reverse: bool = False) -> Expr:
        if not x.rank:
            return x
        signed = x if sign > 0 else algebra.negate(x)
        i = making.along("cumargmax", signed, axis, INTEGER, reverse=bool(reverse))
        return making.take_along(x, i, axis)

    return lowered


def _cross(a: Expr, b: Expr, axis: int) -> Expr:
    shape = algebra.broadcast_shape(a.shape, b.shape)
    a, b = broadcast(a, shape), broadcast(b, shape)
    turn = lambda x, k: making.roll(x, [k], [axis])
    return subtract(times(turn(a, -1), turn(b, -2)), times(turn(a, -2), turn(b, -1)))


def _trace(x: Expr) -> Expr:
    batch, least = x.shape[:-2], min(x.shape[-2:])
    axes = tuple(range(len(batch)))
    square = making.cut(x, [0] * x.rank, [*batch, least, least])
    return product([square], [(*axes, "d", "d")], axes, batch)


_WORDS = """
transpose     | x       | permutation    | numpy.transpose
reshape       | x       | shape          | row-major; also flatten, squeeze, unsqueeze
broadcast     | x       | shape axes?    | axis i of x becomes axes[i]; default the last ones
concatenate   | *x      | axis           | numpy.concatenate
stack         | *x      | axis           | numpy.stack
split         | x       | sizes axis     | consecutive parts, as many as sizes | part*
slice         | x       | start limit stride?      | one number for each axis; stride > 0
pad | x | low high interior? value? |
    as in jax.lax.pad; negative low, high cut off
flip          | x       | axes           | reversed
roll          | x       | shifts axes    | numpy.roll
triangle      | x       | upper offset?  | triu or tril of the last two axes
diagonal      | x       | offset? axes?  | numpy.diagonal; axes default to the last two
diagonal_matrix | x     | offset?        | the last axis becomes a diagonal
index | x *i | axes |
    integer arrays i at axes; their axes lead, the others follow
take_along    | x i     | axis           | numpy.take_along_axis; i has the rank of x
scatter | x u *i | axes mode |
    index(x, *i) is replaced by u ("set") or has u added ("add")
scatter_along | x i u   | axis mode      | the same for take_along
dynamic_slice | x *s | sizes |
    a window that starts at the integers s, one for each axis
dynamic_update | x u *s |                | that window replaced by u
one_hot       | i       | size           | a new last axis: 1 at i, 0 elsewhere
sort          | x       | axis descending?  | values, and where they stood | values indices
argsort       | x       | axis descending?  | integers
topk          | x       | k axis largest?   | sorted, and where they stood | values indices
embedding     | table i |                | table[i]
sum           | x       | axes? keep?     | sum over axes
mean          | x       | axes? keep?     | mean over axes
prod          | x       | axes? keep?     | product over axes
max           | x       | axes? keep?     | greatest over axes
min           | x       | axes? keep?     | least over axes
argmax        | x       | axis keep?     | integer
argmin        | x       | axis keep?     | integer
any           | x       | axes? keep?     | boolean
all           | x       | axes? keep?     | boolean
logsumexp     | x       | axes? keep?     | log of the sum of exponentials
variance      | x       | axes? correction? keep?  | sum abs(x - mean)**2 / (n - correction); 0
deviation     | x       | axes? correction? keep? eps?  | sqrt(variance + eps)
norm | x | axes? ord? keep? |
    (sum | x | **ord)**(1/ord); ord = 2, or 1, inf, any number
cumsum        | x       | axis reverse?  | running sum
cumprod       | x       | axis reverse?  | running product
cummax        | x       | axis reverse?  | running maximum
cummin        | x       | axis reverse?  | running minimum
logcumsumexp  | x       | axis reverse?  | log of the running sum of exponentials
einsum | *x | subscripts |
    numpy.einsum with "->" and no "..."; no label twice in the result
matmul        | a b     |                | numpy.matmul
outer         | a b     |                | numpy.outer of two vectors
trace         | x       |                | of the last two axes
cross         | a b     | axis           | numpy.cross along an axis of length 3
"""

ARRAYS = words(
    _WORDS,
    {
        "transpose": lambda x, permutation: transpose(x, permutation),
        "reshape": lambda x, shape: reshape(x, shape),
        "broadcast": lambda x, shape, axes=None: broadcast(x, shape, axes),
        "concatenate": lambda *xs, axis: making.concatenate(xs, axis),
        "stack": _stack,
        "split": _split,
        "slice": _slice,
        "pad": _pad,
        "flip": lambda x, axes: making.flip(x, axes),
        "roll": lambda x, shifts, axes: making.roll(x, shifts, axes),
        "triangle": _triangle,
        "diagonal": _diagonal,
        "diagonal_matrix": _diagonal_matrix,
        "index": _index,
        "take_along": _take_along,
        "scatter": _scatter,
        "scatter_along": _scatter_along,
        "dynamic_slice": lambda x, *starts, sizes: making.dynamic_slice(x, starts, sizes),
        "dynamic_update": lambda x, u, *starts: making.dynamic_update(x, u, starts),
        "one_hot": lambda i, size: making.one_hot(i, size),
        "sort": _sort,
        "argsort": _argsort,
        "topk": _topk,
        "embedding": lambda table, i: _index(table, i, axes=(0,)),
        "sum": _sum,
        "mean": lambda x, axes=None, keep=False: mean(x, _all_axes(x, axes), keep),
        "prod": _reduction("prod"),
        "max": _reduction("max"),
        "min": _reduction("min"),
        "any": _reduction("any", BOOLEAN),
        "all": _reduction("all", BOOLEAN),
        "logsumexp": _reduction("logsumexp"),
        "argmax": _argmax,
        "argmin": lambda x, axis, keep=False: _argmax(algebra.negate(x), axis, keep),
        "variance": _variance,
        "deviation": _deviation,
        "norm": _norm,
        "cumsum": _cumulative("cumsum"),
        "cumprod": _cumulative("cumprod"),
        "logcumsumexp": _cumulative("logcumsumexp"),
        "cummax": _cumulative_extreme(1.0),
        "cummin": _cumulative_extreme(-1.0),
        "einsum": lambda *xs, subscripts: einsum(subscripts, *xs),
        "matmul": algebra.matmul,
        "outer": lambda a, b: einsum("i,j->ij", a, b),
        "trace": _trace,
        "cross": _cross,
    },
)
