"""How data and derivatives flow through a graph, and where a derivative is lost.

Dependence is a semiring: a path is as strong as its weakest link, two values are tied as
strongly as by their strongest path::

    dependence(out, in) = max over paths of min over links

Forward from an input this gives the strength with which each value depends on it, backward from
the outputs the strength with which each value matters. A link is a *loss* when what enters it is
still differentiable in the input, what leaves it is not, and data flows on to an output.

An input whose gradient is not lost altogether may have lost a part. A part is a *term*: a value
that depends on the input without a derivative and is added to, or laid beside, one that has a
derivative. A mask, an index or a branch that is chosen by a comparison is no lost term, nor is
what is computed from the very value it is added to, as in ``x - floor(x)``, nor a shift that is
taken off inside and added again, as in ``log(sum(exp(x - s))) + s``, nor a target: what is stopped
on purpose and would have its derivative otherwise, in a difference that is squared or the like,
as ``(v(s) - r - stop(v(t)))**2`` of temporal-difference learning, and ``exp(p - stop(q))`` of a
ratio of probabilities. Nor is a stopped value that also scales what has a derivative, as p in
``sum(p (log p - log q))``.

A stop looks *meant* where its term still has a derivative in something else that is trained: in
``d(a, stop(b)) + d(b, stop(a))``, a policy gradient with an advantage, a linear probe. So does a
choice among what is trained (the nearest code of VQ-VAE) in such a term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from gradtools.seeing.graphs.nodes import Body, Dependence, Links, Node, PlainGraph, even_links

_NONE, _CUT, _ZERO, _FULL = Dependence
Strengths = Mapping[int, Dependence]


_AT_PLACES = frozenset({"scatter", "scatter_add", "update"})
ADDITIVE = frozenset({"add", "subtract", "sum", "mean", "concatenate", "stack"}) | _AT_PLACES


@dataclass(frozen=True)
class Loss:
    """One link at which the derivative to an input is lost.

    Attributes:
        node: The operation that loses it.
        output: Which of its outputs has no derivative any more.
        input: Which of its inputs still had one.
        whole: Whether everything that the input gives to the outputs is lost, not one term.
        value: The number of that output in its graph.
        call: The outermost node that the operation stands in, if it stands in a body.
        meant: Whether it is a stop that looks meant: its term trains something else.
    """

    node: Node
    output: int
    input: int
    whole: bool
    value: int
    call: Node | None = None
    meant: bool = False


def dependence_matrix(graph: PlainGraph) -> list[list[Dependence]]:
    """``matrix[output][input]``: how each output depends on each input."""
    columns = [_Column(graph, i) for i in range(len(graph.inputs))]
    return [[column.get(out, _NONE) for column in columns] for out in graph.outputs]


class _Column:
    """How strongly each value depends on one input; all inputs are followed in one pass."""

    def __init__(self, graph: PlainGraph, index: int) -> None:
        if graph not in _levels:
            _levels[graph] = [_at_least(graph, strength) for strength in (_CUT, _ZERO, _FULL)]
        self._found, self._index = _levels[graph], index

    def get(self, value: int, default: Dependence) -> Dependence:
        result = sum(masks.get(value, 0) >> self._index & 1 for masks in self._found)
        return Dependence(result) if result else default


_levels: WeakKeyDictionary[PlainGraph, list[dict[int, int]]] = WeakKeyDictionary()


def _at_least(graph: PlainGraph, strength: Dependence) -> dict[int, int]:
    """For each value the inputs, one bit each, on which it depends at least so strongly."""
    result: dict[int, int] = {}
    beside: dict[int, list[int]] = {}
    for source, target in graph.outside if strength == _CUT else ():
        beside.setdefault(source, []).append(target)

    def raise_to(value: int, mask: int) -> None:
        if mask & ~result.get(value, 0):
            result[value] = mask | result.get(value, 0)
            for other in beside.get(value, ()):
                raise_to(other, mask)

    for i, value in enumerate(graph.inputs):
        raise_to(value, 1 << i)
    for node in graph.nodes:
        entering = [result.get(value, 0) for value in node.inputs]
        if any(entering):
            for value, row in zip(node.outputs, links_of(graph, node), strict=True):
                raise_to(value, _union(row, entering, strength))
    return result


def _union(row: Sequence[Dependence], masks: Sequence[int], strength: Dependence) -> int:
    total = 0
    for link, mask in zip(row, masks, strict=True):
        if link >= strength:
            total |= mask
    return total


def forward(graph: PlainGraph, start: Strengths) -> dict[int, Dependence]:
    """How strongly each value depends on those in `start`; what does not is left out."""
    result = _Strengths(graph.outside, start)
    for node in graph.nodes:
        entering = [result.get(value, _NONE) for value in node.inputs]
        if any(entering):
            for value, row in zip(node.outputs, links_of(graph, node), strict=True):
                result.raise_to(value, _through(row, entering))
    return result


def backward(graph: PlainGraph, end: Strengths) -> dict[int, Dependence]:
    """How strongly the values in `end` depend on each value."""
    result = _Strengths([(target, source) for source, target in graph.outside], end)
    for node in reversed(graph.nodes):
        leaving = [result.get(value, _NONE) for value in node.outputs]
        if any(leaving):
            columns = zip(*links_of(graph, node), strict=True)
            for value, column in zip(node.inputs, columns, strict=True):
                result.raise_to(value, _through(column, leaving))
    return result


class _Strengths(dict[int, Dependence]):
    """Strengths that only rise; what flows outside of the framework rises along, as a cut."""

    def __init__(self, beside: Iterable[tuple[int, int]], start: Strengths) -> None:
        super().__init__()
        self._beside: dict[int, list[int]] = {}
        for value, other in beside:
            self._beside.setdefault(value, []).append(other)
        for value, strength in start.items():
            self.raise_to(value, strength)

    def raise_to(self, value: int, strength: Dependence) -> None:
        if strength > self.get(value, _NONE):
            self[value] = strength
            for other in self._beside.get(value, ()):
                self.raise_to(other, _CUT)


def _through(links: Sequence[Dependence], strengths: Sequence[Dependence]) -> Dependence:
    return max(map(min, links, strengths), default=_NONE)


# --- links -------------------------------------------------------------------------------


def links_of(graph: PlainGraph, node: Node) -> Links:
    """``links[k][i]``: how output k of a node depends on its input i."""
    if node.links is not None:
        return node.links
    if node.bodies:
        if node not in _links:
            _links[node] = _links_of_bodies(node)
        return _links[node]
    return even_links(node, graph.values)


_links: WeakKeyDictionary[Node, Links] = WeakKeyDictionary()


def _links_of_bodies(node: Node) -> Links:
    links = [[_NONE] * len(node.inputs) for _ in node.outputs]
    for body in node.bodies:
        if not body.gate:
            _join_body(links, body)
    deciding = _deciding(node, links)
    for row in links:
        for i in deciding:
            row[i] = max(row[i], _CUT)
    return tuple(map(tuple, links))


def _join_body(links: list[list[Dependence]], body: Body) -> None:
    for row, inner in zip(links, _rounds(body), strict=True):
        for i, strength in zip(body.inputs, inner, strict=True):
            row[i] = max(row[i], strength)


def _rounds(body: Body) -> list[list[Dependence]]:
    """How a body's outputs depend on its inputs after any number of rounds."""
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


