"""Defines thread-local marks that identify gradtools' internal operations in recordings.

A recording of a user's program also contains gradtools' internal operations. The functions of this
module mark a `detach` as an internal operation, with a reason. The class attribute `recorded_as` of
a Function is its name in recordings.
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
CHUNK, DERIVATIVE = "chunk", "derivative"  # reasons to detach

RULE = "rule"  # the mark of a Function that applies a rule


def function_of_ours(kind: Any) -> str | None:
    """Returns the name of a gradtools Function in recordings, or None for a user's Function."""
    mark: str | None = getattr(kind, "recorded_as", None)
    own = kind.__module__.startswith(__name__.rpartition(".")[0] + ".")
    return mark or (kind.__name__.strip("_").lower() if own else None)


# --- the state of this thread --------------------------------------------------------------------


class _Running(threading.local):
    """Thread-local flags. The class attributes are default values, which are fast to read."""

    recorded = False  # whether a recorder records each operation
    plain = False  # whether chunks run as a plain loop, without recomputation
    mark = ""  # the operator whose internal code is running
    checked = False  # whether a rule's check evaluates a function
    edits = 0  # the number of applied edits without forward mode
    edit = ""  # the name of the latest edit without forward mode
    pushing = ""  # the operator that transposes f's pullback, which requires linear rules

    def __init__(self) -> None:
        # The reason for a `detach` by gradtools, or "" for a `detach` by the user. The attribute is
        # set in the constructor, since dynamo guards on the existence of attributes.
        self.reason = ""
        self.taken = 0  # the number of derivatives so far
        self.depth = 0  # the number of derivatives whose functions are being evaluated


running = _Running()
is_recorded: Callable[[], bool] = partial(getattr, running, "recorded")
is_plain: Callable[[], bool] = partial(getattr, running, "plain")
mark: Callable[[], str] = partial(getattr, running, "mark")
reason_of_detach: Callable[[], str] = partial(getattr, running, "reason")


def detached(x: Tensor, reason: str) -> Tensor:
    """Detaches x, and marks the `detach` as gradtools' own operation."""
    before, running.reason = running.reason, reason
    try:
        return x.detach()
    finally:
        running.reason = before


class _Flagged:
    """Context manager that sets a flag of this thread."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._before = getattr(running, self._name)
        setattr(running, self._name, self._value)

    def __exit__(self, *error: Any) -> None:
        setattr(running, self._name, self._before)


recorded = partial(_Flagged, "recorded", True)
"""Context manager in which a recorder records each operation, so f is not evaluated twice."""
plainly = partial(_Flagged, "plain", True)
"""Context manager in which chunks are not recomputed, so that operations of f are recorded."""
checking = partial(_Flagged, "checked", True)
"""Context manager for the check of a rule, in which calls of host kernels return zeros."""


def marked(caller: str) -> _Flagged:
    """Returns a context manager that marks unmarked operations as internal to `caller`.

    An empty `caller` marks operations as the user's operations.
    """
    return _Flagged("mark", caller and (running.mark or caller))


# --- edits without forward mode, which a transposed pullback must not contain -------------------

pushing_in_trace: list[str] = []  # `pushing` in compiled code; dynamo can trace a list


def evaluated_to_push(caller: str, evaluate: Callable[..., Any], *args: Any) -> Any:
    """Calls `evaluate(*args)`. An edit that has no forward mode raises an error."""
    if not is_compiling():
        with _Flagged("pushing", caller):
            return evaluate(*args)
    pushing_in_trace.append(caller)
    try:
        return evaluate(*args)
    finally:
        pushing_in_trace.pop()


def note_edit(name: str, xs: Sequence[Tensor]) -> None:
    """Counts an edit that has no forward mode.

    Raises an error if f's pullback will be transposed.
    """
    if running.pushing and any(x.requires_grad for x in xs):
        raise GradtoolsError(reverse_only_text(running.pushing, name))
    running.edits, running.edit = running.edits + 1, name
