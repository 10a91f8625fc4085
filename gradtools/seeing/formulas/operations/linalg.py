"""Linear algebra: inverses, determinants, decompositions of the last two axes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    add,
    adjoint_matrix,
    apply,
    array,
    broadcast,
    broadcast_shape,
    conj,
    contracts,
    diagonal_matrix,
    imag,
    is_zero,
    product,
    real,
    reshape,
    spread,
    swap,
    total,
    unbroadcast,
    unsqueeze,
    zeros,
)
from gradtools.seeing.formulas.expressions import REAL, Expr, widest
from gradtools.seeing.formulas.operation_record import Cotangents, Outputs
from gradtools.seeing.formulas.operations.entering import called, lowers, operation, tie_same, word
from gradtools.seeing.formulas.operations.slicing import concatenate, cut, triangle

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter


# Solving.


def _inverse_of(w: ExpressionWriter, a: Expr) -> ts.Written:
    """The inverse of a matrix; of a transpose it is A^-T, of a conjugate transpose A^-H."""
    turned = _transposed_leaf(a) if a not in w.names else None
    if turned is None:
        return ts.superscript(w.whole(a), "⁻¹", "-1")
    if turned.op == "conj":
        return ts.superscript(w.whole(turned.args[0]), "⁻ᴴ", "-H")
    return ts.superscript(w.whole(turned), "⁻ᵀ", r"-\top")


def _transposed_leaf(a: Expr) -> Expr | None:
    if a.op != "einsum" or len(a.args) != 1 or a["coefficient"] != 1 or contracts(a):
        return None
    n = a.rank
    expected = (*range(n - 2), n - 1, n - 2)
    return a.args[0] if a["labels"][0] == expected else None


def _tie_inverse(axes: Axes, y: Expr) -> None:
    (a,) = y.args
    axes.tie((y, y.rank - 2), (a, a.rank - 1))
    axes.tie((y, y.rank - 1), (a, a.rank - 2))


@lowers(
    "inverse",
    operation,
    lambda y, a: np.linalg.inv(a),
    lambda y, g, a: [-(adjoint_matrix(y) @ g @ adjoint_matrix(y))],
    form=lambda w, x: _inverse_of(w, x.args[0]),
    ties=_tie_inverse,
)
def inverse(a: Expr) -> Expr:
    """Matrix inverse."""
    return a.args[0] if a.op == "inverse" else apply("inverse", a)


def _pseudoinverse(y: Expr, a: np.ndarray) -> np.ndarray:
    """The Moore-Penrose inverse; singular values at rounding are zero, as in the frameworks."""
    return np.linalg.pinv(a, rcond=max(a.shape[-2:]) * np.finfo(a.dtype).eps)


def _pseudoinverse_pullback(y: Expr, g: Expr, a: Expr) -> Cotangents:
    """-P^H g P^H + (I - A P) g^H P P^H + P^H P g^H (I - P A), of any constant rank.

    Golub and Pereyra, The differentiation of pseudo-inverses (1973).
    """
    h, gh = adjoint_matrix(y), adjoint_matrix(g)
    left, right = gh @ y @ h, h @ y @ gh
    parts = [-(h @ g @ h), left - a @ (y @ left), right - right @ y @ a]
    return [add(parts)]


def _pseudoinverse_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    w.note("A⁺: the Moore-Penrose inverse; its derivative is that of a constant rank")
    return ts.superscript(w.whole(x.args[0]), "⁺", "+")


operation(
    "pinv(a)",
    _pseudoinverse,
    _pseudoinverse_pullback,
    result=lambda a: ((*a.shape[:-2], a.shape[-1], a.shape[-2]), a.kind),
    form=_pseudoinverse_form,
    ties=_tie_inverse,
)


solve = partial(apply, "solve")


def _solution(a: Expr, b: Expr) -> tuple[Any, str]:
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
    return (*batch, *b.shape[-2:]), widest(a.kind, b.kind)


def _solve_pullback(y: Expr, g: Expr, a: Expr, b: Expr) -> Cotangents:
    """b: A^-H g; a: minus that times x^H."""
    right = solve(adjoint_matrix(a), g)
    return [unbroadcast(-(right @ adjoint_matrix(y)), a.shape), unbroadcast(right, b.shape)]


def _solve_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    a, b = x.args
    return ts.join([_inverse_of(w, a), w.whole(b).at(ts.PRODUCT)], " ", " ", ts.PRODUCT)


def _tie_solve(axes: Axes, y: Expr) -> None:
    a, b = y.args
    axes.tie((y, y.rank - 2), (a, a.rank - 1))
    axes.tie((b, b.rank - 2), (a, a.rank - 2))
    axes.tie((y, y.rank - 1), (b, b.rank - 1))


@lowers(
    "solve",
    operation,
    lambda y, a, b: np.linalg.solve(a, b),
    _solve_pullback,
    result=_solution,
    form=_solve_form,
    ties=_tie_solve,
)
def _solve(a: Expr, b: Expr, *, left: bool = True) -> Expr:
    """A^-1 b of vectors or matrices; left = False: b a^-1."""
    if b.rank == a.rank - 1 and (b.rank == 1 or b.shape == a.shape[:-1]):
        solved = _solve(a, unsqueeze(b, [b.rank]), left=left)
        return reshape(solved, solved.shape[:-1])
    return solve(a, b) if left else swap(solve(swap(a), swap(b)))


@lowers("triangular_solve")
def _triangular_solve(
    a: Expr,
    b: Expr,
    *,
    lower: bool = True,
    unit: bool = False,
    transpose: bool = False,
    conjugate: bool = False,
    left: bool = True,
) -> Expr:
    """A^-1 b of the named triangle; transposed or conjugated; left = False: b a^-1."""
    offset = (-1 if lower else 1) if unit else 0
    a = triangle(a, upper=not lower, offset=offset)
    if unit:
        a = a + broadcast(array(np.eye(a.shape[-1])), a.shape)
    a = swap(a) if transpose else a
    a = conj(a) if conjugate else a
    return _solve(a, b, left=left)


# Determinants.


def _weighted(weight: Expr, matrices: Expr) -> Expr:
    """One weight for each matrix of a batch."""
    batch = tuple(range(weight.rank))
    return product(
        [weight, matrices], [batch, range(matrices.rank)], range(matrices.rank), matrices.shape
    )


operation(
    "det(a)",
    lambda y, a: np.linalg.det(a),
    lambda y, g, a: [_weighted(g * conj(y), adjoint_matrix(inverse(a)))],
    result=lambda a: (a.shape[:-2], a.kind),
    form=called("det"),
)


def _logabsdet_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    a = w.whole(x.args[0]).at(ts.POWER)
    return ts.Written(f"log |det {a.text}|", rf"\log\left|\det {a.latex}\right|", ts.POWER)


operation(
    "logabsdet",
    lambda y, a: np.linalg.slogdet(a)[1],
    lambda y, g, a: [_weighted(real(g), adjoint_matrix(inverse(a)))],
    result=lambda a: (a.shape[:-2], REAL),
    form=_logabsdet_form,
)


def _sign_det_pullback(y: Expr, g: Expr, a: Expr) -> Cotangents:
    """i Im(conj(s) g) A^-H; nothing for real matrices."""
    if not a.is_complex:
        return [None]
    turn = 1j * imag(conj(y) * g)
    return [_weighted(turn, adjoint_matrix(inverse(a)))]


operation(
    "sign_det",
    lambda y, a: np.linalg.slogdet(a)[0],
    _sign_det_pullback,
    result=lambda a: (a.shape[:-2], a.kind),
    form=called("sgn det"),
)
word("logdet", lambda a: apply("logabsdet", a))
word("slogdet -> sign logabsdet", lambda a: [apply("sign_det", a), apply("logabsdet", a)])

# Functions of matrices.


@lowers("matrix_power")
def _matrix_power(a: Expr, *, exponent: int) -> Expr:
    """An integer."""
    if exponent < 0:
        return _matrix_power(inverse(a), exponent=-exponent)
    if exponent == 0:
        return broadcast(array(np.eye(a.shape[-1])), a.shape)
    if exponent == 1:
        return a
    half = _matrix_power(a, exponent=exponent // 2)
    square = half @ half
    return square @ a if exponent % 2 else square


def _expm(a: np.ndarray) -> np.ndarray:
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


def _expm_pullback(y: Expr, g: Expr, a: Expr) -> Cotangents:
    """The upper right block of exp [[A^H, g], [0, A^H]]."""
    n, h, axis = a.shape[-1], adjoint_matrix(a), a.rank - 1
    top, bottom = concatenate([h, g], axis), concatenate([zeros(h.shape), h], axis)
    block = concatenate([top, bottom], axis - 1)
    start, limit = [0] * a.rank, list(block.shape)
    start[-1], limit[-2] = n, n
    return [cut(apply("expm", block), start, limit)]


operation("expm(a)", lambda y, a: _expm(a), _expm_pullback, ties=tie_same)

# Decompositions.


def _symmetrised(a: np.ndarray) -> np.ndarray:
    """(a + a^H) / 2."""
    return (a + np.conj(np.swapaxes(a, -1, -2))) / 2


def _hermitian(x: Expr) -> Expr:
    """(x + x^H) / 2."""
    return 0.5 * (x + adjoint_matrix(x))


half = partial(apply, "half")
operation(
    "half",
    lambda y, x: np.tril(x) - x * np.eye(x.shape[-1]) / 2,
    lambda y, g, x: [half(g)],
    form=called(
        "half",
        "half(X): the lower triangle of X with half of its diagonal (Murray 2016, for Cholesky)",
    ),
    ties=tie_same,
)


def _cholesky_pullback(y: Expr, g: Expr, a: Expr) -> Cotangents:
    """L^-H (half of the lower triangle of L^H g, made Hermitian) L^-1."""
    inner = half(adjoint_matrix(y) @ g)
    left = solve(adjoint_matrix(y), _hermitian(inner))
    return [adjoint_matrix(solve(adjoint_matrix(y), adjoint_matrix(left)))]


@lowers(
    "cholesky",
    operation,
    lambda y, a: np.linalg.cholesky(_symmetrised(a)),
    _cholesky_pullback,
    ties=tie_same,
)
def _cholesky(a: Expr, *, upper: bool = False) -> Expr:
    """L with l l^H = a (or u with u^H u = a)."""
    lower = apply("cholesky", a)
    return adjoint_matrix(lower) if upper else lower


def _product_of(factor: Expr, upper: bool) -> Expr:
    """The matrix whose Cholesky factor this is."""
    h = adjoint_matrix(factor)
    return h @ factor if upper else factor @ h


word("cholesky_solve", lambda b, l, *, upper=False: solve(_product_of(l, upper), b))
word("cholesky_inverse", lambda l, *, upper=False: inverse(_product_of(l, upper)))


def _gaps_value(y: Expr, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Off the diagonal x_ij / (w_j - w_i)."""
    eye = np.eye(w.shape[-1])
    distance = w[..., None, :] - w[..., :, None]
    return x * (1 - eye) / (distance + eye)


