"""Saves and restores random generators: PyTorch's of all devices, NumPy's and Python's."""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor


@dataclass(eq=False, repr=False)
class Randomness:
    """The states of generators: PyTorch's on some devices, and python's and NumPy's if asked."""

    states: dict[torch.device, Any]  # as `_state` gives them
    python: Any = None  # as `_python_state`
    numpy: Any = None

    @classmethod
    def now(cls, xs: Sequence[Tensor]) -> Randomness | None:
        """PyTorch's, for a function of these tensors; None in code that is being compiled."""
        if torch.compiler.is_dynamo_compiling() or upstream.TracingContext.try_get() is not None:
            return None
        devices = {torch.device("cpu"), *(x.device for x in xs)}
        return cls.of(d for d in devices if d.type != "meta")

    @classmethod
    def of(cls, devices: Iterable[torch.device]) -> Randomness:
        return cls({d: _state(d) for d in devices})

    @classmethod
    def everywhere(cls, kinds: Iterable[str]) -> Randomness:
        """Python's, NumPy's, and PyTorch's on the CPU and all devices of these kinds."""
        devices = [torch.device("cpu")]
        for kind in sorted(set(kinds) - {"cpu", "meta"}):
            count = torch.get_device_module(kind).device_count()
            devices += [torch.device(kind, i) for i in range(count)]
        return cls({d: _state(d) for d in devices}, _python_state(), _numpy_state())

    def __bool__(self) -> bool:
        """Whether it holds any generator's state."""
        return bool(self.states or self.python or self.numpy)

    def seeded(self, seed: int) -> Randomness:
        """PyTorch's on the same devices, as a seed makes them.

        By new generators, which every kind of device has: not all give out the one they draw from.
        """
        made = {d: torch.Generator(d).manual_seed(seed).get_state() for d in self.states}
        return Randomness({d: (state, b"") for d, state in made.items()})

    def again(self) -> Randomness:
        """The same generators' states, where they stand now; itself, if nothing was drawn."""
        moved = self.used()
        if not moved:
            return self
        return Randomness(
            {d: _state(d) if d in moved.states else state for d, state in self.states.items()},
            self.python if moved.python is None else _python_state(),
            self.numpy if moved.numpy is None else _numpy_state(),
        )

    def used(self) -> Randomness:
        """The same, less the generators of which nothing was drawn since.

        To read them and to put them back takes longer than a small layer takes to compute.
        """
        return Randomness(
            {d: state for d, state in self.states.items() if state[1] != _state(d)[1]},
            None if self.python is None or self._python_stands() else self.python,
            None if self.numpy is None or self._numpy_stands() else self.numpy,
        )

    def _python_stands(self) -> bool:
        state, bits = self.python
        if bits is None:
            return bool(state == random.getstate())
        return bool(bits == _PYTHON_MEMORY.raw and state[-1] == _PYTHON.gauss_next)

    def _numpy_stands(self) -> bool:
        state, known = self.numpy
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not known or state.get("has_gauss") or type(bits) is not np.random.MT19937:
            return bool(_bits_of(state) == _bits_of(_numpy().get_state(legacy=False)))
        # With no number left over from before, whatever is drawn moves these.
        return bool(known == _numpy_memory(bits).raw)

    def marks(self) -> dict[str, int]:
        """Where the generators stand, by their names: equal where they stand alike."""
        result = {f"PyTorch's random stream on {d}": hash(_state(d)[1]) for d in self.states}
        if self.python is not None:
            stands = self._python_stands()
            result["Python's random stream"] = 0 if stands else hash(random.getstate())
        if self.numpy is not None:
            now = 0 if self._numpy_stands() else _bits_of(_numpy().get_state(legacy=False))
            result["NumPy's random stream"] = hash(now)
        return result

    def restore(self) -> None:
        for device, (state, _) in self.states.items():
            _set_state(device, state)
        if self.python is not None:
            random.setstate(self.python[0])
        if self.numpy is not None:
            _numpy().set_state(self.numpy[0])

    def stands(self) -> bool:
        return all(_state(d)[1] == bits for d, (_, bits) in self.states.items())

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


# --- python's and NumPy's generators -------------------------------------------------------------
#
# To read their states out takes longer than a small layer does. So they come with the bytes in
# which they lie in memory, and are asked by those whether they still stand.

_PYTHON: Any = random.getstate.__self__  # type: ignore[attr-defined]
_NUMBERS = 625  # the state's, each of 32 bits
_MEMORY = ctypes.c_char * (4 * _NUMBERS)
_PYTHON_MEMORY = _MEMORY.from_address(id(_PYTHON) + object.__basicsize__)  # read if `_KNOWN`


@cache
def _numpy() -> Any:
    """The generator behind `numpy.random`, which is imported when it is first asked for."""
    return np.random.get_state.__self__  # type: ignore[attr-defined]


@lru_cache(1)
def _numpy_memory(bits: np.random.MT19937) -> ctypes.Array[ctypes.c_char]:
    return _MEMORY.from_address(bits.ctypes.state_address)


def _in_memory(numbers: Sequence[int]) -> bytes:
    """The state's numbers as CPython lays them out: the position, which is the last one, first."""
    return array("I", (numbers[-1], *numbers[:-1])).tobytes()


def _python_is_known() -> bool:
    """Whether CPython lays its generator out as it did in all versions so far."""
    large = _PYTHON.__sizeof__() >= object.__basicsize__ + 4 * _NUMBERS
    if sys.implementation.name != "cpython" or not large or type(_PYTHON) is not random.Random:
        return False
    return _PYTHON_MEMORY.raw == _in_memory(random.getstate()[1])


_KNOWN = _python_is_known()


def _python_state() -> Any:
    """The state, and its bytes in memory if these can be read."""
    state = random.getstate()
    return state, _in_memory(state[1]) if _KNOWN else None


def _numpy_state() -> Any:
    """The state, and its bytes in memory for the generator that NumPy begins with."""
    state = _numpy().get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return state, b""
    inner = state["state"]
    return state, inner["key"].tobytes() + inner["pos"].to_bytes(4, sys.byteorder)


def _bits_of(state: Any) -> Any:
    """A state of a NumPy generator, a dict of arrays and numbers, as what has a hash."""
    if isinstance(state, dict):
        return tuple([_bits_of(x) for x in state.values()])
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _state(device: torch.device) -> tuple[Tensor, bytes]:
    """A generator's state, and its bytes, by which it is compared."""
    if device.type == "cpu":
        state = torch.default_generator.get_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    return state, ctypes.string_at(state.data_ptr(), state.numel())  # in transforms as well


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
