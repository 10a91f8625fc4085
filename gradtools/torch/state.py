"""What a recomputation puts back: random streams, autocast, and buffers of modules.

`Held` finds what a function is or closes over, once for each call. `RunState` is the state at one
time; an unchanged buffer is copied once for all of them. Nothing else is searched or put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gradtools.torch import _upstream as upstream
from gradtools.torch.function_modes import PlainKernels, plain_kernels_are_on
from gradtools.torch.randomness import Randomness

Tensor = torch.Tensor


_PLAIN = (Tensor, nn.Parameter)


class Held:
    """The modules, tensors and generators that functions are, or close over.

    Attributes:
        modules: The modules and their submodules.
        tensors: The tensors in closures.
        kinds: The types of devices whose random streams f may draw from.
    """

    def __init__(self, roots: Sequence[Any], kinds: Iterable[str] = ()) -> None:
        modules, tensors = dict[int, nn.Module](), dict[int, Tensor]()
        generators = dict[int, torch.Generator]()
        todo, seen = list(roots), set[int]()
        while todo:
            x = todo.pop()
            if id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, nn.Module):
                modules[id(x)] = x
                todo += upstream.slots_of(x)[2].values()
            elif isinstance(x, Tensor):
                tensors[id(x)] = x
            elif isinstance(x, torch.Generator):
                generators[id(x)] = x
            else:
                todo += _parts(x)
        self.modules, self.tensors = list(modules.values()), list(tensors.values())
        self._slots = [upstream.slots_of(m)[:2] for m in self.modules]
        own = [x for m in self.modules for x in vars(m).values() if type(x) is torch.Generator]
        self._generators = [*own, *generators.values()]
        pairs = zip(self._slots, self.modules, strict=True)
        self.buffers = [(own, m) for (_, own), m in pairs if own]
        self._parameters = [own for own, _ in self._slots if own]
        self._own = [x for own in self._parameters for x in own.values() if x is not None]
        devices = {x.device.type for x in self._own}
        self.kinds = {"cpu", *kinds, *devices} - {"meta"}

    def streams(self) -> Randomness:
        """The current states of the random streams that f may draw from."""
        return Randomness.everywhere(self.kinds, self._generators)


class Watched(Held):
    """The same, with the modules' parameters, which a caller may exchange or change in place."""

    def __init__(self, roots: Sequence[Any], kinds: Iterable[str] = ()) -> None:
        super().__init__(roots, kinds)
        self._first = [dict(own) for own in self._parameters]
        self._versioned = [x for x in self._own if _has_version(x)]
        self.began = upstream.nodes_made()  # how many nodes this thread had made
        every = chain(self.modules, self.tensors, self._generators, *map(dict.values, self._first))
        self._all = [*map(id, every), *sorted(self.kinds)]

    def place_of(self, x: Tensor) -> Callable[[], Any]:
        """A function that returns what is now in the place of x in its module; else x."""
        for own in chain.from_iterable(self._slots):
            for name, other in own.items():
                if other is x:
                    return partial(own.get, name)
        return lambda: x

    def is_like(self, other: Watched) -> bool:
        """Whether the other holds the same objects."""
        return self._all == other._all

    def parameters(self) -> list[Tensor]:
        return [x for own in self._parameters for x in own.values() if x is not None]

    def versions(self) -> int:
        """How often the parameters were changed in place, all together."""
        return sum(map(upstream.version_of, self._versioned))

    def moved(self) -> dict[int, tuple[Tensor, Tensor]]:
        """The parameters that are in other parameters' places now, by id, with the first ones.

        So it is after a `functional_call` has ended.
        """
        found = {}
        for own, was in zip(self._parameters, self._first, strict=True):
            if len(own) == len(was) and all(map(is_, own.values(), was.values())):
                continue
            for name, x in was.items():
                now = own.get(name)
                if now is not x and type(now) in _PLAIN and type(x) in _PLAIN:  # not FSDP2's shards
                    found[id(now)] = now, x
        return found


def _parts(x: Any) -> Iterable[Any]:
    kind = type(x)
    if kind is FunctionType:
        cells = [c.cell_contents for c in x.__closure__ or () if c != CellType()]
        wrapped = getattr(x, "__wrapped__", None)
        return cells if wrapped is None else [*cells, wrapped]
    if kind is MethodType:
        return [x.__self__, x.__func__]
    if kind is BuiltinMethodType:
        return [x.__self__]
    if isinstance(x, partial):
        return [x.func, *x.args, *x.keywords.values()]
    if kind in (list, tuple):  # no method of a subclass is run
        return x
    return x.values() if kind is dict else ()


