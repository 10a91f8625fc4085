"""Which value each tensor of a run holds: the one table of identities, memory and versions.

A tensor is known by its identity; else as one that shows the same elements of the same memory as a
tensor that is known. Memory keeps what was written to it, so that each tensor that shows some of it
can be asked what was written there since it got its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from gradtools.seeing.graphs.attributes import numbers_text
from gradtools.torch import _upstream as upstream
from gradtools.torch.rerunning import memory_of, owner_of

Tensor = torch.Tensor
V = TypeVar("V")


@dataclass(frozen=True)
class KnownTensor(Generic[V]):
    """A tensor, its value, the memory that it showed, and how often that had been written to."""

    tensor: Tensor
    value: V
    memory: int
    writes: int


@dataclass(frozen=True)
class Write(Generic[V]):
    """Something that was written in place: to which tensor, the value of that since, by whom."""

    tensor: Tensor
    value: V
    by: Any


@dataclass
class Memory(Generic[V]):
    """A piece of memory.

    Attributes:
        owner: The storage, or a tensor that has none; its id is no other's as long as it lives.
        root: The tensor that was met first.
        value: What that one is now.
        tensors: All that show some of it.
        written: What was written to it, in order.
    """

    owner: Any
    root: Tensor
    value: V
    tensors: list[Tensor] = field(default_factory=list)
    written: list[Write[V]] = field(default_factory=list)


class TensorTable(Generic[V]):
    """Tensors, each with its value."""

    def __init__(self) -> None:
        self._known: dict[int, KnownTensor[V]] = {}
        self._alike: dict[Any, KnownTensor[V]] = {}
        self._memories: dict[int, Memory[V]] = {}

    def get(self, x: Tensor) -> KnownTensor[V] | None:
        """What is known of this very tensor."""
        return self._known.get(id(x))

    def find(self, x: Tensor) -> KnownTensor[V] | None:
        """What is known of this tensor as it lies now, or of another that shows the same."""
        known = self._known.get(id(x))
        if known is None or known.memory != memory_of(x):  # since x.data = ... it is another
            known = self._alike.get(view_of(x))
            if known is not None:
                self._known[id(x)] = KnownTensor(x, known.value, known.memory, known.writes)
        return known

    def hold(self, x: Tensor, value: V, alone: bool = False) -> KnownTensor[V]:
        """From now on x has this value; alone: others that show the same memory have not."""
        owner, before = owner_of(x), self._known.get(id(x))
        key = id(owner)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory(owner, x, value)
        if before is None or before.memory != key:
            memory.tensors.append(x)
        known = self._known[id(x)] = KnownTensor(x, value, key, len(memory.written))
        if not alone:
            self._alike[view_of(x)] = known
        return known

    def memory(self, x: Tensor) -> Memory[V] | None:
        """The memory that x shows, if anything is known of it."""
        return self._memories.get(memory_of(x))

    def write(self, x: Tensor, value: V, by: Any = None) -> None:
        """x was written to, and has this value now; by: As in `Write`."""
        if (memory := self.memory(x)) is not None:
            memory.written.append(Write(x, value, by))
        self.hold(x, value)

    def since(self, known: KnownTensor[V]) -> list[Write[V]]:
        """What was written to the elements that a tensor shows since it got its value."""
        written = self._memories[known.memory].written[known.writes :]
        return [write for write in written if _overlap(write.tensor, known.tensor)]

    def sharing(self, x: Tensor) -> Iterator[Tensor]:
        """The known tensors, other than x, whose memory overlaps with that of x."""
        memory = self.memory(x)
        for other in memory.tensors if memory is not None else ():
            if other is not x and memory_of(other) == memory_of(x) and _overlap(x, other):
                yield other

    def is_shown(self, x: Tensor) -> bool:
        """Whether some known tensor shows just what x shows."""
        return view_of(x) in self._alike

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, what becomes known is forgotten at the end."""
        before = dict(self._known), dict(self._alike)
        try:
            yield
        finally:
            self._known, self._alike = before


Like = tuple[tuple[int, ...], str]


def like(x: Tensor) -> Like:
    """A tensor's shape and dtype."""
    with upstream.DisableTorchFunction():
        return tuple(x.shape), str(x.dtype).removeprefix("torch.")


def may_share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory; of what has no strides nothing tells."""
    strided = a.layout is torch.strided and b.layout is torch.strided
    return not strided or memory_of(a) == memory_of(b)


def numbers_in(x: Tensor) -> str:
    """What a small tensor holds, to be read in place of a name."""
    if x.requires_grad or x.device.type != "cpu" or x.layout is not torch.strided:
        return ""
    try:
        with upstream.disable_current_modes():
            return numbers_text(x.shape, x.tolist)
    except RuntimeError:  # it holds no number: of a transform of torch.func, without contents
        return ""


def view_of(x: Tensor) -> Any:
    """What two tensors have in common that show the same elements of the same memory alike."""
    with upstream.DisableTorchFunction():
        if x.layout is not torch.strided:
            return id(x)
        shown = tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()
        return memory_of(x), shown


def offsets(x: Tensor) -> np.ndarray:
    """For each element its place in memory."""
    result = np.full((1,) * x.dim() or (), x.storage_offset(), dtype=np.int64)
    for axis, (n, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        along = np.arange(n, dtype=np.int64) * stride
        result = result + along.reshape([-1 if a == axis else 1 for a in range(x.dim())])
    return result


_EXACT = 1 << 16  # entries up to which overlap is decided entry by entry


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one piece of memory show some element of it both."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return True
    if a.numel() == 0 or b.numel() == 0 or a.itemsize != b.itemsize:
        return a.numel() > 0 and b.numel() > 0
    (a_low, a_high), (b_low, b_high) = _span(a), _span(b)
    if a_high < b_low or b_high < a_low:
        return False
    # An end of one lies in the other, which has no gaps, unless it reaches beyond on both sides.
    dense = a_high - a_low < a.numel() and not (b_low < a_low and a_high < b_high)
    dense = dense or (b_high - b_low < b.numel() and not (a_low < b_low and b_high < a_high))
    if dense or max(a_high, b_high) > _EXACT:
        return True
    return bool(np.isin(offsets(a), offsets(b)).any())


def _span(x: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset()), int(x.storage_offset() + reach)
