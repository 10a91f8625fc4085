"""Finds the operations at which a derivative is lost, also inside the bodies of nodes.

A link of an operation is a *loss* if its input value depends differentiably on the program's input,
its output value does not, and data flows from there to an output of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gradtools.seeing.graphs.derivative_flow import (
    Strengths,
    any_of,
    backward,
    entering_body,
    forward,
    leaving_body,
    links_of,
    through,
)
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph
from gradtools.seeing.graphs.shifts import without_shifts

_NONE, _CUT, _ZERO, _FULL = Dependence


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
    matters = backward(without_shifts(graph, reached), end)
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
