"""f computed again from where it began, after which everything stands as it stood.

What is refused is what cannot be put back: a tensor that was changed since the first pass, and a
run that leaves streams or buffers elsewhere than the first one did.
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
from gradtools.torch.replaying.guards import REPLAYS, has_asked, here

if TYPE_CHECKING:
    from gradtools.torch.replaying.replay import Forward

left_to_python(__name__)


def check_storages(forward: Forward) -> None:
    """Raises if leaves have other entries by `.data`, of which no version tells."""
    moved = [x for x, storage in forward.storages if x.untyped_storage() is not storage]
    if moved:
        reached = any(x is moved[0] for x in forward.reached_leaves())
        kind = "a parameter" if reached else "an argument"
        name = forward.start.name_of(lambda x: x is moved[0]) or kind
        raise GradtoolsError(
            f"{forward.caller}: the data of {name} was replaced after the forward pass (by .data, "
            "vector_to_parameters, module.to or module.float), and the backward pass needs it "
            "as it was. Do it after the backward pass."
        )


@contextmanager
def as_it_began(forward: Forward) -> Iterator[None]:
    """Inside, f runs from where it began; outside, everything is as it stands now."""
    check_storages(forward)
    changed = [name for x, version, name in forward.versions if upstream.version_of(x) != version]
    changed += forward.start.changed(parameters=not forward.saves_parameters)
    if changed:
        raise GradtoolsError(
            f"{forward.caller}: {changed[0]} was changed in place after the forward pass, and the "
            "backward pass needs it as it was. Clone it before you change it."
        )
    with REPLAYS:
        replaying, bare = here.replaying, forward.is_bare
        outer = forward.is_again, forward.carry, forward.drawn
        before = forward.standing if forward.is_again else None
        forward.standing = forward.start.now()
        # Where f goes backward itself, what it adds was added before. Elsewhere .grad is left
        # alone: another thread's backward pass may add to it meanwhile.
        watched = forward.start.reached.watched if forward.accumulates else []
        grads = [(x, x.grad) for x, _ in watched if x.is_leaf] if watched else []
        try:
            for x, _ in grads:
                x.grad = None
            if forward.standing is not forward.start:
                forward.start.restore()
            forward.carry, forward.drawn, forward.is_again = forward.first_carry, None, True
            forward.look_at_modes()
            here.replaying, here.wanted = True, False
            yield
        finally:
            here.replaying, forward.is_bare = replaying, bare
            forward.is_again, forward.carry, forward.drawn = outer
            forward.standing.restore()
            forward.standing = before or forward.standing
            for x, grad in grads:
                if x.grad is not grad:
                    x.grad = grad
    if forward.verification is not None:
        forward.verification.done()


@contextmanager
def going_back(forward: Forward, again: bool = False) -> Iterator[None]:
    """Inside, a chunk that was computed again is differentiated.

    What hooks on gradients do then stays. again: For a second derivative; they did it before.
    """
    if again or not (forward.is_again and forward.hooked):
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
    forward.standing.restore()
    here.replaying = False
    try:
        yield
    finally:
        here.replaying, here.wanted = True, False
        forward.standing = forward.start.now()
        state.restore()


@contextmanager
def without_hooks(leaves: list[torch.Tensor]) -> Iterator[None]:
    """The leaves' hooks fire once, on the sum, and not for each chunk."""
    with REPLAYS:
        held = [hooks for x in leaves if (hooks := upstream.tensor_hooks(x)) is not None]
        bare = [x for x in leaves if upstream.tensor_hooks(x) is None]
        kept = [dict(hooks) for hooks in held]
        try:
            for hooks in held:
                hooks.clear()
            yield
        finally:
            # Those that f set when it was computed again it had set before.
            for hooks, those in zip(held, kept, strict=True):
                hooks.clear()
                hooks.update(those)
            for x in bare:
                if upstream.tensor_hooks(x) is not None:
                    upstream.set_tensor_hooks(x, None)


def check_end(forward: Forward, count: int) -> None:
    """Raises if streams or buffers stand elsewhere when so many chunks have run again.

    f then draws more or less than it did, or another thread draws, or calls f's modules.
    """
    (versions, marks), (now, streams) = forward.ends[count], forward.end()
    moved = [stream for stream, stands in streams.items() if stands != marks[stream]]
    if moved:
        raise GradtoolsError(
            f"{forward.caller}: {moved[0]} stands elsewhere after f was computed again than after "
            "it was computed first. f draws from it only once (what it keeps in a cache, say), "
            "or another thread draws from it meanwhile, whose numbers would come twice: give "
            "that thread a generator of its own."
        )
    # What f leaves out when it is computed again, by `is_recomputing`, is its own affair.
    off = operator.gt if has_asked() else operator.ne
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
