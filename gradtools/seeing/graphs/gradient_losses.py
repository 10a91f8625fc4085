"""Finds where a gradient is lost: for a leaf as a whole, for a summand of the loss, at an edit.

Values are *differentiable* in a leaf, or only data flows to them from it (`derivative_flow.py`). A
gradient is lost at the operations that read a differentiable value and whose result leads to the
end by values that are not differentiable, all the way::

    lost(op)   if  full(input), not full(output), output ~> end through values that are not full

So a stop inside of a value that is differentiable over another path is no loss: a straight-through
estimator in any spelling, the shift of a softmax, a mask, a normalizing constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from gradtools.seeing.graphs.derivative_flow import (
    Strengths,
    ancestors,
    backward,
    behind,
    entering_body,
    forward,
    leaving_body,
    links_of,
)
from gradtools.seeing.graphs.nodes import Body, Dependence, Node, PlainGraph, memoized

_NONE, _CUT, _ZERO, _FULL = Dependence
STOPS = frozenset({"detached", "no_grad"})
_LISTED = STOPS | {"left_framework"}
SHAPING = frozenset(
    {"reshape", "squeeze", "expand_dims", "broadcast", "transpose", "identity", "cast"}
)


@dataclass(frozen=True)
class Loss:
    """An operation at which the derivative along a leaf is lost.

    Attributes:
        node: The operation.
        input: The position of its operand that still has a derivative.
        value: The graph's value that has none.
        call: The outermost node whose body contains the operation, if any.
        whole: Whether the leaf's whole gradient is lost, not only that of one summand.
        further: Whether the derivative was lost before it on every path.
    """

    node: Node
    input: int
    value: int
    call: Node | None = None
    whole: bool = True
    further: bool = False


# --- a leaf as a whole -------------------------------------------------------------------


def losses(graph: PlainGraph, leaf: int) -> list[Loss]:
    """The operations that lose the gradient of a leaf, none if it has one; in program order."""
    if behind(graph, tuple(graph.outputs)).get(leaf, _NONE) == _FULL:
        return []
    return losses_between(graph, {leaf: _FULL}, graph.outputs)


def losses_between(
    graph: PlainGraph, start: Strengths, ends: Sequence[int], call: Node | None = None
) -> list[Loss]:
    """The operations that lose the derivative of the ends along the start.

    Operations further on that lose it as well, on every path, are listed if they stop it, leave
    the framework, or stand on the same line: it takes a change at each of them.
    """
    first = list(_frontier(graph, start, dict.fromkeys(ends, _FULL), call))
    reached, places = forward(graph, start), {id(loss.node) for loss in first}
    lines = {loss.node.source for loss in first}
    further = []
    for node in graph.nodes if first else ():
        loses = node.loss and id(node) not in places and not node.bodies
        near = node.loss in _LISTED or node.source in lines
        columns = [*zip(*links_of(graph, node), strict=True)] if loses and near else []
        inputs = [
            i
            for i, column in enumerate(columns)
            if reached.get(node.inputs[i])
            and graph.values[node.inputs[i]].is_inexact
            and _NONE < max(column, default=_NONE) < _FULL
        ]
        if inputs and not any(map(forward(graph, start, node.outputs).get, ends)):
            further.append(Loss(node, inputs[0], node.outputs[0], call, further=True))
    if not further:
        return first
    order = {id(node): k for k, node in enumerate(graph.nodes)}
    return sorted([*first, *further], key=lambda x: order.get(id(x.node), order.get(id(x.call), 0)))


def _frontier(
    graph: PlainGraph, start: Strengths, end: Strengths, call: Node | None = None
) -> Iterator[Loss]:
    """The operations from a differentiable value to values that lead to the end without any."""
    reached = forward(graph, start)
    lost = backward(graph, end, {v for v, strength in reached.items() if strength == _FULL})
    for node in graph.nodes:
        leaving = [lost.get(value, _NONE) for value in node.outputs]
        entering = [reached.get(value, _NONE) for value in node.inputs]
        if not (any(leaving) and _FULL in entering):
            continue
        if node.bodies and node.links is None:
            for body in node.bodies:
                inner = entering_body(body, node, reached, max), leaving_body(body, node, leaving)
                yield from _frontier(body.graph, *inner, call or node)
            continue
        for k, row in enumerate(links_of(graph, node)):
            for i, link in enumerate(row):
                if leaving[k] and entering[i] == _FULL and _NONE < link < _FULL:
                    yield Loss(node, i, node.outputs[k], call)


def overwritten(graph: PlainGraph, leaf: int) -> list[Loss]:
    """The in-place operations that overwrite all that depends on a leaf before it is used."""
    reached, matters = forward(graph, {leaf: _FULL}), behind(graph, tuple(graph.outputs))
    result = [
        Loss(node, 0, node.outputs[0])
        for node in graph.nodes
        if any(map(reached.get, node.overwrites)) and any(map(matters.get, node.outputs))
    ]
    for node in graph.nodes:
        entering = {v: reached[v] for v in node.inputs if v in reached}
        for body in node.bodies if entering else ():
            inner = entering_body(body, node, reached, max)
            within = [v for v in body.graph.inputs if inner.get(v)]
            result += [loss for v in within for loss in overwritten(body.graph, v)]
    return result


def between(graph: PlainGraph, leaf: int, chosen: Callable[[Node], bool]) -> list[Node]:
    """The chosen operations that lie on a differentiable path from a leaf to an output."""
    return list(_between(graph, {leaf: _FULL}, dict.fromkeys(graph.outputs, _FULL), chosen))


def _between(
    graph: PlainGraph, start: Strengths, end: Strengths, chosen: Callable[[Node], bool]
) -> Iterator[Node]:
    reached, matters = forward(graph, start), backward(graph, end)
    for node in graph.nodes:
        leaving = [matters.get(value, _NONE) for value in node.outputs]
        if _FULL not in leaving or all(reached.get(v) != _FULL for v in node.inputs):
            continue
        if chosen(node):
            yield node
        elif node.links is None:
            for body in node.bodies:
                inner = entering_body(body, node, reached, max), leaving_body(body, node, leaving)
                yield from _between(body.graph, *inner, chosen)


# --- a summand of the loss ---------------------------------------------------------------


@dataclass(frozen=True)
class Summand:
    """A scalar summand of an output.

    Attributes:
        graph: The program that computes it, which may be a body of the whole.
        value: Its number there.
        strength: How it depends on the leaves.
        enter: Maps strengths of the whole's inputs to strengths of the program's inputs.
        call: The outermost node whose body computes it, if any.
    """

    graph: PlainGraph
    value: int
    strength: Dependence
    enter: Callable[[Strengths], Strengths]
    call: Node | None = None

    @property
    def above(self) -> set[int]:
        """The values of the program that it is computed from."""
        return ancestors(self.graph, self.value)

    def losses(self, leaf: int) -> list[Loss]:
        """The operations that lose its derivative along a leaf of the whole."""
        found = losses_between(self.graph, self.enter({leaf: _FULL}), [self.value], self.call)
        return [replace(loss, whole=False) for loss in found]


def lost_summands(graph: PlainGraph, leaves: Iterable[int]) -> Iterator[tuple[Summand, str]]:
    """The summands to which data flows from leaves and no derivative, each with its `role`.

    Only outputs that are differentiable in a leaf are looked at; others are metrics. The role is
    "shift" if a summand with a derivative reads the lost values as well, as in
    ``log(sum(exp(x - s))) + s``; "part" if the summand is computed from one with a derivative, as
    in ``x - floor(x)``; else empty. A scalar straight-through estimator loses nothing: it is a sum
    ``h + x - stop(x)`` with h discrete.
    """
    start = dict.fromkeys(leaves, _FULL)
    strengths = forward(graph, start)
    for out in graph.outputs:
        if not _is_scalar(graph, out) or strengths.get(out) != _FULL:
            continue
        seen: set[tuple[int, int]] = set()  # the partial sums that have a derivative
        terms = list(_summands(Summand(graph, out, _FULL, lambda given: given), start, seen))
        partial_sums = {
            id(t.graph): equal_values(t.graph, {v for key, v in seen if key == id(t.graph)})
            for t in terms
        }
        if any(_stopped_by(term) & partial_sums[id(term.graph)] for term in terms):
            continue
        trained = [term for term in terms if term.strength == _FULL]
        for term in terms:
            if _NONE < term.strength < _FULL:
                stopped = {v for v in (term.value, *term.above) if _loses(term.graph, v)}
                alike = (t.above for t in trained if t.graph is term.graph)
                is_part = not partial_sums[id(term.graph)].isdisjoint(term.above)
                is_shift = any(stopped & above for above in alike)
                yield term, "part" if is_part else "shift" if is_shift else ""


def _loses(graph: PlainGraph, value: int) -> bool:
    node = _makers(graph).get(value)
    return node is not None and node.loss is not None


def _stopped_by(term: Summand) -> set[int]:
    """The value that a summand stops; empty if it is not the result of a stop."""
    node = _makers(term.graph).get(term.value)
    is_stop = term.strength < _FULL and node is not None and node.loss in STOPS
    return {node.inputs[0]} if node is not None and is_stop else set()


def _summands(term: Summand, start: Strengths, seen: set[tuple[int, int]]) -> Iterator[Summand]:
    """Walks back through sums and products with constants, also inside of called functions."""
    graph, value = term.graph, term.value
    strengths = forward(graph, term.enter(start))

    def parts(values: Iterable[int]) -> Iterator[Summand]:
        for v in values:
            if strengths.get(v):
                yield from _summands(replace(term, value=v, strength=strengths[v]), start, seen)

    if term.strength == _FULL:
        seen.add((id(graph), value))
    node = _makers(graph).get(value)
    if node is None or not (_is_scalar(graph, value) and graph.values[value].is_inexact):
        yield term
    elif node.bodies and all(strengths.get(v) != _FULL for v in node.inputs):
        yield term  # the derivative is lost before the call
    elif len(node.bodies) == 1 and node.links is None and not node.bodies[0].carries:
        body = node.bodies[0]

        def enter(given: Strengths) -> Strengths:
            return entering_body(body, node, forward(graph, term.enter(given)), max)

        end = body.graph.outputs[node.outputs.index(value)]
        place = dict(zip(body.graph.inputs, body.inputs, strict=True))
        inner = Summand(body.graph, end, term.strength, enter, term.call or node)
        for part in _summands(inner, start, seen):
            outside = part.graph is body.graph and part.value in place
            yield from parts([node.inputs[place[part.value]]]) if outside else [part]
    elif (terms := _terms(graph, node, strengths)) is not None:
        yield from parts(terms)
    else:
        yield term


def _terms(graph: PlainGraph, node: Node, strengths: Strengths) -> Sequence[int] | None:
    """The scalars that a node adds, with constant weights; None for another operation."""
    depending = [v for v in node.inputs if strengths.get(v)]
    if node.operation in ("sum", "mean"):
        return _stacked(graph, node.inputs[0])
    if not all(_is_scalar(graph, v) for v in depending):
        return None
    if node.operation in ("add", "subtract"):
        return node.inputs
    numerator = depending == [node.inputs[0]] and node.native not in ("rdiv", "rtruediv")
    is_scaled = node.operation == "multiply" and len(depending) == 1
    is_scaled |= node.operation in ("divide", "negate", *SHAPING) and numerator
    return depending if is_scaled else None


def trains_others(graph: PlainGraph, values: Iterable[int], others: Iterable[int]) -> bool:
    """Whether each summand to which data flows from `values` is differentiable in `others`."""
    own, other = (dict.fromkeys(of, _FULL) for of in (values, others))
    for out in graph.outputs:
        whole = Summand(graph, out, _FULL, lambda given: given)
        for term in _summands(whole, {**own, **other}, set()):
            reached, trained = (forward(term.graph, term.enter(of)) for of in (own, other))
            if reached.get(term.value) and trained.get(term.value) != _FULL:
                return False
    return True


def _stacked(graph: PlainGraph, value: int) -> Sequence[int] | None:
    """The scalars that are stacked to a vector; None for another value."""
    if _is_scalar(graph, value):
        return [value]
    node = _makers(graph).get(value)
    if node is None or node.operation not in ("stack", "concatenate"):
        return None
    return node.inputs if all(_is_scalar(graph, v) for v in node.inputs) else None


def _is_scalar(graph: PlainGraph, value: int) -> bool:
    return prod(graph.values[value].shape) == 1


@memoized
def _makers(graph: PlainGraph) -> dict[int, Node]:
    return {v: node for node in graph.nodes for v in node.outputs}


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
    for v in graph.captured:
        if graph.values[v].name:  # literals are named by their contents
            classes[v] = numbers.setdefault(graph.values[v], -1 - len(numbers))
    for node in graph.nodes:
        if node.operation in SHAPING and len(node.inputs) == len(node.outputs) == 1:
            classes[node.outputs[0]] = classes.get(node.inputs[0], node.inputs[0])
            continue
        read = tuple([classes.get(v, v) for v in node.inputs])
        about = [(key, repr(x)) for key, x in node.attributes.items() if key != "keepdims"]
        for k, v in enumerate(node.outputs):
            shape = tuple([n for n in graph.values[v].shape if n != 1])
            inside = tuple([_form(body.graph) for body in node.bodies])
            key = node.operation, node.native, read, tuple(sorted(about)), k, shape, inside
            classes[v] = numbers.setdefault(key, -1 - len(numbers))
    return classes


@memoized
def _form(graph: PlainGraph) -> Any:
    """What a program computes, up to lines and names."""
    return tuple(
        (n.operation, n.native, n.inputs, n.outputs, repr(n.attributes), *map(_form_of, n.bodies))
        for n in graph.nodes
    ), (graph.inputs, graph.outputs)


def _form_of(body: Body) -> Any:
    return _form(body.graph)


# --- an edit -----------------------------------------------------------------------------

_EDITS = frozenset({"scale_gradient", "clip_gradient", "transform_gradient", "replace_gradient"})


def useless_edits(
    graph: PlainGraph, leaves: Iterable[int], every: Iterable[int]
) -> list[tuple[int, Loss]]:
    """For edits of gradients through which no gradient reaches any leaf: leaf and loss.

    Args:
        graph: The program.
        leaves: The leaves to report: their data flows through the edit, and their derivative ends
            before or behind it.
        every: All values that may be trained.
    """
    reached = forward(graph, dict.fromkeys(every, _FULL))
    matters = behind(graph, tuple(graph.outputs))
    result = []
    for node in graph.nodes:
        if not _EDITS.intersection((node.native, node.attributes.get("name"))):
            continue
        given, out = node.inputs[0], node.outputs[0]
        reaches, useful = reached.get(given, _NONE), matters.get(out, _NONE)
        if not (reaches and useful) or reaches == useful == _FULL:
            continue
        ends = [given] if reaches < _FULL else graph.outputs
        for leaf in leaves:
            if not behind(graph, (given,)).get(leaf):
                continue
            along = losses_between(graph, {leaf if reaches < _FULL else out: _FULL}, ends)
            result += [(leaf, replace(loss, whole=False)) for loss in along]
    return result
