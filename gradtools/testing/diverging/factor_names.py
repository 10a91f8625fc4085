"""Names for a constant factor between two results: sizes, their products, known constants."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations_with_replacement

_KNOWN = {
    "a half square, or counted twice": 2.0,
    "degrees and radians": 180 / math.pi,
    "natural and binary logarithm": math.log(2),
    "natural and decimal logarithm": math.log(10),
    "a root of 2": math.sqrt(2),
    "pi": math.pi,
    "2 pi": 2 * math.pi,
    "a root of 2 pi": math.sqrt(2 * math.pi),
}
_NEAR = 1e-6


def name_factor(ratio: complex, sizes: Mapping[str, int]) -> str | None:
    """The likely meaning of a factor; None if unknown.

    Args:
        ratio: The factor.
        sizes: Lengths that occur in the program, by name.

    Example:
        >>> name_factor(1 / 5, {"the batch size": 5})
        'the batch size'
    """
    if abs(ratio.imag if isinstance(ratio, complex) else 0.0) > _NEAR * abs(ratio):
        turned = abs(abs(ratio) - 1) < _NEAR and abs(ratio.real) < _NEAR
        return "the imaginary unit" if turned else None
    factor = abs(ratio)
    return next(_names(factor, sizes), None)


def _names(factor: float, sizes: Mapping[str, int]) -> Iterator[str]:
    for name, size in sizes.items():
        if size > 1 and _is(factor, size):
            yield f"{name}"
        if size > 1 and _is(factor, size / (size - 1)):
            yield f"n / (n - 1) for n = {size}, {name}: unbiased and biased"
        if size > 2 and _is(factor, math.sqrt(size)):
            yield f"the root of {name}"
    for name, number in _KNOWN.items():
        if _is(factor, number):
            yield name
    several = {size: name for name, size in reversed(list(sizes.items())) if size > 1}
    for first, second in combinations_with_replacement(sorted(several), 2):
        if _is(factor, first * second):
            yield f"{several[first]}, times {several[second]}"


def _is(factor: float, number: float) -> bool:
    return abs(factor / number - 1) < _NEAR or abs(factor * number - 1) < _NEAR
