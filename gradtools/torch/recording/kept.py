"""What a run may change besides what a snapshot holds: parameters and their flags, `.grad`.

They are copied when a call is about to change them, and not before: most runs change none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.recording import operations
from gradtools.torch.recording.numbering import Numbering
from gradtools.torch.recording.values import holds_numbers, memory_of

if TYPE_CHECKING:
    from gradtools.torch.recording.recorder import RecordedCall

Tensor = torch.Tensor


class Kept:
    """Captured tensors and gradients as they stood before the first call that changes them.

    Of a tensor its memory is kept: that can be written to whatever the tensor is a view of, be its
    entries in one place, as an expanded tensor's are, or made in inference mode.
    """

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._sparse: dict[int, tuple[Tensor, Tensor]] = {}
        self._flags: list[tuple[Tensor, bool]] = []
        self._grads: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def before(self, call: RecordedCall) -> None:
        """Keeps what a call may change."""
        if call.raw == "requires_grad_" or call.name == "set_requires_grad":
            self._flags += [(x, x.requires_grad) for x in call.tensors if x.is_leaf]
        elif call.raw == "backward":
            self._keep_grads()
        elif operations.changes_in_place(call.raw, call.kwargs):
            for x in call.tensors:
                self._keep(x)

    def _keep(self, x: Tensor) -> None:
        known = (x, *self._numbering.sharing(x))
        if not any(self._numbering.of(y) in self._numbering.captured for y in known):
            return
        key = memory_of(x)
        if holds_numbers(x) and key not in self._memory:
            storage = x.untyped_storage()
            self._memory[key] = storage, storage.clone()
        elif x.layout is not torch.strided and not x.is_meta and id(x) not in self._sparse:
            self._sparse[id(x)] = x, x.detach().clone()

    def _keep_grads(self) -> None:
        if not self._grads:
            tensors = self._numbering.reachable.values()
            grads = [(x, x.grad) for x in tensors if x.requires_grad and x.is_leaf]
            self._grads = [(x, g, None if g is None else g.detach().clone()) for x, g in grads]

    def put_back(self) -> None:
        """All of it, as it stood."""
        for x, flag in reversed(self._flags):
            if x.requires_grad != flag:
                x.requires_grad_(flag)
        for storage, copy in self._memory.values():
            storage.copy_(copy)
        with torch.no_grad():
            for x, contents in self._sparse.values():
                with upstream.version_counter_kept(x):
                    x.copy_(contents)
            for x, grad, contents in self._grads:
                x.grad = grad
                if grad is not None and contents is not None:
                    grad.copy_(contents)
