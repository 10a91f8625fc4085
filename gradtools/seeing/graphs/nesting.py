"""Groups consecutive operations of one module or call into nested blocks.

A parameter is placed in the innermost block that contains all of its readers, an argument outside
of all blocks, an output after the block that computes it. If there are many outputs, gradients of
parameters are placed inside of blocks. A block with one child is replaced by the child, under both
names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradtools.seeing.graphs.flat_graph import BlockGroup, Entry, FlatGraph, Unit, units_of, ways_to
from gradtools.seeing.graphs.outline import PHASES

_MOST_CHILDREN = 60  # of a block; more are split into parts
_PART = 25  # the least number of children of a part
_LEAVES_ABOVE = 8  # so many outputs stand outside of all blocks; those of arguments always
_LEAVES_BESIDE = 24  # so many stand beside the blocks that make them


def nested(flat: FlatGraph) -> list[BlockGroup]:
    """One group for each pass: scopes become nested groups, inputs and outputs are placed."""
    phases = sorted({entry.phase for entry in flat.entries} | {u.phase for u in flat.outputs})
    phases = phases or [0]
    roots = {}
    for phase in phases:
        entries = [entry for entry in flat.entries if entry.phase == phase]
        title = PHASES[phase] if phase < len(PHASES) else f"pass {phase}"
        roots[phase] = BlockGroup("pass", title, (), phase, _runs(entries, 0))
    _place_leaves(flat, roots)
    return [root for root in roots.values() if root.children]


def _runs(entries: Sequence[Entry], level: int) -> list[Entry]:
    """Groups consecutive entries of one scope, recursively, and drops empty calls."""
    entries = [entry for entry in entries if units_of([entry])]
    result: list[Entry] = []
    start = 0
    while start < len(entries):
        name = entries[start].scope[level : level + 1]
        stop = start + 1
        while name and stop < len(entries) and entries[stop].scope[level : level + 1] == name:
            stop += 1
        if name:
            scope = entries[start].scope[: level + 1]
            children = _runs(entries[start:stop], level + 1)
            result.append(
                _tidy(BlockGroup("scope", name[0], scope, entries[start].phase, children))
            )
        else:
            entry = entries[start]
            if isinstance(entry, BlockGroup):  # a call, whose own entries are nested too
                entry.children = _runs(entry.children, 0)
                entry = _tidy(entry)
            result.append(entry)
        start = stop
    return result


def _tidy(group: BlockGroup) -> Entry:
    """Replaces a group that has one child by the child, under both names."""
    if len(group.children) != 1:
        return group
    (child,) = group.children
    if isinstance(child, Unit):
        mark = child.node.mark if child.node else ""
        same_mark = group.mark in ("", mark)
        if child.kind == "operation" and group.kind in ("scope", "call") and same_mark:
            names = dict.fromkeys((group.title, child.name))
            child.name = ".".join(name for name in names if name and name != "call")
            return child
        return group
    if group.kind == child.kind == "scope":
        child.title = f"{group.title}.{child.title}"
        return child
    return group


def _place_leaves(flat: FlatGraph, roots: Mapping[int, BlockGroup]) -> None:
    """Puts inputs before their first reader, outputs after their maker."""
    ways = ways_to(roots.values())
    readers: dict[int, list[int]] = {}
    for link in flat.links:
        readers.setdefault(link.source, []).append(link.target)
    first = next(iter(roots.values()))
    before: dict[tuple[int, int], list[Unit]] = {}
    for leaf in flat.leaves:
        reading = [ways[key] for key in readers.get(leaf.key, ()) if key in ways]
        first_phase = min((way[0].phase for way in reading), default=0)
        reading = [way for way in reading if way[0].phase == first_phase]
        if leaf.kind == "captured" and leaf.key not in readers:  # or printed in place of an operand
            continue
        if leaf.kind == "input" and not re.search(r"[\[.]", _path(leaf)):
            reading = [way[:2] for way in reading]  # a whole argument stays outside of blocks
        home, at = _home(reading) if reading else (first, 0)
        leaf.phase = home.phase
        before.setdefault((id(home), at), []).append(leaf)
    after: dict[tuple[int, int], list[Unit]] = {}
    for unit in flat.outputs:
        makers = [ways[key] for key, _ in unit.reads if key in ways]
        many = unit.phase and len(flat.outputs) > _LEAVES_ABOVE
        deep = makers and many and not _OF_ARGUMENT.search(_path(unit))
        if deep:
            beside = len(flat.outputs) <= _LEAVES_BESIDE
            depth = _branching_depth(makers[0]) if beside else len(makers[0]) - 2
            home = makers[0][depth]
            at = next(i for i, other in enumerate(home.children) if other is makers[0][depth + 1])
        else:
            home = roots[min(unit.phase, max(roots))]
            at = len(home.children) - 1
        after.setdefault((id(home), at), []).append(unit)
    for group in [g for root in roots.values() for g in _groups(root)]:
        children: list[Entry] = []
        if not group.children:
            children = [*before.get((id(group), 0), ()), *after.get((id(group), -1), ())]
        for at, child in enumerate(group.children):
            place = id(group), at
            children += (*before.get(place, ()), child, *after.get(place, ()))
        group.children = children


def _branching_depth(way: Sequence[Any]) -> int:
    """The depth of the group of which the way takes one part of several."""
    depth = 0
    while depth + 2 < len(way) and sum(isinstance(c, BlockGroup) for c in way[depth].children) == 1:
        depth += 1
    return depth


_OF_ARGUMENT = re.compile(r"argument [^\[.]+$")


def _path(unit: Unit) -> str:
    return unit.value.name if unit.value is not None else ""


def _groups(group: BlockGroup) -> Iterator[BlockGroup]:
    yield group
    for child in group.children:
        if isinstance(child, BlockGroup):
            yield from _groups(child)


def _home(ways: Sequence[Sequence[Any]]) -> tuple[BlockGroup, int]:
    """The innermost group that contains all readers, and the index of the first of them in it."""
    depth = 0
    while all(len(way) > depth + 2 and way[depth + 1] is ways[0][depth + 1] for way in ways):
        depth += 1
    home = ways[0][depth]
    reading = {id(way[depth + 1]) for way in ways}
    return home, next(i for i, child in enumerate(home.children) if id(child) in reading)


def in_parts(group: BlockGroup) -> BlockGroup:
    """Splits groups with more than `_MOST_CHILDREN` children into parts of consecutive ones."""
    group.children = [
        in_parts(child) if isinstance(child, BlockGroup) else child for child in group.children
    ]
    while len(group.children) > _MOST_CHILDREN:
        size = max(_PART, math.isqrt(len(group.children)))
        group.children = [
            _part(group, start, group.children[start : start + size])
            for start in range(0, len(group.children), size)
        ]
    return group


def _part(group: BlockGroup, start: int, children: list[Entry]) -> Entry:
    if len(children) == 1:
        return children[0]
    title = f"steps {start + 1}…{start + len(children)}"
    return BlockGroup("steps", title, (*group.scope, title), group.phase, children)
