"""The likely causes of disagreements, for the report of `cross_check`.

First come causes that need further evaluations: randomness (a side differs from itself) and a kink
(both agree nearby). Then relations of the two arrays (`relations.py`). What these do not explain is
explained by the first operations at which the recorded programs part (`diverging/`). The detail
ends with the side whose derivative contradicts finite differences of its own values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from gradtools.testing.central_differences import DerivativeComparison, dot
from gradtools.testing.checking.probe import first_line
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.quantities import CrossCheck, Result
from gradtools.testing.cross_checking.sides import inexact
from gradtools.testing.diverging.divergence import RecordedRuns
from gradtools.testing.relations import FACTOR, Relation, equal, related
from gradtools.testing.report import CONVENTION, Comparison, Report, entry_errors, widened

_STEPS = {"float64": 1e-6, "float32": 1e-3}  # the relative distance of points near a kink
UNKNOWN = "no known pattern"


def explain(check: CrossCheck, report: Report) -> None:
    """Adds the likely cause to every disagreement of the report.

    Args:
        check: The cross-check, for further evaluations.
        report: The report, whose comparisons are replaced.
    """
    leaves = {
        id(c): DifferingLeaf(c, result, i)
        for result in check.results
        for i, c in enumerate(result.comparisons)
    }
    causes = Causes(check, report)
    differing: dict[int, DifferingLeaf] = {}
    for n, c in enumerate(report.comparisons):
        if not c.agrees and c.cause is None and id(c) in leaves:
            try:
                record = causes.explained(leaves[id(c)])
            except Exception as error:  # programs may raise at nearby points
                reason = f"The search for a cause failed: {type(error).__name__}: {error}"
                record = c.because(UNKNOWN, reason)
            report.comparisons[n] = record
            differing[n] = replace(leaves[id(c)], record=record)
    _by_factors(report, differing)
    for n in differing:
        c, cause = report.comparisons[n], report.comparisons[n].cause or ""
        others = {d.cause for d in report.disagreements if d.order <= 1 and d is not c}
        alone = c.order == 0 and c.shape == () and len(others) > 0 and c.cause not in others
        unexplained = cause == UNKNOWN or (cause.startswith(FACTOR) and "," not in cause)
        first = report.first
        if c.order and first is not None and first.order == 0:
            if cause == UNKNOWN:  # what explains the value explains its derivatives
                report.comparisons[n] = c.because(first.cause or UNKNOWN, first.detail)
        elif not c.agrees and (unexplained or (alone and cause.startswith((FACTOR, "sign")))):
            report.comparisons[n] = causes.by_operations(c)


def _by_factors(report: Report, leaves: dict[int, DifferingLeaf]) -> None:
    """Gives single numbers the factor that explains arrays, such as a loss that of its gradient."""
    known = [d for d in report.disagreements if (d.cause or "").startswith(FACTOR)]
    for n, leaf in leaves.items():
        c, (a, b) = leaf.record, leaf.arrays
        for other in known if c.cause == UNKNOWN and c.ratio is not None else ():
            factor = 1.0 if other.ratio is None else other.ratio
            if abs(factor - 1) > 1e-3 and equal(a, factor * widened(b), 1e3 * c.tolerance):
                report.comparisons[n] = c.because(str(other.cause), other.detail)
                break


@dataclass(frozen=True)
class DifferingLeaf:
    """One leaf of a result that differs: its comparison, and its number among the leaves."""

    record: Comparison
    result: Result
    i: int

    @property
    def arrays(self) -> list[Any]:
        """The leaf on both sides; None where it is not connected."""
        return [side[self.i] for side in self.result.sides]


class Causes:
    """The search for causes, after all quantities have been compared."""

    def __init__(self, check: CrossCheck, report: Report) -> None:
        self.check, self.report = check, report
        self.names = [side.name for side in check.sides]
        self.results = {result.quantity.name: result for result in check.results}
        values = self.results.get("value")
        self.values_agree = values is not None and all(c.agrees for c in values.comparisons)
        self.is_random, self.contradicts = cache(self._is_random), cache(self._contradicts)
        self.diverging = cache(self._diverging)

    def explained(self, leaf: DifferingLeaf) -> Comparison:
        """The comparison of a leaf with its cause."""
        c, (a, b) = leaf.record, leaf.arrays
        derived = bool(c.order and self.values_agree)
        random = [name for k, name in enumerate(self.names) if self.is_random(c.quantity, k)]
        if random and a is not None and b is not None:
            return c.because(
                f"randomness in {' and '.join(random)}",
                "Two runs at the same point differ. Turn dropout off (eval mode), or fix the noise "
                "and pass it as an argument.",
            )
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
        if derived and (kink := self._at_a_kink(leaf)) is not None:
            return kink
        cause, detail = self._related(leaf) or self._ill_conditioned(leaf) or Relation(UNKNOWN)
        if wrong := self.wrong_side(c.quantity):
            detail = f"{detail} Finite differences say that {wrong} is wrong.".lstrip()
        return c.because(cause, detail)

    # --- operations

    def by_operations(self, c: Comparison) -> Comparison:
        """The comparison with the first operations at which the two programs part."""
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
        quantity = self.results[name].quantity
        runs = [self.check.evaluate(quantity, k, self.check.leaves[k]) for _ in range(2)]
        for x, y in zip(*runs, strict=True):
            if x is None or y is None:
                if x is not y:
                    return True
                continue
            allowed = tolerances.tolerance(x.dtype, quantity.order) or 1e-300
            if not (entry_errors(x, y, allowed, 0.0) <= 1).all():
                return True
        return False

    def _at_a_kink(self, leaf: DifferingLeaf) -> Comparison | None:
        """The comparison with a kink as its cause, if the two sides agree nearby."""
        c, quantity = leaf.record, leaf.result.quantity
        size = _STEPS.get(tolerances.real_name(c.dtype), 0.05)
        for draw in range(2):
            near = [self.check.evaluated_nearby(quantity, k, ("kink", draw), size) for k in (0, 1)]
            a, b = (None if side is None else side[leaf.i] for side in near)
            if a is None or b is None or a.shape != b.shape or not np.isfinite(widened(a)).all():
                return None
            if not equal(a, b, 10 * leaf.record.tolerance):
                return None
        if all(np.isfinite(widened(x)).all() for x in leaf.arrays):
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

    def _related(self, leaf: DifferingLeaf) -> Relation | None:
        """One side that is NaN or infinite, or a relation of the two arrays."""
        c, (a, b), (first, second) = leaf.record, map(widened, leaf.arrays), self.names
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

    def _ill_conditioned(self, leaf: DifferingLeaf) -> Relation | None:
        a, b = map(widened, leaf.arrays)
        derived = leaf.record.order and not self.values_agree
        moved = None if derived else self.check.changes_by_rounding(leaf.result, leaf.i)
        if moved is None or (np.abs(a - b) > 10 * moved).any():
            return None
        return Relation(
            "an ill-conditioned point",
            "A change of the inputs in their last digit moves the result by as much. Compare at "
            "another point, or pass a tolerance.",
        )

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
        found = self.side.pullback(leaves, self.cotangents)
        return [0.0 * x if g is None else widened(g) for g, x in zip(found, xs, strict=True)]

    def slope(self, xs: Sequence[Any], vs: Sequence[Any], us: Sequence[Any]) -> tuple[float, float]:
        """Re<v, J u> at a point, and its size without cancellation."""
        leaves, us = self.rounded(xs), self.rounded(us)
        if self.name == "gradient":
            vs = [v.astype(c.dtype) for v, c in zip(vs, self.cotangents, strict=True)]
            found = self.side.pullback(leaves, vs)
            return dot([0.0 * u if g is None else g for g, u in zip(found, us, strict=True)], us)
        if self.name == "jvp":
            return dot(vs, self.side.forward(leaves, us))
        mode = self.name.removeprefix("hvp, ").replace(" ", "_")
        return dot(vs, self.side.product(mode, leaves, us, self.cotangents))
