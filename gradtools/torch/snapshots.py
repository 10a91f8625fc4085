"""Snapshot and restore of the mutable state that a function can reach besides its arguments.

A snapshot holds the states of random generators, and the buffers and attributes of modules. Modules
are found by a search that starts from the function's closure, its defaults, and the globals that
user code names. Variables, plain containers, and attributes of objects and of the user's classes
that the search reaches are restored as well. Other state (slots, iterators, files) is left to
`replaying/consistency.py`, which detects its effects. A tensor's contents are copied only if it
belongs to a module or is small; for others changes are detected by version counters.

Mostly nothing changes between snapshots of one function. So a snapshot is derived from an earlier
one where possible: if all containers still hold the identical objects, the search is skipped, and
contents with equal bits are shared.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from operator import getitem, is_, setitem
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
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
_LARGE = 1 << 20  # bytes above which an array outside of modules counts as data: not copied
_CONTAINERS = OrderedDict, dict, list, deque, set, tuple, frozenset
_UNBOUND = object()  # the value of an unbound variable
_PLAIN = (Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class Snapshot:
    """The state behind a function at one time."""

    streams: Randomness | None  # of random generators; None if the function draws from none
    reached: Reached
    versions: list[int]  # of the watched tensors
    _contents: list[Tensor]  # copies of the owned tensors
    _states: list[Any]  # of the generators

    @classmethod
    def of(
        cls, roots: Iterable[Any], tensors: Iterable[Tensor], like: Snapshot | None = None
    ) -> Snapshot:
        """The current state that can be reached from `roots`.

        tensors: Further tensors, for the random generators of their devices.
        like: An earlier snapshot with all generators, which is shared as far as nothing changed.
        """
        roots = [x for x in roots if type(x) not in ATOMS]
        kinds = {x.device.type for x in tensors}
        if like is not None:
            known = like.reached
            if _same(roots, known.roots) and kinds <= known.kinds and known.is_unchanged():
                return like._retaken()
        reached = _Search(roots, kinds).run()
        contents = [x.detach().clone() for x in reached.owned]
        states = [get() for get, _ in reached.generators]
        versions = reached.versions()
        return cls(Randomness.everywhere(reached.kinds), reached, versions, contents, states)

    def now(self) -> Snapshot:
        """A snapshot of the same objects now; self if nothing changed."""
        same = self.reached.is_unchanged()
        return (self if same else replace(self, reached=self.reached.now()))._retaken()

    def watched_now(self) -> list[tuple[Tensor, str]]:
        return _Search(self.reached.roots, self.reached.kinds).run().watched

    def _retaken(self) -> Snapshot:
        reached = self.reached
        versions, states = reached.versions(), [get() for get, _ in reached.generators]
        changed = changed_contents(reached.owned, self._contents)
        streams = self.streams and self.streams.current()
        contents = self._contents
        if any(changed):
            triples = zip(reached.owned, contents, changed, strict=True)
            contents = [x.detach().clone() if c else old for x, old, c in triples]
        same = versions == self.versions and contents is self._contents
        if same and streams is self.streams and not states:
            return self
        return Snapshot(streams, reached, versions, contents, states)

    def without_unused_streams(self) -> Snapshot:
        """The snapshot without the generators that the function has not advanced since."""
        return replace(self, streams=(self.streams and self.streams.advanced()) or None)

    def restore(self) -> None:
        reached = self.reached
        if not reached.is_unchanged():
            reached.restore()
        changed = changed_contents(reached.owned, self._contents)
        for tensor, contents, differs in zip(reached.owned, self._contents, changed, strict=True):
            if differs:
                put_back(tensor, contents)
        for (_, put), state in zip(reached.generators, self._states, strict=True):
            put(state)
        # The version counters of restored tensors, so that graphs that saved them work.
        counters = [(x, version) for (x, _), version, is_owned in self._moved() if is_owned]
        if counters:
            upstream.set_version_counters(*zip(*counters, strict=True))
        if self.streams is not None:
            self.streams.restore()

    def changed(self, parameters: bool) -> list[str]:
        """The names of tensors that were changed in place since, and cannot be restored."""
        moved = [watched for watched, _, is_owned in self._moved() if not is_owned]
        return [name for x, name in moved if parameters or not x.requires_grad]

    def _moved(self) -> list[tuple[tuple[Tensor, str], int, bool]]:
        """The watched tensors with another version now, the version then, and whether owned."""
        reached = self.reached
        if reached.versions() == self.versions:
            return []
        owned, every = {*map(id, reached.owned)}, zip(reached.watched, self.versions, strict=True)
        moved = [(w, version) for w, version in every if upstream.version_of(w[0]) != version]
        return [(w, version, id(w[0]) in owned) for w, version in moved]

    def name_of(self, wanted: Callable[[Tensor], bool]) -> str | None:
        return next((name for x, name in self.reached.watched if wanted(x)), None)


# --- the reached objects -----------------------------------------------------------------------


@dataclass(eq=False)
class Reached:
    """The objects behind a function, and their contents at one time."""

    roots: list[Any]  # of the search
    kinds: set[str]  # the device types of reached tensors
    modules: dict[int, tuple[torch.nn.Module, str]] = field(default_factory=dict)  # with names
    functions: list[FunctionType] = field(default_factory=list)  # in user code
    watched: list[tuple[Tensor, str]] = field(default_factory=list)  # tensors, with their names
    owned: list[Tensor] = field(default_factory=list)  # whose contents are restored: buffers
    generators: list[tuple[Get, Put]] = field(default_factory=list)  # and NumPy arrays
    empty: list[Any] = field(default_factory=list)  # containers in attributes: modules have many
    # Dictionaries with string keys, such as `__dict__`, and copies of them.
    maps: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    # Other containers, and variables: getter, setter and contents.
    places: list[tuple[Get, Put, tuple[Any, ...]]] = field(default_factory=list)
    # Whether the next call may find the same objects, so that the snapshot is kept. It is not if
    # that would keep graphs or arguments alive.
    lasts: bool = False
    tensors: list[Tensor] = field(default_factory=list)  # the watched ones
    counted: list[Tensor] = field(default_factory=list)  # the owned ones with a version counter
    is_sharded: bool | None = None  # whether a module is one of FSDP2; None if not checked

    def versions(self) -> list[int]:
        return [*map(upstream.version_of, self.tensors)]

    def counted_versions(self) -> list[int]:
        """The version counters of the buffers."""
        return [*map(upstream.version_of, self.counted)]

    @cached_property
    def _flat(self) -> tuple[list[Any], ...]:
        """The maps as flat lists, which compare without a Python loop."""
        values = [v for _, held in self.maps for v in held.values()]
        return [x for x, _ in self.maps], [list(held) for _, held in self.maps], values

    def is_unchanged(self) -> bool:
        """Whether all containers hold the identical objects; keys need only be equal."""
        maps, keys, values = self._flat
        return (
            not any(self.empty)
            and [*map(list, maps)] == keys
            and all(map(is_, chain.from_iterable(map(dict.values, maps)), values))
            and all(_same(get(), held) for get, _, held in self.places)
        )

    def now(self) -> Reached:
        result = copy(self)
        vars(result).pop("_flat", None)
        result.maps = [(x, dict(x)) for x, _ in self.maps]
        known = [(get, put) for get, put, _ in self.places]
        filled = [_place(x) for x in self.empty if x]
        result.places = [(get, put, get()) for get, put in (*known, *filled)]
        return result

    def restore(self) -> None:
        for x in self.empty:
            if x:
                x.clear()
        for x, held in self.maps:
            _refill_map(x, held)
        for get, put, held in self.places:
            if not _same(get(), held):
                put(held)


def _same(xs: Sequence[Any], held: Sequence[Any]) -> bool:
    return len(xs) == len(held) and all(map(is_, xs, held))


# --- getters and setters of variables and containers, whose contents are tuples -------------------


def contents_of(cell: CellType) -> Any:
    """The contents of a closure's cell; `_UNBOUND` if it is empty."""
    return _entry(partial(getattr, cell, "cell_contents"))[0]


