"""Checks of a function's derivatives against its own values, and against each other.

With J the Jacobian of f at x, H the Hessian of Re<v, f>, D the slope along a line from f's values
at many step sizes, and random u, w, v:

    J u = D_u f      Re<J^H v, u> = Re<v, D_u f>      H u = D_u J^H v      against values
    Re<v, J u> = Re<J^H v, u>      H u = H u = H u = Re<w, H u>            modes against each other
    J (2 u) = 2 J u     J (u + w) = J u + J w     the same of J^H          linearity
    Re<w, H u> = Re<u, H w>                                                symmetry
    f(x + t u) - f(x) = integral of J(x + s u) u ds                        no jumps left out

The last one detects jumps, which small finite differences miss: rounding, an argmax used as an
index, a comparison. Kinks pass it. At a kink any slope between the two one-sided ones is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.testing.checking import slopes
from gradtools.testing.checking.comparisons import (
    Comparisons,
    flattened,
    scale_of,
)
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
from gradtools.testing.cross_checking.precision import at_precision
from gradtools.testing.cross_checking.sides import in_double_precision
from gradtools.testing.flat import Arrays
from gradtools.testing.report import AGREES, DIFFERS, Comparison, Report, largest, show, widened

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
        numeric: False skips finite differences, for an f whose derivative is intentionally
            another (an edited gradient). Then only the modes are compared with each other.
        allow_jumps: True for an f that is meant to jump, such as a branch cut or a sawtooth.
        seed: The seed of the random directions.
        precision: "highest" (default) computes float32 products in full precision during the
            check, without TF32 or bfloat16. "as set" keeps the program's setting. A note of the
            report says if that setting is lower.

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
        >>> check_derivatives(lambda x: gt.xp.round(x).sum(), (x,), gt)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gradtools.testing.report.AgreementError: ...a staircase...

    Source: Griewank and Walther, Evaluating Derivatives, 2008, chapter 3 (dot-product test);
    Ridders, Accurate computation of F'(x) and F'(x)F''(x), 1982 (extrapolated differences).
    """
    with check_context(CALLER, args, backend, order, modes, precision) as notes:
        probe = Probe(CALLER, f, args, backend)
        check = DerivativeCheck(probe, modes, numeric, allow_jumps, seed)
        check.report.notes += notes
        check.first_order()
        if order == 2:
            check.second_order()
    return check.report.require()


@contextmanager
def check_context(
    caller: str,
    args: Any,
    backend: Any,
    order: int,
    modes: Sequence[str] | None,
    precision: str,
) -> Iterator[list[str]]:
    """The context of a check, with JAX's 64 bits if args have them; yields notes on precision.

    Raises if order, modes, the backend or the precision are invalid.
    """
    if order not in (1, 2):
        raise GradtoolsError(f"check_derivatives: order is {order!r}; expected 1 or 2.")
    unknown = [m for m in modes or () if m not in MODES]
    if unknown or (modes is not None and isinstance(modes, str)):
        raise GradtoolsError(
            f"check_derivatives: modes is {modes!r}; expected a tuple of {', '.join(MODES)}."
        )
    name = backend_name(caller, backend)
    at = at_precision(caller, precision, [name])
    with in_double_precision(name == "jax" and wants_64_bits(name, args)), at as notes:
        yield notes


