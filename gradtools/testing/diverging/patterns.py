"""Patterns of two arrays that should be equal: sign, factor, conjugate, layout, offset, clipping.

Each pattern returns a cause and its detail, or None. It must hold for every entry, much more
closely than the two arrays agree with each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.testing.diverging.factor_names import name_factor
from gradtools.testing.report import entry_errors, largest, widened

Found = tuple[str, str]  # the cause and its detail


@dataclass(frozen=True)
class ArrayPair:
    """Two differing arrays of one shape, and the tolerance `near` of patterns."""

    a: np.ndarray
    b: np.ndarray
    near: float
    names: list[str]

    def both_ways(self) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
        """Each array as the wrong one, with its side's name."""
        yield self.a, self.b, self.names[0]
        yield self.b, self.a, self.names[1]

    def zero(self, order: int) -> Found | None:
        """One side is all zeros."""
        for x, y, name in self.both_ways():
            if not x.any() and y.any():
                if order:
                    return f"stopped gradient in {name}", f"It is exactly zero in {name}."
                tiny = np.abs(y).max() < 1e-30
                return f"zero in {name}", "An underflow." if tiny else "A mask, or a term left out."
        return None

    def conjugate(self) -> Found | None:
        """One side is the other's conjugate."""
        complex_ = self.a.dtype.kind == "c" and self.b.imag.any()
        if not complex_ or not equal(self.a, self.b.conj(), self.near):
            return None
        return (
            "conjugate",
            "One side conjugates: a complex rule or transpose by another convention.",
        )

    def sign(self) -> Found | None:
        """The moduli agree."""
        if equal(self.a, -self.b, self.near):
            return "sign", "One is the negative of the other."
        same = equal(np.abs(self.a), np.abs(self.b), self.near)
        if same and self.a.dtype.kind != "c" and self.a.size > 1:
            return "sign in places", "The moduli agree, the signs do not."
        return None

    def real_part(self) -> Found | None:
        """One side is the real part of the other."""
        if self.a.dtype.kind != "c":
            return None
        for x, y, name in self.both_ways():
            if not x.imag.any() and y.imag.any() and equal(x, y.real, self.near):
                return f"imaginary part lost in {name}", "It was cast to a real dtype on the way."
        return None

    def factor(self, sizes: Mapping[str, int], trivial: bool = False) -> Found | None:
        """One side is a constant times the other.

        trivial: Whether to name it too where every constant array is a multiple of the other.
        """
        ratio = constant_ratio(self.a, self.b, self.near)
        if ratio is None:
            return None
        named = name_factor(ratio, sizes)
        if named is None and self._is_repeated and not trivial:
            return None  # any number is a multiple of a single or constant entry
        text = _ratio_text(ratio)
        detail = f"{self.names[0]} is {text} times {self.names[1]}."
        if named and ("size" in named or "entries" in named):
            detail += " A sum on one side, a mean on the other."
        return f"constant factor {text}" + (f", {named}" if named else ""), detail

    @property
    def _is_repeated(self) -> bool:
        """Whether a is constant, so that any constant array is a multiple and a shift of it."""
        return bool((self.a == self.a.reshape(-1)[:1]).all())

    def layout(self) -> Found | None:
        """The same numbers in another arrangement."""
        if self.a.ndim == 0 or self.a.size < 2:
            return None
        for cause, detail, b in _rearranged(self.b):
            if equal(self.a, b, self.near):
                return cause, detail
        mine, other = (np.sort_complex(x.reshape(-1)) for x in (self.a, self.b))
        if self.a.size > 2 and equal(mine, other, self.near):
            return "another order", "The same numbers in other places: gates, heads or channels."
        return None

    def offset(self) -> Found | None:
        """The difference is constant."""
        if self.a.size < 2 or self._is_repeated:
            return None
        difference = self.a - self.b
        if not equal(difference, np.full_like(difference, difference.mean()), 1e-4):
            return None
        text = _ratio_text(complex(difference.mean()))
        return "constant offset", f"{self.names[0]} - {self.names[1]} is {text} everywhere."

    def along_an_axis(self) -> Found | None:
        """The ratio depends only on the index of one axis."""
        if self.a.ndim < 2 or self._is_repeated or not (self.a.any() and self.b.all()):
            return None
        ratio = self.a / self.b
        if equal(ratio, np.ones_like(ratio), 1e-3):  # a factor of 1 each
            return None
        for axis in range(self.a.ndim):
            rest = tuple(n for n in range(self.a.ndim) if n != axis)
            means = ratio.mean(axis=rest, keepdims=True)
            if self.a.shape[axis] > 1 and equal(ratio, np.broadcast_to(means, ratio.shape), 1e-4):
                return (
                    f"a factor for each index of axis {axis}",
                    f"torch / jax runs over {_few(means)}: weights, or a mean over other entries.",
                )
        return None

    def clipped(self, order: int) -> Found | None:
        """One side is the other clipped to two bounds."""
        if self.a.dtype.kind == "c" or self.a.size < 2:
            return None
        for x, y, name in self.both_ways():
            low, high = x.min(), x.max()
            inside = (x > low) & (x < high)
            if (inside & (x != 0)).sum() > 1 and equal(x, np.clip(y, low, high), self.near):
                what = "gradient" if order else "value"
                return f"clipped {what} in {name}", f"Nothing lies outside {low:.6g} to {high:.6g}."
        return None

    def zero_in_places(self, order: int) -> Found | None:
        """One side is the other, with some entries zero."""
        for x, y, name in self.both_ways():
            lost = (x == 0) & (y != 0)
            if lost.any() and (x != 0).any() and equal(x, np.where(lost, 0, y), self.near):
                count = f"{int(lost.sum())} of {lost.size} entries"
                what = "stopped gradient" if order else "zero"
                return f"{what} in places in {name}", f"{count} are zero, the others agree."
        return None


