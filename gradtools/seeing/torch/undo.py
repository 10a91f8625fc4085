"""Undoes the side effects of a recorded run by restoring copies from before the run.

`Undo` copies the state of random generators, the attributes of captured modules, and the contents,
`.data`, `.grad` and `requires_grad` of tensors that the function captures or reads. Changes to
containers and other objects are not undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from operator import is_
from typing import Any

import numpy as np
import torch

from gradtools.code_origin import USER, whose
from gradtools.seeing.graphs.reachable import Named, named_objects
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.thread_patches import as_written
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_inexact, unwrapped
from gradtools.torch.state import Randomness

Tensor = torch.Tensor
Run = Callable[[Sequence[Any]], Sequence[Any]]


@contextmanager
def undone(run: Run, leaves: Sequence[Any]) -> Iterator[Undo]:
    """Context manager that undoes side effects on exit, and runs compiled code eagerly."""
    undo = Undo(run, {x.device.type for x in leaves if isinstance(x, Tensor)})
    try:
        with as_written():
            yield undo
    finally:
        undo.put_back()


def copied(x: Any, tracked: bool = True) -> Any:
    """Copies a leaf; a floating or complex copy requires grad if `tracked` is set."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().requires_grad_(tracked and is_inexact(x))


class Undo:
    """Copies of the state that a run may change.

    Attributes:
        names: Maps the ids of captured tensors to their names in the user's code.
        reachable: Maps the ids of captured tensors to the tensors.
    """

    def __init__(self, run: Run, kinds: Iterable[str] = ()) -> None:
        self.names: dict[int, str] = {}
        self.reachable: dict[int, Tensor] = {}
        # Maps ids to (tensor, alias of its storage, gradient, requires_grad).
        self._tensors: dict[int, tuple[Tensor, Tensor | None, Tensor | None, bool]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._contents: dict[int, tuple[Tensor, Tensor]] = {}  # storage id -> (contents, copy)
        self._slots: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._streams: list[Callable[[], Any]] = []
        generators: list[torch.Generator] = []
        for x, name in named_objects(_roots(run), lambda x: isinstance(x, Tensor), _parts):
            if isinstance(x, Tensor):
                self.names.setdefault(id(x), name)
                self.reachable[id(x)] = x
                self.watch(x)
            elif isinstance(x, torch.nn.Module):
                self._slots += [(own, dict(own)) for own in (vars(x), *upstream.slots_of(x))]
            elif isinstance(x, torch.Generator):
                generators.append(x)
            elif isinstance(x, np.random.Generator):
                bits = x.bit_generator
                self._streams.append(partial(setattr, bits, "state", bits.state))
        kinds = {*kinds, *(x.device.type for x in self.reachable.values())}
        self._streams.append(Randomness.everywhere(kinds, generators).restore)

    def watch(self, x: Tensor) -> None:
        """Copies a tensor and its `.grad`; `put_back` restores both from the copies."""
        with upstream.disable_current_modes(), private.DisableTorchFunction():
            x = unwrapped(x)
            if id(x) in self._tensors:
                return
            alias, grad = x.detach() if _has_storage(x) else None, x.grad if x.is_leaf else None
            self._tensors[id(x)] = x, alias, grad, x.requires_grad
            for t in (x, grad) if grad is not None else (x,):
                if not t.is_inference():
                    self._versions.append((t, upstream.version_of(t)))
                owner = owner_of(t) if _has_storage(t) else t
                if id(owner) not in self._contents and not t.is_meta:
                    contents = _contents_of(t)
                    self._contents[id(owner)] = contents, contents.clone()

    def put_back(self) -> None:
        """Restores tensors, module attributes and random states from the copies."""
        with private.DisableTorchFunction(), torch.no_grad():
            for own, was in self._slots:
                if len(own) != len(was) or not all(map(is_, own.values(), was.values())):
                    own.clear()
                    own.update(was)
            for x, alias, grad, requires_grad in self._tensors.values():
                if alias is not None and owner_of(x) is not owner_of(alias):
                    x.data = alias  # the run assigned another storage to x.data
                if x.is_leaf and x.requires_grad != requires_grad:
                    x.requires_grad_(requires_grad)
                if x.is_leaf and x.grad is not grad:
                    x.grad = grad
            for contents, copy in self._contents.values():
                _refill(contents, copy)
            for x, version in self._versions:
                if upstream.version_of(x) != version:  # keeps saved tensors valid
                    upstream.set_version_counters((x,), (version,))
        for restore in self._streams:
            restore()


def _has_storage(x: Tensor) -> bool:
    """Returns whether x has a storage; sparse tensors and wrapper subclasses have no storage."""
    return x.layout is torch.strided and not hasattr(x, "__tensor_flatten__")


def _contents_of(x: Tensor) -> Tensor:
    """Returns the whole storage of x as a one-dimensional tensor, or x if it has no storage."""
    if not _has_storage(x):
        return x
    count = owner_of(x).nbytes() // x.element_size()
    return x.detach().as_strided((count,), (1,), 0)


def _refill(contents: Tensor, copy: Tensor) -> None:
    """Copies `copy` to `contents`, unless the two tensors are known to be equal."""
    with torch.inference_mode(contents.is_inference()), torch.no_grad():
        is_known = contents.device.type == "cpu" and _has_storage(contents)  # no synchronization
        if not (is_known and torch.equal(contents, copy)):
            contents.copy_(copy)


# --- objects that f can reach --------------------------------------------------------------------


def _roots(run: Run) -> list[Named]:
    """Returns (object, name) for the function and for each argument leaf that is not an array."""
    owner: Any = getattr(run, "__self__", None)
    if not hasattr(owner, "f"):
        return [(run, "")]
    return [(owner.f, ""), *getattr(owner, "statics", ())]


def _parts(x: Any, name: str) -> Iterable[Named] | None:
    """Returns a module's named attributes, () for an object of a library, or None otherwise."""
    if isinstance(x, torch.nn.Module):
        before = f"{name}." if name else ""
        slots = [pair for slot in upstream.slots_of(x) for pair in slot.items()]
        own = [pair for pair in vars(x).items() if pair[0] not in _OF_MODULES]
        called = getattr_static(type(x), "forward", None)
        return [(value, before + key) for key, value in (*slots, *own)] + [(called, "")]
    if isinstance(x, dict | list | tuple) or (callable(x) and whose_code(x) == USER):
        return None
    return None if whose(type(x)) == USER else ()


_OF_MODULES = frozenset(vars(torch.nn.Module()))


def whose_code(x: Any) -> int:
    """Returns the origin of a function, method or partial, such as `code_origin.USER`."""
    x = getattr(x, "__func__", getattr(x, "func", x))
    return whose(x.__code__) if hasattr(x, "__code__") else USER


# --- memory ------------------------------------------------------------------------------


def name_of(function: Any) -> str:
    """Returns the name of a PyTorch function without leading and trailing underscores."""
    name = getattr(function, "__name__", None) or type(function).__name__
    if name in ("__get__", "__set__"):
        name = ("" if name == "__get__" else "set_") + function.__self__.__name__
    if name.startswith("__") and name.endswith("__"):
        return name[2:-2]
    return name.strip("_") or name


def owner_of(x: Tensor) -> Any:
    """Returns the storage of a strided tensor, or the tensor itself; aliases have equal owners."""
    with private.DisableTorchFunction():  # function modes may replace x
        return x.untyped_storage() if x.layout is torch.strided else x


def memory_of(x: Tensor) -> int:
    """Returns the id of the storage that `owner_of` returns."""
    return id(owner_of(x))
