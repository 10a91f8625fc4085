"""Snapshot and restore of all that a function's result depends on besides its arguments.

A snapshot holds where the random streams stand and what can change behind a function. That is
found by a walk from the function through closures, attributes and containers, the classes that the
user wrote, and the globals that code of the user's names, also in other modules of Python's. Every
object is walked once. What a library keeps for itself, and what C holds, is for
`replaying/consistency.py` to see. A tensor's contents are copied only where they belong to a module
or are few; of others it is noticed if they changed.

Snapshots of one function follow each other, and mostly nothing changed in between. So a snapshot
is taken from an earlier one where it can: if every holder still holds the very same objects, the
walk is spared, and contents whose bits are the same are shared.
"""

from __future__ import annotations

import array
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from operator import getitem, is_, setitem
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

from gradtools.code_origin import USER, whose
from gradtools.errors import GradtoolsError
from gradtools.function_variables import names_in
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.randomness import Randomness

Tensor = torch.Tensor
left_to_python(__name__)
Get = Callable[[], Any]
Put = Callable[[Any], Any]

ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice}
    | {torch.dtype, torch.device, torch.Size, torch.layout, np.dtype}
)
_FOREIGN = ("torch", "numpy", "jax", "builtins", "weakref", "logging", "threading")
_STANDARD = frozenset({*_FOREIGN, *sys.stdlib_module_names, "gradtools"})
_LARGE = 1 << 20  # bytes of an array that is not a module's: it is taken for data, and only watched
_CONTAINERS = OrderedDict, dict, list, deque, set, tuple, frozenset
_UNBOUND = object()  # what a place holds that holds nothing yet


@dataclass(eq=False)
class Snapshot:
    """What can change behind a function, as it stood.

    Attributes:
        streams: The random streams of the process; None if the function draws from none.
        reached: The objects that were reached, and what they held.
        versions: Those of the tensors that are watched.
    """

    streams: Randomness | None
    reached: Reached
    versions: list[int]
    _contents: list[Tensor]
    _states: list[Any]

    @classmethod
    def of(
        cls, roots: Iterable[Any], tensors: Iterable[Tensor], like: Snapshot | None = None
    ) -> Snapshot:
        """What stands behind `roots` now.

        tensors: Those whose devices' random streams count, besides those that are found.
        like: An earlier one with all its streams, which is shared as far as nothing changed since.
        """
        roots = [x for x in roots if type(x) not in ATOMS]
        kinds = {x.device.type for x in tensors}
        if like is not None and like.reached.starts_from(roots, kinds) and like.reached.stands():
            return like._taken_again()
        reached = _Walk(roots, kinds).run()
        contents = [x.detach().clone() for x in reached.owned]
        states = [get() for get, _ in reached.generators]
        versions = reached.versions()
        return cls(Randomness.everywhere(reached.kinds), reached, versions, contents, states)

    def now(self) -> Snapshot:
        """A snapshot of the same objects as they are now; this one if nothing changed."""
        start = self if self.reached.stands() else replace(self, reached=self.reached.now())
        return start._taken_again()

    def watched_now(self) -> list[tuple[Tensor, str]]:
        return _Walk(self.reached.roots, self.reached.kinds).run().watched

    def _taken_again(self) -> Snapshot:
        reached = self.reached
        versions = reached.versions()
        changed = changed_contents(reached.owned, self._contents)
        contents, states = self._contents, [get() for get, _ in reached.generators]
        if any(changed):
            triples = zip(reached.owned, contents, changed, strict=True)
            contents = [x.detach().clone() if c else old for x, old, c in triples]
        if versions == self.versions:
            versions = self.versions
        streams = self.streams and self.streams.again()
        pairs = (contents, self._contents), (streams, self.streams), (versions, self.versions)
        if not states and all(new is old for new, old in pairs):
            return self
        return Snapshot(streams, reached, versions, contents, states)

    def settled(self) -> Snapshot:
        """For after the first run: without the random streams that it drew nothing from."""
        return replace(self, streams=(self.streams and self.streams.used()) or None)

    def restore(self) -> None:
        reached = self.reached
        if not reached.stands():
            reached.restore()
        changed = changed_contents(reached.owned, self._contents)
        for tensor, contents, differs in zip(reached.owned, self._contents, changed, strict=True):
            if differs:
                _put_back(tensor, contents)
        for (_, put), state in zip(reached.generators, self._states, strict=True):
            put(state)
        self._restore_versions()
        if self.streams is not None:
            self.streams.restore()

    def _restore_versions(self) -> None:
        """Of those that hold again what they held, so that a graph which saved them is good."""
        if self.reached.versions() == self.versions:
            return
        pairs = zip(self.reached.watched, self.versions, strict=True)
        moved = [(x, version) for (x, _), version in pairs if upstream.version_of(x) != version]
        held = {id(x) for x in self.reached.owned}
        if own := [pair for pair in moved if id(pair[0]) in held]:
            upstream.set_version_counters(*zip(*own, strict=True))

    def changed(self, parameters: bool) -> list[str]:
        """The names of tensors that were changed in place since, and cannot be put back."""
        reached = self.reached
        if reached.versions() == self.versions:
            return []
        held = {id(x) for x in reached.owned}
        return [
            name
            for (x, name), version in zip(reached.watched, self.versions, strict=True)
            if upstream.version_of(x) != version
            and id(x) not in held
            and (parameters or not x.requires_grad)
        ]

    def name_of(self, wanted: Callable[[Tensor], bool]) -> str | None:
        return next((name for x, name in self.reached.watched if wanted(x)), None)


