"""The scope of a disagreement: one mode, second order only; and the side that is wrong.

After all quantities are compared, this determines whether only one mode or only second order is
concerned, whether a side is random, and whether a side's derivative is the slope of its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradtools.testing.checking.kinks import Convention, explaining
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.questions import CrossCheck
from gradtools.testing.report import entry_errors, widened

REVERSE, FORWARD = ("gradient", "vjp"), ("jvp",)


class Scope:
    """The scope of disagreements, determined after every quantity has been compared."""

    def __init__(self, check: CrossCheck) -> None:
        self.check = check
        self.good = {
            answer.probe.quantity: all(c.agrees for c in answer.comparisons)
            for answer in check.answers
        }
        self.values_agree = self.good.get("value", False)
        self.in_float32: list[str] = []  # sides that are known to compute in float32
        self._known: dict[Any, bool] = {}
        self._rows: dict[int, list[Convention]] = {}

    def of(self, quantity: str) -> str:
        """A suffix such as ", at second order only", or ""."""
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
        """The rows of the table that differ and whose operations are in both programs."""
        if order not in self._rows:
            torch_ops, jax_ops = (self.check.operations(k) for k in (0, 1))
            self._rows[order] = explaining(torch_ops or set(), jax_ops, order)
        return self._rows[order]

    def is_random(self, probe: Any, k: int) -> bool:
        """Whether one side's result differs from run to run."""
        key = (probe.quantity, k)
        if key not in self._known:
            self._known[key] = self._differs_from_itself(probe, k)
        return self._known[key]

    def _differs_from_itself(self, probe: Any, k: int) -> bool:
        runs = [self.check._ask(probe, k, self.check.leaves[k]) for _ in range(2)]
        for x, y in zip(*runs, strict=True):
            if (x is None) != (y is None):
                return True
            if x is not None and y is not None:
                allowed = tolerances.tolerance(x.dtype, probe.order) or 1e-300
                if not (entry_errors(x, y, allowed, 0.0) <= 1).all():
                    return True
        return False

    # --- which side is wrong

    def culprit(self, quantity: str) -> str:
        """A sentence that names the side whose derivative contradicts its values, or ""."""
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
        if key not in self._known:
            try:
                self._known[key] = _differs_from_slope(self.check, k, quantity)
            except Exception:  # a program that fails nearby gives no evidence
                self._known[key] = False
        return self._known[key]


def _differs_from_slope(check: CrossCheck, k: int, quantity: str) -> bool:
    """Whether one side's derivative is far from central differences of its own values.

    At second order they are those of its gradient. They are rough, and only decide between results
    that differ by much more.
    """
    probes = {answer.probe.quantity: answer.probe for answer in check.answers}
    known = {answer.probe.quantity: (answer.first, answer.second)[k] for answer in check.answers}
    second = quantity not in (*REVERSE, *FORWARD)
    probe = probes["gradient" if second else "value"]
    directions = check.directions("hvp" if second else "jvp")
    double = all(x.dtype.itemsize >= 8 for x in check.leaves[k])
    step, rough = (1e-6, 1e-4) if double else (1e-2, 5e-2)

    def at(step: float) -> Sequence[np.ndarray | None]:
        pairs = zip(check.leaves[k], directions[k], strict=True)
        return check._ask(
            probe, k, [(widened(x) + step * widened(t)).astype(x.dtype) for x, t in pairs]
        )

    derivative, likes = known[quantity], known[quantity if second else "value"]
    slopes = [
        None if y is None else (_filled(ahead, y) - _filled(behind, y)) / (2 * step)
        for ahead, behind, y in zip(at(step), at(-step), likes, strict=True)
    ]
    if not second:
        slopes = [slopes[probe.paths.index(path)] for path in check.out_paths]
    if quantity in REVERSE:  # J^H c and J t, each along the other's direction
        cts = check.weights if quantity == "gradient" else check.pulled
        pulled = sum(map(_inner, derivative, directions[1]))
        pairs = [(pulled, sum(map(_inner, slopes, cts)))]
    else:
        given = [(d, s) for d, s in zip(derivative, slopes, strict=True) if d is not None]
        pairs = [(_inner(d, s), _inner(s, s)) for d, s in given]
    result, wanted = np.asarray(pairs).T
    size = np.abs(wanted).max(initial=0.0) + np.abs(result).max(initial=0.0)
    return bool(size > 0 and (np.abs(result - wanted) > rough * size).any())


def _filled(x: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    """x in 64 bits; zeros for None, which is not connected."""
    return np.zeros(like.shape) if x is None else widened(x)


def _inner(a: np.ndarray | None, b: Any) -> float:
    return 0.0 if a is None else float(np.vdot(widened(a), widened(b)).real)
