"""Converts a graph to an `Outline` of nested blocks, boxes and arrows.

1. The bodies of loops, branches and calls are inlined. An operand refers to the boxes that compute
   its value, inside or outside of the body.
2. Consecutive operations of one module or call become a block; a block with one child is replaced
   by the child, which gets both names. A parameter is placed in the innermost block that contains
   all of its readers, an argument is placed outside of all blocks, and an output is placed after
   the block that computes the output. If there are many outputs, gradients of parameters are placed
   inside of blocks.
3. Letters are assigned in the order of the whole outline, so the letters are the same in the text
   and in all pictures of a graph, for any set of expanded blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from gradtools.seeing.graphs.attributes import are_numbers, call_text, is_number, text_of
from gradtools.seeing.graphs.edges import alive_anyway, lost_links, reads_of
from gradtools.seeing.graphs.nodes import (
    Dependence,
    Node,
    PlainGraph,
    Value,
    memory_of,
    shared_length,
)
from gradtools.seeing.graphs.outline import (
    PHASES,
    Arrow,
    Block,
    Box,
    Makers,
    Operand,
    Outline,
    merged,
)

_CALLS = ("call", "jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat")
_LOOPS = ("scan", "while", "while_loop", "for", "loop", "map")
_BRANCHES = ("cond", "switch", "where_branch")
_LEAVES_ABOVE = 8  # maximum number of outputs drawn outside of all blocks
_IN_ARGUMENT = re.compile(r"[\[.]")  # matches leaves such as params['w'] and net.weight


def outline_of(graph: PlainGraph, *, title: str = "") -> Outline:
    """Builds the outline of a graph, with one column for each pass."""
    flat = _InlinedGraph(graph)
    roots = {}
    outputs = [box for box in flat.boxes if box.kind == "output"]
    for phase in sorted({item.phase for item in (*flat.entries, *outputs)}) or [0]:
        entries = [entry for entry in flat.entries if entry.phase == phase]
        roots[phase] = Block("pass", PHASES[phase], (), phase, _runs(entries, 0))
    _place_leaves(flat.boxes, roots)
    columns = [root for root in roots.values() if root.children]
    blocks = [b for c in columns for b in (c, *c.walk()) if isinstance(b, Block)]
    for key, block in enumerate(blocks, len(flat.boxes)):
        block.key = key
    _name_values(flat.boxes, columns)
    arrows = [
        Arrow(
            *(maker, box.key, frozenset({operand.number})),
            saved=box.phase > flat.boxes[maker].phase,
            strength=operand.strength,
            cut=operand.cut,
        )
        for box in flat.boxes
        for operand in box.operands
        for maker in dict.fromkeys(key for key, _ in operand.makers)
    ]
    values = dict(enumerate(flat.values))
    return Outline(tuple(columns), tuple(merged(arrows)), values, title, frozenset(flat.alive))


# --- inlining ----------------------------------------------------------------------------


class _Level(NamedTuple):
    """A graph or body, with the boxes and outline indices of its values."""

    graph: PlainGraph
    made: dict[int, Makers]
    numbers: dict[int, int]


class _InlinedGraph:
    """A graph with its bodies inlined.

    Attributes:
        boxes: All boxes; the index of a box is its key.
        values: The values that boxes read, by their index in the outline.
        alive: The indices of values that use no additional memory, such as inputs.
        entries: The box or block of each node.
    """

    def __init__(self, graph: PlainGraph) -> None:
        self.boxes: list[Box] = []
        self.values: list[Value] = []
        self.alive: set[int] = set()
        self._given = alive_anyway(graph)
        self._lost = lost_links(graph)
        inputs = [self._leaf("input", graph, v, f"input {i}") for i, v in enumerate(graph.inputs)]
        captured = {v: self._leaf("captured", graph, v) for v in graph.captured}
        made: dict[int, Makers] = {}
        for value, box in [*zip(graph.inputs, inputs, strict=True), *captured.items()]:
            made.setdefault(value, ((box.key, 0),))
        level = _Level(graph, made, {})
        self.entries = self._entries(level, ())

        for i, value in enumerate(graph.outputs):
            makers, known = made.get(value, ()), graph.values[value]
            phase = max((self.boxes[maker].phase for maker, _ in makers), default=0)
            name = known.name or f"output {i}"
            operands = [Operand(makers, self._number(level, value))]
            self._box("output", name, phase, values=(known,), operands=operands)

    def _box(self, kind: str, title: str, phase: int, **rest: Any) -> Box:
        box = Box(len(self.boxes), kind, title, phase, **rest)
        self.boxes.append(box)
        return box

    def _leaf(self, kind: str, graph: PlainGraph, value: int, name: str = "constant") -> Box:
        known = graph.values[value]
        held = text_of(known.name) if are_numbers(known.name) else known.name
        return self._box(kind, held or name, 0, values=(known,))

    def _operation(self, graph: PlainGraph, node: Node, **rest: Any) -> Box:
        values = tuple(graph.values[v] for v in node.outputs)
        return self._box("operation", node.operation, node.phase, node=node, values=values, **rest)

    def _entries(self, level: _Level, around: tuple[str, ...]) -> list[Box | Block]:
        """Returns one box or block per node; maps each output to its box in `level.made`."""
        entries: list[Box | Block] = []
        for node in level.graph.nodes:
            scope = node.scope[len(around) :] if node.scope[: len(around)] == around else node.scope
            if node.bodies:
                entries.append(self._call(level, node, scope))
                continue
            box = self._operation(level.graph, node, scope=scope)
            entries.append(box)
            for value, strength, cut in reads_of(level.graph, node, self._lost):
                self._read(box, level, value, strength, cut)
            level.made.update({v: ((box.key, k),) for k, v in enumerate(node.outputs)})
        return entries

    def _read(
        self, box: Box, level: _Level, value: int, strength: Dependence, cut: str | None = None
    ) -> None:
        """Adds the operand `value` to `box`."""
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
            base = memory_of(level.graph.values, value)
            shown = None if base == value else self._number(level, base)
            self.values[number] = replace(self.values[number], base=shown)
        return level.numbers[value]

    def _call(self, level: _Level, node: Node, scope: tuple[str, ...]) -> Block:
        """Builds the block of a loop, branch or call from the bodies of the node."""
        title, name = node.operation, node.attributes.get("name")
        kind = "loop" if title in _LOOPS else "branch" if title in _BRANCHES else "call"
        if title in _CALLS and isinstance(name, str):
            title = name.lstrip("_") or title
        block = Block(kind, title, scope, node.phase, mark=node.mark)

        deciding = set(range(len(node.inputs))).difference(*(b.inputs for b in node.bodies))
        if deciding or not node.inputs:
            box = self._operation(level.graph, node, name="decides")
            block.children.append(box)
            for i in sorted(deciding):
                self._read(box, level, node.inputs[i], Dependence.CUT)

        leaving: dict[int, dict[tuple[int, int], None]] = {v: {} for v in node.outputs}
        is_while = any(body.gate for body in node.bodies)
        for number, body in enumerate(node.bodies):
            ties = [*zip(body.graph.inputs, body.inputs, strict=True)]
            inner = {v: level.made.get(node.inputs[i], ()) for v, i in ties}
            own = {v: self._number(level, node.inputs[i]) for v, i in ties}
            constants = {v: self._leaf("captured", body.graph, v) for v in body.graph.captured}
            inner |= {v: ((leaf.key, 0),) for v, leaf in constants.items()}
            children = self._entries(_Level(body.graph, inner, own), node.scope)
            if len(node.bodies) > 1 and children:
                part = "condition" if body.gate else "body" if is_while else f"branch {number}"
                children = [Block("branch", part, (), node.phase, children)]
            block.children += children
            if not body.gate:
                for v, out in zip(node.outputs, body.graph.outputs, strict=True):
                    leaving[v] |= dict.fromkeys(inner.get(out, ()))
        level.made.update({v: tuple(makers) for v, makers in leaving.items()})
        return block


def _is_number(box: Box) -> bool:
    """Returns whether the box is a captured number, which is printed as an operand."""
    if box.kind != "captured" or box.values[0].shape:
        return False
    return not box.values[0].name or is_number(box.values[0].name)


# --- nesting -----------------------------------------------------------------------------


def _runs(entries: Iterable[Box | Block], level: int) -> list[Box | Block]:
    """Groups consecutive entries of one module into nested blocks; drops empty calls."""
    entries = [entry for entry in entries if isinstance(entry, Box) or entry.boxes]
    result: list[Box | Block] = []
    for name, run in groupby(entries, lambda entry: entry.scope[level : level + 1]):
        several = [*run]
        if name:
            scope, inside = several[0].scope[: level + 1], _runs(several, level + 1)
            several = [Block("scope", name[0], scope, several[0].phase, inside)]
        for entry in several if not name else ():  # group the entries inside of a call
            if isinstance(entry, Block):
                entry.children = _runs(entry.children, 0)
        result += map(_tidy, several)
    return result


def _tidy(entry: Box | Block) -> Box | Block:
    """Merges a module or call with its only operation, and a module with its only submodule."""
    if isinstance(entry, Box) or len(entry.children) != 1:
        return entry
    (child,) = entry.children
    if isinstance(child, Box):
        mark = child.node.mark if child.node else ""
        same_mark = entry.mark in ("", mark)
        if child.kind == "operation" and entry.kind in ("scope", "call") and same_mark:
            names = dict.fromkeys((entry.title, child.name))
            child.name = ".".join(name for name in names if name and name != "call")
            return child
    elif entry.kind == child.kind == "scope":
        child.title = f"{entry.title}.{child.title}"
        return child
    return entry


def _place_leaves(boxes: Sequence[Box], roots: Mapping[int, Block]) -> None:
    """Places inputs before their first reader, and outputs after the box that computes them."""
    paths = _paths_to(roots.values())
    readers: dict[int, list[Sequence[Any]]] = {}
    for box in boxes:
        for maker in (maker for operand in box.operands for maker, _ in operand.makers):
            readers.setdefault(maker, []).extend([paths[box.key]] if box.key in paths else [])
    # maps a child, or a column without children, to the leaves to draw before or after the child
    before, after = dict[Box | Block, list[Box]](), dict[Box | Block, list[Box]]()
    first = next(iter(roots.values()))
    outputs = [box for box in boxes if box.kind == "output"]
    for leaf in boxes:
        if leaf.kind == "operation" or (leaf.kind == "captured" and leaf.key not in readers):
            continue  # a captured number is printed as an operand
        if leaf.kind == "output":
            after.setdefault(_maker_of(leaf, paths, roots, len(outputs)), []).append(leaf)
            continue
        reading = readers.get(leaf.key, [])
        leaf.phase = min((path[0].phase for path in reading), default=first.phase)
        reading = [path for path in reading if path[0].phase == leaf.phase]
        if leaf.kind == "input" and not _IN_ARGUMENT.search(leaf.title):
            reading = [path[:2] for path in reading]  # draw outside of all blocks
        depth = shared_length([path[:-1] for path in reading])  # innermost common block
        home = reading[0][depth - 1] if reading else first
        inside = {path[depth] for path in reading} or {*home.children}
        anchor = next((child for child in home.children if child in inside), home)
        before.setdefault(anchor, []).append(leaf)
    for block in [b for root in roots.values() for b in (root, *root.walk())]:
        if isinstance(block, Block):
            parts = [[*before.get(c, ()), c, *after.get(c, ())] for c in block.children or [block]]
            block.children = [item for part in parts for item in part if item is not block]


def _maker_of(
    output: Box, paths: Mapping[int, Sequence[Any]], roots: Mapping[int, Block], count: int
) -> Box | Block:
    """Returns the box or block after which one of `count` outputs is drawn."""
    home = roots[min(output.phase, max(roots))]
    makers = [paths[key] for key, _ in output.operands[0].makers if key in paths]
    is_whole = not _IN_ARGUMENT.search(output.title)
    if not makers or not output.phase or count <= _LEAVES_ABOVE or is_whole:
        return home.children[-1] if home.children else home
    return makers[0][-1]


def _paths_to(columns: Iterable[Block]) -> dict[int, Sequence[Any]]:
    """Maps the key of each box to its enclosing blocks, outermost first, and the box."""
    paths = (path for column in columns for path in column.paths())
    return {item.key: (*around, item) for around, item in paths if isinstance(item, Box)}


# --- names -------------------------------------------------------------------------------


def _name_values(boxes: Sequence[Box], columns: Sequence[Block]) -> None:
    """Assigns letters to values in boxes and in the signatures of blocks."""
    read: dict[int, set[int]] = {}
    for box in boxes:
        for operand in box.operands:
            for key, k in operand.makers:
                read.setdefault(key, set()).add(k)
    paths = _paths_to(columns)
    names: dict[tuple[int, int], str] = {}
    for key in paths:
        for k in sorted(read.get(key, {0})) if boxes[key].kind != "output" else ():
            names[key, k] = letters(len(names))
    for key, path in paths.items():
        box, texts = boxes[key], []
        for operand in box.operands:
            crossing = {of: names[of] for of in operand.makers if of in names}
            if text := operand.text or "|".join(crossing.values()):
                texts.append(_bracketed(operand, text))
            for of, name in crossing.items():
                makers, readers = paths[of[0]][:-1], path[:-1]
                for block in makers:
                    block.made |= {name: name} if block not in readers else {}
                for block in readers:
                    block.given |= {name: _bracketed(operand, name)} if block not in makers else {}
        outputs = range(max(read.get(key, {0})) + 1)
        box.made = ", ".join(names.get((key, k), "_") for k in outputs)
        box.call = ", ".join(texts)
        if box.node is not None:
            first = box.operands[0].makers[:1] if box.operands else ()
            shape = next((boxes[maker].values[k].shape for maker, k in first), ())
            box.call = call_text(box.node, texts, shape)


def _bracketed(operand: Operand, text: str) -> str:
    """Formats an operand: ✕a if a gradient is lost, [a] if its derivative is zero or undefined."""
    if operand.cut:
        return f"✕{text}"
    weak = operand.makers and operand.strength < Dependence.DIFFERENTIABLE
    return f"[{text}]" if weak else text


def letters(number: int) -> str:
    """Returns the letters for an index: a, b, ..., z, aa, ab, ..."""
    result = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        result = chr(ord("a") + rest) + result
    return result
