"""Constructors of operations on whole arrays: their shapes, kinds and attributes."""

from __future__ import annotations

import numpy as np

from gradtools.seeing.formulas.algebra import constant_of, identity, is_zero, product, total
from gradtools.seeing.formulas.expressions import COMPLEX, REAL, Expr, expr, several, widest


def cut(x: Expr, start, limit, stride=None) -> Expr:
    """A slice: one start, limit and stride for each axis."""
    stride = tuple(stride or (1,) * x.rank)
    shape = tuple(-(-(b - a) // s) for a, b, s in zip(start, limit, stride, strict=True))
    if shape == x.shape and not any(start):
        return x
    seen = _seen_through(x, start, limit)
    if seen is not None:
        inner, offset = seen
        start, limit = ([n - k for n, k in zip(of, offset, strict=True)] for of in (start, limit))
        return cut(inner, start, limit, stride)
    return expr("slice", (x,), shape, x.kind, start=tuple(start), limit=tuple(limit), stride=stride)


def pad(x: Expr, low, high, interior=None) -> Expr:
    """Zeros around x and between its entries."""
    interior = tuple(interior or (0,) * x.rank)
    shape = tuple(
        a + n + max(n - 1, 0) * i + b
        for n, a, b, i in zip(x.shape, low, high, interior, strict=True)
    )
    if shape == x.shape:
        return x
    low, high = tuple(low), tuple(high)
    return expr("pad", (x,), shape, x.kind, low=low, high=high, interior=interior)


def concatenate(xs, axis: int) -> Expr:
    """One after the other."""
    xs = tuple(xs)
    if len(xs) == 1:
        return xs[0]
    shape = list(xs[0].shape)
    shape[axis] = sum(x.shape[axis] for x in xs)
    return expr("concatenate", xs, shape, widest(*(x.kind for x in xs)), axis=axis)


def flip(x: Expr, axes) -> Expr:
    """Reversed along axes."""
    axes = tuple(a for a in axes if x.shape[a] > 1)
    return expr("flip", (x,), x.shape, x.kind, axes=axes) if axes else x


def roll(x: Expr, shifts, axes) -> Expr:
    """numpy.roll."""
    return expr("roll", (x,), x.shape, x.kind, shifts=tuple(shifts), axes=tuple(axes))


def one_hot(i: Expr, size: int, from_the_end: bool = False) -> Expr:
    """A last axis with 1 at i; a negative i is nowhere, or counts from the end."""
    given = {"size": size, "from_the_end": True} if from_the_end else {"size": size}
    return expr("one_hot", (i,), (*i.shape, size), REAL, **given)


def index(x: Expr, indices, axes) -> Expr:
    """X at integer arrays; their axes lead."""
    lead = np.broadcast_shapes(*(i.shape for i in indices))
    shape = lead + tuple(n for a, n in enumerate(x.shape) if a not in axes)
    return expr("index", (x, *indices), shape, x.kind, axes=tuple(axes))


def index_add(u: Expr, indices, axes, shape) -> Expr:
    """Zeros of this shape, with u added at the integer arrays."""
    return expr("index_add", (u, *indices), shape, u.kind, axes=tuple(axes))


def index_set(x: Expr, u: Expr, indices, axes) -> Expr:
    """X with u at the integer arrays."""
    return expr("index_set", (x, u, *indices), x.shape, widest(x.kind, u.kind), axes=tuple(axes))


def take_along(x: Expr, i: Expr, axis: int) -> Expr:
    """numpy.take_along_axis."""
    shape = [*x.shape]
    shape[axis] = i.shape[axis]
    return expr("take_along", (x, i), shape, x.kind, axis=axis)


def put_along(u: Expr, i: Expr, axis: int, size: int) -> Expr:
    """Zeros, with u added where i says along the axis."""
    shape = [*u.shape]
    shape[axis] = size
    return expr("put_along", (u, i), shape, u.kind, axis=axis)


def along_set(x: Expr, i: Expr, u: Expr, axis: int) -> Expr:
    """X with u where i says along the axis."""
    return expr("along_set", (x, i, u), x.shape, widest(x.kind, u.kind), axis=axis)


def dynamic_slice(x: Expr, starts, sizes) -> Expr:
    """A window that starts at integers."""
    known = _fixed(starts, sizes, x.shape)
    if known is not None:
        return cut(x, known, [a + n for a, n in zip(known, sizes, strict=True)])
    return expr("dynamic_slice", (x, *starts), sizes, x.kind)


def dynamic_pad(u: Expr, starts, shape) -> Expr:
    """Zeros, with u in the window that starts at integers."""
    known = _fixed(starts, u.shape, shape)
    if known is not None:
        high = [n - a - k for n, a, k in zip(shape, known, u.shape, strict=True)]
        return pad(u, known, high)
    return expr("dynamic_pad", (u, *starts), shape, u.kind)


def dynamic_update(x: Expr, u: Expr, starts) -> Expr:
    """X with u in the window; what is overwritten as a whole is not read."""
    kind = widest(x.kind, u.kind)
    if u.shape == x.shape and u.kind == kind:
        return u
    before = x.args[0] if x.op == "dynamic_update" else x
    same = before is not x and x.args[1].shape == u.shape and x.args[2:] == tuple(starts)
    return expr("dynamic_update", (before if same else x, u, *starts), x.shape, kind)


def _seen_through(x: Expr, start, limit) -> tuple[Expr, list[int]] | None:
    """What of an update a slice shows, the update alone or nothing of it; and where it begins."""
    if x.op != "dynamic_update":
        return None
    base, u, *starts = x.args
    low = _fixed(starts, u.shape, x.shape)
    if low is None:
        return None
    axes = list(zip(start, limit, low, u.shape, strict=True))
    if all(a >= p and b <= p + n for a, b, p, n in axes) and u.kind == x.kind:
        return u, low
    if any(b <= p or a >= p + n for a, b, p, n in axes) and base.kind == x.kind:
        return base, [0] * x.rank
    return None


def _fixed(starts, sizes, shape) -> list[int] | None:
    """Where a window starts whose place is known; it is moved inside, as JAX does."""
    known = [constant_of(start) for start in starts]
    if any(value is None for value in known):
        return None
    places = zip(known, sizes, shape, strict=True)
    return [min(max(int(value), 0), n - size) for value, size, n in places]


def reduced(name: str, x: Expr, axes, kind: str | None = None, **attributes) -> Expr:
    """A reduction over axes, without keeping them."""
    axes = tuple(sorted(axes))
    shape = [n for a, n in enumerate(x.shape) if a not in axes]
    return expr(name, (x,), shape, kind or x.kind, axes=axes, **attributes)


def along(name: str, x: Expr, axis: int, kind: str | None = None, **attributes) -> Expr:
    """Something along one axis that keeps the shape."""
    return expr(name, (x,), x.shape, kind or x.kind, axis=axis, **attributes)


def norm(x: Expr, axes) -> Expr:
    """The square root of the sum of squared moduli over axes."""
    return reduced("norm", x, axes, REAL)


def softmax(x: Expr, axis: int) -> Expr:
    """Exponentials over their sum."""
    return along("softmax", x, axis)


def standardize(x: Expr, axes, eps: float) -> Expr:
    """(x - mean) / deviation."""
    return expr("standardize", (x,), x.shape, x.kind, axes=tuple(sorted(axes)), eps=eps)


def deviation(x: Expr, axes, eps: float = 0.0, correction: float = 0.0) -> Expr:
    """The square root of variance plus eps."""
    return reduced("deviation", x, axes, REAL, eps=eps, correction=correction)


def variance(x: Expr, axes, correction: float = 0.0) -> Expr:
    """The mean squared modulus of the distance from the mean."""
    return reduced("variance", x, axes, REAL, correction=correction)


def triangle(x: Expr, upper: bool, offset: int = 0) -> Expr:
    """The upper or lower triangle of the last two axes."""
    return expr("triangle", (x,), x.shape, x.kind, upper=upper, offset=offset)


def half(x: Expr) -> Expr:
    """The lower triangle of the last two axes, with half of the diagonal."""
    return expr("half", (x,), x.shape, x.kind)


def gaps(x: Expr, w: Expr) -> Expr:
    """The quotients x_ij / (w_j - w_i) off the diagonal of the last two axes, 0 on it."""
    return x if is_zero(x) else expr("gaps", (x, w), x.shape, x.kind)


def inverse(a: Expr) -> Expr:
    """The inverse of the last two axes."""
    return a.args[0] if a.op == "inverse" else expr("inverse", (a,), a.shape, a.kind)


def pseudoinverse(a: Expr) -> Expr:
    """The Moore-Penrose inverse of the last two axes."""
    return expr("pinv", (a,), (*a.shape[:-2], a.shape[-1], a.shape[-2]), a.kind)


def solve(a: Expr, b: Expr) -> Expr:
    """The matrix b from the left by the inverse of a."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return expr("solve", (a, b), (*batch, *b.shape[-2:]), widest(a.kind, b.kind))


def fourier(x: Expr, axes, sign: int) -> Expr:
    """The sum of x e**(sign 2 pi i jk/n), without a factor."""
    return expr("fourier", (x,), x.shape, COMPLEX, axes=tuple(sorted(axes)), sign=sign)


def convolution(x: Expr, w: Expr, stride, padding, dilation, groups: int) -> Expr:
    """Correlation of x (N, C, spatial) with w (O, C / groups, spatial)."""
    space = tuple(
        (n + a + b - d * (k - 1) - 1) // s + 1
        for n, k, s, (a, b), d in zip(
            x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True
        )
    )
    shape = (x.shape[0], w.shape[0], *space)
    return convolve("convolution", x, w, shape, stride, padding, dilation, groups)


def convolve(name, a, b, shape, stride, padding, dilation, groups) -> Expr:
    """A convolution, or its adjoint to its input or its weight, of this shape."""
    return expr(
        name,
        (a, b),
        shape,
        widest(a.kind, b.kind),
        stride=tuple(stride),
        padding=tuple(map(tuple, padding)),
        dilation=tuple(dilation),
        groups=groups,
    )


MULTIPLE = {"eigh", "svd", "qr"}


def decomposed(op: str, a: Expr) -> list[Expr]:
    """The factors of a, by eigh, svd (u, s and v, so that a = u diag(s) vh) or qr."""
    k, batch = min(a.shape[-2:]), a.shape[:-2]
    left = ((*batch, a.shape[-2], k), a.kind)
    right = ((*batch, k, a.shape[-1]), a.kind)
    values = ((*batch, k), REAL)
    vectors = ((*batch, a.shape[-1], k), a.kind)
    outputs = {"eigh": [values, left], "svd": [left, values, vectors], "qr": [left, right]}[op]
    return several(op, [a], outputs)


def pooled(name: str, args, shape, pooling) -> Expr:
    """One of the pooling operations."""
    return expr(name, args, shape, args[0].kind, **pooling)


def diagonal_matrix(x: Expr) -> Expr:
    """The last axis on a diagonal."""
    batch = tuple(range(x.rank - 1))
    n = x.shape[-1]
    eye = identity(n)
    return product([x, eye], [(*batch, "i"), ("i", "j")], (*batch, "i", "j"), (*x.shape, n))


def unbroadcast(g: Expr, shape) -> Expr:
    """The adjoint of broadcasting leading and length-1 axes, as in NumPy."""
    if g.shape == tuple(shape):
        return g
    g = total(g, range(g.rank - len(shape)))
    axes = [a for a, (n, m) in enumerate(zip(shape, g.shape, strict=True)) if n == 1 and m != 1]
    return total(g, axes, keep=True) if axes else g
