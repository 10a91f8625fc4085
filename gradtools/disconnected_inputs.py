"""The policy `disconnected_inputs`: errors and warnings for arguments without a path to the output.

An argument reaches the output if data flows from it through f and is not cut on the way: stopped or
detached, cast to integer or boolean, compared, taken out of the framework. The backends determine
that; this module reports it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

from gradtools.arguments.calls import Call
from gradtools.backend import Array, Backend, Evaluation
from gradtools.errors import DisconnectedInputError, warn

_WITH_POLICY = ("grad", "value_and_grad")  # the operators that take disconnected_inputs


is_missing = partial(operator.is_, None)
"""Whether a leaf has no cotangent."""


class Connection:
    """Finds the differentiated arguments that do not reach the output, and reports them."""

    def __init__(
        self, backend: Backend, call: Call, evaluation: Evaluation, grads: Sequence[Array | None]
    ) -> None:
        self.backend, self.call, self.evaluation, self.grads = backend, call, evaluation, grads

    def check(self, policy: str) -> None:
        """Raises or warns according to `policy`, a value of `disconnected_inputs`."""
        if not self.evaluation.checked:
            return self._warn_of_zeros()
        lost = self._lost_leaves() if policy == "strict" else self._lost_arguments()
        if not lost:
            self.evaluation.cut(self.grads)  # raises for parameters read by another reference
            return None
        message = self._message(lost)
        if policy != "warn":
            raise DisconnectedInputError(message)
        return warn(message)

    def _lost_leaves(self) -> list[tuple[str, int]]:
        named = enumerate(zip(self.call.paths, self.grads, strict=True))
        return [(path, i) for i, (path, g) in named if g is None]

    def _lost_arguments(self) -> list[tuple[str, int]]:
        lost, start = [], 0
        for i, count in zip(self.call.argnums, self.call.counts, strict=True):
            if count and all(g is None for g in self.grads[start : start + count]):
                lost.append((f"argument {i}", start))
            start += count
        return lost

    def _message(self, lost: list[tuple[str, int]]) -> str:
        names = ", ".join(name for name, _ in lost)
        cuts = [self.evaluation.where_lost(i) for _, i in lost]
        places = "; ".join(dict.fromkeys(cut for each in cuts for cut in each))
        where = f" It is cut by {places}." if places else ""
        if not all(cuts):
            where += (
                " It may be unused, stopped or detached, cast to an integer, compared, or it may "
                "leave the framework (.item(), .numpy(), no_grad)."
            )
        else:
            where += " Remove that operation from the path, or replace it (see why_zero)."
        verb = "does" if len(lost) == 1 else "do"
        fix = 'If zero is what you mean, pass disconnected_inputs="zeros".'
        if self.call.caller not in _WITH_POLICY:
            fix = "Leave it out of what is differentiated, or let it reach the output."
        return (
            f"{self.call.caller}: {names} {verb} not reach the output of f by a differentiable "
            f"path.{where} {fix}"
        )

    def _warn_of_zeros(self) -> None:
        start = 0
        for i, count in zip(self.call.argnums, self.call.counts, strict=True):
            grads = self.grads[start : start + count]
            start += count
            if count and all(g is None or self.backend.is_known_zero(g) for g in grads):
                warn(
                    f"{self.call.caller}: the gradient of argument {i} is zero everywhere, and f "
                    "could not be traced to see whether the argument reaches the output (it "
                    "branches on values, or leaves the framework)."
                )


def refuse_cut(fun: Any, cut: Sequence[int]) -> None:
    """Raises if leaves are cut off after an inner derivative, whose own derivative is then lost.

    (A leaf on which the inner derivative does not depend is not cut: its derivative is zero.)
    """
    if not cut:
        return
    paths = getattr(fun, "paths", None)
    names = ", ".join(paths[i] if paths else f"leaf {i}" for i in cut)
    verb = "reaches a derivative" if len(cut) == 1 else "reach derivatives"
    raise DisconnectedInputError(
        f"{getattr(fun, 'caller', 'gradtools')}: {names} {verb} taken inside f, whose result is "
        "then cut from it (stopped or detached, taken under no_grad, or out of the framework), so "
        "that a second derivative is lost. Leave the result attached, or use gt.stop_gradient on "
        "the argument itself if it is meant to be a constant."
    )
