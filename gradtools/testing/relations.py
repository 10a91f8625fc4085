"""How one of two arrays that should be equal differs: zero, conjugate, sign, factor, layout.

A relation must hold for every entry, much more closely than the two arrays agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, combinations_with_replacement, permutations
from typing import Any

import numpy as np

from gradtools.testing.report import entry_errors, largest, widened

Cause = tuple[str, str]  # in a few words, and the evidence or advice
FACTOR = "constant factor"
LAYOUTS = ("transposed", "permuted", "interleaved", "reversed")  # the same entries, elsewhere
_NEAR = 1e-6  # the relative error at which a factor is a known number


def array_cause(
    a: np.ndarray,
    b: np.ndarray,
    names: Sequence[str],
    order: int,
    near: float,
    sizes: Mapping[str, int] | None = None,
    single: bool = False,
) -> Cause | None:
    """The first relation that holds between two differing arrays of one shape; None if none does.

    Args:
        a: The first side's array, in 64 bits.
        b: The second side's.
        names: The names of the sides.
        order: The order of the derivative.
        near: The relative error at which a relation holds.
        sizes: Lengths that occur in the program by name, which explain a factor.
        single: Whether to name an unknown factor of constant arrays, which any two have.
    """
    lost = "stopped gradient" if order else "zero"
    both_ways = ((a, b, names[0]), (b, a, names[1]))  # each array as the wrong one
    for x, y, name in both_ways:
        if not x.any() and y.any():
            return f"{lost} in {name}", f"It is exactly zero in {name}."
    if a.dtype.kind == "c" and b.imag.any() and equal(a, b.conj(), near):
        return "conjugate", "One side conjugates: another convention of a complex derivative."
    if equal(a, -b, near):
        return "sign", "One is the negative of the other."
    if (factor := _factor(a, b, names, near, sizes or {}, single)) is not None:
        return factor
    for i, j in combinations(range(b.ndim), 2):
        if b.shape[i] == b.shape[j] > 1 and equal(a, b.swapaxes(i, j), near):
            return "transposed layout", f"Axes {i} and {j} are exchanged."
    if b.ndim > 1 and b.shape != b.T.shape:
        for other in (b.T, b.reshape(b.shape[::-1]).T):
            if equal(a, other.reshape(b.shape), near):
                return "transposed layout", "It was reshaped where it should be transposed."
    if (moved := _rearranged(a, b, near)) is not None:
        return moved
    for x, y, name in both_ways:
        absent = (x == 0) & (y != 0)
        if absent.any() and (x != 0).any() and equal(x, np.where(absent, 0, y), near):
            count = f"{int(absent.sum())} of {absent.size} entries"
            return f"{lost} in places in {name}", f"{count} are zero, the others agree."
    return None


def _rearranged(a: np.ndarray, b: np.ndarray, near: float) -> Cause | None:
    """The axis along which the entries of b are a's in another order."""
    for axis, n in enumerate(b.shape):
        x, y = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        if n > 2 and equal(x, y[::-1], near):
            return f"reversed axis {axis}", "A flipped kernel, or a sequence read backwards."
        for ahead, behind in ((x, y), (y, x)):
            if n > 3 and np.ptp(np.abs(behind[1:])) > 0 and equal(ahead[:-1], behind[1:], near):
                return f"shifted by one along axis {axis}", "Padding, a causal mask, or an offset."
        for count in (2, 3, 4) if n > 2 else ():
            if n % count == 0:
                blocks = np.split(y, count)
                for order in permutations(range(count)):
                    if equal(x, np.concatenate([blocks[i] for i in order]), near):
                        detail = f"Block i is block {list(order)}[i]: gates, heads, or channels."
                        return f"permuted blocks of axis {axis}", detail
        if n % 2 == 0 and n > 2:
            pairs = y.reshape(n // 2, 2, *y.shape[1:]).swapaxes(0, 1).reshape(y.shape)
            halves = y.reshape(2, n // 2, *y.shape[1:]).swapaxes(0, 1).reshape(y.shape)
            if equal(x, pairs, near) or equal(x, halves, near):
                return f"interleaved axis {axis}", "Pairs of neighbours against two halves (RoPE)."
    return None


def _factor(
    a: np.ndarray,
    b: np.ndarray,
    names: Sequence[str],
    near: float,
    sizes: Mapping[str, int],
    single: bool,
) -> Cause | None:
    """The factor of a over b, if it is the same everywhere and not 1."""
    size = float(np.vdot(b, b).real)
    if not 0 < size < math.inf:
        return None
    ratio = complex(np.vdot(b, a) / size)
    if ratio == 0 or not np.isfinite(ratio) or not equal(a, ratio * b, near):
        return None
    named = factor_name(ratio, sizes)
    constant = bool((a == a.reshape(-1)[:1]).all())
    if abs(ratio - 1) <= max(near, _NEAR) or (constant and named is None and not single):
        return None
    text = f"{ratio.real:.4g}{ratio.imag:+.4g}i"
    if abs(ratio.imag) < 1e-9 * abs(ratio):
        text = f"{ratio.real:.6g}"
    elif abs(ratio.real) < 1e-9 * abs(ratio):
        text = f"{ratio.imag:.4g}i"
    detail = f"{names[0]} is {text} times {names[1]}."
    if named and ("size" in named or "entries" in named):
        detail += " A sum on one side, a mean on the other."
    return f"{FACTOR} {text}" + (f", {named}" if named else ""), detail


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
    cause = array_cause(a, b, names, order, near, single=True)
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
    factor = abs(ratio)
    is_ = lambda n: abs(factor / n - 1) < _NEAR or abs(factor * n - 1) < _NEAR
    for name, size in sizes.items():
        if size > 1 and is_(size):
            return name
        if size > 1 and is_(size / (size - 1)):
            return f"n / (n - 1) for n = {size}, {name}: unbiased and biased"
        if size > 2 and is_(math.sqrt(size / (size - 1))):
            return f"the root of n / (n - 1) for n = {size}, {name}: unbiased and biased"
        if size > 2 and is_(math.sqrt(size)):
            return f"the root of {name}"
    if is_(2.0):
        return "a half square, or counted twice"
    several = {size: name for name, size in reversed(list(sizes.items())) if size > 1}
    for first, second in combinations_with_replacement(sorted(several), 2):
        if is_(first * second):
            return f"{several[first]}, times {several[second]}"
    return None
