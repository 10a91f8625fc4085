"""Finds operations at which the gradient of a leaf is lost, and gradient edits without effect.

If a value depends on a leaf, either the value is *differentiable* with respect to the leaf, or only
its data depends on the leaf (`derivative_flow.py`). A gradient is lost at an operation that reads a
differentiable value and affects the output only through values that are not differentiable (D means
differentiable)::

    lost(op)   if  D(input), not D(output), output -> ... -> end through values v with not D(v)

A `detach` or `stop_gradient` does not count as a lost gradient if its result is combined with a
differentiable value, as in a straight-through estimator, a softmax, a mask, or a normalizing
constant. The condition of a `where` does not count as a lost gradient if the selected data also
depends on the leaf; the gradient is then lost at an operation that computes the data::

    where(isfinite(x).all(), argmax(x), -1)    argmax
    where(x > 0, 1, 0)                         x > 0
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from gradtools.seeing.graphs.derivative_flow import (
    JOIN,
    Strengths,
    backward,
    behind,
    flat,
    forward,
    links_of,
)
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph, memoized

_NONE, _CUT, _ZERO, _FULL = Dependence
STOPS = frozenset({"detached", "no_grad"})
_LISTED = STOPS | {"left_framework"}
_CHOICES = frozenset({"where", "select"})  # operations whose first operand is the condition
_SHAPING = frozenset(
    {"reshape", "squeeze", "expand_dims", "broadcast", "transpose", "identity", "cast"}
)


@dataclass(frozen=True)
class Loss:
    """An operation at which the derivative with respect to a leaf is lost.

    Attributes:
        node: The operation.
        input: The position of the operand that is differentiable with respect to the leaf.
        whole: Whether the whole gradient of the leaf is lost. If False, only the gradient of one
            summand is lost.
        further: Whether the derivative is already lost at earlier operations on all paths.
    """

    node: Node
    input: int
    whole: bool = True
    further: bool = False


# --- losses of a whole leaf --------------------------------------------------------------


def losses(graph: PlainGraph, leaf: int) -> list[Loss]:
    """Returns the operations at which a leaf's gradient is lost, in program order."""
    if behind(graph, tuple(graph.outputs)).get(leaf, _NONE) == _FULL:
        return []
    return losses_between(graph, leaf, graph.outputs)


def losses_between(graph: PlainGraph, start: int, ends: Sequence[int]) -> list[Loss]:
    """Returns the operations at which the derivative of `ends` with respect to `start` is lost.

    The list includes later operations at which the derivative is also lost on all paths, if the
    operations are `detach`, `stop_gradient`, `no_grad` or conversions to NumPy, or are on the same
    line as an earlier operation in the list. The user must change all operations in the list.
    """
    graph = flat(graph)
    reached, first = forward(graph, {start: _FULL}), list[Loss]()
    full = {v for v, strength in reached.items() if strength == _FULL}
    data = _without_masks(graph, start)
    lost = backward(data, dict.fromkeys(ends, _FULL), full)
    for node in graph.nodes:
        if full.isdisjoint(node.inputs) or not any(map(lost.get, node.outputs)):
            continue
        for value, row in zip(node.outputs, links_of(graph, node), strict=True):
            for i, link in enumerate(row if lost.get(value) else ()):
                first += [Loss(node, i)] if node.inputs[i] in full and _NONE < link < _FULL else []
    places, lines = {id(loss.node) for loss in first}, {loss.node.source for loss in first}
    further = []
    for node in graph.nodes if first else ():
        loses = node.loss and id(node) not in places
        near = node.loss in _LISTED or node.source in lines
        columns = [*zip(*links_of(graph, node), strict=True)] if loses and near else []
        inputs = [
            i
            for i, column in enumerate(columns)
            if reached.get(node.inputs[i])
            and graph.values[node.inputs[i]].is_inexact
            and _NONE < max(column, default=_NONE) < _FULL
        ]
        if inputs and not any(map(forward(data, {start: _FULL}, node.outputs).get, ends)):
            further.append(Loss(node, inputs[0], further=True))
    order = {id(node): k for k, node in enumerate(graph.nodes)}
    return sorted([*first, *further], key=lambda loss: order[id(loss.node)])


