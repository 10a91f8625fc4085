"""Value numbers of a run that is recorded above autograd, and the origin of unrecorded tensors.

A tensor is identified by its id. A tensor whose creation was not recorded is connected by its
autograd graph, walked back to known tensors, else by storage that it shares with a known tensor.
Otherwise it existed before the run and is captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge

from gradtools.seeing.graphs.nodes import Dependence, Links, Node, Value
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.recorder import Recorder
from gradtools.seeing.torch.recording.values import KnownTensor, Write
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_inexact, unwrapped
from gradtools.torch.rerunning import Undo

Tensor = torch.Tensor
_CUT, _FULL = Dependence.CUT, Dependence.DIFFERENTIABLE
Edge = tuple[Any, int]  # (grad_fn, output_nr)


class Numbering(Recorder[int]):
    """Nodes and value numbers; tensors are unwrapped from transforms to reach autograd's graph.

    Attributes:
        nodes: The nodes so far.
        outside: As in `Graph`.
        made: For each node of autograd the position of the recorded node that made it.
        reachable: The tensors that the program can reach before it runs, by id.
    """

    def __init__(self, undo: Undo) -> None:
        super().__init__(undo)
        self.nodes: list[Node] = []
        self.outside: list[tuple[int, int]] = []
        self.made: dict[Any, int] = {}
        self.reachable = {id(x): x for x, _ in undo.start.reached.watched}
        self._edges: dict[Edge, int] = {}
        self._edge_at_hold: dict[int, Edge] = {}  # when a known tensor got its number, by its id

    def add(
        self,
        operation: str,
        native: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        links: Links | None,
        loss: str | None = None,
        mark: str = "",
        **more: Any,
    ) -> int:
        """Adds a node with the running line as its source."""
        here = self.origin()
        at = replace(here, mark=mark or here.mark)
        more |= {"links": links, "loss": loss}
        self.nodes.append(self.node(operation, native, inputs, outputs, at, **more))
        return len(self.nodes) - 1

    def new(self, x: Any, name: str = "") -> int:
        """A new number for a tensor, a NumPy array or a Python number."""
        number = super().new(x, name)
        if isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
            array = np.asarray(x)
            self.values[number] = Value(array.shape, array.dtype.name, name)
        return number

    def known(self, x: Tensor) -> KnownTensor[int] | None:
        """The entry of this tensor object; aliases differ in autograd's graph."""
        return self.table.get(unwrapped(x))

    def hold(self, x: Tensor, value: int) -> None:
        """Gives a tensor, unwrapped from transforms, this number."""
        base = unwrapped(x)
        self.table.hold(base, value, alone=True)
        self._edge_at_hold[id(base)] = edge_of(base)
        if base.grad_fn is not None:
            self._edges[edge_of(base)] = value

    def was_reconnected(self, x: Tensor) -> bool:
        """Whether a known tensor's grad_fn changed since it got its number."""
        return x.requires_grad and edge_of(x) != self._edge_at_hold[id(x)]

    def rewritten(self, x: Tensor, before: int, writes: Sequence[Write[int]]) -> int:
        """Adds an update node for each write, differentiable if autograd changed x's grad_fn."""
        for write in writes:
            behind = write.tensor.requires_grad and not self.was_reconnected(x)
            loss = ("in_place_data" if write.by.grad else "no_grad") if behind else None
            number = self.new(x)
            nodes = self.walk(x)[1]
            links = ((_FULL, _CUT if behind else _FULL),)
            given = [before, write.value]
            self.note_made(nodes, self.add("update", write.by.name, given, [number], links, loss))
            self.hold(x, number)
            before = number
        return before

    # --- unrecorded tensors

    def met(self, x: Tensor) -> int:
        """Its number; another object for a tensor that is known has that one's."""
        base = unwrapped(x)
        known = self._edges.get(edge_of(base)) if base.grad_fn is not None else None
        if known is not None:
            return known
        number = self.new(x)
        joined = self._join_by_graph if base.grad_fn is not None else self._join_by_memory
        if id(base) in self.reachable or not joined(base, number):
            self.capture(base, number)
        return number

    def _join_by_graph(self, base: Tensor, number: int) -> bool:
        result, nodes = self.walk(base)
        if not result:
            return False
        operation, name = operations.neutral_of_node(base.grad_fn), operations.word_of(base.grad_fn)
        node = self.add(operation, name, result, [number], ((_FULL,) * len(result),))
        self.note_made(nodes, node)
        return True

    def note_made(self, nodes: Iterable[Any], node: int) -> None:
        """Notes the recorded node that made these nodes of autograd."""
        for made in nodes:
            self.made.setdefault(made, node)

    def _join_by_memory(self, base: Tensor, number: int) -> bool:
        """Connects a Parameter or an unrecorded view to a known tensor on the same storage."""
        source = next(self.table.sharing(base), None)
        if source is None:
            return False
        stopped = is_inexact(base) and source.requires_grad
        link = _FULL if is_inexact(base) and not stopped else _CUT
        name = type(base).__name__ if isinstance(base, torch.nn.Parameter) else "alias"
        operation, loss = ("stop", "detached") if stopped else ("identity", None)
        self.add(operation, name, [self.of(source)], [number], ((link,),), loss)
        return True

    def walk(self, out: Tensor) -> tuple[list[int], list[Any]]:
        """The known values behind a tensor in autograd's graph, and the nodes in between."""
        if out.grad_fn is None:  # a leaf depends on its own previous value
            known = self.known(out) if out.requires_grad else None
            return ([] if known is None else [known.value]), []
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
    """A tensor's place in autograd's graph."""
    return x.grad_fn, x.output_nr


def version_of(x: Tensor) -> int | None:
    """A tensor's version counter; None for inference tensors, which have none."""
    return None if x.is_inference() else upstream.version_of(x)
