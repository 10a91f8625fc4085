"""Undoes what a recorded run changes, so that f may run again and leaves no trace.

Random streams and buffers are put back by `RunState`. All else is an undo log: what this thread is
about to change is copied just before, and put back in reverse order. The log holds attributes of
modules, the memory of tensors that existed before, `requires_grad`, `.data` and `.grad`. Nothing
that another thread writes is in it; containers and other objects are left as f changed them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from gradtools.code_origin import USER, whose
from gradtools.function_variables import globals_of
from gradtools.seeing.graphs.reachable import Named, named_objects
from gradtools.seeing.torch.thread_patches import attributes_written
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.compiling import as_written
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in, unwrapped
from gradtools.torch.state import Held, RunState

Tensor = torch.Tensor
Run = Callable[[Sequence[Any]], Sequence[Any]]
_ABSENT = object()


@contextmanager
def undone(run: Run, leaves: Sequence[Any]) -> Iterator[Undo]:
    """A context whose changes are undone at its end; code that was compiled runs eagerly in it."""
    undo = Undo(run, {x.device.type for x in leaves if isinstance(x, Tensor)})
    try:
        with as_written(), attributes_written(undo.note_attribute), undo:
            yield undo
    finally:
        undo.put_back()


def rerun(run: Run, leaves: Sequence[Any]) -> list[Any]:
    """`run(leaves)` with all its effects undone; the results are detached.

    The leaves require grad, since f itself may take a derivative.
    """
    with undone(run, leaves), torch.inference_mode(False), torch.enable_grad():
        outs = run([copied(x) for x in leaves])
        return [x.detach() if isinstance(x, Tensor) else x for x in outs]


def copied(x: Any, tracked: bool = True) -> Any:
    """A copy of a leaf; it requires grad if `tracked` and if it is floating or complex."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().requires_grad_(tracked and is_inexact(x))


class Undo(TorchFunctionMode):
    """An undo log of this thread's writes: a mode that sees each in-place call.

    Whole storages are copied at the first write, which works for views, expanded tensors and
    inference tensors alike.

    Attributes:
        names: The names in the user's code of the tensors that f can reach, by id.
        reachable: These tensors, by id.
    """

    def __init__(self, run: Run, kinds: Iterable[str] = ()) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self.reachable: dict[int, Tensor] = {}
        held: list[Any] = []
        self._log: list[Callable[[], Any]] = []
        self._noted: dict[Any, Any] = {}  # what is in the log; referenced so that ids stay unique
        self._owners: dict[int, Any] = {}  # the storages that existed before, by id
        for x, name in named_objects(_roots(run), lambda x: isinstance(x, Tensor), _parts):
            if isinstance(x, Tensor):
                self.names.setdefault(id(x), name)
                self.reachable[id(x)] = x
                self.watch(x)
            elif isinstance(x, torch.nn.Module | torch.Generator):
                held.append(x)
            elif (stream := _stream(x)) is not None:
                self._log.append(stream)
            elif isinstance(x, FunctionType):
                self._look_up_applies(x)
        self._state = RunState.now(Held(held, kinds))

    def _look_up_applies(self, f: FunctionType) -> None:
        """Makes the variables of f look up `Function.apply` at each call, until they are put back.

        From PyTorch 2.14 on a bound `apply` is a function in C, which no patch of a class reaches.
        """
        for name, value in globals_of(f).items():
            if (new := looked_up(value)) is not value:
                self._log.append(partial(f.__globals__.__setitem__, name, value))
                f.__globals__[name] = new
        for cell in f.__closure__ or ():
            held = cell.cell_contents if cell != CellType() else None
            if (new := looked_up(held)) is not held:
                self._log.append(partial(setattr, cell, "cell_contents", held))
                cell.cell_contents = new

    def watch(self, x: Tensor) -> None:
        """Adds a tensor that existed before, and its `.grad`."""
        with upstream.DisableTorchFunction():  # an outer mode may substitute tensors
            base = unwrapped(x)
            both = base, base.grad if base.requires_grad and base.is_leaf else None
            owners = [owner_of(t) for t in both if t is not None]
        self._owners.update((id(owner), owner) for owner in owners)

    def note_attribute(self, module: torch.nn.Module, name: str) -> None:
        """Logs an attribute of a module that is about to be set or deleted."""
        if (id(module), name) in self._noted:
            return
        self._noted[id(module), name] = module
        for slot in (vars(module), *upstream.slots_of(module)):
            value = slot.get(name, _ABSENT)
            back = partial(slot.pop, name, None) if value is _ABSENT else None
            self._log.append(back or partial(slot.__setitem__, name, value))

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, raw = kwargs or {}, getattr(fun, "__name__", "")
        if raw == "backward":
            for leaf in leaves_of(list(tensors_in((args, kwargs)))):
                self._keep_grad(leaf)
        elif raw in _EXPOSES_MEMORY or changes_in_place(raw, kwargs):
            name = name_of(fun)
            with upstream.disable_current_modes(), upstream.DisableTorchFunction():
                every = map(unwrapped, tensors_in((args, kwargs)))
                known = [x for x in every if memory_of(x) in self._owners]
                if name in ("requires_grad", "set_requires_grad"):
                    for x in filter(lambda x: x.is_leaf, known):
                        self._log.append(partial(x.requires_grad_, x.requires_grad))
                    known = []
                elif name == "set_grad" and known:
                    self._keep_grad(known[0])
                    known = []
                elif name == "set_data" and known and known[0] is args[0]:  # replaces the storage
                    self._log.append(partial(setattr, args[0], "data", args[0].data))
            for x in known:
                self.keep(x)
        return fun(*args, **kwargs)

    def _keep_grad(self, leaf: Tensor) -> None:
        if ("grad", id(leaf)) not in self._noted:
            self._noted["grad", id(leaf)] = leaf
            with upstream.DisableTorchFunction():  # an outer mode may substitute tensors
                grad = leaf.grad
                if grad is not None:
                    self.watch(leaf)
                    self.keep(grad)
                self._log.append(partial(setattr, leaf, "grad", grad))

    def keep(self, x: Tensor) -> None:
        """Logs the memory of x, which is about to be written to, if it existed before."""
        key = memory_of(x)
        if key in self._noted or key not in self._owners or x.is_meta:
            return
        with upstream.disable_current_modes(), upstream.DisableTorchFunction():
            self._noted[key] = owner_of(x)
            if x.layout is torch.strided:
                storage = x.untyped_storage()
                self._log.append(partial(_refill, storage, storage.clone()))
            else:
                self._log.append(partial(_refill_sparse, x, x.detach().clone()))

    def put_back(self) -> None:
        """Undoes everything in the log, the latest first."""
        with upstream.DisableTorchFunction(), torch.no_grad():
            while self._log:
                self._log.pop()()
        self._state.restore()


