"""Compares a derivative with central differences of a function's values, along random directions.

    Re<J^H v, u>  =  Re<v, (f(x + h u) - f(x - h u)) / 2h>  =  Re<v, J u>

Each entry moves on the scale of its own size. A derivative agrees if it does at one of two steps h.
By the mean value theorem the difference is a mean of the derivative along the segment, so kinks,
ties and coarse steps are told by the derivative at its ends: it differs if the difference is far
from the mean of these, compared with how far their mean is from the derivative at x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass
class DerivativeAtPoint:
    """A derivative at xs, compared with differences of a program's values.

    Attributes:
        program: `program(xs)` returns f's outputs, and `program.derivative_at(member, xs, given)`
            a derivative, as lists of NumPy arrays.
        member: "vjp" if `given` holds cotangents of the outputs (None: zero), "jvp" or "linearize"
            if it holds tangents of xs.
        known: The derivative, if it was computed before.
        slope: The derivative along a direction; `difference` is that of the values at `step`.
    """

    program: Any
    member: str
    xs: list[Any]
    given: list[Any]
    rng: Any
    known: list[Any] | None = None
    slope: float = 0.0
    difference: float = 0.0
    step: float = 0.0

    def verdict(self) -> str:
        """Whether it "agrees", "differs" (in two of three comparisons), or is too "noisy" to tell.

        After the first comparison the point moves a little, since a kink or tie is at one point.
        """
        found = [self.ask()]
        while len(found) < 3 and found[-1] != "agrees":
            if self._is_own():
                away, moves = min(30 * self.program.eps ** (1 / 3), 0.5), self._moves()
                xs = [x + away * u for x, u in zip(self.xs, moves, strict=True)]
                self.xs, self.known = self.program.rounded(xs), None
                del self.again
            found.append(self.ask())
        both = found.count("differs") > 1
        return "agrees" if found[-1] == "agrees" else "differs" if both else "noisy"

    @cached_property
    def again(self) -> list[Any]:
        """The program's own derivative, without gradtools' edits."""
        return self.program.derivative_at(self.member, self.xs, self.given)

    def _is_own(self) -> bool:
        """Whether the derivative is the program's own, and no NaN."""
        known = self.again if self.known is None or self.program.edited else self.known
        zero = lambda x: 0 if x is None else x
        pairs = [(zero(x), zero(y)) for x, y in zip(known, self.again, strict=True)]
        return all(np.allclose(x, y, 0.01, 0.01 * np.max(np.abs(y), initial=0)) for x, y in pairs)

    def ask(self, only: int | None = None) -> str:
        """Compares along one direction, in which the array `only` moves alone; None: all move."""
        program, eps, forward = self.program, self.program.eps, self.member != "vjp"
        base, us, vs = program(self.xs), self._moves(only), self.given
        known = self.again if self.known is None or program.edited else self.known
        scale = 1.0
        if forward:
            us = [u if only in (None, i) else 0 * u for i, u in enumerate(self.given)]
            known = known if only is None else program.derivative_at(self.member, self.xs, us)
            pairs = zip(us, self._sizes(), strict=True)
            scale = max([float((np.abs(u) / size).max(initial=0)) for u, size in pairs]) or 1.0
            vs = [normal(self.rng, y) for y in base]

        def slope_at(ds: list[Any], moved: list[Any], size: bool = False) -> float:
            return _dot(vs, ds, size) / scale if forward else _dot(ds, moved, size)

        found: list[float] = []
        with np.errstate(all="ignore"):
            for self.step in (4 * eps ** (1 / 3), eps ** (1 / 3)):
                h = self.step / scale
                ends = [[x + s * h * u for x, u in zip(self.xs, us, strict=True)] for s in (1, -1)]
                ends = [program.rounded(end) for end in ends]
                moved = [(a - b) / (2 * self.step) for a, b in zip(*ends, strict=True)]
                moved = [np.where(np.isfinite(m), m, 0) for m in moved]
                up, down = (_dot(vs, program(end)) for end in ends)
                self.slope, self.difference = slope_at(known, moved), (up - down) / (2 * self.step)
                gap, sizes = abs(self.slope - self.difference), (self.slope, self.difference)
                near = min(max(4 * eps**0.5, 2e-4), 0.3) * max(map(abs, sizes))
                if gap <= near + min(30 * eps, 0.03) * slope_at(known, moved, size=True):
                    return "agrees"
                found.append(self.difference)
            weight = _dot(vs, [np.abs(y) + 1 for y in base], size=True)  # rounding of values of 1
            noise = 20 * eps * weight / self.step + 10 * abs(found[0] - found[1])
            if not np.isfinite(self.slope):
                return (
                    "differs" if noise < abs(found[1]) + 40 * eps * weight / self.step else "noisy"
                )
            if self._is_own():
                given = us if forward else self.given
                at_ends = [program.derivative_at(self.member, end, given) for end in ends]
                mean = sum(slope_at(ds, moved) for ds in at_ends) / 2
                gap, noise = min(gap, abs(mean - found[1])), noise + 2 * abs(mean - self.slope)
        return "differs" if noise < gap else "noisy"

    def _sizes(self) -> list[Any]:
        """The scale on which each entry moves: its size up to hundreds, the median's for 0."""
        made, fine = [], 100 * self.program.eps ** (2 / 3)  # of which the moves are many roundings
        for x in self.xs:
            sizes = np.abs(np.where(np.isfinite(x), x, 0))
            typical = np.median(sizes[sizes > 0]) if (sizes > 0).any() else 1.0
            capped = np.minimum(sizes, np.maximum(100, fine * sizes))
            made.append(np.maximum(capped, min(typical, 1.0)))
        return made

    def _moves(self, only: int | None = None) -> list[Any]:
        pairs = enumerate(zip(self.xs, self._sizes(), strict=True))
        return [normal(self.rng, x) * size * (only in (None, i)) for i, (x, size) in pairs]


def normal(rng: Any, like: Any) -> Any:
    """Normal numbers of the shape of an array, complex or Hermitian if it is.

    Derivatives of Cholesky factors, eigenvalues and the like are along Hermitian tangents.
    """
    x = rng.standard_normal(like.shape)
    if np.iscomplexobj(like):
        x = x + 1j * rng.standard_normal(like.shape)
    mirrored = np.conj(like.swapaxes(-1, -2)) if like.ndim > 1 else None
    hermitian = mirrored is not None and np.array_equal(like, mirrored)
    return (x + np.conj(x.swapaxes(-1, -2))) / 2 if hermitian else x


def _dot(xs: Sequence[Any], ys: Sequence[Any], size: bool = False) -> float:
    terms = [np.conj(x) * y for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    return float(sum(np.abs(t).sum() if size else t.real.sum() for t in terms))
