"""Compares one side's derivatives with finite differences of its own values.

If two sides disagree, the one whose derivative is not the slope of its value (at second order, of
its gradient) is wrong. The differences are rough, and only decide between results that differ by
much more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradtools.testing.cross_checking.questions import Answer, CrossCheck, Found
from gradtools.testing.flat import Arrays
from gradtools.testing.report import widened

Pairs = list[tuple[float, float]]  # directional derivatives and their finite differences


class Differences:
    """Central differences of one side along the check's directions."""

    def __init__(self, check: CrossCheck, k: int) -> None:
        self.check, self.k = check, k
        self.double = all(x.dtype.itemsize >= 8 for x in check.leaves[k])
        self.step = 1e-6 if self.double else 1e-2

    def contradict(self, quantity: str) -> bool:
        """Whether this side's derivative is far from its finite difference."""
        pairs = {"jvp": self._jvp, "gradient": self._pulled, "vjp": self._pulled}
        result, wanted = np.asarray(pairs.get(quantity, self._hvp)(quantity)).T
        size = np.abs(wanted).max(initial=0.0) + np.abs(result).max(initial=0.0)
        rough = 1e-4 if self.double else 5e-2
        return bool(size > 0 and (np.abs(result - wanted) > rough * size).any())

    def _jvp(self, quantity: str) -> Pairs:
        result = self._analytic(quantity)
        slopes = self._slopes()
        return [_along(g, s) for g, s in zip(result, slopes, strict=True) if g is not None]

    def _pulled(self, quantity: str) -> Pairs:
        """<J^H c, t> and <c, difference of f along t>."""
        check = self.check
        weights = check.weights if quantity == "gradient" else check.pulled
        pairs = zip(self._analytic(quantity), check.directions("jvp")[1], strict=True)
        mine = sum(_inner(g, t) for g, t in pairs if g is not None)
        return [(mine, sum(_inner(c, s) for c, s in zip(weights, self._slopes(), strict=True)))]

    def _hvp(self, quantity: str) -> Pairs:
        """H t and the difference of the gradient along t."""
        probe = self._answer("gradient").probe
        plus, minus = self._around("hvp", lambda x: self.check._ask(probe, self.k, x))
        triples = zip(self._analytic(quantity), plus, minus, strict=True)
        return [_along(h, self._slope(p, m, h)) for h, p, m in triples if h is not None]

    def _slopes(self) -> Arrays:
        """The central differences of the differentiable outputs along the jvp's direction."""
        probe = self._answer("value").probe
        plus, minus = self._around("jvp", lambda x: list(probe.ask(self.k, x)))
        own = [probe.paths.index(path) for path in self.check.out_paths]
        like = self.check.outputs[self.k].arrays[0]
        return [self._slope(plus[i], minus[i], like) for i in own]

    def _slope(self, plus: np.ndarray | None, minus: np.ndarray | None, like: np.ndarray) -> Any:
        p, m = (np.zeros(like.shape) if x is None else widened(x) for x in (plus, minus))
        return (p - m) / (2 * self.step)

    def _around(self, purpose: str, ask: Callable[[Arrays], Found]) -> tuple[Found, Found]:
        """The answers ahead and behind along a direction."""
        direction = self.check.directions(purpose)[self.k]
        pairs = list(zip(self.check.leaves[self.k], direction, strict=True))
        ahead, behind = (
            [(widened(x) + step * widened(d)).astype(x.dtype) for x, d in pairs]
            for step in (self.step, -self.step)
        )
        return ask(ahead), ask(behind)

    def _analytic(self, quantity: str) -> Found:
        answer = self._answer(quantity)
        return (answer.first, answer.second)[self.k]

    def _answer(self, quantity: str) -> Answer:
        return next(a for a in self.check.answers if a.probe.quantity == quantity)


def _along(found: np.ndarray, difference: np.ndarray) -> tuple[float, float]:
    """A derivative and its finite difference, both projected on the latter."""
    return _inner(difference, found), _inner(difference, difference)


def _inner(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.vdot(widened(np.asarray(a)), widened(np.asarray(b))).real)
