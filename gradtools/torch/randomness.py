"""Where PyTorch's generators stand, so that what was drawn can be drawn again."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._guards import TracingContext

Tensor = torch.Tensor
numpy_state, set_numpy_state = np.random.get_state, np.random.set_state


@dataclass(frozen=True, eq=False)
class Randomness:
    """The states of generators: PyTorch's on some devices, and python's and NumPy's if asked."""

    states: dict[torch.device, Tensor]
    python: Any = None
    numpy: Any = None

    @classmethod
    def now(cls, xs: Sequence[Tensor]) -> Randomness | None:
        """PyTorch's, for a function of these tensors; None in code that is being compiled."""
        if torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None:
            return None
        devices = {torch.device("cpu"), *(x.device for x in xs)}
        return cls({d: _state(d) for d in devices if d.type != "meta"})

    @classmethod
    def everywhere(cls, kinds: Iterable[str]) -> Randomness:
        """Python's, NumPy's, and PyTorch's on the CPU and all devices of these kinds."""
        devices = [torch.device("cpu")]
        for kind in sorted(set(kinds) - {"cpu", "meta"}):
            count = torch.get_device_module(kind).device_count()
            devices += [torch.device(kind, i) for i in range(count)]
        return cls({d: _state(d) for d in devices}, random.getstate(), numpy_state(legacy=False))

    def again(self) -> Randomness:
        """The same generators' states, where they stand now."""
        return Randomness(
            {d: _state(d) for d in self.states},
            None if self.python is None else random.getstate(),
            None if self.numpy is None else numpy_state(legacy=False),
        ).shared_with(self)

    def shared_with(self, other: Randomness) -> Randomness:
        """The same, with the parts of another where they are equal; that itself, if all are."""
        mine, its = self.states, other.states
        states = {d: its[d] if d in its and torch.equal(its[d], s) else s for d, s in mine.items()}
        python = other.python if self.python == other.python else self.python
        numpy = other.numpy if _same_numpy(self.numpy, other.numpy) else self.numpy
        same = python is other.python and numpy is other.numpy and states.keys() == its.keys()
        if same and all(s is its[d] for d, s in states.items()):
            return other
        return Randomness(states, python, numpy)

    def used(self) -> Randomness:
        """The same, less python's and NumPy's generators if nothing was drawn from them since.

        These two take longer to read, and to put back, than a small layer takes to compute.
        """
        python = self.python
        if python is not None and python == random.getstate():
            python = None
        return Randomness(self.states, python, None if self._numpy_stands() else self.numpy)

    def _numpy_stands(self) -> bool:
        if self.numpy is None:
            return True
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if self.numpy.get("has_gauss") or type(bits) is not np.random.MT19937:
            return _same_numpy(self.numpy, numpy_state(legacy=False))
        # With no number left over from before, whatever is drawn moves these.
        state = self.numpy["state"]
        known = state["key"].tobytes() + state["pos"].to_bytes(4, sys.byteorder)
        return known == ctypes.string_at(bits.ctypes.state_address, len(known))

    def restore(self) -> None:
        """Puts the generators where they stood."""
        for device, state in self.states.items():
            _set_state(device, state)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            set_numpy_state(self.numpy)

    def stands(self) -> bool:
        """Whether nothing was drawn since."""
        return all(torch.equal(_state(d), s) for d, s in self.states.items())

    def stood(self, later: Randomness | None) -> bool:
        """Whether nothing was drawn until then."""
        if later is None:
            return False
        return all(torch.equal(later.states[d], s) for d, s in self.states.items())


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


def _same_numpy(a: Any, b: Any) -> bool:
    """Whether two states of a NumPy generator, dicts of arrays and numbers, are the same."""
    if isinstance(a, dict):
        same = isinstance(b, dict) and a.keys() == b.keys()
        return same and all(_same_numpy(x, b[key]) for key, x in a.items())
    return a.tobytes() == b.tobytes() if isinstance(a, np.ndarray) else bool(a == b)


def _state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
