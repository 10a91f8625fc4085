"""The objects that a function can reach, and what each of them holds.

A walk from the function through closures, attributes, containers and the globals that its code
names. Every object is walked once; classes and modules of Python are walked by name, in the parts
that code reads. Whether every holder still holds the very same objects is quick to ask, so that
mostly the walk is spared.
"""

from __future__ import annotations

import array
import random
import sys
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from operator import attrgetter, getitem, is_, setitem
from types import (
    BuiltinMethodType,
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

from gradtools.errors import GradtoolsError
from gradtools.lines import is_installed
from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor

ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice}
    | {torch.dtype, torch.device, torch.Size, torch.layout, np.dtype}
)
_FOREIGN = ("torch", "numpy", "jax", "builtins", "collections", "weakref", "logging", "threading")
_STANDARD = frozenset({*_FOREIGN, *sys.stdlib_module_names, "gradtools"})
_ROUNDS = 4  # of code that names parts of classes, which are code again; verification sees the rest
_FIXED = frozenset(k for k, v in vars(torch.nn.Module()).items() if isinstance(v, dict | set))
_LARGE = 1 << 20  # bytes of an array that is not a module's: it is taken for data, and only watched
_EMPTY = object()


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
        puts: How what else there is holds one object: that is read, put back, and what it was.
    """

    roots: list[Any]
    kinds: set[str]
    modules: dict[int, tuple[torch.nn.Module, str]] = field(default_factory=dict)
    watched: list[tuple[Tensor, str]] = field(default_factory=list)
    owned: list[Tensor] = field(default_factory=list)
    generators: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = field(default_factory=list)
    maps: list[tuple[Any, dict[Any, Any]]] = field(default_factory=list)
    sequences: list[tuple[Any, list[Any]]] = field(default_factory=list)
    puts: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = field(default_factory=list)
    # What follows is only compared: whether tensors were differentiated; classes; functions;
    # containers that were empty.
    tracked: list[bool] = field(default_factory=list)
    classes: list[tuple[Any, list[Any]]] = field(default_factory=list)
    functions: list[tuple[FunctionType, tuple[Any, ...]]] = field(default_factory=list)
    empty: list[Any] = field(default_factory=list)
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

    def holders(self) -> list[Any]:
        """The objects to begin from, so that all that was taken is taken again."""
        held: list[Any] = [*self.roots]
        held += [module for module, _ in self.modules.values()]
        held += [_Contents(x) for x in self.owned]
        return held

    @cached_property
    def lasts(self) -> bool:
        """Whether the next call may find the same; else it is let go of, with the graphs in it.

        So are objects that were arguments, a batch of a class of its own for one.
        """
        again = all(isinstance(x, torch.nn.Module) for x in self.roots[1:])
        return again and all(x.grad_fn is None for x, _ in self.watched)

    @cached_property
    def _parts(self) -> tuple[Any, ...]:
        """The maps, flat: comparing them then takes no step of python's.

        Those with text for keys come first; equal text is as good as the same.
        """
        texts = lambda kept: set(map(type, kept)) <= {str}
        plain = [(x, kept) for x, kept in self.maps if type(x) is dict and texts(kept)]
        kept = [k for _, k in plain]
        return (
            [x for x, _ in plain],
            [*map(list, kept)],
            [*chain.from_iterable(k.values() for k in kept)],
            [(x, k) for x, k in self.maps if type(x) is not dict or not texts(k)],
        )

    def stands(self) -> bool:
        """Whether every holder holds the very objects that it held."""
        maps, keys, values, others = self._parts
        return (
            self.comparable
            and [*map(list, maps)] == keys
            and all(map(is_, chain.from_iterable(map(dict.values, maps)), values))
            and not any(self.empty)
            and [x.requires_grad for x, _ in self.watched] == self.tracked
            and all(_same_objects(_stored(x), kept) for x, kept in self.sequences)
            and all(get() is value for get, _, value in self.puts)
            and all(_same_items(x, kept) for x, kept in others)
            and all(all(map(is_, _PARTS(f), parts)) for f, parts in self.functions)
            and all(
                len(space) * 2 == len(kept) and all(map(is_, _flat_items(space), kept))
                for space, kept in self.classes
            )
        )

    def restore(self) -> None:
        """Has every holder hold again what it held."""
        for holder in self.empty:
            if len(holder):
                holder.clear()
        for holder, kept in self.maps:
            own = _container(holder)
            if any(a is not b for a, b in zip(own.__iter__(holder), kept, strict=False)):
                own.clear(holder)  # its order may count, too
            for key in [k for k in own.__iter__(holder) if k not in kept]:
                own.__delitem__(holder, key)
            for key, value in kept.items():
                if own.get(holder, key, _EMPTY) is not value:
                    own.__setitem__(holder, key, value)
        for holder, kept in self.sequences:
            if not _same_objects(_stored(holder), kept):
                own = _container(holder)
                own.clear(holder)
                (own.update if isinstance(holder, set) else own.extend)(holder, kept)
        for get, put, value in self.puts:
            if value is not _EMPTY and get() is not value:
                put(value)


_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")


_CONTAINERS = OrderedDict, dict, list, deque, set, tuple, frozenset


def _container(x: Any) -> Any:
    """The class that stores what x holds; its methods run no code of a user's subclass."""
    return next((kind for kind in type(x).__mro__ if kind in _CONTAINERS), type(x))


