"""Lowering of reshapes, indexing, reductions and contractions to primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas import algebra, constructors, nonnegative_indices
from gradtools.seeing.formulas.algebra import (
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
from gradtools.seeing.formulas.expressions import BOOLEAN, INTEGER, Expr, expr
from gradtools.seeing.formulas.primitives.elementwise import apply, indicator
from gradtools.seeing.formulas.vocabulary.elementwise import apply_cast, scaled
from gradtools.seeing.formulas.vocabulary.record import words

Lowering = Callable[..., Any]


def all_axes(x: Expr, axes: Sequence[int] | None) -> tuple[int, ...]:
    """The axes; all where none are named."""
    return tuple(range(x.rank)) if axes is None else tuple(axes)


def _kept(result: Expr, axes: Sequence[int], keep: bool) -> Expr:
    return unsqueeze(result, axes) if keep else result


def _transpose(x: Expr, permutation: Sequence[int]) -> Expr:
    return x if tuple(permutation) == tuple(range(x.rank)) else transpose(x, permutation)


def _concatenate(*xs: Expr, axis: int) -> Expr:
    """An array of one axis and no entry fits any others."""
    some = [x for x in xs if x.shape != (0,)]
    return constructors.concatenate(some if some and some[0].rank > 1 else xs, axis)


def _stack(*xs: Expr, axis: int) -> Expr:
    return constructors.concatenate([unsqueeze(x, [axis]) for x in xs], axis)


def _split(x: Expr, sizes: Sequence[int], axis: int) -> list[Expr]:
    result, place = [], 0
    for size in sizes:
        start, limit = [0] * x.rank, list(x.shape)
        start[axis], limit[axis] = place, place + size
        result.append(constructors.cut(x, start, limit))
        place += size
    return result


def _slice(x: Expr, start: Any, limit: Any, stride: Any = None, drop: Any = ()) -> Expr:
    limit = [min(b, n) for b, n in zip(limit, x.shape, strict=True)]
    limit = [max(a, b) for a, b in zip(start, limit, strict=True)]
    part = constructors.cut(x, start, limit, stride)
    return reshape(part, [n for a, n in enumerate(part.shape) if a not in drop])


def _unbind(x: Expr, axis: int) -> list[Expr]:
    shape = [n for a, n in enumerate(x.shape) if a != axis]
    return [reshape(part, shape) for part in _split(x, (1,) * x.shape[axis], axis)]


def _view_as_complex(x: Expr) -> Expr:
    re, im = _unbind(x, x.rank - 1)
    return plus(re, algebra.scale(1j, im))


def _tile(x: Expr, reps: Sequence[int]) -> Expr:
    """Each axis n repeated r times: a new axis r before it, merged with it."""
    shape = (1,) * (len(reps) - x.rank) + x.shape
    once = reshape(x, [n for m in shape for n in (1, m)])
    pairs = [*zip(reps, shape, strict=True)]
    wide = broadcast(once, tuple(n for pair in pairs for n in pair))
    return reshape(wide, [r * n for r, n in pairs])


def _roll(x: Expr, shifts: Sequence[int], axes: Sequence[int]) -> Expr:
    if x.rank and not axes:
        return reshape(constructors.roll(reshape(x, (prod(x.shape),)), shifts, (0,)), x.shape)
    return constructors.roll(x, shifts, axes) if x.rank else x


def _padded_by_index(x: Expr, padding: Sequence[int], mode: str) -> Expr:
    """What lies inside repeated outside; less than zero is cut off."""
    for k in range(len(padding) // 2):
        axis, (low, high) = x.rank - 1 - k, padding[2 * k : 2 * k + 2]
        at = np.pad(np.arange(x.shape[axis]), (max(0, low), max(0, high)), mode=mode)  # type: ignore[call-overload]
        x = taken(x, array(at[max(0, -low) : len(at) - max(0, -high)]), axis)
    return x


def taken(x: Expr, i: Expr, axis: int) -> Expr:
    """Entries along one axis; the axes of i stand in its place."""
    result = _index(x, i, axes=(axis,))
    rest = range(i.rank, i.rank + axis)
    return _transpose(result, (*rest, *range(i.rank), *range(i.rank + axis, result.rank)))


def _pad(x: Expr, *number: Expr, low: Any, high: Any, interior: Any = None, value: Any = 0) -> Expr:
    around = number[0] if number else algebra.number(value)
    interior = tuple(interior or (0,) * x.rank)
    grow = lambda ns: [max(n, 0) for n in ns]
    padded = constructors.pad(x, grow(low), grow(high), interior)
    if not algebra.is_zero(around):
        outside = 1 - _where_padded(x, padded, low, interior)
        padded = plus(padded, times(array(outside), around))
    start = [max(-a, 0) for a in low]
    limit = [n - max(-b, 0) for n, b in zip(padded.shape, high, strict=True)]
    return constructors.cut(padded, start, limit)


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
    square = constructors.cut(x, start, limit)
    labels = ["d" if k in (first, second) else k for k in range(x.rank)]
    left = [k for k in range(x.rank) if k not in (first, second)]
    return product([square], [labels], [*left, "d"], [*(x.shape[k] for k in left), length])


def _diagonal_matrix(x: Expr, offset: int = 0, axes: Any = None) -> Expr:
    square, rank = constructors.diagonal_matrix(x), x.rank + 1
    if offset:
        a, b = max(-offset, 0), max(offset, 0)
        lead = (0,) * (x.rank - 1)
        square = constructors.pad(square, (*lead, a, b), (*lead, b, a))
    order = [*range(rank - 2)]
    for place, axis in sorted(zip(axes or (rank - 2, rank - 1), (rank - 2, rank - 1), strict=True)):
        order.insert(place, axis)
    return _transpose(square, order)


# Indexing.


def _index(x: Expr, *indices: Expr, axes: Sequence[int]) -> Expr:
    axes = tuple(axes)
    indices = tuple(
        nonnegative_indices.meant(i, x.shape[a]) for i, a in zip(indices, axes, strict=True)
    )
    for special in (nonnegative_indices.of_rows, nonnegative_indices.of_known):
        result = special(x, indices, axes)
        if result is not None:
            return result
    return constructors.index(x, indices, axes)


def _take_along(x: Expr, i: Expr, axis: int) -> Expr:
    """One entry of the last axis is picked by a one-hot factor; others are taken."""
    if not x.rank:
        return reshape(x, i.shape)
    if axis == x.rank - 1 and i.shape[axis] == 1 and i.shape[:-1] == x.shape[:-1] and x.rank > 1:
        place = nonnegative_indices.meant(reshape(i, i.shape[:-1]), x.shape[axis])
        return unsqueeze(nonnegative_indices.picked(x, place), [axis])
    i = nonnegative_indices.meant(i, x.shape[axis])
    return constructors.take_along(_beside(x, i, axis), i, axis)


def _beside(x: Expr, i: Expr, axis: int) -> Expr:
    """X as long as the indices on the other axes."""
    limit = [n if a == axis else m for a, (n, m) in enumerate(zip(x.shape, i.shape, strict=True))]
    return constructors.cut(x, [0] * x.rank, limit)


def _scatter(x: Expr, u: Expr, *indices: Expr, axes: Any, mode: str) -> Expr:
    lead = algebra.broadcast_shape(*(i.shape for i in indices))
    rest = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    indices = tuple(
        nonnegative_indices.meant(i, x.shape[a]) for i, a in zip(indices, axes, strict=True)
    )
    u = broadcast(u, (*lead, *rest))
    if mode == "add":
        return plus(x, constructors.index_add(u, indices, tuple(axes), x.shape))
    if mode == "set":
        return constructors.index_set(x, u, indices, tuple(axes))
    raise GradtoolsError(f"formula: scatter knows the modes 'add' and 'set', not {mode!r}")


def _scatter_along(x: Expr, i: Expr, u: Expr, axis: int, mode: str) -> Expr:
    if not x.rank:
        return plus(x, u) if mode == "add" else u
    u, i = broadcast(u, i.shape), nonnegative_indices.meant(i, x.shape[axis])
    inner = _beside(x, i, axis)
    if mode == "add":
        added = constructors.put_along(u, i, axis, x.shape[axis])
        high = [n - m for n, m in zip(x.shape, added.shape, strict=True)]
        return plus(x, constructors.pad(added, [0] * x.rank, high))
    if mode != "set":
        raise GradtoolsError(
            f"formula: scatter_along knows the modes 'add' and 'set', not {mode!r}"
        )
    window = constructors.along_set(inner, i, u, axis)
    if window.shape == x.shape:
        return window
    return constructors.dynamic_update(x, window, [algebra.number(0)] * x.rank)


def _argsort(x: Expr, axis: int, descending: bool = False, stable: bool = False) -> Expr:
    return constructors.along("argsort", x, axis, INTEGER, descending=bool(descending))


def _sort(x: Expr, axis: int, descending: bool = False, stable: bool = False) -> list[Expr]:
    if not x.rank:
        return [x, algebra.number(0)]
    i = _argsort(x, axis, descending)
    return [constructors.take_along(x, i, axis), i]


def _kth(x: Expr, k: int, axis: int, keep: bool = False) -> list[Expr]:
    """The entry that stands at a place of the sorted ones, and where it stood."""
    both = _sort(x, axis)
    if not x.rank:
        return both
    start = [k - 1 if a == axis else 0 for a in range(x.rank)]
    limit = [k if a == axis else n for a, n in enumerate(x.shape)]
    return [_slice(y, start, limit, drop=() if keep else (axis,)) for y in both]


def _median(x: Expr, axis: int | None = None, keep: bool = False) -> list[Expr]:
    if axis is None:
        return _median(reshape(x, (prod(x.shape),)), 0)[:1]
    return _kth(x, (x.shape[axis] + 1) // 2 if x.rank else 1, axis, keep)


def _topk(x: Expr, k: int, axis: int, largest: bool = True, sorted: bool = True) -> list[Expr]:
    if not x.rank:
        return [x, algebra.number(0)]
    i = _argsort(x, axis, largest)
    limit = [k if a == axis else n for a, n in enumerate(x.shape)]
    i = constructors.cut(i, [0] * x.rank, limit)
    return [constructors.take_along(x, i, axis), i]


# Reductions.


def _reduction(name: str, kind: str | None = None) -> Lowering:
    def lowered(x: Expr, axes: Any = None, keep: bool = False) -> Expr:
        axes = all_axes(x, axes)
        if not axes:
            return x
        return _kept(constructors.reduced(name, x, axes, kind), axes, keep)

    return lowered


def _sum(x: Expr, axes: Any = None, keep: bool = False) -> Expr:
    result = total(x, all_axes(x, axes), keep)
    return apply_cast(result, INTEGER) if x.kind in (INTEGER, BOOLEAN) else result


def _argmax(x: Expr, axis: int | None = None, keep: bool = False) -> Expr:
    if axis is None or not x.rank:
        shape = (1,) * (x.rank if keep else 0)
        return reshape(_argmax(reshape(x, (prod(x.shape),)), 0), shape)
    shape = [n for a, n in enumerate(x.shape) if a != axis]
    return _kept(expr("argmax", (x,), shape, INTEGER, axis=axis), [axis], keep)


def _variance(x: Expr, axes: Any = None, correction: float = 0, keep: bool = False) -> Expr:
    axes = all_axes(x, axes)
    return _kept(constructors.variance(x, axes, float(correction)), axes, keep)


def _deviation(
    x: Expr, axes: Any = None, correction: float = 0, keep: bool = False, eps: float = 0.0
) -> Expr:
    axes = all_axes(x, axes)
    return _kept(constructors.deviation(x, axes, float(eps), float(correction)), axes, keep)


def _not_zero(x: Expr) -> Expr:
    return apply_cast(indicator(x, "!=", algebra.number(0)), INTEGER)


def _norm(x: Expr, axes: Any = None, ord: Any = 2, keep: bool = False) -> Expr:
    axes = all_axes(x, axes)
    size = apply("abs", x)
    if ord == 2:
        result = constructors.norm(x, axes)
    elif abs(ord) == np.inf:
        result = _reduction("max" if ord > 0 else "min")(size, axes)
    elif ord == 1:
        result = total(size, axes)
    elif ord == 0:
        result = total(_not_zero(x), axes)
    else:
        result = power(total(power(size, ord), axes), 1 / ord)
    return _kept(result, axes, keep)


def _cumulative(name: str) -> Lowering:
    return lambda x, axis, reverse=False: (
        constructors.along(name, x, axis, reverse=bool(reverse)) if x.rank else x
    )


def _cumulative_extreme(sign: float) -> Lowering:
    def lowered(x: Expr, axis: int, reverse: bool = False) -> Expr:
        if not x.rank:
            return x
        signed = x if sign > 0 else algebra.negate(x)
        i = constructors.along("cumargmax", signed, axis, INTEGER, reverse=bool(reverse))
        return constructors.take_along(x, i, axis)

    return lowered


def _plus_product(multiplied: Lowering) -> Lowering:
    def lowered(x: Expr, a: Expr, b: Expr, beta: float = 1, alpha: float = 1) -> Expr:
        product_ = scaled(alpha, multiplied(a, b))
        return product_ if beta == 0 else plus(product_, scaled(beta, x))

    return lowered


def _cdist(a: Expr, b: Expr, p: float = 2.0) -> Expr:
    between = subtract(unsqueeze(a, [a.rank - 1]), unsqueeze(b, [b.rank - 2]))
    return _norm(between, (between.rank - 1,), float(p))


def _cross(a: Expr, b: Expr, axis: int) -> Expr:
    shape = algebra.broadcast_shape(a.shape, b.shape)
    a, b = broadcast(a, shape), broadcast(b, shape)
    turn = lambda x, k: constructors.roll(x, [k], [axis])
    return subtract(times(turn(a, -1), turn(b, -2)), times(turn(a, -2), turn(b, -1)))


def _trace(x: Expr) -> Expr:
    batch, least = x.shape[:-2], min(x.shape[-2:])
    axes = tuple(range(len(batch)))
    square = constructors.cut(x, [0] * x.rank, [*batch, least, least])
    return product([square], [(*axes, "d", "d")], axes, batch)


_WORDS = """
transpose     | x       | permutation    | numpy.transpose
reshape       | x       | shape          | row-major; also flatten, squeeze, unsqueeze
broadcast     | x       | shape axes?    | axis i of x becomes axes[i]; default the last ones
concatenate   | *x      | axis           | numpy.concatenate
stack         | *x      | axis           | numpy.stack
split         | x       | sizes axis     | consecutive parts, as many as sizes | part*
unbind        | x       | axis           | what stands along an axis, each without it | part*
tile          | x       | reps           | numpy.tile
view_as_real  | x       |                | real and imaginary part along a new last axis
view_as_complex | x     |                | the complex numbers of which these are the parts
slice | x | start limit stride? drop? |
    one number for each axis; stride > 0; axes of length 1 are dropped