# --- what is reached ---------------------------------------------------------------------------


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
        holders: Other containers, functions and classes, and what they held.
        places: All else that holds one object: how it is read, how it is written, what it held.
        comparable: Whether what is read is the same object each time.
        lasts: Whether the next call may find the same; else it is let go of, with the graphs in
            it. So are objects that were arguments, a batch of a class of its own for one.
        tensors: The watched tensors.
        counted: Those whose contents count, and of which PyTorch counts the changes.
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
    lasts: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    counted: list[Tensor] = field(default_factory=list)

    def starts_from(self, roots: list[Any], kinds: set[str]) -> bool:
        """Whether a walk from these would be this one, if nothing changed."""
        same = len(roots) == len(self.roots) and all(map(is_, roots, self.roots))
        return same and kinds <= self.kinds

    def versions(self) -> list[int]:
        return [*map(upstream.version_of, self.tensors)]

    def counted_versions(self) -> list[int]:
        """How often each buffer was changed."""
        return [*map(upstream.version_of, self.counted)]

    @cached_property
    def _flat(self) -> tuple[list[Any], ...]:
        """The maps as lists, to be compared without a step of Python's for each."""
        values = [v for _, held in self.maps for v in held.values()]
        return [x for x, _ in self.maps], [list(held) for _, held in self.maps], values

    def stands(self) -> bool:
        """Whether everything holds the very objects that it held; text may be equal."""
        maps, keys, values = self._flat
        return (
            self.comparable
            and not any(self.empty)
            and [*map(list, maps)] == keys
            and all(map(is_, chain.from_iterable(map(dict.values, maps)), values))
            and (not self.holders or all(_same(_entries(x), kept) for x, kept in self.holders))
            and (not self.places or all(_got(get) is value for get, _, value in self.places))
        )

    def now(self) -> Reached:
        result = copy(self)
        vars(result).pop("_flat", None)
        result.maps = [(x, dict(x)) for x, _ in self.maps]
        filled = [(x, ()) for x in self.empty if x]
        result.holders = [(x, _entries(x)) for x, _ in (*self.holders, *filled)]
        result.places = [(get, put, _got(get)) for get, put, _ in self.places]
        return result

    def restore(self) -> None:
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
    if isinstance(x, dict | type):
        items = _items(x)
        return (*items, *items.values())
    return (*_kind_of(x).__iter__(x),)


def _items(x: Any) -> dict[Any, Any]:
    """What a dictionary or a class holds, at one moment: another thread may write to it."""
    if isinstance(x, type):
        return vars(x).copy()
    return dict.copy(x) if type(x) is dict else dict(_kind_of(x).items(x))


def _refill(x: Any, entries: tuple[Any, ...]) -> None:
    half = len(entries) // 2
    if isinstance(x, type):
        _refill_class(x, dict(zip(entries[:half], entries[half:], strict=True)))
    elif isinstance(x, dict):
        _refill_map(x, dict(zip(entries[:half], entries[half:], strict=True)))
    elif not isinstance(x, FunctionType):  # which are only compared
        own = _kind_of(x)
        own.clear(x)
        (own.update if isinstance(x, set) else own.extend)(x, entries)


def _refill_map(x: Any, kept: dict[Any, Any]) -> None:
    """Writes only the entries that differ: another thread may read the others."""
    own, now = _kind_of(x), _items(x)
    if any(a is not b for a, b in zip(now, kept, strict=False)):
        own.clear(x)  # its order may count, too
        now = {}
    for key in now.keys() - kept.keys():
        with suppress(KeyError):  # another thread did so
            own.__delitem__(x, key)
    for key, value in kept.items():
        if own.get(x, key, _UNBOUND) is not value:
            own.__setitem__(x, key, value)


def _refill_class(x: type, kept: dict[str, Any]) -> None:
    """Not the names that Python itself writes."""
    for key in [key for key in _items(x) if key not in kept and not key.startswith("__")]:
        delattr(x, key)
    for key, value in kept.items():
        if vars(x).get(key, _UNBOUND) is not value and not hasattr(type, key):
            setattr(x, key, value)


