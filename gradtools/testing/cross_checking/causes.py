"""Finds likely causes of disagreements for the report of `cross_check`.

Each disagreement is explained by the first cause that applies:

1. randomness (two runs of one side differ), or an argument that affects only one side's output;
2. a gradient that one side stops, a kink near which both sides agree, or NaN or inf on one side;
3. a relation between the two arrays (`relations.py`);
4. the first operations at which the recorded programs diverge (`diverging/`).

If a value differs, derivatives without a known cause get the cause of the first disagreement. If
the derivative of one side differs from finite differences, the detail of the comparison names this
side.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.quantities import CrossCheck
from gradtools.testing.diverging.recorded_runs import RecordedRuns
from gradtools.testing.flat import first_line, inner
from gradtools.testing.relations import FACTOR, Relation, equal, orders, related
from gradtools.testing.report import CONVENTION, Comparison, Report, largest, widened

_STEPS = {"float64": 1e-6, "float32": 1e-3}  # relative distances of the points tested near a kink
UNKNOWN = "no known pattern"
_MOST_ORDERS = 128  # the maximum number of axis orders that are tried


def explain(check: CrossCheck, report: Report) -> None:
    """Adds the likely cause to every disagreement of the report.

    Args:
        check: The `CrossCheck` that evaluates both programs again.
        report: The report; its disagreements are replaced by copies with a cause.
    """
    causes, rows = Causes(check, report), report.comparisons
    unexplained = [n for n, c in enumerate(rows) if not c.agrees and c.cause is None]
    for n in unexplained:
        rows[n] = causes.of(rows[n])
    for n in unexplained:
        c, first = rows[n], report.first
        if c.agrees or first is None:
            continue
        if c.order and not first.order:
            if c.cause == UNKNOWN:
                rows[n] = c.because(first.cause or UNKNOWN, first.detail)
        elif causes.is_vague(c):
            rows[n] = causes.by_operations(causes.with_the_factor(c))


class Causes:
    """Searches for causes after all quantities have been compared."""

    def __init__(self, check: CrossCheck, report: Report) -> None:
        self.check, self.report = check, report
        self.names = [side.name for side in check.sides]
        values = [c for c in report if c.quantity == "value"]
        self.values_agree = bool(values) and all(c.agrees for c in values)
        self.is_random = cache(self._is_random)
        self.diverging, self.reordered = cache(self._diverging), cache(self._reordered)

    def of(self, c: Comparison) -> Comparison:
        """Returns a copy of c with a cause that follows from the results of both sides."""
        quantity = self.check.quantities[c.quantity]
        i = quantity.paths.index(c.path)
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
            ways = f"In {lost} the leaf is detached, cast to an integer, compared, or not used."
            return c.because(
                f"stopped gradient in {lost}",
                f"{c.path} reaches the output in {kept} only. "
                f"{stopped.sentence if stopped else ways}",
            )
        if stopped:
            return c.because(*stopped)
        if derived and (kink := self._at_a_kink(c, i)) is not None:
            return kink
        cause, detail = self._related(c, widened(a), widened(b))
        if derived and (wrong := self._wrong_side(c, i)):
            detail = f"{detail} Finite differences show that {wrong} is wrong.".lstrip()
        return c.because(cause, detail)

    # --- operations

    def is_vague(self, c: Comparison) -> bool:
        """Returns whether the cause is unknown or an unexplained factor, which may be accidental.

        Any two numbers differ by a factor, so a scalar's factor counts only if another result has
        the same factor.
        """
        cause, others = c.cause or "", self.report.disagreements
        others = [d for d in others if d.order <= 1 and d is not c]
        alone = c.order == 0 and c.shape == () and others and cause not in {d.cause for d in others}
        if alone and cause.startswith((FACTOR, "sign")):
            return True
        return cause == UNKNOWN or (cause.startswith(FACTOR) and "," not in cause)

    def with_the_factor(self, c: Comparison) -> Comparison:
        """Returns c; if its cause is unknown, with the factor of a disagreement of equal ratio."""
        for d in self.report.disagreements:
            is_factor = c.cause == UNKNOWN and (d.cause or "").startswith(FACTOR)
            if is_factor and c.ratio and d.ratio and abs(d.ratio / c.ratio - 1) < 1e3 * c.tolerance:
                return c.because(d.cause or "", d.detail)
        return c

    def by_operations(self, c: Comparison) -> Comparison:
        """Adds to the cause the first operations at which the two programs diverge."""
        if (found := self.diverging()) is None:
            return c
        before, cause = c.cause or UNKNOWN, found.name
        if cause.endswith("no simple relation") or (before + cause).count(FACTOR) == 2:
            cause = before
        elif before.startswith(FACTOR):
            cause = f"{before}: {cause}"
        if c.order == 0 and (cause == UNKNOWN or "another order" in cause):
            cause = self.reordered() or cause
        return c.because(cause, f"{c.detail} {found.sentence}".strip())

    def _diverging(self) -> Relation | None:
        """Returns the relation between the first operations that differ, with source lines."""
        try:
            kind, blame = RecordedRuns(self.check).blame()
        except Exception as error:  # for example, a program cannot be traced
            self.report.notes.append(f"operations were not compared: {first_line(error)}")
            return None
        if blame is None:
            return None
        where = f"torch: {blame.torch.place}; jax: {blame.jax.place}."
        if blame.relation.startswith("stopped"):
            mine, other = self.names if "torch" in blame.relation else self.names[::-1]
            advice = (
                f"In {other} the gradient is not stopped: stop it, or do not stop it in {mine}."
            )
            return Relation(blame.relation, f"The values agree. {where} {advice}")
        return Relation(blame.relation, f"The programs diverge in a {kind} at {where}")

    # --- further evaluations

    def _reordered(self) -> str:
        """Searches for an axis order of JAX's leaves for which JAX returns PyTorch's values."""
        check, quantity = self.check, self.check.quantities["value"]
        leaves, expected = check.leaves[1], quantity.sides[0]
        lengths = dict.fromkeys(n for x in leaves for n in x.shape)
        tried = ((n, name, order) for n in lengths for name, order in orders(n))
        for n, name, order in islice(tried, _MOST_ORDERS):
            index = [np.ix_(*(order if k == n else range(k) for k in x.shape)) for x in leaves]
            moved = [x[places] for x, places in zip(leaves, index, strict=True)]
            found = zip(check.evaluated_nearby(quantity, 1, moved), expected, strict=True)
            if all(equal(x, y, 100 * tolerances.tolerance(x.dtype)) for x, y in found):
                axes = name.replace("axis", f"axes of length {n}")
                return f"{axes}: gates, heads or channels in another order"
        return ""

    def _is_random(self, name: str, k: int) -> bool:
        """Returns whether two runs of one side give different results."""
        quantity = self.check.quantities[name]
        runs = (self.check.evaluate(quantity, k, self.check.leaves[k]) for _ in range(2))
        return any(
            x is not y
            and (
                x is None
                or y is None
                or not equal(x, y, tolerances.tolerance(x.dtype, quantity.order))
            )
            for x, y in zip(*runs, strict=True)
        )

    def _at_a_kink(self, c: Comparison, i: int) -> Comparison | None:
        """Returns c with a kink or singularity as its cause, or None if the sides differ nearby."""
        check, quantity = self.check, self.check.quantities[c.quantity]
        size = _STEPS.get(tolerances.real_name(c.dtype), 0.05)
        for draw in range(2):
            points = check.nearby(("kink", draw), size)
            a, b = (check.evaluated_nearby(quantity, k, points[k])[i] for k in (0, 1))
            if not np.isfinite(widened(a)).all() or not equal(a, b, 10 * c.tolerance):
                return None
        if all(np.isfinite(widened(side[i])).all() for side in quantity.sides):
            return c.because(
                "convention: a kink or tie",
                "Both sides agree near this point; here, each framework has its own subgradient.",
                CONVENTION,
            )
        return c.because(
            "a singular point, where a side is not finite",
            "Both sides agree near this point; here, one side is NaN or infinite.",
        )

    def _wrong_side(self, c: Comparison, i: int) -> str | None:
        """Returns the name of the side that differs from finite differences, or None if unclear.

        The finite differences are computed from PyTorch's values or gradients, which agree with
        JAX's values or gradients.
        """
        check, base = self.check, self.check.quantities["gradient" if c.order == 2 else "value"]
        if not all(row.agrees for row in self.report if row.quantity == base.name):
            return None
        step = 1e-5 if tolerances.real_name(c.dtype) == "float64" else 1e-2
        us, theirs = check.directions("hvp" if c.order == 2 else "jvp")
        pairs = [*zip(check.leaves[0], us, strict=True)]
        up, down = (
            check.evaluated_nearby(base, 0, [(x + h * u).astype(x.dtype) for x, u in pairs])
            for h in (step, -step)
        )
        slopes = [(widened(p) - widened(q)) / (2 * step) for p, q in zip(up, down, strict=True)]
        slope = dict(zip(base.paths, slopes, strict=True))
        sides = check.quantities[c.quantity].sides
        if c.quantity != "gradient":
            numeric, found = slope[c.path], [side[i] for side in sides]
        else:
            numeric = inner(check.cotangents, [slope[f"output{p}"] for p in check.out_paths])
            full = lambda gs: [0 * u if g is None else g for u, g in zip(theirs, gs, strict=True)]
            found = [inner(theirs, full(side)) for side in sides]
        off = [largest(numeric - widened(x)) for x in found]
        return self.names[off[1] > off[0]] if max(off) > 10 * min(off) else None

    # --- relations between the two arrays

    def _related(self, c: Comparison, a: Any, b: Any) -> Relation:
        """Describes the relation between the two arrays, or which side is NaN or infinite."""
        near = min(1e3 * c.tolerance, 0.03) or 1e-9
        if a.shape != b.shape:
            words = "Does one side reduce, use keepdims, or broadcast (n, 1) against (n,)?"
            return related(a, b, near=near) or Relation("another shape", words)
        for x, y, mine, other in ((a, b, *self.names), (b, a, *self.names[::-1])):
            if (np.isnan(x) & ~np.isnan(y)).any():
                why = f"Is it a root or logarithm of a negative number? {other} may use nan_to_num."
                if c.order and self.values_agree:
                    why = "Is 0 multiplied by infinity in a branch that `where` discards?"
                return Relation(f"NaN in {mine}", why)
            if (np.isinf(x) & np.isfinite(y)).any():
                why = f"{other} is finite there: look for an overflow or division by 0 in {mine}."
                return Relation(f"infinity in {mine}", why)
        if equal(a, b, near):  # every relation close to the identity would match
            return Relation(UNKNOWN)
        sizes = self.check.sizes()
        return related(a, b, self.names, c.order, near, sizes) or Relation(UNKNOWN)
