"""Thread-local marks by which recordings identify operations of gradtools itself.

A recording of a user's program sees gradtools' own operations as well. The functions here mark a
`detach` as gradtools' own, with a reason. A Function's class attribute `recorded_as` is the kind as
which the Function is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.rules import reverse_only_text
from gradtools.torch.compiling import is_compiling

Tensor = torch.Tensor
CHUNK, DERIVATIVE = "chunk", "derivative"  # reasons of a detach

RULE = "rule"  # the mark of a Function that applies a rule


def function_of_ours(kind: Any) -> str | None:
    """The kind as which a Function's class is recorded; None if it is not gradtools' own."""
    mark: str | None = getattr(kind, "recorded_as", None)
    own = kind.__module__.startswith(__name__.rpartition(".")[0] + ".")
    return mark or (kind.__name__.strip("_").lower() if own else None)


# --- what runs in this thread --------------------------------------------------------------------


class _Running(threading.local):
    """Thread-local flags, with class attributes as defaults, which are read fastest."""

    recorded = False  # whether a recorder writes down each operation
    plain = False  # whether chunks run as a plain loop, without recomputation
    mark = ""  # the operator whose own machinery is running
    checked = False  # whether a rule's check evaluates a function
    edits = 0  # how many edits without forward mode have been applied
    edit = ""  # the name of the latest such edit
    pushing = ""  # the operator that transposes f's pullback, where rules must be linear

    def __init__(self) -> None:
        # The reason of gradtools' own detach; empty for a detach of the user. It is always set,
        # since dynamo guards on the existence of attributes.
        self.reason = ""


running = _Running()
is_recorded: Callable[[], bool] = partial(getattr, running, "recorded")
is_plain: Callable[[], bool] = partial(getattr, running, "plain")
mark: Callable[[], str] = partial(getattr, running, "mark")
reason_of_detach: Callable[[], str] = partial(getattr, running, "reason")


def detached(x: Tensor, reason: str) -> Tensor:
    """`x.detach()`, marked as gradtools' own: not a cut in the user's program."""
    before, running.reason = running.reason, reason
    try:
        return x.detach()
    finally:
        running.reason = before


class _Flagged:
    """Context in which a flag of this thread has another value."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._before = getattr(running, self._name)
        setattr(running, self._name, self._value)

    def __exit__(self, *error: Any) -> None:
        setattr(running, self._name, self._before)


recorded = partial(_Flagged, "recorded", True)
"""Context in which a recorder writes down each operation, so that no extra runs happen."""
plainly = partial(_Flagged, "plain", True)
"""Context in which graphs are kept instead of recomputed, so that f's operations are recorded."""
checking = partial(_Flagged, "checked", True)
"""Context in which a rule's check evaluates a function, and host kernels return zeros."""


def marked(caller: str) -> _Flagged:
    """Marks operations inside as machinery of `caller`, unless an outer operator's mark is set.

    An empty `caller` marks them as the user's.
    """
    return _Flagged("mark", caller and (running.mark or caller))


# --- edits without forward mode, which have no place in a pullback that is transposed ------------

pushing_in_trace: list[str] = []  # `pushing` in compiled code; dynamo follows a plain list


def evaluated_to_push(caller: str, evaluate: Callable[..., Any], *args: Any) -> Any:
    """`evaluate(*args)`, refusing edits that have no forward mode."""
    if not is_compiling():
        with _Flagged("pushing", caller):
            return evaluate(*args)
    pushing_in_trace.append(caller)
    try:
        return evaluate(*args)
    finally:
        pushing_in_trace.pop()


def note_edit(name: str, xs: Sequence[Tensor]) -> None:
    """Counts an edit that has no forward mode. Raises where f's pullback is to be transposed."""
    if running.pushing and any(x.requires_grad for x in xs):
        raise GradtoolsError(reverse_only_text(running.pushing, name))
    running.edits, running.edit = running.edits + 1, name
