"""The objects that a function can reach, and what each of them holds.

A walk from the function through closures, attributes, containers and the globals that its code
names. Every object is walked once; classes and modules of Python by name, in the parts that code
reads. Whether all of them still hold the very same objects is quick to ask, so that mostly the walk
is spared. What is not walked is for `verifying` to see.
"""

from __future__ import annotations

import array
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from operator import getitem, is_, setitem
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch

from gradtools.errors import GradtoolsError
from gradtools.lines import is_installed
from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
Get = Callable[[], Any]
Put = Callable[[Any], Any]

ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice}
    | {torch.dtype, torch.device, torch.Size, torch.layout, np.dtype}
)
_FOREIGN = ("torch", "numpy", "jax", "builtins", "weakref", "logging", "threading")
_STANDARD = frozenset({*_FOREIGN, *sys.stdlib_module_names, "gradtools"})
_ROUNDS = 4  # of code that names parts of classes, which are code again; verification sees the rest
_LARGE = 1 << 20  # bytes of an array that is not a module's: it is taken for data, and only watched
_CONTAINERS = OrderedDict, dict, list, deque, set, tuple, frozenset
_UNBOUND = object()  # what a place holds that holds nothing yet


@dataclass(eq=False)
class Reached:
    """The objects behind a function, and what each of them held.

    Attributes:
        roots: Where the walk began.
        kinds: The types of devices.
        modules: Every module, with its name.
        watched: Tensors, with their names.
        owned: Tensors whose contents count, as those of modules' buffers do.
        generators: How the state of each is read and set; of arrays that are no tensors as well.
        empty: Containers in attributes that held nothing, of which modules have many.
        maps: Dictionaries by text, as those of attributes are, and what they held.
        holders: Other containers, functions and the dictionaries of classes, and what they held.
        places: All else that holds one object: how it is read, how it is written, what it held.
        comparable: Whether what is read is the same object each time.
    """

    roots: list[Any]
    kinds: set[str]
    modules: dict[int, tuple[torch.nn.Module, str]] = field(default_factory=dict)
    watched: list[tuple[Tensor, str]] = field(default_factory=list)
    owned: list[Tensor] = field(default_factory=list)
    generators: list[tuple[Get, Put]] = field(default_factory=list)
    empty: list[Any] = field(default_factory=list)
    maps: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    holders: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    places: list[tuple[Get, Put, Any]] = field(default_factory=list)
    comparable: bool = True

    def starts_from(self, roots: list[Any], kinds: set[str]) -> bool:
        """Whether a walk from these would be this one, if nothing changed."""
        same = len(roots) == len(self.roots) and all(map(is_, roots, self.roots))
        return same and kinds <= self.kinds

    def versions(self) -> list[int]:
        """The versions of the watched tensors, as they are now."""
        return [upstream.version_of(x) for x, _ in self.watched]

    def contents_versions(self) -> list[int]:
        """Those of the tensors whose contents count."""
        return [0 if x.is_inference() else upstream.version_of(x) for x in self.owned]

    @cached_property
    def lasts(self) -> bool:
        """Whether the next call may find the same; else it is let go of, with the graphs in it.

        So are objects that were arguments, a batch of a class of its own for one.
        """
        again = all(isinstance(x, torch.nn.Module) for x in self.roots[1:])
        return again and all(x.grad_fn is None for x, _ in self.watched)

    @cached_property
    def _flat(self) -> tuple[list[Any], ...]:
        """The maps as lists, to be compared without a step of Python's for each."""
        keys, values = (
            [list(k) for _, k in self.maps],
            [v for _, k in self.maps for v in k.values()],
        )
        return [x for x, _ in self.maps], keys, values

    def stands(self) -> bool:
        """Whether everything holds the very objects that it held; text may be equal."""
        maps, keys, values = self._flat
        return (
            self.comparable
            and not any(self.empty)
            and [*map(list, maps)] == keys
            and all(map(is_, chain.from_iterable(map(dict.values, maps)), values))
            and all(_same(_entries(x), kept) for x, kept in self.holders)
            and all(_got(get) is value for get, _, value in self.places)
        )

    def now(self) -> Reached:
        """The same objects, with what each of them holds now."""
        found = copy(self)
        vars(found).pop("_flat", None)
        found.maps = [(x, dict(x)) for x, _ in self.maps]
        filled = [(x, ()) for x in self.empty if x]
        found.holders = [(x, _entries(x)) for x, _ in (*self.holders, *filled)]
        found.places = [(get, put, _got(get)) for get, put, _ in self.places]
        return found

    def restore(self) -> None:
        """Has everything hold again what it held."""
        for x in self.empty:
            if x:
                x.clear()
        for x, kept in self.maps:
            _refill_map(x, kept)
        for x, entries in self.holders:
            if not _same(_entries(x), entries):
                _refill(x, entries)
        for get, put, value in self.places:
            if value is not _UNBOUND and _got(get) is not value:
                put(value)


