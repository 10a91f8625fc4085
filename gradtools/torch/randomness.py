"""Saves and restores random generators: PyTorch's of all devices, NumPy's and Python's."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
# PyTorch's default generator of a device, one of the two below, or a generator.
Stream = torch.device | str | torch.Generator
PYTHON, NUMPY = "Python's random stream", "NumPy's random stream"


@dataclass(eq=False, repr=False)
class Randomness:
    """The states of random generators, each with a value that is equal for equal states."""

    states: dict[Stream, tuple[Any, Any]]

    @classmethod
    def now(cls, xs: Sequence[Tensor]) -> Randomness | None:
        """PyTorch's generators of these tensors' devices and the CPU; None while compiling."""
        if torch.compiler.is_dynamo_compiling() or upstream.TracingContext.try_get() is not None:
            return None
        devices = {torch.device("cpu"), *(x.device for x in xs)}
        return cls.of(d for d in devices if d.type != "meta")

    @classmethod
    def of(cls, streams: Iterable[Stream]) -> Randomness:
        return cls({stream: _state(stream) for stream in streams})

    @classmethod
    def everywhere(
        cls, kinds: Iterable[str], generators: Iterable[torch.Generator] = ()
    ) -> Randomness:
        """Python's, NumPy's, and PyTorch's generators of the CPU and all devices of these types.

        generators: Further ones, that a module or a closure holds.
        """
        devices = [torch.device("cpu")]
        for kind in sorted(set(kinds) - {"cpu", "meta"}):
            count = torch.get_device_module(kind).device_count()
            devices += [torch.device(kind, i) for i in range(count)]
        return cls.of([*devices, PYTHON, NUMPY, *generators])

    def __bool__(self) -> bool:
        """Whether it holds any state."""
        return bool(self.states)

    def seeded(self, seed: int) -> Randomness:
        """The states of PyTorch's generators of the same devices after seeding.

        Made by new generators, since not all devices expose their default generator.
        """
        devices = [d for d in self.states if isinstance(d, torch.device)]
        made = {d: torch.Generator(d).manual_seed(seed).get_state() for d in devices}
        return Randomness({d: (state, b"") for d, state in made.items()})

    def current(self) -> Randomness:
        """The current states of the same generators; self if nothing was drawn."""
        now = {stream: _state(stream) for stream in self.states}
        moved = [s for s, (_, key) in self.states.items() if now[s][1] != key]
        return Randomness({**self.states, **{s: now[s] for s in moved}}) if moved else self

    def advanced_to(self, later: Randomness) -> Randomness:
        """The states of those generators only that differ in later states."""
        pairs = self.states.items()
        return Randomness({s: state for s, state in pairs if later.states[s] is not state})

    def restore(self) -> None:
        for stream, (state, _) in self.states.items():
            if stream == PYTHON:
                random.setstate(state)
            elif isinstance(stream, str):
                _numpy().set_state(state)
                _latest_of_numpy[0] = state, _words_of_numpy()
            elif isinstance(stream, torch.Generator):
                stream.set_state(state)
            elif stream.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(stream).set_rng_state(state, stream)

    def is_unchanged(self) -> bool:
        """Whether the generators still have these states."""
        return self.current() is self


@contextmanager
def restored(randomness: Randomness | None) -> Iterator[None]:
    """Restores these states for the block, so that it repeats its draws; then the current ones.

    None: does nothing.
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


# --- the state of one generator ------------------------------------------------------------------


def _state(stream: Stream) -> tuple[Any, Any]:
    """A generator's state, and a value that is equal for equal states."""
    if stream == PYTHON:
        state: Any = random.getstate()
        return state, state
    if isinstance(stream, str):
        state = _state_of_numpy()
        return state, id(state)
    if isinstance(stream, torch.Generator):
        state = stream.get_state()
    elif stream.type == "cpu":
        state = torch.default_generator.get_state()
    else:
        state = torch.get_device_module(stream).get_rng_state(stream)
    return state, ctypes.string_at(state.data_ptr(), state.numel())  # works under transforms


# NumPy's state and words when they were read last: reading all takes longer than a small layer.
_latest_of_numpy: list[tuple[dict[str, Any], bytes]] = [({}, b"")]


def _state_of_numpy() -> dict[str, Any]:
    """The state of `numpy.random`: the same object if its words show that nothing was drawn."""
    state, words = _latest_of_numpy[0]
    if not words or words != _words_of_numpy() or state["has_gauss"]:
        state = _numpy().get_state(legacy=False)
        _latest_of_numpy[0] = state, _words_of_numpy()
    return state


@cache
def _numpy() -> Any:
    """The global generator of `numpy.random`, which is imported lazily."""
    return np.random.get_state.__self__  # type: ignore[attr-defined]


def _words_of_numpy() -> bytes:
    """The words and the position of NumPy's Mersenne Twister; empty for another generator."""
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is not np.random.MT19937:
        return b""
    return ctypes.string_at(bits.ctypes.state_address, 625 * 4)
