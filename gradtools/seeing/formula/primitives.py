"""The operations that do not act in each place by itself: NumPy's value and the pullback of each.

Every pullback is written with operations of this house again, so that it can be differentiated
like any other expression. Linear operations come in adjoint pairs (slice and pad, index and
index_add, one discrete Fourier transform and the other); a convolution and its two adjoints are
the three partial derivatives of one trilinear form ``<g, x * w>``, and closed under derivatives.

`PRIMITIVES` holds them. ``evaluate(y, *arrays)`` reads its attributes from the expression y; an
operation with several outputs returns a tuple, and its pullback gets tuples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gradtools.seeing.formula import kernels
from gradtools.seeing.formula.algebra import (
    add,
    adjoint_matrix,
    array,
    conj,
    divide,
    full,
    imag,
    matmul,
    mean,
    negate,
    plus,
    power,
    product,
    real,
    reshape,
    scale,
    spread,
    subtract,
    swap,
    times,
    total,
    zeros,
)
from gradtools.seeing.formula.expressions import COMPLEX, INTEGER, REAL, Expr, expr, several, widest
from gradtools.seeing.formula.functions import apply, indicator


@dataclass(frozen=True)
class Primitive:
    """An operation on whole arrays.

    Attributes:
        evaluate: The value in NumPy, of the expression and the arguments' values.
        pullback: The arguments' cotangents, of the expression (or its outputs), the cotangent
            (or cotangents) and the arguments; None where there is no derivative.
    """

    evaluate: Callable[..., Any]
    pullback: Callable[..., Any] | None = None


# Makers.


def cut(x: Expr, start, limit, stride=None) -> Expr:
    """A slice: one start, limit and stride for each axis."""
    stride = tuple(stride or (1,) * x.rank)
    shape = tuple(-(-(b - a) // s) for a, b, s in zip(start, limit, stride, strict=True))
    if shape == x.shape and not any(start):
        return x
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


def one_hot(i: Expr, size: int) -> Expr:
    """A last axis with 1 at i."""
    return expr("one_hot", (i,), (*i.shape, size), REAL, size=size)


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
    return expr("dynamic_slice", (x, *starts), sizes, x.kind)


def dynamic_pad(u: Expr, starts, shape) -> Expr:
    """Zeros, with u in the window that starts at integers."""
    return expr("dynamic_pad", (u, *starts), shape, u.kind)


def dynamic_update(x: Expr, u: Expr, starts) -> Expr:
    """X with u in the window."""
    return expr("dynamic_update", (x, u, *starts), x.shape, widest(x.kind, u.kind))


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


def inverse(a: Expr) -> Expr:
    """The inverse of the last two axes."""
    return a.args[0] if a.op == "inverse" else expr("inverse", (a,), a.shape, a.kind)


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
    return _convolution("convolution", x, w, shape, stride, padding, dilation, groups)


def _convolution(name, a, b, shape, stride, padding, dilation, groups):
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


def convolution_input(g: Expr, w: Expr, shape, stride, padding, dilation, groups: int) -> Expr:
    """The adjoint of convolution to its input of this shape."""
    return _convolution("convolution_input", g, w, shape, stride, padding, dilation, groups)


def convolution_weight(x: Expr, g: Expr, shape, stride, padding, dilation, groups: int) -> Expr:
    """The adjoint of convolution to its weight of this shape."""
    return _convolution("convolution_weight", x, g, shape, stride, padding, dilation, groups)


# Pullbacks.


def unbroadcast(g: Expr, shape) -> Expr:
    """The adjoint of broadcasting leading and length-1 axes, as in NumPy."""
    if g.shape == tuple(shape):
        return g
    g = total(g, range(g.rank - len(shape)))
    axes = [a for a, (n, m) in enumerate(zip(shape, g.shape, strict=True)) if n == 1 and m != 1]
    return total(g, axes, keep=True) if axes else g


def _einsum_pullback(y, g, *args):
    return [_einsum_cotangent(y, g, k) for k in range(len(args))]


def _einsum_cotangent(y: Expr, g: Expr, k: int) -> Expr:
    labels, target = y["labels"], y.args[k]
    own = labels[k]
    if len(set(own)) < len(own):
        return _diagonal_cotangent(y, g, k)
    others = [j for j in range(len(y.args)) if j != k]
    return product(
        [g, *(conj(y.args[j]) for j in others)],
        [tuple(range(y.rank)), *(labels[j] for j in others)],
        own,
        target.shape,
        np.conj(y["coefficient"]),
    )


def _diagonal_cotangent(y, g, k):
    """A repeated label is written as a unit matrix between two labels."""
    own = list(y["labels"][k])
    names, extra, factors = list(own), [], []
    for place, name in enumerate(own):
        if name in own[:place]:
            names[place] = ("copy", place)
            extra.append((name, ("copy", place)))
            factors.append(apply_identity(y.args[k].shape[place]))
    others = [j for j in range(len(y.args)) if j != k]
    return product(
        [g, *(conj(y.args[j]) for j in others), *factors],
        [tuple(range(y.rank)), *(y["labels"][j] for j in others), *extra],
        names,
        y.args[k].shape,
        np.conj(y["coefficient"]),
    )


def apply_identity(n: int) -> Expr:
    """The unit matrix."""
    return array(np.eye(n)) if n > 1 else full(1.0, (n, n))


def _slice_pullback(y, g, x):
    interior = tuple(s - 1 for s in y["stride"])
    high = tuple(
        n - a - (m - 1) * s - 1 if m else n - a
        for n, m, a, s in zip(x.shape, y.shape, y["start"], y["stride"], strict=True)
    )
    return [pad(g, y["start"], high, interior)]


def _pad_pullback(y, g, x):
    stride = tuple(i + 1 for i in y["interior"])
    limit = tuple(n - b for n, b in zip(y.shape, y["high"], strict=True))
    return [cut(g, y["low"], limit, stride)]


def _concatenate_pullback(y, g, *xs):
    axis, place, found = y["axis"], 0, []
    for x in xs:
        start, limit = [0] * y.rank, list(y.shape)
        start[axis], limit[axis] = place, place + x.shape[axis]
        found.append(cut(g, start, limit))
        place += x.shape[axis]
    return found


def _index_set_pullback(y, g, x, u, *indices):
    kept = index_set(g, zeros(u.shape), indices, y["axes"])
    return [kept, unbroadcast(index(g, indices, y["axes"]), u.shape)] + [None] * len(indices)


def _along_set_pullback(y, g, x, i, u):
    kept = along_set(g, i, zeros(u.shape), y["axis"])
    return [kept, None, take_along(g, i, y["axis"])]


def _dynamic_update_pullback(y, g, x, u, *starts):
    kept = dynamic_update(g, zeros(u.shape), starts)
    return [kept, dynamic_slice(g, starts, u.shape)] + [None] * len(starts)


def _extreme_pullback(y, g, x):
    at = indicator(x, "==", spread(y, y["axes"], x.shape))
    return [times(at, spread(g, y["axes"], x.shape))]


def _prod_pullback(y, g, x):
    return (
        [divide(spread(times(y, g), y["axes"], x.shape), x)]
        if not x.is_complex
        else [conj_divide(spread(times(conj(y), g), y["axes"], x.shape), x)]
    )


def conj_divide(a: Expr, b: Expr) -> Expr:
    """A over the conjugate of b."""
    return divide(a, conj(b))


def _logsumexp_pullback(y, g, x):
    axes = y["axes"]
    p = softmax(x, axes[0]) if len(axes) == 1 else _softmax_over(x, y, axes)
    return [times(p, spread(g, axes, x.shape))]


def _softmax_over(x, y, axes):
    return apply("exp", subtract(x, spread(y, axes, x.shape)))


def _softmax_pullback(y, g, x):
    axis = y["axis"]
    return [times(y, subtract(g, total(times(y, g), [axis], keep=True)))]


def _log_softmax_pullback(y, g, x):
    axis = y["axis"]
    return [subtract(g, times(softmax(x, axis), total(g, [axis], keep=True)))]


def _standardize_pullback(y, g, x):
    axes = y["axes"]
    inner = plus(
        g,
        negate(mean(g, axes, keep=True)),
        negate(times(y, mean(times(y, g), axes, keep=True))),
    )
    return [divide(inner, spread(deviation(x, axes, y["eps"]), axes, x.shape))]


def _centred(x, axes):
    return subtract(x, mean(x, axes, keep=True))


def _count(x, axes):
    return prod(x.shape[a] for a in axes)


def _deviation_pullback(y, g, x):
    axes, correction = y["axes"], y["correction"]
    n = _count(x, axes)
    if not correction and not x.is_complex:
        return [scale(1 / n, times(standardize(x, axes, y["eps"]), spread(g, axes, x.shape)))]
    weight = spread(divide(real(g), y), axes, x.shape)
    return [scale(1 / (n - correction), times(_centred(x, axes), weight))]


def _variance_pullback(y, g, x):
    axes = y["axes"]
    weight = spread(real(g), axes, x.shape)
    return [scale(2 / (_count(x, axes) - y["correction"]), times(_centred(x, axes), weight))]


def _norm_pullback(y, g, x):
    return [times(x, spread(divide(real(g), y), y["axes"], x.shape))]


def _cumsum(x, axis, reverse):
    return along("cumsum", x, axis, reverse=reverse)


def _cumprod_pullback(y, g, x):
    return [conj_divide(_cumsum(times(conj(y), g), y["axis"], not y["reverse"]), x)]


def _logcumsumexp_pullback(y, g, x):
    weighted = _cumsum(times(g, apply("exp", negate(y))), y["axis"], not y["reverse"])
    return [times(apply("exp", x), weighted)]


def _geometry(y):
    return {name: y[name] for name in ("stride", "padding", "dilation", "groups")}


def _convolution_pullback(y, g, x, w):
    return [
        convolution_input(g, conj(w), x.shape, **_geometry(y)),
        convolution_weight(conj(x), g, w.shape, **_geometry(y)),
    ]


def _convolution_input_pullback(y, u, g, w):
    return [
        convolution(u, conj(w), **_geometry(y)),
        convolution_weight(u, conj(g), w.shape, **_geometry(y)),
    ]


def _convolution_weight_pullback(y, u, x, g):
    return [
        convolution_input(conj(g), u, x.shape, **_geometry(y)),
        convolution(conj(x), u, **_geometry(y)),
    ]


def _pooling(y):
    return {name: y[name] for name in ("window", "stride", "padding", "dilation")}


def pooled(name: str, args, shape, pooling) -> Expr:
    """One of the pooling operations."""
    return expr(name, args, shape, args[0].kind, **pooling)


def _max_pool_pullback(y, g, x):
    return [pooled("max_unpool", (g, x), x.shape, _pooling(y))]


def _max_unpool_pullback(y, u, g, x):
    return [pooled("max_pick", (u, x), g.shape, _pooling(y)), None]


def _max_pick_pullback(y, g, u, x):
    return [pooled("max_unpool", (g, x), x.shape, _pooling(y)), None]


def _inverse_pullback(y, g, a):
    h = adjoint_matrix(y)
    return [negate(matmul(matmul(h, g), h))]


def _solve_pullback(y, g, a, b):
    right = solve(adjoint_matrix(a), g)
    return [
        unbroadcast(negate(matmul(right, adjoint_matrix(y))), a.shape),
        unbroadcast(right, b.shape),
    ]


def _det_pullback(y, g, a):
    weight = times(g, conj(y))
    return [_weighted(weight, adjoint_matrix(inverse(a)))]


def _weighted(weight: Expr, matrices: Expr) -> Expr:
    """One weight for each matrix of a batch."""
    batch = tuple(range(weight.rank))
    return product(
        [weight, matrices], [batch, range(matrices.rank)], range(matrices.rank), matrices.shape
    )


def _logabsdet_pullback(y, g, a):
    return [_weighted(real(g), adjoint_matrix(inverse(a)))]


def _sign_det_pullback(y, g, a):
    if not a.is_complex:
        return [None]
    turn = scale(1j, imag(times(conj(y), g)))
    return [_weighted(turn, adjoint_matrix(inverse(a)))]


def _half_diagonal(x: Expr) -> Expr:
    """The lower triangle with half of the diagonal."""
    n = x.shape[-1]
    weights = np.tril(np.ones((n, n))) - np.eye(n) / 2
    return times(x, array(weights))


def hermitian(x: Expr) -> Expr:
    """(x + x^H) / 2."""
    return scale(0.5, plus(x, adjoint_matrix(x)))


def _cholesky_pullback(y, g, a):
    inner = _half_diagonal(matmul(adjoint_matrix(y), g))
    left = solve(adjoint_matrix(y), hermitian(inner))
    return [adjoint_matrix(solve(adjoint_matrix(y), adjoint_matrix(left)))]


def _expm_pullback(y, g, a):
    n = a.shape[-1]
    h = adjoint_matrix(a)
    axis = a.rank - 1
    top = concatenate([h, g], axis)
    bottom = concatenate([zeros(h.shape), h], axis)
    block = concatenate([top, bottom], axis - 1)
    start, limit = [0] * a.rank, list(block.shape)
    start[-1], limit[-2] = n, n
    return [cut(expr("expm", (block,), block.shape, block.kind), start, limit)]


def off_diagonal_inverse(values: Expr) -> Expr:
    """1 / (values_j - values_i) off the diagonal, 0 on it."""
    shape = (*values.shape, values.shape[-1])
    eye = np.eye(shape[-1])
    row = spread(values, [values.rank - 1], shape)
    column = spread(values, [values.rank], shape)
    distance = plus(subtract(row, column), array(eye))
    return times(power(distance, -1), array(1 - eye))


def diagonal_matrix(x: Expr) -> Expr:
    """The last axis on a diagonal."""
    batch = tuple(range(x.rank - 1))
    n = x.shape[-1]
    eye = apply_identity(n)
    return product([x, eye], [(*batch, "i"), ("i", "j")], (*batch, "i", "j"), (*x.shape, n))


def _eigh_pullback(outputs, cotangents, a):
    (w, v), (dw, dv) = outputs, cotangents
    h = adjoint_matrix(v)
    inner = plus(diagonal_matrix(dw), times(off_diagonal_inverse(w), matmul(h, dv)))
    return [hermitian(matmul(matmul(v, inner), h))]


def _skew(x):
    return subtract(x, adjoint_matrix(x))


def _svd_pullback(outputs, cotangents, a):
    (u, s, vh), (du, ds, dvh) = outputs, cotangents
    v, dv = adjoint_matrix(vh), adjoint_matrix(dvh)
    gaps = off_diagonal_inverse(power(s, 2))
    row = spread(s, [s.rank - 1], (*s.shape, s.shape[-1]))
    column = spread(s, [s.rank], (*s.shape, s.shape[-1]))
    left = times(gaps, _skew(matmul(adjoint_matrix(u), du)), row)
    right = times(column, gaps, _skew(matmul(vh, dv)))
    inner = plus(diagonal_matrix(ds), left, right)
    found = [matmul(matmul(u, inner), vh)]
    inverse_s = diagonal_matrix(power(s, -1))
    if a.shape[-2] > a.shape[-1]:
        found.append(matmul(matmul(_reject(u, du), inverse_s), vh))
    if a.shape[-2] < a.shape[-1]:
        found.append(matmul(matmul(u, inverse_s), adjoint_matrix(_reject(v, dv))))
    return [add(found)]


def _reject(u, g):
    """What of g is orthogonal to the columns of u."""
    return subtract(g, matmul(u, matmul(adjoint_matrix(u), g)))


def _qr_pullback(outputs, cotangents, a):
    (q, r), (dq, dr) = outputs, cotangents
    m = subtract(matmul(r, adjoint_matrix(dr)), matmul(adjoint_matrix(dq), q))
    lower = plus(triangle(m, upper=False), adjoint_matrix(triangle(m, upper=False, offset=-1)))
    inner = plus(dq, matmul(q, lower))
    return [adjoint_matrix(solve(r, adjoint_matrix(inner)))]


def _nothing(y, g, *args):
    return [None] * len(args)


def _linear(back):
    """The pullback of a linear operation of its first argument, the others being integers."""
    return lambda y, g, x, *rest: [back(y, g, x, *rest)] + [None] * len(rest)


PRIMITIVES: dict[str, Primitive] = {
    "number": Primitive(lambda y: np.asarray(y["value"])),
    "array": Primitive(lambda y: y["value"].array),
    "identity": Primitive(lambda y: np.eye(y.shape[0])),
    "einsum": Primitive(kernels.einsum, _einsum_pullback),
    "add": Primitive(lambda y, *xs: sum(xs[1:], xs[0] + 0.0), lambda y, g, *xs: [g] * len(xs)),
    "reshape": Primitive(
        lambda y, x: np.reshape(x, y.shape), lambda y, g, x: [reshape(g, x.shape)]
    ),
    "slice": Primitive(kernels.cut, _slice_pullback),
    "pad": Primitive(kernels.pad, _pad_pullback),
    "concatenate": Primitive(lambda y, *xs: np.concatenate(xs, y["axis"]), _concatenate_pullback),
    "flip": Primitive(lambda y, x: np.flip(x, y["axes"]), lambda y, g, x: [flip(g, y["axes"])]),
    "roll": Primitive(
        lambda y, x: np.roll(x, y["shifts"], y["axes"]),
        lambda y, g, x: [roll(g, [-s for s in y["shifts"]], y["axes"])],
    ),
    "one_hot": Primitive(lambda y, i: (np.asarray(i)[..., None] == np.arange(y["size"])) * 1.0),
    "iota": Primitive(kernels.iota),
    "index": Primitive(
        kernels.index, _linear(lambda y, g, x, *i: index_add(g, i, y["axes"], x.shape))
    ),
    "index_add": Primitive(kernels.index_add, _linear(lambda y, g, u, *i: index(g, i, y["axes"]))),
    "index_set": Primitive(kernels.index_set, _index_set_pullback),
    "take_along": Primitive(
        lambda y, x, i: np.take_along_axis(x, i, y["axis"]),
        _linear(lambda y, g, x, i: put_along(g, i, y["axis"], x.shape[y["axis"]])),
    ),
    "put_along": Primitive(
        kernels.put_along, _linear(lambda y, g, u, i: take_along(g, i, y["axis"]))
    ),
    "along_set": Primitive(kernels.along_set, _along_set_pullback),
    "dynamic_slice": Primitive(
        kernels.dynamic_slice, _linear(lambda y, g, x, *s: dynamic_pad(g, s, x.shape))
    ),
    "dynamic_pad": Primitive(
        kernels.dynamic_pad, _linear(lambda y, g, u, *s: dynamic_slice(g, s, u.shape))
    ),
    "dynamic_update": Primitive(kernels.dynamic_update, _dynamic_update_pullback),
    "argsort": Primitive(kernels.argsort),
    "argmax": Primitive(lambda y, x: np.argmax(x, y["axis"])),
    "cumargmax": Primitive(kernels.cumargmax),
    "any": Primitive(lambda y, x: np.any(x, y["axes"])),
    "all": Primitive(lambda y, x: np.all(x, y["axes"])),
    "max": Primitive(lambda y, x: np.max(x, y["axes"]), _extreme_pullback),
    "min": Primitive(lambda y, x: np.min(x, y["axes"]), _extreme_pullback),
    "prod": Primitive(lambda y, x: np.prod(x, y["axes"]), _prod_pullback),
    "logsumexp": Primitive(kernels.logsumexp, _logsumexp_pullback),
    "softmax": Primitive(lambda y, x: kernels.softmax(x, y["axis"]), _softmax_pullback),
    "log_softmax": Primitive(kernels.log_softmax, _log_softmax_pullback),
    "standardize": Primitive(kernels.standardize, _standardize_pullback),
    "deviation": Primitive(kernels.deviation, _deviation_pullback),
    "variance": Primitive(
        lambda y, x: np.var(x, y["axes"], ddof=y["correction"]), _variance_pullback
    ),
    "norm": Primitive(lambda y, x: np.sqrt((np.abs(x) ** 2).sum(y["axes"])), _norm_pullback),
    "cumsum": Primitive(kernels.cumsum, lambda y, g, x: [_cumsum(g, y["axis"], not y["reverse"])]),
    "cumprod": Primitive(kernels.cumprod, _cumprod_pullback),
    "logcumsumexp": Primitive(kernels.logcumsumexp, _logcumsumexp_pullback),
    "convolution": Primitive(kernels.convolution, _convolution_pullback),
    "convolution_input": Primitive(kernels.convolution_input, _convolution_input_pullback),
    "convolution_weight": Primitive(kernels.convolution_weight, _convolution_weight_pullback),
    "max_pool": Primitive(kernels.max_pool, _max_pool_pullback),
    "max_unpool": Primitive(kernels.max_unpool, _max_unpool_pullback),
    "max_pick": Primitive(kernels.max_pick, _max_pick_pullback),
    "sum_pool": Primitive(
        kernels.sum_pool, lambda y, g, x: [pooled("sum_unpool", (g,), x.shape, _pooling(y))]
    ),
    "sum_unpool": Primitive(
        kernels.sum_unpool, lambda y, u, g: [pooled("sum_pool", (u,), g.shape, _pooling(y))]
    ),
    "triangle": Primitive(
        lambda y, x: (np.triu if y["upper"] else np.tril)(x, y["offset"]),
        lambda y, g, x: [triangle(g, y["upper"], y["offset"])],
    ),
    "det": Primitive(lambda y, a: np.linalg.det(a), _det_pullback),
    "logabsdet": Primitive(lambda y, a: np.linalg.slogdet(a)[1], _logabsdet_pullback),
    "sign_det": Primitive(lambda y, a: np.linalg.slogdet(a)[0], _sign_det_pullback),
    "inverse": Primitive(lambda y, a: np.linalg.inv(a), _inverse_pullback),
    "solve": Primitive(lambda y, a, b: np.linalg.solve(a, b), _solve_pullback),
    "cholesky": Primitive(kernels.cholesky, _cholesky_pullback),
    "expm": Primitive(lambda y, a: kernels.expm(a), _expm_pullback),
    "eigh": Primitive(lambda y, a: tuple(np.linalg.eigh(kernels.hermitian(a))), _eigh_pullback),
    "svd": Primitive(lambda y, a: tuple(np.linalg.svd(a, full_matrices=False)), _svd_pullback),
    "qr": Primitive(lambda y, a: tuple(np.linalg.qr(a)), _qr_pullback),
    "fourier": Primitive(kernels.fourier, lambda y, g, x: [fourier(g, y["axes"], -y["sign"])]),
}

MULTIPLE = {"eigh", "svd", "qr"}


def decomposed(op: str, a: Expr) -> list[Expr]:
    """The factors of a, by eigh, svd or qr."""
    k, batch = min(a.shape[-2:]), a.shape[:-2]
    left = ((*batch, a.shape[-2], k), a.kind)
    right = ((*batch, k, a.shape[-1]), a.kind)
    values = ((*batch, k), REAL)
    outputs = {"eigh": [values, left], "svd": [left, values, right], "qr": [left, right]}[op]
    return several(op, [a], outputs)


__all__ = ["INTEGER", "MULTIPLE", "PRIMITIVES", "Primitive", "swap"]
