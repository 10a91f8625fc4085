"""The checks of one function at one point: both modes, linearity, jumps, second order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.checking import slopes
from gradtools.testing.checking.comparisons import (
    Comparisons,
    flattened,
    scale_of,
)
from gradtools.testing.checking.probe import FIRST, SECOND, inner, size
from gradtools.testing.flat import Arrays
from gradtools.testing.report import AGREES, DIFFERS, Comparison, largest, show, widened


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
