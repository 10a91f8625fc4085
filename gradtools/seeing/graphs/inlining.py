"""Inlines the bodies of loops, branches and calls: a flat graph of boxes.

A node with bodies becomes a block of its bodies' boxes. Values are forwarded across the boundary of
a body, so an operand names the boxes that compute it, wherever they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gradtools.seeing.graphs.attributes import are_numbers, is_number, text_of
from gradtools.seeing.graphs.edges import (
    alive_anyway,
    base_of,
    cut_reason,
    lost_links,
    reason,
    strengths_of,
)
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph, Value
from gradtools.seeing.graphs.outline import Block, Box, Makers, Operand

_CALLS = ("call", "jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat")


@dataclass(frozen=True)
class _Level:
    """A graph or a body of it, and what is known of its values.

    Attributes:
        graph: The graph.
        made: The boxes that make each value.
        numbers: The number of each value among `InlinedGraph.values`.
    """

    graph: PlainGraph
    made: dict[int, Makers]
    numbers: dict[int, int]


class InlinedGraph:
    """A graph with its bodies inlined.

    Attributes:
        boxes: Every box, by its key.
        values: The values that boxes read, by number.
        alive: The numbers of values that are alive without being saved.
        leaves: The boxes of inputs and captured values.
        entries: A box or a block for each node.
        outputs: The boxes of the outputs.
    """

    def __init__(self, graph: PlainGraph) -> None:
        self.boxes: list[Box] = []
        self.values: list[Value] = []
        self.alive: set[int] = set()
        self._given = alive_anyway(graph)
        self._lost = lost_links(graph)
        inputs = [self._leaf("input", graph, v, f"input {i}") for i, v in enumerate(graph.inputs)]
        captured = self._constants(graph)
        self.leaves = [*inputs, *captured.values()]
        made: dict[int, Makers] = {}
        for value, box in [*zip(graph.inputs, inputs, strict=True), *captured.items()]:
            made.setdefault(value, ((box.key, 0),))
        level = _Level(graph, made, {})
        self.entries = self._entries(level, ())
        self._join_outside(level)
        self.outputs = [self._output(level, i, v) for i, v in enumerate(graph.outputs)]

    def _box(self, kind: str, title: str, phase: int, **rest: Any) -> Box:
        box = Box(len(self.boxes), kind, title, phase, **rest)
        self.boxes.append(box)
        return box

    def _leaf(self, kind: str, graph: PlainGraph, value: int, name: str) -> Box:
        known = graph.values[value]
        held = text_of(known.name) if are_numbers(known.name) else known.name
        return self._box(kind, known.spoken or held or name or "constant", 0, values=(known,))

    def _constants(self, graph: PlainGraph) -> dict[int, Box]:
        return {v: self._leaf("captured", graph, v, "") for v in graph.captured}

    def _operation(self, graph: PlainGraph, node: Node, **rest: Any) -> Box:
        values = tuple(graph.values[v] for v in node.outputs)
        return self._box("operation", node.operation, node.phase, node=node, values=values, **rest)

    def _entries(self, level: _Level, around: tuple[str, ...]) -> list[Box | Block]:
        """One entry for each node; adds the makers of its outputs to `level.made`."""
        entries: list[Box | Block] = []
        for node in level.graph.nodes:
            scope = node.scope[len(around) :] if node.scope[: len(around)] == around else node.scope
            if node.bodies:
                entries.append(self._call(level, node, scope))
                continue
            box = self._operation(level.graph, node, scope=scope)
            entries.append(box)
            strengths = strengths_of(level.graph, node)
            for i, (value, strength) in enumerate(zip(node.inputs, strengths, strict=True)):
                self._read(box, level, value, strength, cut_reason(self._lost, node, i, strength))
            level.made.update({v: ((box.key, k),) for k, v in enumerate(node.outputs)})
        return entries

    def _read(
        self, box: Box, level: _Level, value: int, strength: Dependence, cut: str | None = None
    ) -> None:
        """Adds an operand to a box."""
        makers = level.made.get(value, ())
        made_by = [self.boxes[key] for key, _ in makers]
        if len(made_by) == 1 and _is_number(made_by[0]):
            box.operands.append(Operand((), text=made_by[0].title))
        elif makers:
            number = self._number(level, value)
            box.operands.append(Operand(makers, number, strength=strength, cut=cut))
            base = level.graph.values[value].base
            if base in self._given or any(maker.kind != "operation" for maker in made_by):
                shared = self.values[number].base
                self.alive |= {number} if shared is None else {number, shared}

    def _number(self, level: _Level, value: int) -> int:
        if value not in level.numbers:
            level.numbers[value] = number = len(self.values)
            self.values.append(level.graph.values[value])
            base = base_of(level.graph, value)
            shown = None if base == value else self._number(level, base)
            self.values[number] = replace(self.values[number], base=shown)
        return level.numbers[value]

    def _call(self, level: _Level, node: Node, scope: tuple[str, ...]) -> Block:
        """The block of a node with bodies, whose values are forwarded across the boundary."""
        block = Block(_kind(node), _called(node), scope, node.phase, mark=node.mark)
        deciding = set(range(len(node.inputs))).difference(*(b.inputs for b in node.bodies))
        if deciding or not node.inputs:
            box = self._operation(level.graph, node, name="decides")
            block.children.append(box)
            for i in sorted(deciding):
                self._read(box, level, node.inputs[i], Dependence.CUT)
        leaving: dict[int, dict[tuple[int, int], None]] = {v: {} for v in node.outputs}
        for number, body in enumerate(node.bodies):
            ties = [*zip(body.graph.inputs, body.inputs, strict=True)]
            inner = {v: level.made.get(node.inputs[i], ()) for v, i in ties}
            own = {v: self._number(level, node.inputs[i]) for v, i in ties}
            constants = self._constants(body.graph)
            self.leaves += constants.values()
            inner |= {v: ((leaf.key, 0),) for v, leaf in constants.items()}
            children = self._entries(_Level(body.graph, inner, own), node.scope)
            if len(node.bodies) > 1 and children:
                children = [Block("branch", _body_name(node, number), (), node.phase, children)]
            block.children += children
            if not body.gate:
                for v, out in zip(node.outputs, body.graph.outputs, strict=True):
                    leaving[v] |= dict.fromkeys(inner.get(out, ()))
        level.made.update({v: tuple(makers) for v, makers in leaving.items()})
        return block

    def _join_outside(self, level: _Level) -> None:
        """Adds a cut operand for data that left the framework and came back as another value."""
        cut = reason("left_framework")
        for source, target in level.graph.outside:
            left = Operand(
                level.made.get(source, ()), self._number(level, source), "", Dependence.CUT, cut
            )
            for key, _ in level.made.get(target, ()):
                self.boxes[key].came_back.append(left)

    def _output(self, level: _Level, i: int, value: int) -> Box:
        makers, known = level.made.get(value, ()), level.graph.values[value]
        phase = max((self.boxes[maker].phase for maker, _ in makers), default=0)
        name = known.spoken or known.name or f"output {i}"
        number = self._number(level, value)
        return self._box("output", name, phase, values=(known,), operands=[Operand(makers, number)])


def _is_number(box: Box) -> bool:
    """Whether a captured value is a plain number, which is printed in its reader's box."""
    if box.kind != "captured" or box.values[0].shape:
        return False
    return not box.values[0].name or is_number(box.values[0].name)


def _kind(node: Node) -> str:
    if node.operation in ("scan", "while", "while_loop", "for", "loop", "map"):
        return "loop"
    return "branch" if node.operation in ("cond", "switch", "where_branch") else "call"


def _called(node: Node) -> str:
    """A call's title: the name of its function, or of the operation."""
    name = node.attributes.get("name")
    if node.operation in _CALLS and isinstance(name, str):
        return name.lstrip("_") or node.operation
    return node.operation


def _body_name(node: Node, number: int) -> str:
    if node.bodies[number].gate:
        return "condition"
    return "body" if any(body.gate for body in node.bodies) else f"branch {number}"