def gaps(x: Expr, w: Expr) -> Expr:
    """The quotients x_ij / (w_j - w_i) off the diagonal of the last two axes, 0 on it."""
    return x if is_zero(x) else apply("gaps", x, w)


def _gaps_pullback(y: Expr, g: Expr, x: Expr, w: Expr) -> Cotangents:
    """x: the same of g; w: what its columns lack of its rows, of z = Re(y* g) / (w_j - w_i)."""
    z = gaps(real(conj(y) * g), w)
    return [gaps(g, w), total(z, [z.rank - 1]) - total(z, [z.rank - 2])]


def _gaps_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    w.note("gaps(X; λ): Xᵢⱼ / (λⱼ - λᵢ), and 0 on the diagonal (Giles 2008, for eigenvectors)")
    return ts.function("gaps", [ts.join([w.whole(a) for a in x.args], "; ", "; ", ts.SUM)])


operation("gaps", _gaps_value, _gaps_pullback, form=_gaps_form, ties=tie_same)


def _decomposition(
    said: str, evaluate: Any, pullback: Any, result: Any, parts: Any, **known: Any
) -> None:
    """Several factors of a matrix, each with its name."""

    def form(w: ExpressionWriter, x: Expr) -> ts.Written:
        inner, part = w.whole(x.args[0]), parts[x["output"]]
        return ts.Written(f"{part} of {inner.text}", rf"\text{{{part} of }} {inner.latex}", ts.SUM)

    operation(said, evaluate, pullback, result=result, form=form, **known)


