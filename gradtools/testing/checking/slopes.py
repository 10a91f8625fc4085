"""Computes finite-difference slopes of a function of one scalar variable.

The checks evaluate a function along the line x + t u. The slope at t = 0 is extrapolated to step
size zero from central differences with decreasing step sizes, starting at t = 0.1 (Ridders, 1982).
The error of an estimate is its difference from its neighbors in the extrapolation table plus the
rounding error; the estimate with the smallest error is returned. If the smallest step gives a
different slope, as for the solution of an ill-conditioned system, all steps are too large for f,
and the slope is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Line = Callable[[float], np.ndarray]

_LARGEST_STEP = 0.1
_COLUMNS = 6  # Columns of the extrapolation table; more columns amplify rounding.
_FINEST = 70  # The maximum number of step sizes, for functions that are defined only near 0.


class Slope(NamedTuple):
    """An estimate of f'(0) for a function f of one scalar.

    Attributes:
        value: The slope of each entry, or NaN if no step size gives a slope.
        error: A bound on the error from step sizes and rounding, or inf if there is no slope.
        at: The value f(0); a slope exists only where f(0) is finite.
    """

    value: np.ndarray
    error: np.ndarray
    at: np.ndarray

    def parts(self, like: Sequence[np.ndarray]) -> list[Slope]:
        """Splits the slope of a flat vector into slopes with the shapes of the given arrays."""
        return [Slope(*each) for each in zip(*(shaped_like(x, like) for x in self), strict=True)]


def shaped_like(entries: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Splits the entries of a vector into arrays of the given shapes."""
    ends = np.cumsum([x.size for x in like])[:-1]
    return [part.reshape(x.shape) for part, x in zip(np.split(entries, ends), like, strict=True)]


def slope(f: Line, eps: float) -> Slope:
    """Computes the slope of f at 0 from extrapolated central differences.

    Args:
        f: A function that maps a scalar position on the line to a vector.
        eps: The machine epsilon of the dtype in which f is computed.
    """
    at = f(0.0)
    value, error = np.full(at.shape, np.nan, at.dtype), np.full(at.shape, np.inf)
    previous: list[np.ndarray] = []
    smallest, inside = smallest_step(eps), 0
    with np.errstate(all="ignore"):
        # Second differences with steps of size eps measure the rounding error of f, which exceeds
        # eps * |f| if large terms cancel.
        x, h = smallest / 3, [eps, 2 * eps, 3 * eps]
        least = np.fmax.reduce(
            [0 * np.abs(at), *(np.abs(f(x + s) + f(x - s) - 2 * f(x)) for s in h)]
        )
        for level in range(_FINEST):
            t = _LARGEST_STEP * 2.0**-level
            inside += bool((np.isfinite(error) | ~np.isfinite(at)).all())
            if t < smallest and inside > _COLUMNS:
                break
            plus, minus = f(t), f(-t)
            rounding = np.maximum(eps * np.maximum(np.abs(plus), np.abs(minus)), least) / t
            row = [(plus - minus) / (2 * t)]
            coarser = previous[0] if previous else row[0]
            for j, before in enumerate(previous[: _COLUMNS - 1]):
                row.append(row[j] + (row[j] - before) / (4.0 ** (j + 1) - 1))
                apart = np.maximum(np.abs(row[j + 1] - row[j]), np.abs(row[j + 1] - before))
                better = apart + rounding < error
                value = np.where(better, row[j + 1], value)
                error = np.where(better, apart + rounding, error)
            previous = row
        slack = error + np.abs(row[0] - coarser) + 10 * rounding + 0.01 * np.abs(value)
        unresolved = np.abs(value - row[0]) > slack  # smaller steps give a different slope
    return Slope(value, np.where(unresolved, np.inf, error), at)


def smallest_step(eps: float) -> float:
    """Returns the smallest step size; smaller steps only fill the extrapolation table."""
    return 10 * eps**0.5
