"""Checks of a function's derivatives against its own values, and against each other.

With J the Jacobian of f at x, H the Hessian of Re<v, f>, D the slope along a line from f's values
at many step sizes, and random u, w, v:

    J u = D_u f      Re<J^H v, u> = Re<v, D_u f>      H u = D_u J^H v      against values
    Re<v, J u> = Re<J^H v, u>      H u = H u = H u = Re<w, H u>            modes against each other
    J (2 u) = 2 J u     J (u + w) = J u + J w     the same of J^H          linearity
    Re<w, H u> = Re<u, H w>                                                symmetry

At a kink any slope between the two one-sided ones is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
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
from gradtools.testing.report import AGREES, DIFFERS, Report, largest, widened

CALLER = "check_derivatives"


@user_facing
def check_derivatives(
    f: Callable[..., Any],
    args: Sequence[Any],
    backend: Any,
    order: int = 2,
    modes: Sequence[str] | None = None,
    *,
    numeric: bool = True,
    seed: int = 0,
) -> Report:
    """Checks the derivatives that a framework computes of f, at args.

    Checked are, for random directions in each leaf of the arguments: forward and reverse mode
    against slopes from f's values at steps from a tenth to a millionth of the leaf's size (in
    float32 a three-hundredth); both modes against each other (dot-product test); linearity in the
    tangent and in the cotangent; for order 2 every mix of modes against slopes of the gradient
    and against each other, and the symmetry of the Hessian. Complex arguments are moved in complex
    directions; all inner products are Re<u, v>. The tolerances are those of
    `gradtools.testing.tolerance_table`. float32 products are computed in full precision during the
    check, without TF32 or bfloat16.

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
        numeric: False skips finite differences, for an f whose derivative is intentionally
            another (an edited gradient). Then only the modes are compared with each other.
        seed: The seed of the random directions.

    Returns:
        A `Report`: a record for each comparison. `quantity` names the two sides, for example
        "reverse | finite differences".

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
        >>> stopped = lambda x: (gt.stop_gradient(x) * x).sum()
        >>> check_derivatives(stopped, (x,), gt)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gradtools.testing.report.AgreementError: ...Likely cause: constant factor 0.5...

    Source: Griewank and Walther, Evaluating Derivatives, 2008, chapter 3 (dot-product test);
    Ridders, Accurate computation of F'(x) and F'(x)F''(x), 1982 (extrapolated differences).
    """
    with check_context(CALLER, args, backend, order, modes):
        check = DerivativeCheck(Probe(CALLER, f, args, backend), modes, numeric, seed)
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
                if self.against_values:
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
                self.equal(
                    names, path, dot, 1, terms, cause, "Left Re<J^H v, u>, right Re<v, J u>."
                )
        if reverse:
            draw = lambda: [self.draw(y) for y in probe.out]
            self._linear("reverse", "cotangent", draw, probe.paths)
        if forward:
            self._linear("forward", "tangent", self.everywhere, probe.out_paths)
        self.note_undecided()

    def _slopes(self, i: int, us: Arrays) -> None:
        """Compares both modes with the slope along us, a direction in leaf i."""
        probe, line = self.probe, self.line(us)
        measured = slopes.slope(line, probe.eps)
        if self.present["forward"]:
            pushed = self.at("forward", self.xs, us)
            sides = lambda: slopes.one_sided(line, probe.eps)
            parts = zip(probe.out_paths, pushed, measured.parts(probe.out), strict=True)
            for k, (path, p, s) in enumerate(parts):
                kink = lambda k=k: [slopes.shaped_like(side, probe.out)[k] for side in sides()]
                push = lambda xs, k=k: self.at("forward", xs, us)[k]
                change = partial(self.change_in_a_step, us, push)
                name = f"{path} by {probe.paths[i]}"
                record = self.against_slope("forward", name, p, s, 1, kink, change)
                self.report.comparisons.append(record)
        if self.present["reverse"]:
            self.report.comparisons.append(self.reverse_against_slope(i, us, measured))

    def _linear(
        self, mode: str, what: str, draw: Callable[[], Arrays], paths: Sequence[str]
    ) -> None:
        """J (-4096 a) = -4096 J a and J (a + b) = J a + J b, where all are finite."""
        a, b = draw(), draw()
        scaled = [(-4096 * x).astype(x.dtype) for x in a]
        added = [(x + y).astype(x.dtype) for x, y in zip(a, b, strict=True)]
        for k, path in enumerate(paths):
            each = [widened(self.at(mode, self.xs, v)[k]) for v in (a, b)]
            finite = np.isfinite(each[0]) & np.isfinite(each[1])
            of = lambda xs, v, k=k, on=finite: np.where(on, widened(self.at(mode, xs, v)[k]), 0)
            terms = largest(of(self.xs, a)) + largest(of(self.xs, b))
            twice = lambda xs, of=of: (of(xs, scaled), -4096 * of(xs, a))
            both = lambda xs, of=of: (of(xs, added), of(xs, a) + of(xs, b))
            cause, name = f"not linear in the {what}", f"{self.label(mode)} of"
            self.equal(
                f"{name} -4096 {what}s | -4096 times it", path, twice, 1, 4096 * terms, cause
            )
            self.equal(f"{name} a sum of {what}s | sum", path, both, 1, terms, cause)

    def second_order(self) -> None:
        """Compares every mix of modes with slopes of the gradient and each other; symmetry."""
        if not self.report:
            return
        probe, vs, at = self.probe, self.vs, self.at
        d, e = self.everywhere(by_entry=True), self.everywhere()
        if self.against_values and self.present["reverse"]:
            line = lambda t: flattened(at("reverse", self.moved(d, t), vs))
            along = slopes.slope(line, probe.eps).parts(self.xs)
        lacking = [mode for mode in FIRST if not self.present[mode] and self.modes is None]
        modes = [m for m in SECOND[:3] if not any(part in m.split("_over_") for part in lacking)]
        modes = [mode for mode in modes if self.has(mode, d, vs)]
        everything = "all arguments"
        for mode in modes:
            if self.against_values and self.present["reverse"]:
                self._hessian_against_slope(mode, along, d)
            swapped = lambda xs, m=mode: (inner(e, at(m, xs, d, vs)), inner(d, at(m, xs, e, vs)))
            terms = max(size(e, at(mode, self.xs, d, vs)), size(d, at(mode, self.xs, e, vs)))
            name = f"{self.label(mode)}: <w, H u> | <u, H w>"
            self.equal(name, everything, swapped, 2, terms, "the Hessian is not symmetric")
        for mode, (i, path) in product(modes[1:], enumerate(probe.paths)):
            both = lambda xs, m=mode, i=i: (at(modes[0], xs, d, vs)[i], at(m, xs, d, vs)[i])
            terms = 16 * probe.eps / self.exact[2] * max(map(largest, at(modes[0], self.xs, d, vs)))
            name = f"{self.label(modes[0])} | {self.label(mode)}"
            self.equal(name, path, both, 2, terms, "two mixes of modes differ")
        if "forward" not in lacking and self.has("forward_over_forward", d, e, vs):
            for mode in modes:
                both = lambda xs, m=mode: (
                    at("forward_over_forward", xs, d, e, vs),
                    inner(e, at(m, xs, d, vs)),
                )
                name = f"{self.label('forward_over_forward')} | {self.label(mode)}"
                terms = size(e, at(mode, self.xs, d, vs))
                self.equal(name, everything, both, 2, terms, "two mixes of modes differ")
            if not modes and self.against_values:
                line = lambda t: np.array(inner(vs, at("forward", self.moved(e, t), d)))
                curved = np.asarray(at("forward_over_forward", self.xs, d, e, vs))
                measured = slopes.slope(line, probe.eps)
                record = self.against_slope(SECOND[3], everything, curved, measured, 2)
                self.report.comparisons.append(record)
        self.note_undecided()

    def _hessian_against_slope(self, mode: str, along: list[slopes.Slope], d: Arrays) -> None:
        for i, (path, s) in enumerate(zip(self.probe.paths, along, strict=True)):
            h = self.at(mode, self.xs, d, self.vs)[i]
            record = self.against_slope(mode, path, h, s, 2)
            again = lambda xs, i=i: (self.at(mode, xs, d, self.vs)[i],)
            if record.status == DIFFERS and self.is_rounding(widened(h) - s.value, again):
                record = replace(record, error=1.0, status=AGREES, cause=None, detail="")
            if record.status == DIFFERS:
                known = f" ({record.cause})" if record.cause else ""
                record = record.because(
                    f"right at first order, wrong at second{known}",
                    f"{record.detail} Something that depends on the arguments, such as a residual, "
                    "is taken as constant.",
                )
            self.report.comparisons.append(record)
