"""A table of tensors' values, by id and by storage with a log of writes.

A tensor is identified by its id, otherwise as an alias of the same storage elements as a known
tensor. Each storage has a log of in-place writes, so that a tensor's value can be updated with the
writes since it was last read.
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
    """A tensor, its value, the id of its storage, and the length of the storage's write log."""

    tensor: Tensor
    value: V
    memory: int
    writes: int


@dataclass(frozen=True)
class Write(Generic[V]):
    """An in-place write: the tensor, its value afterwards, and the call."""

    tensor: Tensor
    value: V
    by: Any


@dataclass
class Memory(Generic[V]):
    """A storage.

    Attributes:
        owner: The storage, or a tensor without a storage; referenced so that its id stays unique.
        value: The value of the first tensor that was read on the storage.
        written: The log of in-place writes.
    """

    owner: Any
    value: V
    written: list[Write[V]] = field(default_factory=list)


class TensorTable(Generic[V]):
    """Maps tensors to values."""

    def __init__(self) -> None:
        self._known: dict[int, KnownTensor[V]] = {}
        self._alike: dict[Any, KnownTensor[V]] = {}
        self._memories: dict[int, Memory[V]] = {}

    def get(self, x: Tensor) -> KnownTensor[V] | None:
        """Returns the entry of this tensor object."""
        return self._known.get(id(x))

    def find(self, x: Tensor) -> KnownTensor[V] | None:
        """Returns the entry of this tensor, or of an alias of the same elements."""
        known = self._known.get(id(x))
        if known is None or known.memory != memory_of(x):  # x.data = ... changed its storage
            known = self._alike.get(view_of(x))
            if known is not None:
                self._known[id(x)] = KnownTensor(x, known.value, known.memory, known.writes)
        return known

    def hold(self, x: Tensor, value: V, alone: bool = False) -> KnownTensor[V]:
        """Assigns this value to x; unless `alone`, also to aliases of the same elements."""
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
        """Returns the storage of x, if it is known."""
        return self._memories.get(memory_of(x))

    def write(self, x: Tensor, value: V, by: Any = None) -> None:
        """Logs an in-place write to x and assigns this value to x; see `Write` for `by`."""
        if (memory := self.memory(x)) is not None:
            memory.written.append(Write(x, value, by))
        self.hold(x, value)

    def since(self, known: KnownTensor[V]) -> list[Write[V]]:
        """Returns the writes to a tensor's elements since its value was assigned."""
        written = self._memories[known.memory].written[known.writes :]
        return [write for write in written if _overlap(write.tensor, known.tensor)]


Like = tuple[tuple[int, ...], str]


def like(x: Tensor) -> Like:
    """Returns a tensor's shape and dtype."""
    with private.DisableTorchFunction():
        return tuple(x.shape), str(x.dtype).removeprefix("torch.")


def size_of(x: Tensor) -> float | None:
    """Returns a tensor's maximum modulus, NaN if an entry is NaN; None if there are no entries."""
    if not is_inexact(x) or x.is_meta or not x.numel():
        return None
    if x.layout is not torch.strided:
        x = x.detach()
        x = x.coalesce().values() if x.is_sparse else x.values()
    elif upstream.is_zero(x):
        return 0.0
    return float(x.detach().abs().max()) if x.numel() else 0.0


def numbers_in(x: Tensor) -> str:
    """Formats the contents of a small tensor, for use as its name."""
    if x.requires_grad or x.device.type != "cpu" or x.layout is not torch.strided:
        return ""
    try:
        with upstream.disable_current_modes():
            return numbers_text(x.shape, x.tolist)
    except RuntimeError:  # no contents: a tensor in a torch.func transform, or a meta tensor
        return ""


def view_of(x: Tensor) -> Any:
    """Returns a key that is equal for tensors that are the same view of the same storage."""
    with private.DisableTorchFunction():
        if x.layout is not torch.strided:
            return id(x)
        shown = tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()
        return memory_of(x), shown


def offsets(x: Tensor) -> np.ndarray:
    """Returns the storage offset of each element."""
    result = np.full((1,) * x.dim() or (), x.storage_offset(), dtype=np.int64)
    for axis, (n, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        along = np.arange(n, dtype=np.int64) * stride
        result = result + along.reshape([-1 if a == axis else 1 for a in range(x.dim())])
    return result


_EXACT = 1 << 16  # number of entries up to which overlap is tested entry by entry


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors on one storage share an element."""
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
