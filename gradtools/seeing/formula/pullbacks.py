"""The cotangents of the arguments of each operation on whole arrays.

Every pullback is written with operations of this house again, so that it can be differentiated
like any other expression. Linear operations come in adjoint pairs (slice and pad, index and
index_add, one discrete Fourier transform and the other); a convolution and its two adjoints are
the three partial derivatives of one trilinear form ``<g, x * w>``, and closed under derivatives.
"""

from __future__ import annotations

from math import prod

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formula.algebra import (
    add,
    adjoint_matrix,
    conj,
    divide,
    imag,
    is_zero,
    matmul,
    mean,
    negate,
    plus,
    power,
    product,
    real,
    scale,
    spread,
    subtract,
    times,
    total,
    zeros,
)
from gradtools.seeing.formula.expressions import Expr, expr
from gradtools.seeing.formula.functions import apply, indicator
from gradtools.seeing.formula.making import (
    along,
    along_set,
    apply_identity,
    concatenate,
    convolution,
    convolution_input,
    convolution_weight,
    cut,
    deviation,
    diagonal_matrix,
    dynamic_slice,
    dynamic_update,
    gaps,
    half,
    index,
    index_set,
    inverse,
    pad,
    pooled,
    softmax,
    solve,
    standardize,
    take_along,
)


def unbroadcast(g: Expr, shape) -> Expr:
    """The adjoint of broadcasting leading and length-1 axes, as in NumPy."""
    if g.shape == tuple(shape):
        return g
    g = total(g, range(g.rank - len(shape)))
    axes = [a for a, (n, m) in enumerate(zip(shape, g.shape, strict=True)) if n == 1 and m != 1]
    return total(g, axes, keep=True) if axes else g


def einsum_pullback(y, g, *args):
    """Each factor gets the cotangent times the conjugates of the others."""
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


def slice_pullback(y, g, x):
    """The slice of zeros becomes the cotangent."""
    interior = tuple(s - 1 for s in y["stride"])
    high = tuple(
        n - a - (m - 1) * s - 1 if m else n - a
        for n, m, a, s in zip(x.shape, y.shape, y["start"], y["stride"], strict=True)
    )
    return [pad(g, y["start"], high, interior)]


def pad_pullback(y, g, x):
    """The padding is cut off again."""
    stride = tuple(i + 1 for i in y["interior"])
    limit = tuple(n - b for n, b in zip(y.shape, y["high"], strict=True))
    return [cut(g, y["low"], limit, stride)]


def concatenate_pullback(y, g, *xs):
    """Each part gets its own slice."""
    axis, place, found = y["axis"], 0, []
    for x in xs:
        start, limit = [0] * y.rank, list(y.shape)
        start[axis], limit[axis] = place, place + x.shape[axis]
        found.append(cut(g, start, limit))
        place += x.shape[axis]
    return found


def index_set_pullback(y, g, x, u, *indices):
    """X keeps what was not overwritten; u gets what was."""
    kept = index_set(g, zeros(u.shape), indices, y["axes"])
    return [kept, unbroadcast(index(g, indices, y["axes"]), u.shape)] + [None] * len(indices)


def along_set_pullback(y, g, x, i, u):
    """X keeps what was not overwritten; u gets what was."""
    kept = along_set(g, i, zeros(u.shape), y["axis"])
    return [kept, None, take_along(g, i, y["axis"])]


def dynamic_update_pullback(y, g, x, u, *starts):
    """X keeps what was not overwritten; u gets the window."""
    kept = dynamic_update(g, zeros(u.shape), starts)
    return [kept, dynamic_slice(g, starts, u.shape)] + [None] * len(starts)


def extreme_pullback(y, g, x):
    """The cotangent where x is the extreme: 1[x = y] g."""
    at = indicator(x, "==", spread(y, y["axes"], x.shape))
    return [times(at, spread(g, y["axes"], x.shape))]


def prod_pullback(y, g, x):
    """The product over each entry: y g / x."""
    return (
        [divide(spread(times(y, g), y["axes"], x.shape), x)]
        if not x.is_complex
        else [conj_divide(spread(times(conj(y), g), y["axes"], x.shape), x)]
    )


def conj_divide(a: Expr, b: Expr) -> Expr:
    """A over the conjugate of b."""
    return divide(a, conj(b))


def logsumexp_pullback(y, g, x):
    """softmax(x) g."""
    axes = y["axes"]
    p = softmax(x, axes[0]) if len(axes) == 1 else _softmax_over(x, y, axes)
    return [times(conj(p), spread(g, axes, x.shape))]


def _softmax_over(x, y, axes):
    return apply("exp", subtract(x, spread(y, axes, x.shape)))


