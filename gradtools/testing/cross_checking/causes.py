"""The likely causes of disagreements, for the report of `cross_check`.

Causes that need further evaluations are tried first: randomness (a side differs from itself) and a
kink (both agree nearby). Then relations of the two arrays are tried (`relations.py`). The remaining
disagreements are explained by the first operations at which the recorded programs diverge
(`diverging/`). The detail ends with the side whose derivative contradicts finite differences of its
own values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from gradtools.testing.central_differences import DerivativeComparison, dot
from gradtools.testing.checking.probe import first_line
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.quantities import CrossCheck, Quantity
from gradtools.testing.cross_checking.sides import inexact
from gradtools.testing.diverging.recorded_runs import RecordedRuns
from gradtools.testing.relations import FACTOR, Relation, equal, related
from gradtools.testing.report import CONVENTION, Comparison, Report, widened

_STEPS = {"float64": 1e-6, "float32": 1e-3}  # the relative distance of points near a kink
UNKNOWN = "no known pattern"


def explain(check: CrossCheck, report: Report) -> None:
    """Adds the likely cause to every disagreement of the report.

    Args:
        check: The cross-check, for further evaluations.
        report: The report, whose comparisons are replaced.
    """
    causes, explained = Causes(check, report), dict[int, list[Any]]()
    leaves = {id(c): (q, i) for q in check.quantities.values() for i, c in enumerate(q.comparisons)}
    rows = report.comparisons
    for n, c in enumerate(rows):
        if not c.agrees and c.cause is None and id(c) in leaves:
            quantity, i = leaves[id(c)]
            rows[n] = causes.explained(c, quantity, i)
            explained[n] = [side[i] for side in quantity.sides]
    factors = [d for d in report.disagreements if (d.cause or "").startswith(FACTOR)]
    for n, (a, b) in explained.items():
        for other in factors:  # a loss and its gradient have the same factor
            factor, c = other.ratio or 1.0, rows[n]
            unexplained = c.cause == UNKNOWN and c.ratio is not None and abs(factor - 1) > 1e-3
            if unexplained and equal(a, factor * widened(b), 1e3 * c.tolerance):
                rows[n] = c.because(str(other.cause), other.detail)
    for n in explained:
        c, cause, first = rows[n], rows[n].cause or "", report.first
        others = {d.cause for d in report.disagreements if d.order <= 1 and d is not c}
        alone = c.order == 0 and c.shape == () and len(others) > 0 and c.cause not in others
        unexplained = cause == UNKNOWN or (cause.startswith(FACTOR) and "," not in cause)
        if c.order and first is not None and first.order == 0:
            if cause == UNKNOWN:  # the cause of a value explains its derivatives
                rows[n] = c.because(first.cause or UNKNOWN, first.detail)
        elif not c.agrees and (unexplained or (alone and cause.startswith((FACTOR, "sign")))):
            rows[n] = causes.by_operations(c)


class Causes:
    """The search for causes, after all quantities have been compared."""

    def __init__(self, check: CrossCheck, report: Report) -> None:
        self.check, self.report = check, report
        self.names = [side.name for side in check.sides]
        values = check.quantities.get("value")
        self.values_agree = values is not None and all(c.agrees for c in values.comparisons)
        self.is_random, self.contradicts = cache(self._is_random), cache(self._contradicts)
        self.diverging = cache(self._diverging)

    def explained(self, c: Comparison, quantity: Quantity, i: int) -> Comparison:
        """The comparison of the leaf i of a quantity with its cause."""
        a, b = (side[i] for side in quantity.sides)
        random = [name for k, name in enumerate(self.names) if self.is_random(c.quantity, k)]
        if random and a is not None and b is not None:
            return c.because(
                f"randomness in {' and '.join(random)}",
                "Two runs at the same point differ. Turn dropout off (eval mode), or fix the noise "
                "and pass it as an argument.",
            )
        derived = bool(c.order and self.values_agree)
        stopped = self.diverging() if derived else None
        stopped = stopped if stopped and stopped.name.startswith("stopped") else None
        if a is None or b is None:
            lost, kept = self.names if a is None else self.names[::-1]
            ways = f"In {lost} it is stopped, detached, cast to an integer, compared, or not used."
            where = stopped.sentence if stopped else ways
            return c.because(
                f"stopped gradient in {lost}",
                f"{c.path} reaches the output in {kept} only. {where}",
            )
        if stopped:
            return c.because(*stopped)
        if derived and (kink := self._at_a_kink(c, quantity, i)) is not None:
            return kink
        cause, detail = self._related(c, a, b) or Relation(UNKNOWN)
        if wrong := self.wrong_side(c.quantity):
            detail = f"{detail} Finite differences say that {wrong} is wrong.".lstrip()
        return c.because(cause, detail)

    # --- operations

    def by_operations(self, c: Comparison) -> Comparison:
        """The comparison with the first operations at which the two programs diverge."""
        if (found := self.diverging()) is None:
            return c
        before, cause = c.cause or UNKNOWN, found.name
        if cause.endswith("no simple relation") or (before + cause).count(FACTOR) == 2:
            cause = before
        elif before.startswith(FACTOR):
            cause = f"{before}: {cause}"
        return c.because(cause, f"{c.detail} {found.sentence}".strip())

    def _diverging(self) -> Relation | None:
        """How the first operations that differ are related, and their lines."""
        try:
            kind, blame = RecordedRuns(self.check).blame()
        except Exception as error:  # such as a program that cannot be traced
            self.report.notes.append(f"operations were not compared: {first_line(error)}")
            return None
        if blame is None:
            return None
        where = f"torch: {blame.torch.place}; jax: {blame.jax.place}."
        if blame.relation.startswith("stopped"):
            mine, other = self.names if "torch" in blame.relation else self.names[::-1]
            advice = f"In {other} it is not stopped: stop it there, or remove the stop in {mine}."
            return Relation(blame.relation, f"The values agree. {where} {advice}")
        return Relation(blame.relation, f"The programs part in a {kind} at {where}")

    # --- further evaluations

    def _is_random(self, name: str, k: int) -> bool:
        """Whether one side's result differs from run to run."""
        quantity = self.check.quantities[name]
        runs = [self.check.evaluate(quantity, k, self.check.leaves[k]) for _ in range(2)]
        for x, y in zip(*runs, strict=True):
            if x is None or y is None:
                if x is not y:
                    return True
            elif not equal(x, y, tolerances.tolerance(x.dtype, quantity.order)):
                return True
        return False

    def _at_a_kink(self, c: Comparison, quantity: Quantity, i: int) -> Comparison | None:
        """The comparison with a kink as its cause, if the two sides agree nearby."""
        check, size = self.check, _STEPS.get(tolerances.real_name(c.dtype), 0.05)
        for draw in range(2):
            points = [check.nearby(k, ("kink", draw), size) for k in (0, 1)]
            near = [check.evaluated_nearby(quantity, k, x) for k, x in enumerate(points)]
            a, b = (side[i] for side in near)
            if a.shape != b.shape or not np.isfinite(widened(a)).all():
                return None
            if not equal(a, b, 10 * c.tolerance):
                return None
        if all(np.isfinite(widened(side[i])).all() for side in quantity.sides):
            return c.because(
                "convention: a kink or tie",
                "Near this point the two agree; at it each framework has its own subgradient.",
                CONVENTION,
            )
        return c.because(
            "a singular point, where a side is not finite",
            "Near this point the two agree; at it one side is NaN or infinite.",
        )

    # --- relations of the two arrays

    def _related(self, c: Comparison, a: Any, b: Any) -> Relation | None:
        """One side that is NaN or infinite, or a relation of the two arrays."""
        a, b, (first, second) = widened(a), widened(b), self.names
        near = min(1e3 * c.tolerance, 0.03) or 1e-9
        if a.shape != b.shape:
            words = "A reduction, keepdims, or broadcasting (n, 1) against (n,) on one side only."
            return related(a, b, near=near) or Relation("another shape", words)
        for x, y, mine, other in ((a, b, first, second), (b, a, second, first)):
            if (np.isnan(x) & ~np.isnan(y)).any():
                why = "A root or logarithm of a negative number, or a guard such as nan_to_num."
                if c.order and self.values_agree:
                    why = "The value is finite: 0 times infinity in the branch that where discards."
                return Relation(f"NaN in {mine}", why)
            if (np.isinf(x) & np.isfinite(y)).any():
                why = f"{other} is finite there: an overflow, or a division by 0, in {mine}."
                return Relation(f"infinity in {mine}", why)
        if equal(a, b, near):  # every relation close to the identity would hold
            return None
        return related(a, b, self.names, c.order, near, self.check.sizes())

    # --- which side is wrong

    def wrong_side(self, name: str) -> str | None:
        """The side whose derivative contradicts its values, if it is one of the two."""
        if not self.values_agree:
            return None
        wrong = [side for k, side in enumerate(self.names) if self.contradicts(name, k)]
        return wrong[0] if len(wrong) == 1 else None

    def _contradicts(self, name: str, k: int) -> bool:
        """Whether one side's derivative differs from central differences of its own values."""
        program = _OneSide(self.check, name, k)
        points = [widened(x) for x in self.check.leaves[k]]
        comparison = DerivativeComparison(program, points, np.random.default_rng(self.check.seed))
        try:
            return comparison.verdict() == "differs"
        except Exception:  # a program that fails nearby gives no evidence
            return False


