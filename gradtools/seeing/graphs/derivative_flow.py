"""Dependence of each value of a graph on each other value: taint tracking with four strengths.

The strengths (none, cut, zero derivative, differentiable) form a max-min semiring. A path is as
strong as its weakest link, and two values depend as strongly as their strongest path::

    dependence(out, in) = max over paths of min over links

The forward pass computes how strongly each value depends on an input, the backward pass how
strongly the outputs depend on each value. The bodies of loops, branches and calls are flattened
(`flattening.py`); for loops the result is a fixed point over any number of iterations.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from gradtools.seeing.graphs.flattening import flat
from gradtools.seeing.graphs.nodes import (
    Dependence,
    Links,
    Node,
    PlainGraph,
    Value,
    even_links,
    memoized,
)

_NONE, _CUT, _ZERO, _FULL = Dependence
Strengths = Mapping[int, Dependence]


@memoized
def dependence_matrix(graph: PlainGraph) -> list[list[Dependence]]:
    """``matrix[output][input]``: how each output depends on each input."""
    rows = [backward(graph, {out: _FULL}) for out in graph.outputs]
    return [[row.get(value, _NONE) for value in graph.inputs] for row in rows]


def forward(
    graph: PlainGraph, start: Strengths, without: Container[int] = ()
) -> dict[int, Dependence]:
    """How strongly each value depends on those in `start`; independent values have no entry.

    without: Values through which no path leads.
    """
    return _propagated(graph, start, without, reverse=False)


def backward(
    graph: PlainGraph, end: Strengths, without: Container[int] = ()
) -> dict[int, Dependence]:
    """How strongly the values in `end` depend on each value of the graph."""
    return _propagated(graph, end, without, reverse=True)


def _propagated(
    graph: PlainGraph, start: Strengths, without: Container[int], reverse: bool
) -> dict[int, Dependence]:
    """Abstract interpretation of a graph, or of its reverse, to the fixed point."""
    graph = flat(graph)
    result = {v: strength for v, strength in start.items() if strength and v not in without}
    moved = bool(result)
    while moved:
        moved = False
        for node in reversed(graph.nodes) if reverse else graph.nodes:
            ends = (node.outputs, node.inputs) if reverse else (node.inputs, node.outputs)
            entering = [result.get(value, _NONE) for value in ends[0]]
            if not any(entering):
                continue
            links = links_of(graph, node)
            rows = zip(*links, strict=True) if reverse else links
            for value, row in zip(ends[1], rows, strict=True):
                strength = max(map(min, row, entering), default=_NONE)
                if strength > result.get(value, _NONE) and value not in without:
                    result[value], moved = strength, True
    return result


@memoized
def behind(graph: PlainGraph, values: tuple[int, ...]) -> Strengths:
    """How strongly these values depend on each value of the graph."""
    return backward(graph, dict.fromkeys(values, _FULL))


def links_of(graph: PlainGraph, node: Node) -> Links:
    """``links[k][i]``: how output k of a node depends on its input i."""
    if node.links is not None:
        return node.links
    return _links_of_bodies(node) if node.bodies else even_links(node, graph.values)


@memoized
def _links_of_bodies(node: Node) -> Links:
    """The links of a node, from the paths through its bodies."""
    count = len(node.inputs)
    inputs, outputs = range(count), range(count, count + len(node.outputs))
    alone = replace(node, inputs=tuple(inputs), outputs=tuple(outputs))
    values = dict.fromkeys((*inputs, *outputs), Value((), ""))
    for body in node.bodies:
        values |= {
            i: body.graph.values[v] for i, v in zip(body.inputs, body.graph.inputs, strict=True)
        }
    graph = PlainGraph((alone,), values, alone.inputs, alone.outputs)
    return tuple(map(tuple, dependence_matrix(graph)))
