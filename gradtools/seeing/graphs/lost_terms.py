"""Finds the operations at which an input's gradient is lost, as a whole or in one term.

An input with a nonzero gradient may still have a lost *term*: a value that depends on the input
without a derivative and is added to, or concatenated with, a value that has one. These are not
lost terms:

- a mask, an index or a branch that a comparison selects;
- a value computed from its own summand, as in ``x - floor(x)``;
- what is read from the places where the sum is written, as in ``x[i] += y``;
- a shift that is subtracted inside and added again (`losing_operations.py`);
- a target: a deliberate stop in a difference that enters a nonlinear function, as in
  temporal-difference learning, ``(v(s) - r - stop(v(t)))**2``, or in a ratio of probabilities,
  ``exp(p - stop(q))``;
- a stopped value that also scales something differentiable, as p in ``sum(p (log p - log q))``.

A stop counts as *meant* if its term is still differentiable in something else that is trained: in
``d(a, stop(b)) + d(b, stop(a))``, a policy gradient with an advantage, a linear probe. The same
holds for a discrete choice among trained values, such as the nearest code of a VQ-VAE. A reversed
or scaled gradient that reaches nothing is a mistake: the domain head of a DANN behind a stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import or_

from gradtools.seeing.graphs.derivative_flow import (
    Strengths,
    ancestors,
    any_of,
    behind,
    entering_body,
    forward,
    links_of,
    masks,
)
from gradtools.seeing.graphs.losing_operations import (
    ADDITIVE,
    AT_PLACES,
    LINEAR,
    SHAPING,
    Loss,
    equal_values,
    first_lost,
    flowing_and_lost,
    is_added_again,
    losses_between,
    shifts_at,
    taken_before,
)
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph, memoized

_NONE, _CUT, _ZERO, _FULL = Dependence
_STOPPED = ("detached", "no_grad", "inner_gradient")
_SCALES = frozenset({"multiply", "divide", "matmul", "einsum", "dot_general"})
_NONLINEAR = frozenset(
    {"power", "square", "abs", "norm", "sqrt", "log", "log_cosh", "softplus", "exp"}
)


def losses(graph: PlainGraph, value: int, trained: Iterable[int] = ()) -> list[Loss]:
    """The losses of the gradient of a value, in program order.

    If the value reaches an output differentiably on some path, only lost terms are listed.

    Args:
        graph: The graph.
        value: An input, or a captured value.
        trained: The values that are trained; may include this one.
    """
    start, matters = {value: _FULL}, behind(graph, tuple(graph.outputs))
    if matters.get(value, _NONE) < _FULL:
        return losses_between(graph, start, graph.outputs)
    if value not in _suspected(graph):
        return []
    reached = forward(graph, start)
    apart = *_stopped_elsewhere(graph, reached), *_weighted(graph, value, reached)
    others = {*trained, *apart} - {value}
    flows = forward(graph, dict.fromkeys(others, _FULL))
    return list(dict.fromkeys(_terms(graph, start, reached, flows)))


@memoized
def _suspected(graph: PlainGraph) -> set[int]:
    """The inputs and captured values that may have lost a term."""
    bits = {v: 1 << i for i, v in enumerate((*graph.inputs, *graph.captured))}
    suspects = _suspects(graph, bits, bits)
    return {v for v, bit in bits.items() if suspects & bit}


def _suspects(graph: PlainGraph, full: Mapping[int, int], some: Mapping[int, int]) -> int:
    """A bit mask of the leaves that may have lost a term, from one pass for all leaves.

    full: For each input the program's leaves on which it depends differentiably.
    some: For each input the program's leaves on which it depends at all.
    """
    if graph.outside:  # what leaves the framework may come back anywhere
        return any_of([*full.values(), *some.values()])
    full, some = masks(graph, full, _FULL), masks(graph, some, _CUT)
    result = 0
    for node in graph.nodes:
        flowing, data = ([of.get(v, 0) for v in node.inputs] for of in (full, some))
        for of, some_of, full_of in zip(node.inputs, data, flowing, strict=True):
            lost = some_of & ~full_of & any_of(flowing) if node.operation in ADDITIVE else 0
            if lost:
                above = ancestors(graph, of)
                summands = (m for v, m in zip(node.inputs, flowing, strict=True) if v in above)
                result |= lost & ~any_of(summands)
        for body in node.bodies if node.links is None and any(data) else ():
            result |= _suspects(
                body.graph, *(entering_body(body, node, of, or_) for of in (full, some))
            )
    return result


def _stopped_elsewhere(graph: PlainGraph, reached: Strengths) -> set[int]:
    """The inputs that are stopped at places where the analysed values are not; they are trained.

    reached: How strongly each value depends on the analysed values.
    """
    apart = {
        value
        for value, reads in _stops(graph).items()
        if any(all(reached.get(v) != _FULL for v in read) for read in reads)
    }
    for node in graph.nodes:
        for body in node.bodies if node.links is None else ():
            inner = forward(body.graph, entering_body(body, node, reached, max))
            inside = _stopped_elsewhere(body.graph, inner) if any(inner.values()) else set()
            pairs = zip(body.graph.inputs, body.inputs, strict=True)
            for outer in {node.inputs[i] for value, i in pairs if value in inside}:
                before = behind(graph, (outer,))
                apart |= {value for value in graph.inputs if before.get(value) == _FULL}
    return {value for value in apart if reached.get(value) != _FULL}


@memoized
def _stops(graph: PlainGraph) -> dict[int, list[Sequence[int]]]:
    """For each input what the operations that stop it read."""
    stopping = [node for node in graph.nodes if node.loss in _STOPPED]
    inputs = [v for v in graph.inputs if stopping and graph.values[v].is_inexact]
    flows = {value: forward(graph, {value: _FULL}) for value in inputs}
    return {
        value: [n.inputs for n in stopping if any(flow.get(v) == _FULL for v in n.inputs)]
        for value, flow in flows.items()
    }


def _weighted(graph: PlainGraph, value: int, reached: Strengths) -> set[int]:
    """The inputs before `value` whose terms are weighted by a stopped `value`, as by an advantage.

    The stopped value must be differentiable in another term. Whether the other inputs are
    trained or are data is unknown; by convention parameters precede data.
    """
    matters = behind(graph, tuple(graph.outputs))
    stops = {
        out
        for node in graph.nodes
        if node.loss in _STOPPED
        and any(reached.get(v) == _FULL == matters.get(v) for v in node.inputs)
        for out in node.outputs
    }
    result: set[int] = set()
    for node in graph.nodes:
        if stops and node.operation in _SCALES:
            weights = [v for v in node.inputs if ({v} | ancestors(graph, v)) & stops]
            rest = behind(graph, tuple(v for v in node.inputs if not reached.get(v)))
            result |= {v for v in graph.inputs if weights and rest.get(v) == _FULL}
    places = {v: i for i, v in enumerate(graph.inputs)}
    return {v for v in result if places[v] < places.get(value, 0)}


def _terms(
    graph: PlainGraph, start: Strengths, own: Strengths, others: Strengths, call: Node | None = None
) -> Iterator[Loss]:
    """The losses behind each lost term of the graph's additive operations.

    own: How strongly each value depends on `start`, the values under analysis.
    others: How strongly each value depends on the other trained values.
    """
    matters = behind(graph, tuple(graph.outputs))
    scaling = _scaling(graph, own)
    vain = _useless_edits(graph, own, others, matters)
    for node in graph.nodes:
        if max((matters.get(value, _NONE) for value in node.outputs), default=_NONE) < _FULL:
            continue
        inside = node.bodies if node.links is None else ()
        for body in inside:
            if not body.gate:
                begin, apart = (entering_body(body, node, of, max) for of in (own, others))
                inner = forward(body.graph, begin), forward(body.graph, apart)
                yield from _terms(body.graph, begin, *inner, call or node)
        if inside or node.operation not in ADDITIVE:
            continue

        flowing, lost = flowing_and_lost(graph, node, own)
        terms = [v for v in lost if flowing and not flowing & ancestors(graph, v)]
        terms = [v for v in terms if not _is_written_back(graph, v, node.outputs[0], own)]
        if not terms:
            continue
        before = taken_before(graph, flowing, own)
        is_residual = node.operation == "subtract" and _is_residual(graph, node.outputs[0])
        for term in dict.fromkeys(a for v in terms for a in _addends(graph, v, own, others)):
            if is_added_again(graph, term, before, own):
                continue
            along = losses_between(graph, start, [term], call)
            stops = [
                loss
                for loss in along
                if loss.node.loss in _STOPPED and _reaches(graph, loss, term, by_derivative=True)
            ]
            trains = stops and others.get(term) == _FULL
            for loss in along:
                place = _place(graph, loss)
                is_choice = loss.node.loss in ("discrete", "integer_cast")
                stopped = loss in stops or (
                    is_choice and not _reaches(graph, loss, term, by_derivative=False)
                )
                if (is_residual and stopped) or scaling.intersection(place.outputs):
                    continue
                chosen = is_choice and any(others.get(v) == _FULL for v in place.inputs)
                edited = any(
                    _is_before(graph, place, edit) or _is_before(graph, edit, place)
                    for edit in vain
                )
                meant = trains and (stopped or chosen) and not edited
                yield replace(loss, whole=False, meant=bool(meant))


def _is_written_back(graph: PlainGraph, value: int, total: int, own: Strengths) -> bool:
    """Whether a summand was read at the places of a constant at which the sum is written."""
    read = _makers(graph).get(value)
    if read is None or read.operation != "index":
        return False
    array, *places = read.inputs
    if own.get(array):  # what the array itself has lost is a term
        return False
    writes = (node for node in graph.nodes if {array, total} <= {*node.inputs})
    return any(
        node.operation == "update" or (node.operation == "scatter" and {*places} <= {*node.inputs})
        for node in writes
    )


def _useless_edits(
    graph: PlainGraph, own: Strengths, others: Strengths, matters: Strengths
) -> list[Node]:
    """The operations that reverse or scale a gradient which none reaches, or which reaches none."""
    result = []
    for node in graph.nodes:
        if node.operation == "scale_gradient":
            (given, *_), (out, *_) = node.inputs, node.outputs
            reaches = _FULL in (own.get(given), others.get(given))
            useful = reaches and matters.get(out) == _FULL
            result += [node] if own.get(given) and not useful else []
    return result


def _is_before(graph: PlainGraph, node: Node, other: Node) -> bool:
    """Whether data flows from the results of a node to what another one reads."""
    return any(not {v, *ancestors(graph, v)}.isdisjoint(node.outputs) for v in other.inputs)


def _addends(graph: PlainGraph, value: int, own: Strengths, others: Strengths) -> list[int]:
    """The summands of a lost value that is a sum with constant weights; else the value itself."""
    node = _makers(graph).get(value)
    if node is None or node.bodies:
        return [value]
    shifts = shifts_at(graph, node, others)
    parts = [v for v in node.inputs if own.get(v, _NONE) and v not in shifts]
    constant = all(others.get(v, _NONE) < _FULL for v in node.inputs if v not in parts)
    is_scaled = node.operation in ("multiply", "divide", "negate") and len(parts) == 1 and constant
    is_sum = node.operation in ADDITIVE - AT_PLACES or node.operation in SHAPING
    if not (is_scaled or is_sum) or any(own.get(v, _NONE) == _FULL for v in parts):
        return [value]
    return [a for v in parts for a in _addends(graph, v, own, others)] or [value]


@memoized
def _makers(graph: PlainGraph) -> dict[int, Node]:
    return {v: node for node in graph.nodes for v in node.outputs}


def _scaling(graph: PlainGraph, reached: Strengths) -> set[int]:
    """The stopped values that multiply or divide a differentiable value."""
    result: set[int] = set()
    for node in graph.nodes:
        flowing, lost = flowing_and_lost(graph, node, reached)
        if node.operation in _SCALES and flowing:
            result |= {first for v in lost for first in first_lost(graph, v, reached)}
    stopped = {v for v in result if (node := _makers(graph).get(v)) and node.loss in _STOPPED}
    return equal_values(graph, stopped)


def _is_residual(graph: PlainGraph, value: int) -> bool:
    """Whether a value is read by what is not linear in it: a difference that is a residual."""
    linear = {value}
    for node in graph.nodes:
        reads = [v for v in node.inputs if v in linear]
        if not reads:
            continue
        if node.operation in _NONLINEAR or (node.operation in _SCALES and len(reads) > 1):
            return True
        if node.operation in LINEAR:
            linear.update(node.outputs)
    return False


def _place(graph: PlainGraph, loss: Loss) -> Node:
    """The node of this graph that is the loss's node or contains it in a body."""
    for node in graph.nodes:
        inside = (inner for body in node.bodies for _, inner in body.graph.walk())
        if node is loss.node or any(inner is loss.node for inner in inside):
            return node
    raise AssertionError  # a loss is found in the graph that is searched