def _deciding(node: Node, links: list[list[Dependence]]) -> set[int]:
    """The inputs that choose a branch, or how often a loop runs."""
    deciding = set(range(len(node.inputs))).difference(*(body.inputs for body in node.bodies))
    for gate in (body for body in node.bodies if body.gate):
        carried = {i: k for k, i in gate.carries}
        for row in dependence_matrix(gate.graph):
            for i, strength in enumerate(row):
                if strength:
                    deciding.add(gate.inputs[i])
                    if i in carried:
                        deciding |= {j for j, s in enumerate(links[carried[i]]) if s}
    return deciding


# --- losses ------------------------------------------------------------------------------


def losses(graph: PlainGraph, index: int, trained: Iterable[int] = ()) -> list[Loss]:
    """Every place at which the derivative to input `index` is lost, in program order.

    When some of the input reaches an output with its derivative, only lost terms are listed.

    Args:
        graph: The graph.
        index: The position of the input.
        trained: The values that are trained, of which the input may be one.
    """
    reached = _Column(graph, index)
    if max((reached.get(out, _NONE) for out in graph.outputs), default=_NONE) < _FULL:
        return losses_of(graph, graph.inputs[index])
    if not _suspects(graph) >> index & 1:
        return []
    return losses_of(graph, graph.inputs[index], trained)