def _same(xs: tuple[Any, ...], kept: tuple[Any, ...]) -> bool:
    return len(xs) == len(kept) and all(map(is_, xs, kept))


# --- the walk ---------------------------------------------------------------------------------


class _Walk:
    """Visits what can be reached, each object once.

    kinds: The types of devices that count besides.
    """

    def __init__(self, roots: list[Any], kinds: set[str]) -> None:
        self.reached = Reached(roots, {*kinds})
        self._seen: dict[int, Any] = {}
        self._read: set[tuple[int, str]] = set()  # the globals that code names
        self._todo: list[tuple[Any, str, bool]] = []
        for root in roots:
            self.visit(root, "f", False)

    def visit(self, x: Any, name: str, owned: bool) -> None:
        """Notes what is to be walked. owned: whether it belongs to a module."""
        if type(x) not in ATOMS and id(x) not in self._seen:
            self._seen[id(x)] = x
            self._todo.append((x, name, owned))

    def run(self) -> Reached:
        while self._todo:
            self._walk(*self._todo.pop())
        reached = self.reached
        reached.tensors = [x for x, _ in reached.watched]
        reached.counted = [x for x in reached.owned if not x.is_inference()]
        again = all(isinstance(x, torch.nn.Module) for x in reached.roots[1:])
        reached.lasts = again and all(x.grad_fn is None for x in reached.tensors)
        return reached

    def _place(self, get: Get, put: Put, *visit: Any) -> None:
        value = _got(get)
        self.reached.places.append((get, put, value))
        if value is not _UNBOUND:
            self.visit(value, *visit)

    def _holder(self, x: Any) -> tuple[Any, ...]:
        entries = _entries(x)
        self.reached.holders.append((x, entries))
        return entries

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
        elif isinstance(x, type):
            self._class(x, name)
        elif isinstance(x, ModuleType):
            pass  # the parts of it that code names
        elif isinstance(x, ContextVar):
            self._place(x.get, x.set, name, owned)
        elif isinstance(x, np.ndarray):
            if x.flags.writeable and (owned or x.nbytes <= _LARGE):
                self.reached.generators.append((x.copy, partial(x.__setitem__, ...)))
        elif isinstance(x, bytearray | array.array):
            whole = slice(None)
            self.reached.generators.append((partial(getitem, x, whole), partial(setitem, x, whole)))
        elif (generator := _generator(x)) is not None:
            self.reached.generators.append(generator)
            self._attributes(x, name, owned)
        else:
            self._object(x, name, owned)

    def _container(self, x: Any, name: str, owned: bool) -> None:
        if isinstance(x, dict):
            items = _items(x)
            if type(x) is dict and set(map(type, items)) <= {str}:
                self.reached.maps.append((x, items))
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
            held = dict(fields)
            self.reached.maps.append((fields, held))
            for key, value in held.items():
                kind = type(value)
                if kind in _CONTAINERS and not value:
                    self.reached.empty.append(value)
                elif kind not in ATOMS:
                    self.visit(value, f"{name}.{key}", owned)

    def _tensor(self, x: Tensor, name: str, owned: bool) -> None:
        if torch.nn.parameter.is_lazy(x):
            raise GradtoolsError(
                f"{name} has no shape yet (a lazy module), so what the result depends on "
                "cannot be noted. Call the module once on an example first."
            )
        self.reached.kinds.add(x.device.type)
        constant = not x.requires_grad and not isinstance(x, torch.nn.Parameter)
        shown = x.device.type != "meta" and not upstream.is_wrapped(x)
        if constant and shown and (owned or _nbytes(x) <= _LARGE):
            self.reached.owned.append(x)
        if not x.is_inference():
            self.reached.watched.append((x, name))
        self._attributes(x, name, owned)

    def _module(self, x: torch.nn.Module, name: str) -> None:
        self.reached.modules[id(x)] = (x, name)
        self.visit(type(x), type(x).__name__, False)
        for parts in upstream.slots_of(x):
            for key, part in [*parts.items()] if parts else ():
                self.visit(part, f"{name}.{key}", True)
        self._attributes(x, name, True)
        if isinstance(x, torch.jit.ScriptModule):
            self._scripted(x, name)

    def _scripted(self, x: torch.jit.ScriptModule, name: str) -> None:
        """The attributes of a compiled module, which hands out copies of all but tensors."""
        self.reached.comparable = False
        for key, is_parameter, holder in upstream.scripted_attributes(x):
            get, value = partial(holder.getattr, key), holder.getattr(key)
            self.visit(value, f"{name}.{key}", True)
            if not is_parameter:
                self.reached.places.append((get, partial(holder.setattr, key), value))
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
        if (names := _names(x.__code__)) is not None:
            self._attributes(x, x.__name__, owned)
            held = [vars(m) for cell in x.__closure__ or () if _is_module(m := contents_of(cell))]
            for space in (x.__globals__, *held):
                self._globals(space, names, owned)

    def _globals(self, space: dict[str, Any], names: frozenset[str], owned: bool) -> None:
        """What code means by these names, in a module and in those that it names there."""
        for key in names.intersection(space):
            if (id(space), key) not in self._read:
                self._read.add((id(space), key))
                self._place(partial(getitem, space, key), partial(setitem, space, key), key, owned)
                if _is_module(space[key]):
                    self._globals(vars(space[key]), names, owned)

    def _object(self, x: Any, name: str, owned: bool) -> None:
        if _package(type(x)) in _FOREIGN or getattr(type(x), "never_changes", False):
            return
        self.visit(type(x), type(x).__name__, False)
        for kind in type(x).__mro__:
            own = "__slots__" in vars(kind) and _package(kind) not in _STANDARD  # none of C's
            slots = _items(kind).items() if own else ()
            for key, slot in slots:
                if isinstance(slot, MemberDescriptorType):
                    get, put = partial(slot.__get__, x), partial(slot.__set__, x)
                    self._place(get, put, f"{name}.{key}", owned)
        self._attributes(x, name, owned, unset=True)

    def _class(self, x: type, name: str) -> None:
        """The attributes and the code of a class of the user's, and of those it inherits from."""
        for kind in x.__mro__:
            if whose(kind) == USER and (kind is x or id(kind) not in self._seen):
                self._seen[id(kind)] = kind
                self._holder(kind)
                for key, part in _items(kind).items():
                    part = getattr(part, "fget", None) or getattr(part, "__func__", part)
                    if isinstance(part, FunctionType) or not hasattr(type(part), "__get__"):
                        self.visit(part, f"{name}.{key}", False)


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
def _names(code: CodeType) -> frozenset[str] | None:
    """The names in code of the user's; None for other code."""
    return frozenset(names_in(code)) if whose(code) == USER else None


