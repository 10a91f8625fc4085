"""Comparisons of derivatives of one function at one point: directions, slopes, tolerances.

A value that is zero in exact arithmetic, such as the sum of a layer norm, is computed as rounding
error. A small difference counts as such if it changes by its own size when x's last digits change.
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
from gradtools.testing.checking.probe import Probe, first_line, inner, no_such_mode, size
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


class Comparisons:
    """The comparisons for one function at one point, collected in `report`."""

    def __init__(
        self,
        probe: Probe,
        modes: Sequence[str] | None,
        against_values: bool = True,
        allow_jumps: bool = False,
        seed: int = 0,
        labels: dict[str, str] | None = None,
    ) -> None:
        self.probe, self.modes, self.allow_jumps = probe, modes, allow_jumps
        self.against_values = against_values
        self.rng = np.random.default_rng(seed)
        self.labels = labels or {}
        name = getattr(probe.f, "__name__", type(probe.f).__name__)
        self.report = Report(f"{probe.caller} of {name} in {probe.name}", NAMES)
        self.xs = probe.leaves
        self.vs = [np.where(np.isfinite(y), self._draw(y.shape, y.dtype), 0) for y in probe.out]
        self.vs = [v.astype(y.dtype) for v, y in zip(self.vs, probe.out, strict=True)]
        self.holes = False  # whether an output has entries whose derivatives cannot be checked
        for path, y in zip(probe.out_paths, probe.out, strict=True):
            if count := int(np.sum(~np.isfinite(y))):
                self.holes = True
                self.report.left_out.append(
                    f"{count} of {y.size} entries of {path} are not finite: their derivatives are "
                    "not checked"
                )
            if 0 < count == y.size:  # a failure
                self.report.comparisons.append(compare_arrays("value", path, y, y))
        self.unseen: dict[str, np.ndarray] = {}
        self.by_entries: dict[int, tuple[slopes.Slope, Any]] = {}
        self.present: dict[str, bool] = {}
        again = probe.value(self.xs)
        if not all(
            np.array_equal(a, b, equal_nan=True) for a, b in zip(probe.out, again, strict=True)
        ):
            raise GradtoolsError(
                f"{probe.caller}: two calls of f at the same arguments gave different values. Fix "
                "its randomness (a key as an argument, dropout off) and its state."
            )

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

    def _draw(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Random numbers of size 1/2 to 1 and either sign (phase, if complex), few bits each."""
        draw = lambda: self.rng.integers(64, 129, shape) / 128 * self.rng.choice((-1, 1), shape)
        x = draw() + 1j * draw() if np.dtype(dtype).kind == "c" else draw()
        return np.asarray(x).astype(dtype)

    def _everywhere(self, by_entry: bool = False) -> Arrays:
        """A direction along all leaves, scaled by each leaf's size or by each entry's."""
        steps = [size_by_entry(x) if by_entry else scale_of(x) for x in self.xs]
        pairs = zip(self.xs, steps, strict=True)
        return [(self._draw(x.shape, x.dtype) * step).astype(x.dtype) for x, step in pairs]

    def _directions(self, i: int) -> Iterator[Arrays]:
        """Directions along leaf i: scaled by its size, and by each entry's (safe in f's domain)."""
        x = self.xs[i]
        for step in (scale_of(x), size_by_entry(x)):
            us = [np.zeros_like(y) for y in self.xs]
            us[i] = (self._draw(x.shape, x.dtype) * step).astype(x.dtype)
            yield us

    def _moved(self, us: Arrays, t: float) -> Arrays:
        return [(x + t * u).astype(x.dtype) for x, u in zip(self.xs, us, strict=True)]

    def _if_present(self, mode: str, compute: Callable[[], Any]) -> Any:
        """`compute()`; None where f has no such mode."""
        if self.present.get(mode) is False or (self.modes is not None and mode not in self.modes):
            return None
        try:
            result = compute()
        except Exception as error:
            self.present[mode] = False
            words = f"{self._name(mode)} mode: {first_line(error)}"
            if self.modes is None and no_such_mode(error):
                self.report.left_out.append(words)
                return None
            raise GradtoolsError(f"{self.probe.caller}: {words}") from error
        self.present[mode] = True
        return result

    def _name(self, mode: str) -> str:
        return self.labels.get(mode, mode.replace("_", " "))

    def _reverse_against_slope(
        self, i: int, u: np.ndarray, gradient: np.ndarray, line: slopes.Line, measured: slopes.Slope
    ) -> Comparison:
        """Compares Re<J^H v, u> with Re<v, D_u f>; entry by entry if that fails or is undecided."""
        mine = np.array(inner([u], [gradient]))
        value = slopes.shaped_like(measured.value, self.probe.out)  # of f; below, of Re<v, f>
        rounding = self._tolerance() * size(self.vs, value) / 10
        sizes = np.abs(flattened(self.vs))
        error = float(np.sum(sizes[sizes > 0] * measured.error[sizes > 0])) + rounding
        error = error if math.isfinite(error) else math.inf
        number = np.array(inner(self.vs, value))
        along = slopes.Slope(number, np.array(error), np.array(0.0), measured.smallest)
        if not np.isfinite(along.error) or (self.holes and not np.isfinite(mine)):
            return self._entrywise(i, gradient)
        weights = (self.vs, self.vs, [np.abs(v) for v in self.vs])
        kink = lambda: [
            np.array(inner(vs, slopes.shaped_like(side, self.probe.out)))
            for vs, side in zip(weights, slopes.one_sided(line, self.probe.eps), strict=True)
        ]
        record = self._against_slope("reverse", self.probe.paths[i], mine, along, 1, kink)
        if record.agrees or not 1 < self.xs[i].size <= _ENTRIES:
            return record
        entries = self._entrywise(i, gradient)
        return record if entries.agrees else entries

    def _against_slope(
        self,
        mode: str,
        path: str,
        analytic: np.ndarray,
        measured: slopes.Slope,
        order: int,
        kink: Callable[[], Sequence[np.ndarray]] | None = None,
    ) -> Comparison:
        """Compares a derivative with a slope and stores which entries remain undecided.

        There is no slope where f is not finite. Where no step gave one, or rounding is as large as
        the slope, only NaN counts as wrong.
        """
        limit, here = self._tolerance(), np.isfinite(measured.at)
        mine = np.where(here, widened(analytic), 0)
        known = here & np.isfinite(measured.error)
        value = np.where(known, measured.value, np.where(np.isnan(mine), 0, mine))
        noise = 10 * np.where(known, measured.error, 0.0)
        with np.errstate(invalid="ignore"):
            off = np.where(mine == value, 0.0, np.abs(mine - value))
            near = off <= noise
            biggest = max(largest(mine), largest(value))
        vague = near & (noise > 0.1 * biggest) & ((mine != 0) | (value != 0))
        what, unseen = f"{self._name(mode)} of {path}", here & (~known | vague)
        self.unseen[what] = unseen & self.unseen.get(what, unseen)
        quantity = f"{self._name(mode)} | finite differences"
        kept = np.where(near, mine, value)
        record = compare_arrays(quantity, path, mine, kept, order, tolerance=limit)
        if record.agrees:
            allowed = np.maximum(limit * biggest + noise, np.finfo(float).tiny)
            return replace(record, error=float(np.max(off / allowed, initial=0.0)))
        if kink is not None and np.isfinite(mine).all() and _between(mine, value, kink(), limit):
            detail = "f has two slopes here; any between them is right."
            return record.because("a kink", detail, CONVENTION)
        detail = (
            f"Analytic {show(record.first)}, numeric {show(record.second)} "
            f"(steps down to {measured.smallest:.1e} of the argument's size)."
        )
        cause = relation(mine, value, ("the derivative", "the numeric one")) or ""
        if (~np.isfinite(mine) & np.isfinite(value)).any():
            cause = "the derivative is not finite"
        elif not np.any(mine) and np.any(value):
            cause = "the derivative is zero: a gradient is stopped"
        return record.because(cause, detail)

    def _entrywise(self, i: int, gradient: np.ndarray) -> Comparison:
        """Compares the gradient of a leaf with the slope along each of its entries."""
        path = self.probe.paths[i]
        if self.xs[i].size > _ENTRIES:
            nothing = np.full(gradient.shape, np.inf)
            measured = slopes.Slope(gradient, nothing, np.zeros(gradient.shape), math.nan)
            return self._against_slope("reverse", path, gradient, measured, 1)
        if i not in self.by_entries:
            self.by_entries[i] = self._slopes_of_entries(i)
        measured, kink = self.by_entries[i]
        if self.holes:
            measured = replace(measured, at=gradient)
        return self._against_slope("reverse", path, gradient, measured, 1, kink)

    def _slopes_of_entries(self, i: int) -> tuple[slopes.Slope, Any]:
        """The slopes of Re<v, f> along each entry of leaf i, and a function of one-sided slopes."""
        x, step = self.xs[i], scale_of(self.xs[i])
        along = lambda us, t: np.array(inner(self.vs, self.probe.value(self._moved(us, t))))
        lines: dict[Any, Any] = {}
        for place in np.ndindex(x.shape):
            for unit in (1, 1j) if x.dtype.kind == "c" else (1,):
                us = [np.zeros_like(y) for y in self.xs]
                us[i][place] = unit * step
                lines[place, unit] = partial(along, us)
        measured = {key: slopes.slope(line, self.probe.eps) for key, line in lines.items()}

        def gathered(each: Callable[[Any], Any]) -> np.ndarray:
            out = np.zeros(x.shape, widened(x).dtype)
            for place, unit in lines:
                out[place] += unit * each((place, unit)) / step
            return out

        def sides() -> list[np.ndarray]:
            one_sided = {key: slopes.one_sided(line, self.probe.eps) for key, line in lines.items()}
            picked = lambda k, key: one_sided[key][k]
            return [gathered(partial(picked, k)) for k in range(3)]

        error = np.abs(gathered(lambda key: measured[key].error))
        smallest = min((slope.smallest for slope in measured.values()), default=math.nan)
        value = gathered(lambda key: measured[key].value)
        return slopes.Slope(value, error, np.zeros(x.shape), smallest), sides

    def _tolerance(self) -> float:
        names = (tolerances.real_name(x.dtype) for x in [*self.xs, *self.probe.out])
        return max(tolerances.FINITE_DIFFERENCES[name] for name in names)

    def _exact(self, order: int) -> float:
        return max(tolerances.tolerance(x.dtype, order) for x in [*self.xs, *self.probe.out])

    def _compare(
        self,
        quantity: str,
        path: str,
        left: Any,
        right: Any,
        order: int,
        noise: float,
        cause: str,
        detail: str = "",
        again: Callable[[Arrays], Sequence[Any]] | None = None,
    ) -> Comparison:
        """Compares left with right; `again` computes both at other points, to detect rounding."""
        a, b, limit = widened(left), widened(right), self._exact(order)
        unknown = a.ndim == 0 and not (np.isfinite(a) or np.isfinite(b))
        if unknown:
            reason = f"{quantity} of {path}: NaN or infinity on both sides decides nothing"
            self.report.left_out += [reason] if reason not in self.report.left_out else []
        biggest = max(np.max(np.abs(a), initial=0.0), np.max(np.abs(b), initial=0.0))
        if math.isfinite(noise) and 0 < biggest < math.inf:
            limit = max(limit, noise / float(biggest))
        record = compare_arrays(quantity, path, a, b, order, tolerance=limit)
        if unknown and record.error <= 1:
            record = replace(record, status=AGREES, cause=None, detail="")
        if not record.agrees and again is not None and self._is_rounding(a - b, again):
            record = replace(record, error=1.0, status=AGREES)
        record = record if record.agrees else record.because(cause, detail)
        self.report.comparisons.append(record)
        return record

    def _is_rounding(self, off: np.ndarray, again: Callable[[Arrays], Sequence[Any]]) -> bool:
        """Whether a change in the arguments' last digits makes a difference of this size."""
        greatest = max(1.0, *map(largest, [*self.xs, *self.probe.out]))
        if not np.max(np.abs(off)) <= _ROUNDING * self.probe.eps * greatest:
            return False
        here = again(self.xs)
        changes = [0.0]
        for draw in range(4):
            rng = np.random.default_rng(draw)
            factors = [1 + 4 * self.probe.eps * rng.uniform(-1, 1, x.shape) for x in self.xs]
            near = [(x * f).astype(x.dtype) for x, f in zip(self.xs, factors, strict=True)]
            pairs = zip(again(near), here, strict=True)
            changes += [largest(widened(x) - widened(y)) for x, y in pairs]
        return bool(np.max(np.abs(off)) <= _ROUNDING * max(changes))


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