def _variable(read: Get, write: Put) -> tuple[Get, Put]:
    """The getter and setter of a variable that may be unbound."""
    return partial(_entry, read), lambda held: None if held[0] is _UNBOUND else write(held[0])


def _entry(read: Get) -> tuple[Any]:
    try:
        return (read(),)
    except (LookupError, ValueError, AttributeError):
        return (_UNBOUND,)


def _place(x: Any) -> tuple[Get, Put]:
    """The getter and setter of a container, by its builtin base: a subclass's code never runs."""
    kind = _kind_of(x)
    if isinstance(x, dict):
        return partial(_items, x), lambda held: _refill_map(x, _paired(held))

    def put(held: tuple[Any, ...]) -> None:
        kind.clear(x)
        (kind.update if kind is set else kind.extend)(x, held)

    return lambda: (*kind.__iter__(x),), put


def _kind_of(x: Any) -> Any:
    return next(kind for kind in type(x).__mro__ if kind in _CONTAINERS)


def _items(x: Any) -> tuple[Any, ...]:
    """The keys, then the values, read atomically: another thread may write to the dict."""
    items = vars(x).copy() if isinstance(x, type) else _copy(x)
    return (*items, *items.values())


def _copy(x: dict[Any, Any]) -> dict[Any, Any]:
    return dict.copy(x) if type(x) is dict else dict(_kind_of(x).items(x))