def trains_others(graph: PlainGraph, values: Iterable[int], others: Iterable[int]) -> bool:
    """Whether each term that depends on `values` is differentiable in `others`."""
    own, other = (forward(graph, dict.fromkeys(of, _FULL)) for of in (values, others))
    reached = [out for out in graph.outputs if own.get(out)]
    terms = [term for out in reached for term in _addends(graph, out, own, other)]
    return all(other.get(term) == _FULL for term in terms)


def _reaches(graph: PlainGraph, loss: Loss, term: int, by_derivative: bool) -> bool:
    """Whether the result at a loss reaches a term.

    by_derivative: Whether a derivative must flow on the way, where stops and edits pass it on;
        otherwise data must flow, and stops end it.
    """
    reached = set(_place(graph, loss).outputs)
    for node in graph.nodes:
        stops = node.loss in _STOPPED
        passes = stops or node.mark == "edited gradient"
        for value, row in zip(node.outputs, links_of(graph, node), strict=True):
            links = [link for v, link in zip(node.inputs, row, strict=True) if v in reached]
            if by_derivative:
                carries = _FULL in links or (links and passes and graph.values[value].is_inexact)
            else:
                carries = any(links) and not stops and node.operation != "stop"
            if carries:
                reached.add(value)
    return term in reached
