"""Dependence of each value of a graph on each other one: taint tracking with four strengths.

The strengths (none, cut, zero derivative, differentiable) form a max-min semiring. A path is as
strong as its weakest link, and two values depend as strongly as their strongest path::

    dependence(out, in) = max over paths of min over links

The forward pass computes how strongly each value depends on an input, the backward pass how
strongly the outputs depend on each value. The links of a node with bodies are computed from the
paths through its bodies; for loops that is a fixed point over any number of iterations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from gradtools.seeing.graphs.nodes import Body, Dependence, Links, Node, PlainGraph, even_links

_NONE, _CUT, _ZERO, _FULL = Dependence
Strengths = Mapping[int, Dependence]


def dependence_matrix(graph: PlainGraph) -> list[list[Dependence]]:
    """``matrix[output][input]``: how each output depends on each input."""
    if graph not in _levels:
        bits: dict[int, int] = {}
        for i, value in enumerate(graph.inputs):
            bits[value] = bits.get(value, 0) | 1 << i
        _levels[graph] = [masks(graph, bits, strength) for strength in (_CUT, _ZERO, _FULL)]
    rows = [[reached.get(out, 0) for reached in _levels[graph]] for out in graph.outputs]
    inputs = range(len(graph.inputs))
    return [[Dependence(sum(mask >> i & 1 for mask in row)) for i in inputs] for row in rows]


_levels: WeakKeyDictionary[PlainGraph, list[dict[int, int]]] = WeakKeyDictionary()


def masks(graph: PlainGraph, start: Mapping[int, int], strength: Dependence) -> dict[int, int]:
    """For each value the union of the masks in `start` on which it depends this strongly."""
    result: dict[int, int] = {}
    returning: dict[int, list[int]] = {}  # values that left the framework and came back
    for source, target in graph.outside if strength == _CUT else ():
        returning.setdefault(source, []).append(target)

    def raise_to(value: int, mask: int) -> None:
        if mask & ~result.get(value, 0):
            result[value] = mask | result.get(value, 0)
            for other in returning.get(value, ()):
                raise_to(other, mask)

    for value, mask in start.items():
        raise_to(value, mask)
    for node in graph.nodes:
        entering = [result.get(value, 0) for value in node.inputs]
        if any(entering):
            for value, row in zip(node.outputs, links_of(graph, node), strict=True):
                pairs = zip(row, entering, strict=True)
                raise_to(value, any_of(mask for link, mask in pairs if link >= strength))
    return result


def any_of(masks: Iterable[int]) -> int:
    """The union of all masks."""
    total = 0
    for mask in masks:
        total |= mask
    return total


def forward(graph: PlainGraph, start: Strengths) -> dict[int, Dependence]:
    """How strongly each value depends on those in `start`; independent values have no entry."""
    result = _Strengths(graph.outside, start)
    for node in graph.nodes:
        entering = [result.get(value, _NONE) for value in node.inputs]
        if any(entering):
            for value, row in zip(node.outputs, links_of(graph, node), strict=True):
                result.raise_to(value, through(row, entering))
    return result


def backward(graph: PlainGraph, end: Strengths) -> dict[int, Dependence]:
    """How strongly the values in `end` depend on each value of the graph."""
    result = _Strengths([(target, source) for source, target in graph.outside], end)
    for node in reversed(graph.nodes):
        leaving = [result.get(value, _NONE) for value in node.outputs]
        if any(leaving):
            columns = zip(*links_of(graph, node), strict=True)
            for value, column in zip(node.inputs, columns, strict=True):
                result.raise_to(value, through(column, leaving))
    return result


class _Strengths(dict[int, Dependence]):
    """A map of strengths that only increase; data outside of the framework propagates as a cut."""

    def __init__(self, pairs: Iterable[tuple[int, int]], start: Strengths) -> None:
        super().__init__()
        self._partners: dict[int, list[int]] = {}
        for value, other in pairs:
            self._partners.setdefault(value, []).append(other)
        for value, strength in start.items():
            self.raise_to(value, strength)

    def raise_to(self, value: int, strength: Dependence) -> None:
        if strength > self.get(value, _NONE):
            self[value] = strength
            for other in self._partners.get(value, ()):
                self.raise_to(other, _CUT)


def through(links: Sequence[Dependence], strengths: Sequence[Dependence]) -> Dependence:
    """The strongest path that continues through one of these links."""
    return max(map(min, links, strengths), default=_NONE)


def ancestors(graph: PlainGraph, value: int) -> set[int]:
    """Every other value from which data flows to this one."""
    return set(behind(graph, (value,))) - {value}


def behind(graph: PlainGraph, values: tuple[int, ...]) -> Strengths:
    """How strongly these values depend on each value of the graph; memoized."""
    known = _backwards.setdefault(graph, {})
    if values not in known:
        known[values] = backward(graph, dict.fromkeys(values, _FULL))
    return known[values]


_backwards: WeakKeyDictionary[PlainGraph, dict[tuple[int, ...], Strengths]] = WeakKeyDictionary()


def links_of(graph: PlainGraph, node: Node) -> Links:
    """``links[k][i]``: how output k of a node depends on its input i."""
    if node.links is not None:
        return node.links
    if node.bodies:
        if node not in _links:
            _links[node] = _links_of_bodies(node)
        return _links[node]
    return even_links(node, graph.values)


_links: WeakKeyDictionary[Node, Links] = WeakKeyDictionary()


def _links_of_bodies(node: Node) -> Links:
    links = [[_NONE] * len(node.inputs) for _ in node.outputs]
    for body in node.bodies:
        for row, inner in zip(links, _rounds(body), strict=True) if not body.gate else ():
            for i, strength in zip(body.inputs, inner, strict=True):
                row[i] = max(row[i], strength)
    # inputs that select a branch, or that determine a loop's trip count
    deciding = set(range(len(node.inputs))).difference(*(body.inputs for body in node.bodies))
    for gate in (body for body in node.bodies if body.gate):
        carried = {i: k for k, i in gate.carries}
        for i, column in enumerate(zip(*dependence_matrix(gate.graph), strict=True)):
            if any(column):
                deciding.add(gate.inputs[i])
                if i in carried:
                    deciding |= {j for j, s in enumerate(links[carried[i]]) if s}
    return tuple(
        tuple(max(s, _CUT) if i in deciding else s for i, s in enumerate(row)) for row in links
    )


def _rounds(body: Body) -> list[list[Dependence]]:
    """How a body's outputs depend on its inputs after any number of iterations: a fixed point."""
    matrix = dependence_matrix(body.graph)
    if body.skippable:
        for k, i in body.carries:
            value = body.graph.values[body.graph.inputs[i]]
            matrix[k][i] = max(matrix[k][i], _FULL if value.is_inexact else _CUT)
    changed = bool(body.carries)
    while changed:
        changed = False
        for row in matrix:
            for k, i in body.carries:
                for j, strength in enumerate(matrix[k]):
                    if min(row[i], strength) > row[j]:
                        row[j], changed = min(row[i], strength), True
    return matrix


