"""Checks of a function's derivatives against its own values, and against each other.

With J the Jacobian of f at x, H the Hessian of Re<v, f>, D the slope along a line from f's values
at many step sizes, and random u, w, v:

    J u = D_u f      Re<J^H v, u> = Re<v, D_u f>      H u = D_u J^H v      against values
    Re<v, J u> = Re<J^H v, u>      H u = H u = H u = Re<w, H u>            modes against each other
    J (w - 16 u) = J w - 16 J u     the same of J^H                    linearity
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.checking import slopes
from gradtools.testing.checking.comparisons import Comparisons, flattened
from gradtools.testing.checking.probe import (
    FIRST,
    MODES,
    SECOND,
    Probe,
    backend_name,
    inner,
    size,
    wants_64_bits,
)
from gradtools.testing.cross_checking.precision import highest_precision
from gradtools.testing.cross_checking.sides import in_double_precision
from gradtools.testing.flat import Arrays
from gradtools.testing.report import Report, largest, widened

CALLER = "check_derivatives"
_SCALE = -16.0


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
    """Checks the derivatives that a framework computes of f, at args.

    It checks, for random directions in each leaf of the arguments: forward and reverse mode
    against slopes from f's values at steps from a tenth to a millionth of the leaf's size (in
    float32 a three-hundredth); both modes against each other (dot-product test); linearity in the
    tangent and in the cotangent; for order 2 every mix of modes against slopes of the gradient
    and against each other. Complex arguments are moved in complex directions; all inner products
    are Re<u, v>. `gradtools.testing.tolerance_table` has the tolerances. float32 products
    are computed in full precision during the check, without TF32 or bfloat16.

    Args:
        f: A deterministic function that takes and returns pytrees of the backend's arrays.
        args: A tuple with one pytree for each argument of f; its leaves are NumPy arrays or the
            backend's, of any shape. Floating and complex leaves are differentiated; integers,
            booleans, Python numbers and anything else are constants. If a leaf has 64 bits, x64 is
            enabled in JAX during the check.
        backend: "torch", "jax", or the module gradtools.torch or gradtools.jax.
        order: 1 or 2.
        modes: Of "forward", "reverse", "forward_over_reverse", "reverse_over_reverse",
            "reverse_over_forward" and "forward_over_forward", the modes that f must have. None: all
            modes that f has; the report's `left_out` lists the others.
        seed: The seed of the random directions.

    Returns:
        A `Report`: a record for each comparison. `quantity` names the two sides, for example
        "reverse | finite differences".

    Raises:
        AgreementError: A derivative is wrong. It carries the report, and names the argument and
            leaf, the mode, the place, and both values.
        GradtoolsError: There is nothing to check, f has none of the modes, f is random, or the
            arguments are not as described above.
        Exception: An error of f itself, with a note that names f.

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
    """The context of a check, with JAX's 64 bits if args have them, at the highest precision.

    Raises if order, modes or the backend are invalid.
    """
    if order not in (1, 2):
        raise GradtoolsError(f"{caller}: order is {order!r}; expected 1 or 2.")
    unknown = [m for m in modes or () if m not in MODES]
    if unknown or isinstance(modes, str):
        raise GradtoolsError(
            f"{caller}: modes is {modes!r}; expected a tuple of {', '.join(MODES)}."
        )
    name = backend_name(caller, backend)
    wide = name == "jax" and wants_64_bits(name, args)
    with in_double_precision(wide), highest_precision([name]):
        yield