def losses_of(graph: PlainGraph, value: int, trained: Iterable[int] = ()) -> list[Loss]:
    """`losses` of any value: an input, or a captured parameter."""
    start = {value: _FULL}
    reached = forward(graph, start)
    if max((reached.get(out, _NONE) for out in graph.outputs), default=_NONE) == _FULL:
        others = {*trained, *_stopped_apart(graph, reached)} - {value}
        flows = _Flows(reached, forward(graph, dict.fromkeys(others, _FULL)))
        return list(dict.fromkeys(_terms(graph, start, flows, graph.outputs, None)))
    return [*_met(graph, start, dict.fromkeys(graph.outputs, _FULL), None, _lossy)]


def _stopped_apart(graph: PlainGraph, reached: Strengths) -> set[int]:
    """The inputs that are stopped where what is looked at is not: only what is trained is.

    reached: How strongly each value depends on what is looked at.
    """
    apart = {
        value
        for value, reads in _stops_of(graph).items()
        if any(all(reached.get(v) != _FULL for v in read) for read in reads)
    }
    for node in graph.nodes:
        for body in node.bodies if node.links is None else ():
            entering, after = (
                [reached.get(v, _NONE) for v in of] for of in (node.inputs, node.outputs)
            )
            inner = forward(body.graph, _entering_body(body, entering, after))
            inside = _stopped_apart(body.graph, inner) if any(inner.values()) else set()
            pairs = zip(body.graph.inputs, body.inputs, strict=True)
            for outer in {node.inputs[i] for value, i in pairs if value in inside}:
                before = _behind(graph, (outer,))
                apart |= {value for value in graph.inputs if before.get(value) == _FULL}
    return {value for value in apart if reached.get(value) != _FULL}


def _stops_of(graph: PlainGraph) -> dict[int, list[Sequence[int]]]:
    """For each input what the operations read that stop it."""
    if graph not in _stops:
        stopping = [node for node in graph.nodes if node.loss in _STOPPED]
        inputs = [v for v in graph.inputs if stopping and graph.values[v].is_inexact]
        flows = {value: forward(graph, {value: _FULL}) for value in inputs}
        _stops[graph] = {
            value: [n.inputs for n in stopping if any(flow.get(v) == _FULL for v in n.inputs)]
            for value, flow in flows.items()
        }
    return _stops[graph]