def relation(
    wrong: np.ndarray, right: np.ndarray, names: Sequence[str] = ("analytic", "numeric")
) -> str | None:
    """How a wrong array differs from the right one, in a few words; None if unknown."""
    a, b = widened(wrong), widened(right)
    known = np.isfinite(b)  # where both are infinite nothing differs
    if (~np.isfinite(a) & known).any():
        return "the derivative is not finite"
    if not known.all():
        a, b = a[known], b[known]
    size = largest(b)
    if not a.any() and size:
        return "the derivative is zero: a gradient is stopped"
    if not size or a.shape != b.shape:
        return None
    pair = ArrayPair(a, b, min(1e-4, largest(a - b) / size / 100), list(names))
    questions = (
        *(pair.sign, lambda: pair.factor({}, trivial=True), pair.conjugate, pair.layout),
        lambda: pair.zero_in_places(1),
    )
    return next((result[0] for question in questions if (result := question())), None)


def shape_cause(first: tuple[int, ...], second: tuple[int, ...]) -> Found:
    """Why two results have different shapes."""
    if sorted(first) == sorted(second):
        return "transposed layout", f"The shapes {first} and {second} are permutations."
    if [n for n in first if n != 1] == [n for n in second if n != 1]:
        return "an axis of length 1", "keepdims, or a squeeze, on one side only."
    if () in (first, second):
        return "reduced on one side only", "Apply the same sum or mean on both sides."
    low, high = sorted((first, second), key=math.prod)
    if math.prod(high) == math.prod(low) ** 2 or set(low) == set(high):
        return "unintended broadcasting", "A column (n, 1) against a row (n,) gives (n, n)."
    return "another shape", ""


def _rearranged(b: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
    """b in other layouts, each with a cause and a detail."""
    for i in range(b.ndim):
        for j in range(i + 1, b.ndim):
            if b.shape[i] == b.shape[j]:
                yield "transposed layout", f"Axes {i} and {j} are exchanged.", b.swapaxes(i, j)
    for axis in range(b.ndim):
        yield "reversed axis", f"Axis {axis} runs backwards on one side.", np.flip(b, axis)
        for shift in range(1, min(b.shape[axis], 64)):
            detail = f"Axis {axis} is rolled by {shift}."
            yield "shifted axis", detail, np.roll(b, shift, axis)
    if b.ndim > 1 and b.shape != b.T.shape:
        detail = "It was reshaped where it should be transposed."
        for other in (b.T, b.reshape(b.shape[::-1]).T):
            yield "transposed layout", detail, other.reshape(b.shape)


def constant_ratio(a: np.ndarray, b: np.ndarray, near: float) -> complex | None:
    """The number r with a = r b; None if there is none or it is 0 or 1."""
    size = float(np.vdot(b, b).real)
    if not size > 0 or not math.isfinite(size):
        return None
    ratio = complex(np.vdot(b, a) / size)
    if ratio == 0 or not np.isfinite(ratio) or not equal(a, ratio * b, near):
        return None
    return ratio if abs(ratio - 1) > max(near, 1e-6) else None


def equal(a: Any, b: Any, near: float) -> bool:
    """Whether two arrays have equal shapes and agree to a relative error."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool((entry_errors(a, b, max(near, 1e-300), 0.0) <= 1).all())


def _ratio_text(ratio: complex) -> str:
    if abs(ratio.imag) < 1e-9 * abs(ratio):
        return f"{ratio.real:.6g}"
    if abs(ratio.real) < 1e-9 * abs(ratio):
        return f"{ratio.imag:.4g}i"
    return f"{ratio.real:.4g}{ratio.imag:+.4g}i"


def _few(x: np.ndarray) -> str:
    values = [_ratio_text(complex(v)) for v in x.reshape(-1)[:3]]
    return ", ".join(values) + (", ..." if x.size > 3 else "")