def _paired(held: tuple[Any, ...]) -> dict[Any, Any]:
    """The dict of `_items`."""
    half = len(held) // 2
    return dict(zip(held[:half], held[half:], strict=True))


def _refill_class(x: type, held: tuple[Any, ...]) -> None:
    """Restores a class's attributes except dunder names, which Python itself writes."""
    kept = _paired(held)
    for key in [key for key in vars(x).copy() if key not in kept and not key.startswith("__")]:
        delattr(x, key)
    for key, value in kept.items():
        if vars(x).get(key, _UNBOUND) is not value and not hasattr(type, key):
            setattr(x, key, value)


def _refill_map(x: dict[Any, Any], held: dict[Any, Any]) -> None:
    """Restores a dict by writing only the entries that differ: other threads may read the rest."""
    kind, now = _kind_of(x), _copy(x)
    if any(a is not b for a, b in zip(now, held, strict=False)):
        kind.clear(x)  # to restore the order as well
        now = {}
    for key in now.keys() - held.keys():
        with suppress(KeyError):  # another thread deleted it
            kind.__delitem__(x, key)
    for key, value in held.items():
        if kind.get(x, key, _UNBOUND) is not value:
            kind.__setitem__(x, key, value)


# --- the search ---------------------------------------------------------------------------------


