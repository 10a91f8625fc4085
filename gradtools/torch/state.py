"""All that a function's result depends on besides its arguments, so that it can be run again.

A snapshot holds where the random streams stand and what can change behind a function: the
buffers and attributes of modules, containers, closure variables and globals that it can reach,
generators. It is found by walking from the function. What is shared is walked once; a tensor's
contents are copied only where they belong to a module, for others it is noticed if they changed.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import (
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

from gradtools.torch.randomness import Randomness

Tensor = torch.Tensor

_ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice, type, ModuleType}
    | {torch.dtype, torch.device, torch.Size, torch.layout, np.dtype}
)
_FOREIGN = ("torch", "numpy", "jax", "builtins", "collections", "weakref", "logging", "threading")
_STANDARD = frozenset({*_FOREIGN, *sys.stdlib_module_names, "gradtools"})
_FIXED = frozenset(k for k, v in vars(torch.nn.Module()).items() if isinstance(v, dict | set))
_LARGE = 1 << 20  # bytes of an array that is not a module's: it is taken for data, and only watched


@dataclass
class Snapshot:
    """What can change behind a function, as it stood.

    Attributes:
        streams: The random streams of the process.
        modules: Every module that was reached, with its name.
        watched: The tensors that were reached, with their version and their name.
    """

    streams: Randomness
    modules: dict[int, tuple[torch.nn.Module, str]] = field(default_factory=dict)
    watched: list[tuple[Tensor, int, str]] = field(default_factory=list)
    _maps: list[tuple[Any, dict[Any, Any]]] = field(default_factory=list)
    _globals: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    _sequences: list[tuple[Any, list[Any]]] = field(default_factory=list)
    _cells: list[tuple[CellType, Any]] = field(default_factory=list)
    _tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _arrays: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    _puts: list[tuple[Callable[[Any], Any], Any]] = field(default_factory=list)
    _roots: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls, roots: Iterable[Any], tensors: Iterable[Tensor], also: Snapshot | None = None
    ) -> Snapshot:
        """What stands behind `roots` now, and behind all that an earlier snapshot holds.

        tensors: Those whose devices' random streams count, besides those that are found.
        """
        found = cls(Randomness({}))
        walk = _Walk(found)
        found._roots = [*roots]
        if also is not None:
            found._roots += also._holders()
        for root in found._roots:
            walk.visit(root, "f", False)
        walk.run()
        kinds = {x.device.type for x in tensors} | walk.kinds
        found.streams = Randomness.everywhere(kinds)
        return found

    def _holders(self) -> list[Any]:
        """The objects whose contents were taken."""
        held: list[Any] = [*self._roots]
        held += [module for module, _ in self.modules.values()]
        held += [_Contents(x) for x, _ in self._tensors]
        return held

    def restore(self) -> None:
        """Puts everything back, bit for bit."""
        for holder, kept in self._maps:
            if any(a is not b for a, b in zip(holder, kept, strict=False)):
                holder.clear()  # its order may count, too
            for key in [k for k in holder if k not in kept]:
                del holder[key]
            for key, value in kept.items():
                if key not in holder or holder[key] is not value:
                    holder[key] = value
        for space, name, value in self._globals:
            space[name] = value
        for holder, kept in self._sequences:
            if len(holder) != len(kept) or any(
                a is not b for a, b in zip(holder, kept, strict=True)
            ):
                holder.clear()
                holder.update(kept) if isinstance(holder, set) else holder.extend(kept)
        for cell, value in self._cells:
            if value is not _EMPTY:
                cell.cell_contents = value
        for tensor, contents in self._tensors:
            # The version counts changes that a graph must know of; this is none, for the contents
            # are what they were or will be again before anything else reads them.
            with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
                if tensor.shape != contents.shape:
                    tensor.resize_(contents.shape)
                tensor.copy_(contents)
        for array, copy in self._arrays:
            array[...] = copy
        for put, state in self._puts:
            put(state)
        self.streams.restore()

    def changed(self, parameters: bool) -> list[str]:
        """The names of tensors that were changed in place since, and cannot be put back."""
        held = {id(x) for x, _ in self._tensors}
        return [
            name
            for x, version, name in self.watched
            if x._version != version and id(x) not in held and (parameters or not x.requires_grad)
        ]

    def name_of(self, wanted: Callable[[Tensor], bool]) -> str | None:
        """The name of a watched tensor."""
        return next((name for x, _, name in self.watched if wanted(x)), None)


_EMPTY = object()


@dataclass(frozen=True)
class _Contents:
    """Asks a walk for a tensor's contents."""

    tensor: Tensor