pad | x value? | low high interior? value? |
    as in jax.lax.pad; negative low, high cut off
reflection_pad | x      | padding        | torch's: from the last axis on, mirrored at the edge
replication_pad | x     | padding        | the same, the edge repeated
flip          | x       | axes?          | reversed along axes; without axes x
roll          | x       | shifts axes    | numpy.roll
triangle      | x       | upper offset?  | triu or tril of the last two axes
diagonal      | x       | offset? axes?  | numpy.diagonal; axes default to the last two
diagonal_matrix | x     | offset? axes?  | the last axis becomes a diagonal along axes
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
sort | x | axis descending? stable? |
    values, and where they stood | values indices
argsort       | x       | axis descending? stable?  | integers
topk | x | k axis largest? sorted? |
    sorted, and where they stood | values indices
kthvalue | x | k axis keep? |
    the k-th smallest along an axis, and where it stood | values indices
median | x | axis? keep? |
    the lower of the two in the middle; along an axis, where it stood, too | values*
embedding     | table i |                | table[i]
sum           | x       | axes? keep?     | sum over axes
mean          | x       | axes? keep?     | mean over axes
prod          | x       | axes? keep?     | product over axes
max           | x       | axes? keep?     | greatest over axes
min           | x       | axes? keep?     | least over axes
argmax        | x       | axis? keep?    | integer; without axis of all in their order
argmin        | x       | axis? keep?    | integer
any           | x       | axes? keep?     | boolean
all           | x       | axes? keep?     | boolean
logsumexp     | x       | axes? keep?     | log of the sum of exponentials
variance      | x       | axes? correction? keep?  | sum abs(x - mean)**2 / (n - correction); 0
deviation     | x       | axes? correction? keep? eps?  | sqrt(variance + eps)
norm | x | axes? ord? keep? |
    (sum | x | **ord)**(1/ord); ord = 2, or 1, inf, any number; of 0 the count of what is not 0
