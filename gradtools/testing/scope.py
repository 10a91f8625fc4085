"""Where a disagreement happens, and which side is wrong.

Known once every quantity has been compared: whether only one mode is concerned, or only the second
order; whether a side differs from itself; whether a side's derivative is the slope of its value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtools.testing import tolerances
from gradtools.testing.crossing import Check
from gradtools.testing.kinks import Convention, explaining
from gradtools.testing.report import errors, widened

REVERSE, FORWARD = ("gradient", "vjp"), ("jvp",)


class Scope:
    """Where a disagreement happens, known once every quantity has been compared."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.good = {
            answer.probe.quantity: all(c.agrees for c in answer.comparisons)
            for answer in check.answers
        }
        self.values_agree = self.good.get("value", False)
        self._random: dict[Any, bool] = {}
        self._rows: dict[int, list[Convention]] = {}

    def of(self, quantity: str) -> str:
        """Words such as ", at second order only"."""
        reverse = [self.good[q] for q in REVERSE if q in self.good]
        forward = [self.good[q] for q in FORWARD if q in self.good]
        if quantity == "value":
            return ", in the value only" if reverse and all(reverse + forward) else ""
        if not self.values_agree:
            return ""
        if quantity in REVERSE:
            only = forward and all(forward) and self.culprit(quantity)
            return ", in reverse mode only" if only else ""
        if quantity in FORWARD:
            only = reverse and all(reverse) and self.culprit(quantity)
            return ", in forward mode only" if only else ""
        if not (reverse and all(reverse + forward)):
            return ""
        others = [good for q, good in self.good.items() if q[:3] == "hvp" and q != quantity]
        if others and all(others):
            return f", in {quantity.removeprefix('hvp, ')} only"
        return ", at second order only"

    def conventions(self, order: int) -> list[Convention]:
        """The rows of the table that differ and whose operations both programs hold."""
        if order not in self._rows:
            torch_ops, jax_ops = (self.check.operations(k) for k in (0, 1))
            self._rows[order] = explaining(torch_ops or set(), jax_ops, order)
        return self._rows[order]

    def is_random(self, probe: Any, k: int) -> bool:
        """Whether one side's answer to a probe differs from run to run."""
        key = (probe.quantity, k)
        if key not in self._random:
            self._random[key] = self._differs_from_itself(probe, k)
        return self._random[key]

    def _differs_from_itself(self, probe: Any, k: int) -> bool:
        runs = [self.check._ask(probe, k, self.check.leaves[k]) for _ in range(2)]
        for x, y in zip(*runs, strict=True):
            if (x is None) != (y is None):
                return True
            if x is not None and y is not None:
                allowed = tolerances.tolerance(x.dtype, probe.order) or 1e-300
                if not (errors(x, y, allowed, 0.0) <= 1).all():
                    return True
        return False

    # --- which side is wrong

    def culprit(self, quantity: str) -> str:
        """A sentence that names the side that contradicts itself; empty if that is not seen."""
        if not self.values_agree or quantity in ("value", "parameter"):
            return ""
        wrong = [
            side.name for k, side in enumerate(self.check.sides) if self._contradicts(k, quantity)
        ]
        if len(wrong) != 1:
            return ""
        return f"Finite differences say that {wrong[0]} is wrong."

    def _contradicts(self, k: int, quantity: str) -> bool:
        key = ("contradicts", quantity, k)
        if key not in self._random:
            self._random[key] = self._far_from_differences(k, quantity)
        return self._random[key]

    def _far_from_differences(self, k: int, quantity: str) -> bool:
        """Whether a derivative of one side is far from finite differences of that side."""
        found, wanted = [], []
        try:
            pairs = self._along(k, quantity)
        except Exception:
            return False
        for mine, difference in pairs:
            found.append(mine)
            wanted.append(difference)
        x, y = np.asarray(found), np.asarray(wanted)
        size = np.abs(y).max(initial=0.0) + np.abs(x).max(initial=0.0)
        rough = 1e-4 if self._is_double() else 5e-2
        return bool(size > 0 and (np.abs(x - y) > rough * size).any())

    def _is_double(self) -> bool:
        return all(x.dtype.itemsize >= 8 for x in self.check.leaves[0])

    def _along(self, k: int, quantity: str) -> list[tuple[float, float]]:
        """Pairs of a directional derivative and its finite difference, along one direction."""
        check = self.check
        step = 1e-6 if self._is_double() else 1e-2
        direction = check.directions("hvp" if quantity[:3] == "hvp" else "jvp")[k]
        ahead, behind = (
            [
                _moved_along(x, sign * step, d)
                for x, d in zip(check.leaves[k], direction, strict=True)
            ]
            for sign in (1, -1)
        )
        if quantity[:3] == "hvp":
            probe = next(a.probe for a in check.answers if a.probe.quantity == "gradient")
            product = next(a for a in check.answers if a.probe.quantity == quantity)
            arrays = (product.first, product.second)[k]
            plus, minus = (check._ask(probe, k, leaves) for leaves in (ahead, behind))
            return [
                _against(h, (_wide(p, h) - _wide(m, h)) / (2 * step))
                for h, p, m in zip(arrays, plus, minus, strict=True)
                if h is not None
            ]
        probe = next(a.probe for a in check.answers if a.probe.quantity == "value")
        plus, minus = (
            {p: y for p, y in zip(probe.paths, probe.ask(k, x), strict=True) if y is not None}
            for x in (ahead, behind)
        )
        slopes = [(widened(plus[p]) - widened(minus[p])) / (2 * step) for p in check.out_paths]
        if quantity == "jvp":
            answer = next(a for a in check.answers if a.probe.quantity == "jvp")
            return [
                _against(g, s)
                for g, s in zip((answer.first, answer.second)[k], slopes, strict=True)
                if g is not None
            ]
        answer = next(a for a in check.answers if a.probe.quantity == quantity)
        weights = check.weights if quantity == "gradient" else check.pulled
        pulled = (answer.first, answer.second)[k]
        tangents = check.directions("jvp")[1]
        mine = sum(_inner(g, t) for g, t in zip(pulled, tangents, strict=True) if g is not None)
        return [(mine, sum(_inner(c, s) for c, s in zip(weights, slopes, strict=True)))]


def _moved_along(x: np.ndarray, step: float, direction: np.ndarray) -> np.ndarray:
    return (widened(x) + step * widened(direction)).astype(x.dtype)


def _wide(x: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    return np.zeros_like(widened(like)) if x is None else widened(x)


def _against(found: np.ndarray, difference: np.ndarray) -> tuple[float, float]:
    """A result and the difference that it should be, along the latter."""
    return _inner(difference, found), _inner(difference, difference)


def _inner(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.vdot(widened(np.asarray(a)), widened(np.asarray(b))).real)
