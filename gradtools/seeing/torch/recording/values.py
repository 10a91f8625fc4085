"""Defines a table of tensors and their values, with a log of in-place writes per storage.

A tensor is identified by its id; an alias of a known tensor is identified by its storage elements.
Each storage has a log of in-place writes; the next read of a tensor updates its value from the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from gradtools.seeing.graphs.attributes import numbers_text
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.undo import memory_of, owner_of
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_inexact

Tensor = torch.Tensor
V = TypeVar("V")


@dataclass(frozen=True)
class KnownTensor(Generic[V]):
    """A tensor, its value, its storage id, and the number of writes that the value includes."""

    tensor: Tensor
    value: V
    memory: int
    writes: int


@dataclass(frozen=True)
class Write(Generic[V]):
    """A logged in-place write: the tensor, its new value, and data about the call."""

    tensor: Tensor
    value: V
    by: Any


@dataclass
class Memory(Generic[V]):
    """A tensor storage with a log of in-place writes.

    Attributes:
        owner: The storage, or a tensor without storage; the reference prevents reuse of the id.
        value: The value of the first recorded tensor on the storage.
        written: The log of in-place writes to tensors on the storage.
    """

    owner: Any
    value: V
    written: list[Write[V]] = field(default_factory=list)


class TensorTable(Generic[V]):
    """Maps tensors to their recorded values."""

    def __init__(self) -> None:
        self._known: dict[int, KnownTensor[V]] = {}
        self._alike: dict[Any, KnownTensor[V]] = {}
        self._memories: dict[int, Memory[V]] = {}

    def get(self, x: Tensor) -> KnownTensor[V] | None:
        """Returns the table entry of the tensor object x, or None."""
        return self._known.get(id(x))

    def find(self, x: Tensor) -> KnownTensor[V] | None:
        """Returns the table entry of x or of an alias with the same elements, or None."""
        known = self._known.get(id(x))
        if known is None or known.memory != memory_of(x):  # x.data was assigned
            known = self._alike.get(view_of(x))
            if known is not None:
                self._known[id(x)] = KnownTensor(x, known.value, known.memory, known.writes)
        return known

    def hold(self, x: Tensor, value: V, alone: bool = False) -> KnownTensor[V]:
        """Assigns `value` to x and, unless `alone` is set, to aliases with the same elements."""
        owner = owner_of(x)
        key = id(owner)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory(owner, value)
        known = self._known[id(x)] = KnownTensor(x, value, key, len(memory.written))
        if not alone:
            self._alike[view_of(x)] = known
        return known

    def memory(self, x: Tensor) -> Memory[V] | None:
        """Returns the `Memory` of the storage of x, or None if the storage is unknown."""
        return self._memories.get(memory_of(x))

    def write(self, x: Tensor, value: V, by: Any = None) -> None:
        """Logs an in-place write to x and assigns `value` to x; `by` is data about the call."""
        if (memory := self.memory(x)) is not None:
            memory.written.append(Write(x, value, by))
        self.hold(x, value)

    def since(self, known: KnownTensor[V]) -> list[Write[V]]:
        """Returns the writes to elements of a tensor since its value was assigned."""
        written = self._memories[known.memory].written[known.writes :]
        return [write for write in written if _overlap(write.tensor, known.tensor)]


Like = tuple[tuple[int, ...], str]


def like(x: Tensor) -> Like:
    """Returns the shape and dtype name of a tensor."""
    with private.DisableTorchFunction():
        return tuple(x.shape), str(x.dtype).removeprefix("torch.")


def size_of(x: Tensor) -> float | None:
    """Returns the largest absolute value; None for an empty, an integer or a meta tensor."""
    if not is_inexact(x) or x.is_meta or not x.numel():
        return None
    if x.layout is not torch.strided:
        x = x.detach()
        x = x.coalesce().values() if x.is_sparse else x.values()
    elif upstream.is_zero(x):
        return 0.0
    return float(x.detach().abs().max()) if x.numel() else 0.0


def numbers_in(x: Tensor) -> str:
    """Formats the contents of a small tensor, for use as the name of a constant."""
    if x.requires_grad or x.device.type != "cpu" or x.layout is not torch.strided:
        return ""
    try:
        with upstream.disable_current_modes():
            return numbers_text(x.shape, x.tolist)
    except RuntimeError:  # transformed and meta tensors have no contents
        return ""


def view_of(x: Tensor) -> Any:
    """Returns a hashable key that identifies a view: storage, shape, strides and offset."""
    with private.DisableTorchFunction():
        if x.layout is not torch.strided:
            return id(x)
        shown = tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()
        return memory_of(x), shown


def offsets(x: Tensor) -> np.ndarray:
    """Returns the storage offset of each element of a tensor."""
    result = np.full((1,) * x.dim() or (), x.storage_offset(), dtype=np.int64)
    for axis, (n, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        along = np.arange(n, dtype=np.int64) * stride
        result = result + along.reshape([-1 if a == axis else 1 for a in range(x.dim())])
    return result


_EXACT = 1 << 16  # maximum number of elements for an exact overlap test


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors on the same storage share an element."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return True
    if a.numel() == 0 or b.numel() == 0 or a.itemsize != b.itemsize:
        return a.numel() > 0 and b.numel() > 0
    spans = [
        (x.storage_offset(), sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))
        for x in (a, b)
    ]
    (low, reach), (other, far) = sorted(spans)
    if low + reach < other:
        return False
    return max(low + reach, other + far) > _EXACT or bool(np.isin(offsets(a), offsets(b)).any())
