"""Broadcasts, transposes, sums, einsum, matmul and reshapes, all built on `product`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from gradtools.seeing.formulas.algebra.products import (
    Labels,
    array,
    constant_of,
    full,
    product,
)
from gradtools.seeing.formulas.expressions import Expr, expr


def scale(coefficient: Any, x: Expr) -> Expr:
    """A number times x."""
    return product([x], [range(x.rank)], range(x.rank), x.shape, coefficient)


def negate(x: Expr) -> Expr:
    """Minus x."""
    return scale(-1.0, x)


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which NumPy broadcasts these shapes."""
    return tuple(np.broadcast_shapes(*map(tuple, shapes)))


def _aligned(x: Expr, rank: int) -> Labels:
    return tuple(range(rank - x.rank, rank))


def times(*factors: Expr) -> Expr:
    """The elementwise product, broadcast as in NumPy."""
    shape = broadcast_shape(*(f.shape for f in factors))
    labels = [_aligned(f, len(shape)) for f in factors]
    return product(factors, labels, range(len(shape)), shape)


def broadcast(x: Expr, shape: Sequence[int], axes: Sequence[int] | None = None) -> Expr:
    """Broadcasts x; its axis i becomes axis ``axes[i]`` of the result."""
    axes = _aligned(x, len(shape)) if axes is None else tuple(axes)
    return product([x], [axes], range(len(shape)), shape)


def transpose(x: Expr, permutation: Sequence[int] | None = None) -> Expr:
    """numpy.transpose."""
    permutation = tuple(permutation or reversed(range(x.rank)))
    shape = [x.shape[a] for a in permutation]
    return product([x], [range(x.rank)], permutation, shape)


def swap(x: Expr) -> Expr:
    """The last two axes exchanged."""
    return transpose(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


def total(x: Expr, axes: Iterable[int] | None = None, keep: bool = False) -> Expr:
    """The sum over axes."""
    axes = tuple(range(x.rank)) if axes is None else tuple(axes)
    left = [a for a in range(x.rank) if a not in axes]
    result = product([x], [range(x.rank)], left, [x.shape[a] for a in left])
    return unsqueeze(result, axes) if keep else result


def unsqueeze(x: Expr, axes: Iterable[int]) -> Expr:
    """Inserts axes of length 1 at these positions of the result."""
    axes = set(axes)
    rank = x.rank + len(axes)
    kept = [a for a in range(rank) if a not in axes]
    shape = [1] * rank
    for a, n in zip(kept, x.shape, strict=True):
        shape[a] = n
    return product([x], [kept], range(rank), shape)


def spread(x: Expr, axes: Iterable[int], shape: Sequence[int]) -> Expr:
    """The adjoint of a sum over axes (without keep): broadcasts over them."""
    axes = set(axes)
    kept = [a for a in range(len(shape)) if a not in axes]
    return product([x], [kept], range(len(shape)), shape)


def mean(x: Expr, axes: Iterable[int], keep: bool = False) -> Expr:
    """The mean over axes."""
    axes = tuple(axes)
    return scale(1.0 / prod(x.shape[a] for a in axes), total(x, axes, keep))


def einsum(subscripts: str, *xs: Expr) -> Expr:
    """numpy.einsum with an explicit output."""
    left, out = subscripts.replace(" ", "").split("->")
    size: dict[str, int] = {}
    for names, x in zip(left.split(","), xs, strict=True):
        for name, n in zip(names, x.shape, strict=True):
            size[name] = n if size.get(name, 1) == 1 else size[name]
    return product(xs, left.split(","), out, [size[n] for n in out])


def matmul(a: Expr, b: Expr) -> Expr:
    """numpy.matmul."""
    left = ["k"] if a.rank == 1 else ["i", "k"]
    right = ["k"] if b.rank == 1 else ["k", "j"]
    batch = broadcast_shape(a.shape[: max(a.rank - 2, 0)], b.shape[: max(b.rank - 2, 0)])
    names = list(range(len(batch)))
    skip = lambda x: names[len(names) - max(x.rank - 2, 0) :]
    out = names + (["i"] if a.rank > 1 else []) + (["j"] if b.rank > 1 else [])
    shape = batch + (a.shape[-2:-1] if a.rank > 1 else ()) + (b.shape[-1:] if b.rank > 1 else ())
    return product([a, b], [[*skip(a), *left], [*skip(b), *right]], out, shape)


def unbroadcast(g: Expr, shape: Sequence[int]) -> Expr:
    """The adjoint of broadcasting leading and length-1 axes, as in NumPy."""
    if g.shape == tuple(shape):
        return g
    g = total(g, range(g.rank - len(shape)))
    axes = [a for a, (n, m) in enumerate(zip(shape, g.shape, strict=True)) if n == 1 and m != 1]
    return total(g, axes, keep=True) if axes else g


# --- reshapes; axes of length 1 are represented by the labels of a product


def reshape(x: Expr, shape: Sequence[int]) -> Expr:
    """A row-major reshape; axes of length 1 are removed and inserted by products."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if x.op == "reshape":
        return reshape(x.args[0], shape)
    if x.op == "array":
        return array(x["value"].array.reshape(shape))
    ones = tuple(a for a, n in enumerate(x.shape) if n == 1)
    inner = x.squeeze(ones) if ones else x
    long = tuple(n for n in shape if n != 1)
    if inner.shape != long:
        inner = _reshape_long(inner, long)
    kept = tuple(a for a, n in enumerate(shape) if n != 1)
    return product([inner], [kept], range(len(shape)), shape)


def _reshape_long(x: Expr, shape: tuple[int, ...]) -> Expr:
    if x.op == "reshape":
        x = x.args[0]
        return x if x.shape == shape else expr("reshape", (x,), shape, x.kind)
    if constant_of(x) is not None:
        return full(constant_of(x), shape)
    return expr("reshape", (x,), shape, x.kind)