class DerivativeCheck(Comparisons):
    """The checks, whose comparisons are collected in `report`."""

    def first_order(self) -> None:
        """Compares both modes with finite differences and each other, and checks linearity."""
        probe = self.probe
        gradient = self._if_present("reverse", lambda: probe.reverse(self.xs, self.vs))
        self._if_present("forward", lambda: probe.forward(self.xs, self._everywhere()))
        if not (self.present.get("forward") or self.present.get("reverse")):
            raise GradtoolsError(
                f"{probe.caller}: f has neither forward nor reverse mode: "
                f"{'; '.join(self.report.left_out) or 'modes names none of both'}."
            )
        for i in range(len(self.xs)):
            jump = self._jump(i)
            if jump is not None:
                self.report.comparisons.append(jump)
                continue
            for us in self._directions(i):
                pushed = self._if_present("forward", partial(probe.forward, self.xs, us))
                self._slopes(i, us, gradient, pushed)
                if gradient is None or pushed is None:
                    continue
                terms = max(size(self.vs, pushed), size(us, gradient))
                again = lambda xs, us=us: [
                    *probe.forward(xs, us),
                    inner(us, probe.reverse(xs, self.vs)),
                ]
                self._compare(
                    f"{self._name('reverse')} | {self._name('forward')}", probe.paths[i],
                    inner(us, gradient), inner(self.vs, pushed), 1, self._exact(1) * terms,
                    "the dot-product test fails: the two modes are not adjoint",
                    "Left Re<J^H v, u>, right Re<v, J u>.",
                    again,
                )  # fmt: skip
        if self.present.get("reverse"):
            draw = lambda: [self._draw(y.shape, y.dtype) for y in probe.out]
            self._linear("reverse", "cotangent", probe.reverse, draw, probe.paths)
        if self.present.get("forward"):
            self._linear("forward", "tangent", probe.forward, self._everywhere, probe.out_paths)
        self.note_undecided()

    def _slopes(self, i: int, us: Arrays, gradient: Any, pushed: Any) -> None:
        """Compares both modes with the slope along us, a direction in leaf i."""
        if not self.against_values:
            return
        probe = self.probe
        line = lambda t: flattened(probe.value(self._moved(us, t)))
        result = slopes.slope(line, probe.eps)
        if pushed is not None:
            sides = lambda: slopes.one_sided(line, probe.eps)
            parts = zip(probe.out_paths, pushed, result.parts(probe.out), strict=True)
            for k, (path, p, s) in enumerate(parts):
                kink = lambda k=k: [slopes.shaped_like(side, probe.out)[k] for side in sides()]
                name = f"{path} by {probe.paths[i]}"
                record = self._against_slope("forward", name, p, s, 1, kink)
                self.report.comparisons.append(record)
        if gradient is not None:
            record = self._reverse_against_slope(i, us[i], gradient[i], line, result)
            self.report.comparisons.append(record)

    def _linear(
        self,
        mode: str,
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
        name, cause = self._name(mode), f"not linear in the {what}"
        for k, path in enumerate(paths):
            finite = np.isfinite(of_a[k]) & np.isfinite(of_b[k])  # infinities cannot be added
            one, other, thousands, both = (
                np.where(finite, widened(x[k]), 0) for x in (of_a, of_b, scaled, added)
            )
            noise = self._exact(1) * (largest(one) + largest(other))
            self._compare(
                f"{name} of -4096 {what}s | -4096 times it", path, thousands, -4096 * one, 1,
                4096 * noise, cause,
            )  # fmt: skip
            again = lambda xs, k=k: [apply(xs, a)[k], apply(xs, b)[k]]
            self._compare(
                f"{name} of a sum of {what}s | sum", path, both, one + other, 1, noise, cause,
                again=again,
            )  # fmt: skip

    def _jump(self, i: int) -> Comparison | None:
        """The record of a jump of f along a line in leaf i: f is no integral of its derivative."""
        if not self.against_values or self.allow_jumps:
            return None
        eps, reach = self.probe.eps, max(1.0, 1.0 / scale_of(self.xs[i]))
        near, far = (0.1, -0.1), [t * reach for t in (1, -1, 3, -3)]
        for us in [*self._directions(i), *self._directions(i)]:
            line, slope = self._line_and_slope(us)
            for end in (*near, *far):
                jump = slopes.find_jump(line, slope, end, eps, flat=end in far)
                if jump is None:
                    continue
                mode = "forward" if self.present.get("forward") else "reverse"
                steep = _number(slope(0.0)[jump.entry])
                change = _number((line(end) - line(0.0))[jump.entry] / end)
                record = Comparison(
                    f"{self._name(mode)} | finite differences at large steps",
                    self.probe.paths[i], 1, math.inf, self._tolerance(), None,
                    steep, change, self.xs[i].shape, str(self.xs[i].dtype), DIFFERS,
                )  # fmt: skip
                cause = "f jumps, and its derivative leaves that out"
                if steep == 0:
                    cause = "a staircase: the derivative is zero, the function jumps"
                return record.because(
                    cause,
                    f"Analytic {show(steep)}; numeric {show(change)} with a step of "
                    f"{abs(end):g} times the leaf's size, at {abs(jump.at):.3g} of which f jumps "
                    f"by {show(_number(jump.size))}. round, floor, a comparison, or an argmax that "
                    "indexes lose the gradient: give them a surrogate (gt.straight_through), or, "
                    "if f is meant to jump, pass allow_jumps=True.",
                )
        return None

    def _line_and_slope(self, us: Arrays) -> tuple[slopes.Line, slopes.Line]:
        """f along a line and its derivative: of each entry, or of Re<v, f>; memoized.

        All searches for a jump begin with the same points.
        """
        probe = self.probe
        if self.present.get("forward"):
            line = lambda t: flattened(probe.value(self._moved(us, t)))
            return cache(line), cache(lambda t: flattened(probe.forward(self._moved(us, t), us)))
        along = lambda t: np.array([inner(self.vs, probe.value(self._moved(us, t)))])
        slope = lambda t: np.array([inner(probe.reverse(self._moved(us, t), self.vs), us)])
        return cache(along), cache(slope)

    def second_order(self) -> None:
        """Compares every mix of modes with slopes of the gradient and each other; symmetry."""
        if not self.report:
            return
        probe, vs = self.probe, self.vs
        d, e = self._everywhere(by_entry=True), self._everywhere()
        products = self._products(d)
        others = self._products(e) if products else {}
        along = None  # the slope of the gradient
        if self.against_values and self.present.get("reverse"):
            line = lambda t: flattened(probe.reverse(self._moved(d, t), vs))
            along = slopes.slope(line, probe.eps).parts(self.xs)
        for mode, product in products.items():
            if along is not None:
                self._hessian_against_slope(mode, product, along, d)
            other = others[mode]
            again = lambda xs, mode=mode: [
                inner(w, probe.product(mode, xs, u, vs)) for u, w in ((d, e), (e, d))
            ]
            self._compare(
                f"{self._name(mode)}: <w, H u> | <u, H w>", "all arguments", inner(e, product),
                inner(d, other), 2, self._exact(2) * max(size(e, product), size(d, other)),
                "the Hessian is not symmetric", again=again,
            )  # fmt: skip
        modes = [*products]
        for first, mode in ((modes[0], mode) for mode in modes[1:]):
            biggest = max(np.max(np.abs(widened(h)), initial=0) for h in products[first])
            for i, path in enumerate(probe.paths):
                both = lambda xs, i=i, modes=(first, mode): [
                    probe.product(each, xs, d, vs)[i] for each in modes
                ]
                self._compare(
                    f"{self._name(first)} | {self._name(mode)}", path, products[first][i],
                    products[mode][i], 2, 16 * probe.eps * float(biggest),
                    "two mixes of modes differ", again=both,
                )  # fmt: skip
        curve = lambda: probe.curvature(self.xs, d, e, vs)
        curved = self._if_present("forward_over_forward", curve)
        if curved is not None:
            self._curvature(curved, products, d, e)
        self.note_undecided()

    def _products(self, d: Arrays) -> dict[str, Arrays]:
        result = {}
        for mode in SECOND[:3]:
            parts = [part for part in FIRST if part in mode.split("_over_")]
            lacking = [part for part in parts if self.present.get(part) is False]
            if lacking:
                continue
            product = self._if_present(mode, partial(self.probe.product, mode, self.xs, d, self.vs))
            if product is not None:
                result[mode] = product
        return result

    def _hessian_against_slope(
        self, mode: str, product: Arrays, along: list[slopes.Slope], d: Arrays
    ) -> None:
        for i, (h, s) in enumerate(zip(product, along, strict=True)):
            record = self._against_slope(mode, self.probe.paths[i], h, s, 2)
            again = lambda xs, i=i: [self.probe.product(mode, xs, d, self.vs)[i]]
            if record.status == DIFFERS and self._is_rounding(widened(h) - s.value, again):
                record = replace(record, error=1.0, status=AGREES, cause=None, detail="")
            if record.status == DIFFERS:
                known = f" ({record.cause})" if record.cause else ""
                record = record.because(
                    f"right at first order, wrong at second{known}",
                    f"{record.detail} Something that depends on the arguments, such as a residual, "
                    "is taken as constant.",
                )
            self.report.comparisons.append(record)

    def _curvature(self, curved: Any, products: dict[str, Arrays], d: Arrays, e: Arrays) -> None:
        name = self._name("forward_over_forward")
        for mode, product in products.items():
            noise = self._exact(2) * size(e, product)
            again = lambda xs, mode=mode: [
                self.probe.curvature(xs, d, e, self.vs),
                inner(e, self.probe.product(mode, xs, d, self.vs)),
            ]
            self._compare(
                f"{name} | {self._name(mode)}", "all arguments", curved, inner(e, product), 2,
                noise, "two mixes of modes differ", again=again,
            )  # fmt: skip
        if products or not self.against_values:
            return
        us = lambda t: self._moved(e, t)
        line = lambda t: np.array(inner(self.vs, self.probe.forward(us(t), d)))
        result = slopes.slope(line, self.probe.eps)
        record = self._against_slope(
            "forward_over_forward", "all arguments", np.asarray(curved), result, 2
        )
        self.report.comparisons.append(record)


def _number(x: Any) -> complex | float:
    return complex(x) if np.iscomplexobj(x) else float(x)