def _refill(storage: torch.UntypedStorage, contents: torch.UntypedStorage) -> None:
    if storage.nbytes() != contents.nbytes():
        storage.resize_(contents.nbytes())
    storage.copy_(contents)


def _refill_sparse(x: Tensor, contents: Tensor) -> None:
    with upstream.version_counter_kept(x):
        x.copy_(contents)


def looked_up(f: Any) -> Any:
    """For a bound `Function.apply` one that looks up `apply` at each call; else f itself."""
    kind = f.__self__ if isinstance(f, BuiltinMethodType) and f.__name__ == "apply" else None
    is_bound = isinstance(kind, type) and issubclass(kind, torch.autograd.Function)
    return MethodType(_apply, kind) if is_bound else f


def _apply(kind: Any, /, *args: Any, **kwargs: Any) -> Any:
    return kind.apply(*args, **kwargs)


# --- what f can reach --------------------------------------------------------------------


def _roots(run: Run) -> list[Named]:
    """f, and what its arguments hold besides arrays."""
    owner: Any = getattr(run, "__self__", None)
    if not hasattr(owner, "f"):
        return [(run, "")]
    return [(owner.f, ""), *getattr(owner, "statics", ())]


def _parts(x: Any, name: str) -> Iterable[Named] | None:
    """The arrays of a module by their names; nothing of PyTorch's and other libraries' objects."""
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
    """The origin of a function's code, or of what a method or a partial calls."""
    x = getattr(x, "__func__", getattr(x, "func", x))
    return whose(x.__code__) if hasattr(x, "__code__") else USER


def _stream(x: Any) -> Callable[[], Any] | None:
    """A function that restores a random generator of NumPy or Python; None for another object."""
    if isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        return partial(x.setstate, x.getstate())
    if isinstance(x, np.random.RandomState):
        return partial(x.set_state, x.get_state(legacy=False))
    if isinstance(x, np.random.Generator):
        bits = x.bit_generator
        return partial(setattr, bits, "state", bits.state)
    return None


# --- which calls write, and to which memory -----------------------------------------------

_EXPOSES_MEMORY = ("numpy", "__array__", "__dlpack__", "untyped_storage")


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
