"""Lowering of linear algebra and Fourier transforms to primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod, sqrt
from typing import Any

import numpy as np

from gradtools.seeing.formulas import constructors
from gradtools.seeing.formulas.algebra import (
    adjoint_matrix,
    array,
    broadcast,
    conj,
    matmul,
    plus,
    real,
    reshape,
    scale,
    swap,
    times,
    unsqueeze,
)
from gradtools.seeing.formulas.expressions import REAL, Expr, expr
from gradtools.seeing.formulas.vocabulary.arrays import all_axes
from gradtools.seeing.formulas.vocabulary.record import words

Lowering = Callable[..., Any]


def _per_matrix(name: str, a: Expr, kind: str | None = None) -> Expr:
    return expr(name, (a,), a.shape[:-2], kind or a.kind)


def _logabsdet(a: Expr) -> Expr:
    return _per_matrix("logabsdet", a, REAL)


def _solve(a: Expr, b: Expr, left: bool = True) -> Expr:
    if b.rank == a.rank - 1 and (b.rank == 1 or b.shape == a.shape[:-1]):
        solved = _solve(a, unsqueeze(b, [b.rank]), left)
        return reshape(solved, solved.shape[:-1])
    return constructors.solve(a, b) if left else swap(constructors.solve(swap(a), swap(b)))


def _product_of(factor: Expr, upper: bool) -> Expr:
    """The matrix whose Cholesky factor this is."""
    h = adjoint_matrix(factor)
    return matmul(h, factor) if upper else matmul(factor, h)


def _triangular_solve(
    a: Expr,
    b: Expr,
    lower: bool = True,
    unit: bool = False,
    transpose: bool = False,
    conjugate: bool = False,
    left: bool = True,
) -> Expr:
    offset = (-1 if lower else 1) if unit else 0
    a = constructors.triangle(a, not lower, offset)
    if unit:
        a = plus(a, broadcast(array(np.eye(a.shape[-1])), a.shape))
    a = swap(a) if transpose else a
    a = conj(a) if conjugate else a
    return _solve(a, b, left)


def _cholesky(a: Expr, upper: bool = False) -> Expr:
    lower = expr("cholesky", (a,), a.shape, a.kind)
    return adjoint_matrix(lower) if upper else lower


def _matrix_power(a: Expr, exponent: int) -> Expr:
    if exponent < 0:
        return _matrix_power(constructors.inverse(a), -exponent)
    if exponent == 0:
        return broadcast(array(np.eye(a.shape[-1])), a.shape)
    half = _matrix_power(a, exponent // 2) if exponent > 1 else None
    if half is None:
        return a
    square = matmul(half, half)
    return matmul(square, a) if exponent % 2 else square


# Fourier transforms, on one transform without a factor.


def _factor(n: int, norm: str | None, forward: bool) -> float:
    if norm == "ortho":
        return 1 / sqrt(n)
    divided = forward == (norm == "forward")
    return 1 / n if divided else 1.0


def _transform(x: Expr, axes: Any, norm: str | None, forward: bool) -> Expr:
    axes = all_axes(x, axes)
    n = prod(x.shape[a] for a in axes)
    result = constructors.fourier(x, axes, -1 if forward else 1)
    return scale(_factor(n, norm, forward), result)


def _rfft(x: Expr, axes: Any = None, norm: str | None = None) -> Expr:
    axes = all_axes(x, axes)
    spectrum = _transform(x, axes, norm, True)
    limit = list(spectrum.shape)
    limit[axes[-1]] = x.shape[axes[-1]] // 2 + 1
    return constructors.cut(spectrum, [0] * x.rank, limit)


def _irfft(x: Expr, axes: Any = None, length: int | None = None, norm: str | None = None) -> Expr:
    """The real part, with every frequency twice that has a mirror image."""
    axes = all_axes(x, axes)
    last = axes[-1]
    length = 2 * (x.shape[last] - 1) if length is None else length
    used = length // 2 + 1
    x = _resized(x, last, used)
    weights = np.full(used, 2.0)
    weights[0] = 1.0
    if length % 2 == 0:
        weights[-1] = 1.0
    shape = [used if a == last else 1 for a in range(x.rank)]
    weighted = times(x, array(weights.reshape(shape)))
    n = length * prod(x.shape[a] for a in axes[:-1])
    result = constructors.fourier(_resized(weighted, last, length), axes, 1)
    return scale(_factor(n, norm, False), real(result))


def _resized(x: Expr, axis: int, size: int) -> Expr:
    """Cut or padded with zeros at the end."""
    limit = [min(n, size) if a == axis else n for a, n in enumerate(x.shape)]
    x = constructors.cut(x, [0] * x.rank, limit)
    high = [size - n if a == axis else 0 for a, n in enumerate(x.shape)]
    return constructors.pad(x, [0] * x.rank, high)


def _decomposition(name: str) -> Callable[[Expr], Sequence[Expr]]:
    return lambda a: constructors.decomposed(name, a)


def _svd(a: Expr) -> list[Expr]:
    left, values, right = constructors.decomposed("svd", a)
    return [left, values, adjoint_matrix(right)]


_WORDS = """
det           | a       |                | determinant of the last two axes
slogdet       | a       |                | sign and log abs det | sign logabsdet
logdet        | a       |                | log det
inverse       | a       |                | matrix inverse
solve         | a b     | left?          | a^-1 b of vectors or matrices; left = False: b a^-1
triangular_solve | a b | lower? unit? transpose? conjugate? left? |
    a^-1 b of the named triangle; transposed or conjugated; left = False: b a^-1
cholesky      | a       | upper?         | l with l l^H = a (or u with u^H u = a)
cholesky_solve | b l    | upper?         | (l l^H)^-1 b, l lower; or (l^H l)^-1 b
cholesky_inverse | l    | upper?         | (l l^H)^-1, or (l^H l)^-1
matrix_power  | a       | exponent       | an integer
expm          | a       |                | matrix exponential
pinv          | a       |                | pseudo-inverse
eigh          | a       |                | of (a + a^H)/2, ascending | values vectors
svd           | a       |                | thin: a = u diag(s) vh | u s vh
qr            | a       |                | reduced, as many rows as columns or more | q r
fft           | x       | axes? norm?     | norm in "backward" (default), "ortho", "forward"
ifft          | x       | axes? norm?     | inverse of fft
rfft          | x       | axes? norm?     | of real x; the last of axes is halved
irfft         | x       | axes? length norm?  | inverse of rfft; length of the last of axes
"""

LINALG = words(
    _WORDS,
    {
        "det": lambda a: _per_matrix("det", a),
        "slogdet": lambda a: [_per_matrix("sign_det", a), _logabsdet(a)],
        "logdet": _logabsdet,
        "inverse": constructors.inverse,
        "solve": _solve,
        "cholesky_solve": lambda b, l, upper=False: constructors.solve(_product_of(l, upper), b),
        "cholesky_inverse": lambda l, upper=False: constructors.inverse(_product_of(l, upper)),
        "triangular_solve": _triangular_solve,
        "cholesky": _cholesky,
        "matrix_power": _matrix_power,
        "expm": lambda a: expr("expm", (a,), a.shape, a.kind),
        "pinv": constructors.pseudoinverse,
        "eigh": _decomposition("eigh"),
        "svd": _svd,
        "qr": _decomposition("qr"),
        "fft": lambda x, axes=None, norm=None: _transform(x, axes, norm, True),
        "ifft": lambda x, axes=None, norm=None: _transform(x, axes, norm, False),
        "rfft": _rfft,
        "irfft": _irfft,
    },
)
