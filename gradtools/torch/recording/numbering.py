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

from gradtools.seeing.nodes import Dependence, Links, Value
from gradtools.torch import _upstream as upstream
from gradtools.torch.recording import operations
from gradtools.torch.recording.tags import tags_at
from gradtools.torch.recording.values import TensorTable, holds_numbers, like
from gradtools.torch.wrappers import is_inexact, unwrapped

Tensor = torch.Tensor
_CUT, _FULL = Dependence.CUT, Dependence.DIFFERENTIABLE
Edge = tuple[Any, int]  # where in autograd's graph a tensor comes out
Add = Callable[[str, str, list[int], list[int], Links, str | None], int]


class Numbering:
    """Numbers of tensors.

    Args:
        add: Adds a node: operation, native name, inputs, outputs, links, loss. Gives its number.
        note_captured: Is told of each tensor that was there before.

    Attributes:
        values: Every array, by number.
        captured: What was there before, by number.
        outside: As in `Graph`.
        made: Nodes of autograd, each with the number of the node that made it.
        reachable: The tensors that the program can reach before it runs, by id.
    """

    def __init__(self, add: Add, note_captured: Callable[[Tensor], None]) -> None:
        self._add, self._tell_captured = add, note_captured
        self.values: dict[int, Value] = {}
        self.captured: dict[int, Tensor] = {}
        self.outside: list[tuple[int, int]] = []
        self.made: dict[Any, int] = {}
        self.reachable: dict[int, Tensor] = {}
        # Beneath the wrappers of transforms, for there autograd's graph is.
        self._known = TensorTable[tuple[int, Edge]]()
        self._edges: dict[Edge, int] = {}

    def new(self, x: Any, name: str = "") -> int:
        """A number for a tensor, an array or a number of Python's."""
        number = len(self.values)
        if isinstance(x, Tensor):
            shape, dtype = like(x)
        elif isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
            array = np.asarray(x)
            shape, dtype = array.shape, array.dtype.name
        else:
            shape, dtype = (), type(x).__name__
        self.values[number] = Value(shape, dtype, name)
        return number

    def find(self, x: Tensor) -> int | None:
        """The number of a tensor; None if it was not met yet."""
        known = self._known.get(unwrapped(x))
        return None if known is None else known.value[0]

    def of(self, x: Tensor) -> int:
        """The number of a tensor, which may be met for the first time."""
        result = self.find(x)
        return self._meet(unwrapped(x), x) if result is None else result

    def hold(self, x: Tensor, number: int) -> None:
        """From now on x, a tensor or what a transform made of it, has this number."""
        base = unwrapped(x)
        self._known.hold(base, (number, edge_of(base)), alone=True)
        if base.grad_fn is not None:
            self._edges[edge_of(base)] = number

    def was_reconnected(self, x: Tensor) -> bool:
        """Whether autograd has another graph for a known tensor than when it got its number."""
        known = self._known.get(x)
        assert known is not None
        return x.requires_grad and edge_of(x) != known.value[1]

    def refresh(self, xs: Iterable[Tensor]) -> None:
        """Known tensors whose graph autograd made anew, as it does for views of what changed."""
        for x in xs:
            if self.was_reconnected(x):
                self.hold(x, self.of(x))

    def sharing(self, x: Tensor) -> Iterator[Tensor]:
        """The known tensors, other than x, whose memory overlaps with that of x."""
        return self._known.sharing(x)

    # --- tensors that nobody was seen to make

    def _meet(self, base: Tensor, x: Tensor) -> int:
        known = self._edges.get(edge_of(base)) if base.grad_fn is not None else None
        if known is not None:  # another object for a tensor that is known
            self.hold(base, known)
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
        self._tell_captured(base)
        if base.device.type == "cpu" and holds_numbers(base):
            self.outside += [(tag, number) for tag in sorted(tags_at(base.data_ptr()))]

    def _join_by_graph(self, base: Tensor, number: int) -> bool:
        result, nodes = self.walk(base)
        if not result:
            return False
        operation, name = operations.neutral_of_node(base.grad_fn), operations.word_of(base.grad_fn)
        node = self._add(operation, name, result, [number], ((_FULL,) * len(result),), None)
        self.note_made(nodes, node)
        return True

    def note_made(self, nodes: Iterable[Any], node: int) -> None:
        """Notes which recorded node made nodes of autograd."""
        for made in nodes:
            self.made.setdefault(made, node)

    def _join_by_memory(self, base: Tensor, number: int) -> bool:
        """A Parameter that was made of a known tensor, or a view that was taken elsewhere."""
        source = next(self._known.sharing(base), None)
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
            known = self.find(out) if out.requires_grad else None
            return ([] if known is None else [known]), []
        result: dict[int, None] = {}
        edge = get_gradient_edge(out)
        todo: list[tuple[Any, int]] = [(edge.node, edge.output_nr)]
        seen: dict[Any, None] = {}
        while todo:
            node, k = todo.pop()
            number = self._edges.get((node, k))
            if number is None and type(node).__name__ == "AccumulateGrad":
                number = self.of(node.variable)
            if number is not None:
                result[number] = None
            elif node not in seen:
                seen[node] = None
                todo += [pair for pair in node.next_functions if pair[0] is not None]
        return list(result), list(seen)


def edge_of(x: Tensor) -> Edge:
    """Where in autograd's graph a tensor comes out."""
    return x.grad_fn, x.output_nr


def version_of(x: Tensor) -> int | None:
    """How often a tensor was changed in place, where that is counted."""
    return None if x.is_inference() else upstream.version_of(x)