# --- what holds objects -----------------------------------------------------------------------


def contents_of(cell: CellType) -> Any:
    """What a variable of a closure holds; a mark if nothing yet."""
    return _got(partial(getattr, cell, "cell_contents"))


def _got(get: Get) -> Any:
    try:
        return get()
    except (LookupError, ValueError, AttributeError):
        return _UNBOUND


def _kind_of(x: Any) -> Any:
    """The class that stores what x holds; its methods run no code of a user's subclass."""
    return next((kind for kind in type(x).__mro__ if kind in _CONTAINERS), type(x))


def _entries(x: Any) -> tuple[Any, ...]:
    """The objects in a holder; of dictionaries the keys, then the values."""
    if isinstance(x, FunctionType):
        return x.__code__, x.__defaults__, x.__kwdefaults__
    own = _kind_of(x)
    if isinstance(x, dict | MappingProxyType):
        return (*own.keys(x), *own.values(x))
    return (*own.__iter__(x),)


def _refill(x: Any, entries: tuple[Any, ...]) -> None:
    if isinstance(x, dict):
        half = len(entries) // 2
        _refill_map(x, dict(zip(entries[:half], entries[half:], strict=True)))
    elif not isinstance(x, FunctionType | MappingProxyType):  # which are only compared
        own = _kind_of(x)
        own.clear(x)
        (own.update if isinstance(x, set) else own.extend)(x, entries)


def _refill_map(x: Any, kept: dict[Any, Any]) -> None:
    """Writes what differs alone: another thread may read it."""
    own = _kind_of(x)
    if any(a is not b for a, b in zip(own.__iter__(x), kept, strict=False)):
        own.clear(x)  # its order may count, too
    for key in [key for key in own.__iter__(x) if key not in kept]:
        own.__delitem__(x, key)
    for key, value in kept.items():
        if own.get(x, key, _UNBOUND) is not value:
            own.__setitem__(x, key, value)


def _same(xs: tuple[Any, ...], kept: tuple[Any, ...]) -> bool:
    return len(xs) == len(kept) and all(map(is_, xs, kept))


# --- the walk ---------------------------------------------------------------------------------


def walk(roots: list[Any], kinds: set[str]) -> Reached:
    """What can be reached from these. kinds: The types of devices that count besides."""
    return _Walk(roots, kinds).run()


