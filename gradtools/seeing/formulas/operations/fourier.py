"""Fourier transforms, on one transform without a factor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import apply, array, real
from gradtools.seeing.formulas.expressions import COMPLEX, Expr
from gradtools.seeing.formulas.operations.entering import lowers, operation, tie_same, word
from gradtools.seeing.formulas.operations.reductions import all_axes
from gradtools.seeing.formulas.operations.slicing import pad, span

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import ExpressionWriter


def _fourier_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """The sum of x e**(sign 2 pi i jk/n)."""
    axes = y["axes"]
    if y["sign"] < 0:
        return np.fft.fftn(x, axes=axes)
    return np.fft.ifftn(x, axes=axes, norm="forward")


def _fourier_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    a = x.args[0]
    below = w.axis_names(a, x["axes"]) if len(x["axes"]) < a.rank else ""
    w.note("ℱ: the discrete Fourier transform without a factor; ℱᴴ: its adjoint, n ℱ⁻¹")
    name, latex = ("ℱ", r"\mathcal{F}") if x["sign"] < 0 else ("ℱᴴ", r"\mathcal{F}^{H}")
    return ts.function(name, [w.whole(a)], below, latex)


operation(
    "fourier",
    _fourier_value,
    lambda y, g, x: [_fourier(g, y["axes"], -y["sign"])],
    result=lambda x, **_: (x.shape, COMPLEX),
    form=_fourier_form,
    ties=tie_same,
)


def _fourier(x: Expr, axes: Sequence[int], sign: int) -> Expr:
    """The sum of x e**(sign 2 pi i jk/n), without a factor."""
    return apply("fourier", x, axes=tuple(sorted(axes)), sign=sign)


def _factor(n: int, norm: str | None, forward: bool) -> float:
    if norm == "ortho":
        return 1 / sqrt(n)
    divided = forward == (norm == "forward")
    return 1 / n if divided else 1.0


def _transform(x: Expr, axes: Any, norm: str | None, forward: bool) -> Expr:
    axes = all_axes(x, axes)
    n = prod(x.shape[a] for a in axes)
    result = _fourier(x, axes, -1 if forward else 1)
    return _factor(n, norm, forward) * result


# norm in "backward" (default), "ortho", "forward".
word("fft", lambda x, *, axes=None, norm=None: _transform(x, axes, norm, True))
word("ifft", lambda x, *, axes=None, norm=None: _transform(x, axes, norm, False))


@lowers("rfft")
def _rfft(x: Expr, *, axes: Any = None, norm: str | None = None) -> Expr:
    """Of real x; the last of axes is halved."""
    axes = all_axes(x, axes)
    spectrum = _transform(x, axes, norm, True)
    return span(spectrum, axes[-1], 0, x.shape[axes[-1]] // 2 + 1)


def _resized(x: Expr, axis: int, size: int) -> Expr:
    """Cut or padded with zeros at the end."""
    x = span(x, axis, 0, min(x.shape[axis], size))
    high = [size - n if a == axis else 0 for a, n in enumerate(x.shape)]
    return pad(x, [0] * x.rank, high)


@lowers("irfft")
def _irfft(x: Expr, *, axes: Any = None, length: int, norm: str | None = None) -> Expr:
    """Inverse of rfft; length of the last of axes."""
    axes = all_axes(x, axes)
    last = axes[-1]
    used = length // 2 + 1
    x = _resized(x, last, used)
    weights = np.full(used, 2.0)
    weights[0] = 1.0
    if length % 2 == 0:
        weights[-1] = 1.0
    shape = [used if a == last else 1 for a in range(x.rank)]
    weighted = x * array(weights.reshape(shape))
    n = length * prod(x.shape[a] for a in axes[:-1])
    result = _fourier(_resized(weighted, last, length), axes, 1)
    return _factor(n, norm, False) * real(result)
