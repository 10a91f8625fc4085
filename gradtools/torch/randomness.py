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
    """The states of random generators, each with a hashable value for comparisons."""

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
        now = {s: state if _stands(s, state) else _state(s) for s, state in self.states.items()}
        moved = any(now[s] is not state for s, state in self.states.items())
        return Randomness(now) if moved else self

    def advanced_to(self, later: Randomness) -> Randomness:
        """The states of those generators only that differ in later states."""
        if later is self:
            return Randomness({})
        pairs = self.states.items()
        return Randomness({s: state for s, state in pairs if later.states[s] is not state})

    def advanced(self) -> Randomness:
        """The states of those generators only that have advanced since."""
        return self.advanced_to(self.current())

    def restore(self) -> None:
        for stream, (state, key) in self.states.items():
            if stream == PYTHON:
                random.setstate(state)
            elif isinstance(stream, str):
                _numpy().set_state(state)
                _latest_of_numpy[0] = state, key
            elif isinstance(stream, torch.Generator):
                stream.set_state(state)
            elif stream.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(stream).set_rng_state(state, stream)

    def is_unchanged(self) -> bool:
        """Whether the generators still have these states."""
        return not self.advanced()


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


def _numpy_bits() -> Any:
    """The bit generator of `numpy.random`, which a program may replace."""
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


@cache
def _numpy() -> Any:
    """The global generator of `numpy.random`, which is imported lazily."""
    return np.random.get_state.__self__  # type: ignore[attr-defined]


# NumPy's state when it was read last: reading all of it takes longer than a small layer.
_latest_of_numpy: list[tuple[Any, Any]] = [({}, ())]


def _numpy_stands(known: tuple[Any, Any]) -> bool:
    """Whether NumPy's stream is known to have this state, by the generator's words alone."""
    state, key = known
    if state.get("bit_generator") != "MT19937" or state["has_gauss"]:
        return False
    return type(_numpy_bits()) is np.random.MT19937 and bool(_words_of_numpy() == key[-1])


def _state(stream: Stream) -> tuple[Any, Any]:
    """A generator's state, and a hashable value that is equal for equal states."""
    if stream == PYTHON:
        state: Any = random.getstate()
        return state, state
    if isinstance(stream, str):
        if _numpy_stands(_latest_of_numpy[0]):
            return _latest_of_numpy[0]
        state = _numpy().get_state(legacy=False)
        bits = _bits_of(state)
        is_twister = state["bit_generator"] == "MT19937"
        _latest_of_numpy[0] = known = state, (*bits, _words_of_numpy()) if is_twister else bits
        return known
    if isinstance(stream, torch.Generator):
        state = stream.get_state()
        return state, bytes(state.numpy())
    if stream.type == "cpu":
        state = torch.default_generator.get_state()
    else:
        state = torch.get_device_module(stream).get_rng_state(stream)
    return state, ctypes.string_at(state.data_ptr(), state.numel())  # works under transforms


def _stands(stream: Stream, state: tuple[Any, Any]) -> bool:
    """Whether a generator still has this state."""
    if stream == NUMPY and _numpy_stands(state):
        return True
    if stream == PYTHON:  # a draw moves the position, or makes other words; two draws may share one
        _, words, gauss = random.getstate()
        _, known, before = state[0]
        return gauss == before and words[-1] == known[-1] and words[:2] == known[:2]
    return bool(_state(stream)[1] == state[1])


def _words_of_numpy() -> bytes:
    """The 624 words and the position of NumPy's Mersenne Twister."""
    return ctypes.string_at(_numpy_bits().ctypes.state_address, 625 * 4)


def _bits_of(state: Any) -> Any:
    """A hashable form of a state: NumPy's is a dict of arrays and numbers, Python's a tuple."""
    if isinstance(state, dict):
        return tuple([_bits_of(x) for x in state.values()])
    return state.tobytes() if isinstance(state, np.ndarray) else state
