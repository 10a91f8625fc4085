"""Diagnoses a wrong rule: tries hypotheses on the author's bwd and jvp.

If bwd has a single common mistake, undoing that mistake makes it right:

    the entries in another order        bwd's entry i is argument j's gradient
    a conjugate that is missing         conj(bwd(conj(v))) is right
    a matrix that is not transposed     the transpose of the matrix of v -> bwd(v) is right

and likewise for jvp. A cause is reported only if the corrected map agrees with the slopes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradtools.testing.report import Comparison

Arrays = list[np.ndarray]
_ENTRIES, _SQUARE = 64, 16  # the largest leaf to difference by entries; the largest matrix side


class Causes:
    """The hypotheses for one rule.

    Args:
        check: A `RuleCheck`.
    """

    def __init__(self, check: Any) -> None:
        self.of, self.check, self.paths = check, check.check, check.values.paths

    # --- of bwd

    def of_bwd(self, record: Comparison, i: int, pulled: Arrays) -> Comparison:
        """The record with its likely cause."""
        look = f"Look at what bwd returns for {self.paths[i]}."
        if i in self.of.nones:
            return record.because(f"bwd returned None, a zero, for {self.paths[i]}", look)
        for cause, mended in self._hypotheses_of_bwd(record, i, pulled):
            if self._is_gradient(i, mended):
                return record.because(cause, f"{record.detail} {look}")
        j = self._gradient_of(i, pulled)
        if j is not None:
            cause = f"it is the cotangent of {self.paths[j]}: bwd's entries are in another order"
            return record.because(cause, f"{record.detail} {look}")
        return record.because(record.cause or "", f"{record.detail} {look}")

    def _hypotheses_of_bwd(
        self, record: Comparison, i: int, pulled: Arrays
    ) -> Iterator[tuple[str, np.ndarray]]:
        of, vs = self.of, self.check.vs
        if record.cause:
            return
        if any(x.dtype.kind == "c" for x in (pulled[i], *vs)):
            conjugate = of._pull([np.conj(v) for v in vs])
            yield "a conjugate is missing, or one too many", np.conj(conjugate[i])
        if len(vs) == 1 and vs[0].size == pulled[i].size <= _SQUARE:
            yield (
                "bwd multiplies by the Jacobian, not by its transpose",
                _transposed(lambda v: of._pull([v])[i], vs[0]),
            )

    def _is_gradient(self, i: int, candidate: np.ndarray) -> bool:
        x = self.check.xs[i]
        if not 0 < x.size <= _ENTRIES or candidate.shape != x.shape:
            return False
        return bool(self.check._entrywise("bwd", i, candidate.astype(x.dtype)).agrees)

    def _gradient_of(self, i: int, pulled: Arrays) -> int | None:
        """The argument whose gradient bwd gives for argument i, and not for itself."""
        if not np.any(pulled[i]):
            return None
        wrong = [j for j in range(len(pulled)) if j != i and not self._is_gradient(j, pulled[j])]
        return next((j for j in wrong if self._is_gradient(j, pulled[i])), None)

    # --- of jvp

    def of_jvp(
        self, record: Comparison, i: int, us: Arrays, agrees: Callable[[Arrays], bool]
    ) -> Comparison:
        """The record with its likely cause.

        us: The direction, which is zero except in leaf i.
        agrees: Whether tangents of the outputs are the slopes along it.
        """
        look = f"Look at what jvp makes of the tangent of {self.paths[i]}."
        if self.of.none_pushed:
            return record.because("jvp returned None, a zero, for the tangent", look)
        for cause, corrected in self._hypotheses_of_jvp(record, i, us):
            if agrees(corrected):
                return record.because(cause, f"{record.detail} {look}")
        return record.because(record.cause or "", f"{record.detail} {look}")

    def _hypotheses_of_jvp(
        self, record: Comparison, i: int, us: Arrays
    ) -> Iterator[tuple[str, Arrays]]:
        push, xs = self.of._push, self.check.xs
        for j in range(len(xs)):
            if j != i and xs[j].shape == xs[i].shape and xs[j].dtype == xs[i].dtype:
                swapped = list(us)
                swapped[i], swapped[j] = us[j], us[i]
                yield (
                    f"the tangents of {self.paths[i]} and {self.paths[j]} change places",
                    push(swapped),
                )
        if record.cause:
            return
        if any(x.dtype.kind == "c" for x in xs):
            pushed = push([np.conj(u) for u in us])
            yield "a conjugate is missing, or one too many", [np.conj(p) for p in pushed]
        outs = self.of.values.out
        if len(outs) == 1 and outs[0].size == us[i].size <= _SQUARE:

            def along(u: np.ndarray) -> np.ndarray:
                return push([u if k == i else np.zeros_like(x) for k, x in enumerate(xs)])[0]

            turned = _transposed(along, us[i]).reshape(outs[0].shape)
            yield "jvp multiplies by the transpose of the Jacobian", [turned]


def _transposed(linear: Callable[[np.ndarray], np.ndarray], v: np.ndarray) -> np.ndarray:
    """M^H v for the matrix M of a linear map, computed from its columns."""
    result = []
    for k in range(v.size):
        unit = np.zeros_like(v)
        unit.reshape(-1)[k] = 1
        column = np.asarray(linear(unit))
        result.append(np.vdot(column.reshape(-1), v.reshape(-1)))
    return np.asarray(result).reshape(np.shape(linear(np.zeros_like(v))))
