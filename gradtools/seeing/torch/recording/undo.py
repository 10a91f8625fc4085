"""Copy-on-write backup of what a run changes beyond a snapshot: memory, flags and `.grad`.

Copy on write: each is copied when a call is about to change it, and most runs change none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.values import memory_of, owner_of
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import tensors_in, unwrapped
from gradtools.torch.state import Snapshot

Tensor = torch.Tensor


class Undo(TorchFunctionMode):
    """Inside, what was there before is kept before a call changes it.

    Of a tensor its memory is kept: that can be written to whatever the tensor is a view of, be its
    entries in one place, as an expanded tensor's are, or made in inference mode.

    Args:
        start: What was there before; a recording may `watch` more.
    """

    def __init__(self, start: Snapshot) -> None:
        super().__init__()
        self.start = start
        self._owners: dict[int, Any] = {}  # of memory that was there before
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._sparse: dict[int, tuple[Tensor, Tensor]] = {}
        self._data: list[tuple[Tensor, Tensor]] = []
        self._flags: list[tuple[Tensor, bool]] = []
        with upstream.DisableTorchFunction():  # a mode around may put others in their places
            held = [unwrapped(x) for x, _ in start.reached.watched]
            self._grads = [(x, x.grad) for x in held if x.requires_grad and x.is_leaf]
        for x in [*held, *[grad for _, grad in self._grads if grad is not None]]:
            self.watch(x)

    def names(self) -> dict[int, str]:
        """The names of what f can reach, as its author writes them, by id."""
        watched = reversed(self.start.reached.watched)
        return {id(x): name.removeprefix("f.") for x, name in watched}

    def watch(self, x: Tensor) -> None:
        """x was there before, too."""
        owner = owner_of(x)
        self._owners[id(owner)] = owner

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, raw = kwargs or {}, getattr(fun, "__name__", "")
        if raw == "backward":
            for _, grad in self._grads:
                if grad is not None:
                    self.keep(grad)
        elif raw in _HANDS_OUT or operations.changes_in_place(raw, kwargs):
            self._keep_all(operations.name_of(fun), args, kwargs)
        return fun(*args, **kwargs)

    def _keep_all(self, name: str, args: Any, kwargs: Any) -> None:
        with upstream.disable_current_modes(), upstream.DisableTorchFunction():
            known = [x for x in map(unwrapped, tensors_in((args, kwargs))) if self._is_known(x)]
            if name in ("requires_grad", "set_requires_grad"):
                self._flags += [(x, x.requires_grad) for x in known if x.is_leaf]
                return
            if name == "set_data" and known and known[0] is args[0]:  # it has other memory then
                self._data.append((args[0], args[0].data))
        for x in known:
            self.keep(x)

    def _is_known(self, x: Tensor) -> bool:
        return memory_of(x) in self._owners

    def keep(self, x: Tensor) -> None:
        """The contents of x, which is about to be written to; if it was there before."""
        key = memory_of(x)
        if not self._is_known(x) or key in self._memory or key in self._sparse or x.is_meta:
            return
        with upstream.disable_current_modes(), upstream.DisableTorchFunction():
            if x.layout is torch.strided:
                storage = x.untyped_storage()
                self._memory[key] = storage, storage.clone()
            else:
                self._sparse[key] = x, x.detach().clone()

    def put_back(self) -> None:
        """All of it, as it stood."""
        with upstream.DisableTorchFunction(), torch.no_grad():
            for x, data in reversed(self._data):
                x.data = data
            for x, flag in reversed(self._flags):
                if x.requires_grad != flag:
                    x.requires_grad_(flag)
            for storage, contents in self._memory.values():
                if storage.nbytes() != contents.nbytes():
                    storage.resize_(contents.nbytes())
                storage.copy_(contents)
            for x, contents in self._sparse.values():
                with upstream.version_counter_kept(x):
                    x.copy_(contents)
            for x, grad in self._grads:
                if x.grad is not grad:
                    x.grad = grad


_HANDS_OUT = ("numpy", "__array__", "__dlpack__", "untyped_storage")  # memory that may be written


def eagerly() -> AbstractContextManager[Any]:
    """Inside, compiled functions run as they were written: a mode cannot see into their code."""
    if not upstream.dynamo_is_loaded():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
