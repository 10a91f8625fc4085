"""Stores the state that a recomputation restores: random streams, autocast, module buffers.

Once per call, `Held` finds the modules and tensors in a function's closure, and the function itself
if it is a module. `RunState` is a snapshot of the state. Snapshots share copies of buffers that
have not changed. Other state is not restored.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from gradtools.function_variables import cells_of, parts_of
from gradtools.integrations import integration
from gradtools.torch import _upstream as upstream
from gradtools.torch.function_modes import PlainKernels, plain_kernels_are_on
from gradtools.torch.functorch_wrappers import PLAIN

Tensor = torch.Tensor
Slots = dict[str, Any]
# A source of random numbers: a device (which represents its default generator), the name of
# Python's or NumPy's generator, or a `torch.Generator`.
Stream = torch.device | str | torch.Generator
PYTHON, NUMPY, CPU = "Python's random stream", "NumPy's random stream", torch.default_generator


# --- random streams ------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Randomness:
    """The states of random generators. Each state has a key, and equal states have equal keys."""

    states: dict[Stream, tuple[Any, Any]]

    @classmethod
    def of(cls, streams: Iterable[Stream]) -> Randomness:
        return cls({stream: _state(stream) for stream in (CPU, *streams)})

    @classmethod
    def now(cls, xs: Sequence[Tensor]) -> Randomness | None:
        """Reads the generator states of the CPU and xs' devices. Returns None while compiling."""
        if torch.compiler.is_dynamo_compiling() or upstream.TracingContext.try_get() is not None:
            return None
        return cls.of({x.device for x in xs if x.device.type not in ("cpu", "meta")})

    @classmethod
    def everywhere(
        cls, kinds: Iterable[str], generators: Iterable[torch.Generator] = ()
    ) -> Randomness:
        """Reads the generator states of Python, NumPy and PyTorch (CPU and device types `kinds`).

        generators: Additional generators, found in a module or a closure.
        """
        others = sorted(set(kinds) - {"cpu", "meta"})
        counts = [(kind, torch.get_device_module(kind).device_count()) for kind in others]
        devices = [torch.device(kind, i) for kind, count in counts for i in range(count)]
        return cls.of([*devices, PYTHON, NUMPY, *generators])

    def seeded(self, seed: int) -> Randomness:
        """Returns the states that the generators of the same devices have after seeding.

        New generators are seeded, since some devices do not expose the default generator.
        """
        devices = [(s, s) if isinstance(s, torch.device) else (CPU, "cpu") for s in self.states]
        made = [(s, torch.Generator(device).manual_seed(seed)) for s, device in devices]
        return Randomness({s: (generator.get_state(), b"") for s, generator in made})

    def current(self) -> Randomness:
        """Returns the current states of the same generators, or self if no state has changed."""
        moved = {s: now for s, (_, key) in self.states.items() if (now := _state(s))[1] != key}
        return Randomness({**self.states, **moved}) if moved else self

    def advanced_to(self, later: Randomness) -> Randomness:
        """Returns a copy that contains only the generators whose states differ in `later`."""
        pairs = self.states.items()
        return Randomness({s: state for s, state in pairs if later.states[s] is not state})

    def restore(self) -> None:
        for stream, (state, _) in self.states.items():
            if isinstance(stream, torch.Generator):
                stream.set_state(state)
            elif isinstance(stream, torch.device):
                torch.get_device_module(stream).set_rng_state(state, stream)
            else:
                random.setstate(state) if stream == PYTHON else np.random.set_state(state)  # noqa: NPY002
                _latest[stream] = state, _words(stream)


@contextmanager
def restored(randomness: Randomness | None) -> Iterator[None]:
    """Context manager that sets the given states and restores the previous states on exit.

    Does nothing if `randomness` is None.
    """
    if randomness is None:
        yield
        return
    current = randomness.current()
    try:
        randomness.restore()
        yield
    finally:
        current.restore()


def _state(stream: Stream) -> tuple[Any, Any]:
    """Returns the state of a generator and its key. Equal states have equal keys."""
    if isinstance(stream, str):
        state, words = _latest.get(stream, (None, b""))
        if not words or words != _words(stream) or (stream == NUMPY and state["has_gauss"]):
            get = random.getstate if stream == PYTHON else partial(np.random.get_state, False)
            state = get()
            _latest[stream] = state, _words(stream)
        return state, id(state)
    if isinstance(stream, torch.Generator):
        state = stream.get_state()
    else:
        state = torch.get_device_module(stream).get_rng_state(stream)
    return state, ctypes.string_at(state.data_ptr(), state.numel())  # works under transforms