class _Walk:
    """Visits what can be reached, each object once."""

    def __init__(self, roots: list[Any], kinds: set[str]) -> None:
        self.found = Reached(roots, {*kinds})
        self._seen: dict[int, Any] = {}
        self._names = {"forward", "__call__"}  # that code may read of an object
        self._holders: dict[int, tuple[Any, str]] = {}  # what has parts that code may name
        self._todo: list[tuple[Any, str, bool]] = []
        for root in roots:
            self.visit(root, "f", False)

    def visit(self, x: Any, name: str, owned: bool) -> None:
        """Notes what is to be walked. owned: whether it belongs to a module."""
        if type(x) not in ATOMS and id(x) not in self._seen:
            self._seen[id(x)] = x
            self._todo.append((x, name, owned))

    def run(self) -> Reached:
        """Walks; then some rounds through the parts of classes and modules that code names."""
        known = set[tuple[int, str]]()
        for rounds_left in reversed(range(_ROUNDS + 1)):
            while self._todo:
                self._walk(*self._todo.pop())
            for holder, name in list(self._holders.values()) if rounds_left else ():
                for key in self._names.intersection(vars(holder)):
                    if (id(holder), key) not in known:
                        known.add((id(holder), key))
                        self._part(holder, key, f"{name}.{key}")
        return self.found

    def _place(self, get: Get, put: Put, *visit: Any) -> None:
        value = _got(get)
        self.found.places.append((get, put, value))
        if value is not _UNBOUND:
            self.visit(value, *visit)

    def _holder(self, x: Any) -> tuple[Any, ...]:
        self.found.holders.append((x, _entries(x)))
        return _entries(x)

    def _walk(self, x: Any, name: str, owned: bool) -> None:
        if isinstance(x, Tensor):
            self._tensor(x, name, owned)
        elif isinstance(x, torch.nn.Module):
            self._module(x, name)
        elif isinstance(x, FunctionType):
            self._function(x, owned)
        elif isinstance(x, dict | list | deque | set | tuple | frozenset):
            self._container(x, name, owned)
        elif isinstance(x, BuiltinMethodType):
            if isinstance(x.__self__, (Tensor, *_CONTAINERS)):  # as `h.matmul` and `seen.append`
                self.visit(x.__self__, name, owned)
        elif isinstance(x, partial):
            for part in (x.func, x.args, x.keywords):
                self.visit(part, name, owned)
        elif isinstance(x, MethodType):
            for part in (x.__func__, x.__self__):
                self.visit(part, name, owned)
        elif isinstance(x, ModuleType | type):
            self._holds(x, name)
        elif isinstance(x, ContextVar):
            self._place(x.get, x.set, name, owned)
        elif isinstance(x, np.ndarray):
            if x.flags.writeable and (owned or x.nbytes <= _LARGE):
                self.found.generators.append((x.copy, partial(x.__setitem__, ...)))
        elif isinstance(x, bytearray | array.array):
            whole = slice(None)
            self.found.generators.append((partial(getitem, x, whole), partial(setitem, x, whole)))
        elif (generator := _generator(x)) is not None:
            self.found.generators.append(generator)
            self._attributes(x, name, owned)
        else:
            self._object(x, name, owned)

    def _container(self, x: Any, name: str, owned: bool) -> None:
        if isinstance(x, dict):
            items = dict(_kind_of(x).items(x))
            if type(x) is dict and set(map(type, items)) <= {str}:
                self.found.maps.append((x, items))
            else:
                self._holder(x)
        else:
            constant = isinstance(x, tuple | frozenset)
            items = dict(enumerate(_entries(x) if constant else self._holder(x)))
        for key, part in items.items():
            if type(part) not in ATOMS:
                self.visit(part, f"{name}[{key!r}]", owned)
        self._attributes(x, name, owned)

    def _attributes(self, x: Any, name: str, owned: bool, unset: bool = False) -> None:
        """What was set on an object. unset: Whether that counts if there is nothing yet."""
        fields = getattr(x, "__dict__", None)
        if type(fields) is dict and (fields or unset):
            self.found.maps.append((fields, dict(fields)))
            for key, value in fields.items():
                kind = type(value)
                if kind in _CONTAINERS and not value:
                    self.found.empty.append(value)
                elif kind not in ATOMS:
                    self.visit(value, f"{name}.{key}", owned)

    def _tensor(self, x: Tensor, name: str, owned: bool) -> None:
        if torch.nn.parameter.is_lazy(x):
            raise GradtoolsError(
                f"{name} has no shape yet (a lazy module), so what the result depends on "
                "cannot be noted. Call the module once on an example first."
            )
        self.found.kinds.add(x.device.type)
        constant = not x.requires_grad and not isinstance(x, torch.nn.Parameter)
        shown = x.device.type != "meta" and not upstream.is_wrapped(x)
        if constant and shown and (owned or _nbytes(x) <= _LARGE):
            self.found.owned.append(x)
        if not x.is_inference():
            self.found.watched.append((x, name))
        self._attributes(x, name, owned)

    def _module(self, x: torch.nn.Module, name: str) -> None:
        self.found.modules[id(x)] = (x, name)
        self._holds(type(x), name)
        for parts in upstream.slots_of(x):
            for key, part in parts.items() if parts else ():
                self.visit(part, f"{name}.{key}", True)
        self._attributes(x, name, True)
        if isinstance(x, torch.jit.ScriptModule):
            self._scripted(x, name)

    def _scripted(self, x: torch.jit.ScriptModule, name: str) -> None:
        """The attributes of a compiled module, which hands out copies of all but tensors."""
        self.found.comparable = False
        for key, is_parameter, holder in upstream.scripted_attributes(x):
            get, value = partial(holder.getattr, key), holder.getattr(key)
            self.visit(value, f"{name}.{key}", True)
            if not is_parameter:
                self.found.places.append((get, partial(holder.setattr, key), value))
        for key, module in x.named_children():
            self.visit(module, f"{name}.{key}", True)

    def _function(self, x: FunctionType, owned: bool) -> None:
        for part in self._holder(x)[1:]:
            self.visit(part, f"{x.__name__}'s default", owned)
        for key, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                get = partial(getattr, cell, "cell_contents")
                self._place(get, partial(setattr, cell, "cell_contents"), key, owned)
        if (x.__module__ or "").partition(".")[0] in (*_FOREIGN, "gradtools"):
            return
        self._attributes(x, x.__name__, owned)
        self._names.update(_names(x.__code__))
        for key in _names(x.__code__):
            self._name(x.__globals__, key, key, owned)

    def _name(self, space: dict[str, Any], key: str, name: str, owned: bool) -> None:
        """What a global means, if anything."""
        self._place(partial(getitem, space, key), partial(setitem, space, key), name, owned)

    def _object(self, x: Any, name: str, owned: bool) -> None:
        if _package(type(x)) in _FOREIGN or getattr(type(x), "never_changes", False):
            return
        self._holds(type(x), name)
        for kind in type(x).__mro__:
            own = "__slots__" in vars(kind) and _package(kind) not in _STANDARD  # none of C's
            slots = vars(kind).items() if own else ()
            for key, slot in slots:
                if isinstance(slot, MemberDescriptorType):
                    get, put = partial(slot.__get__, x), partial(slot.__set__, x)
                    self._place(get, put, f"{name}.{key}", owned)
        self._attributes(x, name, owned, unset=True)

    def _holds(self, x: Any, name: str) -> None:
        """A module of Python's, or a class with those that it inherits from."""
        for kind in x.__mro__ if isinstance(x, type) else (x,):
            if id(kind) in self._holders or _package(kind) in _STANDARD or _is_installed(kind):
                continue
            self._holders[id(kind)] = kind, name
            if isinstance(kind, type):
                self._holder(vars(kind))

    def _part(self, holder: Any, key: str, name: str) -> None:
        """Functions that code names are walked; of the rest what it says is put back."""
        part = vars(holder)[key]
        part = getattr(part, "fget", None) or getattr(part, "__func__", part)
        if isinstance(part, FunctionType):
            self.visit(part, key, False)
        elif isinstance(holder, ModuleType):
            self._name(vars(holder), key, name, False)
        elif not hasattr(type(part), "__get__"):
            get = partial(getitem, vars(holder), key)
            self._place(get, partial(setattr, holder, key), name, False)


def _generator(x: Any) -> tuple[Get, Put] | None:
    """How a generator of random numbers is read and set."""
    if isinstance(x, torch.Generator):
        return x.get_state, x.set_state
    if isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        return x.getstate, x.setstate
    if isinstance(x, np.random.RandomState):
        return partial(x.get_state, legacy=False), x.set_state
    if isinstance(x, np.random.Generator):
        bits = x.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that a function's code, and what is in it, may read."""
    inside = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return tuple({*code.co_names, *(name for names in inside for name in names)})


def _is_installed(x: Any) -> bool:
    """Whether it is a module of a library, whose own state verification has to see."""
    return isinstance(x, ModuleType) and is_installed(x)


def _package(kind: Any) -> str:
    """The package of a class, or of a module."""
    name = kind.__module__ if isinstance(kind, type) else kind.__name__
    return str(name).partition(".")[0]


def _nbytes(x: Tensor) -> int:
    """The bytes of a tensor's entries, those of a sparse tensor's that it stores."""
    if x.layout is torch.sparse_coo:
        return upstream.values_of(x).nbytes
    return x.nbytes if x.layout is torch.strided else x.values().nbytes
