"""From a graph to its outline: bodies opened up, runs of one scope made blocks, repeats found.

Three steps. *Flatten*: a node with bodies becomes a stretch of entries, its bodies' values are
followed through to those outside, so that every value has makers and readers whatever it passes.
*Nest*: consecutive entries of one scope become a block, leaves stand in the innermost block that
holds all of their readers. *Fold*: consecutive parts with the same operations, shapes and wiring
become one part that is repeated; the search is for the stretch that saves most, by comparing the
program with itself shifted by one period.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from gradtools.seeing.edges import cut_reason, flowing_values, reason, strengths_of
from gradtools.seeing.graph import Dependence, Graph, Node, Value
from gradtools.seeing.outline import (
    PHASES,
    Arrow,
    Block,
    Box,
    Outline,
    value_text,
)

FOLD_FROM = 40  # boxes: what has fewer is shown whole
_LONGEST_PERIOD = 400
_WORTH_ALONE = 40  # boxes that must be saved where alike parts stand beside each other
_LEAVES_ABOVE = 8  # so many outputs stand outside of all blocks


def outline_of(
    graph: Graph, *, fold: bool | None = None, expand: str | Iterable[str] = (), title: str = ""
) -> Outline:
    """The outline of a graph.

    Args:
        graph: The graph.
        fold: Whether repeated parts are drawn once; None: where there are many boxes.
        expand: Names of blocks; a repeated part that one of them names is not folded.
        title: What stands above the picture.

    Returns:
        An `Outline` with one column for each pass.
    """
    patterns = (expand,) if isinstance(expand, str) else tuple(expand)
    flat = _Flat(graph)
    nested = _nested(flat)
    if fold if fold is not None else len(flat.units) > FOLD_FROM:
        folding = _Folding(flat, patterns)
        nested = [folding.block(block) for block in nested]
        alias, copies = folding.alias, folding.copies
    else:
        alias, copies = {}, {}
    numbers = iter(range(len(flat.units), 10**9))
    columns = tuple(_frozen(flat, block, numbers) for block in nested)
    return Outline(columns, _arrows(flat, alias, copies), dict(enumerate(flat.values)), title)


# --- flatten -----------------------------------------------------------------------------


@dataclass
class _Unit:
    """What becomes a box."""

    key: int
    kind: str
    phase: int
    scope: tuple[str, ...] = ()
    node: Node | None = None
    position: int | None = None
    value: Value | None = None
    outputs: tuple[Value, ...] = ()
    constants: list[str] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)  # maker, value
    name: str = ""


@dataclass
class _Group:
    """What becomes a block."""

    kind: str
    title: str
    scope: tuple[str, ...]
    phase: int
    children: list[_Unit | _Group]
    count: int = 1
    mark: str = ""


_Entry = _Unit | _Group


@dataclass
class _Link:
    source: int
    target: int
    value: int
    strength: Dependence
    cut: str | None


class _Flat:
    """A graph with its bodies opened up: units, and the links between them."""

    def __init__(self, graph: Graph) -> None:
        self.units: list[_Unit] = []
        self.links: list[_Link] = []
        self.values: list[Value] = []
        self.has_later_pass = any(node.phase for _, node in graph.walk())
        self.leaves = [
            *(self._leaf("input", graph, v, f"input {i}") for i, v in enumerate(graph.inputs)),
            *(self._leaf("captured", graph, v, "") for v in graph.captured),
        ]
        made: dict[int, tuple[int, ...]]
        made = {v: (self.leaves[i].key,) for i, v in reversed([*enumerate(graph.inputs)])}
        captured = self.leaves[len(graph.inputs) :]
        made |= {v: (u.key,) for v, u in zip(graph.captured, captured, strict=True)}
        numbers: dict[int, int] = {}
        self.entries = self._entries(graph, made, numbers, ())
        self._join_outside(graph, made, numbers)
        self.outputs = [*self._leaving(graph, made, numbers)]

    def _unit(self, kind: str, phase: int, **rest: Any) -> _Unit:
        unit = _Unit(len(self.units), kind, phase, **rest)
        self.units.append(unit)
        return unit

    def _leaf(self, kind: str, graph: Graph, value: int, name: str) -> _Unit:
        known = graph.values[value]
        return self._unit(kind, 0, value=known, name=known.name or name or "constant")

    def _entries(
        self,
        graph: Graph,
        made: dict[int, tuple[int, ...]],
        numbers: dict[int, int],
        around: tuple[str, ...],
    ) -> list[_Entry]:
        """What each node becomes; `made` gains the makers of its outputs."""
        flowing = flowing_values(graph)
        entries: list[_Entry] = []
        for position, node in enumerate(graph.nodes):
            scope = node.scope[len(around) :] if node.scope[: len(around)] == around else node.scope
            strengths = strengths_of(graph, node)
            if node.bodies:
                entries.append(self._call(graph, node, position, scope, made, numbers))
                continue
            unit = self._operation(graph, node, position, scope)
            entries.append(unit)
            for value, strength in zip(node.inputs, strengths, strict=True):
                cut = cut_reason(graph, node, value, strength, flowing)
                self._read(unit, graph, value, made, numbers, strength, cut)
            made.update(dict.fromkeys(node.outputs, (unit.key,)))
        return entries

    def _operation(self, graph: Graph, node: Node, position: int, scope: tuple[str, ...]) -> _Unit:
        outputs = tuple(graph.values[v] for v in node.outputs)
        return self._unit(
            "operation", node.phase, scope=scope, node=node, position=position, outputs=outputs
        )

    def _read(
        self,
        unit: _Unit,
        graph: Graph,
        value: int,
        made: Mapping[int, tuple[int, ...]],
        numbers: dict[int, int],
        strength: Dependence,
        cut: str | None = None,
    ) -> None:
        for maker in made.get(value, ()):
            if self._is_number(maker):
                unit.constants.append(self.units[maker].name)
                continue
            number = self._number(graph, value, numbers)
            unit.reads.append((maker, number))
            self.links.append(_Link(maker, unit.key, number, strength, cut))

    @cached_property
    def _entering(self) -> dict[int, list[_Link]]:
        found: dict[int, list[_Link]] = {}
        for link in self.links:
            found.setdefault(link.target, []).append(link)
        return found

    def entering(self, key: int) -> list[_Link]:
        """The links to a unit."""
        return self._entering.get(key, [])

    def _number(self, graph: Graph, value: int, numbers: dict[int, int]) -> int:
        if value not in numbers:
            numbers[value] = len(self.values)
            self.values.append(graph.values[value])
        return numbers[value]

    def _is_number(self, key: int) -> bool:
        """Whether a captured value is a plain number, which is told in the box of its reader."""
        unit = self.units[key]
        return unit.kind == "captured" and unit.value is not None and not unit.value.shape

    def _call(
        self,
        graph: Graph,
        node: Node,
        position: int,
        scope: tuple[str, ...],
        made: dict[int, tuple[int, ...]],
        numbers: dict[int, int],
    ) -> _Group:
        """A node with programs inside: a group, whose values are followed through."""
        group = _Group(_kind(node), node.operation, scope, node.phase, [], mark=node.mark)
        deciding = set(range(len(node.inputs))).difference(*(b.inputs for b in node.bodies))
        if deciding or not node.inputs:
            unit = self._operation(graph, node, position, ())
            unit.name = "decides"
            group.children.append(unit)
            for i in sorted(deciding):
                self._read(unit, graph, node.inputs[i], made, numbers, Dependence.CUT)
        leaving: dict[int, dict[int, None]] = {v: {} for v in node.outputs}
        for number, body in enumerate(node.bodies):
            inner = {v: made.get(node.inputs[i], ()) for v, i in self._ties(body)}
            own = {v: self._number(graph, node.inputs[i], numbers) for v, i in self._ties(body)}
            inner |= self._constants(body.graph)
            children = self._entries(body.graph, inner, own, node.scope)
            name = _body_name(node, number)
            if len(node.bodies) > 1 and children:
                children = [_Group("branch", name, (), node.phase, children)]
            group.children += children
            if not body.gate:
                for v, out in zip(node.outputs, body.graph.outputs, strict=True):
                    leaving[v] |= dict.fromkeys(inner.get(out, ()))
        made.update({v: tuple(makers) for v, makers in leaving.items()})
        return group

    @staticmethod
    def _ties(body: Any) -> list[tuple[int, int]]:
        return [*zip(body.graph.inputs, body.inputs, strict=True)]

    def _constants(self, graph: Graph) -> dict[int, tuple[int, ...]]:
        leaves = {v: self._leaf("captured", graph, v, "") for v in graph.captured}
        self.leaves += leaves.values()
        return {v: (leaf.key,) for v, leaf in leaves.items()}

    def _join_outside(
        self, graph: Graph, made: Mapping[int, tuple[int, ...]], numbers: dict[int, int]
    ) -> None:
        """Data that left the framework and came back: a cut from its maker to what came back."""
        cut = reason("left_framework")
        for source, target in graph.outside:
            number = self._number(graph, source, numbers)
            for maker in made.get(source, ()):
                for unit in made.get(target, ()):
                    self.units[unit].reads.append((maker, number))
                    self.links.append(_Link(maker, unit, number, Dependence.CUT, cut))

    def _leaving(
        self, graph: Graph, made: Mapping[int, tuple[int, ...]], numbers: dict[int, int]
    ) -> Iterator[_Unit]:
        for i, value in enumerate(graph.outputs):
            makers = made.get(value, ())
            phase = max((self.units[maker].phase for maker in makers), default=0)
            known = graph.values[value]
            unit = self._unit("output", phase, value=known, name=known.name or f"output {i}")
            for maker in makers:
                number = self._number(graph, value, numbers)
                unit.reads.append((maker, number))
                self.links.append(_Link(maker, unit.key, number, Dependence.DIFFERENTIABLE, None))
            yield unit


def _kind(node: Node) -> str:
    if node.operation in ("scan", "while", "while_loop", "for", "loop", "map"):
        return "loop"
    return "branch" if node.operation in ("cond", "switch", "where_branch") else "call"


def _body_name(node: Node, number: int) -> str:
    if node.bodies[number].gate:
        return "condition"
    return "body" if any(body.gate for body in node.bodies) else f"branch {number}"


# --- nest --------------------------------------------------------------------------------


def _nested(flat: _Flat) -> list[_Group]:
    """One group for each pass, with runs of one scope as groups and leaves where they belong."""
    phases = sorted({entry.phase for entry in flat.entries} | {u.phase for u in flat.outputs})
    phases = phases or [0]
    roots = {}
    for phase in phases:
        entries = [entry for entry in flat.entries if entry.phase == phase]
        title = PHASES[phase] if phase < len(PHASES) else f"pass {phase}"
        roots[phase] = _Group("pass", title, (), phase, _runs(entries, 0))
    _place_leaves(flat, roots)
    return [root for root in roots.values() if root.children]


def _runs(entries: Sequence[_Entry], level: int) -> list[_Entry]:
    """The entries, consecutive ones of one scope as a group."""
    found: list[_Entry] = []
    start = 0
    while start < len(entries):
        name = entries[start].scope[level : level + 1]
        stop = start + 1
        while name and stop < len(entries) and entries[stop].scope[level : level + 1] == name:
            stop += 1
        if name:
            scope = entries[start].scope[: level + 1]
            children = _runs(entries[start:stop], level + 1)
            found.append(_tidy(_Group("scope", name[0], scope, entries[start].phase, children)))
        else:
            found.append(_opened_up(entries[start]))
        start = stop
    return found


def _opened_up(entry: _Entry) -> _Entry:
    """A call whose own entries are nested too."""
    if isinstance(entry, _Group):
        entry.children = _runs(entry.children, 0)
        return _tidy(entry)
    return entry


def _tidy(group: _Group) -> _Entry:
    """A group of one thing is that thing, with both names."""
    if len(group.children) != 1:
        return group
    (child,) = group.children
    if isinstance(child, _Unit):
        if child.kind == "operation" and group.kind in ("scope", "call") and not group.mark:
            child.name = ".".join(filter(None, (group.title, child.name)))
            return child
        return group
    if group.kind == child.kind == "scope":
        child.title = f"{group.title}.{child.title}"
        return child
    return group


def _place_leaves(flat: _Flat, roots: Mapping[int, _Group]) -> None:
    """Puts inputs before their first reader, outputs after their maker."""
    ways = _ways(roots.values())
    readers: dict[int, list[int]] = {}
    for link in flat.links:
        readers.setdefault(link.source, []).append(link.target)
    first = next(iter(roots.values()))
    before: dict[tuple[int, int], list[_Unit]] = {}
    for leaf in flat.leaves:
        if flat._is_number(leaf.key):
            continue
        reading = [ways[key] for key in readers.get(leaf.key, ()) if key in ways]
        reading = [way for way in reading if way[0] is min(reading, key=_phase)[0]]
        if not reading and leaf.kind == "captured":
            continue
        home, at = _home(reading) if reading else (first, 0)
        leaf.phase = home.phase
        before.setdefault((id(home), at), []).append(leaf)
    after: dict[tuple[int, int], list[_Unit]] = {}
    for unit in flat.outputs:
        makers = [ways[key] for key, _ in unit.reads if key in ways]
        deep = makers and (unit.phase and len(flat.outputs) > _LEAVES_ABOVE)
        home = makers[0][-2] if deep else roots[min(unit.phase, max(roots))]
        at = _index(home, makers[0][-1]) if deep else len(home.children) - 1
        after.setdefault((id(home), at), []).append(unit)
    for group in [g for root in roots.values() for g in _groups(root)]:
        _insert(group, before, after)


def _insert(
    group: _Group,
    before: Mapping[tuple[int, int], list[_Unit]],
    after: Mapping[tuple[int, int], list[_Unit]],
) -> None:
    children: list[_Entry] = []
    if not group.children:
        children = [*before.get((id(group), 0), ()), *after.get((id(group), -1), ())]
    for at, child in enumerate(group.children):
        children += (*before.get((id(group), at), ()), child, *after.get((id(group), at), ()))
    group.children = children


def _groups(group: _Group) -> Iterator[_Group]:
    yield group
    for child in group.children:
        if isinstance(child, _Group):
            yield from _groups(child)


def _ways(roots: Iterable[_Group]) -> dict[int, list[Any]]:
    """For each unit the groups around it, outermost first, and itself."""
    found: dict[int, list[Any]] = {}

    def visit(group: _Group, way: list[Any]) -> None:
        for child in group.children:
            if isinstance(child, _Group):
                visit(child, [*way, child])
            else:
                found[child.key] = [*way, child]

    for root in roots:
        visit(root, [root])
    return found


def _phase(way: Sequence[Any]) -> int:
    return int(way[0].phase)


def _home(ways: Sequence[Sequence[Any]]) -> tuple[_Group, int]:
    """The innermost group around all readers, and the place of the first of them in it."""
    depth = 0
    while all(len(way) > depth + 2 and way[depth + 1] is ways[0][depth + 1] for way in ways):
        depth += 1
    home = ways[0][depth]
    return home, min(_index(home, way[depth + 1]) for way in ways)


def _index(group: _Group, child: _Entry) -> int:
    return next(i for i, other in enumerate(group.children) if other is child)


# --- fold --------------------------------------------------------------------------------


class _Folding:
    """Finds repeated parts; says which unit of the first stands for each of the others.

    Attributes:
        alias: For a unit of a later part the unit of the first that stands for it.
        copies: For a unit in repeated parts: in which copy of which.
    """

    def __init__(self, flat: _Flat, patterns: Sequence[str] = ()) -> None:
        self._flat, self._patterns = flat, patterns
        self._known: dict[Any, int] = {}
        self._signatures: dict[int, int] = {}
        self.alias: dict[int, int] = {}
        self.copies: dict[int, dict[int, int]] = {}

    def block(self, group: _Group) -> _Group:
        """The group with repeated parts folded, inner ones too."""
        group.children = self._folded(group.children)
        only = group.children[0] if len(group.children) == 1 else None
        if group.kind == "scope" and isinstance(only, _Group) and only.kind == "repeat":
            only.title = f"{group.title}.{only.title}"
            return only
        return group

    def _folded(self, items: list[_Entry]) -> list[_Entry]:
        found = self._best(items)
        if found is None:
            return [self.block(item) if isinstance(item, _Group) else item for item in items]
        start, period, count = found
        parts = [items[start + k * period : start + (k + 1) * period] for k in range(count)]
        repeat = self._repeat(parts)
        stop = start + period * count
        return [*self._folded(items[:start]), repeat, *self._folded(items[stop:])]

    def _repeat(self, parts: list[list[_Entry]]) -> _Group:
        number = len(self.alias) + 1
        units = [_units(part) for part in parts]
        for copy, part in enumerate(units):
            for unit, first in zip(part, units[0], strict=True):
                self.copies.setdefault(unit.key, {})[number] = copy
                if copy:
                    self.alias[unit.key] = first.key
        title, scope = _title_of(parts)
        children, mark = parts[0], ""
        if len(children) == 1 and isinstance(children[0], _Group):
            mark, children = children[0].mark, children[0].children
        folded = self._folded(children)
        return _Group("repeat", title, scope, parts[0][0].phase, folded, len(parts), mark)

    def _best(self, items: list[_Entry]) -> tuple[int, int, int] | None:
        """Where consecutive parts are alike, so that folding them saves most."""
        tokens = np.array([self._signature(item) for item in items])
        weights = np.array([len(_units([item])) for item in items], dtype=int)
        total = np.concatenate([[0], np.cumsum(weights)])
        candidates = []
        for period in range(1, min(len(items) // 2, _LONGEST_PERIOD) + 1):
            for start, length in _stretches(tokens[:-period] == tokens[period:], period):
                count = length // period + 1
                saved = int(total[start + period * count] - total[start + period])
                candidates.append((-saved, period, start, count))
        for _, period, start, count in sorted(candidates)[:20]:
            found = self._alike(items, start, period, count)
            if found is not None:
                return found
        return None

    def _alike(
        self, items: list[_Entry], start: int, period: int, count: int
    ) -> tuple[int, int, int] | None:
        """The longest run of parts whose wiring is alike as well, if it is worth folding."""
        parts = [items[start + k * period : start + (k + 1) * period] for k in range(count)]
        shapes = [self._interned(self._wiring(part)) for part in parts]
        first, length = _longest_run(shapes)
        saved = (length - 1) * len(_units(parts[0]))
        named = any(self._is_named(part) for part in parts)
        least = 2 if len(_units(parts[0])) > 1 else 5
        if length < least or saved < 4 or named:
            return None
        if saved < _WORTH_ALONE and not _is_chain(parts[first : first + length]):
            return None
        return start + first * period, period, length

    def _is_named(self, part: list[_Entry]) -> bool:
        paths = {".".join(item.scope) for item in part if isinstance(item, _Group)}
        return any(fnmatchcase(path, p) for path in paths for p in self._patterns if p != "*")

    def _signature(self, item: _Entry) -> int:
        if isinstance(item, _Unit):
            return self._interned(_token(item))
        if id(item) not in self._signatures:
            self._signatures[id(item)] = self._interned((item.kind, self._wiring([item])))
        return self._signatures[id(item)]

    def _wiring(self, part: Iterable[_Entry]) -> tuple[Any, ...]:
        units = _units(part)
        inside = {unit.key: i for i, unit in enumerate(units)}
        return tuple(
            (self._interned(_token(unit)), *(inside.get(maker, -1) for maker, _ in unit.reads))
            for unit in units
        )

    def _interned(self, token: Any) -> int:
        return self._known.setdefault(token, len(self._known))


def _is_chain(parts: Sequence[Sequence[_Entry]]) -> bool:
    """Whether each part reads what the one before it made."""
    units = [_units(part) for part in parts]
    return all(
        {unit.key for unit in before} & {maker for unit in after for maker, _ in unit.reads}
        for before, after in pairwise(units)
    )


def _token(unit: _Unit) -> tuple[Any, ...]:
    """What makes two units alike, whatever they are called."""
    values = unit.outputs or ((unit.value,) if unit.value else ())
    return (
        unit.kind,
        unit.node.operation if unit.node else "",
        unit.node.mark if unit.node else "",
        unit.phase,
        tuple((value.shape, value.dtype) for value in values),
    )


def _units(items: Iterable[_Entry]) -> list[_Unit]:
    found: list[_Unit] = []
    for item in items:
        found += [item] if isinstance(item, _Unit) else _units(item.children)
    return found


def _stretches(equal: np.ndarray, least: int) -> Iterator[tuple[int, int]]:
    """The start and length of each stretch of at least so many true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(np.int8), [0]])))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        if stop - start >= least:
            yield int(start), int(stop - start)


