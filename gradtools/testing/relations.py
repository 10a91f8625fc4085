"""How one of two arrays that should be equal differs: zero, conjugate, sign, factor, layout.

A relation must hold for every entry, much more closely than the two arrays agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import Any

import numpy as np

from gradtools.testing.report import entry_errors, largest, widened

Cause = tuple[str, str]  # in a few words, and the evidence or advice
_NEAR = 1e-6  # the relative error at which a factor is a known number


@dataclass(frozen=True)
class ArrayPair:
    """Two differing arrays of one shape, in 64 bits.

    Attributes:
        a: The first side's array.
        b: The second side's.
        names: The names of the sides.
        order: The order of the derivative.
        near: The relative error at which a relation holds.
        sizes: Lengths that occur in the program by name, which explain a factor.
        single: Whether to name an unknown factor of constant arrays, which any two have.
    """

    a: np.ndarray
    b: np.ndarray
    names: Sequence[str]
    order: int
    near: float
    sizes: Mapping[str, int] = field(default_factory=dict)
    single: bool = False

    def cause(self) -> Cause | None:
        """The first relation that holds, or None."""
        return (
            self._zero()
            or self._conjugate()
            or self._sign()
            or self._factor()
            or self._layout()
            or self._zero_in_places()
        )

    def _both_ways(self) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
        """Each array as the wrong one, with its side's name."""
        yield self.a, self.b, self.names[0]
        yield self.b, self.a, self.names[1]

    def _zero(self) -> Cause | None:
        for x, y, name in self._both_ways():
            if not x.any() and y.any():
                what = "stopped gradient" if self.order else "zero"
                return f"{what} in {name}", f"It is exactly zero in {name}."
        return None

    def _zero_in_places(self) -> Cause | None:
        for x, y, name in self._both_ways():
            lost = (x == 0) & (y != 0)
            if lost.any() and (x != 0).any() and equal(x, np.where(lost, 0, y), self.near):
                what = "stopped gradient" if self.order else "zero"
                count = f"{int(lost.sum())} of {lost.size} entries"
                return f"{what} in places in {name}", f"{count} are zero, the others agree."
        return None

    def _conjugate(self) -> Cause | None:
        complex_ = self.a.dtype.kind == "c" and self.b.imag.any()
        if not complex_ or not equal(self.a, self.b.conj(), self.near):
            return None
        return "conjugate", "One side conjugates: another convention of a complex derivative."

    def _sign(self) -> Cause | None:
        same = equal(self.a, -self.b, self.near)
        return ("sign", "One is the negative of the other.") if same else None

    def _factor(self) -> Cause | None:
        size = float(np.vdot(self.b, self.b).real)
        if not 0 < size < math.inf:
            return None
        ratio = complex(np.vdot(self.b, self.a) / size)
        if ratio == 0 or not np.isfinite(ratio) or not equal(self.a, ratio * self.b, self.near):
            return None
        named = factor_name(ratio, self.sizes)
        constant = bool((self.a == self.a.reshape(-1)[:1]).all())
        if abs(ratio - 1) <= max(self.near, _NEAR) or (
            constant and named is None and not self.single
        ):
            return None
        text = _factor_text(ratio)
        detail = f"{self.names[0]} is {text} times {self.names[1]}."
        if named and ("size" in named or "entries" in named):
            detail += " A sum on one side, a mean on the other."
        return f"constant factor {text}" + (f", {named}" if named else ""), detail

    def _layout(self) -> Cause | None:
        b = self.b
        for i in range(b.ndim):
            for j in range(i + 1, b.ndim):
                alike = b.shape[i] == b.shape[j] > 1
                if alike and equal(self.a, b.swapaxes(i, j), self.near):
                    return "transposed layout", f"Axes {i} and {j} are exchanged."
        if b.ndim > 1 and b.shape != b.T.shape:
            for other in (b.T, b.reshape(b.shape[::-1]).T):
                if equal(self.a, other.reshape(b.shape), self.near):
                    return "transposed layout", "It was reshaped where it should be transposed."
        return None


def relation(
    first: np.ndarray, second: np.ndarray, names: Sequence[str], order: int = 1
) -> str | None:
    """How an array differs from another, in a few words; None if unknown."""
    a, b = widened(first), widened(second)
    if a.shape != b.shape:
        return None
    known = np.isfinite(a) & np.isfinite(b)
    if not known.all():
        a, b = a[known], b[known]
    if not (size := max(largest(a), largest(b))):
        return None
    near = min(1e-4, largest(a - b) / size / 100)
    cause = ArrayPair(a, b, names, order, near, single=True).cause()
    return None if cause is None else cause[0]


def shape_cause(first: tuple[int, ...], second: tuple[int, ...]) -> Cause:
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


def equal(a: Any, b: Any, near: float) -> bool:
    """Whether two arrays have equal shapes and agree to a relative error."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool((entry_errors(a, b, max(near, 1e-300), 0.0) <= 1).all())


# --- names of factors


def factor_name(ratio: complex, sizes: Mapping[str, int]) -> str | None:
    """The likely meaning of a factor: a size, its root, n / (n - 1), a product of two sizes, 2.

    Args:
        ratio: The factor.
        sizes: Lengths that occur in the program, by name.

    Example:
        >>> factor_name(1 / 5, {"the batch size": 5})
        'the batch size'
    """
    ratio = complex(ratio)
    if abs(ratio.imag) > _NEAR * abs(ratio):
        turned = abs(abs(ratio) - 1) < _NEAR and abs(ratio.real) < _NEAR
        return "the imaginary unit" if turned else None
    return next(_factor_names(abs(ratio), sizes), None)


def _factor_names(factor: float, sizes: Mapping[str, int]) -> Iterator[str]:
    def is_(number: float) -> bool:
        return abs(factor / number - 1) < _NEAR or abs(factor * number - 1) < _NEAR

    for name, size in sizes.items():
        if size > 1 and is_(size):
            yield name
        if size > 1 and is_(size / (size - 1)):
            yield f"n / (n - 1) for n = {size}, {name}: unbiased and biased"
        if size > 2 and is_(math.sqrt(size)):
            yield f"the root of {name}"
    if is_(2.0):
        yield "a half square, or counted twice"
    several = {size: name for name, size in reversed(list(sizes.items())) if size > 1}
    for first, second in combinations_with_replacement(sorted(several), 2):
        if is_(first * second):
            yield f"{several[first]}, times {several[second]}"


def _factor_text(ratio: complex) -> str:
    if abs(ratio.imag) < 1e-9 * abs(ratio):
        return f"{ratio.real:.6g}"
    if abs(ratio.real) < 1e-9 * abs(ratio):
        return f"{ratio.imag:.4g}i"
    return f"{ratio.real:.4g}{ratio.imag:+.4g}i"