class _Search:
    """Depth-first search through closures, modules, containers and plain objects.

    kinds: Further device types.
    """

    def __init__(self, roots: list[Any], kinds: set[str]) -> None:
        self.reached = Reached(roots, {*kinds})
        self._seen: dict[Any, Any] = {}
        self._todo: list[tuple[Any, str, bool]] = []
        for root in roots:
            self.visit(root, "f", False)

    def visit(self, x: Any, name: str, owned: bool) -> None:
        """Schedules an object. owned: Whether it belongs to a module."""
        if type(x) not in ATOMS and id(x) not in self._seen:
            self._seen[id(x)] = x
            self._todo.append((x, name, owned))

    def run(self) -> Reached:
        while self._todo:
            self._look(*self._todo.pop())
        reached = self.reached
        reached.tensors = [x for x, _ in reached.watched]
        reached.counted = [x for x in reached.owned if not x.is_inference()]
        again = all(isinstance(x, torch.nn.Module) for x in reached.roots[1:])
        reached.lasts = again and all(x.grad_fn is None for x in reached.tensors)
        return reached

    def _record(self, place: tuple[Get, Put]) -> tuple[Any, ...]:
        """Adds a place to `reached`; returns its contents."""
        contents: tuple[Any, ...] = place[0]()
        self.reached.places.append((*place, contents))
        return contents

    def _look(self, x: Any, name: str, owned: bool) -> None:
        if isinstance(x, Tensor):
            self._tensor(x, name, owned)
        elif isinstance(x, torch.nn.Module):
            self._module(x, name)
        elif isinstance(x, FunctionType):
            self._function(x, owned)
        elif isinstance(x, _CONTAINERS):
            self._container(x, name, owned)
        elif isinstance(x, BuiltinMethodType):
            # as `h.matmul`, `seen.append`, and a Function's `apply` from PyTorch 2.14 on
            if isinstance(x.__self__, (Tensor, type, *_CONTAINERS)):
                self.visit(x.__self__, name, owned)
        elif isinstance(x, partial):
            for part in (x.func, x.args, x.keywords):
                self.visit(part, name, owned)
        elif isinstance(x, MethodType):
            for part in (x.__func__, x.__self__):
                self.visit(part, name, owned)
        elif isinstance(x, np.ndarray):
            if x.flags.writeable and (owned or x.nbytes <= _LARGE):
                self.reached.generators.append((x.copy, partial(x.__setitem__, ...)))
        elif (generator := _generator(x)) is not None:
            self.reached.generators.append(generator)
            self._attributes(x, name, owned)
        elif isinstance(x, type):
            self._class(x, name)
        elif not isinstance(x, ModuleType):
            foreign = str(type(x).__module__).partition(".")[0] in _FOREIGN
            if not foreign and not getattr(type(x), "never_changes", False):
                self.visit(type(x), type(x).__name__, False)
                self._attributes(x, name, owned, unset=True)

    def _container(self, x: Any, name: str, owned: bool) -> None:
        if type(x) is dict and set(map(type, dict.copy(x))) <= {str}:
            items = dict.copy(x)
            self.reached.maps.append((x, items))
        elif isinstance(x, dict):
            items = _paired(self._record(_place(x)))
        else:
            kind, constant = _kind_of(x), isinstance(x, tuple | frozenset)
            items = dict(enumerate(kind.__iter__(x) if constant else self._record(_place(x))))
        for key, part in items.items():
            if type(part) not in ATOMS:
                self.visit(part, f"{name}[{key!r}]", owned)
        self._attributes(x, name, owned)

    def _attributes(self, x: Any, name: str, owned: bool, unset: bool = False) -> None:
        """The attributes of an object. unset: Whether to record an empty `__dict__` as well."""
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
        if constant and shown and (owned or nbytes_of(x) <= _LARGE):
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

    def _function(self, x: FunctionType, owned: bool) -> None:
        """The closure and defaults of a function; in user code also the globals that it names."""
        names = _names(x.__code__)
        for part in (x.__defaults__, x.__kwdefaults__):
            self.visit(part, f"{x.__name__}'s default", owned)
        for key, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                get = partial(getattr, cell, "cell_contents")
                self._variable(key, _variable(get, partial(setattr, cell, "cell_contents")), owned)
        if names is not None:
            self.reached.functions.append(x)
            self._attributes(x, x.__name__, owned)
            held = filter(_is_users_module, map(contents_of, x.__closure__ or ()))
            for space in (x.__globals__, *[vars(module) for module in held]):
                self._globals(space, names, owned)

    def _globals(self, space: dict[str, Any], names: frozenset[str], owned: bool) -> None:
        """The globals of these names in a module, and in the user's modules among them."""
        for key in names.intersection(space):
            if (id(space), key) not in self._seen:
                self._seen[id(space), key] = space
                place = _variable(partial(getitem, space, key), partial(setitem, space, key))
                self._variable(key, place, owned)
                if _is_users_module(space[key]):
                    self._globals(vars(space[key]), names, owned)

    def _variable(self, key: str, place: tuple[Get, Put], owned: bool) -> None:
        (value,) = self._record(place)
        if value is not _UNBOUND:
            self.visit(value, key, owned)

    def _class(self, x: type, name: str) -> None:
        """The attributes and methods of a user's class and of its bases."""
        for kind in x.__mro__:
            if whose(kind) == USER and (kind is x or id(kind) not in self._seen):
                self._seen[id(kind)] = kind
                held = self._record((partial(_items, kind), partial(_refill_class, kind)))
                for key, part in _paired(held).items():
                    part = getattr(part, "fget", None) or getattr(part, "__func__", part)
                    if isinstance(part, FunctionType) or not hasattr(type(part), "__get__"):
                        self.visit(part, f"{name}.{key}", False)


