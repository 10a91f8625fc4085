"""Slopes of a function of one number, from its values alone, and the jumps that slopes do not see.

A check moves an argument along a line, x + t u, and looks at the values f(t). The slope at 0 comes
from central differences at many steps, from a tenth of the argument's size downwards, extrapolated
to step zero (Ridders, 1982): the estimate kept is the one whose neighbours agree best, and how
well they agree is its error. Where the smallest step tells another slope, as of a solution of an
ill-conditioned system, all steps are too large for f, and nothing is decided.

No small step sees a staircase: its slope is zero wherever one looks. But a function that is
continuous is the integral of its derivative; where the two part, and go on to part on ever
shorter pieces of the line, the function jumps. A kink passes: there the difference shrinks with
the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Line = Callable[[float], np.ndarray]

_LARGEST_STEP = 0.1
_COLUMNS = 6  # of the extrapolation: more only amplifies rounding
_FINEST = 70  # halvings of the largest step, where larger steps leave f's domain
_GAUSS, _WEIGHTS = np.polynomial.legendre.leggauss(5)


@dataclass(frozen=True)
class Slope:
    """An estimate of f'(0).

    Attributes:
        value: The slope of each entry; NaN where no step gave one.
        error: How far it may be off: what the steps disagree by, and rounding; inf where no step
            gave a slope.
        at: f(0); where it is not finite there is no slope to speak of.
        smallest: The smallest step that was taken.
    """

    value: np.ndarray
    error: np.ndarray
    at: np.ndarray
    smallest: float

    def parts(self, like: Sequence[np.ndarray]) -> list[Slope]:
        """One slope for each of the arrays of which f's vector was made."""
        ends = np.cumsum([x.size for x in like])[:-1]
        cut = lambda x: [p.reshape(y.shape) for p, y in zip(np.split(x, ends), like, strict=True)]
        pieces = zip(cut(self.value), cut(self.error), cut(self.at), strict=True)
        return [Slope(value, error, at, self.smallest) for value, error, at in pieces]


def slope(f: Line, eps: float) -> Slope:
    """The slope of f at 0 by extrapolated central differences.

    Args:
        f: The values, a vector, at a position on the line.
        eps: The spacing at 1 of the numbers that f computes in.
    """
    at = f(0.0)
    value, error = np.full(at.shape, np.nan, at.dtype), np.full(at.shape, np.inf)
    previous: list[np.ndarray] = []
    smallest, inside = 10 * np.sqrt(eps), 0
    with np.errstate(all="ignore"):
        least = rounding_error(f, smallest / 3, eps)
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
        elsewhere = np.abs(value - row[0]) > slack  # f is another one in small steps
    return Slope(value, np.where(elsewhere, np.inf, error), at, t)


def rounding_error(f: Line, at: float, eps: float) -> np.ndarray:
    """How far the values of f may be off: what its second differences over last digits come to.

    That is more than eps of a value where large numbers cancel in it.
    """
    here = f(at)
    changes = [np.abs(f(at + k * eps) + f(at - k * eps) - 2 * here) for k in (1, 2, 3)]
    return np.fmax.reduce([np.zeros(here.shape), *changes])


def one_sided(f: Line, eps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The slopes of f at 0 from the left and from the right, and how far rounding puts them off.

    They differ at a kink.
    """
    t = eps**0.25
    with np.errstate(all="ignore"):
        left, right = ((f(s * t) - f(0.0)) / (s * t) for s in (-1, 1))
        left2, right2 = ((f(s * t / 2) - f(0.0)) / (s * t / 2) for s in (-1, 1))
        off = np.maximum(eps * np.abs(f(0.0)), rounding_error(f, t / 3, eps))
    return 2 * left2 - left, 2 * right2 - right, 10 * off / t


@dataclass(frozen=True)
class Jump:
    """A place where f jumps.

    Attributes:
        at: The position on the line.
        size: By how much entry `entry` changes there.
        entry: Which entry of f.
    """

    at: float
    size: float
    entry: int


def jump_near(f: Line, df: Line, end: float, eps: float) -> Jump | None:
    """A jump of f between 0 and `end` that its derivative df leaves out, None if there is none."""
    with np.errstate(all="ignore"):
        change = f(end) - f(0.0)
        slopes = np.stack([df(end * (1 + g) / 2) for g in _GAUSS])
        integral = end / 2 * np.tensordot(_WEIGHTS, slopes, 1)
        travelled = np.abs(end) / 2 * np.tensordot(_WEIGHTS, np.abs(slopes), 1)
        off = np.abs(change - integral)
        least = np.maximum(0.01 * np.maximum(np.abs(change), travelled), 1e3 * eps * _size(f, end))
    suspects = _beyond_rounding(f, end, eps, off, np.flatnonzero(np.isfinite(off) & (off > least)))
    return _first_jump(f, df, end, suspects[np.argsort(-off[suspects])], eps)


def jump_far(f: Line, df: Line, end: float, eps: float) -> Jump | None:
    """A jump between 0 and `end` of an entry whose derivative is zero wherever it is looked at."""
    with np.errstate(all="ignore"):
        change = np.abs(f(end) - f(0.0))
    moved = np.isfinite(change) & (change > 1e3 * eps * _size(f, end))
    suspects = _beyond_rounding(f, end, eps, change, np.flatnonzero(moved & (df(0.0) == 0)))
    if not suspects.size:
        return None
    for g in _GAUSS:
        suspects = suspects[df(end * (1 + g) / 2)[suspects] == 0]
    return _first_jump(f, df, end, suspects, eps)


def _beyond_rounding(
    f: Line, end: float, eps: float, off: np.ndarray, suspects: np.ndarray
) -> np.ndarray:
    if not suspects.size:
        return suspects
    with np.errstate(all="ignore"):
        return suspects[(off > 1e3 * rounding_error(f, end / 3, eps))[suspects]]


def _size(f: Line, end: float) -> np.ndarray:
    return np.maximum(np.abs(f(0.0)), np.abs(f(end)))


def _first_jump(f: Line, df: Line, end: float, suspects: np.ndarray, eps: float) -> Jump | None:
    for entry in suspects[:4]:
        result = _halved(f, df, end, int(entry), eps)
        if result is not None:
            return result
    return None


def _halved(f: Line, df: Line, end: float, entry: int, eps: float) -> Jump | None:
    """Halves the piece of the line where f and the integral of df part; what is left of it."""
    at = lambda t: f(t)[entry]
    a, b, low, high = 0.0, end, at(0.0), at(end)
    whole = max(abs(low), abs(high), abs(high - low))
    total = abs(high - low - (b - a) * df((a + b) / 2)[entry])
    sizes = []
    for _ in range(int(-np.log2(eps)) * 2 // 3):
        middle = (a + b) / 2
        value, rise = at(middle), df(middle)[entry]
        left = abs(value - low - rise * (middle - a))
        right = abs(high - value - rise * (b - middle))
        if not np.isfinite(left + right):
            return None
        a, b, low, high = (a, middle, low, value) if left >= right else (middle, b, value, high)
        sizes.append(abs(high - low))
    size = high - low
    steep = abs(size) < sizes[-5] / 2  # it went on shrinking with the piece
    lasting = max(1e-3 * total, 1e3 * eps * whole) < abs(size) <= 10 * whole  # a pole grows
    return Jump((a + b) / 2, size, entry) if lasting and not steep else None
