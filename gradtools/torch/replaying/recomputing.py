"""Contexts for the recomputation: restore the first pass's state, then the current one.

Raises if a tensor was changed since the first pass, or if a recomputation leaves random generators
or buffers in another state than the first pass did.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.replaying.guards import REPLAYS, thread_state, was_queried

if TYPE_CHECKING:
    from gradtools.torch.replaying.replay import Forward

left_to_python(__name__)


def check_storages(forward: Forward) -> None:
    """Raises if leaves have another storage, as after `.data = ...`, which changes no version."""
    moved = [x for x, storage in forward.storages if x.untyped_storage() is not storage]
    if moved:
        reached = any(x is moved[0] for x in forward.reached_leaves)
        kind = "a parameter" if reached else "an argument"
        name = forward.start.name_of(lambda x: x is moved[0]) or kind
        raise GradtoolsError(
            f"{forward.caller}: the data of {name} was replaced after the forward pass (by .data, "
            "vector_to_parameters, module.to or module.float), and the backward pass needs it "
            "as it was. Do it after the backward pass."
        )


@contextmanager
def first_pass_state(forward: Forward) -> Iterator[None]:
    """Restores the state of the first pass for the block, and the current state after it."""
    check_storages(forward)
    changed = [name for x, version, name in forward.versions if upstream.version_of(x) != version]
    changed += forward.start.changed(parameters=not forward.saves_parameters)
    if changed:
        raise GradtoolsError(
            f"{forward.caller}: {changed[0]} was changed in place after the forward pass, and the "
            "backward pass needs it as it was. Clone it before you change it."
        )
    with REPLAYS:
        replaying, bare = thread_state.replaying, forward.is_bare
        outer = forward.is_recomputing_chunks, forward.carry, forward.drawn
        before = forward.outer_state if forward.is_recomputing_chunks else None
        forward.outer_state = forward.start.now()
        # If f itself calls backward(), it must not accumulate a second time. Otherwise .grad is
        # not touched, since another thread's backward pass may add to it.
        watched = forward.start.reached.watched if forward.accumulates else []
        grads = [(x, x.grad) for x, _ in watched if x.is_leaf] if watched else []
        try:
            for x, _ in grads:
                x.grad = None
            if forward.outer_state is not forward.start:
                forward.start.restore()
            forward.carry, forward.drawn, forward.is_recomputing_chunks = (
                forward.first_carry,
                None,
                True,
            )
            forward.compare_modes()
            thread_state.replaying, thread_state.was_queried = True, False
            yield
        finally:
            thread_state.replaying, forward.is_bare = replaying, bare
            forward.is_recomputing_chunks, forward.carry, forward.drawn = outer
            forward.outer_state.restore()
            forward.outer_state = before or forward.outer_state
            for x, grad in grads:
                if x.grad is not grad:
                    x.grad = grad
    if forward.verification is not None:
        forward.verification.done()


@contextmanager
def differentiating(forward: Forward, again: bool = False) -> Iterator[None]:
    """Around the backward pass of a recomputed chunk: the effects of gradient hooks persist.

    again: Whether it is for a second derivative, when the hooks' effects are discarded.
    """
    if again or not (forward.is_recomputing_chunks and forward.hooked):
        reached = forward.start.reached
        before = reached.counted_versions() if forward.compares_bits else []
        yield
        if before and reached.counted_versions() != before and forward.verifies:
            raise GradtoolsError(
                f"{forward.caller}: a module's buffers change in the backward pass of a chunk: "
                "torch.utils.checkpoint inside of f computes it once more, and by itself would "
                "count twice. Use gradtools' checkpoint in its place, which counts once; so "
                "does verify=False here."
            )
        return
    state = forward.start.now()
    forward.outer_state.restore()
    thread_state.replaying = False
    try:
        yield
    finally:
        thread_state.replaying, thread_state.was_queried = True, False
        forward.outer_state = forward.start.now()
        state.restore()


@contextmanager
def without_hooks(leaves: list[torch.Tensor]) -> Iterator[None]:
    """Removes the leaves' hooks for the block, so that they run once on the sum of all chunks."""
    with REPLAYS:
        hook_dicts = [hooks for x in leaves if (hooks := upstream.tensor_hooks(x)) is not None]
        bare = [x for x in leaves if upstream.tensor_hooks(x) is None]
        kept = [dict(hooks) for hooks in hook_dicts]
        try:
            for hooks in hook_dicts:
                hooks.clear()
            yield
        finally:
            # The recomputation sets f's hooks a second time: they are dropped.
            for hooks, original in zip(hook_dicts, kept, strict=True):
                hooks.clear()
                hooks.update(original)
            for x in bare:
                if upstream.tensor_hooks(x) is not None:
                    upstream.set_tensor_hooks(x, None)


def check_end(forward: Forward, count: int) -> None:
    """Raises if generators or buffers differ from the first pass after `count` recomputed chunks.

    f then draws more or fewer numbers, or another thread draws from them, or calls f's modules.
    """
    (versions, expected), (now, streams) = forward.ends[count], forward.end()
    moved = [stream for stream, state in streams.items() if state != expected[stream]]
    if moved:
        raise GradtoolsError(
            f"{forward.caller}: {moved[0]} is elsewhere after f was computed again than after "
            "it was computed first. f draws from it only once (what it keeps in a cache, say), "
            "or another thread draws from it meanwhile, whose numbers would come twice: give "
            "that thread a generator of its own."
        )
    # An f that asks `is_recomputing` may skip updates of buffers.
    off = operator.gt if was_queried() else operator.ne
    moved_too = [k for k, pair in enumerate(zip(now, versions, strict=True)) if off(*pair)]
    if forward.compares_bits and moved_too:
        k = moved_too[0]
        name = forward.start.name_of(lambda x: x is forward.start.reached.counted[k]) or "a buffer"
        raise GradtoolsError(
            f"{forward.caller}: {name} is not changed as often when f is computed again as when "
            "it was computed first. f changes it by a way of its own each time, or another "
            "thread calls the same module meanwhile, whose changes would be lost: let one "
            "wait for the other."
        )