# The latest states of Python's and NumPy's generators, and the bytes of the generators' memory.
# Copying a state takes longer than evaluating a small layer, so a state is copied only if its
# memory has changed.
_latest: dict[str, tuple[Any, Any]] = {}
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_HEAD, _SIZE = object.__basicsize__, random.Random.__mro__[1].__basicsize__


def _words(stream: str) -> Any:
    """Reads the memory of a Mersenne Twister generator. Returns b"" for NumPy's other generators.

    For Python, the result also contains the cached second number of a Gaussian pair. NumPy stores
    this number only in the state.
    """
    if stream == PYTHON:
        return ctypes.string_at(id(_PYTHON) + _HEAD, _SIZE - _HEAD), _PYTHON.gauss_next
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is not np.random.MT19937:
        return b""
    return ctypes.string_at(bits.ctypes.state_address, 625 * 4)


# --- the modules and tensors of a function -------------------------------------------------------


class Held:
    """The modules, tensors and generators among the objects `roots` and in their closures.

    Attributes:
        modules: The modules and their submodules.
        tensors: The tensors that are found in closures.
        generators: The random generators that are found in modules and closures.
        parameters: The parameters of all modules.
        kinds: The device types whose random streams f may draw from.
        buffers: Pairs of a buffer dictionary and its module, for all modules that have buffers.
        began: The number of autograd nodes that this thread created before this object.
    """

    def __init__(self, roots: Sequence[Any], kinds: Iterable[str] = ()) -> None:
        self.modules, self.tensors = list[nn.Module](), list[Tensor]()
        self.generators, todo, seen = list[torch.Generator](), list(roots), set[int]()
        while todo:
            x = todo.pop()
            if id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, nn.Module):
                self.modules.append(x)
                todo += upstream.slots_of(x)[2].values()
                if torch.Generator in map(type, vars(x).values()):
                    todo += [y for y in vars(x).values() if type(y) is torch.Generator]
            elif isinstance(x, Tensor):
                self.tensors.append(x)
            elif isinstance(x, torch.Generator):
                self.generators.append(x)
            else:
                todo += _parts(x)
        slots = [(*upstream.slots_of(m)[:2], m) for m in self.modules]
        self.buffers: list[tuple[Slots, nn.Module]] = [(b, m) for _, b, m in slots if b]
        self.buffers += _of_keras(self.modules)
        self._first = [(own, dict(own)) for own, _, _ in slots if own]
        self.parameters = [x for own, _ in self._first for x in own.values() if x is not None]
        self.kinds = {"cpu", *kinds, *(x.device.type for x in self.parameters)} - {"meta"}
        self.began = upstream.nodes_made()

    def versions(self) -> int:
        """Returns the total number of in-place changes of the parameters."""
        lazy = nn.parameter.is_lazy
        plain = [x for x in self.parameters if not (lazy(x) or x.is_inference())]
        return sum(map(upstream.version_of, plain))

    def reset_parameters(self) -> list[tuple[Slots, Slots]]:
        """Restores the original parameters of modules, and returns the replaced parameters.

        A module may have other parameters after a `functional_call` has ended.
        """
        changed = list[tuple[Slots, Slots]]()
        for own, first in self._first:
            if len(own) == len(first) and all(map(is_, own.values(), first.values())):
                continue
            kinds = {*map(type, own.values()), *map(type, first.values())}
            if own.keys() == first.keys() and kinds <= {*PLAIN, type(None)}:  # no FSDP2 shards
                changed.append((own, dict(own)))
                own.update(first)
        return changed


def _of_keras(modules: Sequence[nn.Module]) -> list[tuple[Slots, nn.Module]]:
    """Returns the statistics and seeds of Keras layers, which Keras stores as parameters."""
    keras = integration("keras")
    layers: list[Any] = [m for m in modules if keras is not None and keras.is_keras(m)]
    found = {str(id(v)): v.value for layer in layers for v in layer.non_trainable_variables}
    small = {key: x for key, x in found.items() if x.numel() <= _LARGE}  # no frozen weights
    return [(small, layers[0])] if small else []