def _generator(x: Any) -> tuple[Get, Put] | None:
    """The getter and setter of a random generator's state; None for another object."""
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
    """The names in user code; None for other code."""
    return frozenset(names_in(code)) if whose(code) == USER else None


def _is_users_module(x: Any) -> bool:
    return isinstance(x, ModuleType) and whose(x) == USER


# --- copies of tensors' contents: compared bit for bit, and put back in place ---------------------


def put_back(tensor: Tensor, contents: Tensor) -> None:
    """Restores a tensor's contents without changing its version counter.

    Graphs that saved the tensor stay valid: nothing else reads it before it has its contents again.
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
    """Whether tensors differ bitwise from these copies."""
    if not tensors or upstream.peek_interpreter_stack() is not None:
        return [True] * len(tensors)  # values cannot be read under a transform
    return read_together([_differs(x, c) for x, c in zip(tensors, contents, strict=True)])


def read_together(flags: Sequence[bool | Tensor]) -> list[bool]:
    """The booleans, of which accelerators hold some: with one synchronization per device."""
    result: list[Any] = list(flags)
    for device in {x.device for x in flags if isinstance(x, Tensor)}:
        which = [k for k, x in enumerate(flags) if isinstance(x, Tensor) and x.device == device]
        numbers = torch.stack([result[k] for k in which]).tolist()
        for k, number in zip(which, numbers, strict=True):
            result[k] = number
    return result


def _differs(x: Tensor, copy: Tensor) -> bool | Tensor:
    """Whether x differs from a copy; a tensor on x's device if that is an accelerator."""
    plain = type(x) in _PLAIN and x.layout is torch.strided and not (x.is_conj() or x.is_neg())
    alike = x.shape == copy.shape and x.dtype == copy.dtype and x.device == copy.device
    if not (plain and alike) or x.is_quantized:
        return True
    a, b = _bits(x.detach()), _bits(copy)
    if x.device.type == "cpu":
        return not torch.equal(a, b)
    return a.ne(b).any()


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(_INTEGERS[x.itemsize]) if x.is_floating_point() else x


def is_other(x: Tensor, copy: Tensor) -> bool:
    """Whether x differs bitwise from an earlier copy; False if that cannot be read."""
    plain = type(x) is Tensor and x.device.type == "cpu" and not (x.is_conj() or x.is_neg())
    hidden = upstream.peek_interpreter_stack() is not None or upstream.is_traced_by_make_fx()
    return plain and not (hidden or x.is_quantized) and any(changed_contents([x], [copy]))


def nbytes_of(x: Tensor) -> int:
    """The bytes of a tensor's stored entries."""
    if x.layout is torch.sparse_coo:
        return upstream.values_of(x).nbytes
    return x.nbytes if x.layout is torch.strided else x.values().nbytes
