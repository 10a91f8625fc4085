"""The values of a recorded run: which tensor has which number, and from where an unknown one came.

A tensor is known again by its identity. One that nobody was seen to make is joined by what can be
asked of it: autograd's graph, walked back until known tensors are met; the memory that it shares
with a known tensor; else it was there before, and is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from gradtools.seeing.graph import Dependence, Links, Value
from gradtools.torch import _upstream as upstream
from gradtools.torch.recording import operations
from gradtools.torch.recording.tags import tags_at
from gradtools.torch.wrappers import is_inexact

Tensor = torch.Tensor
_CUT, _FULL = Dependence.CUT, Dependence.DIFFERENTIABLE
_is_wrapped = upstream.is_wrapped
Add = Callable[[str, str, list[int], list[int], Links, str | None], int]


def base_of(x: Tensor) -> Tensor:
    """x beneath all transforms of functorch: there autograd's own graph is."""
    while _is_wrapped(x):
        x = upstream.get_unwrapped(x)
    return x


class Numbering:
    """Numbers of tensors.

    Args:
        add: Adds a node: operation, native name, inputs, outputs, links, loss. Gives its number.

    Attributes:
        values: Every array, by number.
        captured: What was there before, by number.
        outside: As in `Graph`.
        made: Nodes of autograd, each with the number of the node that made it.
        reachable: The tensors that the program can reach before it runs, by id.
    """

    def __init__(self, add: Add) -> None:
        self._add = add
        self.values: dict[int, Value] = {}
        self.captured: dict[int, Tensor] = {}
        self.outside: list[tuple[int, int]] = []
        self.made: dict[Any, int] = {}
        self.reachable: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an id is worth something as long as its owner lives
        self._edges: dict[tuple[Any, int], int] = {}
        self._held: dict[int, tuple[Any, int]] = {}
        self._storages: dict[int, list[Tensor]] = {}

    def new(self, x: Any, name: str = "") -> int:
        """A number for a tensor, an array or a number of Python's."""
        number = len(self.values)
        if isinstance(x, Tensor):
            shape, dtype = tuple(x.shape), str(x.dtype).removeprefix("torch.")
        elif isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
            array = np.asarray(x)
            shape, dtype = array.shape, array.dtype.name
        else:
            shape, dtype = (), type(x).__name__
        self.values[number] = Value(shape, dtype, name)
        return number

    def find(self, x: Tensor) -> int | None:
        """The number of a tensor; None if it was not met yet."""
        return self._numbers.get(id(base_of(x)))

    def of(self, x: Tensor) -> int:
        """The number of a tensor, which may be met for the first time."""
        base = base_of(x)
        found = self._numbers.get(id(base))
        return self._meet(base, x) if found is None else found

    def hold(self, x: Tensor, number: int) -> None:
        """From now on x, a tensor or what a transform made of it, has this number."""
        base = base_of(x)
        if id(base) not in self._numbers:
            self._kept.append(base)
            key = storage_of(base)
            if key is not None:
                self._storages.setdefault(key, []).append(base)
        self._numbers[id(base)] = number
        self._held[id(base)] = edge_of(base)
        if base.grad_fn is not None:
            self._edges[edge_of(base)] = number

    def was_reconnected(self, x: Tensor) -> bool:
        """Whether autograd has another graph for a known tensor than when it got its number."""
        return x.requires_grad and edge_of(x) != self._held[id(x)]

    def refresh(self, xs: Iterable[Tensor]) -> None:
        """Known tensors whose graph autograd made anew, as it does for views of what changed."""
        for x in xs:
            if self.was_reconnected(x):
                self.hold(x, self._numbers[id(x)])

    # --- tensors that nobody was seen to make

    def _meet(self, base: Tensor, x: Tensor) -> int:
        known = self._edges.get(edge_of(base)) if base.grad_fn is not None else None
        if known is not None:  # another object for a tensor that is known
            self._kept.append(base)
            self._numbers[id(base)] = known
            self._held[id(base)] = edge_of(base)
            return known
        number = self.new(x)
        joined = self._join_by_graph if base.grad_fn is not None else self._join_by_memory
        if id(base) in self.reachable or not joined(base, number):
            self._note_captured(base, number)
        self.hold(base, number)
        return number

    def _note_captured(self, base: Tensor, number: int) -> None:
        """It was there before; or it was made of an array that had left, by `from_numpy`."""
        self.captured[number] = base
        if base.device.type == "cpu" and storage_of(base) is not None:
            self.outside += [(tag, number) for tag in sorted(tags_at(base.data_ptr()))]

    def _join_by_graph(self, base: Tensor, number: int) -> bool:
        found, nodes = self.walk(base)
        if not found:
            return False
        operation, name = operations.neutral_of_node(base.grad_fn), operations.word_of(base.grad_fn)
        node = self._add(operation, name, found, [number], ((_FULL,) * len(found),), None)
        self.note_made(nodes, node)
        return True

    def note_made(self, nodes: Iterable[Any], node: int) -> None:
        """Notes which recorded node made nodes of autograd."""
        for made in nodes:
            self.made.setdefault(made, node)

    def _join_by_memory(self, base: Tensor, number: int) -> bool:
        """A Parameter that was made of a known tensor, or a view that was taken elsewhere."""
        source = next(self.sharing(base), None)
        if source is None:
            return False
        stopped = is_inexact(base) and source.requires_grad
        link = _FULL if is_inexact(base) and not stopped else _CUT
        name = type(base).__name__ if isinstance(base, torch.nn.Parameter) else "alias"
        operation, loss = ("stop", "detached") if stopped else ("identity", None)
        self._add(operation, name, [self.of(source)], [number], ((link,),), loss)
        return True

    def walk(self, out: Tensor) -> tuple[list[int], list[Any]]:
        """The known values from which autograd leads to a tensor, and its nodes on the way."""
        if out.grad_fn is None:  # a leaf is connected to what it was before, if it was
            known = self._numbers.get(id(out)) if out.requires_grad else None
            return ([] if known is None else [known]), []
        found: dict[int, None] = {}
        edge = get_gradient_edge(out)
        todo: list[tuple[Any, int]] = [(edge.node, edge.output_nr)]
        seen: dict[Any, None] = {}
        while todo:
            node, k = todo.pop()
            number = self._edges.get((node, k))
            if number is None and type(node).__name__ == "AccumulateGrad":
                number = self.of(node.variable)
            if number is not None:
                found[number] = None
            elif node not in seen:
                seen[node] = None
                todo += [pair for pair in node.next_functions if pair[0] is not None]
        return list(found), list(seen)

    # --- shared memory

    def sharing(self, x: Tensor) -> Iterator[Tensor]:
        """The known tensors, other than x, whose memory overlaps with that of x."""
        key = storage_of(x)
        known = self._storages.get(key, ()) if key is not None else ()
        for other in known:
            if other is not x and _overlap(x, other):
                yield other


