"""`Comparisons`: named comparisons of one function's derivatives at one point.

Every comparison is made by one of two methods. `equal` compares two functions of the point, such as
both sides of the dot-product test. `against_slope` compares a derivative with finite differences.
A value that is zero in exact arithmetic, such as the sum of a layer norm, is computed as rounding
error: a small difference counts as such if it changes by its own size when x's last digits change.
At a kink any slope between the two one-sided ones is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.checking import slopes
from gradtools.testing.checking.probe import (
    SECOND,
    Probe,
    first_line,
    inner,
    no_such_mode,
    size,
)
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.flat import Arrays
from gradtools.testing.relations import relation
from gradtools.testing.report import (
    AGREES,
    CONVENTION,
    Comparison,
    Report,
    compare_arrays,
    largest,
    show,
    widened,
)

NAMES = ("left", "right")
_ENTRIES = 64  # the largest leaf whose entries are differenced one by one if it fails
_ROUNDING = 1e3  # differences below this many epsilons of the largest number may be rounding
_KEPT = 32  # derivatives
Kink = Callable[[], Sequence[np.ndarray]]


class Comparisons:
    """The comparisons for one function at one point, collected in `report`.

    Attributes:
        xs: The point; vs is a random cotangent.
        modes: The modes that f must have; None for those that it has.
        against_values: Whether derivatives are compared with finite differences.
        labels: Names of modes for the report.
    """

    def __init__(
        self,
        probe: Probe,
        modes: Sequence[str] | None = None,
        against_values: bool = True,
        seed: int = 0,
        labels: dict[str, str] | None = None,
    ) -> None:
        self.probe, self.modes, self.labels = probe, modes, labels or {}
        self.against_values = against_values
        self.rng = np.random.default_rng(seed)
        name = getattr(probe.f, "__name__", type(probe.f).__name__)
        self.report = Report(f"{probe.caller} of {name} in {probe.name}", NAMES)
        self.xs, kinds = probe.leaves, [x.dtype for x in (*probe.leaves, *probe.out)]
        self.vs = [np.where(np.isfinite(y), self.draw(y), 0).astype(y.dtype) for y in probe.out]
        self.numeric = max(tolerances.FINITE_DIFFERENCES[tolerances.real_name(k)] for k in kinds)
        self.exact = [max(tolerances.tolerance(k, order) for k in kinds) for order in (0, 1, 2)]
        self.holes = False  # whether an output has entries whose derivatives cannot be checked
        self.unseen: dict[str, np.ndarray] = {}
        self.present: dict[str, bool] = {}
        self._kept: dict[Any, Any] = {}
        self._entries: dict[int, tuple[slopes.Slope, Kink]] = {}
        again = probe.value(self.xs)
        for path, y, z in zip(probe.out_paths, probe.out, again, strict=True):
            if not np.array_equal(y, z, equal_nan=True):
                raise GradtoolsError(
                    f"{probe.caller}: two calls of f at the same arguments gave different values. "
                    "Fix its randomness (a key as an argument, dropout off) and its state."
                )
            if count := int(np.sum(~np.isfinite(y))):
                self.holes = True
                self.report.left_out.append(
                    f"{count} of {y.size} entries of {path} are not finite: their derivatives are "
                    "not checked"
                )
            if 0 < count == y.size:  # a failure
                self.report.comparisons.append(compare_arrays("value", path, y, y))

    def note_undecided(self) -> None:
        """Lists in the report the entries that no direction could decide."""
        both = self.present.get("forward") and self.present.get("reverse")
        rest = "only the modes are compared with each other" if both else "nothing else decides"
        for what, unseen in self.unseen.items():
            if unseen.any():
                self.report.left_out.append(
                    f"{what}: finite differences cannot decide {int(unseen.sum())} of "
                    f"{unseen.size} entries (f leaves its domain nearby, rounding hides "
                    f"the slope, or every step is too large for it); {rest}"
                )
        self.unseen = {}

    # --- directions, lines and derivatives

    def draw(self, like: np.ndarray) -> np.ndarray:
        """Random numbers of size 1/2 to 1 and either sign (phase, if complex), few bits each."""
        shape, rng = like.shape, self.rng
        draw = lambda: rng.integers(64, 129, shape) / 128 * rng.choice((-1, 1), shape)
        x = draw() + 1j * draw() if like.dtype.kind == "c" else draw()
        return np.asarray(x).astype(like.dtype)

    def everywhere(self, by_entry: bool = False) -> Arrays:
        """A direction along all leaves, scaled by each leaf's size or by each entry's."""
        size = size_by_entry if by_entry else scale_of
        return [(self.draw(x) * size(x)).astype(x.dtype) for x in self.xs]

    def directions(self, i: int) -> Iterator[Arrays]:
        """Directions along leaf i: scaled by its size, and by each entry's (safe in f's domain)."""
        x = self.xs[i]
        for step in (scale_of(x), size_by_entry(x)):
            us = [np.zeros_like(y) for y in self.xs]
            us[i] = (self.draw(x) * step).astype(x.dtype)
            yield us

    def moved(self, us: Arrays, t: float) -> Arrays:
        """The point x + t u."""
        return [(x + t * u).astype(x.dtype) for x, u in zip(self.xs, us, strict=True)]

    def line(self, us: Arrays) -> slopes.Line:
        """All entries of f along u."""
        return lambda t: flattened(self.probe.value(self.moved(us, t)))

    def at(self, mode: str, xs: Arrays, *vectors: Arrays) -> Any:
        """A derivative by a mode: J u, J^H v, H u, or Re<w, H u>. The latest ones are kept."""
        key = (mode, *(x.tobytes() for group in (xs, *vectors) for x in group))
        if key not in self._kept:
            probe = self.probe
            own: dict[str, Callable[..., Any]]
            own = {"forward": probe.forward, "reverse": probe.reverse, SECOND[3]: probe.curvature}
            found = own.get(mode, partial(probe.product, mode))(xs, *vectors)
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = found
        return self._kept[key]

    def has(self, mode: str, *vectors: Arrays) -> bool:
        """Whether f has a mode, and is to be checked in it; computed at x at the first call."""
        if mode not in self.present:
            wanted = self.modes is None or mode in self.modes
            try:
                if wanted:
                    self.at(mode, self.xs, *vectors)
            except Exception as error:
                words = f"{self.label(mode)} mode: {first_line(error)}"
                if self.modes is not None or not no_such_mode(error):
                    raise GradtoolsError(f"{self.probe.caller}: {words}") from error
                self.report.left_out.append(words)
                wanted = False
            self.present[mode] = wanted
        return self.present[mode]

    def label(self, mode: str) -> str:
        """A mode's name in the report."""
        return self.labels.get(mode, mode.replace("_", " "))

    # --- two functions of the point

    def equal(
        self,
        quantity: str,
        path: str,
        sides: Callable[[Arrays], tuple[Any, Any]],
        order: int,
        terms: float,
        cause: str,
        detail: str = "",
    ) -> Comparison:
        """Compares two functions of the point.

        Args:
            quantity: The names of both.
            path: The leaf.
            sides: Both functions.
            order: The order of the derivative.
            terms: The size of the terms that the sides are sums of, whose rounding is allowed.
            cause: What it means if they differ.
            detail: Advice.
        """
        a, b = map(widened, sides(self.xs))
        unknown = a.ndim == 0 and not (np.isfinite(a) or np.isfinite(b))
        if unknown:
            reason = f"{quantity} of {path}: NaN or infinity on both sides decides nothing"
            self.report.left_out += [reason] if reason not in self.report.left_out else []
        biggest, limit = max(largest(a), largest(b)), self.exact[order]
        if math.isfinite(terms) and biggest:
            limit = max(limit, self.exact[order] * terms / biggest)
        record = compare_arrays(quantity, path, a, b, order, tolerance=limit)
        if unknown and record.error <= 1:
            record = replace(record, status=AGREES, cause=None, detail="")
        if not record.agrees:
            record = record.because(cause, detail)
            if self.is_rounding(a - b, sides):
                record = replace(record, error=1.0, status=AGREES, cause=None, detail="")
        self.report.comparisons.append(record)
        return record

    def is_rounding(self, off: np.ndarray, sides: Callable[..., tuple[Any, ...]]) -> bool:
        """Whether a change in the arguments' last digits makes a difference of this size."""
        eps, greatest = self.probe.eps, max(1.0, *map(largest, [*self.xs, *self.probe.out]))
        if not np.max(np.abs(off)) <= _ROUNDING * eps * greatest:
            return False
        here, changes = sides(self.xs), [0.0]
        for draw in range(4):
            rng = np.random.default_rng(draw)
            factors = [1 + 4 * eps * rng.uniform(-1, 1, x.shape) for x in self.xs]
            near = [(x * f).astype(x.dtype) for x, f in zip(self.xs, factors, strict=True)]
            pairs = zip(sides(near), here, strict=True)
            changes += [largest(widened(x) - widened(y)) for x, y in pairs]
        return bool(np.max(np.abs(off)) <= _ROUNDING * max(changes))

    # --- finite differences

    def against_slope(
        self,
        mode: str,
        path: str,
        analytic: np.ndarray,
        measured: slopes.Slope,
        order: int,
        kink: Kink | None = None,
        change: Callable[[], np.ndarray] | None = None,
    ) -> Comparison:
        """Compares a derivative with a slope and stores which entries remain undecided.

        There is no slope where f is not finite. Where no step gave one, where rounding is as large
        as the slope, or where the derivative changes as much within a step (`change`), only NaN
        counts as wrong.
        """
        limit, here = self.numeric, np.isfinite(measured.at)
        mine = np.where(here, widened(analytic), 0)
        known = here & np.isfinite(measured.error)
        value = np.where(known, measured.value, np.where(np.isnan(mine), 0, mine))
        noise = 10 * np.where(known, measured.error, 0.0)
        with np.errstate(invalid="ignore"):
            off = np.where(mine == value, 0.0, np.abs(mine - value))
            near = off <= noise
        biggest = max(largest(mine), largest(value))
        vague = near & (noise > 0.1 * biggest) & ((mine != 0) | (value != 0))
        what, unseen = f"{self.label(mode)} of {path}", here & (~known | vague)
        before = self.unseen.get(what, np.ones(here.shape, bool))
        self.unseen[what] = unseen & before
        quantity, kept = f"{self.label(mode)} | finite differences", np.where(near, mine, value)
        record = compare_arrays(quantity, path, mine, kept, order, tolerance=limit)
        if record.agrees:
            allowed = np.maximum(limit * biggest + noise, np.finfo(float).tiny)
            return replace(record, error=float(np.max(off / allowed, initial=0.0)))
        if kink is not None and np.isfinite(mine).all() and _between(mine, value, kink(), limit):
            detail = "f has two slopes here; any between them is right."
            return record.because("a kink", detail, CONVENTION)
        if change is not None and (coarse := known & (off <= 2 * change())).any():
            error, self.unseen[what] = np.where(coarse, np.inf, measured.error), before
            return self.against_slope(mode, path, analytic, measured._replace(error=error), order)
        detail = f"Analytic {show(record.first)}, numeric {show(record.second)}."
        cause = relation(mine, value, ("the derivative", "the numeric one")) or ""
        if (~np.isfinite(mine) & np.isfinite(value)).any():
            cause = "the derivative is not finite"
        elif not np.any(mine) and np.any(value):
            cause = "the derivative is zero: a gradient is stopped"
        return record.because(cause, detail)

    def reverse_against_slope(self, i: int, us: Arrays, measured: slopes.Slope) -> Comparison:
        """Compares Re<J^H v, u> with Re<v, D_u f>; entry by entry if that fails or is undecided."""
        probe, vs = self.probe, self.vs
        mine = np.array(inner(us, self.at("reverse", self.xs, vs)))
        value = slopes.shaped_like(measured.value, probe.out)  # of f; below, of Re<v, f>
        sizes = np.abs(flattened(vs))
        error = float(np.sum(sizes[sizes > 0] * measured.error[sizes > 0]))
        error += self.numeric * size(vs, value) / 10
        if not math.isfinite(error) or (self.holes and not np.isfinite(mine)):
            return self.entrywise(i)
        along = slopes.Slope(np.array(inner(vs, value)), np.array(error), np.array(0.0))
        weights = (vs, vs, [np.abs(v) for v in vs])
        kink = lambda: [
            np.array(inner(w, slopes.shaped_like(side, probe.out)))
            for w, side in zip(weights, slopes.one_sided(self.line(us), probe.eps), strict=True)
        ]
        pulled = lambda xs: np.array(inner(us, self.at("reverse", xs, vs)))
        change = partial(self.change_in_a_step, us, pulled)
        record = self.against_slope("reverse", probe.paths[i], mine, along, 1, kink, change)
        if record.agrees or not 1 < self.xs[i].size <= _ENTRIES:
            return record
        entries = self.entrywise(i)
        return record if entries.agrees else entries

    def change_in_a_step(self, us: Arrays, derivative: Callable[[Arrays], Any]) -> np.ndarray:
        """The largest change of a derivative within half of the smallest step, on each side.

        At a kink or a tie there is none.
        """
        t = slopes.smallest_step(self.probe.eps)
        at = lambda s: widened(derivative(self.moved(us, s)))
        return np.fmax(np.abs(at(t) - at(t / 2)), np.abs(at(-t) - at(-t / 2)))

    def entrywise(self, i: int) -> Comparison:
        """Compares the gradient of a leaf with the slope along each of its entries."""
        path, x, kink = self.probe.paths[i], self.xs[i], None
        gradient = self.at("reverse", self.xs, self.vs)[i]
        measured = slopes.Slope(gradient, np.full(x.shape, np.inf), np.zeros(x.shape))
        if x.size <= _ENTRIES:
            if i not in self._entries:
                self._entries[i] = self._slopes_of_entries(i)
            measured, kink = self._entries[i]
            measured = measured._replace(at=gradient) if self.holes else measured
        return self.against_slope("reverse", path, gradient, measured, 1, kink)

    def _slopes_of_entries(self, i: int) -> tuple[slopes.Slope, Kink]:
        """The slopes of Re<v, f> along each entry of leaf i, and a function of one-sided slopes."""
        x, step, eps = self.xs[i], scale_of(self.xs[i]), self.probe.eps
        along = lambda us, t: np.array(inner(self.vs, self.probe.value(self.moved(us, t))))
        lines: dict[Any, slopes.Line] = {}
        for place in np.ndindex(x.shape):
            for unit in (1, 1j) if x.dtype.kind == "c" else (1,):
                us = [np.zeros_like(y) for y in self.xs]
                us[i][place] = unit * step
                lines[place, unit] = partial(along, us)

        def gathered(each: dict[Any, Any]) -> np.ndarray:
            out = np.zeros(x.shape, widened(x).dtype)
            for (place, unit), y in each.items():
                out[place] += unit * y / step
            return out

        def sides() -> list[np.ndarray]:
            each = {key: slopes.one_sided(line, eps) for key, line in lines.items()}
            return [gathered({key: y[k] for key, y in each.items()}) for k in range(3)]

        each = {key: slopes.slope(line, eps) for key, line in lines.items()}
        error = np.abs(gathered({key: y.error for key, y in each.items()}))
        value = gathered({key: y.value for key, y in each.items()})
        return slopes.Slope(value, error, np.zeros(x.shape)), sides


