"""`PartsCheck`: bwd and jvp as the modes of fun, and hypotheses about what is wrong with them.

If bwd has a single common mistake, undoing that mistake makes it right:

    the entries in another order        bwd's entry i is argument j's gradient
    a conjugate that is missing         conj(bwd(conj(v))) is right
    a matrix that is not transposed     the transpose of the matrix of v -> bwd(v) is right

and likewise for jvp. A cause is reported only if the corrected map agrees with the slopes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from gradtools.testing.checking.comparisons import Direction
from gradtools.testing.checking.derivative_checks import DerivativeCheck
from gradtools.testing.checking.rule_parts import RuleProbe
from gradtools.testing.checking.slopes import Slope
from gradtools.testing.flat import Arrays
from gradtools.testing.report import DIFFERS, Comparison

_ENTRIES, _SQUARE = 64, 16  # the largest leaf to difference by entries; the largest matrix side


class PartsCheck(DerivativeCheck):
    """The first-order checks of bwd and jvp as the two modes of fun, with these hypotheses."""

    probe: RuleProbe

    def __init__(self, probe: RuleProbe, seed: int) -> None:
        parts = {"forward": probe.rule.jvp, "reverse": probe.rule.bwd}
        modes = [mode for mode, part in parts.items() if part is not None]
        labels = {"forward": "jvp", "reverse": "bwd"}
        super().__init__(probe, modes, allow_jumps=True, seed=seed, labels=labels)

    # --- of bwd

    def _of_reverse(self, record: Comparison, i: int, gradient: Arrays) -> Comparison:
        if record.status != DIFFERS:
            return record
        paths = self.probe.paths
        look = f"Look at what bwd returns for {paths[i]}."
        if i in self.probe.nones:
            return record.because(f"bwd returned None, a zero, for {paths[i]}", look)
        for cause, corrected in self._hypotheses_of_bwd(record, i, gradient):
            if self._is_gradient(i, corrected):
                return record.because(cause, f"{record.detail} {look}")
        cause = record.cause or ""
        if (j := self._gradient_of(i, gradient)) is not None:
            cause = f"it is the cotangent of {paths[j]}: bwd's entries are in another order"
        return record.because(cause, f"{record.detail} {look}")

    def _hypotheses_of_bwd(
        self, record: Comparison, i: int, pulled: Arrays
    ) -> Iterator[tuple[str, np.ndarray]]:
        pull, vs = partial(self.probe.reverse, self.xs), self.vs
        if record.cause:
            return
        if any(x.dtype.kind == "c" for x in (pulled[i], *vs)):
            conjugate = pull([np.conj(v) for v in vs])
            yield "a conjugate is missing, or one too many", np.conj(conjugate[i])
        if len(vs) == 1 and vs[0].size == pulled[i].size <= _SQUARE:
            yield (
                "bwd multiplies by the Jacobian, not by its transpose",
                _transposed(lambda v: pull([v])[i], vs[0]),
            )

    def _is_gradient(self, i: int, candidate: np.ndarray) -> bool:
        x = self.xs[i]
        if not 0 < x.size <= _ENTRIES or candidate.shape != x.shape:
            return False
        return bool(self._entrywise("reverse", i, candidate.astype(x.dtype)).agrees)

    def _gradient_of(self, i: int, pulled: Arrays) -> int | None:
        """The argument whose gradient bwd gives for argument i, and not for itself."""
        if not np.any(pulled[i]):
            return None
        wrong = [j for j in range(len(pulled)) if j != i and not self._is_gradient(j, pulled[j])]
        return next((j for j in wrong if self._is_gradient(j, pulled[i])), None)

    # --- of jvp

    def _of_forward(self, record: Comparison, direction: Direction, measured: Slope) -> Comparison:
        if record.status != DIFFERS:
            return record
        i, paths, parts = direction.leaf or 0, self.probe.out_paths, measured.parts(self.probe.out)
        look = f"Look at what jvp makes of the tangent of {self.probe.paths[i]}."
        if self.probe.none_pushed:
            return record.because("jvp returned None, a zero, for the tangent", look)
        for cause, corrected in self._hypotheses_of_jvp(record, i, direction.us):
            triples = zip(paths, corrected, parts, strict=True)
            if all(self._against_slope("forward", *t, 1, add=False).agrees for t in triples):
                return record.because(cause, f"{record.detail} {look}")
        return record.because(record.cause or "", f"{record.detail} {look}")

    def _hypotheses_of_jvp(
        self, record: Comparison, i: int, us: Arrays
    ) -> Iterator[tuple[str, Arrays]]:
        push, xs, outs = partial(self.probe.forward, self.xs), self.xs, self.probe.out
        for j in range(len(xs)):
            if j != i and xs[j].shape == xs[i].shape and xs[j].dtype == xs[i].dtype:
                swapped = list(us)
                swapped[i], swapped[j] = us[j], us[i]
                paths = self.probe.paths
                yield f"the tangents of {paths[i]} and {paths[j]} change places", push(swapped)
        if record.cause:
            return
        if any(x.dtype.kind == "c" for x in xs):
            pushed = push([np.conj(u) for u in us])
            yield "a conjugate is missing, or one too many", [np.conj(p) for p in pushed]
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
