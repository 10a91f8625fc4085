"""Checks of a function's derivatives against its own values, and against each other.

With J the Jacobian of f at x, H the Hessian of Re<v, f>, D the slope along a line from f's values
at many step sizes, and random u, w, v:

    J u = D_u f      Re<J^H v, u> = Re<v, D_u f>      H u = D_u J^H v      against values
    Re<v, J u> = Re<J^H v, u>      H u = H u = H u = Re<w, H u>            modes against each other
    J (2 u) = 2 J u     J (u + w) = J u + J w     the same of J^H          linearity
    Re<w, H u> = Re<u, H w>                                                symmetry
    f(x + t u) - f(x) = integral of J(x + s u) u ds                        no jumps left out

What is zero in exact arithmetic, as the sum of a layer norm, comes out as rounding: a difference
far below the numbers at hand counts as that if it changes by as much with x's last digits.

The last one catches what no finite difference of a small step sees: rounding, an argmax that
indexes, a comparison. Kinks pass it. At a kink any slope between the two one-sided ones is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.checking import slopes
from gradtools.testing.checking.probe import (
    FIRST,
    MODES,
    SECOND,
    Probe,
    backend_name,
    inner,
    no_such_mode,
    size,
    wants_64_bits,
    wide,
)
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.precision import at_precision
from gradtools.testing.cross_checking.sides import in_double_precision
from gradtools.testing.diverging.patterns import ArrayPair
from gradtools.testing.flat import Arrays
from gradtools.testing.report import AGREES, CONVENTION, DIFFERS, Comparison, Report, compare_arrays

CALLER = "check_derivatives"
NAMES = ("left", "right")
_ENTRIES = 64  # at most so many entries of a failing leaf are differenced one by one
_ROUNDING = 1e3  # differences below this many epsilons of the largest number are looked at twice


def check_derivatives(
    f: Callable[..., Any],
    args: Sequence[Any],
    backend: Any,
    order: int = 2,
    modes: Sequence[str] | None = None,
    *,
    numeric: bool = True,
    allow_jumps: bool = False,
    seed: int = 0,
    precision: str = "highest",
) -> Report:
    """Checks the derivatives that a framework computes of f, at args.

    Checked are, for random directions in each leaf of the arguments: forward and reverse mode
    against slopes from f's values at steps from a tenth to a millionth of the leaf's size (in
    float32 a three-hundredth); both modes against each other (dot-product test); linearity in the
    tangent and in the cotangent; for order 2 every mix of modes against slopes of the gradient
    and against each other, and the symmetry of the Hessian. A function that jumps where its
    derivative shows nothing is rejected. Complex arguments are moved in complex directions; all
    inner products are Re<u, v>. The tolerances are those of `gradtools.testing.tolerance_table`.

    Args:
        f: Takes and returns pytrees of the backend's arrays; the same at each call.
        args: A tuple with one pytree for each argument of f; its leaves are NumPy arrays or the
            backend's, of any shape. Floating and complex leaves are differentiated; integers,
            booleans, Python numbers and anything else are constants. If a leaf has 64 bits, JAX's
            are switched on for the check alone.
        backend: "torch", "jax", or the module gradtools.torch or gradtools.jax.
        order: 1 or 2.
        modes: Of "forward", "reverse", "forward_over_reverse", "reverse_over_reverse",
            "reverse_over_forward" and "forward_over_forward" those that f must have. None: all
            that f has; what it lacks is listed in the report's `left_out`.
        numeric: False leaves out what f's values say, for an f whose derivative is meant to be
            another (an edited gradient): then only the modes are held against each other.
        allow_jumps: True for an f that is meant to jump, such as a branch cut or a sawtooth.
        seed: Chooses the random directions.
        precision: "highest" (default) keeps all bits of float32's products while it compares,
            whatever is set: no TF32, no bfloat16. "as set" compares as training would run. A note
            of the report says where what is set is lower.

    Returns:
        A `Report`: a record for each comparison. Each says in `quantity` what stands left and
        right, for example "reverse | finite differences".

    Raises:
        AgreementError: A derivative is wrong. It carries the report, and names the argument and
            leaf, the mode, the place, and both values.
        GradtoolsError: There is nothing to check, f has none of the modes, f is random, or the
            arguments are not what is described above.

    Example:
        >>> import numpy as np
        >>> from gradtools.testing import check_derivatives
        >>> x = np.array([0.3, -1.2, 2.0])
        >>> report = check_derivatives(lambda x: (x**3).sum(), (x,), gt)
        >>> bool(report), report.worst.error < 1
        (True, True)
        >>> check_derivatives(lambda x: gt.xp.round(x).sum(), (x,), gt)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gradtools.testing.report.AgreementError: ...a staircase...

    Source: Griewank and Walther, Evaluating Derivatives, 2008, chapter 3 (dot-product test);
    Ridders, Accurate computation of F'(x) and F'(x)F''(x), 1982 (extrapolated differences).
    """
    check_settings(order, modes)
    at = at_precision(CALLER, precision, [backend_name(CALLER, backend)])
    with in_double_precision(is_jax(backend) and wants_64_bits(args)), at as notes:
        probe = Probe(CALLER, f, args, backend)
        check = DerivativeCheck(probe, modes, numeric, allow_jumps, seed)
        check.report.notes += notes
        check.first_order()
        if order == 2:
            check.second_order()
    return check.report.require()


def check_settings(order: int, modes: Sequence[str] | None) -> None:
    """Raises if no such check can be asked for."""
    if order not in (1, 2):
        raise GradtoolsError(f"check_derivatives: order is {order!r}; expected 1 or 2.")
    unknown = [m for m in modes or () if m not in MODES]
    if unknown or (modes is not None and isinstance(modes, str)):
        raise GradtoolsError(
            f"check_derivatives: modes is {modes!r}; expected a tuple of {', '.join(MODES)}."
        )


def is_jax(backend: Any) -> bool:
    """Whether a backend, or its name, is JAX's."""
    return "jax" in (backend if isinstance(backend, str) else getattr(backend, "__name__", ""))


