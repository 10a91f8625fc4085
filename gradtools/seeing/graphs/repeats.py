"""Folds repeated parts of a program: consecutive runs with equal operations, shapes and wiring.

The search compares the program with itself shifted by one period, for every period. Of the runs in
which both agree it folds the one that saves most boxes, then continues to the left, to the right
and inside. Parallel parts, which read the same values, are folded only if that saves much: the
query, key and value of an attention should stay three boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gradtools.seeing.graphs.flat_graph import BlockGroup, Entry, FlatGraph, Operand, Unit, units_of
from gradtools.seeing.graphs.nodes import Node, shared_length
from gradtools.seeing.graphs.outline import matches

_LONGEST_PERIOD = 400
_WORTH_ALONE = 40  # boxes that must be saved where alike parts stand beside each other


class Folding:
    """Finds repeated parts; says which unit of the first stands for each of the others.

    Attributes:
        alias: For a unit of a later part the unit of the first that stands for it.
        copies: For a unit in repeated parts: in which copy of which.
    """

    def __init__(self, flat: FlatGraph, patterns: Sequence[str] = ()) -> None:
        self._patterns = patterns
        self._known: dict[Any, int] = {}
        self._signatures: dict[int, int] = {}
        self.alias: dict[int, int] = {}
        self.copies: dict[int, dict[int, int]] = {}

    def block(self, group: BlockGroup) -> BlockGroup:
        """Folds repeated parts of the group and of its inner groups, in place."""
        group.children = self._folded(group.children)
        only = group.children[0] if len(group.children) == 1 else None
        if group.kind == "scope" and isinstance(only, BlockGroup) and only.kind == "repeat":
            only.title = f"{group.title}.{only.title}"
            return only
        return group

    def _folded(self, items: list[Entry]) -> list[Entry]:
        result = self._best(items)
        if result is None:
            return [self.block(item) if isinstance(item, BlockGroup) else item for item in items]
        start, period, count = result
        parts = [items[start + k * period : start + (k + 1) * period] for k in range(count)]
        repeat = self._repeat(parts)
        stop = start + period * count
        return [*self._folded(items[:start]), repeat, *self._folded(items[stop:])]

    def _repeat(self, parts: list[list[Entry]]) -> BlockGroup:
        number = len(self.alias) + 1
        units = [units_of(part) for part in parts]
        for copy, part in enumerate(units):
            for unit, first in zip(part, units[0], strict=True):
                self.copies.setdefault(unit.key, {})[number] = copy
                if copy:
                    self.alias[unit.key] = first.key
        title, scope = _title_of(parts)
        children, mark = parts[0], ""
        if len(children) == 1 and isinstance(children[0], BlockGroup):
            mark, children = children[0].mark, children[0].children
        folded = self._folded(children)
        return BlockGroup("repeat", title, scope, parts[0][0].phase, folded, len(parts), mark)

    def _best(self, items: list[Entry]) -> tuple[int, int, int] | None:
        """(start, period, count) of the repetition whose folding saves most, if there is one."""
        tokens = np.array([self._signature(item) for item in items])
        weights = np.array([len(units_of([item])) for item in items], dtype=int)
        total = np.concatenate([[0], np.cumsum(weights)])
        candidates = []
        for period in range(1, min(len(items) // 2, _LONGEST_PERIOD) + 1):
            for start, length in _true_runs(tokens[:-period] == tokens[period:], period):
                count = length // period + 1
                saved = int(total[start + period * count] - total[start + period])
                candidates.append((-saved, period, start, count))
        for _, period, start, count in sorted(candidates)[:20]:
            result = self._alike(items, start, period, count)
            if result is not None:
                return result
        return None

    def _alike(
        self, items: list[Entry], start: int, period: int, count: int
    ) -> tuple[int, int, int] | None:
        """(start, period, count) of the longest run of equally wired parts, if worth folding."""
        parts = [items[start + k * period : start + (k + 1) * period] for k in range(count)]
        shapes = [self._interned(self._wiring(part)) for part in parts]
        first, length = _longest_run(shapes)
        saved = (length - 1) * len(units_of(parts[0]))
        named = any(self._is_named(part) for part in parts)
        least = 2 if len(units_of(parts[0])) > 1 else 5
        if length < least or saved < 4 or named:
            return None
        if saved < _WORTH_ALONE and not _is_chain(parts[first : first + length]):
            return None
        return start + first * period, period, length

    def _is_named(self, part: list[Entry]) -> bool:
        paths = {".".join(item.scope) for item in part if isinstance(item, BlockGroup)}
        plain = [pattern for pattern in self._patterns if "*" not in pattern]
        return any(matches(path, pattern) for path in paths for pattern in plain)

    def _signature(self, item: Entry) -> int:
        if isinstance(item, Unit):
            return self._interned(_token(item))
        if id(item) not in self._signatures:
            self._signatures[id(item)] = self._interned((item.kind, self._wiring([item])))
        return self._signatures[id(item)]

    def _wiring(self, part: Iterable[Entry]) -> tuple[Any, ...]:
        units = units_of(part)
        inside = {unit.key: i for i, unit in enumerate(units)}
        return tuple(
            (self._interned(_token(unit)), *(_place(inside, o) for o in unit.operands))
            for unit in units
        )

    def _interned(self, token: Any) -> int:
        return self._known.setdefault(token, len(self._known))


def _is_chain(parts: Sequence[Sequence[Entry]]) -> bool:
    """Whether each part reads a value of the part before it."""
    units = [units_of(part) for part in parts]
    return all(
        {unit.key for unit in before} & {maker for unit in after for maker, _ in unit.reads}
        for before, after in pairwise(units)
    )


def _place(inside: Mapping[int, int], operand: Operand) -> Any:
    """An operand relative to its part: a number, or the indices of the units that make it."""
    made = {(inside.get(key, -1), k if key in inside else 0) for key, k in operand.makers}
    return operand.text or frozenset(made)


def _token(unit: Unit) -> tuple[Any, ...]:
    """The key by which two units are equal, without their names."""
    values = unit.outputs or ((unit.value,) if unit.value else ())
    return (
        unit.kind,
        unit.node.operation if unit.node else "",
        unit.node.mark if unit.node else "",
        unit.phase,
        _attributes(unit.node) if unit.node else "",
        tuple((value.shape, value.dtype) for value in values),
    )


def _attributes(node: Node) -> str:
    """What makes an operation what it is; of a slice not where it begins."""
    result = {k: v for k, v in node.attributes.items() if k not in ("start", "limit", "name")}
    return str(sorted(result.items()))


def _true_runs(equal: np.ndarray, least: int) -> Iterator[tuple[int, int]]:
    """The start and length of each stretch of at least so many true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.astype(np.int8), [0]])))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        if stop - start >= least:
            yield int(start), int(stop - start)


def _longest_run(marks: Sequence[int]) -> tuple[int, int]:
    """The start and length of the longest run of equal marks."""
    best, start = (0, 0), 0
    for i in range(1, len(marks) + 1):
        if i == len(marks) or marks[i] != marks[start]:
            best, start = max(best, (start, i - start), key=lambda run: run[1]), i
    return best


def _title_of(parts: list[list[Entry]]) -> tuple[str, tuple[str, ...]]:
    """A repeated part's title and scope: "layers.0…11" if each copy is one scope."""
    firsts = [part[0] for part in parts]
    if len(parts[0]) > 1 or not isinstance(firsts[0], BlockGroup):
        return "repeated steps", ()
    first, last = firsts[0].title, firsts[-1].title  # type: ignore[union-attr]
    shared = len(first[: shared_length([first, last])].rstrip("0123456789"))
    low, high = sorted((first, last), key=lambda name: (len(name), name))
    path = low if low == high else f"{low}…{high[shared:]}"
    title = first if first == last else f"{first}…{last[shared:]}"
    return title, (*firsts[0].scope[:-1], path)
