"""`Comparisons`: named comparisons of one function's derivatives at one point.

Every comparison is made by one of two methods. `equal` compares two functions of the point, such as
both sides of the dot-product test. `against_slope` compares a derivative with finite differences.
A value that is zero in exact arithmetic, such as the sum of a layer norm, is computed as rounding
error: a small difference counts as such if it changes by its own size when x's last digits change.
At a kink the slope is the mean of the derivatives on both sides, and any derivative between these
two is right.
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
from gradtools.testing.checking.probe import SECOND, Probe, first_line, inner, no_such_mode, size
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.flat import Arrays, is_rounding
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
_KEPT = 32  # derivatives


class Comparisons:
    """The comparisons for one function at one point, collected in `report`.

    Attributes:
        xs: The point; vs is a random cotangent.
        modes: The modes that f must have; None for the modes that it has.
        labels: Names of modes for the report.
        present: The modes that f has, as far as it has been tried.
    """

    def __init__(
        self,
        probe: Probe,
        modes: Sequence[str] | None = None,
        seed: int = 0,
        labels: dict[str, str] | None = None,
    ) -> None:
        self.probe, self.modes, self.labels = probe, modes, labels or {}
        self.rng = np.random.default_rng(seed)
        name = getattr(probe.f, "__name__", type(probe.f).__name__)
        self.report = Report(f"{probe.caller} of {name} in {probe.name}", NAMES)
        self.xs, kinds = probe.leaves, [x.dtype for x in (*probe.leaves, *probe.out)]
        self.vs = [np.where(np.isfinite(y), self.draw(y), 0).astype(y.dtype) for y in probe.out]
        self.numeric = max(tolerances.FINITE_DIFFERENCES[tolerances.real_name(k)] for k in kinds)
        self.exact = [max(tolerances.tolerance(k, order) for k in kinds) for order in (0, 1, 2)]
        self.present: dict[str, bool] = {}
        self._undecided: dict[str, np.ndarray] = {}
        self._kept: dict[Any, Any] = {}
        again = probe.value(self.xs)
        for path, y, z in zip(probe.out_paths, probe.out, again, strict=True):
            if not np.array_equal(y, z, equal_nan=True):
                raise GradtoolsError(
                    f"{probe.caller}: two calls of f at the same arguments gave different values. "
                    "Fix its randomness (a key as an argument, dropout off) and its state."
                )
            if count := int(np.sum(~np.isfinite(y))):
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
        for what, entries in self._undecided.items():
            if entries.any():
                self.report.left_out.append(
                    f"{what}: finite differences cannot decide {int(entries.sum())} of "
                    f"{entries.size} entries (f leaves its domain nearby, rounding hides "
                    f"the slope, or every step is too large for it); {rest}"
                )
        self._undecided = {}

    # --- directions, lines and derivatives

    def draw(self, like: np.ndarray) -> np.ndarray:
        """Random numbers of size 1/2 to 1 and either sign (phase, if complex), few bits each."""
        shape, rng = like.shape, self.rng
        draw = lambda: rng.integers(64, 129, shape) / 128 * rng.choice((-1, 1), shape)
        x = draw() + 1j * draw() if like.dtype.kind == "c" else draw()
        return np.asarray(x).astype(like.dtype)

    def everywhere(self, by_entry: bool = False) -> Arrays:
        """A direction along all leaves, scaled by each leaf's size or by each entry's."""
        sizes = size_by_entry if by_entry else scale_of
        return [(self.draw(x) * sizes(x)).astype(x.dtype) for x in self.xs]

    def along(self, i: int, u: np.ndarray) -> Arrays:
        """A direction in leaf i alone."""
        return [u.astype(x.dtype) if i == j else np.zeros_like(x) for j, x in enumerate(self.xs)]

    def directions(self, i: int) -> Iterator[Arrays]:
        """Directions along leaf i: scaled by its size, and by each entry's (safe in f's domain)."""
        x = self.xs[i]
        yield self.along(i, self.draw(x) * scale_of(x))
        yield self.along(i, self.draw(x) * size_by_entry(x))

    def moved(self, us: Arrays, t: float) -> Arrays:
        """The point x + t u."""
        return [(x + t * u).astype(x.dtype) for x, u in zip(self.xs, us, strict=True)]

    def line(self, us: Arrays) -> slopes.Line:
        """All entries of f along u."""
        return lambda t: flattened(self.probe.value(self.moved(us, t)))

    def at(self, mode: str, xs: Arrays, *vectors: Arrays) -> Any:
        """A derivative by a mode: J u, J^H v, H u, or Re<w, H u>. The latest results are cached."""
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
    ) -> None:
        """Compares two functions of the point.

        Args:
            quantity: The names of both.
            path: The leaf.
            sides: Both functions.
            order: The order of the derivative.
            terms: The size of the terms that both sides sum up; their rounding is allowed.
            cause: The cause if they differ.
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
        elif not record.agrees:
            record = self.unless_rounding(record.because(cause, detail), a - b, sides)
        self.report.comparisons.append(record)

    def unless_rounding(
        self, record: Comparison, off: np.ndarray, sides: Callable[[Arrays], tuple[Any, ...]]
    ) -> Comparison:
        """A disagreement; it agrees if a difference of its size is rounding error of the sides."""
        eps, greatest = self.probe.eps, max(1.0, *map(largest, [*self.xs, *self.probe.out]))
        if not is_rounding(np.abs(off), sides, self.xs, eps, 1e3 * eps * greatest):
            return record
        return replace(record, error=1.0, status=AGREES, cause=None, detail="")

    # --- finite differences

    def against_slope(
        self,
        mode: str,
        path: str,
        analytic: np.ndarray,
        measured: slopes.Slope,
        order: int,
        derivative: Callable[[float], Any] | None = None,
    ) -> Comparison:
        """Compares a derivative with a slope and stores which entries remain undecided.

        There is no slope where f is not finite. Where no step gave one, or where rounding is as
        large as the slope, only NaN counts as wrong.

        derivative: The derivative at the point x + t u. This shows a kink at x, and whether the
        smallest step is too large for f.
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
        what, undecided = f"{self.label(mode)} of {path}", here & (~known | vague)
        before = self._undecided.get(what, True)
        self._undecided[what] = undecided & before
        quantity, kept = f"{self.label(mode)} | finite differences", np.where(near, mine, value)
        record = compare_arrays(quantity, path, mine, kept, order, tolerance=limit)
        if record.agrees:
            allowed = np.maximum(limit * biggest + noise, np.finfo(float).tiny)
            return replace(record, error=float(np.max(off / allowed, initial=0.0)))
        if derivative is not None and np.isfinite(mine).all():
            t = slopes.smallest_step(self.probe.eps)
            near_x = [np.where(here, widened(derivative(s * t)), 0) for s in (-1, 1, -0.5, 0.5)]
            left, right = near_x[:2]
            slack = 4 * limit * np.maximum(np.abs(left), np.abs(right))
            gap = np.abs(left - right)
            is_mean = np.abs((left + right) / 2 - value) <= slack + noise
            between = np.abs(left - mine) + np.abs(right - mine) - gap <= slack
            if (near | (off <= limit * biggest) | ((gap > 4 * slack) & is_mean & between)).all():
                detail = "f has two slopes here; any between them is right."
                return record.because("a kink", detail, CONVENTION)
            change = np.fmax(np.abs(left - near_x[2]), np.abs(right - near_x[3]))
            if (coarse := known & (off <= 2 * change)).any():  # every step is too large
                measured = measured._replace(error=np.where(coarse, np.inf, measured.error))
                self._undecided[what] = np.asarray(before)
                return self.against_slope(mode, path, analytic, measured, order)
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
        pulled = lambda t: np.array(inner(us, self.at("reverse", self.moved(us, t), vs)))
        value = slopes.shaped_like(measured.value, probe.out)  # slopes of f; below, of Re<v, f>
        sizes = np.abs(flattened(vs))
        error = float(np.sum(sizes[sizes > 0] * measured.error[sizes > 0]))
        error += self.numeric * size(vs, value) / 10
        if not (math.isfinite(error) and np.isfinite(pulled(0.0)) | np.isfinite(measured.at).all()):
            return self.entrywise(i)
        along = slopes.Slope(np.array(inner(vs, value)), np.array(error), np.array(0.0))
        path = probe.paths[i]
        record = self.against_slope("reverse", path, pulled(0.0), along, 1, pulled)
        is_real = all(v.dtype.kind == "f" for v in vs) and sizes.size <= _ENTRIES
        if not record.agrees and is_real and self.has_kink(pulled):
            # A sum of kinks has no bounds, so each output is compared by itself.
            seeds = [slopes.shaped_like(row, vs) for row in np.eye(sizes.size)]
            seeds = [[c.astype(v.dtype) for c, v in zip(row, vs, strict=True)] for row in seeds]
            pulls = lambda t, v: self.at("reverse", self.moved(us, t), v)
            rows = lambda t: np.array([inner(us, pulls(t, v)) for v in seeds])
            name = f"{path}, output by output"
            each = self.against_slope("reverse", name, rows(0.0), measured, 1, rows)
            if each.agrees:
                return each
        if record.agrees or not 1 < self.xs[i].size <= _ENTRIES:
            return record
        entries = self.entrywise(i)
        return record if entries.agrees else entries

    def has_kink(self, derivative: Callable[[float], Any]) -> bool:
        """Whether a derivative along a line differs much between both sides of x."""
        t = slopes.smallest_step(self.probe.eps)
        left, right = derivative(-t), derivative(t)
        return bool(abs(left - right) > 20 * self.numeric * max(abs(left), abs(right)))

    def entrywise(self, i: int) -> Comparison:
        """Compares the gradient of a leaf with the slopes of Re<v, f> along each of its entries."""
        probe, x, vs = self.probe, self.xs[i], self.vs
        gradient = self.at("reverse", self.xs, vs)[i]
        at = np.where(np.isfinite(flattened(probe.out)).all(), 0.0, gradient)
        if x.size > _ENTRIES:
            measured = slopes.Slope(gradient, np.full(x.shape, np.inf), at)
            return self.against_slope("reverse", probe.paths[i], gradient, measured, 1)
        step, units = scale_of(x), (1, 1j) if x.dtype.kind == "c" else (1,)
        basis = {}
        for place in np.ndindex(x.shape):
            for unit in units:
                u = np.zeros_like(x)
                u[place] = unit * step
                basis[place, unit] = self.along(i, u)

        def gathered(entry: Callable[[Arrays], Any]) -> np.ndarray:
            out = np.zeros(x.shape, widened(x).dtype)
            for (place, unit), us in basis.items():
                out[place] += unit * entry(us) / step
            return out

        line = lambda us: lambda t: np.array(inner(vs, probe.value(self.moved(us, t))))
        each = {id(us): slopes.slope(line(us), probe.eps) for us in basis.values()}
        value = gathered(lambda us: each[id(us)].value)
        error = np.abs(gathered(lambda us: each[id(us)].error))
        pulled = lambda us, t: inner(us, self.at("reverse", self.moved(us, t), vs))
        derivative = lambda t: gathered(lambda us: pulled(us, t))
        measured = slopes.Slope(value, error, at)
        return self.against_slope("reverse", probe.paths[i], gradient, measured, 1, derivative)


def scale_of(x: np.ndarray) -> float:
    """The size of a leaf's entries, a power of two."""
    mean = math.sqrt(float(np.mean(np.abs(widened(x)) ** 2))) if x.size else 1.0
    return 2.0 ** round(math.log2(mean)) if 0 < mean < math.inf else 1.0


def size_by_entry(x: np.ndarray) -> np.ndarray:
    """The size of each entry; for zeros the leaf's size."""
    return np.where(x == 0, scale_of(x), np.abs(x))


def flattened(xs: Sequence[np.ndarray]) -> np.ndarray:
    """All entries of all arrays in one vector."""
    return np.concatenate([widened(x).ravel() for x in xs])
