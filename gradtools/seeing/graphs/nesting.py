"""Groups consecutive operations of one module or call into nested blocks.

A parameter is placed in the innermost block that contains all of its readers, an argument outside
of all blocks, an output after the block that computes it. If there are many outputs, gradients of
parameters are placed inside of blocks. A block with one child is replaced by the child, under both
names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradtools.seeing.graphs.inlining import InlinedGraph
from gradtools.seeing.graphs.outline import PHASES, Block, Box

_MOST_CHILDREN = 60  # of a block; more are split into parts
_PART = 25  # the least number of children of a part
_LEAVES_ABOVE = 8  # so many outputs are drawn outside of all blocks; those of arguments always
_LEAVES_NEAR = 24  # so many are drawn next to the blocks that make them


def nested(flat: InlinedGraph) -> list[Block]:
    """One block for each pass: scopes become nested blocks, inputs and outputs are placed."""
    phases = sorted({entry.phase for entry in flat.entries} | {u.phase for u in flat.outputs})
    phases = phases or [0]
    roots = {}
    for phase in phases:
        entries = [entry for entry in flat.entries if entry.phase == phase]
        title = PHASES[phase] if phase < len(PHASES) else f"pass {phase}"
        roots[phase] = Block("pass", title, (), phase, _runs(entries, 0))
    _place_leaves(flat, roots)
    return [root for root in roots.values() if root.children]


def _runs(entries: Sequence[Box | Block], level: int) -> list[Box | Block]:
    """Groups consecutive entries of one scope, recursively, and drops empty calls."""
    entries = [entry for entry in entries if _holds_a_box(entry)]
    result: list[Box | Block] = []
    start = 0
    while start < len(entries):
        entry = entries[start]
        name = entry.scope[level : level + 1]
        stop = start + 1
        while name and stop < len(entries) and entries[stop].scope[level : level + 1] == name:
            stop += 1
        if name:
            inside = _runs(entries[start:stop], level + 1)
            entry = Block("scope", name[0], entry.scope[: level + 1], entry.phase, inside)
        elif isinstance(entry, Block):  # a call, whose own entries are nested too
            entry.children = _runs(entry.children, 0)
        result.append(_tidy(entry))
        start = stop
    return result


def _holds_a_box(entry: Box | Block) -> bool:
    return isinstance(entry, Box) or any(isinstance(item, Box) for item in entry.walk())


def _tidy(entry: Box | Block) -> Box | Block:
    """Replaces a block that has one child by the child, under both names."""
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


def _place_leaves(flat: InlinedGraph, roots: Mapping[int, Block]) -> None:
    """Puts inputs before their first reader, outputs after their maker."""
    paths = paths_to(roots.values())
    readers: dict[int, list[int]] = {}
    for box in flat.boxes:
        for operand in box.reads:
            for maker, _ in operand.makers:
                readers.setdefault(maker, []).append(box.key)
    first = next(iter(roots.values()))
    before: dict[tuple[int, int], list[Box]] = {}
    for leaf in flat.leaves:
        reading = [paths[key] for key in readers.get(leaf.key, ()) if key in paths]
        first_phase = min((path[0].phase for path in reading), default=0)
        reading = [path for path in reading if path[0].phase == first_phase]
        if leaf.kind == "captured" and leaf.key not in readers:  # or printed in place of an operand
            continue
        if leaf.kind == "input" and not re.search(r"[\[.]", leaf.values[0].name):
            reading = [path[:2] for path in reading]  # a whole argument stays outside of blocks
        home, at = _home(reading) if reading else (first, 0)
        leaf.phase = home.phase
        before.setdefault((id(home), at), []).append(leaf)
    after: dict[tuple[int, int], list[Box]] = {}
    for box in flat.outputs:
        makers = [paths[key] for key, _ in box.operands[0].makers if key in paths]
        many = box.phase and len(flat.outputs) > _LEAVES_ABOVE
        if makers and many and not _OF_ARGUMENT.search(box.values[0].name):
            near = len(flat.outputs) <= _LEAVES_NEAR
            depth = _branching_depth(makers[0]) if near else len(makers[0]) - 2
            home = makers[0][depth]
            at = next(i for i, other in enumerate(home.children) if other is makers[0][depth + 1])
        else:
            home = roots[min(box.phase, max(roots))]
            at = len(home.children) - 1
        after.setdefault((id(home), at), []).append(box)
    for block in [b for root in roots.values() for b in (root, *root.walk())]:
        if isinstance(block, Block):
            children = [] if block.children else [*before.get((id(block), 0), ())]
            children += after.get((id(block), -1), ())
            for at, child in enumerate(block.children):
                place = id(block), at
                children += (*before.get(place, ()), child, *after.get(place, ()))
            block.children = children


def paths_to(roots: Iterable[Block]) -> dict[int, list[Any]]:
    """For each box, by key, the blocks that lead to it, outermost first, and itself."""
    result: dict[int, list[Any]] = {}

    def visit(block: Block, path: list[Any]) -> None:
        for child in block.children:
            if isinstance(child, Block):
                visit(child, [*path, child])
            else:
                result[child.key] = [*path, child]

    for root in roots:
        visit(root, [root])
    return result


def _branching_depth(path: Sequence[Any]) -> int:
    """The depth of the block of which the path takes one part of several."""
    depth = 0
    while depth + 2 < len(path) and sum(isinstance(c, Block) for c in path[depth].children) == 1:
        depth += 1
    return depth


_OF_ARGUMENT = re.compile(r"argument [^\[.]+$")


def _home(paths: Sequence[Sequence[Any]]) -> tuple[Block, int]:
    """The innermost block that contains all readers, and the index of the first of them in it."""
    depth = 0
    while all(len(path) > depth + 2 and path[depth + 1] is paths[0][depth + 1] for path in paths):
        depth += 1
    home = paths[0][depth]
    reading = {id(path[depth + 1]) for path in paths}
    return home, next(i for i, child in enumerate(home.children) if id(child) in reading)


def in_parts(block: Block) -> Block:
    """Splits blocks with more than `_MOST_CHILDREN` children into parts of consecutive ones."""
    block.children = [
        in_parts(child) if isinstance(child, Block) else child for child in block.children
    ]
    while len(block.children) > _MOST_CHILDREN:
        size = max(_PART, math.isqrt(len(block.children)))
        block.children = [
            _part(block, start, block.children[start : start + size])
            for start in range(0, len(block.children), size)
        ]
    return block


def _part(block: Block, start: int, children: list[Box | Block]) -> Box | Block:
    if len(children) == 1:
        return children[0]
    title = f"steps {start + 1}…{start + len(children)}"
    return Block("steps", title, (*block.scope, title), block.phase, children)
