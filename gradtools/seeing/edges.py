"""The edges of a graph: which value goes from where to where, and what becomes of its derivative.

A value that a later pass reads was *saved* for it. A cut is told with its reason where something
is lost by it; a comparison that only makes a mask loses nothing, for its operand reaches the
result by another way, and in the passes after the first no derivative is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradtools.seeing.findings import KINDS
from gradtools.seeing.flow import links_of
from gradtools.seeing.graph import Dependence, Edge, Graph, Node

_NONE, _CUT, _ZERO, _FULL = Dependence
_MASKS = ("discrete", "integer_cast")


def edges_of(graph: Graph) -> tuple[Edge, ...]:
    """Every edge of one graph, without those of its bodies."""
    makers = {value: i for i, node in enumerate(graph.nodes) for value in node.outputs}
    strengths = [strengths_of(graph, node) for node in graph.nodes]
    flowing = _flowing(graph, strengths)
    edges = []
    for i, node in enumerate(graph.nodes):
        for value, strength in zip(node.inputs, strengths[i], strict=True):
            maker = makers.get(value)
            saved = node.phase > (graph.nodes[maker].phase if maker is not None else 0)
            cut = cut_reason(graph, node, value, strength, flowing)
            edges.append(Edge(maker, i, value, graph.values[value].bytes, saved, strength, cut))
    edges += _outside(graph, makers)
    edges += [Edge(makers.get(v), None, v, graph.values[v].bytes) for v in graph.outputs]
    return tuple(edges)


def strengths_of(graph: Graph, node: Node) -> tuple[Dependence, ...]:
    """How strongly a node's outputs, taken together, depend on each of its inputs."""
    columns = zip(*links_of(graph, node), strict=True)
    found = tuple(max(column) for column in columns)
    return found or (_NONE,) * len(node.inputs)


def flowing_values(graph: Graph) -> frozenset[int]:
    """The values that have at least one reader with a derivative."""
    return _flowing(graph, [strengths_of(graph, node) for node in graph.nodes])


def _flowing(graph: Graph, strengths: list[tuple[Dependence, ...]]) -> frozenset[int]:
    pairs = zip(graph.nodes, strengths, strict=True)
    return frozenset(
        value
        for node, row in pairs
        for value, strength in zip(node.inputs, row, strict=True)
        if strength == _FULL
    )


def cut_reason(
    graph: Graph, node: Node, value: int, strength: Dependence, flowing: frozenset[int]
) -> str | None:
    """Why no derivative flows to this input, where one is lost by it; else None."""
    lost = strength == _CUT and graph.values[value].is_inexact and not node.phase
    if not lost or (node.bodies and node.loss is None):
        return None
    if node.loss in (None, *_MASKS) and value in flowing:
        return None
    return reason(node.loss)


def reason(loss: str | None) -> str:
    """What a kind of loss is called in a picture: few words."""
    if loss is None:
        return "no derivative"
    return _SHORT.get(loss, KINDS[loss].reason if loss in KINDS else loss)


_SHORT = {
    "detached": "stopped on purpose",
    "left_framework": "leaves the framework",
    "integer_cast": "cast to an integer",
    "discrete": "a discrete step",
    "zero_derivative": "derivative zero",
    "no_grad": "gradients switched off",
    "in_place_data": "overwritten in place",
    "rule": "its rule carries none",
}


def _outside(graph: Graph, makers: dict[int, int]) -> Iterator[Edge]:
    """What flows through NumPy or a Python number, to each reader on the other side."""
    for source, target in graph.outside:
        size = graph.values[source].bytes
        readers: list[int | None] = [
            i for i, node in enumerate(graph.nodes) if target in node.inputs
        ]
        for reader in readers or ([None] if target in graph.outputs else []):
            cut = reason("left_framework")
            yield Edge(makers.get(source), reader, source, size, False, _CUT, cut)
