"""Finds the operations at which a derivative is lost, also inside the bodies of nodes.

A link of an operation is a *loss* if its input value depends differentiably on the program's input,
its output value does not, and data flows from there to an output of the program.

A *shift* is a value without a derivative that is taken off and cancels or is added again. In
``x - stop(max(x))`` the derivative goes on with x, and in ``log(sum(exp(x - s))) + s`` the shift s
is added again: neither stop is a place where a derivative is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from gradtools.seeing.graphs.derivative_flow import (
    Strengths,
    ancestors,
    any_of,
    backward,
    entering_body,
    forward,
    leaving_body,
    links_of,
    through,
)
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph

_NONE, _CUT, _ZERO, _FULL = Dependence
AT_PLACES = frozenset({"scatter", "scatter_add", "update"})
ADDITIVE = frozenset({"add", "subtract", "sum", "mean", "concatenate", "stack"}) | AT_PLACES
SHAPING = frozenset(
    {"reshape", "squeeze", "expand_dims", "broadcast", "transpose", "identity", "cast"}
)
LINEAR = SHAPING | {"multiply", "divide", "negate", "index", "where", "select", "gather"}


@dataclass(frozen=True)
class Loss:
    """One link at which the derivative to an input is lost.

    Attributes:
        node: The operation that loses the derivative.
        output: The index of the output that has no derivative.
        input: The index of the input that still has one.
        whole: Whether the whole gradient of the program's input is lost, not only one term.
        value: The graph's value at that output.
        call: The outermost node whose body contains the operation, if any.
        meant: Whether the stop looks intentional, because its term trains something else.
    """

    node: Node
    output: int
    input: int
    whole: bool
    value: int
    call: Node | None = None
    meant: bool = False


@dataclass(frozen=True)
class _Step:
    """An operation on a path from the start values to the end values of a search.

    Attributes:
        node: The operation.
        entering: How strongly its inputs depend on the start values.
        leaving: How strongly the end values depend on its outputs.
        reached: How strongly each value of the graph depends on the start values.
    """

    node: Node
    entering: Sequence[Dependence]
    leaving: Sequence[Dependence]
    reached: Strengths


def search(
    graph: PlainGraph,
    start: Strengths,
    end: Strengths,
    call: Node | None,
    at: Callable[[PlainGraph, _Step], Iterable[Loss] | None],
) -> Iterator[Loss]:
    """What `at` says of each operation that matters, in bodies where it says None of the whole."""
    reached = forward(graph, start)
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        if shifts := shifts_at(graph, node, reached):  # take their links off
            most = [_NONE if value in shifts else _FULL for value in node.inputs]
            links = tuple(tuple(map(min, row, most)) for row in links_of(graph, node))
            nodes[i] = replace(node, links=links)
    matters = backward(replace(graph, nodes=tuple(nodes)), end)
    for node in graph.nodes:
        leaving = [matters.get(value, _NONE) for value in node.outputs]
        if not any(leaving):
            continue
        entering = [reached.get(value, _NONE) for value in node.inputs]
        result = at(graph, _Step(node, entering, leaving, reached))
        if result is not None:
            yield from (replace(loss, call=call) for loss in result)
        elif node.bodies and node.links is None:
            after = [through(row, entering) for row in links_of(graph, node)]
            for body in node.bodies:
                inner = entering_body(body, entering, after), leaving_body(body, node, leaving)
                yield from search(body.graph, *inner, call or node, at)


def lossy(graph: PlainGraph, step: _Step) -> Iterable[Loss] | None:
    """The losses at an operation; None for a node whose bodies must be searched."""
    node, entering = step.node, step.entering
    if not any(entering):
        return []
    if node.bodies and node.links is None:
        return None
    return [
        Loss(node, k, i, True, node.outputs[k])
        for k, row in enumerate(links_of(graph, node))
        if step.leaving[k] and through(row, entering) < _FULL
        for i, link in enumerate(row)
        if entering[i] == _FULL and _NONE < link < _FULL
    ]


def overwritten(graph: PlainGraph, value: int) -> list[Loss]:
    """The in-place operations that overwrite all that depends on a value before it is used."""

    def at(graph: PlainGraph, step: _Step) -> Iterable[Loss] | None:
        if any(value in step.reached for value in step.node.overwrites):
            return [Loss(step.node, 0, 0, True, step.node.outputs[0])]
        return None if any(step.entering) else []

    return [*search(graph, {value: _FULL}, dict.fromkeys(graph.outputs, _FULL), None, at)]


def between(graph: PlainGraph, value: int, chosen: Callable[[Node], bool]) -> list[Node]:
    """The chosen operations that lie on a differentiable path from a value to an output."""

    def at(graph: PlainGraph, step: _Step) -> Iterable[Loss] | None:
        if _FULL not in step.entering or _FULL not in step.leaving:
            return []
        return [Loss(step.node, 0, 0, False, 0)] if chosen(step.node) else None

    end = dict.fromkeys(graph.outputs, _FULL)
    return [loss.node for loss in search(graph, {value: _FULL}, end, None, at)]


def joined(
    flows: Iterable[tuple[Sequence[Hashable], Sequence[Hashable]]], at: Sequence[int]
) -> int | None:
    """The position of the first operation that depends on all of several others.

    Args:
        flows: For each operation the values that it reads and the values that it makes.
        at: The positions of the others; an operation counts as depending on itself.
    """
    if not at:
        return None
    everything = (1 << len(at)) - 1
    carried: dict[Hashable, int] = {}
    for position, (reads, makes) in enumerate(flows):
        result = any_of(1 << k for k, other in enumerate(at) if other == position)
        result |= any_of(carried.get(value, 0) for value in reads)
        if result == everything:
            return position
        carried.update((value, result) for value in makes if result)
    return None


# --- shifts ------------------------------------------------------------------------------


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
    """These values and all values equal to them, by value numbering, up to reshapes."""
    if graph not in _classes:
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
                shape = tuple([n for n in graph.values[v].shape if n != 1])
                key = node.operation, node.native, read, tuple(sorted(about)), k, shape
                classes[v] = numbers.setdefault(key, -1 - len(numbers))
        _classes[graph] = classes
    known = _classes[graph]
    wanted = {known[v] for v in values if v in known}
    return values.union(v for v, of in known.items() if of in wanted)


_classes: WeakKeyDictionary[PlainGraph, dict[int, int]] = WeakKeyDictionary()
