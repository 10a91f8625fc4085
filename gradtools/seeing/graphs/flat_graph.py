"""Inlines the bodies of loops, branches and calls: a flat graph of units and links.

A node with bodies becomes a group of its bodies' units. Values are forwarded across the boundary of
a body, so each link connects the operation that computes a value to one that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
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

Makers = tuple[tuple[int, int], ...]  # pairs (unit, index of its output)
_CALLS = (*("call", "jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat"),)


@dataclass(frozen=True)
class Operand:
    """One operand: a value, which several branches may make, or a number as text."""

    makers: Makers
    text: str = ""
    strength: Dependence = Dependence.DIFFERENTIABLE
    cut: str | None = None


@dataclass
class Unit:
    """An operation, input, captured value or output, to be drawn as a box."""

    key: int
    kind: str
    phase: int
    scope: tuple[str, ...] = ()
    node: Node | None = None
    value: Value | None = None
    outputs: tuple[Value, ...] = ()
    operands: list[Operand] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)  # maker, value
    name: str = ""


@dataclass
class BlockGroup:
    """A module, call, loop or branch with its contents, to be drawn as a block."""

    kind: str
    title: str
    scope: tuple[str, ...]
    phase: int
    children: list[Unit | BlockGroup]
    count: int = 1
    mark: str = ""


Entry = Unit | BlockGroup


@dataclass
class Link:
    """A value that one unit makes and another reads."""

    source: int
    target: int
    value: int
    strength: Dependence
    cut: str | None


@dataclass(frozen=True)
class _Level:
    """A graph or a body of it, and what is known of its values.

    Attributes:
        graph: The graph.
        made: The units that make each value.
        numbers: The number of each value among `FlatGraph.values`.
    """

    graph: PlainGraph
    made: dict[int, Makers]
    numbers: dict[int, int]


class FlatGraph:
    """A graph with its bodies inlined: units, and the links between them."""

    def __init__(self, graph: PlainGraph) -> None:
        self.units: list[Unit] = []
        self.links: list[Link] = []
        self.values: list[Value] = []
        self.alive: set[int] = set()  # values that are alive without being saved
        self._given = alive_anyway(graph)
        self._lost = lost_links(graph)
        self.leaves = [
            *(self._leaf("input", graph, v, f"input {i}") for i, v in enumerate(graph.inputs)),
            *(self._leaf("captured", graph, v, "") for v in graph.captured),
        ]
        made: dict[int, Makers]
        made = {v: ((self.leaves[i].key, 0),) for i, v in reversed([*enumerate(graph.inputs)])}
        captured = self.leaves[len(graph.inputs) :]
        made |= {v: ((u.key, 0),) for v, u in zip(graph.captured, captured, strict=True)}
        level = _Level(graph, made, {})
        self.entries = self._entries(level, ())
        self._join_outside(level)
        self.outputs = [*self._leaving(level)]

    def _unit(self, kind: str, phase: int, **rest: Any) -> Unit:
        unit = Unit(len(self.units), kind, phase, **rest)
        self.units.append(unit)
        return unit

    def _leaf(self, kind: str, graph: PlainGraph, value: int, name: str) -> Unit:
        known = graph.values[value]
        held = text_of(known.name) if are_numbers(known.name) else known.name
        return self._unit(kind, 0, value=known, name=known.spoken or held or name or "constant")

    def _entries(self, level: _Level, around: tuple[str, ...]) -> list[Entry]:
        """One entry for each node; adds the makers of its outputs to `level.made`."""
        entries: list[Entry] = []
        graph = level.graph
        for node in graph.nodes:
            scope = node.scope[len(around) :] if node.scope[: len(around)] == around else node.scope
            strengths = strengths_of(graph, node)
            if node.bodies:
                entries.append(self._call(level, node, scope))
                continue
            unit = self._operation(graph, node, scope)
            entries.append(unit)
            for i, (value, strength) in enumerate(zip(node.inputs, strengths, strict=True)):
                cut = cut_reason(self._lost, node, i, strength)
                self._read(unit, level, value, strength, cut)
            level.made.update({v: ((unit.key, k),) for k, v in enumerate(node.outputs)})
        return entries

    def _operation(self, graph: PlainGraph, node: Node, scope: tuple[str, ...]) -> Unit:
        outputs = tuple(graph.values[v] for v in node.outputs)
        return self._unit("operation", node.phase, scope=scope, node=node, outputs=outputs)

    def _read(
        self,
        unit: Unit,
        level: _Level,
        value: int,
        strength: Dependence,
        cut: str | None = None,
    ) -> None:
        makers = level.made.get(value, ())
        if len(makers) == 1 and self.is_number(makers[0][0]):
            unit.operands.append(Operand((), self.units[makers[0][0]].name))
            return
        if makers:
            unit.operands.append(Operand(makers, "", strength, cut))
        for maker in dict.fromkeys(key for key, _ in makers):
            number = self._number(level, value)
            base = level.graph.values[value].base
            if self.units[maker].kind != "operation" or base in self._given:
                self.alive.add(number)
                self.alive |= {base for base in [self.values[number].base] if base is not None}
            unit.reads.append((maker, number))
            self.links.append(Link(maker, unit.key, number, strength, cut))

    @cached_property
    def _entering(self) -> dict[int, list[Link]]:
        result: dict[int, list[Link]] = {}
        for link in self.links:
            result.setdefault(link.target, []).append(link)
        return result

    def entering(self, key: int) -> list[Link]:
        """The links that end at a unit."""
        return self._entering.get(key, [])

    def _number(self, level: _Level, value: int) -> int:
        if value not in level.numbers:
            level.numbers[value] = number = len(self.values)
            self.values.append(level.graph.values[value])
            base = base_of(level.graph, value)
            shown = None if base == value else self._number(level, base)
            self.values[number] = replace(self.values[number], base=shown)
        return level.numbers[value]

    def shape_of(self, unit: Unit) -> tuple[int, ...]:
        """The shape of a unit's first operand; ``()`` for a number."""
        for key, k in unit.operands[0].makers if unit.operands else ():
            maker = self.units[key]
            return maker.outputs[k].shape if maker.outputs else maker.value.shape  # type: ignore[union-attr]
        return ()

    def is_number(self, key: int) -> bool:
        """Whether a captured value is a plain number, which is printed in its reader's box."""
        unit = self.units[key]
        if unit.kind != "captured" or unit.value is None or unit.value.shape:
            return False
        return not unit.value.name or is_number(unit.value.name)

    def _call(self, level: _Level, node: Node, scope: tuple[str, ...]) -> BlockGroup:
        """The group of a node with bodies, whose values are forwarded across the boundary."""
        group = BlockGroup(_kind(node), _called(node), scope, node.phase, [], mark=node.mark)
        deciding = set(range(len(node.inputs))).difference(*(b.inputs for b in node.bodies))
        if deciding or not node.inputs:
            unit = self._operation(level.graph, node, ())
            unit.name = "decides"
            group.children.append(unit)
            for i in sorted(deciding):
                self._read(unit, level, node.inputs[i], Dependence.CUT)
        leaving: dict[int, dict[tuple[int, int], None]] = {v: {} for v in node.outputs}
        for number, body in enumerate(node.bodies):
            ties = [*zip(body.graph.inputs, body.inputs, strict=True)]
            inner = {v: level.made.get(node.inputs[i], ()) for v, i in ties}
            own = {v: self._number(level, node.inputs[i]) for v, i in ties}
            inner |= self._constants(body.graph)
            children = self._entries(_Level(body.graph, inner, own), node.scope)
            name = _body_name(node, number)
            if len(node.bodies) > 1 and children:
                children = [BlockGroup("branch", name, (), node.phase, children)]
            group.children += children
            if not body.gate:
                for v, out in zip(node.outputs, body.graph.outputs, strict=True):
                    leaving[v] |= dict.fromkeys(inner.get(out, ()))
        level.made.update({v: tuple(makers) for v, makers in leaving.items()})
        return group

    def _constants(self, graph: PlainGraph) -> dict[int, Makers]:
        leaves = {v: self._leaf("captured", graph, v, "") for v in graph.captured}
        self.leaves += leaves.values()
        return {v: ((leaf.key, 0),) for v, leaf in leaves.items()}

    def _join_outside(self, level: _Level) -> None:
        """Adds a cut link for data that left the framework and came back as another value."""
        cut = reason("left_framework")
        for source, target in level.graph.outside:
            number = self._number(level, source)
            for maker, _ in level.made.get(source, ()):
                for unit, _ in level.made.get(target, ()):
                    self.units[unit].reads.append((maker, number))
                    self.links.append(Link(maker, unit, number, Dependence.CUT, cut))

    def _leaving(self, level: _Level) -> Iterator[Unit]:
        for i, value in enumerate(level.graph.outputs):
            makers = level.made.get(value, ())
            phase = max((self.units[maker].phase for maker, _ in makers), default=0)
            known = level.graph.values[value]
            name = known.spoken or known.name or f"output {i}"
            unit = self._unit("output", phase, value=known, name=name)
            unit.operands.append(Operand(makers))
            for maker, _ in makers:
                number = self._number(level, value)
                unit.reads.append((maker, number))
                self.links.append(Link(maker, unit.key, number, Dependence.DIFFERENTIABLE, None))
            yield unit


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


def units_of(items: Iterable[Entry]) -> list[Unit]:
    """All units of these entries and their groups, in program order."""
    result: list[Unit] = []
    for item in items:
        result += [item] if isinstance(item, Unit) else units_of(item.children)
    return result


def ways_to(roots: Iterable[BlockGroup]) -> dict[int, list[Any]]:
    """For each unit the path of groups that leads to it, outermost first, and itself."""
    result: dict[int, list[Any]] = {}

    def visit(group: BlockGroup, way: list[Any]) -> None:
        for child in group.children:
            if isinstance(child, BlockGroup):
                visit(child, [*way, child])
            else:
                result[child.key] = [*way, child]

    for root in roots:
        visit(root, [root])
    return result