def _columns(a: Expr, axis: int = -2) -> tuple[Any, str]:
    """As many orthogonal columns as there are, as long as this axis of a."""
    return (*a.shape[:-2], a.shape[axis], min(a.shape[-2:])), a.kind


def _values(a: Expr) -> tuple[Any, str]:
    return (*a.shape[:-2], min(a.shape[-2:])), REAL


def _eigh_pullback(outputs: Outputs, cotangents: Outputs, a: Expr) -> Cotangents:
    """V (diag w_bar + (V^H V_bar) / (w_j - w_i)) V^H, made Hermitian."""
    (w, v), (dw, dv) = outputs, cotangents
    h = adjoint_matrix(v)
    parts = diagonal_matrix(dw), gaps(h @ dv, w)
    return [_hermitian(add([v @ part @ h for part in parts]))]


# Of (a + a^H)/2, ascending.
_decomposition(
    "eigh(a) -> values vectors",
    lambda y, a: tuple(np.linalg.eigh(_symmetrised(a))),
    _eigh_pullback,
    lambda a: [_values(a), _columns(a)],
    ("eigenvalues", "eigenvectors"),
)


def _svd_value(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The thin factors u, s and v, so that a = u diag(s) v^H."""
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    return u, s, vh.conj().swapaxes(-1, -2)


def _skew(x: Expr) -> Expr:
    return x - adjoint_matrix(x)


def _reject(u: Expr, g: Expr) -> Expr:
    """What of g is orthogonal to the columns of u."""
    return g - u @ (adjoint_matrix(u) @ g)


def _svd_pullback(outputs: Outputs, cotangents: Outputs, a: Expr) -> Cotangents:
    """Giles, Collected matrix derivative results (2008); for real, distinct singular values."""
    (u, s, v), (du, ds, dv) = outputs, cotangents
    if a.is_complex and not (is_zero(du) and is_zero(dv)):
        raise GradtoolsError(
            "formula: the singular vectors of a complex matrix have no derivative of their own "
            "(their phases are free); use the singular values alone, or eigh of A^H A"
        )
    uh, vh = adjoint_matrix(u), adjoint_matrix(v)
    squares = s**2
    row = spread(s, [s.rank - 1], (*s.shape, s.shape[-1]))
    column = spread(s, [s.rank], (*s.shape, s.shape[-1]))
    left = gaps(_skew(uh @ du), squares) * row
    right = column * gaps(_skew(vh @ dv), squares)
    result = [u @ part @ vh for part in (diagonal_matrix(ds), left, right)]
    inverse_s = diagonal_matrix(s**-1)
    if a.shape[-2] > a.shape[-1]:
        result.append(_reject(u, du) @ inverse_s @ vh)
    if a.shape[-2] < a.shape[-1]:
        result.append(u @ inverse_s @ adjoint_matrix(_reject(v, dv)))
    return [add(result)]


@lowers(
    "svd -> u s vh",
    _decomposition,
    lambda y, a: _svd_value(a),
    _svd_pullback,
    lambda a: [_columns(a), _values(a), _columns(a, -1)],
    ("left singular vectors", "singular values", "right singular vectors"),
)
def _svd(a: Expr) -> list[Expr]:
    """Thin: a = u diag(s) vh."""
    left, values, right = apply("svd", a)
    return [left, values, adjoint_matrix(right)]


def _qr_pullback(outputs: Outputs, cotangents: Outputs, a: Expr) -> Cotangents:
    """(Q_bar + Q (h + h^H)) R^-H, h the lower half of R R_bar^H - Q_bar^H Q."""
    (q, r), (dq, dr) = outputs, cotangents
    m = r @ adjoint_matrix(dr) - adjoint_matrix(dq) @ q
    lower = half(m)
    inner = dq + q @ (lower + adjoint_matrix(lower))
    return [adjoint_matrix(solve(r, adjoint_matrix(inner)))]


# Reduced, of as many rows as columns or more.
_decomposition(
    "qr(a) -> q r",
    lambda y, a: tuple(np.linalg.qr(a)),
    _qr_pullback,
    lambda a: [_columns(a), ((*a.shape[:-2], min(a.shape[-2:]), a.shape[-1]), a.kind)],
    ("Q", "R"),
)
