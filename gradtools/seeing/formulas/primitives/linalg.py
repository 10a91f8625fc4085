"""Linear algebra and the Fourier transform."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas.algebra import (
    add,
    adjoint_matrix,
    conj,
    contracts,
    imag,
    is_zero,
    matmul,
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
from gradtools.seeing.formulas.constructors import (
    concatenate,
    cut,
    diagonal_matrix,
    fourier,
    gaps,
    half,
    inverse,
    solve,
    unbroadcast,
)
from gradtools.seeing.formulas.expressions import Expr, expr
from gradtools.seeing.formulas.primitives.record import Primitive, tie_same
from gradtools.seeing.formulas.typesetting import (
    POWER,
    PRODUCT,
    SUM,
    Written,
    function,
    join,
    superscript,
)

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

# --- values, in NumPy


def _symmetrised(a):
    """(a + a^H) / 2."""
    return (a + np.conj(np.swapaxes(a, -1, -2))) / 2


def _pseudoinverse(y, a):
    """The Moore-Penrose inverse; singular values at rounding are zero, as in the frameworks."""
    return np.linalg.pinv(a, rcond=max(a.shape[-2:]) * np.finfo(a.dtype).eps)


def _half(y, x):
    """The lower triangle with _half of the diagonal."""
    return np.tril(x) - x * np.eye(x.shape[-1]) / 2


def _gaps(y, x, w):
    """Off the diagonal x_ij / (w_j - w_i)."""
    eye = np.eye(w.shape[-1])
    distance = w[..., None, :] - w[..., :, None]
    return x * (1 - eye) / (distance + eye)


def _expm(a):
    """The matrix exponential: a Taylor series of the scaled matrix, squared back."""
    size = np.abs(a).sum(-1).max() if a.size else 0.0
    halvings = max(0, int(np.ceil(np.log2(size))) + 3) if size > 0 else 0
    small = a / 2**halvings
    term = np.broadcast_to(np.eye(a.shape[-1]), a.shape).astype(a.dtype)
    result = term.copy()
    for k in range(1, 20):
        term = term @ small / k
        result = result + term
    for _ in range(halvings):
        result = result @ result
    return result


def _svd(a):
    """The thin factors u, s and v, so that a = u diag(s) v^H."""
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    return u, s, vh.conj().swapaxes(-1, -2)


def _fourier(y, x):
    """The sum of x e**(sign 2 pi i jk/n)."""
    axes = y["axes"]
    if y["sign"] < 0:
        return np.fft.fftn(x, axes=axes)
    return np.fft.ifftn(x, axes=axes, norm="forward")


# --- cotangents of the arguments


def _weighted(weight: Expr, matrices: Expr) -> Expr:
    """One weight for each matrix of a batch."""
    batch = tuple(range(weight.rank))
    return product(
        [weight, matrices], [batch, range(matrices.rank)], range(matrices.rank), matrices.shape
    )


def _hermitian(x: Expr) -> Expr:
    """(x + x^H) / 2."""
    return scale(0.5, plus(x, adjoint_matrix(x)))


def _skew(x):
    return subtract(x, adjoint_matrix(x))


def _reject(u, g):
    """What of g is orthogonal to the columns of u."""
    return subtract(g, matmul(u, matmul(adjoint_matrix(u), g)))


def _gaps_pullback(y, g, x, w):
    """x: the same of g; w: what its columns lack of its rows, of z = Re(y* g) / (w_j - w_i)."""
    z = gaps(real(times(conj(y), g)), w)
    return [gaps(g, w), subtract(total(z, [z.rank - 1]), total(z, [z.rank - 2]))]


def _sign_det_pullback(y, g, a):
    """i Im(conj(s) g) A^-H; nothing for real matrices."""
    if not a.is_complex:
        return [None]
    turn = scale(1j, imag(times(conj(y), g)))
    return [_weighted(turn, adjoint_matrix(inverse(a)))]


def _inverse_pullback(y, g, a):
    """-A^-H g A^-H."""
    h = adjoint_matrix(y)
    return [negate(matmul(matmul(h, g), h))]


def _pseudoinverse_pullback(y, g, a):
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


def _solve_pullback(y, g, a, b):
    """b: A^-H g; a: minus that times x^H."""
    right = solve(adjoint_matrix(a), g)
    return [
        unbroadcast(negate(matmul(right, adjoint_matrix(y))), a.shape),
        unbroadcast(right, b.shape),
    ]


def _cholesky_pullback(y, g, a):
    """L^-H (half of the lower triangle of L^H g, made Hermitian) L^-1."""
    inner = half(matmul(adjoint_matrix(y), g))
    left = solve(adjoint_matrix(y), _hermitian(inner))
    return [adjoint_matrix(solve(adjoint_matrix(y), adjoint_matrix(left)))]


def _expm_pullback(y, g, a):
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


def _eigh_pullback(outputs, cotangents, a):
    """V (diag w_bar + (V^H V_bar) / (w_j - w_i)) V^H, made Hermitian."""
    (w, v), (dw, dv) = outputs, cotangents
    h = adjoint_matrix(v)
    parts = diagonal_matrix(dw), gaps(matmul(h, dv), w)
    return [_hermitian(add([matmul(matmul(v, part), h) for part in parts]))]


def _svd_pullback(outputs, cotangents, a):
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
    result = [matmul(matmul(u, part), vh) for part in (diagonal_matrix(ds), left, right)]
    inverse_s = diagonal_matrix(power(s, -1))
    if a.shape[-2] > a.shape[-1]:
        result.append(matmul(matmul(_reject(u, du), inverse_s), vh))
    if a.shape[-2] < a.shape[-1]:
        result.append(matmul(matmul(u, inverse_s), adjoint_matrix(_reject(v, dv))))
    return [add(result)]


def _qr_pullback(outputs, cotangents, a):
    """(Q_bar + Q (h + h^H)) R^-H, h the lower half of R R_bar^H - Q_bar^H Q."""
    (q, r), (dq, dr) = outputs, cotangents
    m = subtract(matmul(r, adjoint_matrix(dr)), matmul(adjoint_matrix(dq), q))
    lower = half(m)
    inner = plus(dq, matmul(q, plus(lower, adjoint_matrix(lower))))
    return [adjoint_matrix(solve(r, adjoint_matrix(inner)))]


# --- notation


def _half_form(w: ExpressionWriter, x: Expr) -> Written:
    w.note("half(X): the lower triangle of X with half of its diagonal (Murray 2016, for Cholesky)")
    return function("half", [w.whole(x.args[0])])


def _gaps_form(w: ExpressionWriter, x: Expr) -> Written:
    w.note("gaps(X; λ): Xᵢⱼ / (λⱼ - λᵢ), and 0 on the diagonal (Giles 2008, for eigenvectors)")
    return function("gaps", [join([w.whole(a) for a in x.args], "; ", "; ", SUM)])


def _logabsdet_form(w: ExpressionWriter, x: Expr) -> Written:
    a = w.whole(x.args[0]).at(POWER)
    return Written(f"log |det {a.text}|", rf"\log\left|\det {a.latex}\right|", POWER)


def _pseudoinverse_form(w: ExpressionWriter, x: Expr) -> Written:
    w.note("A⁺: the Moore-Penrose inverse; its derivative is that of a constant rank")
    return superscript(w.whole(x.args[0]), "⁺", "+")


def _inverse_of(w: ExpressionWriter, a: Expr) -> Written:
    """The inverse of a matrix; of a transpose it is A^-T, of a conjugate transpose A^-H."""
    turned = _transposed_leaf(a) if a not in w.names else None
    if turned is None:
        return superscript(w.whole(a), "⁻¹", "-1")
    if turned.op == "conj":
        return superscript(w.whole(turned.args[0]), "⁻ᴴ", "-H")
    return superscript(w.whole(turned), "⁻ᵀ", r"-\top")


def _transposed_leaf(a: Expr) -> Expr | None:
    if a.op != "einsum" or len(a.args) != 1 or a["coefficient"] != 1 or contracts(a):
        return None
    n = a.rank
    expected = (*range(n - 2), n - 1, n - 2)
    return a.args[0] if a["labels"][0] == expected else None


def _solve_form(w: ExpressionWriter, x: Expr) -> Written:
    a, b = x.args
    return join([_inverse_of(w, a), w.whole(b).at(PRODUCT)], " ", " ", PRODUCT)


_PARTS = {
    "eigh": ("eigenvalues", "eigenvectors"),
    "svd": ("left singular vectors", "singular values", "right singular vectors"),
    "qr": ("Q", "R"),
}


def _decomposition_form(w: ExpressionWriter, x: Expr) -> Written:
    inner = w.whole(x.args[0])
    part = _PARTS[x.op][x["output"]]
    return Written(f"{part} of {inner.text}", rf"\text{{{part} of }} {inner.latex}", SUM)


def _fourier_form(w: ExpressionWriter, x: Expr) -> Written:
    a = x.args[0]
    below = w.axis_names(a, x["axes"]) if len(x["axes"]) < a.rank else ""
    w.note("ℱ: the discrete Fourier transform without a factor; ℱᴴ: its adjoint, n ℱ⁻¹")
    name, latex = ("ℱ", r"\mathcal{F}") if x["sign"] < 0 else ("ℱᴴ", r"\mathcal{F}^{H}")
    return function(name, [w.whole(a)], below, latex)


# --- axes that are the same


def _tie_solve(axes: Axes, y: Expr) -> None:
    a, b = y.args
    axes.tie((y, y.rank - 2), (a, a.rank - 1))
    axes.tie((b, b.rank - 2), (a, a.rank - 2))
    axes.tie((y, y.rank - 1), (b, b.rank - 1))


def _tie_inverse(axes: Axes, y: Expr) -> None:
    (a,) = y.args
    axes.tie((y, y.rank - 2), (a, a.rank - 1))
    axes.tie((y, y.rank - 1), (a, a.rank - 2))


LINALG: dict[str, Primitive] = {
    "half": Primitive(_half, lambda y, g, x: [half(g)], form=_half_form, ties=tie_same),
    "gaps": Primitive(_gaps, _gaps_pullback, form=_gaps_form, ties=tie_same),
    "det": Primitive(
        lambda y, a: np.linalg.det(a),
        lambda y, g, a: [_weighted(times(g, conj(y)), adjoint_matrix(inverse(a)))],
        form=lambda w, x: function("det", [w.whole(x.args[0])]),
    ),
    "logabsdet": Primitive(
        lambda y, a: np.linalg.slogdet(a)[1],
        lambda y, g, a: [_weighted(real(g), adjoint_matrix(inverse(a)))],
        form=_logabsdet_form,
    ),
    "sign_det": Primitive(
        lambda y, a: np.linalg.slogdet(a)[0],
        _sign_det_pullback,
        form=lambda w, x: function("sgn det", [w.whole(x.args[0])]),
    ),
    "inverse": Primitive(
        lambda y, a: np.linalg.inv(a),
        _inverse_pullback,
        form=lambda w, x: _inverse_of(w, x.args[0]),
        ties=_tie_inverse,
    ),
    "pinv": Primitive(
        _pseudoinverse, _pseudoinverse_pullback, form=_pseudoinverse_form, ties=_tie_inverse
    ),
    "solve": Primitive(
        lambda y, a, b: np.linalg.solve(a, b), _solve_pullback, form=_solve_form, ties=_tie_solve
    ),
    "cholesky": Primitive(
        lambda y, a: np.linalg.cholesky(_symmetrised(a)), _cholesky_pullback, ties=tie_same
    ),
    "expm": Primitive(lambda y, a: _expm(a), _expm_pullback, ties=tie_same),
    "eigh": Primitive(
        lambda y, a: tuple(np.linalg.eigh(_symmetrised(a))),
        _eigh_pullback,
        form=_decomposition_form,
    ),
    "svd": Primitive(lambda y, a: _svd(a), _svd_pullback, form=_decomposition_form),
    "qr": Primitive(lambda y, a: tuple(np.linalg.qr(a)), _qr_pullback, form=_decomposition_form),
    "fourier": Primitive(
        _fourier,
        lambda y, g, x: [fourier(g, y["axes"], -y["sign"])],
        form=_fourier_form,
        ties=tie_same,
    ),
}