def softmax_pullback(y, g, x):
    """y (g - sum y g)."""
    axis = y["axis"]
    return [times(conj(y), subtract(g, total(times(conj(y), g), [axis], keep=True)))]


def log_softmax_pullback(y, g, x):
    """g - softmax(x) sum g."""
    axis = y["axis"]
    return [subtract(g, times(conj(softmax(x, axis)), total(g, [axis], keep=True)))]


def standardize_pullback(y, g, x):
    """(g - mean g - y mean(y g)) / deviation."""
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


def deviation_pullback(y, g, x):
    """standardize(x) g / n."""
    axes, correction = y["axes"], y["correction"]
    n = _count(x, axes)
    if not correction and not x.is_complex:
        return [scale(1 / n, times(standardize(x, axes, y["eps"]), spread(g, axes, x.shape)))]
    weight = spread(divide(real(g), y), axes, x.shape)
    return [scale(1 / (n - correction), times(_centred(x, axes), weight))]


def variance_pullback(y, g, x):
    """2 (x - mean x) g / n."""
    axes = y["axes"]
    weight = spread(real(g), axes, x.shape)
    return [scale(2 / (_count(x, axes) - y["correction"]), times(_centred(x, axes), weight))]


def norm_pullback(y, g, x):
    """x g / |x|."""
    return [times(x, spread(divide(real(g), y), y["axes"], x.shape))]


def running_sum(x, axis, reverse):
    """A running sum."""
    return along("cumsum", x, axis, reverse=reverse)


def cumprod_pullback(y, g, x):
    """The running sum of y g from behind, over x."""
    return [conj_divide(running_sum(times(conj(y), g), y["axis"], not y["reverse"]), x)]


def logcumsumexp_pullback(y, g, x):
    """e**x times the running sum of g e**-y from behind."""
    weights = conj(apply("exp", negate(y)))
    weighted = running_sum(times(g, weights), y["axis"], not y["reverse"])
    return [times(conj(apply("exp", x)), weighted)]


def _geometry(y):
    return {name: y[name] for name in ("stride", "padding", "dilation", "groups")}


def convolution_pullback(y, g, x, w):
    """The two adjoints of the convolution."""
    return [
        convolution_input(g, conj(w), x.shape, **_geometry(y)),
        convolution_weight(conj(x), g, w.shape, **_geometry(y)),
    ]


def convolution_input_pullback(y, u, g, w):
    """A convolution, and the correlation with what came in."""
    return [
        convolution(u, conj(w), **_geometry(y)),
        convolution_weight(u, conj(g), w.shape, **_geometry(y)),
    ]


def convolution_weight_pullback(y, u, x, g):
    """A transposed convolution, and a convolution."""
    return [
        convolution_input(conj(g), u, x.shape, **_geometry(y)),
        convolution(conj(x), u, **_geometry(y)),
    ]


def pooling_of(y):
    """The windows of a pooling."""
    return {name: y[name] for name in ("window", "stride", "padding", "dilation")}


def max_pool_pullback(y, g, x):
    """The cotangent goes back to where x is greatest."""
    return [pooled("max_unpool", (g, x), x.shape, pooling_of(y))]


def max_unpool_pullback(y, u, g, x):
    """What stands where x is greatest."""
    return [pooled("max_pick", (u, x), g.shape, pooling_of(y)), None]


def max_pick_pullback(y, g, u, x):
    """The cotangent goes back to where x is greatest."""
    return [pooled("max_unpool", (g, x), x.shape, pooling_of(y)), None]


def inverse_pullback(y, g, a):
    """-A^-H g A^-H."""
    h = adjoint_matrix(y)
    return [negate(matmul(matmul(h, g), h))]


def pseudoinverse_pullback(y, g, a):
    """-P^H g P^H + (I - A P) g^H P P^H + P^H P g^H (I - P A), of any constant rank.

    Golub and Pereyra, The differentiation of pseudo-inverses (1973).
    """
    h, gh = adjoint_matrix(y), adjoint_matrix(g)
    left, right = matmul(matmul(gh, y), h), matmul(matmul(h, y), gh)
    parts = [
        negate(matmul(matmul(h, g), h)),
        subtract(left, matmul(a, matmul(y, left))),
        subtract(right, matmul(matmul(right, y), a)),
    ]
    return [add(parts)]


def solve_pullback(y, g, a, b):
    """b: A^-H g; a: minus that times x^H."""
    right = solve(adjoint_matrix(a), g)
    return [
        unbroadcast(negate(matmul(right, adjoint_matrix(y))), a.shape),
        unbroadcast(right, b.shape),
    ]


def det_pullback(y, g, a):
    """g conj(det) A^-H."""
    weight = times(g, conj(y))
    return [_weighted(weight, adjoint_matrix(inverse(a)))]