def _without_masks(graph: PlainGraph, start: int) -> PlainGraph:
    """Removes the condition of each selection whose data also depends on `start`.

    If the data depends on `start` only through conditions, as in ``where(x > 0, 1, 0)``, the
    condition is kept.
    """
    is_choice = lambda node: node.operation in _CHOICES and len(node.inputs) >= 3
    choices = {id(node) for node in graph.nodes if is_choice(node)}
    if not choices:
        return graph
    reached = forward(_without_conditions(graph, choices), {start: _FULL})
    selects = lambda node: any(map(reached.get, node.inputs[1:]))
    masks = {id(node) for node in graph.nodes if id(node) in choices and selects(node)}
    return _without_conditions(graph, masks)


def _without_conditions(graph: PlainGraph, choices: Container[int]) -> PlainGraph:
    """Removes the links from the first operands of the nodes whose ids are in `choices`."""
    links = lambda node: tuple((_NONE, *row[1:]) for row in links_of(graph, node))
    nodes = (replace(n, links=links(n)) if id(n) in choices else n for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


# --- a summand of the loss ---------------------------------------------------------------


def lost_summands(graph: PlainGraph, leaves: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yields (value, role) for output summands without a derivative with respect to the leaves.

    The summands depend on the leaves only through operations without a derivative. Only scalar
    outputs that are differentiable with respect to a leaf are examined; other outputs are treated
    as metrics. The role is:

    - "shift" if a differentiable summand also depends on the stopped values, as in
      ``log(sum(exp(x - s))) + s``;
    - "part" if the summand is computed from a partial sum that has a derivative, as in
      ``x - floor(x)`` and in a straight-through estimator ``h + x - stop(x)`` with a discrete h(x);
    - empty for all other summands.

    Args:
        graph: The program, with inlined bodies.
        leaves: The indices of the values that may be trained.
    """
    strengths, makers = forward(graph, dict.fromkeys(leaves, _FULL)), _makers(graph)
    above = lambda v: set(behind(graph, (v,))) - {v}
    loses = lambda v: v in makers and makers[v].loss is not None
    for out in graph.outputs:
        if not _is_scalar(graph, out) or strengths.get(out) != _FULL:
            continue
        parts = list(_parts(graph, out, strengths))
        terms = [v for v, is_sum in parts if not is_sum]
        sums = equal_values(graph, {v for v, _ in parts if strengths.get(v) == _FULL})
        trained = [above(v) for v in terms if strengths[v] == _FULL]
        for value in terms:
            if strengths[value] < _FULL:
                stopped = {v for v in (value, *above(value)) if loses(v)}
                is_shift = any(stopped & others for others in trained)
                is_part = not sums.isdisjoint(above(value))
                yield value, "part" if is_part else "shift" if is_shift else ""


def trains_others(graph: PlainGraph, values: Iterable[int], others: Iterable[int]) -> bool:
    """Returns whether summands that depend on `values` have gradients with respect to `others`."""
    own, other = (forward(graph, dict.fromkeys(of, _FULL)) for of in (values, others))
    both = {v: max(own.get(v, _NONE), other.get(v, _NONE)) for v in (*own, *other)}
    parts = [part for out in graph.outputs for part in _parts(graph, out, both)]
    return all(is_sum or other.get(v) == _FULL for v, is_sum in parts if own.get(v))


def _parts(graph: PlainGraph, value: int, strengths: Strengths) -> Iterator[tuple[int, bool]]:
    """Yields (value index, is_sum) for a value and the terms of its nested weighted sums."""
    terms = _terms(graph, value, strengths)
    yield value, terms is not None
    for v in terms or ():
        if strengths.get(v):
            yield from _parts(graph, v, strengths)


def _terms(graph: PlainGraph, value: int, strengths: Strengths) -> Sequence[int] | None:
    """Returns the scalars whose weighted sum is `value`; None if `value` is not a sum."""
    node = _makers(graph).get(value)
    is_real = _is_scalar(graph, value) and graph.values[value].is_inexact
    depending = [v for v in node.inputs if strengths.get(v)] if node and is_real else []
    if node is None or not depending:
        return None
    if node.operation in ("sum", "mean"):
        return _stacked(graph, node.inputs[0])
    if not all(_is_scalar(graph, v) for v in depending):
        return None
    if node.operation in ("add", "subtract"):
        return node.inputs
    numerator = depending == [node.inputs[0]] and node.native not in ("rdiv", "rtruediv")
    is_scaled = node.operation == "multiply" and len(depending) == 1
    is_scaled |= node.operation in ("divide", "negate", *_SHAPING) and numerator
    return depending if is_scaled else None


def _stacked(graph: PlainGraph, value: int) -> Sequence[int] | None:
    """Returns the scalars that form `value` if it is a stack of scalars, otherwise None."""
    if _is_scalar(graph, value):
        return [value]
    node = _makers(graph).get(value)
    if node is None or node.operation not in ("stack", "concatenate"):
        return None
    return node.inputs if all(_is_scalar(graph, v) for v in node.inputs) else None


def _is_scalar(graph: PlainGraph, value: int) -> bool:
    return prod(graph.values[value].shape) == 1


@memoized
def _makers(graph: PlainGraph) -> Mapping[int, Node]:
    return {v: node for node in graph.nodes for v in node.outputs}


def equal_values(graph: PlainGraph, values: set[int]) -> set[int]:
    """Returns all values that equal one of `values` up to a reshape, by value numbering."""
    classes = _classes(graph)
    wanted = {classes[v] for v in values if v in classes}
    return values.union(v for v, of in classes.items() if of in wanted)


@memoized
def _classes(graph: PlainGraph) -> Mapping[int, int]:
    """Maps each value to the index of its class of equal values."""
    classes: dict[int, int] = {}
    numbers: dict[Any, int] = {}
    for v in graph.captured:
        if graph.values[v].name:  # the name of a literal is its contents
            classes[v] = numbers.setdefault(graph.values[v], -1 - len(numbers))
    for node in graph.nodes:
        if node.operation == JOIN:
            continue
        if node.operation in _SHAPING and len(node.inputs) == len(node.outputs) == 1:
            classes[node.outputs[0]] = classes.get(node.inputs[0], node.inputs[0])
            continue
        read = tuple([classes.get(v, v) for v in node.inputs])
        about = [(key, repr(x)) for key, x in node.attributes.items() if key != "keepdims"]
        for k, v in enumerate(node.outputs):
            shape = tuple([n for n in graph.values[v].shape if n != 1])
            key = node.operation, node.native, read, tuple(sorted(about)), k, shape
            classes[v] = numbers.setdefault(key, -1 - len(numbers))
    return classes


# --- edits without effect ----------------------------------------------------------------

EDITS = frozenset({"scale_gradient", "clip_gradient", "transform_gradient", "replace_gradient"})


def useless_edits(
    graph: PlainGraph, leaves: Iterable[int], every: Iterable[int]
) -> list[tuple[int, Loss]]:
    """Finds gradient edits that pass no gradient to any leaf; returns (leaf, loss) pairs.

    Args:
        graph: The program.
        leaves: The leaves to examine. A leaf is returned if its gradient is lost before or after an
            edit of a value that depends on the leaf.
        every: The indices of all values that may be trained.
    """
    reached = forward(graph, dict.fromkeys(every, _FULL))
    matters = behind(graph, tuple(graph.outputs))
    result = []
    for node in graph.nodes:
        if not EDITS.intersection((node.native, node.attributes.get("name"))):
            continue
        given, out = node.inputs[0], node.outputs[0]
        reaches, useful = reached.get(given, _NONE), matters.get(out, _NONE)
        if not (reaches and useful) or reaches == useful == _FULL:
            continue
        ends = [given] if reaches < _FULL else graph.outputs
        for leaf in leaves:
            if behind(graph, (given,)).get(leaf):
                along = losses_between(graph, leaf if reaches < _FULL else out, ends)
                result += [(leaf, replace(loss, whole=False)) for loss in along]
    return result
