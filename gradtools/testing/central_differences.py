"""Compares a derivative with central differences of a function's values along random vectors.

    Re<v, J u>  =  Re<v, (f(x + h u) - f(x - h u)) / 2h>

Each entry of x is perturbed in proportion to its magnitude. The derivative agrees if it is close to
the central difference at one of two step sizes h. Otherwise, let m be the mean of the derivatives
at x - h u and x + h u. The derivative is reported as different if its distance and the distance of
m from the central difference both exceed the sum of three terms: the rounding error, a multiple of
the difference between the two central differences, and a multiple of the difference between the
derivative and m, which is large at kinks and ties and for large steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class DerivativeComparison:
    """Compares a derivative at xs with central differences, for a random tangent and cotangent.

    Attributes:
        program: `program(xs)` returns the outputs of the checked function f, and `program.slope(xs,
            vs, us)` returns Re<v, J u> and the sum of the absolute values of its terms; xs, vs and
            us are lists of NumPy arrays.
        slope: The most recent directional derivative Re<v, J u>.
        difference: The most recent central difference along u, with step size `step`.
    """

    program: Any
    xs: list[Any]
    rng: Any
    slope: float = 0.0
    difference: float = 0.0
    step: float = 0.0

    def verdict(self) -> str:
        """Returns "agrees", "differs" or, if the comparisons are inconclusive, "noisy".

        The verdict is "agrees" if one of up to three comparisons returns "agrees"; otherwise it is
        "differs" if at least two comparisons return "differs". Before each further comparison, xs
        is moved slightly, away from a possible kink or tie, unless the derivative is not finite.
        """
        found = [self.compare()]
        away = min(30 * self.program.eps ** (1 / 3), 0.5)
        while found[-1] != "agrees" and len(found) < 3:
            if np.isfinite(self.slope):
                pairs = zip(self.xs, self._moves(), strict=True)
                self.xs = self.program.rounded([x + away * u for x, u in pairs])
            found.append(self.compare())
        both = found.count("differs") > 1
        return "agrees" if found[-1] == "agrees" else "differs" if both else "noisy"

    def compare(self, only: int | None = None) -> str:
        """Returns the verdict of one comparison along a random tangent.

        only: The index of the array to perturb. If None, all arrays are perturbed.
        """
        program, eps, differences = self.program, self.program.eps, list[float]()
        base, us = program(self.xs), self._moves()
        us = [u if only in (None, i) else 0 * u for i, u in enumerate(us)]
        vs = [normal(self.rng, y) for y in base]
        for self.step in (4 * eps ** (1 / 3), eps ** (1 / 3)):
            pairs = [(x, self.step * u) for x, u in zip(self.xs, us, strict=True)]
            ends = [program.rounded([x + s * hu for x, hu in pairs]) for s in (1, -1)]
            moved = [(a - b) / (2 * self.step) for a, b in zip(*ends, strict=True)]
            moved = [np.where(np.isfinite(m), m, 0) for m in moved]
            up, down = (dot(vs, program(end))[0] for end in ends)
            self.slope, size = program.slope(self.xs, vs, moved)
            self.difference = (up - down) / (2 * self.step)
            gap, larger = (
                abs(self.slope - self.difference),
                max(map(abs, (self.slope, self.difference))),
            )
            if gap <= min(max(4 * eps**0.5, 2e-4), 0.3) * larger + min(30 * eps, 0.03) * size:
                return "agrees"
            differences.append(self.difference)
        rounding = 20 * eps * dot(vs, [np.abs(y) + 1 for y in base])[1] / self.step
        noise = rounding + 10 * abs(differences[0] - differences[1])
        if not np.isfinite(self.slope):
            # In low precision, an infinite derivative may be caused by overflow, so the test is
            # inconclusive.
            gap = abs(self.difference) + 2 * rounding if eps < 1e-4 else 0.0
        else:
            mean = sum(program.slope(end, vs, moved)[0] for end in ends) / 2
            gap, noise = min(gap, abs(mean - self.difference)), noise + 2 * abs(mean - self.slope)
        return "differs" if noise < gap else "noisy"

    def _moves(self) -> list[Any]:
        """Draws random tangents, scaled by the magnitude of each entry of xs.

        The scale of an entry is at least the median magnitude or 1, whichever is smaller. The scale
        is at most 100, unless a smaller perturbation would be lost to rounding.
        """
        made, fine = [], 100 * self.program.eps ** (2 / 3)
        for x in self.xs:
            sizes = np.abs(np.where(np.isfinite(x), x, 0))
            typical = np.median(sizes[sizes > 0]) if (sizes > 0).any() else 1.0
            capped = np.minimum(sizes, np.maximum(100, fine * sizes))
            made.append(normal(self.rng, x) * np.maximum(capped, min(typical, 1.0)))
        return made


def normal(rng: Any, like: Any) -> Any:
    """Draws an array of standard normal numbers with the shape of `like`.

    The array is complex if `like` is complex, and Hermitian if `like` is Hermitian, because
    derivatives of Cholesky factors and eigenvalues are defined for Hermitian tangents.
    """
    x = rng.standard_normal(like.shape)
    if np.iscomplexobj(like):
        x = x + 1j * rng.standard_normal(like.shape)
    mirrored = np.conj(like.swapaxes(-1, -2)) if like.ndim > 1 else None
    hermitian = mirrored is not None and np.array_equal(like, mirrored)
    return (x + np.conj(x.swapaxes(-1, -2))) / 2 if hermitian else x


def dot(xs: Sequence[Any], ys: Sequence[Any]) -> tuple[float, float]:
    """Returns the inner product Re<xs, ys> and the sum of the absolute values of its terms."""
    with np.errstate(all="ignore"):
        terms = [np.conj(x) * y for x, y in zip(xs, ys, strict=True)]
        return float(sum(t.real.sum() for t in terms)), float(sum(np.abs(t).sum() for t in terms))
