"""All that a function's result depends on besides its arguments, so that it can be run again.

A snapshot holds where the random streams stand and what can change behind a function: the
buffers and attributes of modules, containers, closure variables and globals that it can reach,
generators. It is found by walking from the function. What is shared is walked once; a tensor's
contents are copied only where they belong to a module, for others it is noticed if they changed.

Snapshots of one function follow each other, and mostly nothing changed in between. So a snapshot
is taken from an earlier one where it can: if every holder still holds the very same objects, the
walk is spared, and contents whose bits are the same are shared.
"""

from __future__ import annotations

import array
import random
import sys
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from operator import attrgetter, getitem, is_
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
from torch._C._autograd import _unsafe_set_version_counter
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

from gradtools.errors import GradtoolsError
from gradtools.torch.randomness import Randomness

Tensor = torch.Tensor

_ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), range, slice}
    | {torch.dtype, torch.device, torch.Size, torch.layout, np.dtype}
)
_FOREIGN = ("torch", "numpy", "jax", "builtins", "collections", "weakref", "logging", "threading")
_STANDARD = frozenset({*_FOREIGN, *sys.stdlib_module_names, "gradtools"})
_ROUNDS = 4  # of code that names parts of classes, which are code again; verification sees the rest
_FIXED = frozenset(k for k, v in vars(torch.nn.Module()).items() if isinstance(v, dict | set))
_LARGE = 1 << 20  # bytes of an array that is not a module's: it is taken for data, and only watched


@dataclass(frozen=True)
class Snapshot:
    """What can change behind a function, as it stood.

    Attributes:
        streams: The random streams of the process.
        reached: The objects that were reached, and what they held.
        versions: Those of the tensors that are watched.
    """

    streams: Randomness
    reached: Reached
    versions: list[int]
    _contents: list[Tensor]
    _arrays: list[np.ndarray]
    _states: list[Any]

    @classmethod
    def of(
        cls, roots: Iterable[Any], tensors: Iterable[Tensor], like: Snapshot | None = None
    ) -> Snapshot:
        """What stands behind `roots` now.

        tensors: Those whose devices' random streams count, besides those that are found.
        like: An earlier one with all its streams, which is shared as far as nothing changed since.
        """
        roots = [x for x in roots if type(x) not in _ATOMS]
        kinds = {x.device.type for x in tensors}
        if like is not None and like.reached.starts_from(roots, kinds) and like.reached.stands():
            return like._taken_again(like.streams.again())
        return cls._walked(roots, kinds)

    @classmethod
    def _walked(cls, roots: list[Any], kinds: set[str]) -> Snapshot:
        reached = _Walk(roots, kinds).run()
        return cls(
            Randomness.everywhere(reached.kinds),
            reached,
            reached.versions(),
            [x.detach().clone() for x in reached.owned],
            [x.copy() for x in reached.arrays],
            [get() for get, _ in reached.generators],
        )

    def now(self) -> Snapshot:
        """What stands now behind all that was reached; this one where nothing changed."""
        if self.reached.stands():
            return self._taken_again(self.streams.again())
        return self._walked(self.reached.holders(), self.reached.kinds)

    def _taken_again(self, streams: Randomness) -> Snapshot:
        reached = self.reached
        versions, arrays = reached.versions(), self._arrays
        changed = _changed(reached.owned, self._contents)
        contents, states = self._contents, [get() for get, _ in reached.generators]
        if any(changed):
            triples = zip(reached.owned, contents, changed, strict=True)
            contents = [x.detach().clone() if c else old for x, old, c in triples]
        if not all(map(_same_array, reached.arrays, arrays)):
            arrays = [x.copy() for x in reached.arrays]
        if versions == self.versions:
            versions = self.versions
        same = contents is self._contents and arrays is self._arrays and not states
        if same and streams is self.streams and versions is self.versions:
            return self
        return Snapshot(streams, reached, versions, contents, arrays, states)

    def without_unused_streams(self) -> Snapshot:
        """The same after the function has run, less the streams that it drew nothing from."""
        versions, contents, arrays = self.versions, self._contents, self._arrays
        streams = self.streams.used()
        return Snapshot(streams, self.reached, versions, contents, arrays, self._states)

    def restore(self) -> None:
        """Puts everything back, bit for bit."""
        reached = self.reached
        if not reached.stands():
            reached.restore()
        changed = _changed(reached.owned, self._contents)
        for tensor, contents, differs in zip(reached.owned, self._contents, changed, strict=True):
            if differs:
                _put_back(tensor, contents)
        for x, copy in zip(reached.arrays, self._arrays, strict=True):
            x[...] = copy
        for (_, put), state in zip(reached.generators, self._states, strict=True):
            put(state)
        self._restore_versions()
        self.streams.restore()

    def _restore_versions(self) -> None:
        """Of those that hold again what they held, so that a graph which saved them is good."""
        pairs = zip(self.reached.watched, self.versions, strict=True)
        moved = [(x, version) for (x, _), version in pairs if x._version != version]
        if moved:
            held = {id(x) for x in self.reached.owned}
            _set_versions([(x, version) for x, version in moved if id(x) in held])

    def changed(self, parameters: bool) -> list[str]:
        """The names of tensors that were changed in place since, and cannot be put back."""
        reached = self.reached
        if reached.versions() == self.versions:
            return []
        held = {id(x) for x in reached.owned}
        return [
            name
            for (x, name), version in zip(reached.watched, self.versions, strict=True)
            if x._version != version and id(x) not in held and (parameters or not x.requires_grad)
        ]

    def name_of(self, wanted: Callable[[Tensor], bool]) -> str | None:
        """The name of a watched tensor."""
        return next((name for x, name in self.reached.watched if wanted(x)), None)


