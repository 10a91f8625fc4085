"""f once more for another number of examples, to tell which outputs are rows of examples."""

from __future__ import annotations

from typing import Any

import torch

from gradtools.arguments.chunks import Chunks
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.modes import NOTHING, without_cached_weights
from gradtools.torch.replaying.again import as_it_began
from gradtools.torch.replaying.consistency import Way, is_compiled, way_of
from gradtools.torch.replaying.guards import is_recorded
from gradtools.torch.replaying.replay import Forward

left_to_python(__name__)
Tensor = torch.Tensor


class Rerun:
    """The shapes of f's outputs at another chunk; everything stands afterwards as it stood.

    f is not run where it was seen to be right before; under modes that count or record what runs;
    where it would be compiled for another size, or wait for processes that do not run it.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._given = [x for x in forward.chunks.shared if isinstance(x, Tensor)]
        self._versions = [*map(upstream.version_of, self._given)]
        self._way: Way | None = None

    def __call__(self, other: Chunks) -> list[torch.Size] | None:
        forward = self._forward
        if not forward.verifies or forward.accumulates or is_recorded() or is_compiled(forward):
            return None
        if upstream.count_of_dispatch_modes() or torch.distributed.is_initialized():
            return None
        if self._versions != [*map(upstream.version_of, self._given)]:
            return None  # what f changes would change once more
        way = way_of(forward).about("rows")
        if way.is_known():
            return None
        pieces = [_apart(x.narrow(axis, 0, other.cut.sizes[0])) for x, axis in other.splits]
        pieces += [_apart(x) for x in other.lists[0]]
        carry = [_apart(x) for x in forward.first_carry]
        cached = without_cached_weights() if upstream.caches_weights() else NOTHING
        with as_it_began(forward), cached:
            outs, _ = other.call(0, 0, pieces, other.shared, carry)
        self._way = way
        return [y.shape for y in outs]

    def was_right(self) -> None:
        """Notes that the outputs can be joined: f need not be run again."""
        if self._way is not None:
            self._way.is_right()


def _apart(x: Any) -> Any:
    """A copy, which f may change in place."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)
