"""Shifts: what has no derivative, is taken off, and is added again or cancels.

In ``x - stop(max(x))`` the derivative goes on with x, and in ``log(sum(exp(x - s))) + s`` the shift
s is added again: neither stop is a place where a derivative is lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from gradtools.seeing.graphs.derivative_flow import Strengths, ancestors, links_of
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph

_NONE, _CUT, _ZERO, _FULL = Dependence
AT_PLACES = frozenset({"scatter", "scatter_add", "update"})
ADDITIVE = frozenset({"add", "subtract", "sum", "mean", "concatenate", "stack"}) | AT_PLACES
SHAPING = frozenset(
    {"reshape", "squeeze", "expand_dims", "broadcast", "transpose", "identity", "cast"}
)
LINEAR = SHAPING | {"multiply", "divide", "negate", "index", "where", "select", "gather"}


def without_shifts(graph: PlainGraph, reached: Strengths) -> PlainGraph:
    """The graph without the links from shifts to the nodes that add or subtract them."""
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        if shifts := shifts_at(graph, node, reached):
            most = [_NONE if value in shifts else _FULL for value in node.inputs]
            links = tuple(tuple(map(min, row, most)) for row in links_of(graph, node))
            nodes[i] = replace(node, links=links)
    return replace(graph, nodes=tuple(nodes))


def shifts_at(graph: PlainGraph, node: Node, reached: Strengths) -> set[int]:
    """The non-differentiable summands of a node that are shifts."""
    if node.operation not in ADDITIVE:
        return set()
    flowing, lost = flowing_and_lost(graph, node, reached)
    if not (flowing and lost):
        return set()
    before = taken_before(graph, flowing, reached)
    is_shift = lambda v: flowing & ancestors(graph, v) or is_added_again(graph, v, before, reached)
    return set(filter(is_shift, lost))


def flowing_and_lost(
    graph: PlainGraph, node: Node, reached: Strengths
) -> tuple[set[int], list[int]]:
    """A node's differentiable inputs, and those whose derivative is lost."""
    strengths = [reached.get(value, _NONE) for value in node.inputs]
    flowing = {v for v, s in zip(node.inputs, strengths, strict=True) if s == _FULL}
    lost = [v for v, s in zip(node.inputs, strengths, strict=True) if _NONE < s < _FULL]
    if node.operation in AT_PLACES:  # integers and booleans are indices
        lost = [v for v in lost if graph.values[v].is_inexact]
    return flowing, lost


def taken_before(graph: PlainGraph, flowing: set[int], reached: Strengths) -> set[int]:
    """The shifts, and values behind them, that entered on the paths to these values."""
    behind = flowing.union(*(ancestors(graph, v) for v in flowing))
    before: set[int] = set()
    for node in graph.nodes:
        if node.operation in ADDITIVE and behind.intersection(node.outputs):
            summands, lost = flowing_and_lost(graph, node, reached)
            for value in lost:
                above = ancestors(graph, value)
                if summands & above:
                    before |= {v for v in (value, *above) if reached.get(v, _NONE) < _FULL}
    return equal_values(graph, before)


def is_added_again(graph: PlainGraph, value: int, before: set[int], reached: Strengths) -> bool:
    """Whether a lost value is linear in the shifts that were subtracted before."""
    if not before or not first_lost(graph, value, reached) <= before:
        return False
    linear = set(before)
    for node in graph.nodes:
        if node.operation in LINEAR | ADDITIVE and linear.intersection(node.inputs):
            linear.update(node.outputs)
    return value in linear


def first_lost(graph: PlainGraph, value: int, reached: Strengths) -> set[int]:
    """The values, behind a lost value or equal to it, at which the derivative was first lost."""
    lost = {v for v in (value, *ancestors(graph, value)) if reached.get(v, _NONE) < _FULL}
    return {
        v
        for node in graph.nodes
        if any(reached.get(entering, _NONE) == _FULL for entering in node.inputs)
        for v in lost.intersection(node.outputs)
    }


def equal_values(graph: PlainGraph, values: set[int]) -> set[int]:
    """These values and all values equal to them by common-subexpression analysis."""
    if graph not in _classes:
        _classes[graph] = _value_classes(graph)
    classes = _classes[graph]
    wanted = {classes[v] for v in values if v in classes}
    return values.union(v for v, of in classes.items() if of in wanted)


def _value_classes(graph: PlainGraph) -> dict[int, int]:
    """Value numbering: equal numbers for equal expressions, up to reshapes."""
    classes: dict[int, int] = {}
    numbers: dict[Any, int] = {}
    for node in graph.nodes:
        if node.bodies:
            continue
        if node.operation in SHAPING and len(node.inputs) == len(node.outputs) == 1:
            classes[node.outputs[0]] = classes.get(node.inputs[0], node.inputs[0])
            continue
        read = tuple([classes.get(v, v) for v in node.inputs])
        about = [(key, repr(x)) for key, x in node.attributes.items() if key != "keepdims"]
        for k, v in enumerate(node.outputs):
            shape = [n for n in graph.values[v].shape if n != 1]
            key = node.operation, node.native, read, tuple(sorted(about)), k, tuple(shape)
            classes[v] = numbers.setdefault(key, -1 - len(numbers))
    return classes


_classes: WeakKeyDictionary[PlainGraph, dict[int, int]] = WeakKeyDictionary()