def _is_module(x: Any) -> bool:
    return isinstance(x, ModuleType) and whose(x) == USER


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _nbytes(x: Tensor) -> int:
    """The bytes of a tensor's entries, those of a sparse tensor's that it stores."""
    if x.layout is torch.sparse_coo:
        return upstream.values_of(x).nbytes
    return x.nbytes if x.layout is torch.strided else x.values().nbytes


# --- tensors' contents --------------------------------------------------------------------------


def _put_back(tensor: Tensor, contents: Tensor) -> None:
    """Has a tensor hold again what it held.

    The version counts changes that a graph must know of; this is none, for the contents are what
    they were or will be again before anything else reads them.
    """
    counted = not tensor.is_inference()
    uncounted = upstream.version_counter_kept(tensor) if counted else torch.inference_mode()
    with torch.no_grad(), uncounted:
        if tensor.shape != contents.shape:
            tensor.resize_(contents.shape)
        if tensor.layout is torch.strided and 0 in tensor.stride():
            once = tuple([slice(None if stride else 1) for stride in tensor.stride()])
            tensor, contents = tensor[once], contents[once]
        tensor.copy_(contents)


def changed_contents(tensors: list[Tensor], contents: list[Tensor]) -> list[bool]:
    """Whether tensors' contents are other bits than these copies; asked once for each device."""
    if not tensors or upstream.peek_interpreter_stack() is not None:
        return [True] * len(tensors)  # nothing can be asked of numbers in a transform
    differing: list[Any] = [_differs(x, c) for x, c in zip(tensors, contents, strict=True)]
    for device in {x.device for x in differing if isinstance(x, Tensor)}:
        which = [k for k, x in enumerate(differing) if isinstance(x, Tensor) and x.device == device]
        for k, differs in zip(
            which, torch.stack([differing[k] for k in which]).tolist(), strict=True
        ):
            differing[k] = differs
    return differing


def _differs(x: Tensor, copy: Tensor) -> bool | Tensor:
    """On an accelerator the answer stays there, for it to be waited for once."""
    plain = type(x) in _PLAIN and x.layout is torch.strided and not (x.is_conj() or x.is_neg())
    alike = x.shape == copy.shape and x.dtype == copy.dtype and x.device == copy.device
    if not (plain and alike) or x.is_quantized:
        return True
    a, b = _bits(x.detach()), _bits(copy)
    if x.device.type == "cpu":
        return not torch.equal(a, b)
    return a.ne(b).any()


_PLAIN = (Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers, in which NaN is itself and -0.0 is not 0.0."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(_INTEGERS[x.itemsize]) if x.is_floating_point() else x