@dataclass(frozen=True)
class Direction:
    """A direction in which one leaf moves, the others resting.

    Attributes:
        leaf: The number of the leaf; None where all move.
        us: The movement of each leaf for t = 1.
    """

    leaf: int | None
    us: Arrays


class DerivativeCheck:
    """The comparisons for one function at one point; they are collected in `report`."""

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
        self.holes = self._holes()
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

    # --- what cannot be decided is said

    def _holes(self) -> bool:
        """Whether an output is not finite somewhere: there it has no derivative to check."""
        for path, y in zip(self.probe.out_paths, self.probe.out, strict=True):
            count = int(np.sum(~np.isfinite(y)))
            if count:
                self.report.left_out.append(
                    f"{count} of {y.size} entries of {path} are not finite: their derivatives are "
                    "not checked"
                )
        return not all(np.isfinite(y).all() for y in self.probe.out)

    def _undecided(self, what: str, unseen: np.ndarray) -> None:
        """Remembers the entries on which finite differences say nothing, in no direction."""
        before = self.unseen.get(what)
        self.unseen[what] = unseen if before is None else before & unseen

    def say_undecided(self) -> None:
        """Lists in the report what no direction could decide."""
        both = self.present.get("forward") and self.present.get("reverse")
        rest = "only the modes are held against each other" if both else "nothing else decides"
        for what, unseen in self.unseen.items():
            if unseen.any():
                self.report.left_out.append(
                    f"{what}: finite differences cannot decide {int(unseen.sum())} of "
                    f"{unseen.size} entries (f leaves its domain beside them, rounding hides "
                    f"the slope, or every step is too large for it); {rest}"
                )
        self.unseen = {}

    # --- what moves

    def _draw(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Random numbers of size 1/2 to 1 and either sign (phase, if complex), few bits each."""
        draw = lambda: self.rng.integers(64, 129, shape) / 128 * self.rng.choice((-1, 1), shape)
        x = draw() + 1j * draw() if np.dtype(dtype).kind == "c" else draw()
        return np.asarray(x).astype(dtype)

    def _everywhere(self, by_entry: bool = False) -> Direction:
        """All leaves at once, each by its own size, or each entry by its own."""
        steps = [_by_entry(x) if by_entry else _scale(x) for x in self.xs]
        us = [self._draw(x.shape, x.dtype) * step for x, step in zip(self.xs, steps, strict=True)]
        return Direction(None, [u.astype(x.dtype) for u, x in zip(us, self.xs, strict=True)])

    def _directions(self, i: int) -> Iterator[Direction]:
        """In leaf i: by its own size, and each entry by its own (which stays in f's domain)."""
        x = self.xs[i]
        for step in (_scale(x), _by_entry(x)):
            us = [np.zeros_like(y) for y in self.xs]
            us[i] = (self._draw(x.shape, x.dtype) * step).astype(x.dtype)
            yield Direction(i, us)

    def _moved(self, us: Arrays, t: float) -> Arrays:
        return [(x + t * u).astype(x.dtype) for x, u in zip(self.xs, us, strict=True)]

    # --- modes that are there

    def _has(self, mode: str, ask: Callable[[], Any]) -> Any:
        """What `ask` gives, None where f has no such mode."""
        if self.present.get(mode) is False or (self.modes is not None and mode not in self.modes):
            return None
        try:
            result = ask()
        except Exception as error:
            self.present[mode] = False
            words = f"{self._name(mode)} mode: {type(error).__name__}: {_first_line(error)}"
            if self.modes is None and no_such_mode(error):
                self.report.left_out.append(words)
                return None
            raise GradtoolsError(f"{self.probe.caller}: {words}") from error
        self.present[mode] = True
        return result

    def _name(self, mode: str) -> str:
        return self.labels.get(mode, mode.replace("_", " "))

    # --- first order

    def first_order(self) -> None:
        """Both modes against values, against each other, and their linearity."""
        probe = self.probe
        gradient = self._has("reverse", lambda: probe.reverse(self.xs, self.vs))
        self._has("forward", lambda: probe.forward(self.xs, self._everywhere().us))
        self._some_mode()
        jumping = [i for i in range(len(self.xs)) if self._jumps(i)]
        for i in range(len(self.xs)):
            for direction in [] if i in jumping else self._directions(i):
                pushed = self._has("forward", partial(probe.forward, self.xs, direction.us))
                self._slopes(direction, gradient, pushed)
                self._dot_product(direction, gradient, pushed)
        self._linearity()
        self.say_undecided()

    def _some_mode(self) -> None:
        if not (self.present.get("forward") or self.present.get("reverse")):
            raise GradtoolsError(
                f"{self.probe.caller}: f has neither forward nor reverse mode: "
                f"{'; '.join(self.report.left_out) or 'modes names none of both'}."
            )

    def _slopes(self, direction: Direction, gradient: Any, pushed: Any) -> None:
        if not self.against_values:
            return
        probe, i = self.probe, direction.leaf or 0
        line = lambda t: _flat(probe.value(self._moved(direction.us, t)))
        result = slopes.slope(line, probe.eps)
        if pushed is not None:
            sides = lambda: slopes.one_sided(line, probe.eps)
            parts = zip(probe.out_paths, pushed, result.parts(probe.out), strict=True)
            for k, (path, p, s) in enumerate(parts):
                kink = lambda k=k: [_like(side, probe.out)[k] for side in sides()]
                self._against_slope("forward", f"{path} by {probe.paths[i]}", p, s, 1, kink)
        if gradient is not None:
            record = self._reverse_against_slope("reverse", direction, gradient[i], line, result)
            self.report.comparisons.append(record)

    def _reverse_against_slope(
        self,
        mode: str,
        direction: Direction,
        gradient: np.ndarray,
        line: slopes.Line,
        found: slopes.Slope,
    ) -> Comparison:
        """Re<J^H v, u> against Re<v, D_u f>; entry by entry where that fails or cannot be had."""
        i = direction.leaf or 0
        mine = np.array(inner([direction.us[i]], [gradient]))
        along = self._contracted(found)
        if not np.isfinite(along.error) or (self.holes and not np.isfinite(mine)):
            return self._entrywise(mode, i, gradient)
        weights = (self.vs, self.vs, [np.abs(v) for v in self.vs])
        kink = lambda: [
            np.array(inner(vs, _like(side, self.probe.out)))
            for vs, side in zip(weights, slopes.one_sided(line, self.probe.eps), strict=True)
        ]
        path = self.probe.paths[i]
        record = self._against_slope(mode, path, mine, along, 1, kink, add=False)
        if record.agrees or not 1 < self.xs[i].size <= _ENTRIES:
            return record
        entries = self._entrywise(mode, i, gradient)
        return record if entries.agrees else entries

    def _contracted(self, found: slopes.Slope) -> slopes.Slope:
        """The slope of Re<v, f>, of the slopes of f."""
        value = _like(found.value, self.probe.out)
        rounding = self._tolerance() * size(self.vs, value) / 10
        weights = np.abs(_flat(self.vs))
        error = float(np.sum(weights[weights > 0] * found.error[weights > 0])) + rounding
        error = error if math.isfinite(error) else math.inf
        number = np.array(inner(self.vs, value))
        return slopes.Slope(number, np.array(error), np.array(0.0), found.smallest)

    def _against_slope(
        self,
        mode: str,
        path: str,
        analytic: np.ndarray,
        found: slopes.Slope,
        order: int,
        kink: Callable[[], Sequence[np.ndarray]] | None = None,
        add: bool = True,
    ) -> Comparison:
        """One derivative against a slope; what the slope cannot decide is remembered.

        Where f itself is not finite there is no slope; where no step gave one, or rounding is as
        large as the slope, only NaN is known to be wrong.
        """
        limit, here = self._tolerance(), np.isfinite(found.at)
        mine = np.where(here, wide(analytic), 0)
        known = here & np.isfinite(found.error)
        value = np.where(known, found.value, np.where(np.isnan(mine), 0, mine))
        noise = 10 * np.where(known, found.error, 0.0)
        with np.errstate(invalid="ignore"):
            off = np.where(mine == value, 0.0, np.abs(mine - value))
            near = off <= noise
            biggest = max(_largest(mine), _largest(value))
        vague = near & (noise > 0.1 * biggest) & ((mine != 0) | (value != 0))
        self._undecided(f"{self._name(mode)} of {path}", here & (~known | vague))
        quantity = f"{self._name(mode)} | finite differences"
        kept = np.where(near, mine, value)
        record = compare_arrays(quantity, path, mine, kept, order, tolerance=limit)
        if record.agrees:
            allowed = np.maximum(limit * biggest + noise, np.finfo(float).tiny)
            record = replace(record, error=float(np.max(off / allowed, initial=0.0)))
        else:
            record = self._explained(record, mine, value, found, kink, limit)
        if add:
            self.report.comparisons.append(record)
        return record

    def _explained(
        self,
        record: Comparison,
        analytic: np.ndarray,
        value: np.ndarray,
        found: slopes.Slope,
        kink: Any,
        limit: float,
    ) -> Comparison:
        if kink is not None and np.isfinite(analytic).all():
            left, right, off = (np.reshape(k, np.shape(analytic)) for k in kink())
            slack = limit * np.maximum(np.abs(left), np.abs(right)) * 10
            kinked = np.abs(left - right) > np.maximum(100 * slack, 2 * np.abs(off))
            between = np.abs(left - analytic) + np.abs(right - analytic) <= np.abs(
                left - right
            ) + 10 * slack + 4 * np.abs(off)
            agree = np.abs(wide(analytic) - value) <= limit * np.max(np.abs(value), initial=0.0)
            if np.all(agree | (kinked & between)):
                return record.because(
                    "a kink", "f has two slopes here; any between them will do.", CONVENTION
                )
        detail = (
            f"Analytic {_shown(record.first)}, numeric {_shown(record.second)} "
            f"(steps down to {found.smallest:.1e} of the argument's size)."
        )
        return record.because(pattern(analytic, value) or "", detail)

    def _entrywise(self, mode: str, i: int, gradient: np.ndarray) -> Comparison:
        """The gradient of a leaf against the slope along each of its entries alone."""
        path = self.probe.paths[i]
        if self.xs[i].size > _ENTRIES:
            nothing = np.full(gradient.shape, np.inf)
            result = slopes.Slope(gradient, nothing, np.zeros(gradient.shape), math.nan)
            return self._against_slope(mode, path, gradient, result, 1, add=False)
        if i not in self.by_entries:
            self.by_entries[i] = self._slopes_of_entries(i)
        result, kink = self.by_entries[i]
        if self.holes:
            result = replace(result, at=gradient)
        return self._against_slope(mode, path, gradient, result, 1, kink, add=False)

    def _slopes_of_entries(self, i: int) -> tuple[slopes.Slope, Any]:
        """The slopes of Re<v, f> along each entry of leaf i; a function to those on each side."""
        x, step = self.xs[i], _scale(self.xs[i])
        along = lambda us, t: np.array(inner(self.vs, self.probe.value(self._moved(us, t))))
        lines: dict[Any, Any] = {}
        for place in np.ndindex(x.shape):
            for unit in (1, 1j) if x.dtype.kind == "c" else (1,):
                us = [np.zeros_like(y) for y in self.xs]
                us[i][place] = unit * step
                lines[place, unit] = partial(along, us)
        result = {key: slopes.slope(line, self.probe.eps) for key, line in lines.items()}

        def gathered(each: Callable[[Any], Any]) -> np.ndarray:
            out = np.zeros(x.shape, wide(x).dtype)
            for place, unit in lines:
                out[place] += unit * each((place, unit)) / step
            return out

        def sides() -> list[np.ndarray]:
            found = {key: slopes.one_sided(line, self.probe.eps) for key, line in lines.items()}
            picked = lambda k, key: found[key][k]
            return [gathered(partial(picked, k)) for k in range(3)]

        error = np.abs(gathered(lambda key: result[key].error))
        smallest = min((slope.smallest for slope in result.values()), default=math.nan)
        value = gathered(lambda key: result[key].value)
        return slopes.Slope(value, error, np.zeros(x.shape), smallest), sides

    def _tolerance(self) -> float:
        names = (tolerances.real_name(x.dtype) for x in [*self.xs, *self.probe.out])
        return max(tolerances.FINITE_DIFFERENCES[name] for name in names)

    def _exact(self, order: int) -> float:
        return max(tolerances.tolerance(x.dtype, order) for x in [*self.xs, *self.probe.out])

    def _dot_product(self, direction: Direction, gradient: Any, pushed: Any) -> None:
        if gradient is None or pushed is None:
            return
        limit = self._exact(1)
        terms = max(size(self.vs, pushed), size(direction.us, gradient))
        path = self.probe.paths[direction.leaf or 0]
        self._compare(
            f"{self._name('reverse')} | {self._name('forward')}",
            path,
            inner(direction.us, gradient),
            inner(self.vs, pushed),
            1,
            limit * terms,
            "the dot-product test fails: the two modes are not adjoint",
            "Left Re<J^H v, u>, right Re<v, J u>.",
            lambda xs: [
                *self.probe.forward(xs, direction.us),
                inner(direction.us, self.probe.reverse(xs, self.vs)),
            ],
        )

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
        """Left against right; `again` gives at other points what the two were made of."""
        a, b, limit = wide(left), wide(right), self._exact(order)
        if a.ndim == 0 and not (np.isfinite(a) or np.isfinite(b)):
            reason = f"{quantity} of {path}: NaN or infinity on both sides decides nothing"
            self.report.left_out += [reason] if reason not in self.report.left_out else []
        biggest = max(np.max(np.abs(a), initial=0.0), np.max(np.abs(b), initial=0.0))
        if math.isfinite(noise) and 0 < biggest < math.inf:
            limit = max(limit, noise / float(biggest))
        record = compare_arrays(quantity, path, a, b, order, tolerance=limit)
        if not record.agrees and again is not None and self._is_rounding(a - b, again):
            record = replace(record, error=1.0, status=AGREES)
        record = record if record.agrees else record.because(cause, detail)
        self.report.comparisons.append(record)
        return record

    # --- rounding of larger numbers that cancel

    def _is_rounding(self, off: np.ndarray, again: Callable[[Arrays], Sequence[Any]]) -> bool:
        """Whether a small difference is one that the arguments' last digits make as well."""
        largest = max(1.0, *map(_largest, [*self.xs, *self.probe.out]))
        if not np.max(np.abs(off)) <= _ROUNDING * self.probe.eps * largest:
            return False
        here = again(self.xs)
        changes = [
            _largest(wide(x) - wide(y))
            for draw in range(4)
            for x, y in zip(again(self._last_digits_moved(draw)), here, strict=True)
        ]
        return bool(np.max(np.abs(off)) <= _ROUNDING * max(changes))

    def _last_digits_moved(self, draw: int) -> Arrays:
        rng = np.random.default_rng(draw)
        factor = lambda x: 1 + 4 * self.probe.eps * rng.uniform(-1, 1, x.shape)
        return [(x * factor(x)).astype(x.dtype) for x in self.xs]

    # --- linearity

    def _linearity(self) -> None:
        probe = self.probe
        if self.present.get("reverse"):
            draw = lambda: [self._draw(y.shape, y.dtype) for y in probe.out]
            name, what = self._name("reverse"), "cotangent"
            self._linear(name, what, probe.reverse, draw, probe.paths)
        if self.present.get("forward"):
            name, what = self._name("forward"), "tangent"
            draw = lambda: self._everywhere().us
            self._linear(name, what, probe.forward, draw, probe.out_paths)

    def _linear(
        self,
        name: str,
        what: str,
        apply: Callable[[Arrays, Arrays], Arrays],
        draw: Callable[[], Arrays],
        paths: Sequence[str],
    ) -> None:
        """apply(-4096 a) = -4096 apply(a) and apply(a + b) = apply(a) + apply(b)."""
        a, b = draw(), draw()
        of_a, of_b = apply(self.xs, a), apply(self.xs, b)
        scaled = apply(self.xs, [(-4096 * x).astype(x.dtype) for x in a])
        added = apply(self.xs, [(x + y).astype(x.dtype) for x, y in zip(a, b, strict=True)])
        cause = f"not linear in the {what}"
        for k, path in enumerate(paths):
            finite = np.isfinite(of_a[k]) & np.isfinite(of_b[k])  # infinity is no number to add
            one, other, thousands, both = (
                np.where(finite, wide(x[k]), 0) for x in (of_a, of_b, scaled, added)
            )
            noise = self._exact(1) * (_largest(one) + _largest(other))
            self._compare(
                f"{name} of -4096 {what}s | -4096 times it", path, thousands, -4096 * one, 1,
                4096 * noise, cause,
            )  # fmt: skip
            again = lambda xs, k=k: [apply(xs, a)[k], apply(xs, b)[k]]
            self._compare(
                f"{name} of a sum of {what}s | sum", path, both, one + other, 1, noise, cause,
                again=again,
            )  # fmt: skip

    # --- jumps

    def _jumps(self, i: int) -> bool:
        """Whether f, along lines in leaf i, is not the integral of its derivative."""
        if not self.against_values or self.allow_jumps:
            return False
        eps, reach = self.probe.eps, max(1.0, 1.0 / _scale(self.xs[i]))
        for direction in [*self._directions(i), *self._directions(i)]:
            line, slope = self._line_and_slope(direction)
            ways = [(slopes.jump_near, t) for t in (0.1, -0.1)]
            ways += [(slopes.jump_far, t * reach) for t in (1, -1, 3, -3)]
            for look, end in ways:
                result = look(line, slope, end, eps)
                if result is not None:
                    self._jumped(i, line, slope, result, end)
                    return True
        return False

    def _line_and_slope(self, direction: Direction) -> tuple[slopes.Line, slopes.Line]:
        """f along a line and its derivative there: of each entry, or of Re<v, f>.

        Every look for a jump begins with the same places, so each place is computed once.
        """
        probe, us = self.probe, direction.us
        if self.present.get("forward"):
            line = lambda t: _flat(probe.value(self._moved(us, t)))
            return cache(line), cache(lambda t: _flat(probe.forward(self._moved(us, t), us)))
        along = lambda t: np.array([inner(self.vs, probe.value(self._moved(us, t)))])
        slope = lambda t: np.array([inner(probe.reverse(self._moved(us, t), self.vs), us)])
        return cache(along), cache(slope)

    def _jumped(
        self,
        i: int,
        line: slopes.Line,
        slope: slopes.Line,
        found: slopes.Jump,
        end: float,
    ) -> None:
        at, steep = found.at, slope(0.0)[found.entry]
        flat = steep == 0
        cause = "a staircase: the derivative is zero, the function jumps" if flat else (
            "f jumps, and its derivative leaves that out"
        )  # fmt: skip
        change = (line(end) - line(0.0))[found.entry] / end
        record = Comparison(
            f"{self._name('forward' if self.present.get('forward') else 'reverse')}"
            " | finite differences at large steps",
            self.probe.paths[i], 1, math.inf, self._tolerance(), None,
            _number(steep), _number(change), self.xs[i].shape, str(self.xs[i].dtype), DIFFERS,
        )  # fmt: skip
        detail = (
            f"Analytic {_shown(record.first)}; numeric {_shown(record.second)} with a step of "
            f"{abs(end):g} times the leaf's size, at {abs(at):.3g} of which f jumps by "
            f"{_shown(_number(found.size))}. round, floor, a comparison, or an argmax that "
            "indexes lose the gradient: give them a surrogate (gt.straight_through), or, if f is "
            "meant to jump, pass allow_jumps=True."
        )
        self.report.comparisons.append(record.because(cause, detail))

    # --- second order

    def second_order(self) -> None:
        """Every mix of modes against slopes of the gradient, against each other; symmetry."""
        if not self.report:
            return
        d, e = self._everywhere(by_entry=True), self._everywhere()
        products = self._products(d)
        others = self._products(e) if products else {}
        along = self._slope_of_gradient(d)
        for mode, product in products.items():
            self._hessian_against_slope(mode, product, along, d)
            self._symmetry(mode, product, others[mode], d, e)
        if products:
            self._mixes(products, d)
        curved = self._has(
            "forward_over_forward",
            lambda: self.probe.curvature(self.xs, d.us, e.us, self.vs),
        )
        if curved is not None:
            self._curvature(curved, products, d, e)
        self.say_undecided()

    def _products(self, d: Direction) -> dict[str, Arrays]:
        result = {}
        for mode in SECOND[:3]:
            parts = [part for part in FIRST if part in mode.split("_over_")]
            lacking = [part for part in parts if self.present.get(part) is False]
            if lacking:
                continue
            product = self._has(mode, partial(self.probe.product, mode, self.xs, d.us, self.vs))
            if product is not None:
                result[mode] = product
        return result

    def _slope_of_gradient(self, d: Direction) -> list[slopes.Slope] | None:
        if not self.against_values or not self.present.get("reverse"):
            return None
        line = lambda t: _flat(self.probe.reverse(self._moved(d.us, t), self.vs))
        return slopes.slope(line, self.probe.eps).parts(self.xs)

    def _hessian_against_slope(
        self, mode: str, product: Arrays, along: list[slopes.Slope] | None, d: Direction
    ) -> None:
        if along is None:
            return
        for i, (h, s) in enumerate(zip(product, along, strict=True)):
            record = self._against_slope(mode, self.probe.paths[i], h, s, 2, add=False)
            again = lambda xs, i=i: [self.probe.product(mode, xs, d.us, self.vs)[i]]
            if record.status == DIFFERS and self._is_rounding(wide(h) - s.value, again):
                record = replace(record, error=1.0, status=AGREES, cause=None, detail="")
            if record.status == DIFFERS:
                record = self._at_second_order(record, mode, i, d)
            self.report.comparisons.append(record)

    def _at_second_order(self, record: Comparison, mode: str, i: int, d: Direction) -> Comparison:
        """Names the argument by which the second derivative is wrong."""
        wrong = []
        for j in range(min(len(self.xs), 12)):
            us = [u if k == j else np.zeros_like(u) for k, u in enumerate(d.us)]
            line = lambda t, us=us: wide(self.probe.reverse(self._moved(us, t), self.vs)[i]).ravel()
            mine = self.probe.product(mode, self.xs, us, self.vs)[i]
            (shaped,) = slopes.slope(line, self.probe.eps).parts([mine])
            if not self._against_slope(mode, "", mine, shaped, 2, add=False).agrees:
                wrong.append(self.probe.paths[j])
        by = f" by {', '.join(wrong)}" if wrong else ""
        cause = "right at first order, wrong at second"
        if record.cause:
            cause += f" ({record.cause})"
        mend = "Something that depends on the arguments, such as a residual, is taken as constant."
        return replace(
            record, path=f"{record.path}{by}", cause=cause, detail=record.detail + " " + mend
        )

    def _symmetry(self, mode: str, h_d: Arrays, h_e: Arrays, d: Direction, e: Direction) -> None:
        noise = self._exact(2) * max(size(e.us, h_d), size(d.us, h_e))
        self._compare(
            f"{self._name(mode)}: <w, H u> | <u, H w>", "all arguments", inner(e.us, h_d),
            inner(d.us, h_e), 2, noise, "the Hessian is not symmetric",
            again=lambda xs: [
                inner(w.us, self.probe.product(mode, xs, u.us, self.vs))
                for u, w in ((d, e), (e, d))
            ],
        )  # fmt: skip

    def _mixes(self, products: dict[str, Arrays], d: Direction) -> None:
        first, *others = products
        for mode in others:
            for i, path in enumerate(self.probe.paths):
                a, b = products[first][i], products[mode][i]
                biggest = max(np.max(np.abs(wide(h)), initial=0) for h in products[first])
                again = lambda xs, i=i, modes=(first, mode): [
                    self.probe.product(each, xs, d.us, self.vs)[i] for each in modes
                ]
                self._compare(
                    f"{self._name(first)} | {self._name(mode)}", path, a, b, 2,
                    16 * self.probe.eps * float(biggest), "two mixes of modes differ", again=again,
                )  # fmt: skip

    def _curvature(
        self, curved: Any, products: dict[str, Arrays], d: Direction, e: Direction
    ) -> None:
        name = self._name("forward_over_forward")
        for mode, product in products.items():
            noise = self._exact(2) * size(e.us, product)
            again = lambda xs, mode=mode: [
                self.probe.curvature(xs, d.us, e.us, self.vs),
                inner(e.us, self.probe.product(mode, xs, d.us, self.vs)),
            ]
            self._compare(
                f"{name} | {self._name(mode)}", "all arguments", curved, inner(e.us, product), 2,
                noise, "two mixes of modes differ", again=again,
            )  # fmt: skip
        if products or not self.against_values:
            return
        us = lambda t: self._moved(e.us, t)
        line = lambda t: np.array(inner(self.vs, self.probe.forward(us(t), d.us)))
        result = slopes.slope(line, self.probe.eps)
        self._against_slope("forward_over_forward", "all arguments", np.asarray(curved), result, 2)


def pattern(analytic: np.ndarray, value: np.ndarray) -> str | None:
    """What two arrays have to do with each other, in a few words."""
    a, b = wide(analytic), wide(value)
    if (~np.isfinite(a) & np.isfinite(b)).any():
        return "the derivative is not finite"
    if not np.isfinite(b).all():  # where both are infinite nothing differs
        a, b = a[np.isfinite(b)], b[np.isfinite(b)]
    largest = np.max(np.abs(b), initial=0.0)
    if not np.any(a) and largest:
        return "the derivative is zero: a gradient is stopped"
    if largest == 0 or a.shape != b.shape:
        return None
    ratio = np.vdot(b, a) / np.vdot(b, b)
    near = min(1e-4, abs(ratio - 1) / 100)
    fits = np.allclose(a, ratio * b, rtol=near, atol=near * largest)
    if fits and abs(ratio) > 1e-6 and near > 0:
        factor = ratio if abs(np.imag(ratio)) > 1e-4 * abs(ratio) else np.real(ratio)
        digits = 4 if abs(factor - 1) > 1e-3 else 6
        return "the sign" if abs(factor + 1) < 1e-4 else f"a constant factor {factor:.{digits}g}"
    if np.imag(b).any() and np.allclose(a, np.conj(b), rtol=1e-4, atol=1e-4 * largest):
        return "a conjugate"
    if a.ndim == 2 and a.shape[0] == a.shape[1] and np.allclose(a, b.T, atol=1e-4 * largest):
        return "transposed"
    return _in_places(a, b, largest)


def _in_places(a: np.ndarray, b: np.ndarray, largest: float) -> str | None:
    """A mistake that is made at some places, or that puts numbers in others."""
    lost = (a == 0) & (np.abs(b) > 1e-4 * largest)
    if lost.any() and np.allclose(a, np.where(lost, 0, b), rtol=1e-4, atol=1e-4 * largest):
        return f"zero in places, {int(lost.sum())} of {lost.size} entries"
    moved = ArrayPair(a, b, 1e-4, ["analytic", "numeric"]).layout()
    return None if moved is None else f"{moved[0]}: {moved[1][0].lower()}{moved[1][1:].rstrip('.')}"


def _scale(x: np.ndarray) -> float:
    """The size of a leaf's entries, a power of two."""
    mean = math.sqrt(float(np.mean(np.abs(wide(x)) ** 2))) if x.size else 1.0
    return 2.0 ** round(math.log2(mean)) if 0 < mean < math.inf else 1.0


def _by_entry(x: np.ndarray) -> np.ndarray:
    """The size of each entry, of zeros the leaf's."""
    return np.where(x == 0, _scale(x), np.abs(x))


def _flat(xs: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([wide(x).ravel() for x in xs])


def _like(flat: np.ndarray, like: Arrays) -> Arrays:
    ends = np.cumsum([x.size for x in like])[:-1]
    return [part.reshape(x.shape) for part, x in zip(np.split(flat, ends), like, strict=True)]


def _largest(x: np.ndarray) -> float:
    """The largest finite modulus."""
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0.0))


def _number(x: Any) -> complex | float:
    return complex(x) if np.iscomplexobj(x) else float(x)


def _shown(x: Any) -> str:
    return x if isinstance(x, str) else f"{x:.9g}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
