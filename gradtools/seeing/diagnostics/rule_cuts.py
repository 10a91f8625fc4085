"""Second derivatives that a custom rule loses: its backward reads intermediates of its forward.

The classic case is sinh with its two exponentials stored on ctx. No graph connects them to the
argument, so the second derivative is silently incomplete; they must be saved as outputs. In the
graph, the links from such values to the backward pass are cut. A gradient that is absent is made by
a node `missing`, which reads the values that it should have been computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gradtools.seeing.graphs.nodes import Dependence, Node, Value, even_links
from gradtools.seeing.graphs.passes import CUSTOM, SECOND

LOSS = "inside_rule"
STOPPED = "stopped_in_rule"  # by the rule's own backward
_FLAT = ("sign", "floor", "ceil", "round", "trunc", "floor_divide", "stop", "compare")


def inside_rules(
    nodes: Sequence[Node], leaves: Iterable[int], values: Mapping[int, Value]
) -> dict[int, frozenset[int]]:
    """The intermediates inside of rules, each with the leaves on which it depends smoothly."""
    sources: dict[int, frozenset[int]] = {v: frozenset({v}) for v in leaves}
    inside = {}
    for node in nodes:
        if node.phase or node.operation in _FLAT:
            continue
        result = frozenset[int]().union(*(sources.get(v, ()) for v in node.inputs))
        for value in node.outputs:
            if result and values[value].is_inexact:
                sources[value] = result
                if node.mark == CUSTOM:
                    inside[value] = result
    return inside


def smoothly_between(nodes: Sequence[Node], leaf: int, ends: Iterable[int]) -> set[int]:
    """The values that depend smoothly on a leaf and on which the ends depend smoothly."""
    reached, leading = {leaf}, set(ends)
    for node in nodes:
        if node.operation not in _FLAT and reached.intersection(node.inputs):
            reached.update(node.outputs)
    for node in reversed(nodes):
        if node.operation not in _FLAT and leading.intersection(node.outputs):
            leading.update(node.inputs)
    return reached & leading


def with_cuts(
    node: Node, lost: Mapping[int, object], values: Mapping[int, Value], loss: str = LOSS
) -> Node:
    """A node of a later pass, with its links from values without a graph cut."""
    if not node.phase or lost.keys().isdisjoint(node.inputs):
        return node
    return replace(node, links=even_links(node, values, cut=lost), loss=loss)


def missing(cuts: tuple[int, ...], made: int, nodes: Sequence[Node], loss: str = LOSS) -> Node:
    """A node for a gradient that should exist, with cut links from the values it should read."""
    of_rule = lambda node: node.mark == CUSTOM and cuts[0] in (*node.inputs, *node.outputs)
    maker = next(node for node in nodes if cuts[0] in node.outputs or of_rule(node))
    rule = str(maker.attributes.get("rule", ""))
    return Node(
        "missing",
        cuts,
        (made,),
        attributes=MappingProxyType({"rule": rule}),
        source=maker.source,
        scope=maker.scope,
        phase=SECOND,
        mark=CUSTOM,
        links=((Dependence.CUT,) * len(cuts),),
        loss=loss,
    )
