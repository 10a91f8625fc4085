"""Checks derivatives of a function against finite differences, and against each other.

Let J be the Jacobian of f at x, and H the Hessian of Re<v, f>. Let D_u be the derivative along u,
estimated by finite differences with many step sizes. The tangents u and w and the cotangent v are
random. The checks are:

    J u = D_u f      Re<J^H v, u> = Re<v, D_u f>    Re<v, J u> = Re<J^H v, u>     first order
    H u = D_u J^H v, in three nested modes          D^2 f [u, w] = D_w J u        second order
    J (w - 16 u) = J w - 16 J u                     the same for J^H              linearity

A value that is zero in exact arithmetic, such as the sum of a layer norm, evaluates to rounding
error. A small difference between two sides counts as rounding error if a perturbation of the last
digits of x changes one side by a comparable amount. At a kink the finite difference is the mean of
the one-sided derivatives, and any derivative between the one-sided derivatives is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from gradtools.arguments.checks import order_among, whole_or_none
from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.checking import slopes
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.precision import highest_precision
from gradtools.testing.cross_checking.sides import in_double_precision
from gradtools.testing.flat import (
    FIRST,
    MODES,
    SECOND,
    Arrays,
    Probe,
    backend_name,
    first_line,
    inner,
    is_rounding,
    no_such_mode,
    size,
    wants_64_bits,
)
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

CALLER = "check_derivatives"
_SCALE = -16.0
_ENTRIES = 64  # Maximum number of entries that are compared one by one after a leaf has failed.
_KEPT = 32  # Maximum number of cached derivatives.


@user_facing
def check_derivatives(
    f: Callable[..., Any],
    args: Sequence[Any],
    backend: Any,
    order: int = 2,
    modes: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> Report:
    """Checks the derivatives of f that a framework computes at args.

    Along random directions in each leaf of the arguments, forward and reverse mode are compared
    with finite differences of f. The step sizes are between 1e-1 and 2e-7 of the leaf's magnitude
    (8e-4 in float32). Both modes are compared with each other (dot-product test) and tested for
    linearity in the tangent or cotangent. For order 2, every combination of modes is compared with
    finite differences of the gradient or pushforward. Complex arguments are perturbed in complex
    directions; all inner products are Re<u, v>. Two modes are compared with the tolerance of
    `gradtools.testing.tolerance`, and finite differences with a larger tolerance. float32 products
    are computed in full precision during the check, without TF32 or bfloat16.

    Args:
        f: A deterministic function that takes and returns pytrees of the backend's arrays.
        args: A tuple with one pytree for each argument of f; its leaves are arrays of NumPy or the
            backend, of any shape. Floating and complex leaves are differentiated; integers,
            booleans, Python numbers and all other leaves are constants. If a leaf has 64 bits, x64
            is enabled in JAX during the check.
        backend: "torch", "jax", or the module gradtools.torch or gradtools.jax.
        order: 1 or 2.
        modes: The modes that f must support, from "forward", "reverse", "forward_over_reverse",
            "reverse_over_reverse", "reverse_over_forward" and "forward_over_forward". None checks
            all modes that f supports; the report's `left_out` lists the other modes.
        seed: The seed of the random directions.

    Returns:
        A `Report` with one record for each comparison. A record's `quantity` names the two sides,
        for example "reverse | finite differences".

    Raises:
        AgreementError: A derivative is wrong. The error contains the report and names the argument
            and leaf, the mode, the index, and both values.
        GradtoolsError: There is nothing to check, f supports none of the modes, f is not
            deterministic, or the arguments are not as described above.
        Exception: Any error that f raises, with a note that names f.

    Example:
        >>> import numpy as np
        >>> from gradtools.testing import check_derivatives
        >>> x = np.array([0.3, -1.2, 2.0])
        >>> report = check_derivatives(lambda x: (x**3).sum(), (x,), gt)
        >>> bool(report), report.worst.error < 1
        (True, True)
        >>> stopped = lambda x: (gt.stop_gradient(x) * x).sum()
        >>> check_derivatives(stopped, (x,), gt)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gradtools.testing.report.AgreementError: ...Likely cause: constant factor 0.5...

    Source: Griewank and Walther, Evaluating Derivatives, 2008, chapter 3 (dot-product test);
    Ridders, Accurate computation of F'(x) and F'(x)F''(x), 1982 (extrapolated differences).
    """
    with check_context(CALLER, args, backend, order, modes):
        check = DerivativeCheck(Probe(CALLER, f, args, backend), modes, seed)
        check.first_order()
        if order == 2:
            check.second_order()
    return check.report.require()


@contextmanager
def check_context(
    caller: str, args: Any, backend: Any, order: int, modes: Sequence[str] | None = None
) -> Iterator[None]:
    """Context manager that sets the highest matmul precision and enables x64 for 64-bit args.

    Raises an error if `order`, `modes` or `backend` is invalid.
    """
    order_among(caller, order, (1, 2), "1 or 2")
    known = not isinstance(modes, str) and isinstance(modes, Collection) and {*modes} <= {*MODES}
    if modes is not None and not known:
        raise GradtoolsError(
            f"{caller}: modes is {modes!r}; expected a tuple of {', '.join(MODES)}."
        )
    name = backend_name(caller, backend)
    wide = name == "jax" and wants_64_bits(name, args)
    with in_double_precision(wide), highest_precision([name]):
        yield


class DerivativeCheck:
    """Compares the derivatives of one function at one point and collects the results in `report`.

    Attributes:
        xs: The differentiated leaves of the arguments. `vs` contains random cotangents of the
            outputs.
        modes: The modes that f must support. If None, all modes that f supports are checked.
        labels: Maps a mode to its name in the report.
        present: Maps each mode that was passed to `has` to the result of `has`.
    """

    def __init__(
        self,
        probe: Probe,
        modes: Sequence[str] | None = None,
        seed: int = 0,
        labels: dict[str, str] | None = None,
    ) -> None:
        self.probe, self.modes, self.labels = probe, modes, labels or {}
        self.rng = np.random.default_rng(whole_or_none(probe.caller, "seed", seed, 0))
        name = getattr(probe.f, "__name__", type(probe.f).__name__)
        self.report = Report(f"{probe.caller} of {name} in {probe.name}", ("left", "right"))
        self.xs, kinds = probe.leaves, [x.dtype for x in (*probe.leaves, *probe.out)]
        self.vs = [np.where(np.isfinite(y), self.draw(y), 0).astype(y.dtype) for y in probe.out]
        self.numeric = max(tolerances.FINITE_DIFFERENCES[tolerances.real_name(k)] for k in kinds)
        self.exact = max(tolerances.tolerance(k, 1) for k in kinds)
        self.present: dict[str, bool] = {}
        self._undecided: dict[str, np.ndarray] = {}
        self._kept: dict[Any, Any] = {}
        again = probe.value(self.xs)
        for path, y, z in zip(probe.out_paths, probe.out, again, strict=True):
            if not np.array_equal(y, z, equal_nan=True):
                raise GradtoolsError(
                    f"{probe.caller}: two calls of f at the same arguments gave different values. "
                    "Pass random keys as arguments, turn dropout off, and do not change state in f."
                )
            if count := int(np.sum(~np.isfinite(y))):
                self.report.left_out.append(
                    f"{count} of {y.size} entries of {path} are not finite: their derivatives are "
                    "not checked"
                )
            if 0 < count == y.size:  # an output without finite entries is a failure
                self.report.comparisons.append(compare_arrays("value", path, y, y))

    def note_undecided(self) -> None:
        """Adds the numbers of entries with inconclusive finite differences to the report."""
        both = self.present.get("forward") and self.present.get("reverse")
        for what, entries in self._undecided.items():
            rest = "these entries are not checked"
            if both and " over " not in what:  # at first order
                rest = "for these entries, forward mode is only compared with reverse mode"
            if entries.any():
                self.report.left_out.append(
                    f"{what}: finite differences cannot decide {int(entries.sum())} of "
                    f"{entries.size} entries (f leaves its domain nearby, rounding exceeds "
                    f"the slope, or every step is too large); {rest}"
                )
        self._undecided = {}

    # --- directions, lines and derivatives

    def draw(self, like: np.ndarray) -> np.ndarray:
        """Draws numbers with few mantissa bits; real and imaginary parts are in ±[1/2, 1]."""
        shape, rng = like.shape, self.rng
        draw = lambda: rng.integers(64, 129, shape) / 128 * rng.choice((-1, 1), shape)
        x = draw() + 1j * draw() if like.dtype.kind == "c" else draw()
        return np.asarray(x).astype(like.dtype)

    def everywhere(self, by_entry: bool = False) -> Arrays:
        """Draws a tangent of all leaves, scaled by the size of each leaf or of each entry."""
        sizes = size_by_entry if by_entry else scale_of
        return [(self.draw(x) * sizes(x)).astype(x.dtype) for x in self.xs]

    def along(self, i: int, u: np.ndarray) -> Arrays:
        """Returns a tangent that is u in leaf i and zero in the other leaves."""
        return [u.astype(x.dtype) if i == j else np.zeros_like(x) for j, x in enumerate(self.xs)]

    def directions(self, i: int) -> Iterator[Arrays]:
        """Yields two tangents of leaf i, scaled by `scale_of` and by `size_by_entry`."""
        x = self.xs[i]
        yield self.along(i, self.draw(x) * scale_of(x))
        yield self.along(i, self.draw(x) * size_by_entry(x))

    def moved(self, us: Arrays, t: float) -> Arrays:
        """Returns the leaves `xs`, moved by t along the tangent `us`."""
        return [(x + t * u).astype(x.dtype) for x, u in zip(self.xs, us, strict=True)]

    def slope(self, us: Arrays, run: Callable[[Arrays], Arrays] | None = None) -> slopes.Slope:
        """Estimates the derivative along `us` of each output entry of f or, if given, of `run`."""
        compute = run or self.probe.value
        return slopes.slope(lambda t: flattened(compute(self.moved(us, t))), self.probe.eps)

    def at(self, mode: str, xs: Arrays, *vectors: Arrays) -> Any:
        """Returns `Probe.derivative(mode, xs, *vectors)` and caches the most recent results."""
        key = (mode, *(x.tobytes() for group in (xs, *vectors) for x in group))
        if key not in self._kept:
            found = self.probe.derivative(mode, xs, *vectors)
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = found
        return self._kept[key]

    def has(self, mode: str, *vectors: Arrays) -> bool:
        """Returns whether a mode is selected and supported by f; the support is tested at `xs`."""
        if mode not in self.present:
            wanted = self.modes is None or mode in self.modes
            try:
                if wanted:
                    self.at(mode, self.xs, *vectors)
            except Exception as error:
                words = f"{self.label(mode)} mode: {first_line(error)}"
                # PyTorch's tangent of softmax and logsumexp writes in place.
                in_place = mode == SECOND[2] and "modified by an inplace operation" in str(error)
                if self.modes is not None or not (in_place or no_such_mode(error)):
                    raise GradtoolsError(f"{self.probe.caller}: {words}") from error
                self.report.left_out.append(words)
                wanted = False
            self.present[mode] = wanted
        return self.present[mode]

    def label(self, mode: str) -> str:
        """Returns a mode's name for the report."""
        return self.labels.get(mode, mode.replace("_", " "))

    # --- comparison of two results

    def equal(
        self,
        quantity: str,
        path: str,
        sides: Callable[[Arrays], tuple[Any, Any]],
        terms: float,
        cause: str,
        detail: str = "",
    ) -> None:
        """Compares two results at `xs`, such as first derivatives, and adds a record to the report.

        Args:
            quantity: The names of both results, such as "reverse | forward".
            path: The path of the leaf.
            sides: A function that returns both results at the given leaves.
            terms: The magnitude of the terms that are summed in both results; the rounding error of
                these terms is tolerated.
            cause: The cause to report if the results differ.
            detail: Advice that is printed after the cause.
        """
        a, b = map(widened, sides(self.xs))
        unknown = a.ndim == 0 and not (np.isfinite(a) or np.isfinite(b))
        if unknown:
            reason = f"{quantity} of {path}: not compared, NaN or infinity on both sides"
            self.report.left_out += [reason] if reason not in self.report.left_out else []
        biggest, limit = max(largest(a), largest(b)), self.exact
        if math.isfinite(terms) and biggest:
            limit = max(limit, self.exact * terms / biggest)
        record = compare_arrays(quantity, path, a, b, 1, tolerance=limit)
        if unknown and record.error <= 1:
            record = replace(record, status=AGREES, cause=None, detail="")
        elif not record.agrees:
            record = self.unless_rounding(record.because(cause, detail), a - b, sides)
        self.report.comparisons.append(record)

    def unless_rounding(
        self, record: Comparison, off: np.ndarray, sides: Callable[[Arrays], tuple[Any, ...]]
    ) -> Comparison:
        """Returns the record, marked as agreeing if the difference is only rounding error."""
        eps, greatest = self.probe.eps, max(1.0, *map(largest, [*self.xs, *self.probe.out]))
        if not is_rounding(np.abs(off), sides, self.xs, eps, 1e3 * eps * greatest):
            return record
        return replace(record, error=1.0, status=AGREES, cause=None, detail="")

    # --- finite differences

    def against_slope(
        self,
        mode: str,
        path: str,
        derivative: Callable[[float], Any],
        measured: slopes.Slope,
        order: int,
    ) -> Comparison:
        """Compares a derivative with finite differences and stores which entries are undecided.

        Entries at which f is not finite are not compared. If no step size gives an estimate, the
        derivative counts as wrong only if it is NaN. Otherwise, a difference of at most 10 times
        the error of the estimate is accepted, and the entry is undecided if this bound is large.

        derivative: Maps t to the derivative at x + t u. Derivatives at small t show whether x is at
            a kink, or whether the smallest step size is too large for f.
        """
        what, limit = f"{self.label(mode)} of {path}", self.numeric
        here, mine = np.isfinite(measured.at), widened(derivative(0.0))
        mine = np.where(here, mine, 0)

        def compared(error: np.ndarray) -> tuple[Comparison, Any, Any, Any, Any]:
            known = here & np.isfinite(error)
            value = np.where(known, measured.value, np.where(np.isnan(mine), 0, mine))
            noise = 10 * np.where(known, error, 0.0)
            with np.errstate(invalid="ignore"):
                off = np.where(mine == value, 0.0, np.abs(mine - value))
                near = off <= noise
            biggest = max(largest(mine), largest(value))
            vague = near & (noise > 0.1 * biggest) & ((mine != 0) | (value != 0))
            quantity, kept = f"{self.label(mode)} | finite differences", np.where(near, mine, value)
            c = compare_arrays(quantity, path, mine, kept, order, tolerance=limit)
            if c.agrees:
                allowed = np.maximum(limit * biggest + noise, np.finfo(float).tiny)
                c = replace(c, error=float(np.max(off / allowed, initial=0.0)))
            return c, here & (~known | vague), value, off, np.maximum(noise, limit * biggest)

        record, undecided, value, off, slack = compared(measured.error)
        if not record.agrees and np.isfinite(mine).all():
            t = slopes.smallest_step(self.probe.eps)
            near = [np.where(here, widened(derivative(s * t)), 0) for s in (-1, 1, -0.5, 0.5)]
            left, right = near[:2]
            gap, most = np.abs(left - right), np.maximum(np.abs(left), np.abs(right))
            is_mean = np.abs((left + right) / 2 - value) <= 4 * limit * most + slack
            between = np.abs(left - mine) + np.abs(right - mine) - gap <= 4 * limit * most
            if ((off <= slack) | ((gap > 16 * limit * most) & is_mean & between)).all():
                detail = "f has two slopes at this point; any value between them is accepted."
                record = record.because("a kink", detail, CONVENTION)
            else:  # the derivative may change so fast that every step is too large
                change = np.fmax(np.abs(left - near[2]), np.abs(right - near[3]))
                coarse = np.isfinite(measured.error) & (off <= 2 * change)
                if coarse.any():
                    error = np.where(coarse, np.inf, measured.error)
                    record, undecided, value, *_ = compared(error)
        self._undecided[what] = undecided & self._undecided.get(what, True)
        if record.agrees:
            return record
        cause = relation(mine, value, ("the derivative", "the numeric one")) or ""
        if (~np.isfinite(mine) & np.isfinite(value)).any():
            cause = "the derivative is not finite"
        elif not np.any(mine) and np.any(value):
            cause = "the derivative is zero: a gradient is stopped"
        return record.because(
            cause, f"Analytic {show(record.first)}, numeric {show(record.second)}."
        )

    def _reverse_against_slope(self, i: int, us: Arrays, measured: slopes.Slope) -> Comparison:
        """Compares Re<J^H v, u> with Re<v, D_u f>, for a tangent u of leaf i.

        Both sides are sums over the outputs and over the entries of leaf i. For such a sum, a kink
        cannot be recognized and a wrong entry cannot be located. For small arrays, a failed
        comparison is therefore repeated for each output, and a failed or undecided comparison is
        repeated for each entry.
        """
        vs, x, path = self.vs, self.xs[i], self.probe.paths[i]
        record, decided = self._products(path, [(vs, us, measured)], ())
        if record.agrees and decided:
            return record
        seeds = np.eye(sum(v.size for v in vs))
        if decided and len(seeds) <= _ENTRIES and all(v.dtype.kind == "f" for v in vs):
            like = [slopes.shaped_like(row, vs) for row in seeds]
            rows = [[c.astype(v.dtype) for c, v in zip(row, vs, strict=True)] for row in like]
            pairs = [(row, us, measured) for row in rows]
            each, _ = self._products(f"{path}, output by output", pairs, (len(pairs),))
            if each.agrees:
                return each
        if x.size > _ENTRIES or (decided and x.size == 1):
            return record if decided else replace(record, status=AGREES, cause=None, detail="")
        step, pairs = scale_of(x), []
        for place in np.ndindex(x.shape):
            for unit in (1, 1j) if x.dtype.kind == "c" else (1,):
                u = np.zeros_like(x)
                u[place] = unit * step
                along = self.along(i, u)
                pairs.append((vs, along, self.slope(along)))
        entries, _ = self._products(path, pairs, x.shape, step)
        return record if decided and entries.agrees else entries

    def _products(
        self, path: str, pairs: Sequence[Any], shape: tuple[int, ...], step: float = 1.0
    ) -> tuple[Comparison, bool]:
        """Compares Re<J^H v, u> / step with slopes; returns a record and whether it is conclusive.

        pairs: Triples of v, u and the slope of f along u; a complex entry has two triples.
        """
        is_complex = len(pairs) > math.prod(shape)

        def gathered(numbers: Any) -> np.ndarray:
            x = np.array([*numbers]) / step
            return (x[::2] + 1j * x[1::2] if is_complex else x).reshape(shape)

        pulled = lambda t: gathered(
            inner(us, self.at("reverse", self.moved(us, t), vs)) for vs, us, _ in pairs
        )
        values, errors = list[float](), list[float]()
        for vs, _, measured in pairs:
            value, sizes = slopes.shaped_like(measured.value, vs), np.abs(flattened(vs))
            values.append(inner(vs, value))
            error = float(np.sum(sizes[sizes > 0] * measured.error[sizes > 0]))
            errors.append(error + self.numeric * size(vs, value) / 10)
        mine, finite = pulled(0.0), bool(np.isfinite(flattened(self.probe.out)).all())
        error = np.abs(gathered(errors))
        measured = slopes.Slope(gathered(values), error, np.where(finite, 0.0, mine))
        record = self.against_slope("reverse", path, pulled, measured, 1)
        return record, bool((np.isfinite(error) & (finite | np.isfinite(mine))).all())

    # --- the checks

    def first_order(self) -> None:
        """Compares both modes with finite differences and with each other, and checks linearity."""
        probe, vs = self.probe, self.vs
        reverse = self.has("reverse", vs)
        forward = self.has("forward", self.everywhere())
        if not (forward or reverse):
            raise GradtoolsError(
                f"{probe.caller}: f has neither forward nor reverse mode: "
                f"{'; '.join(self.report.left_out) or 'modes contains neither'}."
            )
        for i, path in enumerate(probe.paths):
            for us in self.directions(i):
                self.slopes_along(us, i)
                if not (forward and reverse):
                    continue
                dot = lambda xs, us=us: (
                    inner(us, self.at("reverse", xs, vs)),
                    inner(vs, self.at("forward", xs, us)),
                )
                terms = size(vs, self.at("forward", self.xs, us))
                terms = max(terms, size(us, self.at("reverse", self.xs, vs)))
                names = f"{self.label('reverse')} | {self.label('forward')}"
                cause = "the dot-product test fails: the two modes are not adjoint"
                detail = "The left value is Re<J^H v, u>, and the right value is Re<v, J u>."
                self.equal(names, path, dot, terms, cause, detail)
        if reverse:
            a, b = ([self.draw(y) for y in probe.out] for _ in range(2))
            self._linear("reverse", "cotangent", a, b, probe.paths)
        if forward:
            a, b = self.everywhere(), self.everywhere()
            self._linear("forward", "tangent", a, b, probe.out_paths)
        self.note_undecided()

    def slopes_along(self, us: Arrays, i: int) -> None:
        """Compares both modes with the slope along `us`, a tangent of leaf i."""
        probe, measured, leaf = self.probe, self.slope(us), self.probe.paths[i]
        if self.present["forward"]:
            paths = [f"{path} by {leaf}" for path in probe.out_paths]
            pushed = lambda xs: self.at("forward", xs, us)
            self._parts("forward", paths, pushed, measured, us, 1)
        if self.present["reverse"]:
            self.report.comparisons.append(self._reverse_against_slope(i, us, measured))

    def _parts(
        self,
        mode: str,
        paths: Sequence[str],
        run: Callable[[Arrays], Arrays],
        measured: slopes.Slope,
        us: Arrays,
        order: int,
    ) -> None:
        """Compares each array of a derivative with finite differences along `us`."""
        for i, part in enumerate(measured.parts(run(self.xs))):
            each = lambda xs, i=i: (run(xs)[i],)
            derivative = lambda t, each=each: each(self.moved(us, t))[0]
            record = self.against_slope(mode, paths[i], derivative, part, order)
            if not record.agrees and order == 2:
                known = f" ({record.cause})" if record.cause else ""
                constant = (
                    " A value that depends on the arguments, such as a residual, is treated as a "
                    "constant."
                )
                mine = widened(derivative(0.0))
                detail = record.detail + constant * bool(np.isfinite(mine).all())
                cause = f"correct at first order, wrong at second order{known}"
                record = record.because(cause, detail)
                record = self.unless_rounding(record, mine - part.value, each)
            self.report.comparisons.append(record)

    def _linear(self, mode: str, what: str, a: Arrays, b: Arrays, paths: Sequence[str]) -> None:
        """Compares J (b - 16 a) with J b - 16 J a at entries where all terms are finite."""
        joined = [(y + _SCALE * x).astype(x.dtype) for x, y in zip(a, b, strict=True)]
        for k, path in enumerate(paths):
            each = [widened(self.at(mode, self.xs, v)[k]) for v in (a, b)]
            finite = np.isfinite(each[0]) & np.isfinite(each[1])
            of = lambda xs, v, k=k, on=finite: np.where(on, widened(self.at(mode, xs, v)[k]), 0)
            terms = abs(_SCALE) * largest(of(self.xs, a)) + largest(of(self.xs, b))
            both = lambda xs, of=of: (of(xs, joined), _SCALE * of(xs, a) + of(xs, b))
            name = f"{self.label(mode)} of a sum of {what}s | the sum of the results"
            self.equal(name, path, both, terms, f"not linear in the {what}")

    def second_order(self) -> None:
        """Compares second-order modes with finite differences of the gradient or pushforward."""
        if not self.report:
            return
        probe, vs, d, e = self.probe, self.vs, self.everywhere(by_entry=True), self.everywhere()
        of_gradient = "reverse", vs, d, probe.paths
        of_pushforward = "forward", d, e, probe.out_paths
        lacking = [mode for mode in FIRST if not self.present[mode] and self.modes is None]
        measured: dict[str, slopes.Slope] = {}
        for mode in SECOND:
            base, seed, us, paths = of_pushforward if mode == SECOND[3] else of_gradient
            seeds = (us, seed) if mode == SECOND[2] else (seed, us)
            if any(part in mode.split("_over_") for part in lacking) or not self.has(mode, *seeds):
                continue
            first = lambda xs, base=base, seed=seed: self.at(base, xs, seed)
            second = lambda xs, mode=mode, seeds=seeds: self.at(mode, xs, *seeds)
            if base not in measured:
                measured[base] = self.slope(us, first)
            self._parts(mode, paths, second, measured[base], us, 2)
        self.note_undecided()


def scale_of(x: np.ndarray) -> float:
    """Returns the root mean square of a leaf's entries, rounded to a power of two."""
    mean = math.sqrt(float(np.mean(np.abs(widened(x)) ** 2))) if x.size else 1.0
    return 2.0 ** round(math.log2(mean)) if 0 < mean < math.inf else 1.0


def size_by_entry(x: np.ndarray) -> np.ndarray:
    """Returns the absolute value of each entry, with `scale_of(x)` in place of zeros."""
    return np.where(x == 0, scale_of(x), np.abs(x))


def flattened(xs: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates all entries of all arrays into one vector."""
    return np.concatenate([widened(x).ravel() for x in xs])
