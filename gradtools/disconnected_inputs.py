"""Implements `disconnected_inputs`: errors and warnings for arguments without a gradient.

An argument reaches the output if f computes the output from the argument through a path of
differentiable operations. Such a path contains no stop_gradient or detach, no cast to integer or
boolean, no comparison, and no operation outside of the framework. The backends find the
differentiable paths; this module raises the errors and issues the warnings.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

from gradtools.arguments.calls import Call
from gradtools.backend import Array, Backend, Evaluation
from gradtools.errors import DisconnectedInputError, DisconnectedInputWarning, warn

_WITH_POLICY = ("grad", "value_and_grad")  # operators with disconnected_inputs


is_missing = partial(operator.is_, None)
"""Returns whether the cotangent of a leaf is None."""


def check_connected(
    backend: Backend, call: Call, evaluation: Evaluation, grads: Sequence[Array | None], policy: str
) -> None:
    """Raises an error or warns if the output does not depend on a differentiated argument or leaf.

    policy: A value of `disconnected_inputs`.
    """
    caller, ends = call.caller, [*accumulate(call.counts, initial=0)]
    arguments = [
        (f"argument {i}", range(start, end))
        for i, (start, end) in zip(call.argnums, pairwise(ends), strict=True)
        if start < end
    ]
    if not evaluation.checked:
        for name, places in arguments:
            if all(grads[k] is None or backend.is_known_zero(grads[k]) for k in places):
                warn(
                    f"{caller}: the gradient with respect to {name} is zero everywhere, and f "
                    "could not be traced to determine whether the argument reaches the output (f "
                    "branches on values, or leaves the framework)."
                )
        return
    named = arguments
    if policy == "strict":
        named = [(path, range(k, k + 1)) for k, path in enumerate(call.paths)]
    lost = [name for name, ks in named if all(grads[k] is None for k in ks)]
    if not lost:
        return
    names, verb = ", ".join(lost), "does" if len(lost) == 1 else "do"
    if evaluation.nested:
        warn(
            f"{caller}: {names} {verb} not reach the output of f, and the gradient is zero. f "
            "itself computes a derivative, which may be constant, detached, stopped or computed "
            "without a graph (see why_zero).",
            DisconnectedInputWarning,
        )
        return
    fix = 'If the gradient should be zero, pass disconnected_inputs="zeros".'
    if caller not in _WITH_POLICY:
        fix = "Leave the argument out of the differentiated arguments, or let f use the argument."
    if call.opened is None and any(type(x).__name__ == "Parameter" for x in call.leaves):
        fix = f"To differentiate a module, pass the module: {caller}(f)(module). {fix}"
    message = (
        f"{caller}: {names} {verb} not reach the output of f by a differentiable path. An "
        "argument has no such path if it is unused, stopped or detached, cast to an integer, "
        "compared, or passed out of the framework (.item(), .numpy(), no_grad); why_zero names the "
        f"operation. {fix}"
    )
    if policy != "warn":
        raise DisconnectedInputError(message)
    warn(message, DisconnectedInputWarning)
