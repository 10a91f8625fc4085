"""The likely causes of disagreements, for the report of `cross_check`.

First come causes that need further evaluations: randomness (a side differs from itself) and a kink
(both agree nearby). Then relations of the two arrays (`relations.py`) and precision. What these do
not explain is explained by the first operations at which the recorded programs part
(`diverging/`). The detail ends with the side whose derivative contradicts finite differences of its
own values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from gradtools.testing.checking.probe import first_line
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.quantities import CrossCheck, Result
from gradtools.testing.diverging.divergence import RecordedRuns
from gradtools.testing.relations import FACTOR, Cause, array_cause, equal, shape_cause
from gradtools.testing.report import (
    CONVENTION,
    DIFFERS,
    Comparison,
    Report,
    entry_errors,
    largest,
    widened,
)

_STEPS = {"float64": 1e-6, "float32": 1e-3}  # the relative distance of points near a kink
_SHORT = {"float64": 1e-9, "float32": 1e-4}  # far below the spacing of the next coarser dtype
UNKNOWN = "no known pattern"
_UNKNOWN = (UNKNOWN, "close, but another formula")
_FLOAT32 = (1e-10, 1e-5)  # the relative differences attributed to float32 in a float64 run


def explain(check: CrossCheck, report: Report, allow: bool) -> None:
    """Adds the likely cause to every disagreement of the report.

    Args:
        check: The cross-check, for further evaluations.
        report: The report, whose comparisons are replaced.
        allow: Whether a difference at a kink does not count as a disagreement.
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
                record = causes.explained(leaves[id(c)], allow)
            except Exception as error:  # programs may raise at nearby points
                reason = f"The search for a cause failed: {type(error).__name__}: {error}"
                record = c.because(UNKNOWN, reason)
            report.comparisons[n] = record
            differing[n] = replace(leaves[id(c)], record=record)
    _by_factors(report, differing)
    for n, leaf in differing.items():
        c, cause = report.comparisons[n], report.comparisons[n].cause or ""
        others = {d.cause for d in report.disagreements if d.order <= 1 and d is not c}
        alone = c.order == 0 and c.shape == () and len(others) > 0 and c.cause not in others
        unexplained = cause in _UNKNOWN or (cause.startswith(FACTOR) and "," not in cause)
        first = report.first
        if c.order and first is not None and first.order == 0:
            if cause in _UNKNOWN:  # what explains the value explains its derivatives
                report.comparisons[n] = c.because(first.cause or UNKNOWN, first.detail)
        elif not c.agrees and (unexplained or (alone and cause.startswith((FACTOR, "sign")))):
            report.comparisons[n] = causes.by_operations(replace(leaf, record=c))


def _by_factors(report: Report, leaves: dict[int, DifferingLeaf]) -> None:
    """Gives single numbers the factor that explains arrays, such as a loss that of its gradient."""
    known = [d for d in report.disagreements if (d.cause or "").startswith(FACTOR)]
    for n, leaf in leaves.items():
        c, (a, b) = leaf.record, leaf.arrays
        for other in known if c.cause in _UNKNOWN and c.ratio is not None else ():
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

    @property
    def dtype(self) -> str:
        """The name of the real dtype."""
        return tolerances.real_name(self.record.dtype)