def _between(
    analytic: np.ndarray, numeric: np.ndarray, kink: Sequence[np.ndarray], limit: float
) -> bool:
    """Whether each entry is right, or at a kink and between the two one-sided slopes."""
    left, right, off = (np.reshape(k, np.shape(analytic)) for k in kink)
    slack = limit * np.maximum(np.abs(left), np.abs(right)) * 10
    gap = np.abs(left - right)
    kinked = gap > np.maximum(100 * slack, 2 * np.abs(off))
    outside = np.abs(left - analytic) + np.abs(right - analytic) - gap
    agree = np.abs(analytic - numeric) <= limit * np.max(np.abs(numeric), initial=0.0)
    return bool(np.all(agree | (kinked & (outside <= 10 * slack + 4 * np.abs(off)))))


def scale_of(x: np.ndarray) -> float:
    """The size of a leaf's entries, a power of two."""
    mean = math.sqrt(float(np.mean(np.abs(widened(x)) ** 2))) if x.size else 1.0
    return 2.0 ** round(math.log2(mean)) if 0 < mean < math.inf else 1.0


def size_by_entry(x: np.ndarray) -> np.ndarray:
    """The size of each entry; for zeros the leaf's."""
    return np.where(x == 0, scale_of(x), np.abs(x))


def flattened(xs: Sequence[np.ndarray]) -> np.ndarray:
    """All entries of all arrays in one vector."""
    return np.concatenate([widened(x).ravel() for x in xs])
