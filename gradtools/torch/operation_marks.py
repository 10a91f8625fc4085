"""Context marks by which recordings know operations that gradtools made itself.

A recording of a user's program sees gradtools' own operations as well. The functions here mark a
`detach` as gradtools' own, with a reason. A Function's class attribute `recorded_as` says what the
Function is recorded as.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
CHUNK, DERIVATIVE = "chunk", "derivative"  # reasons of a detach

OWN_HOOKS = [0]
"""The number of hooks that gradtools has set on tensors, nodes and modules."""


def hooks_of_users() -> int:
    """The number of hooks set so far, without gradtools' own."""
    return upstream.hooks_made() - OWN_HOOKS[0]


RULE = "rule"  # the mark of a Function that applies a rule


def function_of_ours(kind: Any) -> str | None:
    """What a Function's class is recorded as; None if it is not gradtools' own."""
    mark: str | None = getattr(kind, "recorded_as", None)
    own = kind.__module__.startswith(__name__.rpartition(".")[0] + ".")
    return mark or (kind.__name__.strip("_").lower() if own else None)


def is_users_function(kind: Any) -> bool:
    """Whether a Function's class is neither gradtools' nor PyTorch's own."""
    return function_of_ours(kind) is None and not kind.__module__.startswith("torch.")


class _DetachReason(threading.local):
    def __init__(self) -> None:
        self.reason = ""  # always set, since dynamo guards on the existence of attributes


_here = _DetachReason()


def detached(x: Tensor, reason: str) -> Tensor:
    """`x.detach()`, marked as gradtools' own: not a cut in the user's program."""
    before, _here.reason = _here.reason, reason
    try:
        return x.detach()
    finally:
        _here.reason = before


def data_of(x: Tensor, reason: str) -> Tensor:
    """`x.data`, marked like `detached`."""
    before, _here.reason = _here.reason, reason
    try:
        return x.data
    finally:
        _here.reason = before


def reason_of_detach() -> str:
    """The reason of gradtools' own detach in this thread; empty for the user's."""
    return _here.reason