class Causes:
    """The search for causes, after all quantities have been compared."""

    def __init__(self, check: CrossCheck, report: Report) -> None:
        self.check, self.report = check, report
        self.names = [side.name for side in check.sides]
        self.results = {result.quantity.name: result for result in check.results}
        values = self.results.get("value")
        self.values_agree = values is not None and all(c.agrees for c in values.comparisons)
        self.float32_side: str | None = None  # a side that is known to compute in float32
        self.is_random, self.contradicts = cache(self._is_random), cache(self._contradicts)
        self.diverging = cache(self._diverging)

    def explained(self, leaf: DifferingLeaf, allow: bool) -> Comparison:
        """The comparison of a leaf with its cause."""
        c, (a, b) = leaf.record, leaf.arrays
        derived = bool(c.order and self.values_agree)
        if a is not None and b is not None and a.shape != b.shape:
            return c.because(*shape_cause(a.shape, b.shape))
        random = [name for k, name in enumerate(self.names) if self.is_random(c.quantity, k)]
        if random and a is not None and b is not None:
            return c.because(
                f"randomness in {' and '.join(random)}",
                "Two runs at the same point differ. Turn dropout off (eval mode), or fix the noise "
                "and pass it as an argument.",
            )
        stopped = self.diverging() if derived else None
        if a is None or b is None:
            lost, kept = self.names if a is None else self.names[::-1]
            ways = f"In {lost} it is stopped, detached, cast to an integer, compared, or not used."
            where = stopped[1] if stopped and stopped[0].startswith("stopped") else ways
            return c.because(
                f"stopped gradient in {lost}",
                f"{c.path} reaches the output in {kept} only. {where}",
            )
        if stopped is not None and stopped[0].startswith("stopped"):
            return c.because(*stopped)
        if derived and (kink := self._at_a_kink(leaf, allow)) is not None:
            return kink
        found = self._related(leaf)
        if found is None and (self.values_agree or not c.order):
            found = self._precision(leaf)
        cause, detail = found or (UNKNOWN, "")
        wrong = self.wrong_side(c.quantity)
        if wrong:
            detail = f"{detail} Finite differences say that {wrong} is wrong.".lstrip()
        return c.because(cause, detail)

    # --- operations

    def by_operations(self, leaf: DifferingLeaf) -> Comparison:
        """The comparison with the first operations at which the two programs part."""
        c, found = leaf.record, self.diverging()
        if found is None:
            return c
        before, cause = c.cause or UNKNOWN, found[0]
        if cause.endswith("no simple relation") or (before + cause).count(FACTOR) == 2:
            cause = before
        elif before.startswith(FACTOR):
            cause = f"{before}: {cause}"
        return c.because(cause, f"{c.detail} {found[1]}".strip())

    def _diverging(self) -> Cause | None:
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
            return blame.relation, f"The values agree. {where} {advice}"
        return blame.relation, f"The programs part in a {kind} at {where}"

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

    def _nearby(self, leaf: DifferingLeaf, k: int, purpose: Any, size: float) -> np.ndarray | None:
        result = self.check.evaluated_nearby(leaf.result.quantity, k, purpose, size)
        return None if result is None else result[leaf.i]

    def _at_a_kink(self, leaf: DifferingLeaf, allow: bool) -> Comparison | None:
        """The comparison with a kink as its cause, if the two sides agree nearby."""
        c, size = leaf.record, _STEPS.get(leaf.dtype, 0.05)
        for draw in range(2):
            a, b = (self._nearby(leaf, k, ("kink", draw), size) for k in (0, 1))
            if a is None or b is None or a.shape != b.shape or not np.isfinite(widened(a)).all():
                return None
            if not equal(a, b, 10 * leaf.record.tolerance):
                return None
        if all(np.isfinite(widened(x)).all() for x in leaf.arrays):
            return c.because(
                "convention: a kink or tie",
                "Near this point the two agree; at it each framework has its own subgradient.",
                CONVENTION if allow else DIFFERS,
            )
        return c.because(
            "a singular point, where a side is not finite",
            "Near this point the two agree; at it one side is NaN or infinite.",
        )

    # --- relations of the two arrays

    def _related(self, leaf: DifferingLeaf) -> Cause | None:
        """One side that is NaN or infinite, or a relation of the two arrays."""
        c, (a, b), (first, second) = leaf.record, map(widened, leaf.arrays), self.names
        for x, y, mine, other in ((a, b, first, second), (b, a, second, first)):
            if (np.isnan(x) & ~np.isnan(y)).any():
                why = "A root or logarithm of a negative number, or a guard such as nan_to_num."
                if c.order and self.values_agree:
                    why = "The value is finite: 0 times infinity in the branch that where discards."
                return f"NaN in {mine}", why
            if (np.isinf(x) & np.isfinite(y)).any():
                why = f"{other} is finite there: an overflow, or a division by 0, in {mine}."
                return f"infinity in {mine}", why
        near = min(1e3 * c.tolerance, 0.03)
        if equal(a, b, near):  # every relation close to the identity would hold
            return None
        return array_cause(a, b, self.names, c.order, near, self.check.sizes())

    # --- precision

    def _precision(self, leaf: DifferingLeaf) -> Cause | None:
        """Coarser arithmetic on one side, whose result is a staircase, or an ill-conditioned point.

        Once a side is known to compute in float32, other differences of that size have the same
        cause: results that cancel are staircases on both sides.
        """
        a, b = map(widened, leaf.arrays)
        scale = max(largest(x) for side in leaf.result.sides for x in side if x is not None)
        gap = largest(a - b) / scale if scale else 0.0
        is_float32 = leaf.dtype == "float64" and _FLOAT32[0] < gap < _FLOAT32[1]
        coarse = self.float32_side if is_float32 else None
        if coarse is None and leaf.dtype in _SHORT:
            stepped = [name for k, name in enumerate(self.names) if self._is_stepped(leaf, k)]
            coarse = stepped[0] if len(stepped) == 1 else None
        if coarse is not None and is_float32:
            self.float32_side = coarse
            flax = " flax's attention and jax.nn.dot_product_attention do so under x64, too."
            return (
                f"float32 on the way in {coarse}",
                f"The largest difference is {gap:.1e} of the largest entry: float32's rounding in "
                f"a run in float64, and no fault of the port.{flax if coarse == 'jax' else ''} "
                'Compare in float32 with dtype="float32", or compute in float64 there.',
            )
        if coarse is not None:
            return (
                f"16-bit floats, or rounding, on the way in {coarse}",
                f"It moves in steps while its inputs move smoothly; the difference is {gap:.1e} "
                "of the largest entry.",
            )
        moved = self.check.changes_by_rounding(leaf.result, leaf.i)
        if not (np.abs(a - b) > 10 * moved).any():
            return (
                "an ill-conditioned point",
                "A change of the inputs in their last digit moves the result by as much. Compare "
                "at another point, or pass a tolerance.",
            )
        error = float(entry_errors(a, b, 1.0, 0.0).max(initial=0.0))
        if error < 0.02:
            return (
                "close, but another formula",
                f"Relative error {error:.1e}: another constant (an epsilon, say, or one in "
                "float32), or an approximation of the function on one side.",
            )
        return None

    def _is_stepped(self, leaf: DifferingLeaf, k: int) -> bool:
        """Whether one side's result is a staircase in its inputs: rounded to a coarser dtype."""
        step, own, others = _SHORT[leaf.dtype], leaf.arrays[k], leaf.arrays[1 - k]
        base = widened(own)
        for draw in range(3):
            once, twice = (self._nearby(leaf, k, ("steps", draw), s) for s in (step, 2 * step))
            if once is None or twice is None:
                return False
            once, twice = widened(once) - base, widened(twice) - base
            if np.abs(twice - 2 * once).max(initial=0.0) > 0.2 * np.abs(twice).max(initial=0.0):
                return True
        other = self._nearby(leaf, 1 - k, ("steps", 0), step)
        moves = other is not None and np.any(widened(other) != widened(others))
        return bool(moves and not np.any(once))

    # --- which side is wrong

    def wrong_side(self, name: str) -> str | None:
        """The side whose derivative contradicts its values, if it is one of the two."""
        if not self.values_agree or name in ("value", "parameter"):
            return None
        wrong = [side for k, side in enumerate(self.names) if self.contradicts(name, k)]
        return wrong[0] if len(wrong) == 1 else None

    def _contradicts(self, name: str, k: int) -> bool:
        """Whether one side's derivative is far from central differences of its own values.

        At second order they are those of its gradient. Both are taken along one direction and
        weighted by one cotangent. The differences are rough, and only decide between results that
        differ by much more.
        """
        check, second = self.check, name.startswith("hvp")
        base = self.results["gradient" if second else "value"]
        moves = check.directions("hvp" if second else "jvp")
        weights = check.directions("weights")[1] if second else check.cotangents
        double = all(x.dtype.itemsize >= 8 for x in check.leaves[k])
        step, rough = (1e-6, 1e-4) if double else (1e-2, 5e-2)

        def at(step: float) -> float:
            pairs = zip(check.leaves[k], moves[k], strict=True)
            moved = [(widened(x) + step * widened(t)).astype(x.dtype) for x, t in pairs]
            outs = check.evaluate(base.quantity, k, moved)
            wanted = base.quantity.paths if second else check.out_paths
            return _inner(weights, [outs[base.quantity.paths.index(path)] for path in wanted])

        try:
            slope = (at(step) - at(-step)) / (2 * step)
        except Exception:  # a program that fails nearby gives no evidence
            return False
        found = _inner(self.results[name].sides[k], moves[1] if name == "gradient" else weights)
        return abs(found - slope) > rough * (abs(found) + abs(slope))


def _inner(xs: Sequence[Any], ys: Sequence[Any]) -> float:
    """The sum of Re<x, y>; 0 where one is not connected."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    return float(sum(np.vdot(widened(x), widened(y)).real for x, y in pairs))
