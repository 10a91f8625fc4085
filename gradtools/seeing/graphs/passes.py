"""Names the inputs and outputs of the forward and backward passes.

The forward pass computes the outputs y = f(x). The backward pass receives a cotangent c for each y
and computes the gradients g = Jᴴc. The backward of the backward receives a cotangent v for each g
and computes the gradients of <g, v> with respect to x and c. Both backends use the same names for
inputs and outputs::

    x, c, v  ->  y, g, d<g, v>/dx, d<g, v>/dc
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradtools.seeing.graphs.nodes import Node, PlainGraph

FORWARD, BACKWARD, SECOND = range(3)
CUSTOM, EDITED = "custom rule", "edited gradient"
INNER = "inner derivative"  # marks operations that compute derivatives in the forward pass


def cotangent_of(name: str) -> str:
    """Returns the name of the cotangent of an output or gradient."""
    return f"cotangent of {name}"


def gradient_of(name: str) -> str:
    """Returns the name of the gradient of an input, a result of the backward pass."""
    return f"gradient of {name}"


def second_gradient_of(name: str) -> str:
    """Returns the name of a second gradient, a result of the backward of the backward."""
    return f"second gradient of {name}"


def with_named_outputs(graph: PlainGraph, names: Sequence[str]) -> PlainGraph:
    """Names the outputs of a graph; an identity node copies a value that already has a name.

    The copy is needed if a gradient is an input cotangent, or if f returns one value as two
    outputs.
    """
    nodes, values, outputs = list(graph.nodes), dict(graph.values), []
    leaving = {second_gradient_of(""): SECOND, gradient_of(""): BACKWARD, "": FORWARD}
    for value, name in zip(graph.outputs, names, strict=True):
        if values[value].name:
            made = max(values) + 1
            phase = next(leaving[role] for role in leaving if name.startswith(role))
            nodes.append(Node("identity", (value,), (made,), phase=phase))
            values[made], value = values[value], made
        values[value] = replace(values[value], name=name)
        outputs.append(value)
    return replace(graph, nodes=tuple(nodes), values=values, outputs=tuple(outputs))
