"""Computes how each value of a graph depends on each other value: taint tracking with strengths.

The four strengths (none, cut, zero derivative, differentiable) form a max-min semiring. A path is
as strong as its weakest link, and two values depend as strongly as their strongest path::

    dependence(out, in) = max over paths of min over links

The forward pass computes how strongly each value depends on an input, the backward pass how
strongly the outputs depend on each value. The links of a node with bodies are computed from the
paths through its bodies; for loops this is a fixed point over any number of iterations.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from gradtools.seeing.graphs.nodes import (
    Body,
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
JOIN = "join"


@memoized
def dependence_matrix(graph: PlainGraph) -> list[list[Dependence]]:
    """Computes ``matrix[output][input]``, how each output depends on each input."""
    rows = [backward(graph, {out: _FULL}) for out in graph.outputs]
    return [[row.get(value, _NONE) for value in graph.inputs] for row in rows]


def forward(
    graph: PlainGraph, start: Strengths, without: Container[int] = ()
) -> dict[int, Dependence]:
    """Computes how strongly each value depends on `start`; independent values have no entry.

    without: Values that paths must not pass through.
    """
    return _propagated(graph, start, without, reverse=False)


def backward(
    graph: PlainGraph, end: Strengths, without: Container[int] = ()
) -> dict[int, Dependence]:
    """Computes how strongly the values in `end` depend on each value of the graph."""
    return _propagated(graph, end, without, reverse=True)


def _propagated(
    graph: PlainGraph, start: Strengths, without: Container[int], reverse: bool
) -> dict[int, Dependence]:
    """Interprets a graph, or its reverse, abstractly; values without an entry are zero."""
    result: dict[int, Dependence] = {}
    partners: dict[int, list[int]] = {}
    for pair in graph.outside:
        source, target = pair[::-1] if reverse else pair
        partners.setdefault(source, []).append(target)

    def raise_to(value: int, strength: Dependence) -> None:
        if value not in without and strength > result.get(value, _NONE):
            result[value] = strength
            for other in partners.get(value, ()):
                raise_to(other, min(strength, _CUT))

    for value, given in start.items():
        raise_to(value, given)
    for node in reversed(graph.nodes) if reverse else graph.nodes:
        sources, targets = (node.outputs, node.inputs) if reverse else (node.inputs, node.outputs)
        entering = [result.get(value, _NONE) for value in sources]
        if any(entering):
            links = links_of(graph, node)
            rows = zip(*links, strict=True) if reverse else links
            for value, row in zip(ends[1], rows, strict=True):
                strength = max(map(min, row, entering), default=_NONE)
                if strength > result.get(value, _NONE) and value not in without:
                    result[value], moved = strength, True
    return result


def through(links: Sequence[Dependence], strengths: Sequence[Dependence]) -> Dependence:
    """Returns the strength of the strongest path that continues through these links."""
    return max(map(min, links, strengths), default=_NONE)


@memoized
def behind(graph: PlainGraph, values: tuple[int, ...]) -> Strengths:
    """Computes how strongly these values depend on each value of the graph."""
    return backward(graph, dict.fromkeys(values, _FULL))


def links_of(graph: PlainGraph, node: Node) -> Links:
    """Returns ``links[k][i]``, how output k of a node depends on its input i."""
    if node.links is not None:
        return node.links
    return _links_of_bodies(node) if node.bodies else even_links(node, graph.values)


@memoized
def _links_of_bodies(node: Node) -> Links:
    """Computes the links of a node from the paths through its bodies."""
    links = [[_NONE] * len(node.inputs) for _ in node.outputs]
    for body in node.bodies:
        for row, inner in zip(links, _rounds(body), strict=True) if not body.gate else ():
            for i, strength in zip(body.inputs, inner, strict=True):
                row[i] = max(row[i], strength)
    # inputs that select a branch or determine a loop's trip count
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
    """Computes the dependence of a body's outputs on its inputs after any number of iterations."""
    matrix = [list(row) for row in dependence_matrix(body.graph)]
    if body.skippable:
        for k, i in body.carries:
            v = body.graph.inputs[i]
            initial, inner[v] = inner[v], new(body.graph.values[v])
            nodes.extend((join(initial, inner[v]), join(made[k], inner[v])))
            if body.skippable:
                is_inexact = body.graph.values[v].is_inexact
                nodes.append(join(initial, made[k], _FULL if is_inexact else _CUT))


def entering_body(body: Body, node: Node, known: Strengths) -> Strengths:
    """Returns the strengths of a body's inputs in any iteration, from the values around it."""
    ties = [(node.inputs[outer], i) for i, outer in enumerate(body.inputs)]
    start: dict[int, Dependence] = {}
    for outer, i in (*ties, *((node.outputs[k], i) for k, i in body.carries)):
        inner = body.graph.inputs[i]
        start[inner] = max(start.get(inner, _NONE), known.get(outer, _NONE))
    return start


def leaving_body(body: Body, node: Node, leaving: Sequence[Dependence]) -> Strengths:
    """Returns how a body's outputs matter: as a result, to the condition, or as a carry."""
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
    end: dict[int, Dependence] = {}
    for value, strength in zip(body.graph.outputs, strengths, strict=True):
        end[value] = max(strength, end.get(value, _NONE))
    return end
