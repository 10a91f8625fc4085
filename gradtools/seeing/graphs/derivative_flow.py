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
ratio of probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

from gradtools.seeing.graphs.nodes import Body, Dependence, Links, Node, PlainGraph, even_links

_NONE, _CUT, _ZERO, _FULL = Dependence
Strengths = Mapping[int, Dependence]


class _ReachedValues(Protocol):
    def get(self, value: int, default: Dependence, /) -> Dependence: ...


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
    """

    node: Node
    output: int
    input: int
    whole: bool
    value: int
    call: Node | None = None


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


def losses(graph: PlainGraph, index: int) -> list[Loss]:
    """Every place at which the derivative to input `index` is lost, in program order.

    When some of the input reaches an output with its derivative, only lost terms are listed.
    """
    reached = _Column(graph, index)
    if max((reached.get(out, _NONE) for out in graph.outputs), default=_NONE) < _FULL:
        return losses_of(graph, graph.inputs[index])
    if not _suspects(graph) >> index & 1:
        return []
    return [*_terms(graph, {graph.inputs[index]: _FULL}, reached, graph.outputs, None)]


def losses_of(graph: PlainGraph, value: int) -> list[Loss]:
    """`losses` of any value: an input, or a captured parameter."""
    start = {value: _FULL}
    reached = forward(graph, start)
    if max((reached.get(out, _NONE) for out in graph.outputs), default=_NONE) == _FULL:
        return [*_terms(graph, start, reached, graph.outputs, None)]
    return [*_met(graph, start, dict.fromkeys(graph.outputs, _FULL), None, _lossy)]


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
    is_shift = lambda v: flowing & ancestors(graph, v) or _first_lost(graph, v, reached) <= before
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
    reached: _ReachedValues,
    outputs: Iterable[int],
    call: Node | None,
) -> Iterator[Loss]:
    """The losses behind every term that has no derivative and is added to one that has."""
    matters = _behind(graph, tuple(outputs))
    for node in graph.nodes:
        if max((matters.get(value, _NONE) for value in node.outputs), default=_NONE) < _FULL:
            continue
        if node.bodies and node.links is None:
            yield from _terms_in_bodies(node, reached, call)
        elif node.operation in ADDITIVE:
            yield from _behind_terms(graph, node, start, reached, call)


def _behind_terms(
    graph: PlainGraph, node: Node, start: Strengths, reached: _ReachedValues, call: Node | None
) -> Iterator[Loss]:
    """The losses behind the lost terms of an additive node."""
    flowing, lost = _parts(graph, node, reached)
    terms = [v for v in lost if flowing and not flowing & ancestors(graph, v)]
    if not terms:
        return
    before = _taken_before(graph, flowing, reached)
    if all(_first_lost(graph, v, reached) <= before for v in terms):
        return
    is_residual = node.operation == "subtract" and _bent(graph, node.outputs[0])
    for loss in _met(graph, start, dict.fromkeys(terms, _FULL), call, _lossy):
        if is_residual and loss.node.loss in _STOPPED and _makes(graph, loss, terms):
            continue
        outside = call is None and loss.call is not None
        if not before.intersection(loss.call.outputs if outside and loss.call else [loss.value]):
            yield replace(loss, whole=False)


_STOPPED = ("detached", "no_grad")
_BENDING = frozenset(
    {"power", "square", "abs", "norm", "sqrt", "log", "log_cosh", "softplus", "exp"}
)
_SHAPING = frozenset({"reshape", "squeeze", "expand_dims", "broadcast", "transpose", "identity"})


def _bent(graph: PlainGraph, value: int) -> bool:
    """Whether a value is read by what is not linear in it: a difference that is a residual."""
    readers = [node for node in graph.nodes if value in node.inputs]
    twice = lambda node: node.operation == "multiply" and len(set(node.inputs)) == 1
    return any(
        node.operation in _BENDING
        or twice(node)
        or (node.operation in _SHAPING and _bent(graph, node.outputs[0]))
        for node in readers
    )


def _makes(graph: PlainGraph, loss: Loss, terms: Sequence[int]) -> bool:
    """Whether what is stopped there flows on to the terms, but for stops with its derivative."""
    reached = {loss.value}
    for node in graph.nodes:
        for value, row in zip(node.outputs, links_of(graph, node), strict=True):
            flows = zip(node.inputs, row, strict=True)
            stopped = node.loss in _STOPPED and graph.values[value].is_inexact
            if any(v in reached and (link == _FULL or stopped) for v, link in flows):
                reached.add(value)
    return loss.call is None and not reached.isdisjoint(terms)


def _parts(graph: PlainGraph, node: Node, reached: _ReachedValues) -> tuple[set[int], list[int]]:
    """What flows into a node with its derivative, and what is added to that without."""
    strengths = [reached.get(value, _NONE) for value in node.inputs]
    flowing = {v for v, s in zip(node.inputs, strengths, strict=True) if s == _FULL}
    lost = [v for v, s in zip(node.inputs, strengths, strict=True) if _NONE < s < _FULL]
    if node.operation in _AT_PLACES:  # integers and booleans are the places
        lost = [v for v in lost if graph.values[v].is_inexact]
    return flowing, lost


def _taken_before(graph: PlainGraph, flowing: set[int], reached: _ReachedValues) -> set[int]:
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
    return before


def _first_lost(graph: PlainGraph, value: int, reached: _ReachedValues) -> set[int]:
    """Behind a lost value those at which the derivative was lost."""
    lost = {v for v in (value, *ancestors(graph, value)) if reached.get(v, _NONE) < _FULL}
    return {
        v
        for node in graph.nodes
        if any(reached.get(entering, _NONE) == _FULL for entering in node.inputs)
        for v in lost.intersection(node.outputs)
    }


def _terms_in_bodies(node: Node, reached: _ReachedValues, call: Node | None) -> Iterator[Loss]:
    entering = [reached.get(value, _NONE) for value in node.inputs]
    after = [reached.get(value, _NONE) for value in node.outputs]
    for body in node.bodies:
        if not body.gate:
            start = _entering_body(body, entering, after)
            inner = forward(body.graph, start)
            yield from _terms(body.graph, start, inner, body.graph.outputs, call or node)


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
