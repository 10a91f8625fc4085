"""Manages levels and modes of the current thread: legacy vmap, forward mode, saved-tensor hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor


def is_followed() -> bool:
    """Returns whether a transform, a mode, a trace or forward mode is active.

    The legacy vmap does not count as a transform.
    """
    traced = upstream.peek_interpreter_stack() or upstream.tracing_state()
    modes = upstream.count_of_function_modes() or upstream.count_of_dispatch_modes()
    return bool(traced or modes) or upstream.forward_level() >= 0


def batchings() -> int:
    """Returns the number of active levels of autograd's legacy vmap (``is_grads_batched``).

    Dynamo must not trace this function: dynamo would drop the increment, whose result is unused,
    but not the decrement.
    """
    if torch.compiler.is_dynamo_compiling():
        return 0  # dynamo does not trace the backward pass under the legacy vmap
    upstream.enter_vmap()
    return upstream.leave_vmap()


def by_new_vmap(fun: Callable[..., list[Any]], xs: Sequence[Any]) -> list[Any]:
    """Exits the legacy vmap of ``is_grads_batched``, and calls `fun(*xs)` under `torch.vmap`.

    When the legacy vmap ends, PyTorch drops the graph of a `torch.autograd.Function` that was
    applied to batched tensors. PyTorch keeps the graph of results of `torch.vmap`.
    """
    level, there = batchings(), list[bool]()
    mapped = [x is not None and upstream.is_legacy_batched(x) for x in xs]
    if not level or not any(mapped):
        return fun(*xs)

    def run(*xs: Any) -> tuple[Any, ...]:
        results = fun(*xs)
        there[:] = [y is not None for y in results]
        return tuple([y for y in results if y is not None])

    upstream.leave_vmap()
    try:
        front = [
            upstream.remove_batch_axis(x, level, 1, 0) if m else x
            for x, m in zip(xs, mapped, strict=True)
        ]
        axes = tuple([0 if m else None for m in mapped])
        found = iter(torch.vmap(run, axes, 0, randomness="same")(*front))
        return [upstream.add_batch_axis(next(found), 0, level) if t else None for t in there]
    finally:
        upstream.enter_vmap()


class NoForwardMode(Exception):
    """Raised if PyTorch's only forward-mode level is already active or cannot be used."""


_FORWARD_MODE = threading.Lock()


def dual_of(x: Tensor, tangent: Tensor) -> Tensor:
    """Makes a dual tensor at the current level. Raises `NoForwardMode` if x is a DTensor."""
    try:
        return upstream.make_dual(x, tangent, level=upstream.forward_level())
    except NotImplementedError as error:
        raise NoForwardMode from error


@contextmanager
def forward_mode() -> Iterator[None]:
    """Acquires a lock on forward mode, since PyTorch has a single level for all threads.

    If the lock is not available, `NoForwardMode` is raised. Waiting could deadlock, because the
    thread that owns the lock may wait for this thread. Callers that catch `NoForwardMode` apply
    reverse mode twice instead.
    """
    if not _FORWARD_MODE.acquire(blocking=False):
        raise NoForwardMode
    try:
        if upstream.forward_level() >= 0:
            raise NoForwardMode
        yield
    finally:
        _FORWARD_MODE.release()


@contextmanager
def dual_level() -> Iterator[None]:
    """Enters the level of dual numbers. Raises `NoForwardMode` if the level is already active.

    Tangents are enabled, because torch.func and the jvp of a Function disable tangents.
    """
    with forward_mode():
        tangents, level = upstream.is_forward_mode_enabled(), upstream.enter_forward_level()
        if level is None:  # another thread is about to enter or leave torch.func.jvp
            raise NoForwardMode
        try:
            upstream.set_forward_mode_enabled(True)
            yield
        finally:
            try:
                upstream.leave_forward_level(level)
            finally:
                if upstream.forward_level() == level:  # a KeyboardInterrupt may skip the exit
                    upstream.leave_forward_level(level)
                upstream.set_forward_mode_enabled(tangents)


@contextmanager
def unpacked() -> Iterator[list[Any]]:
    """Disables all saved-tensor hooks, and yields the hooks, innermost first.

    The hooks are disabled so that a surrounding checkpoint does not save tensors of an inner graph,
    and because `torch.func` raises an error if saved-tensor hooks are active.
    """
    hooks: list[Any] = []
    while (top := upstream.saved_tensors_hooks_on(False)) is not None:
        hooks.append(top)
        upstream.pop_saved_tensors_hooks()
    try:
        yield hooks
    finally:
        for pair in reversed(hooks):
            upstream.push_saved_tensors_hooks(*pair)


def has_checkpoint(hooks: Sequence[Any]) -> bool:
    """Returns whether one of the hooks belongs to `torch.utils.checkpoint`."""
    return "torch.utils.checkpoint" in [getattr(pack, "__module__", "") for pack, _ in hooks]