def _longest_run(marks: Sequence[int]) -> tuple[int, int]:
    """Where the same mark stands most often in a row, and how often."""
    best, start = (0, 0), 0
    for i in range(1, len(marks) + 1):
        if i == len(marks) or marks[i] != marks[start]:
            best, start = max(best, (start, i - start), key=lambda run: run[1]), i
    return best


def _title_of(parts: list[list[_Entry]]) -> tuple[str, tuple[str, ...]]:
    """What a repeated part is called: "layers.0…11" for one scope each, else its operations."""
    firsts = [part[0] for part in parts]
    if len(parts[0]) > 1 or not isinstance(firsts[0], _Group):
        return "repeated steps", ()
    first, last = firsts[0].title, firsts[-1].title  # type: ignore[union-attr]
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    while shared and first[shared - 1].isdigit():
        shared -= 1
    low, high = sorted((first, last), key=lambda name: (len(name), name))
    path = low if low == high else f"{low}…{high[shared:]}"
    title = first if first == last else f"{first}…{last[shared:]}"
    return title, (*firsts[0].scope[:-1], path)


# --- to the outline ----------------------------------------------------------------------


def _frozen(flat: _Flat, group: _Group, numbers: Iterator[int]) -> Block:
    children = tuple(
        _frozen(flat, item, numbers) if isinstance(item, _Group) else _box(flat, item)
        for item in group.children
    )
    path = ".".join(group.scope) or group.title
    key = next(numbers)
    title, phase, mark = group.title, group.phase, group.mark
    return Block(key, group.kind, title, path, phase, children, group.count, mark)


