"""Runs a user's function again, and puts back everything that it changed.

What a `Snapshot` holds is restored from it. Memory, flags and `.grad` beyond that are copied on
write, just before a call changes them; most runs change none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import as_written
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in, unwrapped
from gradtools.torch.state import Snapshot

Tensor = torch.Tensor
Run = Callable[[Sequence[Any]], Sequence[Any]]
_ONE = threading.RLock()  # what a run changes belongs to the process


def rerun(run: Run, leaves: Sequence[Any]) -> list[Any]:
    """`run(leaves)` from the state of now, which is put back; its results have no graph.

    The leaves require grad, for f may take a derivative itself.
    """
    with put_back(run, leaves), torch.inference_mode(False), torch.enable_grad():
        outs = run([copied(x) for x in leaves])
        return [x.detach() if isinstance(x, Tensor) else x for x in outs]


@contextmanager
def put_back(run: Callable[..., Any], leaves: Sequence[Any]) -> Iterator[Undo]:
    """Inside, f may run; afterwards all that it can reach is as it was."""
    with _ONE:
        undo = Undo(Snapshot.of(_roots(run), [x for x in leaves if isinstance(x, Tensor)]))
        try:
            with as_written(), undo:
                yield undo
        finally:
            undo.put_back()
            undo.start.restore()


def _roots(run: Callable[..., Any]) -> list[Any]:
    """What may change: what the user's function can reach, and what it is given.

    The leaves are copied for it, and what is last is walked first and gives the names.
    """
    if isinstance(run, Trying):
        return run.roots
    owner: Any = getattr(run, "__self__", None)
    if not hasattr(owner, "f"):
        return [run]
    return [getattr(owner, "statics", None), owner.f]


class Trying(NamedTuple):
    """A function that may run once more, and what it can reach."""

    run: Callable[..., Any]
    roots: list[Any]

    def __call__(self, *leaves: Any) -> Any:
        return self.run(*leaves)


def copied(x: Any, tracked: bool = True) -> Any:
    """A copy of a leaf, which requires grad if asked for and if it may."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().requires_grad_(tracked and is_inexact(x))


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
        elif raw in _HANDS_OUT or changes_in_place(raw, kwargs):
            self._keep_all(name_of(fun), args, kwargs)
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


# --- calls, and the memory that they write to ---------------------------------------------


def name_of(function: Any) -> str:
    """PyTorch's name of what is called, without the marks of its variants."""
    name = getattr(function, "__name__", None) or type(function).__name__
    if name in ("__get__", "__set__"):
        name = ("" if name == "__get__" else "set_") + function.__self__.__name__
    if name.startswith("__") and name.endswith("__"):
        return name[2:-2]
    return name.strip("_") or name


def changes_in_place(raw: str, kwargs: Any) -> bool:
    """Whether a call, by the name as PyTorch spells it, may overwrite its arguments."""
    if raw.startswith("__"):
        return raw.startswith("__i") or raw in ("__setitem__", "__set__")
    return raw.endswith("_") or "out" in kwargs or kwargs.get("inplace") is True


def owner_of(x: Tensor) -> Any:
    """The storage of a tensor, or itself: where two tensors have one owner, they share memory."""
    with upstream.DisableTorchFunction():  # a mode may give another tensor in its place
        return x.untyped_storage() if x.layout is torch.strided else x


def memory_of(x: Tensor) -> int:
    """Which piece of memory a tensor shows."""
    return id(owner_of(x))