count_nonzero | x | axis? axes? |
    integer
cumsum        | x       | axis reverse?  | running sum
cumprod       | x       | axis reverse?  | running product
cummax        | x       | axis reverse?  | running maximum
cummin        | x       | axis reverse?  | running minimum
logcumsumexp  | x       | axis reverse?  | log of the running sum of exponentials
einsum | *x | subscripts |
    numpy.einsum with "->" and no "..."; no label twice in the result
matmul        | a b     |                | numpy.matmul
outer         | a b     |                | numpy.outer of two vectors
vdot          | a b     |                | of two vectors, the first conjugated
addmm | x a b | beta? alpha? |
    beta x + alpha a b, where beta is not 0; also of batches (baddbmm), of a matrix and a vector
    (addmv), of two vectors (addr), summed over batches (addbmm)
baddbmm       | x a b   | beta? alpha?   | see addmm
addmv         | x a b   | beta? alpha?   | see addmm
addbmm        | x a b   | beta? alpha?   | see addmm
addr          | x a b   | beta? alpha?   | see addmm
cdist         | a b     | p?             | norms of a_i - b_j
trace         | x       |                | of the last two axes
cross         | a b     | axis           | numpy.cross along an axis of length 3
"""

ARRAYS = words(
    _WORDS,
    {
        "transpose": _transpose,
        "reshape": lambda x, shape: reshape(x, shape),
        "broadcast": lambda x, shape, axes=None: broadcast(x, shape, axes),
        "concatenate": _concatenate,
        "stack": _stack,
        "split": _split,
        "unbind": _unbind,
        "tile": _tile,
        "view_as_real": lambda x: _stack(algebra.real(x), algebra.imag(x), axis=x.rank),
        "view_as_complex": _view_as_complex,
        "slice": _slice,
        "pad": _pad,
        "reflection_pad": lambda x, padding: _padded_by_index(x, padding, "reflect"),
        "replication_pad": lambda x, padding: _padded_by_index(x, padding, "edge"),
        "flip": lambda x, axes=(): constructors.flip(x, axes) if x.rank and axes else x,
        "roll": _roll,
        "triangle": lambda x, upper, offset=0: constructors.triangle(x, bool(upper), int(offset)),
        "diagonal": _diagonal,
        "diagonal_matrix": _diagonal_matrix,
        "index": _index,
        "take_along": _take_along,
        "scatter": _scatter,
        "scatter_along": _scatter_along,
        "dynamic_slice": lambda x, *starts, sizes: constructors.dynamic_slice(x, starts, sizes),
        "dynamic_update": lambda x, u, *starts: constructors.dynamic_update(x, u, starts),
        "one_hot": lambda i, size: constructors.one_hot(i, size),
        "sort": _sort,
        "argsort": _argsort,
        "topk": _topk,
        "kthvalue": _kth,
        "median": _median,
        "embedding": lambda table, i: _index(table, i, axes=(0,)),
        "sum": _sum,
        "mean": lambda x, axes=None, keep=False: mean(x, all_axes(x, axes), keep),
        "prod": _reduction("prod"),
        "max": _reduction("max"),
        "min": _reduction("min"),
        "any": _reduction("any", BOOLEAN),
        "all": _reduction("all", BOOLEAN),
        "logsumexp": _reduction("logsumexp"),
        "argmax": _argmax,
        "argmin": lambda x, axis=None, keep=False: _argmax(algebra.negate(x), axis, keep),
        "variance": _variance,
        "deviation": _deviation,
        "norm": _norm,
        "count_nonzero": lambda x, axis=None, axes=None: _sum(
            _not_zero(x), axes if axis is None else (axis,)
        ),
        "cumsum": _cumulative("cumsum"),
        "cumprod": _cumulative("cumprod"),
        "logcumsumexp": _cumulative("logcumsumexp"),
        "cummax": _cumulative_extreme(1.0),
        "cummin": _cumulative_extreme(-1.0),
        "einsum": lambda *xs, subscripts: einsum(subscripts, *xs),
        "matmul": algebra.matmul,
        "outer": lambda a, b: einsum("i,j->ij", a, b),
        "vdot": lambda a, b: algebra.matmul(algebra.conj(a), b),
        **dict.fromkeys(("addmm", "baddbmm", "addmv"), _plus_product(algebra.matmul)),
        "addbmm": _plus_product(lambda a, b: total(algebra.matmul(a, b), (0,))),
        "addr": _plus_product(lambda a, b: einsum("i,j->ij", a, b)),
        "cdist": _cdist,
        "trace": _trace,
        "cross": _cross,
    },
)
