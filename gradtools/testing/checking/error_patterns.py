"""Classifies a wrong derivative by its relation to the right one."""

from __future__ import annotations

import numpy as np

from gradtools.testing.diverging.patterns import ArrayPair
from gradtools.testing.report import widened


def pattern(analytic: np.ndarray, value: np.ndarray) -> str | None:
    """The relation of a wrong array to the right one in a few words; None if unknown."""
    a, b = widened(analytic), widened(value)
    if (~np.isfinite(a) & np.isfinite(b)).any():
        return "the derivative is not finite"
    if not np.isfinite(b).all():  # where both are infinite nothing differs
        a, b = a[np.isfinite(b)], b[np.isfinite(b)]
    largest = np.max(np.abs(b), initial=0.0)
    if not np.any(a) and largest:
        return "the derivative is zero: a gradient is stopped"
    if largest == 0 or a.shape != b.shape:
        return None
    ratio = np.vdot(b, a) / np.vdot(b, b)
    near = min(1e-4, abs(ratio - 1) / 100)
    fits = np.allclose(a, ratio * b, rtol=near, atol=near * largest)
    if fits and abs(ratio) > 1e-6 and near > 0:
        factor = ratio if abs(np.imag(ratio)) > 1e-4 * abs(ratio) else np.real(ratio)
        digits = 4 if abs(factor - 1) > 1e-3 else 6
        return "the sign" if abs(factor + 1) < 1e-4 else f"a constant factor {factor:.{digits}g}"
    if np.imag(b).any() and np.allclose(a, np.conj(b), rtol=1e-4, atol=1e-4 * largest):
        return "a conjugate"
    if a.ndim == 2 and a.shape[0] == a.shape[1] and np.allclose(a, b.T, atol=1e-4 * largest):
        return "transposed"
    return _in_places(a, b, largest)


def _in_places(a: np.ndarray, b: np.ndarray, largest: float) -> str | None:
    """A relation that concerns some entries: zeros, or entries at other places."""
    lost = (a == 0) & (np.abs(b) > 1e-4 * largest)
    if lost.any() and np.allclose(a, np.where(lost, 0, b), rtol=1e-4, atol=1e-4 * largest):
        return f"zero in places, {int(lost.sum())} of {lost.size} entries"
    moved = ArrayPair(a, b, 1e-4, ["analytic", "numeric"]).layout()
    return None if moved is None else f"{moved[0]}: {moved[1][0].lower()}{moved[1][1:].rstrip('.')}"
