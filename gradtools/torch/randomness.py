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
Stream = torch.device | str  # PyTorch's on a device, or one of these two
PYTHON, NUMPY = "Python's random stream", "NumPy's random stream"


@dataclass(eq=False, repr=False)
class Randomness:
    """The states of random streams, and of each what tells it from another state."""

    states: dict[Stream, tuple[Any, Any]]

    @classmethod
    def now(cls, xs: Sequence[Tensor]) -> Randomness | None:
        """PyTorch's, for a function of these tensors; None in code that is being compiled."""
        if torch.compiler.is_dynamo_compiling() or upstream.TracingContext.try_get() is not None:
            return None
        devices = {torch.device("cpu"), *(x.device for x in xs)}
        return cls.of(d for d in devices if d.type != "meta")

    @classmethod
    def of(cls, streams: Iterable[Stream]) -> Randomness:
        return cls({stream: _state(stream) for stream in streams})

    @classmethod
    def everywhere(cls, kinds: Iterable[str]) -> Randomness:
        """Python's, NumPy's, and PyTorch's on the CPU and all devices of these kinds."""
        devices = [torch.device("cpu")]
        for kind in sorted(set(kinds) - {"cpu", "meta"}):
            count = torch.get_device_module(kind).device_count()
            devices += [torch.device(kind, i) for i in range(count)]
        return cls.of([*devices, PYTHON, NUMPY])

    def __bool__(self) -> bool:
        """Whether it holds any stream's state."""
        return bool(self.states)

    def seeded(self, seed: int) -> Randomness:
        """PyTorch's on the same devices, as a seed makes them.

        By new generators, which every kind of device has: not all give out the one they draw from.
        """
        made = {d: torch.Generator(d).manual_seed(seed).get_state() for d in self.states}
        return Randomness({d: (state, b"") for d, state in made.items()})

    def again(self) -> Randomness:
        """The same streams' states, where they stand now; itself, if nothing was drawn."""
        now = {stream: _state(stream) for stream in self.states}
        moved = any(now[stream][1] != bits for stream, (_, bits) in self.states.items())
        return Randomness(now) if moved else self

    def used(self) -> Randomness:
        """The same, less the streams of which nothing was drawn since."""
        pairs = self.states.items()
        return Randomness({s: state for s, state in pairs if state[1] != _state(s)[1]})

    def marks(self) -> dict[str, int]:
        """Where the streams stand, by their names: equal where they stand alike."""
        name = lambda s: s if isinstance(s, str) else f"PyTorch's random stream on {s}"
        return {name(stream): hash(_state(stream)[1]) for stream in self.states}

    def restore(self) -> None:
        for stream, (state, _) in self.states.items():
            _set_state(stream, state)

    def stands(self) -> bool:
        return not self.used()

    def stood(self, later: Randomness | None) -> bool:
        if later is None:
            return False
        return all(later.states[d][1] == bits for d, (_, bits) in self.states.items())


@contextmanager
def restored(randomness: Randomness | None) -> Iterator[None]:
    """What is evaluated again draws what it drew; then the generators go on from where they were.

    None: it drew nothing.
    """
    if randomness is None:
        yield
        return
    standing = randomness.again()
    try:
        randomness.restore()
        yield
    finally:
        standing.restore()


# --- one stream: its state, by the calls that its owner has for it -----------------------------


@cache
def _numpy() -> Any:
    """The generator behind `numpy.random`, which is imported when it is first asked for."""
    return np.random.get_state.__self__  # type: ignore[attr-defined]


def _state(stream: Stream) -> tuple[Any, Any]:
    """A stream's state, and what it is compared by, which has a hash."""
    if isinstance(stream, str):
        state: Any = random.getstate() if stream == PYTHON else _numpy().get_state(legacy=False)
        return state, _bits_of(state)
    if stream.type == "cpu":
        state = torch.default_generator.get_state()
    else:
        state = torch.get_device_module(stream).get_rng_state(stream)
    return state, ctypes.string_at(state.data_ptr(), state.numel())  # in transforms as well


def _bits_of(state: Any) -> Any:
    """A state as what has a hash: NumPy's is a dict of arrays and numbers, Python's a tuple."""
    if isinstance(state, dict):
        return tuple([_bits_of(x) for x in state.values()])
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _set_state(stream: Stream, state: Any) -> None:
    if isinstance(stream, str):
        (random.setstate if stream == PYTHON else _numpy().set_state)(state)
    elif stream.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(stream).set_rng_state(state, stream)