_stops: WeakKeyDictionary[PlainGraph, dict[int, list[Sequence[int]]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Flows:
    """How strongly each value depends on the one that is looked at, and on others.

    Attributes:
        own: On the one.
        others: On what else is trained.
    """

    own: Strengths
    others: Strengths


def overwritten(graph: PlainGraph, value: int) -> list[Loss]:
    """Every place at which nothing is left of what a value gives to what matters."""

    def at(graph: PlainGraph, step: _Step) -> Iterable[Loss] | None:
        if any(value in step.reached for value in step.node.overwrites):
            return [Loss(step.node, 0, 0, True, step.node.outputs[0])]
        return None if any(step.entering) else []

    return [*_met(graph, {value: _FULL}, dict.fromkeys(graph.outputs, _FULL), None, at)]


def between(graph: PlainGraph, value: int, chosen: Callable[[Node], bool]) -> list[Node]:
    """The chosen operations that a value enters, and an output leaves, with a derivative."""

    def at(graph: PlainGraph, step: _Step) -> Iterable[Loss] | None:
        if _FULL not in step.entering or _FULL not in step.leaving:
            return []
        return [Loss(step.node, 0, 0, False, 0)] if chosen(step.node) else None

    end = dict.fromkeys(graph.outputs, _FULL)
    return [loss.node for loss in _met(graph, {value: _FULL}, end, None, at)]


@dataclass(frozen=True)
class _Step:
    """An operation on the way to what matters.

    Attributes:
        node: It.
        entering: How strongly its inputs depend on what the walk starts from.
        leaving: How strongly what matters depends on its outputs.
        reached: How strongly each value of the graph depends on the start.
    """

    node: Node
    entering: Sequence[Dependence]
    leaving: Sequence[Dependence]
    reached: Strengths


def _met(
    graph: PlainGraph,
    start: Strengths,
    end: Strengths,
    call: Node | None,
    at: Callable[[PlainGraph, _Step], Iterable[Loss] | None],
) -> Iterator[Loss]:
    """What `at` says of each operation that matters, in bodies where it says None of the whole."""
    reached = forward(graph, start)
    matters = backward(_without_shifts(graph, reached), end)
    for node in graph.nodes:
        leaving = [matters.get(value, _NONE) for value in node.outputs]
        if not any(leaving):
            continue
        entering = [reached.get(value, _NONE) for value in node.inputs]
        result = at(graph, _Step(node, entering, leaving, reached))
        if result is not None:
            yield from (replace(loss, call=call) for loss in result)
        elif node.bodies and node.links is None:
            yield from _in_bodies(graph, node, entering, leaving, call, partial(_met, at=at))


def _without_shifts(graph: PlainGraph, reached: Strengths) -> PlainGraph:
    """The graph less what is lost and is added to what it is computed from, or was before.

    In ``x - stop(max(x))`` the derivative goes on with x: the stop is not where it is lost.
    """
    nodes = [
        _less(graph, node, shifts) if (shifts := _shifts(graph, node, reached)) else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


def _shifts(graph: PlainGraph, node: Node, reached: Strengths) -> set[int]:
    if node.operation not in ADDITIVE:
        return set()
    flowing, lost = _parts(graph, node, reached)
    if not (flowing and lost):
        return set()
    before = _taken_before(graph, flowing, reached)
    is_shift = lambda v: flowing & ancestors(graph, v) or _is_added_again(graph, v, before, reached)
    return set(filter(is_shift, lost))


def _less(graph: PlainGraph, node: Node, values: set[int]) -> Node:
    less = lambda row: [
        _NONE if value in values else link for value, link in zip(node.inputs, row, strict=True)
    ]
    return replace(node, links=tuple(tuple(less(row)) for row in links_of(graph, node)))


def joined(flows: Iterable[tuple[Sequence[int], Sequence[int]]], at: Sequence[int]) -> int | None:
    """The first operation to which data comes from all of several others, or that is all of them.

    Args:
        flows: Of each operation the values that it reads and those that it makes.
        at: The positions of the others.
    """
    if not at:
        return None
    everything = (1 << len(at)) - 1
    carried: dict[int, int] = {}
    for position, (reads, makes) in enumerate(flows):
        result = _any(1 << k for k, other in enumerate(at) if other == position)
        result |= _any(carried.get(value, 0) for value in reads)
        if result == everything:
            return position
        carried.update((value, result) for value in makes if result)
    return None


def _lossy(graph: PlainGraph, step: _Step) -> Iterable[Loss] | None:
    """The losses at an operation, between values that enter and values that matter."""
    if not any(step.entering):
        return []
    return None if step.node.bodies and step.node.links is None else _at(graph, step)


def _at(graph: PlainGraph, step: _Step) -> Iterator[Loss]:
    node, entering = step.node, step.entering
    for k, row in enumerate(links_of(graph, node)):
        if step.leaving[k] and _through(row, entering) < _FULL:
            for i, link in enumerate(row):
                if entering[i] == _FULL and _NONE < link < _FULL:
                    yield Loss(node, k, i, True, node.outputs[k])


def _in_bodies(
    graph: PlainGraph,
    node: Node,
    entering: Sequence[Dependence],
    leaving: Sequence[Dependence],
    call: Node | None,
    within: Callable[[PlainGraph, Strengths, Strengths, Node | None], Iterator[Loss]],
) -> Iterator[Loss]:
    links = links_of(graph, node)
    after = [_through(row, entering) for row in links]
    for body in node.bodies:
        start = _entering_body(body, entering, after)
        end = _leaving_body(body, node, leaving)
        yield from within(body.graph, start, end, call or node)


def _entering_body(
    body: Body, entering: Sequence[Dependence], after: Sequence[Dependence]
) -> Strengths:
    start = _Strengths((), {})
    for value, i in zip(body.graph.inputs, body.inputs, strict=True):
        start.raise_to(value, entering[i])
    for k, i in body.carries:
        start.raise_to(body.graph.inputs[i], after[k])
    return start


def _leaving_body(body: Body, node: Node, leaving: Sequence[Dependence]) -> Strengths:
    """Which outputs of a body matter: those that leave, are decided on, or come back."""
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
        strengths[k] = max(strengths[k], _through(column, strengths))
    end = _Strengths((), {})
    for value, strength in zip(body.graph.outputs, strengths, strict=True):
        end.raise_to(value, strength)
    return end


# --- lost terms --------------------------------------------------------------------------

_suspected: WeakKeyDictionary[PlainGraph, int] = WeakKeyDictionary()


def _suspects(graph: PlainGraph) -> int:
    """The inputs, one bit each, of which a term may be lost: all are looked at in one pass."""
    if graph not in _suspected:
        bits = dict.fromkeys(graph.inputs, 0)
        for i, value in enumerate(graph.inputs):
            bits[value] |= 1 << i
        _suspected[graph] = _suspects_within(graph, bits, dict(bits))
    return _suspected[graph]


def _suspects_within(graph: PlainGraph, full: dict[int, int], some: dict[int, int]) -> int:
    """`full` and `some`: on which inputs a value depends with its derivative, and at all."""
    if graph.outside:  # what leaves the framework may come back anywhere
        return _any([*full.values(), *some.values()])
    result = 0
    for node in graph.nodes:
        flowing, data = ([of.get(v, 0) for v in node.inputs] for of in (full, some))
        if not any(data):
            continue
        if node.operation in ADDITIVE:
            result |= _suspects_at(graph, node, flowing, data)
        for value, row in zip(node.outputs, links_of(graph, node), strict=True):
            full[value] = full.get(value, 0) | _union(row, flowing, _FULL)
            some[value] = some.get(value, 0) | _union(row, data, _CUT)
        if node.links is None:
            for body in node.bodies:
                result |= _suspects_in(body, node, full, some)
    return result


def _suspects_at(graph: PlainGraph, node: Node, flowing: list[int], data: list[int]) -> int:
    result = 0
    for value, full, some in zip(node.inputs, flowing, data, strict=True):
        lost = some & ~full & _any(flowing)
        if lost:
            above = ancestors(graph, value)
            beside = (m for v, m in zip(node.inputs, flowing, strict=True) if v in above)
            result |= lost & ~_any(beside)
    return result


def _suspects_in(body: Body, node: Node, full: dict[int, int], some: dict[int, int]) -> int:
    ends = []
    for of in (full, some):
        start = dict.fromkeys(body.graph.inputs, 0)
        for value, i in zip(body.graph.inputs, body.inputs, strict=True):
            start[value] |= of.get(node.inputs[i], 0)
        for k, i in body.carries:
            start[body.graph.inputs[i]] |= of.get(node.outputs[k], 0)
        ends.append(start)
    return _suspects_within(body.graph, *ends)


def _any(masks: Iterable[int]) -> int:
    total = 0
    for mask in masks:
        total |= mask
    return total


def _terms(
    graph: PlainGraph,
    start: Strengths,
    flows: _Flows,
    outputs: Iterable[int],
    call: Node | None,
) -> Iterator[Loss]:
    """The losses behind every term that has no derivative and is added to one that has."""
    matters = _behind(graph, tuple(outputs))
    scaling = _scaling(graph, flows.own)
    for node in graph.nodes:
        if max((matters.get(value, _NONE) for value in node.outputs), default=_NONE) < _FULL:
            continue
        if node.bodies and node.links is None:
            yield from _terms_in_bodies(node, flows, call)
        elif node.operation in ADDITIVE:
            yield from _behind_terms(graph, node, start, flows, scaling, call)


def _behind_terms(
    graph: PlainGraph,
    node: Node,
    start: Strengths,
    flows: _Flows,
    scaling: set[int],
    call: Node | None,
) -> Iterator[Loss]:
    """The losses behind the lost terms of an additive node."""
    reached = flows.own
    flowing, lost = _parts(graph, node, reached)
    terms = [v for v in lost if flowing and not flowing & ancestors(graph, v)]
    if not terms:
        return
    before = _taken_before(graph, flowing, reached)
    is_residual = node.operation == "subtract" and _bent(graph, node.outputs[0])
    for term in dict.fromkeys(a for v in terms for a in _addends(graph, v, flows)):
        if _is_added_again(graph, term, before, reached):
            continue
        found = [*_met(graph, start, {term: _FULL}, call, _lossy)]
        stops = [loss for loss in found if _is_stop(graph, loss, term)]
        trains = stops and flows.others.get(term) == _FULL
        for loss in found:
            is_choice = loss.node.loss in ("discrete", "integer_cast")
            stopped = loss in stops or (is_choice and _is_stopped_after(graph, loss, term))
            if (is_residual and stopped) or scaling.intersection(_place(graph, loss).outputs):
                continue
            chosen = is_choice and any(
                flows.others.get(v) == _FULL for v in _place(graph, loss).inputs
            )
            yield replace(loss, whole=False, meant=bool(trains and (stopped or chosen)))


def _place(graph: PlainGraph, loss: Loss) -> Node:
    """The node of this graph that loses, or in a body of which it is lost."""
    return next(node for node in graph.nodes if _holds(node, loss.node))


def _holds(node: Node, other: Node) -> bool:
    inside = (inner for body in node.bodies for inner in body.graph.nodes)
    return node is other or any(_holds(inner, other) for inner in inside)


def trains_others(graph: PlainGraph, values: Iterable[int], others: Iterable[int]) -> bool:
    """Whether every term to which data of some values flows has a derivative in others."""
    own, besides = (forward(graph, dict.fromkeys(of, _FULL)) for of in (values, others))
    reached = [out for out in graph.outputs if own.get(out)]
    terms = [term for out in reached for term in _addends(graph, out, _Flows(own, besides))]
    return all(besides.get(term) == _FULL for term in terms)


def _is_stop(graph: PlainGraph, loss: Loss, term: int) -> bool:
    """Whether a loss is a stop without which the term would have its derivative."""
    return loss.node.loss in _STOPPED and _makes(graph, loss, term)


def _is_stopped_after(graph: PlainGraph, loss: Loss, term: int) -> bool:
    """Whether what comes of a loss is stopped wherever it flows to the term."""
    reached = set(_place(graph, loss).outputs)
    for node in graph.nodes:
        if node.loss not in _STOPPED and node.operation != "stop":
            for value, row in zip(node.outputs, links_of(graph, node), strict=True):
                pairs = zip(node.inputs, row, strict=True)
                if any(v in reached and link for v, link in pairs):
                    reached.add(value)
    return term not in reached


def _addends(graph: PlainGraph, value: int, flows: _Flows) -> list[int]:
    """The lost values of which a lost value is a sum with constant weights."""
    node = _maker(graph, value)
    if node is None or node.bodies:
        return [value]
    shifts = _shifts(graph, node, flows.others)
    parts = [v for v in node.inputs if flows.own.get(v, _NONE) and v not in shifts]
    constant = all(flows.others.get(v, _NONE) < _FULL for v in node.inputs if v not in parts)
    is_scaled = node.operation in ("multiply", "divide", "negate") and len(parts) == 1 and constant
    is_sum = node.operation in ADDITIVE - _AT_PLACES or node.operation in _SHAPING
    if not (is_scaled or is_sum) or any(flows.own.get(v, _NONE) == _FULL for v in parts):
        return [value]
    return [a for v in parts for a in _addends(graph, v, flows)] or [value]


def _maker(graph: PlainGraph, value: int) -> Node | None:
    if graph not in _makers:
        _makers[graph] = {v: node for node in graph.nodes for v in node.outputs}
    return _makers[graph].get(value)


_makers: WeakKeyDictionary[PlainGraph, dict[int, Node]] = WeakKeyDictionary()


def _scaling(graph: PlainGraph, reached: Strengths) -> set[int]:
    """The stopped values that scale what has a derivative."""
    result: set[int] = set()
    for node in graph.nodes:
        strengths = [reached.get(v, _NONE) for v in node.inputs]
        if node.operation in _SCALES and _FULL in strengths:
            lost = [v for v, s in zip(node.inputs, strengths, strict=True) if _NONE < s < _FULL]
            result |= {first for v in lost for first in _first_lost(graph, v, reached)}
    stopped = {v for v in result if (node := _maker(graph, v)) and node.loss in _STOPPED}
    return _alike(graph, stopped)


_SCALES = frozenset({"multiply", "divide", "matmul", "einsum", "dot_general"})


def _alike(graph: PlainGraph, values: set[int]) -> set[int]:
    """These values, and what is computed just as they are (common subexpressions)."""
    if graph not in _classes:
        _classes[graph] = _value_classes(graph)
    classes = _classes[graph]
    wanted = {classes[v] for v in values if v in classes}
    return values.union(v for v, of in classes.items() if of in wanted)


def _value_classes(graph: PlainGraph) -> dict[int, int]:
    """Equal numbers for values that the same operations make of the same, in whatever shape."""
    classes: dict[int, int] = {}
    numbers: dict[Any, int] = {}
    for node in graph.nodes:
        if node.bodies:
            continue
        if node.operation in _SHAPING and len(node.inputs) == len(node.outputs) == 1:
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
_STOPPED = ("detached", "no_grad", "inner_gradient")
_BENDING = frozenset(
    {"power", "square", "abs", "norm", "sqrt", "log", "log_cosh", "softplus", "exp"}
)
_SHAPING = frozenset(
    {"reshape", "squeeze", "expand_dims", "broadcast", "transpose", "identity", "cast"}
)
_LINEAR = _SHAPING | {"multiply", "divide", "negate", "index", "where", "select", "gather"}


def _bent(graph: PlainGraph, value: int) -> bool:
    """Whether a value is read by what is not linear in it: a difference that is a residual."""
    linear = {value}
    for node in graph.nodes:
        reads = [v for v in node.inputs if v in linear]
        if not reads:
            continue
        if node.operation in _BENDING or (node.operation in _SCALES and len(reads) > 1):
            return True
        if node.operation in _LINEAR:
            linear.update(node.outputs)
    return False


def _makes(graph: PlainGraph, loss: Loss, term: int) -> bool:
    """Whether what is stopped there flows on to the term, but for stops with its derivative."""
    reached = set(_place(graph, loss).outputs)
    for node in graph.nodes:
        for value, row in zip(node.outputs, links_of(graph, node), strict=True):
            flows = zip(node.inputs, row, strict=True)
            stopped = node.loss in _STOPPED and graph.values[value].is_inexact
            if any(v in reached and (link == _FULL or stopped) for v, link in flows):
                reached.add(value)
    return term in reached


def _parts(graph: PlainGraph, node: Node, reached: Strengths) -> tuple[set[int], list[int]]:
    """What flows into a node with its derivative, and what is added to that without."""
    strengths = [reached.get(value, _NONE) for value in node.inputs]
    flowing = {v for v, s in zip(node.inputs, strengths, strict=True) if s == _FULL}
    lost = [v for v, s in zip(node.inputs, strengths, strict=True) if _NONE < s < _FULL]
    if node.operation in _AT_PLACES:  # integers and booleans are the places
        lost = [v for v in lost if graph.values[v].is_inexact]
    return flowing, lost


def _taken_before(graph: PlainGraph, flowing: set[int], reached: Strengths) -> set[int]:
    """What stands behind the lost values that were added on the way to these values."""
    behind = flowing.union(*(ancestors(graph, v) for v in flowing))
    before: set[int] = set()
    for node in graph.nodes:
        if node.operation in ADDITIVE and behind.intersection(node.outputs):
            beside, lost = _parts(graph, node, reached)
            for value in lost:
                above = ancestors(graph, value)
                if beside & above:
                    before |= {v for v in (value, *above) if reached.get(v, _NONE) < _FULL}
    return _alike(graph, before)


def _is_added_again(graph: PlainGraph, value: int, before: set[int], reached: Strengths) -> bool:
    """Whether a lost value is linear in what was taken off before."""
    if not before or not _first_lost(graph, value, reached) <= before:
        return False
    linear = set(before)
    for node in graph.nodes:
        if node.operation in _LINEAR | ADDITIVE and linear.intersection(node.inputs):
            linear.update(node.outputs)
    return value in linear


def _first_lost(graph: PlainGraph, value: int, reached: Strengths) -> set[int]:
    """Behind a lost value those at which the derivative was lost."""
    lost = {v for v in (value, *ancestors(graph, value)) if reached.get(v, _NONE) < _FULL}
    return {
        v
        for node in graph.nodes
        if any(reached.get(entering, _NONE) == _FULL for entering in node.inputs)
        for v in lost.intersection(node.outputs)
    }


def _terms_in_bodies(node: Node, flows: _Flows, call: Node | None) -> Iterator[Loss]:
    for body in node.bodies:
        if not body.gate:
            own, others = (
                _entering_body(
                    body,
                    [of.get(value, _NONE) for value in node.inputs],
                    [of.get(value, _NONE) for value in node.outputs],
                )
                for of in (flows.own, flows.others)
            )
            inner = _Flows(forward(body.graph, own), forward(body.graph, others))
            yield from _terms(body.graph, own, inner, body.graph.outputs, call or node)


def ancestors(graph: PlainGraph, value: int) -> set[int]:
    """Every value from which data flows to this one."""
    return set(_behind(graph, (value,))) - {value}


def _behind(graph: PlainGraph, values: tuple[int, ...]) -> Strengths:
    """How strongly these values depend on each value, kept for the next time."""
    known = _backwards.setdefault(graph, {})
    if values not in known:
        known[values] = backward(graph, dict.fromkeys(values, _FULL))
    return known[values]


_backwards: WeakKeyDictionary[PlainGraph, dict[tuple[int, ...], Strengths]] = WeakKeyDictionary()