class _OneSide:
    """One side's values and a derivative of them, as `DerivativeComparison` compares them.

    At second order the values are those of its gradient.
    """

    def __init__(self, check: CrossCheck, name: str, k: int) -> None:
        self.side, self.name, self.own = check.sides[k], name, check.leaves[k]
        self.cotangents = check.cotangents_of(k)
        self.eps = max(tolerances.epsilon(x.dtype) for x in self.own)

    def rounded(self, xs: Sequence[Any]) -> list[Any]:
        """xs in the precision of the leaves."""
        return [np.asarray(x).astype(y.dtype) for x, y in zip(xs, self.own, strict=True)]

    def __call__(self, xs: Sequence[Any]) -> list[Any]:
        leaves = self.rounded(xs)
        if not self.name.startswith("hvp"):
            return [*map(widened, inexact(self.side.value(leaves)).values())]
        return self._pulled(leaves, self.cotangents)

    def _pulled(self, leaves: list[Any], vs: list[Any]) -> list[Any]:
        found = zip(self.side.pullback(leaves, vs), leaves, strict=True)
        return [widened(0 * x if g is None else g) for g, x in found]

    def slope(self, xs: Sequence[Any], vs: Sequence[Any], us: Sequence[Any]) -> tuple[float, float]:
        """Re<v, J u> at a point, and its size without cancellation."""
        leaves, us = self.rounded(xs), self.rounded(us)
        if self.name == "gradient":
            seeds = [v.astype(c.dtype) for v, c in zip(vs, self.cotangents, strict=True)]
            return dot(self._pulled(leaves, seeds), us)
        if self.name == "jvp":
            return dot(vs, self.side.forward(leaves, us))
        mode = self.name.removeprefix("hvp, ").replace(" ", "_")
        return dot(vs, self.side.product(mode, leaves, us, self.cotangents))