def _set_versions(pairs: list[tuple[Tensor, int]]) -> None:
    if pairs:
        tensors, versions = zip(*pairs, strict=True)
        _unsafe_set_version_counter(tensors, versions)


def _put_back(tensor: Tensor, contents: Tensor) -> None:
    """Has a tensor hold again what it held.

    The version counts changes that a graph must know of; this is none, for the contents are what
    they were or will be again before anything else reads them.
    """
    counted = not tensor.is_inference()
    uncounted = _unsafe_preserve_version_counter(tensor) if counted else torch.inference_mode()
    with torch.no_grad(), uncounted:
        if tensor.shape != contents.shape:
            tensor.resize_(contents.shape)
        if tensor.layout is torch.strided and 0 in tensor.stride():
            once = tuple([slice(None if stride else 1) for stride in tensor.stride()])
            tensor, contents = tensor[once], contents[once]
        tensor.copy_(contents)


def _changed(tensors: list[Tensor], contents: list[Tensor]) -> list[bool]:
    """Whether tensors' contents are other bits than these copies; asked once for each device."""
    if not tensors or torch._C._functorch.peek_interpreter_stack() is not None:
        return [True] * len(tensors)  # nothing can be asked of numbers in a transform
    asked: list[Any] = [_differs(x, c) for x, c in zip(tensors, contents, strict=True)]
    for device in {x.device for x in asked if isinstance(x, Tensor)}:
        which = [k for k, x in enumerate(asked) if isinstance(x, Tensor) and x.device == device]
        for k, differs in zip(which, torch.stack([asked[k] for k in which]).tolist(), strict=True):
            asked[k] = differs
    return asked


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


def _nbytes(x: Tensor) -> int:
    """The bytes of a tensor's entries, those of a sparse tensor's that it stores."""
    if x.layout is torch.sparse_coo:
        return x._values().nbytes
    return x.nbytes if x.layout is torch.strided else x.values().nbytes


def _same_array(x: np.ndarray, copy: np.ndarray) -> bool:
    return x.shape == copy.shape and x.dtype == copy.dtype and x.tobytes() == copy.tobytes()


