"""Dependence of each value of a graph on each other one: taint tracking with four strengths.

The strengths (none, cut, zero derivative, differentiable) form a max-min semiring. A path is as
strong as its weakest link, and two values depend as strongly as their strongest path::

    dependence(out, in) = max over paths of min over links

The forward pass computes how strongly each value depends on an input, the backward pass how
strongly the outputs depend on each value. The links of a node with bodies are computed from the
paths through its bodies; for loops that is a fixed point over any number of iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, TypeVar

from gradtools.seeing.graphs.nodes import (
    Body,
    Dependence,
    Links,
    Node,
    PlainGraph,
    even_links,
    memoized,
)

T = TypeVar("T")
_NONE, _CUT, _ZERO, _FULL = Dependence
Strengths = Mapping[int, Dependence]


def dependence_matrix(graph: PlainGraph) -> list[list[Dependence]]:
    """``matrix[output][input]``: how each output depends on each input."""
    rows = [[reached.get(out, 0) for reached in _levels(graph)] for out in graph.outputs]
    inputs = range(len(graph.inputs))
    return [[Dependence(sum(mask >> i & 1 for mask in row)) for i in inputs] for row in rows]


@memoized
def _levels(graph: PlainGraph) -> list[dict[int, int]]:
    """For each strength the inputs on which each value depends at least so, as a mask."""
    bits: dict[int, int] = {}
    for i, value in enumerate(graph.inputs):
        bits[value] = bits.get(value, 0) | 1 << i
    return [masks(graph, bits, strength) for strength in (_CUT, _ZERO, _FULL)]


def masks(graph: PlainGraph, start: Mapping[int, int], strength: Dependence) -> dict[int, int]:
    """For each value the union of the masks in `start` on which it depends this strongly."""

    def carried(links: Sequence[Dependence], entering: Sequence[int]) -> int:
        pairs = zip(links, entering, strict=True)
        return any_of(mask for link, mask in pairs if link >= strength)

    return _propagated(graph, start, or_, carried, lambda mask: mask if strength == _CUT else 0)


def any_of(masks: Iterable[int]) -> int:
    """The union of all masks."""
    return reduce(or_, masks, 0)


def forward(
    graph: PlainGraph, start: Strengths, without: Container[int] = ()
) -> dict[int, Dependence]:
    """How strongly each value depends on those in `start`; independent values have no entry.

    without: Values through which no path leads.
    """
    return _propagated(graph, start, max, through, _as_cut, without=without)


def backward(
    graph: PlainGraph, end: Strengths, without: Container[int] = ()
) -> dict[int, Dependence]:
    """How strongly the values in `end` depend on each value of the graph."""
    return _propagated(graph, end, max, through, _as_cut, without=without, reverse=True)


def _as_cut(strength: Dependence) -> Dependence:
    return min(strength, _CUT)


def _propagated(
    graph: PlainGraph,
    start: Mapping[int, T],
    join: Callable[[T, T], T],
    carried: Callable[[Sequence[Dependence], Sequence[T]], T],
    outside: Callable[[T], T],
    reverse: bool = False,
    without: Container[int] = (),
) -> dict[int, T]:
    """Abstract interpretation of a graph, or of its reverse; values without an entry are zero.

    carried: What a value gets over its links from the values at their other ends.
    outside: What remains of it where data leaves the framework and comes back.
    """
    zero: Any = _NONE
    result: dict[int, T] = {}
    partners: dict[int, list[int]] = {}
    for pair in graph.outside:
        source, target = pair[::-1] if reverse else pair
        partners.setdefault(source, []).append(target)

    def raise_to(value: int, more: T) -> None:
        if value in without:
            return
        known = result.get(value, zero)
        joined = join(known, more)
        if joined != known:
            result[value] = joined
            for other in partners.get(value, ()):
                raise_to(other, outside(joined))

    for value, given in start.items():
        raise_to(value, given)
    for node in reversed(graph.nodes) if reverse else graph.nodes:
        sources, targets = (node.outputs, node.inputs) if reverse else (node.inputs, node.outputs)
        entering = [result.get(value, zero) for value in sources]
        if any(entering):
            links = links_of(graph, node)
            rows = zip(*links, strict=True) if reverse else links
            for value, row in zip(targets, rows, strict=True):
                raise_to(value, carried(row, entering))
    return result


def through(links: Sequence[Dependence], strengths: Sequence[Dependence]) -> Dependence:
    """The strongest path that continues through one of these links."""
    return max(map(min, links, strengths), default=_NONE)


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
    body: Body, node: Node, known: Mapping[int, T], join: Callable[[T, T], T]
) -> dict[int, T]:
    """What is known of a body's inputs in any iteration, from what is known around its node."""
    zero: Any = _NONE
    ties = [(node.inputs[outer], i) for i, outer in enumerate(body.inputs)]
    start: dict[int, T] = {}
    for outer, i in (*ties, *((node.outputs[k], i) for k, i in body.carries)):
        inner = body.graph.inputs[i]
        start[inner] = join(start.get(inner, zero), known.get(outer, zero))
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
    end: dict[int, Dependence] = {}
    for value, strength in zip(body.graph.outputs, strengths, strict=True):
        end[value] = max(strength, end.get(value, _NONE))
    return end
