"""Where PyTorch's generators stand, so that what was drawn can be drawn again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._guards import TracingContext

Tensor = torch.Tensor
numpy_state, set_numpy_state = np.random.get_state, np.random.set_state


@dataclass(frozen=True)
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
        return cls({d: _state(d) for d in devices})

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
        states = {d: _state(d) for d in self.states}
        if self.python is None:
            return Randomness(states)
        return Randomness(states, random.getstate(), numpy_state(legacy=False))

    def restore(self) -> None:
        """Puts the generators where they stood."""
        for device, state in self.states.items():
            _set_state(device, state)
        if self.python is not None:
            random.setstate(self.python)
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


def _state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