@dataclass(eq=False)
class RunState:
    """The random streams that f may draw from, and the buffers of its modules, at one time."""

    held: Any  # a `Held`
    streams: Randomness
    slots: list[dict[str, Any]]  # each module's buffers
    copies: list[tuple[Tensor, Tensor, int, bool]]  # of each buffer; its version; see `_same`

    @classmethod
    def now(cls, held: Held, before: RunState | None = None) -> RunState:
        """The current state. before: An earlier one, which shares what did not change since."""
        if upstream.peek_interpreter_stack() is not None:
            with upstream.temporarily_clear_interpreter_stack():
                return cls.now(held, before)
        streams = held.streams() if before is None else before.streams.current()
        if not held.buffers:
            return cls(held, streams, [], [])
        slots = [dict(own) for own, _ in held.buffers]
        known = {} if before is None else {id(entry[0]): entry for entry in before.copies}
        copies = []
        for own, (_, module) in zip(slots, held.buffers, strict=True):
            for b in own.values():
                if b is not None:
                    entry = known.get(id(b))
                    same = entry is not None and _same(*entry)
                    copy = entry[1] if entry and same else b.detach().clone()
                    copies.append((b, copy, _version(b), module.training))
        return cls(held, streams, slots, copies)

    def __bool__(self) -> bool:
        """Whether there is anything to put back."""
        return bool(self.streams or self.slots)

    def again(self) -> RunState:
        """The current state of the same streams and modules."""
        return RunState.now(self.held, self)

    def until(self, later: RunState) -> RunState:
        """This state with those streams only that have advanced since."""
        return RunState(self.held, self.streams.advanced_to(later.streams), self.slots, self.copies)

    def restore(self) -> None:
        if upstream.peek_interpreter_stack() is not None:
            with upstream.temporarily_clear_interpreter_stack():
                return self.restore()
        for (own, _), was in zip(self.held.buffers, self.slots, strict=True):
            if len(own) != len(was) or not all(map(is_, own.values(), was.values())):
                own.clear()
                own.update(was)
        for buffer, copy, version, training in self.copies:
            if not _same(buffer, copy, version, training):
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.copy_(copy)
            if _version(buffer) != version:  # graphs that saved it remain valid
                upstream.set_version_counters((buffer,), (version,))
        return self.streams.restore()


_LARGE = 1 << 16


def _has_version(x: Tensor) -> bool:
    return (type(x) in _PLAIN or not nn.parameter.is_lazy(x)) and not x.is_inference()


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else upstream.version_of(buffer)


def _same(buffer: Tensor, copy: Tensor, version: int, training: bool) -> bool:
    """Whether a buffer still has these contents.

    Versions say so, but for the statistics of normalizations in training: their kernels increment
    none, so small buffers are compared, without waiting for an accelerator.
    """
    same = _version(buffer) == version
    plain = buffer.device.type == "cpu" and buffer.layout is torch.strided
    if type(copy) is not Tensor:  # fake: without numbers
        return same
    if buffer.is_inference():  # which has no version
        return plain and torch.equal(buffer, copy)
    if not plain:
        return same and not training
    return same if same and buffer.numel() > _LARGE else torch.equal(buffer, copy)


class Casts:
    """Autocast, and gradtools' own choice of kernels, as they were when this object was made."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._kinds = sorted(kinds)
        self._plain = plain_kernels_are_on()
        self._cached = torch.is_autocast_cache_enabled()
        self.on = upstream.is_any_autocast_enabled()
        self._first = self._now() if self.on else []

    def _now(self) -> list[tuple[str, bool, torch.dtype]]:
        get = torch.get_autocast_dtype
        return [(k, torch.is_autocast_enabled(k), get(k)) for k in self._kinds]

    def matter(self) -> bool:
        """Whether `again` may change anything."""
        return self.on or self._plain or upstream.is_any_autocast_enabled()

    def again(self) -> ExitStack:
        """A context with the first settings."""
        inside = ExitStack()
        if self._plain and not plain_kernels_are_on():
            inside.enter_context(PlainKernels())
        off: list[Any] = [(kind, False, None) for kind in self._kinds]
        for kind, on, dtype in self._first or off:
            inside.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=self._cached)
            )
        return inside