class DerivativeCheck(Comparisons):
    """The checks, whose comparisons are collected in `report`."""

    def first_order(self) -> None:
        """Compares both modes with finite differences and each other, and checks linearity."""
        probe, vs = self.probe, self.vs
        reverse = self.has("reverse", vs)
        forward = self.has("forward", self.everywhere())
        if not (forward or reverse):
            raise GradtoolsError(
                f"{probe.caller}: f has neither forward nor reverse mode: "
                f"{'; '.join(self.report.left_out) or 'modes names none of both'}."
            )
        for i, path in enumerate(probe.paths):
            for us in self.directions(i):
                self._slopes(i, us)
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
                detail = "Left Re<J^H v, u>, right Re<v, J u>."
                self.equal(names, path, dot, 1, terms, cause, detail)
        if reverse:
            a, b = ([self.draw(y) for y in probe.out] for _ in range(2))
            self._linear("reverse", "cotangent", a, b, probe.paths)
        if forward:
            a, b = self.everywhere(), self.everywhere()
            self._linear("forward", "tangent", a, b, probe.out_paths)
        self.note_undecided()

    def _slopes(self, i: int, us: Arrays) -> None:
        """Compares both modes with the slope along us, a direction in leaf i."""
        probe = self.probe
        measured = slopes.slope(self.line(us), probe.eps)
        if self.present["forward"]:
            for k, part in enumerate(measured.parts(probe.out)):
                pushed = lambda t, k=k: self.at("forward", self.moved(us, t), us)[k]
                name = f"{probe.out_paths[k]} by {probe.paths[i]}"
                record = self.against_slope("forward", name, pushed(0.0), part, 1, pushed)
                self.report.comparisons.append(record)
        if self.present["reverse"]:
            self.report.comparisons.append(self.reverse_against_slope(i, us, measured))

    def _linear(self, mode: str, what: str, a: Arrays, b: Arrays, paths: Sequence[str]) -> None:
        """Compares J (b - 16 a) with J b - 16 J a, where all are finite."""
        joined = [(y + _SCALE * x).astype(x.dtype) for x, y in zip(a, b, strict=True)]
        for k, path in enumerate(paths):
            each = [widened(self.at(mode, self.xs, v)[k]) for v in (a, b)]
            finite = np.isfinite(each[0]) & np.isfinite(each[1])
            of = lambda xs, v, k=k, on=finite: np.where(on, widened(self.at(mode, xs, v)[k]), 0)
            terms = abs(_SCALE) * largest(of(self.xs, a)) + largest(of(self.xs, b))
            both = lambda xs, of=of: (of(xs, joined), _SCALE * of(xs, a) + of(xs, b))
            name = f"{self.label(mode)} of a sum of {what}s | the sum of both"
            self.equal(name, path, both, 1, terms, f"not linear in the {what}")

    def second_order(self) -> None:
        """Compares every mix of modes with slopes of the gradient, and with each other."""
        if not self.report:
            return
        vs, at, eps = self.vs, self.at, self.probe.eps
        d, e = self.everywhere(by_entry=True), self.everywhere()
        lacking = [mode for mode in FIRST if not self.present[mode] and self.modes is None]
        tried = [m for m in SECOND if not any(part in m.split("_over_") for part in lacking)]
        modes = [m for m in tried if m != SECOND[3] and self.has(m, d, vs)]
        if modes and self.present["reverse"]:
            gradient = lambda t: flattened(at("reverse", self.moved(d, t), vs))
            along = slopes.slope(gradient, eps).parts(self.xs)
            for mode in modes:
                for i, part in enumerate(along):
                    run = lambda xs, m=mode, i=i: (at(m, xs, d, vs)[i],)
                    self._against_slope(mode, self.probe.paths[i], run, part, d)
        for mode in modes[1:]:
            most = max(map(largest, at(modes[0], self.xs, d, vs)))
            terms = 16 * eps / self.exact[2] * most
            name = f"{self.label(modes[0])} | {self.label(mode)}"
            for i, path in enumerate(self.probe.paths):
                both = lambda xs, m=mode, i=i: (at(modes[0], xs, d, vs)[i], at(m, xs, d, vs)[i])
                self.equal(name, path, both, 2, terms, "two mixes of modes differ")
        if SECOND[3] in tried and self.has(SECOND[3], d, e, vs):
            curved = lambda xs: np.asarray(at(SECOND[3], xs, d, e, vs))
            for mode in modes:
                both = lambda xs, m=mode: (curved(xs), inner(e, at(m, xs, d, vs)))
                terms = size(e, at(mode, self.xs, d, vs))
                name = f"{self.label(SECOND[3])} | {self.label(mode)}"
                self.equal(name, "all arguments", both, 2, terms, "two mixes of modes differ")
            if not modes:
                pushed = lambda t: np.array(inner(vs, at("forward", self.moved(e, t), d)))
                part = slopes.slope(pushed, eps)
                run = lambda xs: (curved(xs),)
                self._against_slope(SECOND[3], "all arguments", run, part, e)
        self.note_undecided()

    def _against_slope(
        self, mode: str, path: str, run: Callable[..., Any], part: slopes.Slope, us: Arrays
    ) -> None:
        """Compares a second derivative with the slope of a first derivative along us."""
        derivative = lambda t: run(self.moved(us, t))[0]
        record = self.against_slope(mode, path, derivative(0.0), part, 2, derivative)
        if not record.agrees:
            known = f" ({record.cause})" if record.cause else ""
            record = record.because(
                f"right at first order, wrong at second{known}",
                f"{record.detail} Something that depends on the arguments, such as a residual, is "
                "taken as constant.",
            )
            record = self.unless_rounding(record, widened(derivative(0.0)) - part.value, run)
        self.report.comparisons.append(record)
