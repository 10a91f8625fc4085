"""Checks that a rule's parts are pure: no in-place writes, no state, no random draws.

A framework calls fwd and bwd at any time and any number of times, with arrays that it shares with
others. So fwd, bwd and jvp must depend on their arguments only, and must not change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.checking.rule_parts import CALLER, RuleProbe
from gradtools.testing.flat import Arrays

_NEARBY = 1.0625  # the factor to another point, near enough to be in f's domain
_DRAWN = (
    "is another one where it is computed again: two calls of {} with the same arguments differ. "
    "Is a random number drawn in it, or a state changed? Draw it in fwd, and save it."
)
_STALE = (
    "is another one after another call of fwd: it reads what the last call left behind (a global, "
    "an attribute, a closure's variable). Return it from fwd as a residual."
)


def check_purity(probe: RuleProbe, us: Arrays, cts: list[Any]) -> None:
    """Raises if a part of a rule is no function of its arguments, or changes them.

    Args:
        probe: The rule.
        us: Tangents of the arguments.
        cts: Cotangents of the outputs, in the framework's arrays.
    """
    args = probe.rebuilt(probe.moving())
    if probe.rule.bwd is not None:
        with _unchanged(probe, "fwd", {"argument ": args}):
            out, residuals = probe.fwd(*args)
        pull = lambda: probe.numpy(probe.pulled(out, residuals, cts))
        with _unchanged(probe, "bwd", {"the cotangent of output": cts, "the residual ": residuals}):
            first = pull()
        _check_equal(first, pull(), "bwd's cotangent", probe.paths, _DRAWN.format("bwd"))
        nearby = [(x * _NEARBY).astype(x.dtype) for x in probe.leaves]
        try:
            probe.fwd(*probe.rebuilt(probe.arrays(nearby)))
        except Exception:  # the nearby point is outside of f's domain
            pass
        else:
            _check_equal(first, pull(), "bwd's cotangent", probe.paths, _STALE)
    if probe.rule.jvp is not None:
        push = lambda: probe.numpy(probe.pushed(args, us))
        with _unchanged(probe, "jvp", {"argument ": args}):
            first = push()
        _check_equal(first, push(), "jvp's tangent", probe.out_paths, _DRAWN.format("jvp"))


@contextmanager
def _unchanged(probe: RuleProbe, part: str, trees: dict[str, Any]) -> Iterator[None]:
    """A context in which a part must not write into these trees, given by their names."""

    def copies(tree: Any) -> list[Any]:
        leaves = probe.waist.flatten(tree)[0]
        return [probe.gt.to_numpy(x) if probe.waist.is_array(x) else None for x in leaves]

    before = [copies(tree) for tree in trees.values()]
    yield
    for (what, tree), old in zip(trees.items(), before, strict=True):
        for path, a, b in zip(probe.waist.leaf_paths(tree), old, copies(tree), strict=True):
            if a is not None and not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
                name = path.removeprefix("[").replace("]", "", 1) if "argument" in what else path
                raise GradtoolsError(
                    f"{CALLER}: {part} writes {what}{name} in place, which others hold as well. "
                    "Make a new array (2 * x, not x.mul_(2)), or copy it first."
                )


def _check_equal(first: Arrays, again: Arrays, what: str, paths: Sequence[str], why: str) -> None:
    for path, a, b in zip(paths, first, again, strict=True):
        if not np.array_equal(a, b, equal_nan=True):
            raise GradtoolsError(f"{CALLER}: {what} of {path} {why}")