def _box(flat: _Flat, unit: _Unit) -> Box:
    alert = next((link.cut for link in flat.entering(unit.key) if link.cut), "")
    if unit.node is None or unit.value is not None:
        lines = (value_text(unit.value),) if unit.value else ()
        return Box(unit.key, unit.kind, unit.name, lines, unit.phase, alert=alert)
    node = unit.node
    lines = [unit.name] if unit.name else []
    lines += [" ".join(["with", ", ".join(unit.constants)])] if unit.constants else []
    lines += [value_text(value) for value in unit.outputs[:2]]
    lines += [f"and {len(unit.outputs) - 2} more"] if len(unit.outputs) > 2 else []
    return Box(
        *(unit.key, unit.kind, node.operation, tuple(lines), node.phase, node.mark, alert),
        node=unit.position,
        hint=_hint(node),
    )


def _hint(node: Node) -> str:
    native = node.native if node.native != node.operation else ""
    where = f"{node.source}: {node.source.text}" if node.source else ""
    return "\n".join(filter(None, (native, ".".join(node.scope), where)))


def _arrows(
    flat: _Flat, alias: Mapping[int, int], copies: Mapping[int, Mapping[int, int]]
) -> tuple[Arrow, ...]:
    """The links between the units that stand for their ends, those of one pair merged."""
    groups: dict[tuple[int, int], list[_Link]] = {}
    for link in flat.links:
        if not _from_copy_to_copy(alias, copies, link):
            pair = _stand_in(alias, link.source), _stand_in(alias, link.target)
            groups.setdefault(pair, []).append(link)
    return tuple(_arrow(flat, pair, links) for pair, links in groups.items())


def _arrow(flat: _Flat, pair: tuple[int, int], links: list[_Link]) -> Arrow:
    cuts = [link.cut for link in links]
    return Arrow(
        *pair,
        frozenset(link.value for link in links),
        flat.units[pair[1]].phase > flat.units[pair[0]].phase,
        max(link.strength for link in links),
        None if None in cuts else cuts[0],
    )


def _stand_in(alias: Mapping[int, int], key: int) -> int:
    while key in alias:
        key = alias[key]
    return key


def _from_copy_to_copy(
    alias: Mapping[int, int], copies: Mapping[int, Mapping[int, int]], link: _Link
) -> bool:
    """Whether a link goes from one copy of a repeated part to another."""
    source, target = (_copies_of(alias, copies, key) for key in (link.source, link.target))
    return any(target.get(number, copy) != copy for number, copy in source.items())


def _copies_of(
    alias: Mapping[int, int], copies: Mapping[int, Mapping[int, int]], key: int
) -> dict[int, int]:
    """In which copy of each repeated part around it a unit stands."""
    found = dict(copies.get(key, {}))
    while key in alias:
        key = alias[key]
        found = {**copies.get(key, {}), **found}
    return found