# --- what is reached ----------------------------------------------------------------------

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
        arrays: NumPy's, whose contents count.
        generators: How each one's state is read and set.
    """

    roots: list[Any]
    kinds: set[str]
    modules: dict[int, tuple[torch.nn.Module, str]] = field(default_factory=dict)
    watched: list[tuple[Tensor, str]] = field(default_factory=list)
    owned: list[Tensor] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    generators: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = field(default_factory=list)
    maps: list[tuple[Any, dict[Any, Any]]] = field(default_factory=list)
    sequences: list[tuple[Any, list[Any]]] = field(default_factory=list)
    cells: list[tuple[CellType, Any]] = field(default_factory=list)
    puts: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = field(default_factory=list)
    # What follows is only compared: whether tensors were differentiated; the names that functions
    # read, and what they meant if anything; classes; functions; containers that were empty.
    tracked: list[bool] = field(default_factory=list)
    names: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
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
        return [x._version for x, _ in self.watched]

    def contents_versions(self) -> list[int]:
        """Those of the tensors whose contents count."""
        return [0 if x.is_inference() else x._version for x in self.owned]

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
            and all(_contents_of(cell) is value for cell, value in self.cells)
            and all(space.get(name, _EMPTY) is value for space, name, value in self.names)
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
        for space, name, value in self.names:
            if value is not _EMPTY and _is_state(value):
                space[name] = value
        for holder, kept in self.sequences:
            if not _same_objects(_stored(holder), kept):
                own = _container(holder)
                own.clear(holder)
                (own.update if isinstance(holder, set) else own.extend)(holder, kept)
        for cell, value in self.cells:
            if value is not _EMPTY:
                cell.cell_contents = value
        for _, put, value in self.puts:
            if value is not _EMPTY:
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


def _contents_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return _EMPTY


def _is_state(value: Any) -> bool:
    """Whether a global is put back: functions and classes are not."""
    return not callable(value) or isinstance(value, torch.nn.Module)


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
        if type(x) not in _ATOMS and id(x) not in self._seen:
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
                if x.dtype.hasobject:
                    self.found.generators.append((partial(_objects, x), partial(_refill, x)))
                    self._all(x.flat, name, owned)
                else:
                    self.found.arrays.append(x)
        elif isinstance(x, bytearray | array.array):
            self.found.generators.append((partial(getitem, x, slice(None)), partial(_refill, x)))
        elif not self._generator(x):
            self._object(x, name, owned)

    def _all(self, xs: Any, name: str, owned: bool) -> None:
        if not set(map(type, xs)) <= _ATOMS:
            for k, x in enumerate(xs):
                self.visit(x, f"{name}[{k}]", owned)

    def _map(self, x: Any, name: str, owned: bool) -> None:
        items = _stored_items(x)
        self.found.maps.append((x, items))
        for key, value in items.items():
            if type(value) not in _ATOMS:
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
        if x.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return
        self.found.owned.append(x)

    def _module(self, x: torch.nn.Module, name: str) -> None:
        self.found.modules[id(x)] = (x, name)
        self._holds(type(x), name)
        fields = vars(x)
        self.found.maps.append((fields, dict(fields)))
        for key, value in fields.items():
            if type(value) in _ATOMS:
                continue
            if key in _FIXED and not value:
                self.found.empty.append(value)
                continue
            if key in ("_modules", "_buffers", "_parameters") and isinstance(value, dict):
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
        for key, (_, is_parameter) in x._concrete_type.get_attributes().items():
            value = x._c.getattr(key)
            self.visit(value, f"{name}.{key}", True)
            if not is_parameter:
                get = partial(x._c.getattr, key)
                self.found.puts.append((get, partial(x._c.setattr, key), value))
        for key, module in x.named_children():
            self.visit(module, f"{name}.{key}", True)

    def _function(self, x: FunctionType, owned: bool) -> None:
        self.found.functions.append((x, _PARTS(x)))
        for key, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if id(cell) in self._seen:
                continue
            self._seen[id(cell)] = cell
            value = _contents_of(cell)
            self.found.cells.append((cell, value))
            self.visit(value, key, owned)
        self.visit(x.__defaults__, f"{x.__name__}'s default", owned)
        self.visit(x.__kwdefaults__, f"{x.__name__}'s default", owned)
        if (x.__module__ or "").partition(".")[0] in (*_FOREIGN, "gradtools"):
            return
        self._attributes(x, x.__name__, owned)
        self._names.update(_names(x.__code__))
        space = x.__globals__
        for key in _names(x.__code__):
            value = space.get(key, _EMPTY)
            self.found.names.append((space, key, value))
            if value is not _EMPTY:
                self.visit(value, key, owned)

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
                self.found.names.append((vars(holder), key, part))
                self.visit(part, f"{name}.{key}", False)
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
    return isinstance(x, ModuleType) and "-packages" in (getattr(x, "__file__", None) or "")


def _package(kind: Any) -> str:
    """The package of a class, or of a module."""
    name = kind.__module__ if isinstance(kind, type) else kind.__name__
    return str(name).partition(".")[0]


def _value_of(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return _EMPTY


def _objects(x: np.ndarray) -> list[Any]:
    return list(x.flat)


def _refill(x: Any, contents: Any) -> None:
    """Has an array hold these again."""
    if isinstance(x, np.ndarray):
        x[...] = np.array([*contents, None], object)[:-1].reshape(x.shape)
    else:
        x[:] = contents


def _set_in_class(kind: type, key: str, value: Any) -> None:
    if vars(kind).get(key) is not value:
        setattr(kind, key, value)