def entering_body(
    body: Body, entering: Sequence[Dependence], after: Sequence[Dependence]
) -> Strengths:
    """The strengths of a body's inputs in any iteration, from those of its node's inputs."""
    start = _Strengths((), {})
    for value, i in zip(body.graph.inputs, body.inputs, strict=True):
        start.raise_to(value, entering[i])
    for k, i in body.carries:
        start.raise_to(body.graph.inputs[i], after[k])
    return start


def leaving_body(body: Body, node: Node, leaving: Sequence[Dependence]) -> Strengths:
    """How much each output of a body matters: as a result, to the condition, or as a carry."""
    if body.gate:
        return dict.fromkeys(body.graph.outputs, _FULL)
    strengths = list(leaving)
    for gate in (other for other in node.bodies if other.gate):
        read = [max(column) for column in zip(*dependence_matrix(gate.graph), strict=True)]
        for k, i in gate.carries:
            strengths[k] = max(strengths[k], min(_CUT, read[i]))
    matrix = _rounds(body) if body.carries else []
    for k, i in body.carries:
        column = [row[i] for row in matrix]
        strengths[k] = max(strengths[k], through(column, strengths))
    end = _Strengths((), {})
    for value, strength in zip(body.graph.outputs, strengths, strict=True):
        end.raise_to(value, strength)
    return end
