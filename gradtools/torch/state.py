"""What a recomputation puts back: random streams, autocast, and the buffers of modules.

`Held` finds what a function is or closes over, once for each call. `RunState` is the state at one
time; an unchanged buffer is copied once for all of them. Nothing else is searched or put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gradtools.torch import _upstream as upstream
from gradtools.torch.function_modes import PlainKernels, plain_kernels_are_on
from gradtools.torch.randomness import Randomness

Tensor = torch.Tensor
Slots = dict[str, Any]
_PLAIN = (Tensor, nn.Parameter)


class Held:
    """The modules, tensors and generators that functions are, or close over.

    Attributes:
        modules: The modules and their submodules.
        tensors: The tensors in closures.
        parameters: Those of the modules.
        kinds: The types of devices whose random streams f may draw from.
        buffers: The buffers of each module that has any, with the module.
        began: How many nodes of autograd's graph this thread had made.
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
        own = [x for m in self.modules for x in vars(m).values() if type(x) is torch.Generator]
        self._generators = [*own, *generators.values()]
        slots = [upstream.slots_of(m) for m in self.modules]
        pairs = zip(slots, self.modules, strict=True)
        self.buffers: list[tuple[Slots, nn.Module]] = [(b, m) for (_, b, _), m in pairs if b]
        self._first = [(own, dict(own)) for own, _, _ in slots if own]
        self.parameters = [x for own, _ in self._first for x in own.values() if x is not None]
        self.kinds = {"cpu", *kinds, *(x.device.type for x in self.parameters)} - {"meta"}
        self.began = upstream.nodes_made()

    def versions(self) -> int:
        """How often the parameters were changed in place, all together."""
        lazy = nn.parameter.is_lazy
        plain = [x for x in self.parameters if not (lazy(x) or x.is_inference())]
        return sum(map(upstream.version_of, plain))

    def streams(self, known: Randomness | None = None) -> Randomness:
        """The current states of the random streams that f may draw from."""
        return known.current() if known else Randomness.everywhere(self.kinds, self._generators)

    def reset_parameters(self) -> list[tuple[Slots, Slots]]:
        """Puts the first parameters back into modules that hold others now.

        So it is after a `functional_call` has ended. Returns what the modules held.
        """
        changed = list[tuple[Slots, Slots]]()
        for own, first in self._first:
            if len(own) == len(first) and all(map(is_, own.values(), first.values())):
                continue
            kinds = {*map(type, own.values()), *map(type, first.values())}
            if own.keys() == first.keys() and kinds <= {*_PLAIN, type(None)}:  # no shards of FSDP2
                changed.append((own, dict(own)))
                own.update(first)
        return changed


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

    held: Held
    streams: Randomness
    slots: list[Slots]  # each module's buffers
    copies: list[tuple[Tensor, Tensor, int, bool]]  # of each buffer; its version; see `_same`

    @classmethod
    def now(cls, held: Held, before: RunState | None = None) -> RunState:
        """The current state. before: An earlier one, which shares what did not change since."""
        if upstream.peek_interpreter_stack() is not None:
            with upstream.temporarily_clear_interpreter_stack():
                return cls.now(held, before)
        streams = held.streams(before.streams if before and before.held is held else None)
        slots = [dict(own) for own, _ in held.buffers]
        known = {id(entry[0]): entry for entry in before.copies} if before else {}
        copies = []
        for own, (_, module) in zip(slots, held.buffers, strict=True):
            for b in own.values():
                if b is not None:
                    entry = known.get(id(b))
                    copy = entry[1] if entry and _same(*entry) else b.detach().clone()
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


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else upstream.version_of(buffer)


def _same(buffer: Tensor, copy: Tensor, version: int, training: bool) -> bool:
    """Whether a buffer still has these contents.

    Versions say so, but for the statistics of normalizations in training: their kernels increment
    none, so small buffers are compared, without waiting for an accelerator.
    """
    same = _version(buffer) == version and not buffer.is_inference()
    if type(copy) is not Tensor:  # fake: without numbers
        return same
    if buffer.device.type != "cpu" or buffer.layout is not torch.strided:
        return same and not training
    return same if same and buffer.numel() > _LARGE else torch.equal(buffer, copy)


class Casts:
    """Autocast, and gradtools' own choice of kernels, as they were when this object was made."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._plain, self.on = plain_kernels_are_on(), upstream.is_any_autocast_enabled()
        self._cached, get = torch.is_autocast_cache_enabled(), torch.get_autocast_dtype
        enabled = torch.is_autocast_enabled
        self._first: list[Any] = [
            (k, enabled(k), get(k)) if self.on else (k, False, None) for k in sorted(kinds)
        ]

    def matter(self) -> bool:
        """Whether `again` may change anything."""
        return self.on or self._plain or upstream.is_any_autocast_enabled()

    def again(self) -> ExitStack:
        """A context with the first settings."""
        inside = ExitStack()
        if self._plain and not plain_kernels_are_on():
            inside.enter_context(PlainKernels())
        for kind, on, dtype in self._first:
            inside.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=self._cached)
            )
        return inside
