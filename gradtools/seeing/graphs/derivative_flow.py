"""Computes how strongly the values of a graph depend on each other, on a scale of four strengths.

The strengths (none, cut, zero derivative, differentiable) form a max-min semiring. The strength of
a path is the minimum strength of its links, and the dependence of a value on another value is the
maximum strength over all paths::

    dependence(out, in) = max over paths of min over links

`forward` computes how strongly each value depends on an input; `backward` computes how strongly the
outputs depend on each value.

Nodes of loops, branches and calls are first replaced by the operations of their bodies. The values
inside of a call get new indices. At the boundary of a loop or branch, a "join" node links the outer
value to the inner value, with the strength of the dependence::

    loop     initial -> carry,  result -> carry,  condition -cut-> result
    branch   result of each branch -> result,  predicate -cut-> result

Several nodes may produce the same value, and the joins of a loop form a cycle, so
strengths are computed as a fixed point over all iterations.
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
    """Computes ``matrix[output][input]``, the dependence of each output on each input."""
    rows = [backward(graph, {out: _FULL}) for out in graph.outputs]
    return [[row.get(value, _NONE) for value in graph.inputs] for row in rows]


def forward(
    graph: PlainGraph, start: Strengths, without: Container[int] = ()
) -> dict[int, Dependence]:
    """Computes how strongly each value depends on `start`; independent values have no entry.

    without: The indices of values; paths through these values are ignored.
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
    """Propagates dependence through a graph, or through its reverse, until a fixed point."""
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
    """Returns the strongest dependence of `values` on each value of the graph."""
    return backward(graph, dict.fromkeys(values, _FULL))


def links_of(graph: PlainGraph, node: Node) -> Links:
    """Returns ``links[k][i]``, the dependence of output k of a node on its input i."""
    if node.links is not None:
        return node.links
    return _links_of_bodies(node) if node.bodies else even_links(node, graph.values)


@memoized
def _links_of_bodies(node: Node) -> Links:
    """Computes the links of a loop, branch or call from the paths through its bodies."""
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


# --- graphs without bodies ---------------------------------------------------------------


def flat(graph: PlainGraph) -> PlainGraph:
    """Returns the graph with its bodies inlined; the values of `graph` keep their indices."""
    return _flattened(graph)[0] if _has_bodies(graph) else graph


def original(graph: PlainGraph, node: Node) -> Node:
    """Returns the node of `graph` or of its bodies that was copied to `node` of `flat(graph)`."""
    return _flattened(graph)[1][id(node)] if _has_bodies(graph) else node


def _has_bodies(graph: PlainGraph) -> bool:
    return any(node.bodies and node.links is None for node in graph.nodes)


def join(source: int, target: int, strength: Dependence = _FULL) -> Node:
    """Creates a "join" node, which passes the value `source` to the value `target`."""
    return Node(JOIN, (source,), (target,), links=((strength,),))


@memoized
def _flattened(graph: PlainGraph) -> tuple[PlainGraph, Mapping[int, Node]]:
    """Returns the graph with inlined bodies, and a map from node ids to the original nodes."""
    values, captured = dict(graph.values), list(graph.captured)
    nodes, originals = list[Node](), dict[int, Node]()

    def new(value: Value) -> int:
        values[len(values)] = value
        return len(values) - 1

    def add(program: PlainGraph, numbers: dict[int, int], call: Node | None) -> None:
        for node in program.nodes:
            inputs = [numbers[v] for v in node.inputs]
            made = [new(program.values[v]) if call else v for v in node.outputs]
            numbers.update(zip(node.outputs, made, strict=True))
            if node.bodies and node.links is None:
                results = enter(node, inputs, made, call or node)
                numbers.update(zip(node.outputs, results, strict=True))
                continue
            moved = replace(node, inputs=tuple(inputs), outputs=tuple(made))
            if call is not None:
                source, scope = node.source or call.source, node.scope or call.scope
                moved = replace(moved, source=source, scope=scope)
            nodes.append(moved)
            originals[id(moved)] = node

    def enter(node: Node, inputs: Sequence[int], made: Sequence[int], call: Node) -> Sequence[int]:
        """Adds the nodes of the bodies of `node`; returns the indices of the node's outputs."""
        results: Sequence[int] = made
        is_call = len(node.bodies) == 1 and not (node.bodies[0].carries or node.bodies[0].gate)
        deciding = set(range(len(inputs))).difference(*(body.inputs for body in node.bodies))
        nodes.extend(join(inputs[i], v, _CUT) for i in sorted(deciding) for v in made)
        for body in node.bodies:
            program = body.graph
            inner = dict(zip(program.inputs, (inputs[i] for i in body.inputs), strict=True))
            inner |= {v: new(program.values[v]) for v in program.captured}
            captured.extend(inner[v] for v in program.captured)
            carry(body, inner, made)
            add(program, inner, call)
            ends = [inner[v] for v in program.outputs]
            if body.gate:
                nodes.extend(join(end, v, _CUT) for end in ends for v in made)
            else:
                nodes.extend(map(join, ends, made))
            results = ends if is_call else made
        return results

    def carry(body: Body, inner: dict[int, int], made: Sequence[int]) -> None:
        for k, i in body.carries:
            v = body.graph.inputs[i]
            initial, inner[v] = inner[v], new(body.graph.values[v])
            nodes.extend((join(initial, inner[v]), join(made[k], inner[v])))
            if body.skippable:
                is_inexact = body.graph.values[v].is_inexact
                nodes.append(join(initial, made[k], _FULL if is_inexact else _CUT))

    own = {v: v for v in graph.values}
    add(graph, own, None)
    outputs = tuple(own[v] for v in graph.outputs)
    ends = replace(graph, nodes=tuple(nodes), values=values, outputs=outputs)
    return replace(ends, captured=tuple(captured)), originals
