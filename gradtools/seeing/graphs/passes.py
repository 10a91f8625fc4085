"""The forward and backward passes of a differentiated program, with their inputs and outputs.

Forward gives the outputs y = f(x). Backward takes a cotangent c for each y and gives the gradients
g = Jᴴc. Backward of the backward takes a cotangent v for each g and gives the derivatives of
<g, v> along x and along c. Both wings name these ends here, so that their graphs read alike::

    x, c, v  ->  y, g, d<g, v>/dx, d<g, v>/dc
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradtools.seeing.graphs.nodes import Node, PlainGraph

if TYPE_CHECKING:
    from gradtools.seeing.graphs.nodes import Value
    from gradtools.seeing.graphs.program import LeafProgram

FORWARD, BACKWARD, SECOND = range(3)
CUSTOM = "custom rule"
INNER = "inner derivative"  # the mark of what f itself differentiates


@dataclass(frozen=True)
class Differentiated:
    """A call, and how often it is differentiated.

    Attributes:
        program: The call; `program.wrt` are the leaves along which.
        order: 0 forward alone, 1 with backward, 2 with backward of the backward.
    """

    program: LeafProgram
    order: int

    def output(self, k: int) -> str:
        """The name of output k of the latest run."""
        return self.program.out_names[k]


@dataclass(frozen=True)
class Live:
    """Results that exist already: of these, what the framework holds."""

    outputs: Any


def cotangent_of(name: str) -> str:
    """What is put in for something that came out."""
    return f"cotangent of {name}"


def gradient_of(name: str) -> str:
    """What backward gives."""
    return f"gradient of {name}"


def second_gradient_of(name: str) -> str:
    """What backward of the backward gives."""
    return f"second gradient of {name}"


_ROLES = tuple(
    inner(outer)
    for inner in (cotangent_of, gradient_of, second_gradient_of)
    for outer in (gradient_of(""), "")
)


def with_named_outputs(graph: PlainGraph, names: Sequence[str]) -> PlainGraph:
    """The graph with its outputs named; what has a name already leaves by an identity.

    A gradient may be the very cotangent that came in, and one value may leave as two outputs.
    """
    nodes, values, outputs = list(graph.nodes), dict(graph.values), []
    for value, name in zip(graph.outputs, names, strict=True):
        if values[value].name:
            made = max(values) + 1
            nodes.append(Node("identity", (value,), (made,), phase=_phase_of(name)))
            values[made], value = values[value], made
        values[value] = replace(values[value], name=name)
        outputs.append(value)
    return replace(graph, nodes=tuple(nodes), values=values, outputs=tuple(outputs))


def with_spoken_names(graph: PlainGraph, spoken: Mapping[str, str]) -> PlainGraph:
    """The graph with what texts and pictures call the leaves and what belongs to them."""

    def named(value: Value) -> Value:
        role = next((r for r in _ROLES if value.name.startswith(r)), "")
        name = spoken.get(value.name.removeprefix(role))
        return replace(value, spoken=role + name) if name else value

    return replace(graph, values={v: named(value) for v, value in graph.values.items()})


def _phase_of(output: str) -> int:
    """The pass that an output leaves."""
    if output.startswith(second_gradient_of("")):
        return SECOND
    return BACKWARD if output.startswith(gradient_of("")) else FORWARD
