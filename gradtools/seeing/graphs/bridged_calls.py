"""A call of the other framework's function in a graph: a node with that framework's graph inside.

To the framework around it the call is one operation, and it is the rule that says how its outputs
depend on its inputs; the body only shows what it is made of. All of it runs in the pass of the
node: the derivative of a bridged function evaluates the function again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from gradtools.bridged_calls import ForeignProgram
from gradtools.seeing.graphs.nodes import Body, Node, PlainGraph, Value, even_links

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
    return replace(node, bodies=(body,), links=node.links or even_links(node, values))


def in_phase(graph: PlainGraph, phase: int) -> PlainGraph:
    """The graph with all its nodes in one pass."""
    moved = partial(node_in_phase, phase=phase)
    return replace(graph, nodes=tuple(map(moved, graph.nodes)))


def node_in_phase(node: Node, phase: int) -> Node:
    """A node, and what is inside of it, in one pass."""
    bodies = [replace(body, graph=in_phase(body.graph, phase)) for body in node.bodies]
    return replace(node, phase=phase, bodies=tuple(bodies), saved=())
