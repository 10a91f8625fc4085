"""A call of the other framework's function in a graph: a node with that framework's graph inside.

To the framework around it the call is one operation, and it is the rule that says how its outputs
depend on its inputs; the body only shows what it is made of. All of it runs in the pass of the
node: the derivative of a bridged function evaluates the function again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gradtools.bridged_calls import ForeignProgram
from gradtools.seeing.nodes import Body, Dependence, Links, Node, PlainGraph, Value

BRIDGED = "bridged"
_OF_THE_CALL = ("key", "batch")


def opened(
    node: Node, values: Mapping[int, Value], inside: ForeignProgram, inputs: Sequence[int]
) -> Node:
    """The node with the other framework's operations inside, where these can be told.

    Args:
        node: The call.
        values: Those of the node's graph.
        inside: What looks into the function.
        inputs: ``inputs[i]`` is the position of the node's input that is the function's input i.
    """
    kept = {k: x for k, x in node.attributes.items() if k not in _OF_THE_CALL}
    node = replace(
        node, operation=BRIDGED, attributes=MappingProxyType(kept | {"name": inside.name})
    )
    graph = inside.graph()
    if graph is None:
        return node
    body = Body(in_phase(graph, node.phase), tuple(inputs))
    return replace(node, bodies=(body,), links=node.links or _all(node, values))


def in_phase(graph: PlainGraph, phase: int) -> PlainGraph:
    """The graph with all its nodes in one pass."""

    def moved(node: Node) -> Node:
        bodies = [replace(body, graph=in_phase(body.graph, phase)) for body in node.bodies]
        return replace(node, phase=phase, bodies=tuple(bodies), saved=())

    return replace(graph, nodes=tuple(map(moved, graph.nodes)))


def _all(node: Node, values: Mapping[int, Value]) -> Links:
    """What the links of an operation without a body are."""

    def link(y: int, x: int) -> Dependence:
        inexact = values[y].is_inexact and values[x].is_inexact
        return Dependence.DIFFERENTIABLE if inexact else Dependence.CUT

    return tuple(tuple(link(y, x) for x in node.inputs) for y in node.outputs)
