"""Tests numerically whether a map is linear, as for kernels, which have no jaxpr or graph.

A linear map takes multiples to multiples, L(c v) = c L(v), and sums to sums. In floating point both
hold up to rounding, which is as large as the terms that the map adds up, and cannot be bounded by
the results if these terms cancel. So the vectors have few binary digits. Multiplying by a power of
two then is exact, and so is v + w; the rounding in L(v + w) is compared with that in L(3 v), L(5 v)
and L(7 v).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Array = Any
Entries = Sequence[Any]  # arrays, or None for a zero

_LEAST = 2.0**-9  # dividing by more would make 16-bit numbers subnormal
_ODD, _TIMES = (3.0, 5.0, 7.0), 16.0  # samples of the rounding, and the tolerance in units of it


def is_linear(
    run: Callable[[Entries], Entries],
    v: Entries,
    w: Entries,
    gap: Callable[[Array, Array], float],
    slack: Callable[[Array], float],
) -> bool:
    """Whether `run` preserves sums and multiples.

    v, w: Vectors of four binary digits.
    gap: The largest modulus of a difference; equal entries and pairs of NaN count as 0.
    slack: The relative tolerance for an array if nothing cancels.
    """
    narrow = any(str(x.dtype).removeprefix("torch.") == "float16" for x in v)
    reach = 2.0**5 if narrow else 2.0**13  # the largest factor
    one, other = run(v), run(w)
    sizes = [0.0 if y is None else gap(y, 0.0 * y) for y in one]
    for factor in (-max(1 / reach, _LEAST), reach):  # a negative one finds relu-like maps
        pairs = zip(_scaled(factor, one), run(_scaled(factor, v)), sizes, strict=True)
        for y, scaled, size in pairs:
            if not _distance(gap, y, scaled) <= _slack(slack, y) * abs(factor) * size:
                return False
    both = [a + b for a, b in zip(v, w, strict=True)]
    sums, expected = run(both), list(map(_plus, one, other))
    left = [
        k
        for k, (y, e) in enumerate(zip(sums, expected, strict=True))
        if not _distance(gap, y, e) <= _slack(slack, y) * _largest(gap, one[k], other[k], y)
    ]
    if not left:
        return True
    noise = [0.0] * len(sums)
    for at, y in ((v, one), (w, other), (both, sums)):
        for factor in _ODD:
            scaled = run(_scaled(factor, at))
            for k in left:
                off = _distance(gap, _scaled(factor, y)[k], scaled[k]) / factor
                noise[k] = max(noise[k], off)
    return all(_distance(gap, sums[k], expected[k]) <= _TIMES * noise[k] for k in left)


def _scaled(factor: float, xs: Entries) -> list[Any]:
    return [None if x is None else factor * x for x in xs]


def _plus(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _slack(slack: Callable[[Array], float], y: Any) -> float:
    return 0.0 if y is None else slack(y)


def _largest(gap: Callable[[Array, Array], float], *ys: Any) -> float:
    return max(0.0 if y is None else gap(y, 0.0 * y) for y in ys)


def _distance(gap: Callable[[Array, Array], float], a: Any, b: Any) -> float:
    """The distance of two results; 0 if either is None, which stands for zeros."""
    return 0.0 if a is None or b is None else gap(a, b)