def _stored(x: Any) -> list[Any]:
    return [*_container(x).__iter__(x)]


def _stored_items(x: Any) -> dict[Any, Any]:
    return dict(_container(x).items(x))


def _same_objects(xs: Any, kept: Any) -> bool:
    return len(xs) == len(kept) and all(map(is_, xs, kept))


def _same_items(x: Any, kept: dict[Any, Any]) -> bool:
    found = _stored_items(x)
    return _same_objects(found, kept) and all(map(is_, found.values(), kept.values()))


def _flat_items(space: Any) -> Any:
    return chain(space, space.values())


def contents_of(cell: CellType) -> Any:
    """What a variable of a closure holds; a mark if nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _EMPTY


def walk(roots: list[Any], kinds: set[str]) -> Reached:
    """What can be reached from these. kinds: The types of devices that count besides."""
    return _Walk(roots, kinds).run()


@dataclass(frozen=True)
class _Contents:
    """Asks a walk for a tensor's contents."""

    tensor: Tensor


class _Walk:
    """Visits what can be reached, each object once."""

    def __init__(self, roots: list[Any], kinds: set[str]) -> None:
        self.found = Reached(roots, {*kinds})
        self._seen: dict[int, Any] = {}
        self._known = set[tuple[int, str]]()
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
        for rounds_left in reversed(range(_ROUNDS + 1)):
            while self._todo:
                x, name, owned = self._todo.pop()
                self._walk(x, name, owned)
            for holder, name in list(self._holders.values()) if rounds_left else ():
                self._named_parts(holder, name)
        return self.found

    def _walk(self, x: Any, name: str, owned: bool) -> None:
        if isinstance(x, Tensor):
            self._tensor(x, name, owned)
        elif isinstance(x, _Contents):
            self._seen[id(x.tensor)] = x.tensor
            self._contents(x.tensor)
            self._watch(x.tensor, name, owned)
        elif isinstance(x, torch.nn.Module):
            self._module(x, name)
        elif isinstance(x, dict):
            self._map(x, name, owned)
        elif isinstance(x, list | deque | set):
            self.found.sequences.append((x, _stored(x)))
            self._all(_stored(x), name, owned)
            self._attributes(x, name, owned)
        elif isinstance(x, tuple | frozenset):
            self._all(_stored(x), name, owned)
            self._attributes(x, name, owned)
        elif isinstance(x, FunctionType):
            self._function(x, owned)
        elif isinstance(x, BuiltinMethodType) and isinstance(x.__self__, Tensor):
            self.visit(x.__self__, name, owned)  # a method of a tensor's, as `h.matmul` is
        elif isinstance(x, MethodType):
            self.visit(x.__func__, name, owned)
            self.visit(x.__self__, name, owned)
        elif isinstance(x, ModuleType | type):
            self._holds(x, name)
        elif isinstance(x, ContextVar):
            self.found.puts.append((partial(_value_of, x), x.set, _value_of(x)))
            self.visit(_value_of(x), name, owned)
        elif isinstance(x, partial):
            for part in (x.func, x.args, x.keywords):
                self.visit(part, name, owned)
        elif isinstance(x, np.ndarray):
            if x.flags.writeable and (owned or x.nbytes <= _LARGE):
                self.found.generators.append((x.copy, partial(x.__setitem__, ...)))
                if x.dtype.hasobject:
                    self._all(x.flat, name, owned)
        elif isinstance(x, bytearray | array.array):
            whole = slice(None)
            self.found.generators.append((partial(getitem, x, whole), partial(setitem, x, whole)))
        elif not self._generator(x):
            self._object(x, name, owned)

    def _all(self, xs: Any, name: str, owned: bool) -> None:
        if not set(map(type, xs)) <= ATOMS:
            for k, x in enumerate(xs):
                self.visit(x, f"{name}[{k}]", owned)

    def _map(self, x: Any, name: str, owned: bool) -> None:
        items = _stored_items(x)
        self.found.maps.append((x, items))
        for key, value in items.items():
            if type(value) not in ATOMS:
                self.visit(value, f"{name}[{key!r}]", owned)
        self._attributes(x, name, owned)

    def _tensor(self, x: Tensor, name: str, owned: bool) -> None:
        if torch.nn.parameter.is_lazy(x):
            raise GradtoolsError(
                f"{name} has no shape yet (a lazy module), so what the result depends on "
                "cannot be noted. Call the module once on an example first."
            )
        self.found.kinds.add(x.device.type)
        constant = not x.requires_grad and not isinstance(x, torch.nn.Parameter)
        if constant and (owned or _nbytes(x) <= _LARGE):
            self._contents(x)
        self._watch(x, name, owned)

    def _watch(self, x: Tensor, name: str, owned: bool) -> None:
        if not x.is_inference():
            self.found.watched.append((x, name))
            self.found.tracked.append(x.requires_grad)
        self._attributes(x, name, owned)

    def _attributes(self, x: Any, name: str, owned: bool) -> None:
        """What was set on an object of another kind, as on a function or a tensor."""
        fields = getattr(x, "__dict__", None)
        if type(fields) is dict and fields:
            self.found.maps.append((fields, dict(fields)))
            for key, value in fields.items():
                self.visit(value, f"{name}.{key}", owned)

    def _contents(self, x: Tensor) -> None:
        if x.device.type == "meta" or upstream.is_wrapped(x):
            return
        self.found.owned.append(x)

    def _module(self, x: torch.nn.Module, name: str) -> None:
        self.found.modules[id(x)] = (x, name)
        self._holds(type(x), name)
        fields = vars(x)
        self.found.maps.append((fields, dict(fields)))
        for key, value in fields.items():
            if type(value) in ATOMS:
                continue
            if key in _FIXED and not value:
                self.found.empty.append(value)
                continue
            if key in upstream.SLOTS and isinstance(value, dict):
                self._seen[id(value)] = value
                self.found.maps.append((value, dict(value)))
                for k, part in value.items():
                    self.visit(part, f"{name}.{k}", True)
            else:
                self.visit(value, f"{name}.{key}", True)
        if isinstance(x, torch.jit.ScriptModule):
            self._scripted(x, name)

    def _scripted(self, x: torch.jit.ScriptModule, name: str) -> None:
        """The attributes of a compiled module, which hands out copies of all but tensors."""
        self.found.comparable = False
        for key, is_parameter, holder in upstream.scripted_attributes(x):
            value = holder.getattr(key)
            self.visit(value, f"{name}.{key}", True)
            if not is_parameter:
                get = partial(holder.getattr, key)
                self.found.puts.append((get, partial(holder.setattr, key), value))
        for key, module in x.named_children():
            self.visit(module, f"{name}.{key}", True)

    def _function(self, x: FunctionType, owned: bool) -> None:
        self.found.functions.append((x, _PARTS(x)))
        for key, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if id(cell) in self._seen:
                continue
            self._seen[id(cell)] = cell
            value = contents_of(cell)
            get, put = partial(contents_of, cell), partial(setattr, cell, "cell_contents")
            self.found.puts.append((get, put, value))
            self.visit(value, key, owned)
        self.visit(x.__defaults__, f"{x.__name__}'s default", owned)
        self.visit(x.__kwdefaults__, f"{x.__name__}'s default", owned)
        if (x.__module__ or "").partition(".")[0] in (*_FOREIGN, "gradtools"):
            return
        self._attributes(x, x.__name__, owned)
        self._names.update(_names(x.__code__))
        space = x.__globals__
        for key in _names(x.__code__):
            self._name(space, key, key, owned)

    def _name(self, space: dict[str, Any], key: str, name: str, owned: bool) -> None:
        """What a global means, if anything; functions and classes are not put back."""
        value = space.get(key, _EMPTY)
        is_state = not callable(value) or isinstance(value, torch.nn.Module)
        put = partial(setitem, space, key) if is_state else _left
        self.found.puts.append((partial(space.get, key, _EMPTY), put, value))
        if value is not _EMPTY:
            self.visit(value, name, owned)

    def _generator(self, x: Any) -> bool:
        if isinstance(x, random.SystemRandom):
            return True
        if isinstance(x, torch.Generator):
            self.found.generators.append((x.get_state, x.set_state))
        elif isinstance(x, random.Random):
            self.found.generators.append((x.getstate, x.setstate))
        elif isinstance(x, np.random.RandomState):
            get = partial(x.get_state, legacy=False)
            self.found.generators.append((get, x.set_state))
        elif isinstance(x, np.random.Generator):
            bits = x.bit_generator
            get, put = partial(getattr, bits, "state"), partial(setattr, bits, "state")
            self.found.generators.append((get, put))
        else:
            return False
        return True

    def _object(self, x: Any, name: str, owned: bool) -> None:
        foreign = _package(type(x)) in _FOREIGN and not isinstance(x, UserDict | UserList)
        if foreign or getattr(type(x), "never_changes", False):
            return
        self._holds(type(x), name)
        for kind in type(x).__mro__:
            if "__slots__" not in vars(kind) or _package(kind) in _STANDARD:
                continue
            for key, slot in vars(kind).items():
                if isinstance(slot, MemberDescriptorType):
                    get = partial(getattr, x, key, _EMPTY)
                    value = get()
                    self.found.puts.append((get, partial(slot.__set__, x), value))
                    if value is not _EMPTY:
                        self.visit(value, f"{name}.{key}", owned)
        fields = getattr(x, "__dict__", None)
        if type(fields) is dict:
            self.found.maps.append((fields, dict(fields)))
            for key, value in fields.items():
                self.visit(value, f"{name}.{key}", owned)

    def _holds(self, x: Any, name: str) -> None:
        """A module of python's, or a class with those that it inherits from."""
        kinds = x.__mro__ if isinstance(x, type) else (x,)
        for kind in kinds:
            if id(kind) in self._holders or _package(kind) in _STANDARD or _is_installed(kind):
                continue
            self._holders[id(kind)] = kind, name
            if isinstance(kind, type):
                self.found.classes.append((vars(kind), [*_flat_items(vars(kind))]))

    def _named_parts(self, holder: Any, name: str) -> None:
        """Functions that code names are walked; of the rest what it says is put back."""
        for key in self._names.intersection(vars(holder)):
            if (id(holder), key) in self._known:
                continue
            self._known.add((id(holder), key))
            part = vars(holder)[key]
            if isinstance(part, property | staticmethod | classmethod):
                part = part.fget if isinstance(part, property) else part.__func__
            if isinstance(part, FunctionType):
                self.visit(part, key, False)
                wrapped = getattr(part, "__wrapped__", part)
                self._names.update(_names(getattr(wrapped, "__code__", part.__code__)))
            elif isinstance(part, ModuleType | type):
                self.visit(part, f"{name}.{key}", False)
            elif isinstance(holder, ModuleType):
                self._name(vars(holder), key, f"{name}.{key}", False)
            elif not hasattr(type(part), "__get__"):
                get = partial(vars(holder).get, key, _EMPTY)
                self.found.puts.append((get, partial(_set_in_class, holder, key), part))
                self.visit(part, f"{name}.{key}", False)


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


def _value_of(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return _EMPTY


def _left(value: Any) -> None:
    """Leaves a place as it stands."""


def _set_in_class(kind: type, key: str, value: Any) -> None:
    if vars(kind).get(key) is not value:
        setattr(kind, key, value)


def _nbytes(x: Tensor) -> int:
    """The bytes of a tensor's entries, those of a sparse tensor's that it stores."""
    if x.layout is torch.sparse_coo:
        return upstream.values_of(x).nbytes
    return x.nbytes if x.layout is torch.strided else x.values().nbytes