def _weighted(weight: Expr, matrices: Expr) -> Expr:
    """One weight for each matrix of a batch."""
    batch = tuple(range(weight.rank))
    return product(
        [weight, matrices], [batch, range(matrices.rank)], range(matrices.rank), matrices.shape
    )


def logabsdet_pullback(y, g, a):
    """Re g A^-H."""
    return [_weighted(real(g), adjoint_matrix(inverse(a)))]


def sign_det_pullback(y, g, a):
    """i Im(conj(s) g) A^-H; nothing for real matrices."""
    if not a.is_complex:
        return [None]
    turn = scale(1j, imag(times(conj(y), g)))
    return [_weighted(turn, adjoint_matrix(inverse(a)))]


def hermitian(x: Expr) -> Expr:
    """(x + x^H) / 2."""
    return scale(0.5, plus(x, adjoint_matrix(x)))


def cholesky_pullback(y, g, a):
    """L^-H (half of the lower triangle of L^H g, made Hermitian) L^-1."""
    inner = half(matmul(adjoint_matrix(y), g))
    left = solve(adjoint_matrix(y), hermitian(inner))
    return [adjoint_matrix(solve(adjoint_matrix(y), adjoint_matrix(left)))]


def expm_pullback(y, g, a):
    """The upper right block of exp [[A^H, g], [0, A^H]]."""
    n = a.shape[-1]
    h = adjoint_matrix(a)
    axis = a.rank - 1
    top = concatenate([h, g], axis)
    bottom = concatenate([zeros(h.shape), h], axis)
    block = concatenate([top, bottom], axis - 1)
    start, limit = [0] * a.rank, list(block.shape)
    start[-1], limit[-2] = n, n
    return [cut(expr("expm", (block,), block.shape, block.kind), start, limit)]


def gaps_pullback(y, g, x, w):
    """x: the same of g; w: what its columns lack of its rows, of z = Re(y* g) / (w_j - w_i)."""
    z = gaps(real(times(conj(y), g)), w)
    return [gaps(g, w), subtract(total(z, [z.rank - 1]), total(z, [z.rank - 2]))]


def eigh_pullback(outputs, cotangents, a):
    """V (diag w_bar + (V^H V_bar) / (w_j - w_i)) V^H, made Hermitian."""
    (w, v), (dw, dv) = outputs, cotangents
    h = adjoint_matrix(v)
    parts = diagonal_matrix(dw), gaps(matmul(h, dv), w)
    return [hermitian(add([matmul(matmul(v, part), h) for part in parts]))]


def _skew(x):
    return subtract(x, adjoint_matrix(x))


def svd_pullback(outputs, cotangents, a):
    """Giles, Collected matrix derivative results (2008); for real, distinct singular values."""
    (u, s, v), (du, ds, dv) = outputs, cotangents
    if a.is_complex and not (is_zero(du) and is_zero(dv)):
        raise GradtoolsError(
            "formula: the singular vectors of a complex matrix have no derivative of their own "
            "(their phases are free); use the singular values alone, or eigh of A^H A"
        )
    vh = adjoint_matrix(v)
    squares = power(s, 2)
    row = spread(s, [s.rank - 1], (*s.shape, s.shape[-1]))
    column = spread(s, [s.rank], (*s.shape, s.shape[-1]))
    left = times(gaps(_skew(matmul(adjoint_matrix(u), du)), squares), row)
    right = times(column, gaps(_skew(matmul(vh, dv)), squares))
    found = [matmul(matmul(u, part), vh) for part in (diagonal_matrix(ds), left, right)]
    inverse_s = diagonal_matrix(power(s, -1))
    if a.shape[-2] > a.shape[-1]:
        found.append(matmul(matmul(_reject(u, du), inverse_s), vh))
    if a.shape[-2] < a.shape[-1]:
        found.append(matmul(matmul(u, inverse_s), adjoint_matrix(_reject(v, dv))))
    return [add(found)]


def _reject(u, g):
    """What of g is orthogonal to the columns of u."""
    return subtract(g, matmul(u, matmul(adjoint_matrix(u), g)))


def qr_pullback(outputs, cotangents, a):
    """(Q_bar + Q (h + h^H)) R^-H, h the lower half of R R_bar^H - Q_bar^H Q."""
    (q, r), (dq, dr) = outputs, cotangents
    m = subtract(matmul(r, adjoint_matrix(dr)), matmul(adjoint_matrix(dq), q))
    lower = half(m)
    inner = plus(dq, matmul(q, plus(lower, adjoint_matrix(lower))))
    return [adjoint_matrix(solve(r, adjoint_matrix(inner)))]


def _nothing(y, g, *args):
    return [None] * len(args)


def linear(back):
    """The pullback of a linear operation of its first argument, the others being integers."""
    return lambda y, g, x, *rest: [back(y, g, x, *rest)] + [None] * len(rest)
