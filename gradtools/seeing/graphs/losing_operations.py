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
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph, memoized

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
class Step:
    """An operation on a path from the start values to the end values of `steps_between`.

    Attributes:
        graph: The program that contains the operation, which may be a body.
        node: The operation.
        entering: How strongly its inputs depend on the start values.
        reached: How strongly each value of the graph depends on the start values.
        leaving: How strongly the end values depend on its outputs.
        call: The outermost node whose body contains the operation, if any.
    """

    graph: PlainGraph
    node: Node
    entering: Sequence[Dependence]
    reached: Strengths
    leaving: Sequence[Dependence]
    call: Node | None


def steps_between(
    graph: PlainGraph,
    start: Strengths,
    end: Strengths,
    call: Node | None = None,
    whole: Callable[[Node], bool] = lambda node: False,
) -> Iterator[Step]:
    """The operations that matter to the end values, also in bodies, but not in `whole` nodes."""
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
        yield Step(graph, node, entering, reached, leaving, call)
        is_opened = any(entering) and node.links is None and not whole(node)
        for body in node.bodies if is_opened else ():
            inner = entering_body(body, node, reached, max), leaving_body(body, node, leaving)
            yield from steps_between(body.graph, *inner, call or node, whole)


def losses_between(
    graph: PlainGraph, start: Strengths, ends: Iterable[int], call: Node | None = None
) -> list[Loss]:
    """The links at which a derivative of the end values to the start values is lost."""
    return [
        Loss(step.node, k, i, True, step.node.outputs[k], step.call)
        for step in steps_between(graph, start, dict.fromkeys(ends, _FULL), call)
        if step.node.links is not None or not step.node.bodies
        for k, row in enumerate(links_of(step.graph, step.node))
        if step.leaving[k] and through(row, step.entering) < _FULL
        for i, link in enumerate(row)
        if step.entering[i] == _FULL and _NONE < link < _FULL
    ]


def overwritten(graph: PlainGraph, value: int) -> list[Loss]:
    """The in-place operations that overwrite all that depends on a value before it is used."""
    return [
        Loss(step.node, 0, 0, True, step.node.outputs[0], step.call)
        for step in steps_between(graph, {value: _FULL}, dict.fromkeys(graph.outputs, _FULL))
        if any(value in step.reached for value in step.node.overwrites)
    ]


def between(graph: PlainGraph, value: int, chosen: Callable[[Node], bool]) -> list[Node]:
    """The chosen operations that lie on a differentiable path from a value to an output."""
    end = dict.fromkeys(graph.outputs, _FULL)
    steps = steps_between(graph, {value: _FULL}, end, whole=chosen)
    on_path = (s.node for s in steps if _FULL in s.entering and _FULL in s.leaving)
    return [*filter(chosen, on_path)]


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
    known = _classes(graph)
    wanted = {known[v] for v in values if v in known}
    return values.union(v for v, of in known.items() if of in wanted)


@memoized
def _classes(graph: PlainGraph) -> dict[int, int]:
    """The class of equal values of each value."""
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
    return classes
