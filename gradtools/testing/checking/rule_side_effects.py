"""Checks that a rule's parts are pure: no in-place writes, no state, no random draws.

A framework calls fwd and bwd at any time and any number of times, with arrays that it shares with
others. So fwd, bwd and jvp must depend on their arguments only, and must not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.checking.rule_parts import CALLER, RuleProbe
from gradtools.testing.flat import Arrays

_BESIDE = 1.0625  # another point, near enough to be in f's domain


class PurityChecks:
    """The parts of one rule, called as a framework would call them.

    Args:
        probe: The rule.
        us: Tangents of the arguments.
        cts: Cotangents of the outputs, in the framework's arrays.
    """

    def __init__(self, probe: RuleProbe, us: Arrays, cts: list[Any]) -> None:
        self.of, self.us, self.cts = probe, us, cts
        self.waist, self.gt = probe.waist, probe.gt

    def check(self) -> None:
        """Raises if a part is no function of what it gets."""
        if self.of.rule.bwd is not None:
            self._reverse()
        if self.of.rule.jvp is not None:
            self._forward()

    def _reverse(self) -> None:
        of = self.of
        args, cts = of.rebuilt(of.moving()), self.cts
        given = self._copies(args)
        out, residuals = of.fwd(*args)
        self._unchanged("fwd", "argument ", args, given)
        saved, came = self._copies(residuals), self._copies(cts)
        pull = lambda: of.numpy(of.pulled(args, out, residuals, cts))
        first = pull()
        self._unchanged("bwd", "the cotangent of output", cts, came)
        self._unchanged("bwd", "the residual ", residuals, saved)
        self._alike(first, pull(), "bwd", of.paths, _DRAWN.format("bwd"))
        try:
            of.fwd(*of.rebuilt(self._elsewhere()))
        except Exception:  # the nearby point is outside of f's domain
            return
        self._alike(first, pull(), "bwd", of.paths, _STALE)

    def _forward(self) -> None:
        of = self.of
        args = of.rebuilt(of.moving())
        given, us = self._copies(args), self.us
        push = lambda: of.numpy(of.pushed(args, us))
        first = push()
        self._unchanged("jvp", "argument ", args, given)
        self._alike(first, push(), "jvp", of.out_paths, _DRAWN.format("jvp"))

    def _elsewhere(self) -> Sequence[Any]:
        leaves = self.of.leaves
        return self.of.arrays([(x * _BESIDE).astype(x.dtype) for x in leaves])

    # --- before and after

    def _copies(self, tree: Any) -> list[Any]:
        leaves = self.waist.flatten(tree)[0]
        return [self.gt.to_numpy(x) if self.waist.is_array(x) else None for x in leaves]

    def _unchanged(self, part: str, what: str, tree: Any, before: list[Any]) -> None:
        now = self._copies(tree)
        paths = self.waist.leaf_paths(tree)
        for path, a, b in zip(paths, before, now, strict=True):
            if a is not None and not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
                name = path.removeprefix("[").replace("]", "", 1) if "argument" in what else path
                raise GradtoolsError(
                    f"{CALLER}: {part} writes {what}{name} in place, which others hold as well. "
                    f"Make a new array (2 * x, not x.mul_(2)), or copy it first."
                )

    def _alike(
        self, first: list[Any], again: list[Any], part: str, paths: Sequence[str], why: str
    ) -> None:
        for path, a, b in zip(paths, first, again, strict=True):
            if not np.array_equal(a, b, equal_nan=True):
                what = "cotangent" if part == "bwd" else "tangent"
                raise GradtoolsError(f"{CALLER}: {part}'s {what} of {path} {why}")


_DRAWN = (
    "is another one where it is computed again: two calls of {} with the same arguments differ. "
    "Is a random number drawn in it, or a state changed? Draw it in fwd, and save it."
)
_STALE = (
    "is another one after another call of fwd: it reads what the last call left behind (a global, "
    "an attribute, a closure's variable). Return it from fwd as a residual."
)