class _Walk:
    """Visits what can be reached, each object once."""

    def __init__(self, found: Snapshot) -> None:
        self.found, self.kinds = found, set[str]()
        self._seen: dict[int, Any] = {}
        self._todo: list[tuple[Any, str, bool]] = []

    def visit(self, x: Any, name: str, owned: bool) -> None:
        """Notes what is to be walked. owned: whether it belongs to a module."""
        if type(x) not in _ATOMS and id(x) not in self._seen:
            self._seen[id(x)] = x
            self._todo.append((x, name, owned))

    def run(self) -> None:
        """Walks."""
        while self._todo:
            x, name, owned = self._todo.pop()
            self._walk(x, name, owned)

    def _walk(self, x: Any, name: str, owned: bool) -> None:
        if isinstance(x, Tensor):
            self._tensor(x, name, owned)
        elif isinstance(x, _Contents):
            self._seen[id(x.tensor)] = x.tensor
            self._contents(x.tensor)
        elif isinstance(x, torch.nn.Module):
            self._module(x, name)
        elif isinstance(x, dict):
            self._map(x, name, owned)
        elif isinstance(x, list | deque | set):
            self.found._sequences.append((x, list(x)))
            self._all(x, name, owned)
        elif isinstance(x, tuple | frozenset):
            self._all(x, name, owned)
        elif isinstance(x, FunctionType):
            self._function(x, owned)
        elif isinstance(x, MethodType):
            self.visit(x.__func__, name, owned)
            self.visit(x.__self__, name, owned)
            self._methods(x.__self__, name, x.__func__.__name__)
        elif isinstance(x, partial):
            for part in (x.func, x.args, x.keywords):
                self.visit(part, name, owned)
        elif isinstance(x, np.ndarray):
            if x.flags.writeable and (owned or x.nbytes <= _LARGE) and not x.dtype.hasobject:
                self.found._arrays.append((x, x.copy()))
        elif not self._generator(x):
            self._object(x, name, owned)

    def _all(self, xs: Any, name: str, owned: bool) -> None:
        if not set(map(type, xs)) <= _ATOMS:
            for k, x in enumerate(xs):
                self.visit(x, f"{name}[{k}]", owned)

    def _map(self, x: Any, name: str, owned: bool) -> None:
        self.found._maps.append((x, dict(x)))
        for key, value in x.items():
            if type(value) not in _ATOMS:
                self.visit(value, f"{name}[{key!r}]", owned)

    def _tensor(self, x: Tensor, name: str, owned: bool) -> None:
        self.kinds.add(x.device.type)
        constant = not x.requires_grad and not isinstance(x, torch.nn.Parameter)
        if constant and (owned or x.nbytes <= _LARGE):
            self._contents(x)
        if not x.is_inference():
            self.found.watched.append((x, x._version, name))

    def _contents(self, x: Tensor) -> None:
        if x.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return
        self.found._tensors.append((x, x.detach().clone()))

    def _module(self, x: torch.nn.Module, name: str) -> None:
        self.found.modules[id(x)] = (x, name)
        self._methods(x, name, "forward")
        fields = vars(x)
        self.found._maps.append((fields, dict(fields)))
        for key, value in fields.items():
            if type(value) in _ATOMS or (key in _FIXED and not value):
                continue
            if key in ("_modules", "_buffers", "_parameters") and isinstance(value, dict):
                self._seen[id(value)] = value
                self.found._maps.append((value, dict(value)))
                for k, part in value.items():
                    self.visit(part, f"{name}.{k}", True)
            else:
                self.visit(value, f"{name}.{key}", True)
        if isinstance(x, torch.jit.ScriptModule):
            self._scripted(x, name)

    def _scripted(self, x: torch.jit.ScriptModule, name: str) -> None:
        """The attributes of a compiled module, which hands out copies of all but tensors."""
        for key, (_, is_parameter) in x._concrete_type.get_attributes().items():
            value = x._c.getattr(key)
            self.visit(value, f"{name}.{key}", True)
            if not is_parameter:
                self.found._puts.append((partial(x._c.setattr, key), value))
        for key, module in x.named_children():
            self.visit(module, f"{name}.{key}", True)

    def _function(self, x: FunctionType, owned: bool) -> None:
        for key, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if id(cell) in self._seen:
                continue
            self._seen[id(cell)] = cell
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                value = _EMPTY
            self.found._cells.append((cell, value))
            self.visit(value, key, owned)
        self.visit(x.__defaults__, f"{x.__name__}'s default", owned)
        self.visit(x.__kwdefaults__, f"{x.__name__}'s default", owned)
        if (x.__module__ or "").partition(".")[0] in _FOREIGN:
            return
        space = x.__globals__
        for key in _names(x.__code__):
            if key in space:
                value = space[key]
                if not callable(value) or isinstance(value, torch.nn.Module):
                    self.found._globals.append((space, key, value))
                self.visit(value, key, owned)

    def _generator(self, x: Any) -> bool:
        if isinstance(x, random.SystemRandom):
            return True
        if isinstance(x, torch.Generator):
            self.found._puts.append((x.set_state, x.get_state()))
        elif isinstance(x, random.Random):
            self.found._puts.append((x.setstate, x.getstate()))
        elif isinstance(x, np.random.RandomState):
            self.found._puts.append((x.set_state, x.get_state(legacy=False)))
        elif isinstance(x, np.random.Generator):
            bits = x.bit_generator
            self.found._puts.append((partial(setattr, bits, "state"), bits.state))
        else:
            return False
        return True

    def _object(self, x: Any, name: str, owned: bool) -> None:
        if _package(type(x)) in _FOREIGN:
            return
        self._methods(x, name, "__call__")
        for kind in type(x).__mro__:
            if "__slots__" not in vars(kind) or _package(kind) in _STANDARD:
                continue
            for key, slot in vars(kind).items():
                if isinstance(slot, MemberDescriptorType):
                    value = getattr(x, key, _EMPTY)
                    if value is not _EMPTY:
                        self.found._puts.append((partial(slot.__set__, x), value))
                        self.visit(value, f"{name}.{key}", owned)
        fields = getattr(x, "__dict__", None)
        if type(fields) is dict:
            self.found._maps.append((fields, dict(fields)))
            for key, value in fields.items():
                self.visit(value, f"{name}.{key}", owned)

    def _methods(self, x: Any, name: str, first: str) -> None:
        """What a method, and those that it names, read besides the object's own fields."""
        todo, known = [first], set[str]()
        while todo:
            key = todo.pop()
            if key in known:
                continue
            known.add(key)
            for kind in type(x).__mro__:
                if key not in vars(kind) or _package(kind) in _STANDARD:
                    continue
                part = vars(kind)[key]
                part = getattr(part, "fget", getattr(part, "__func__", part))
                if isinstance(part, FunctionType):
                    self.visit(part, key, False)
                    wrapped = getattr(part, "__wrapped__", part)
                    todo += _names(getattr(wrapped, "__code__", part.__code__))
                elif not hasattr(part, "__get__"):
                    self.found._puts.append((partial(_set_in_class, kind, key), part))
                    self.visit(part, f"{name}.{key}", False)


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that a function's code, and what is in it, may read."""
    inside = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return tuple({*code.co_names, *(name for names in inside for name in names)})


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _set_in_class(kind: type, key: str, value: Any) -> None:
    if vars(kind).get(key) is not value:
        setattr(kind, key, value)