def _parts(x: Any) -> Iterable[Any]:
    if type(x) is MethodType:
        return [x.__self__, x.__func__]
    if type(x) is not FunctionType:
        return parts_of(x)
    return [*cells_of(x).values(), getattr(x, "__wrapped__", None)]


# --- snapshots of the state ----------------------------------------------------------------------


@dataclass(eq=False)
class RunState:
    """A snapshot of the random streams that f may draw from and the buffers of its modules.

    copies: For each buffer, a tuple of the buffer, its copy, its version, and the module's training
        flag.
    """

    held: Held
    streams: Randomness
    slots: list[Slots]  # each module's buffers
    copies: list[tuple[Tensor, Tensor, int, bool]]
    casts: _Casts

    @classmethod
    def now(cls, held: Held, before: RunState | None = None) -> RunState:
        """Takes a snapshot.

        before: An earlier snapshot; copies of buffers that have not changed are shared.
        """
        if upstream.peek_interpreter_stack() is not None:
            with upstream.temporarily_clear_interpreter_stack():
                return cls.now(held, before)
        known = before if before is not None and before.held is held else None
        if known is not None and known.streams.states:
            streams, casts = known.streams.current(), known.casts
            if streams is known.streams and not held.buffers:
                return known
        else:
            streams, casts = Randomness.everywhere(held.kinds, held.generators), _Casts(held.kinds)
        slots = [dict(own) for own, _ in held.buffers]
        entries = {id(entry[0]): entry for entry in before.copies} if before is not None else {}
        copies = []
        for own, (_, module) in zip(slots, held.buffers, strict=True):
            for b in own.values():
                if b is not None:
                    entry = entries.get(id(b))
                    copy = entry[1] if entry and _same(*entry) else b.detach().clone()
                    copies.append((b, copy, _version(b), module.training))
        return cls(held, streams, slots, copies, casts)

    def again(self) -> RunState:
        """Takes a new snapshot of the same streams and modules."""
        return RunState.now(self.held, self)

    def until(self, later: RunState) -> RunState:
        """Returns a copy that contains only the streams that differ in the snapshot `later`."""
        return replace(self, streams=self.streams.advanced_to(later.streams))

    def rerun(self, fun: Callable[[Any], Any], xs: Any) -> Any:
        """Evaluates `fun(xs)` from this state, and restores the current state afterwards."""
        now = self.again() if self.streams.states or self.slots else None
        changed, casts = self.held.reset_parameters(), self.casts
        try:
            if now is not None:
                self.restore()
            if not (casts.on or casts.plain or upstream.is_any_autocast_enabled()):
                return fun(xs)
            with casts.again():
                return fun(xs)
        finally:
            for own, others in changed:
                own.update(others)
            if now is not None:
                now.restore()

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
            if _version(buffer) != version:  # graphs that saved the buffer remain valid
                upstream.set_version_counters((buffer,), (version,))
        return self.streams.restore()


_LARGE = 1 << 16


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else upstream.version_of(buffer)


def _same(buffer: Tensor, copy: Tensor, version: int, training: bool) -> bool:
    """Returns whether a buffer still has the contents of the copy.

    Version counters detect changes, except for normalization statistics in training, which kernels
    update without incrementing version counters. Small buffers on the CPU are therefore compared by
    value. On other devices, a comparison would wait for the device, so buffers of modules in
    training count as changed.
    """
    same = _version(buffer) == version and not buffer.is_inference()
    if type(copy) is not Tensor:  # fake tensors have no values
        return same
    if buffer.device.type != "cpu" or buffer.layout is not torch.strided:
        return same and not training
    return same if same and buffer.numel() > _LARGE else torch.equal(buffer, copy)


class _Casts:
    """Stores the autocast settings and whether `PlainKernels` is active, to restore them later."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.plain, self.on = plain_kernels_are_on(), upstream.is_any_autocast_enabled()
        self._cached, get = torch.is_autocast_cache_enabled(), torch.get_autocast_dtype
        enabled = torch.is_autocast_enabled
        self._first: list[Any] = [
            (k, enabled(k), get(k)) if self.on else (k, False, None) for k in sorted(kinds)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context manager that applies the stored settings."""
        torch.clear_autocast_cache()
        with ExitStack() as inside:
            if self.plain and not plain_kernels_are_on():
                inside.enter_context(PlainKernels())
            for kind, on, dtype in self._first:
                cast = torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=self._cached)
                inside.enter_context(cast)
            yield
        torch.clear_autocast_cache()
