"""Diagnoses why two results differ.

First come causes that need further evaluations: randomness (a side differs from itself), a kink
(both agree nearby). Then patterns between the two arrays: zero, conjugate, a factor, another
layout, another order. Last comes precision. `Scope` adds where the disagreement occurs, such as in
one mode only, and finite differences determine which side is wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtools.testing.checking.kinks import Convention
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.disagreement import Scope
from gradtools.testing.cross_checking.questions import Answer, CrossCheck
from gradtools.testing.diverging.patterns import (
    ArrayPair,
    Found,
    constant_ratio,
    equal,
    shape_cause,
)
from gradtools.testing.report import CONVENTION, DIFFERS, Comparison, Report, entry_errors, widened

_COPY = (
    "The two models hold different numbers. Copy them: "
    "mapping = match_parameters(torch_model, jax_variables), then "
    "jax_variables = mapping.to_jax(torch_model.state_dict()), for a flax.nnx model "
    "nnx.update(jax_model, mapping.to_jax(...)), and cross_check(..., mapping=mapping)."
)
_STEPS = {"float64": 1e-6, "float32": 1e-3}  # the relative distance of points near a kink
_FLOAT32 = 1e-5  # the largest relative difference attributed to rounding in float32
_SHORT = {"float64": 1e-9, "float32": 1e-4}  # far below the spacing of the next coarser dtype


def explain(check: CrossCheck, report: Report, allow: bool) -> None:
    """Adds the likely cause to every disagreement of the report.

    Args:
        check: The cross-check, for further evaluations.
        report: The report, whose comparisons are replaced.
        allow: Whether a known convention does not count as a disagreement.
    """
    home = {
        id(c): (answer, i) for answer in check.answers for i, c in enumerate(answer.comparisons)
    }
    scope = Scope(check)
    for n, c in enumerate(report.comparisons):
        if not c.agrees and c.cause is None and id(c) in home:
            try:
                report.comparisons[n] = CauseSearch(check, scope, c, *home[id(c)]).result(allow)
            except Exception as error:  # programs may raise at nearby points
                reason = f"The search for a cause failed: {type(error).__name__}: {error}"
                report.comparisons[n] = c.because("no known pattern", reason)


class CauseSearch:
    """The search for the cause of one disagreement."""

    def __init__(
        self, check: CrossCheck, scope: Scope, c: Comparison, answer: Answer, i: int
    ) -> None:
        self.check, self.scope, self.c, self.answer, self.i = check, scope, c, answer, i
        self.probe = answer.probe
        self.a: Any = answer.first[i]
        self.b: Any = answer.second[i]
        self.names = [side.name for side in check.sides]

    def result(self, allow: bool) -> Comparison:
        """The record with its cause."""
        if self.a is None or self.b is None:
            return self.c.because(*self._unconnected())
        if self.a.shape != self.b.shape:
            return self.c.because(*shape_cause(self.a.shape, self.b.shape))
        random = self._random()
        if random:
            return self.c.because(*random)
        kink = self._kink()
        if kink:
            row, cause, detail = kink
            return self.c.because(cause, detail, CONVENTION if allow and row else DIFFERS)
        cause, detail = self._pattern()
        where = self.scope.of(self.c.quantity)
        which = self.scope.culprit(self.c.quantity)
        return self.c.because(cause + where, " ".join(part for part in (detail, which) if part))

    def _pattern(self) -> Found:
        if self.c.quantity == "parameter":
            return self._parameter()
        for question in (self._not_finite, self._in_float32, self._numbers, self._precision):
            result = question()
            if result:
                return result
        return "no known pattern", ""

    def _parameter(self) -> Found:
        """The cause of different parameters."""
        a, b = widened(self.a), widened(self.b)
        pair = ArrayPair(a, b, 1e-6, self.names)
        if equal(a, b, 1e-6):
            return "a constant in float32", "The parameter was rounded when it was copied."
        questions = (pair.layout, pair.sign, lambda: pair.factor({}))
        result = next((result for question in questions if (result := question())), None)
        return result or ("other parameters", _COPY)

    def _unconnected(self) -> Found:
        lost, kept = self.names if self.a is None else self.names[::-1]
        return (
            f"stopped gradient in {lost}",
            f"{self.c.path} reaches the output in {kept} only. In {lost} it is stopped, detached, "
            "cast to an integer, compared, or not used.",
        )

    # --- asked again

    def _random(self) -> Found | None:
        """Randomness: a side differs from itself at the same point."""
        sides = [name for k, name in enumerate(self.names) if self.scope.is_random(self.probe, k)]
        if not sides:
            return None
        return (
            f"randomness in {' and '.join(sides)}",
            "Two runs at the same point differ. Turn dropout off (eval mode), or fix the noise and "
            "pass it as an argument.",
        )

    def _kink(self) -> tuple[Convention | None, str, str] | None:
        """A kink: derivatives differ here and agree nearby."""
        if self.c.order == 0 or not self.scope.values_agree or not self._agrees_nearby():
            return None
        rows = [row for row in self.scope.conventions(self.c.order) if self._fits(row)]
        if rows:
            names = " or ".join(row.name for row in rows[:3])
            by_torch, by_jax = rows[0].at(1 if rows[0].differs_at(1) else 2)
            choices = f"{self.names[0]} {by_torch}, {self.names[1]} {by_jax}"
            return rows[0], f"convention: {names}", f"The frameworks choose differently: {choices}."
        finite = _finite(self.a) and _finite(self.b)
        where = "a kink or tie" if finite else "a singular point, where one side is not finite"
        return (
            None,
            "kink: " + where,
            "A little way off the two agree; here each side chooses a derivative. No known "
            "convention of the frameworks explains it.",
        )

    def _fits(self, row: Convention) -> bool:
        """Whether the same sides are NaN as in the convention."""
        seen = [_finite(self.a), _finite(self.b)]
        orders = [n for n in range(1, self.c.order + 1) if row.differs_at(n)]
        return any(seen == [_finite(x) for x in row.at(n)] for n in orders)

    def _agrees_nearby(self) -> bool:
        size = _STEPS.get(tolerances.real_name(self.c.dtype), 0.05)
        for draw in range(2):
            a, b = (self._near(k, ("kink", draw), size) for k in (0, 1))
            if a is None or b is None or a.shape != b.shape or not _finite(a):
                return False
            if not equal(a, b, 10 * self.c.tolerance):
                return False
        return True

    def _near(self, k: int, purpose: Any, size: float | None) -> np.ndarray | None:
        result = self.check.evaluated_nearby(self.probe, k, purpose, size)
        return None if result is None else result[self.i]

    # --- patterns between the arrays

    def _not_finite(self) -> Found | None:
        a, b = widened(self.a), widened(self.b)
        first, second = self.names
        for x, y, mine, other in ((a, b, first, second), (b, a, second, first)):
            if (np.isnan(x) & ~np.isnan(y)).any():
                return f"NaN in {mine}", self._why_nan(y[np.isnan(x)], other)
            if (np.isinf(x) & np.isfinite(y)).any():
                return (
                    f"infinity in {mine}",
                    f"{other} is finite there: an overflow, or a division by 0, in {mine}.",
                )
        if (np.isinf(a) & np.isinf(b) & (a != b)).any():
            return "infinities of opposite sign", ""
        return None

    def _why_nan(self, others: np.ndarray, other: str) -> str:
        if np.isinf(others).any():
            return f"{other} is infinite there."
        zeros = f"{other} is 0 there: a guard, or nan_to_num. " if not others.any() else ""
        if self.c.order and self.scope.values_agree:
            return (
                zeros + "The value is finite: 0 times infinity in the branch that where discards."
            )
        return zeros + "A root or logarithm of a negative number, 0 / 0, or infinity - infinity."

    def _numbers(self) -> Found | None:
        a, b = widened(self.a), widened(self.b)
        if a.dtype != b.dtype:
            a, b = a.astype(complex), b.astype(complex)
        near = min(1e3 * self.c.tolerance, 0.03)
        if equal(a, b, near):  # every pattern close to the identity would hold
            return None
        pair = ArrayPair(a, b, near, self.names)
        order, sizes = self.c.order, self.check.sizes
        questions = (
            *(lambda: pair.zero(order), pair.conjugate, pair.sign, pair.real_part),
            *(lambda: self._ignored(pair), lambda: pair.factor(sizes()), pair.layout),
            *(lambda: self._swapped(near), pair.offset, lambda: self._decay(pair)),
            *(pair.along_an_axis, lambda: pair.zero_in_places(order), lambda: pair.clipped(order)),
        )
        return next((result for question in questions if (result := question())), None)

    def _ignored(self, pair: ArrayPair) -> Found | None:
        """A derivative that lacks the multiplication by its direction."""
        check, directions = self.check, list[np.ndarray]()
        if self.c.quantity == "jvp":
            directions = check.pushed[1]
        elif self.c.order == 1:
            directions = check.weights if self.c.quantity == "gradient" else check.pulled
        for direction in directions:
            d = widened(direction)
            if d.shape != pair.a.shape or d.size < 2:
                continue
            word = "tangent" if self.c.quantity == "jvp" else "cotangent"
            for x, y, name in ((pair.a, pair.b, self.names[0]), (pair.b, pair.a, self.names[1])):
                if equal(x * d, y, pair.near):
                    return f"the {word} is ignored in {name}", "Multiply the rule's result with it."
        return None

    def _swapped(self, near: float) -> Found | None:
        """Two leaves whose arrays are exchanged."""
        for j, (x, y) in enumerate(zip(self.answer.first, self.answer.second, strict=True)):
            if j == self.i or x is None or y is None or not x.size > 0:
                continue
            if equal(self.a, y, near) and equal(x, self.b, near):
                other = self.answer.comparisons[j].path
                return "swapped leaves", f"{self.c.path} and {other} have each other's numbers."
        return None

    def _decay(self, pair: ArrayPair) -> Found | None:
        """Weight decay: the difference is a multiple of the differentiated leaf."""
        if self.c.order != 1 or not self.probe.to_leaves:
            return None
        ratio = constant_ratio(pair.a - pair.b, widened(self.check.leaves[1][self.i]), 1e-4)
        if ratio is None:
            return None
        return (
            "a multiple of the argument is added",
            f"{self.names[0]} - {self.names[1]} is {ratio.real:.6g} times the argument: weight "
            "decay, or a penalty, on one side.",
        )

    # --- precision

    def _in_float32(self) -> Found | None:
        """A difference of float32's size in a float64 run, on a side that is a staircase.

        It precedes the patterns, because nearly equal arrays fit many of them. Once a side is known
        to compute in float32, other differences of that size have the same cause.
        """
        if tolerances.real_name(self.c.dtype) != "float64":
            return None
        arrays = [widened(x) for x in (*self.answer.first, *self.answer.second) if x is not None]
        scale = max((float(np.abs(x).max(initial=0.0)) for x in arrays), default=0.0)
        difference = float(np.abs(widened(self.a) - widened(self.b)).max(initial=0.0))
        if not 1e-10 * scale < difference < _FLOAT32 * scale:
            return None
        sides = self.scope.in_float32
        if not sides:
            size = max(float(np.abs(widened(x)).max(initial=0.0)) for x in (self.a, self.b))
            if size < 1e-3 * scale:  # results that cancel are staircases on both sides
                return None
            sides = [name for k, name in enumerate(self.names) if self._is_stepped(k)]
            if len(sides) != 1:  # both are staircases at an ill-conditioned point
                return None
            self.scope.in_float32 = sides
        flax = (
            " flax's attention and jax.nn.dot_product_attention do so under x64, too."
            if "jax" in sides
            else ""
        )
        return (
            f"float32 on the way in {sides[0]}",
            f"The largest difference is {difference / scale:.1e} of the largest entry: float32's "
            f"rounding in a run in float64, and no fault of the port.{flax} Compare in float32 "
            'with dtype="float32", or compute in float64 there.',
        )

    def _precision(self) -> Found | None:
        a, b = widened(self.a), widened(self.b)
        error = float(entry_errors(a, b, 1.0, 0.0).max(initial=0.0))
        moved = self.check.moved(self.probe, self.i, a, b)
        if not (np.abs(a - b) > 10 * moved).any():
            return (
                "an ill-conditioned point",
                "A change of the inputs in their last digit moves the result by as much. Compare "
                "at another point, or pass a tolerance.",
            )
        stepped = [name for k, name in enumerate(self.names) if self._is_stepped(k)]
        if stepped and tolerances.real_name(self.c.dtype) in _SHORT:
            kind = "float32" if error < 1e-5 else "16-bit floats, or rounding,"
            return (
                f"{kind} on the way in {' and '.join(stepped)}",
                f"It moves in steps while its inputs move smoothly; relative error {error:.1e}.",
            )
        if tolerances.real_name(self.c.dtype) == "float64" and 1e-9 < error < 1.2e-7:
            return (
                "a constant in float32",
                f"Relative error {error:.1e}, the spacing of float32, and no side moves in steps: "
                "a constant, a table or a parameter was rounded.",
            )
        if error < 0.02:
            return (
                "close, but another formula",
                f"Relative error {error:.1e}: another constant (an epsilon, say), or an "
                "approximation of the function on one side.",
            )
        return None

    def _is_stepped(self, k: int) -> bool:
        """Whether one side's result is a staircase in its inputs: rounded to a coarser dtype."""
        step = _SHORT.get(tolerances.real_name(self.c.dtype), 1e-9)
        base = widened((self.a, self.b)[k])
        for draw in range(3):
            once, twice = (self._near(k, ("steps", draw), size) for size in (step, 2 * step))
            if once is None or twice is None:
                return False
            once, twice = widened(once) - base, widened(twice) - base
            if np.abs(twice - 2 * once).max(initial=0.0) > 0.2 * np.abs(twice).max(initial=0.0):
                return True
        other = self._near(1 - k, ("steps", 0), step)
        moves = other is not None and np.any(widened(other) != widened((self.a, self.b)[1 - k]))
        return bool(moves and not np.any(once))


def _finite(values: Any) -> bool:
    return bool(np.isfinite(widened(values)).all())
