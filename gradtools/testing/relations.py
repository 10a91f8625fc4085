"""How one of two arrays that should be equal differs: zero, conjugate, sign, factor, layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gradtools.testing.report import entry_errors, largest, widened

Cause = tuple[str, str]  # in a few words, and the evidence or advice
_NEAR = 1e-6  # the relative error at which a factor is 1, or a whole number


def relation(
    first: np.ndarray,
    second: np.ndarray,
    names: Sequence[str],
    order: int = 1,
    near: float = 1e-4,
    single: bool = True,
) -> Cause | None:
    """The first relation of two arrays that holds for all entries where both are finite, or None.

    Args:
        first: The first side's array.
        second: The second side's.
        names: The names of the sides.
        order: The order of the derivative.
        near: The greatest relative error of a relation; a hundredth of the arrays' difference, if
            that is less.
        single: Whether constant arrays, of which any two are multiples, may differ by a factor
            that is not a whole number.

    Example:
        >>> relation(np.array([1.0, 2.0]), np.array([3.0, 6.0]), ("mine", "yours"))[0]
        'constant factor 0.333333'
    """
    a, b = widened(first), widened(second)
    if a.shape != b.shape:
        return None
    known = np.isfinite(a) & np.isfinite(b)
    if not known.all():
        a, b = a[known], b[known]
    if not (size := max(largest(a), largest(b))):
        return None
    near = min(near, largest(a - b) / size / 100)
    return (
        _zero(a, b, names, order)
        or _conjugate_or_sign(a, b, near)
        or _factor(a, b, names, near, single)
        or _layout(a, b, near)
        or _zero_in_places(a, b, names, order, near)
    )


def equal(a: Any, b: Any, near: float) -> bool:
    """Whether two arrays have equal shapes and agree to a relative error."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool((entry_errors(a, b, max(near, 1e-300), 0.0) <= 1).all())


def _both_ways(a: Any, b: Any, names: Sequence[str]) -> Iterator[tuple[Any, Any, str]]:
    """Each array as the wrong one, with its side's name."""
    yield a, b, names[0]
    yield b, a, names[1]


def _zero(a: Any, b: Any, names: Sequence[str], order: int) -> Cause | None:
    for x, y, name in _both_ways(a, b, names):
        if not x.any() and y.any():
            what = "stopped gradient" if order else "zero"
            return f"{what} in {name}", f"It is exactly zero in {name}."
    return None


def _zero_in_places(a: Any, b: Any, names: Sequence[str], order: int, near: float) -> Cause | None:
    for x, y, name in _both_ways(a, b, names):
        lost = (x == 0) & (y != 0)
        if lost.any() and (x != 0).any() and equal(x, np.where(lost, 0, y), near):
            what = "stopped gradient" if order else "zero"
            count = f"{int(lost.sum())} of {lost.size} entries"
            return f"{what} in places in {name}", f"{count} are zero, the others agree."
    return None


def _conjugate_or_sign(a: Any, b: Any, near: float) -> Cause | None:
    if a.dtype.kind == "c" and b.imag.any() and equal(a, b.conj(), near):
        return "conjugate", "One side conjugates: another convention of a complex derivative."
    return ("sign", "One is the negative of the other.") if equal(a, -b, near) else None


def _factor(a: Any, b: Any, names: Sequence[str], near: float, single: bool) -> Cause | None:
    size = float(np.vdot(b, b).real)
    if not 0 < size < math.inf:
        return None
    ratio = complex(np.vdot(b, a) / size)
    if ratio == 0 or not np.isfinite(ratio) or not equal(a, ratio * b, near):
        return None
    modulus = max(abs(ratio), 1 / abs(ratio))
    is_whole = abs(modulus - round(modulus)) < _NEAR * modulus
    is_constant = bool((a == a.reshape(-1)[:1]).all())
    if abs(ratio - 1) <= max(near, _NEAR) or (is_constant and not is_whole and not single):
        return None
    text = _factor_text(ratio)
    return (
        f"constant factor {text}",
        f"{names[0]} is {text} times {names[1]}: a sum on one side and a mean on the other, say.",
    )


def _factor_text(ratio: complex) -> str:
    if abs(ratio.imag) < 1e-9 * abs(ratio):
        return f"{ratio.real:.6g}"
    if abs(ratio.real) < 1e-9 * abs(ratio):
        return f"{ratio.imag:.4g}i"
    return f"{ratio.real:.4g}{ratio.imag:+.4g}i"


def _layout(a: Any, b: Any, near: float) -> Cause | None:
    for i in range(b.ndim):
        for j in range(i + 1, b.ndim):
            alike = b.shape[i] == b.shape[j] > 1
            if alike and equal(a, b.swapaxes(i, j), near):
                return "transposed layout", f"Axes {i} and {j} are exchanged."
    if b.ndim > 1 and b.shape != b.T.shape:
        for other in (b.T, b.reshape(b.shape[::-1]).T):
            if equal(a, other.reshape(b.shape), near):
                return "transposed layout", "It was reshaped where it should be transposed."
    return None
