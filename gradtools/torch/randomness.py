"""Where PyTorch's generators stand, so that what was drawn can be drawn again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._guards import TracingContext

Tensor = torch.Tensor


@dataclass(frozen=True)
class Randomness:
    """The states of the generators that a function of tensors on these devices draws from."""

    states: dict[torch.device, Tensor]

    @classmethod
    def now(cls, xs: Sequence[Tensor]) -> Randomness | None:
        """The states now; None in code that is being compiled."""
        if torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None:
            return None
        devices = {torch.device("cpu"), *(x.device for x in xs)}
        return cls({d: _state(d) for d in devices})

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
    standing = {d: _state(d) for d in randomness.states}
    try:
        for device, state in randomness.states.items():
            _set_state(device, state)
        yield
    finally:
        for device, state in standing.items():
            _set_state(device, state)


def _state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
