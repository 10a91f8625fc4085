"""Context marks by which recordings know operations that gradtools made itself.

A recording of a user's program sees what gradtools does in it, too. Whether a `detach` is the
user's, or cuts a chunk off from the graph around it, is said here, at the call. What a Function of
ours stands for says its class, in `recorded_as`.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
CHUNK, DERIVATIVE = "chunk", "derivative"  # for whose sake

OWN_HOOKS = [0]
"""How many hooks gradtools set on tensors, nodes and modules."""


def hooks_of_users() -> int:
    """How many hooks were set so far, but for gradtools' own."""
    return upstream.hooks_made() - OWN_HOOKS[0]


RULE = "rule"  # a Function that stands for the rule that it is given


def function_of_ours(kind: Any) -> str | None:
    """What a class of Functions is recorded as; None if it is no Function of this package."""
    said: str | None = getattr(kind, "recorded_as", None)
    own = kind.__module__.startswith(__name__.rpartition(".")[0] + ".")
    return said or (kind.__name__.strip("_").lower() if own else None)


def is_users_function(kind: Any) -> bool:
    """Whether it is a class of Functions, and neither this package's nor PyTorch's own."""
    return function_of_ours(kind) is None and not kind.__module__.startswith("torch.")


class _DetachReason(threading.local):
    def __init__(self) -> None:
        self.reason = ""  # there from the beginning: dynamo guards on which attributes there are


_here = _DetachReason()


def detached(x: Tensor, reason: str) -> Tensor:
    """`x.detach()` for our own ends, which is no cut in the user's program."""
    before, _here.reason = _here.reason, reason
    try:
        return x.detach()
    finally:
        _here.reason = before


def data_of(x: Tensor, reason: str) -> Tensor:
    before, _here.reason = _here.reason, reason
    try:
        return x.data
    finally:
        _here.reason = before


def reason_of_detach() -> str:
    """For whose sake this thread detaches; empty where it is the user who does."""
    return _here.reason
