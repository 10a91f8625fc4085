"""Runs a user's function again, and undoes everything that it changes.

The state in a `Snapshot` is restored from it. Other memory, flags and `.grad` are backed up by
copy-on-write, just before a call changes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from gradtools.torch import _upstream as upstream
from gradtools.torch.coefficients import coefficients_noted
from gradtools.torch.compiling import as_written
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in, unwrapped
from gradtools.torch.snapshots import Snapshot

Tensor = torch.Tensor
Run = Callable[[Sequence[Any]], Sequence[Any]]
_LOCK = threading.RLock()  # a run changes state of the process


def rerun(run: Run, leaves: Sequence[Any]) -> list[Any]:
    """`run(leaves)` with all its effects undone; the results are detached.

    The leaves require grad, since f itself may take a derivative.
    """
    with put_back(run, leaves), torch.inference_mode(False), torch.enable_grad():
        outs = run([copied(x) for x in leaves])
        return [x.detach() if isinstance(x, Tensor) else x for x in outs]


@contextmanager
def put_back(run: Callable[..., Any], leaves: Sequence[Any]) -> Iterator[Undo]:
    """Undoes, at the end of the block, all changes to state that f can reach."""
    # The last root of the search is visited first, and names what it reaches.
    owner: Any = getattr(run, "__self__", None)
    roots = run.roots if isinstance(run, Rerunnable) else [run]
    if hasattr(owner, "f"):
        roots = [getattr(owner, "statics", None), owner.f]
    with _LOCK:
        undo = Undo(Snapshot.of(roots, [x for x in leaves if isinstance(x, Tensor)]))
        try:
            with as_written(), coefficients_noted(None), undo:
                yield undo
        finally:
            undo.put_back()
            undo.start.restore()


class Rerunnable(NamedTuple):
    """A function for a trial run, and the roots of the state that it can reach."""

    run: Callable[..., Any]
    roots: list[Any]

    def __call__(self, *leaves: Any) -> Any:
        return self.run(*leaves)


def copied(x: Any, tracked: bool = True) -> Any:
    """A copy of a leaf; it requires grad if `tracked` and if it is floating or complex."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().requires_grad_(tracked and is_inexact(x))


class Undo(TorchFunctionMode):
    """Copy-on-write backup of tensors that existed before: a mode that sees each in-place call.

    Whole storages are backed up, which works for views, expanded tensors and inference tensors
    alike.

    start: The snapshot of the state before; `watch` adds more tensors.
    """

    def __init__(self, start: Snapshot) -> None:
        super().__init__()
        self.start = start
        self._owners: dict[int, Any] = {}  # the storages that existed before, by id
        self._memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._sparse: dict[int, tuple[Tensor, Tensor]] = {}
        self._data: list[tuple[Tensor, Tensor]] = []
        self._flags: list[tuple[Tensor, bool]] = []
        with upstream.DisableTorchFunction():  # an outer mode may substitute tensors
            tensors = [unwrapped(x) for x, _ in start.reached.watched]
            self._grads = [(x, x.grad) for x in tensors if x.requires_grad and x.is_leaf]
        for x in [*tensors, *[grad for _, grad in self._grads if grad is not None]]:
            self.watch(x)

    def names(self) -> dict[int, str]:
        """The names in the user's code of tensors that f can reach, by id."""
        watched = reversed(self.start.reached.watched)
        return {id(x): name.removeprefix("f.") for x, name in watched}

    def watch(self, x: Tensor) -> None:
        """Adds a tensor that existed before."""
        owner = owner_of(x)
        self._owners[id(owner)] = owner

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, raw = kwargs or {}, getattr(fun, "__name__", "")
        if raw == "backward":
            for _, grad in self._grads:
                if grad is not None:
                    self.keep(grad)
        elif raw in _EXPOSES_MEMORY or changes_in_place(raw, kwargs):
            name = name_of(fun)
            with upstream.disable_current_modes(), upstream.DisableTorchFunction():
                every = map(unwrapped, tensors_in((args, kwargs)))
                known = [x for x in every if memory_of(x) in self._owners]
                if name in ("requires_grad", "set_requires_grad"):
                    self._flags += [(x, x.requires_grad) for x in known if x.is_leaf]
                    known = []
                elif name == "set_data" and known and known[0] is args[0]:  # replaces the storage
                    self._data.append((args[0], args[0].data))
            for x in known:
                self.keep(x)
        return fun(*args, **kwargs)

    def keep(self, x: Tensor) -> None:
        """Backs up x, which is about to be written to, if it existed before."""
        key = memory_of(x)
        kept = key in self._memory or key in self._sparse
        if kept or key not in self._owners or x.is_meta:
            return
        with upstream.disable_current_modes(), upstream.DisableTorchFunction():
            if x.layout is torch.strided:
                storage = x.untyped_storage()
                self._memory[key] = storage, storage.clone()
            else:
                self._sparse[key] = x, x.detach().clone()

    def put_back(self) -> None:
        """Restores everything that was backed up."""
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


_EXPOSES_MEMORY = ("numpy", "__array__", "__dlpack__", "untyped_storage")


# --- which calls write, and to which memory -----------------------------------------------


def name_of(function: Any) -> str:
    """The name of a PyTorch function without underscores of in-place and dunder variants."""
    name = getattr(function, "__name__", None) or type(function).__name__
    if name in ("__get__", "__set__"):
        name = ("" if name == "__get__" else "set_") + function.__self__.__name__
    if name.startswith("__") and name.endswith("__"):
        return name[2:-2]
    return name.strip("_") or name


def changes_in_place(raw: str, kwargs: Any) -> bool:
    """Whether a call of the function with this `__name__` may write to its arguments."""
    if raw.startswith("__"):
        return raw.startswith("__i") or raw in ("__setitem__", "__set__")
    return raw.endswith("_") or "out" in kwargs or kwargs.get("inplace") is True


def owner_of(x: Tensor) -> Any:
    """The storage of a strided tensor, else the tensor itself. Equal owners share memory."""
    with upstream.DisableTorchFunction():  # a mode may substitute another tensor
        return x.untyped_storage() if x.layout is torch.strided else x


def memory_of(x: Tensor) -> int:
    """The id of the tensor's owner."""
    return id(owner_of(x))
