"""Computes the edges of a graph, from the producer of each value to its readers.

A value that a later pass reads is a *saved* residual. If a gradient is lost on an edge, `Edge.cut`
is the reason, such as "detached". An edge to a comparison that only computes a mask, or to the
stop_gradient of the maximum in a softmax, has no `cut`. An edge to any other `detach` or
`stop_gradient` has a `cut`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradtools.seeing.graphs.derivative_flow import links_of, original
from gradtools.seeing.graphs.gradient_losses import losses
from gradtools.seeing.graphs.nodes import Dependence, Edge, Node, PlainGraph, memory_of

_NONE, _CUT, _ZERO, _FULL = Dependence
_ON_PURPOSE = (
    "detached",
    "no_grad",
    "inner_gradient",
    "left_framework",
    "in_place_data",
    "rule",
    "edit",
)
_PASSING = ("broadcast", "reshape", "maximum", "identity", "expand_dims", "squeeze")


def edges_of(graph: PlainGraph) -> tuple[Edge, ...]:
    """Returns the edges of a graph, without the edges inside of its bodies."""
    makers = {value: i for i, node in enumerate(graph.nodes) for value in node.outputs}
    phases = phases_of(graph.nodes)
    lost = lost_links(graph)
    edges = []
    for i, node in enumerate(graph.nodes):
        for value, strength, cut in reads_of(graph, node, lost):
            size, saved = graph.values[value].bytes, node.phase > phases[value]
            edges.append(Edge(makers.get(value), i, value, size, saved, strength, cut))
    edges += [Edge(makers.get(v), None, v, graph.values[v].bytes) for v in graph.outputs]
    return tuple(edges)


def kept_anew(graph: PlainGraph) -> dict[int, int]:
    """Maps each residual that the forward pass computes to its size; counts each storage once."""
    nodes, phases = [node for node in graph.nodes if not node.phase], phases_of(graph.nodes)
    read = {v for n in graph.nodes for v in n.inputs if n.phase > phases[v]}
    kept = {memory_of(graph.values, v) for node in nodes for v in node.outputs if v in read}
    return {v: graph.values[v].bytes for v in sorted(kept - alive_anyway(graph))}


def alive_anyway(graph: PlainGraph) -> frozenset[int]:
    """Returns the indices of inputs and captured arrays, which stay in memory in any case."""
    return frozenset((*graph.inputs, *graph.captured))


def phases_of(nodes: Sequence[Node]) -> dict[int, int]:
    """Maps each value to the pass that computes it, and each input to its first reader's pass."""
    phases: dict[int, int] = {}
    for node in nodes:
        for value in node.inputs:
            phases[value] = min(node.phase, phases.get(value, node.phase))
    return phases | {value: node.phase for node in nodes for value in node.outputs}


def reads_of(
    graph: PlainGraph, node: Node, lost: frozenset[tuple[int, int]]
) -> Iterator[tuple[int, Dependence, str | None]]:
    """Yields (value, dependence, kind of lost gradient or None) for each input of a node."""
    for i, (value, strength) in enumerate(zip(node.inputs, _strengths(graph, node), strict=True)):
        is_lost = strength == _CUT and (id(node), i) in lost
        yield value, strength, (node.loss or "no derivative") if is_lost else None


def _strengths(graph: PlainGraph, node: Node) -> tuple[Dependence, ...]:
    """Returns the strongest dependence of a node's outputs on each of its inputs."""
    columns = zip(*links_of(graph, node), strict=True)
    return tuple(map(max, columns)) or (_NONE,) * len(node.inputs)


def lost_links(graph: PlainGraph) -> frozenset[tuple[int, int]]:
    """Returns (``id`` of node, input position) of the forward links that lose a derivative."""
    forward, result = graph, set()
    if any(node.phase for node in graph.nodes):  # examine only the forward pass
        nodes = tuple(node for node in graph.nodes if not node.phase)
        made = {value for node in nodes for value in node.outputs}.union(graph.inputs)
        outputs = tuple(value for value in graph.outputs if value in made)
        forward = replace(graph, nodes=nodes, outputs=outputs)
    captured = (value for value in forward.captured if forward.values[value].shape)
    leaves = [v for v in (*forward.inputs, *captured) if forward.values[v].is_inexact]
    for value in leaves if any(node.loss for _, node in forward.walk()) else ():
        lost = losses(forward, value)
        result |= {(id(original(forward, loss.node)), loss.input) for loss in lost}
    makers = {value: node for node in forward.nodes for value in node.outputs}
    for node in forward.nodes:
        if node.loss in _ON_PURPOSE and not node.bodies and not _is_shift(node, makers):
            for i, strength in enumerate(_strengths(forward, node)):
                if strength == _CUT and graph.values[node.inputs[i]].is_inexact:
                    result.add((id(node), i))
    return frozenset(result)


def _is_shift(node: Node, makers: dict[int, Node]) -> bool:
    """Returns whether `node` stops the gradient of a maximum, as in a softmax."""
    queue = [node]
    while queue:
        made = [makers[value] for value in queue.pop().inputs if value in makers]
        if any(before.operation == "max" for before in made):
            return True
        queue += [before for before in made if before.operation in _PASSING]
    return False