# --- modes and flags ---------------------------------------------------------------------


def _flags() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How each flag of PyTorch that changes numbers is read and set."""
    cuda, mha = torch.backends.cuda, torch.backends.mha
    found: dict[str, Any] = {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "matmul precision": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        "deterministic": (
            _deterministic,
            lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1]),
        ),
        "encoder fast path": (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
        "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "lean attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "plain attention": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "cudnn attention": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    }
    holders = {"cudnn": torch.backends.cudnn, "mkldnn": torch.backends.mkldnn}
    for name in ("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32"):
        found[name] = _attribute(holders["cudnn"], name.partition(".")[2])
    return {**found, "mkldnn.enabled": _attribute(holders["mkldnn"], "enabled")}


def _attribute(holder: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return partial(getattr, holder, name), partial(setattr, holder, name)


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@dataclass(frozen=True)
class Modes:
    """Autocast, grad mode and flags, as they stood when a function ran first."""

    flags: dict[str, Any]
    autocast: list[tuple[str, bool, torch.dtype]]
    cached: bool
    grad: bool
    device: torch.device

    @classmethod
    def now(cls, kinds: Iterable[str]) -> Modes:
        """As they stand."""
        casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *kinds} - {"meta"})
        ]
        return cls(
            {name: get() for name, (get, _) in _flags().items()},
            casts,
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            torch.get_default_device(),
        )

    def by_other_kernels(self) -> Modes:
        """With the framework's own alternatives to fused kernels."""
        off = ("flash attention", "lean attention", "cudnn attention")
        others = dict.fromkeys(
            (*off, "encoder fast path", "cudnn.enabled", "mkldnn.enabled"), False
        )
        return replace(self, flags={**self.flags, **others, "plain attention": True})

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, all is as it stood; outside, as it was."""
        flags = _flags()
        before = {name: get() for name, (get, _) in flags.items()}
        casts = [
            torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=self.cached)
            for kind, on, dtype in self.autocast
        ]
        try:
            for name, (_, put) in flags.items():
                if self.flags[name] != before[name]:
                    put(self.flags[name])
            with _all_of(casts), torch.set_grad_enabled(self.grad):
                if torch.get_default_device() == self.device:
                    yield
                else:
                    with self.device:
                        yield
        finally:
            for name, (get, put) in flags.items():
                if get() != before[name]:
                    put(before[name])


@contextmanager
def _all_of(contexts: list[Any]) -> Iterator[None]:
    if not contexts:
        yield
        return
    with contexts[0], _all_of(contexts[1:]):
        yield