def edge_of(x: Tensor) -> tuple[Any, int]:
    """Where in autograd's graph a tensor comes out."""
    return x.grad_fn, x.output_nr


def version_of(x: Tensor) -> int | None:
    """How often a tensor was changed in place, where that is counted."""
    return None if x.is_inference() else upstream.version_of(x)


def storage_of(x: Tensor) -> int | None:
    """What two tensors have in common if they share memory; None where that is not known."""
    if x.layout is not torch.strided or x.device.type == "meta":
        return None
    with upstream.DisableTorchFunction():  # a mode around may take it for memory handed out
        return id(x.untyped_storage())


_EXACT = 1 << 16  # entries up to which overlap is decided entry by entry


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.numel() == 0 or b.numel() == 0 or a.itemsize != b.itemsize:
        return a.numel() > 0 and b.numel() > 0
    (a_low, a_high), (b_low, b_high) = _span(a), _span(b)
    if a_high < b_low or b_high < a_low:
        return False
    dense = a_high - a_low < a.numel() or b_high - b_low < b.numel()
    if dense or max(a_high, b_high) > _EXACT:
        return True
    taken = np.zeros(max(a_high, b_high) + 1, bool)
    _places(taken, a)[...] = True
    return bool(_places(taken, b).any())


def _span(x: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset()), int(x.storage_offset() + reach)


def _places(flat: np.ndarray, x: Tensor) -> np.ndarray:
    """Those entries of a storage that belong to x."""
    return np.lib.stride_tricks.as_strided(flat[x.storage_offset() :], x.shape, x.stride())
