"""Names for values: letters that are the same in the text and in all pictures of a graph.

They are assigned in the order in which the whole graph is printed, whichever blocks are open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gradtools.seeing.graphs.flat_graph import (
    BlockGroup,
    FlatGraph,
    Operand,
    Unit,
    units_of,
    ways_to,
)
from gradtools.seeing.graphs.nodes import Dependence


class Letters:
    """Names the values of a graph, and lists the values that cross the border of each block.

    Args:
        flat: The graph.
        blocks: Its visible blocks.
        alias: For each hidden unit of a folded copy, the unit that is shown instead.
    """

    def __init__(
        self, flat: FlatGraph, blocks: Sequence[BlockGroup], alias: Mapping[int, int]
    ) -> None:
        self._alias = alias
        self._read: dict[int, set[int]] = {}
        for unit in flat.units:
            for operand in unit.operands:
                for key, k in operand.makers:
                    self._read.setdefault(stand_in(alias, key), set()).add(k)
        self._names: dict[tuple[int, int], str] = {}
        for unit in units_of(blocks):
            if unit.kind != "output":
                for k in sorted(self._read.get(unit.key, {0})):
                    self._names[unit.key, k] = letters(len(self._names))
        self._made: dict[int, dict[str, None]] = {}
        self._given: dict[int, dict[str, str]] = {}
        ways = {key: way[:-1] for key, way in ways_to(blocks).items()}
        for unit in units_of(blocks):
            for operand in unit.operands:
                for key, k in operand.makers:
                    self._cross(ways, unit, operand, (stand_in(alias, key), k))

    def made(self, unit: Unit) -> str:
        """The names of a unit's outputs; ``_`` for one that nothing reads."""
        last = max(self._read.get(unit.key, {0}))
        return ", ".join(self._names.get((unit.key, k), "_") for k in range(last + 1))

    def operands(self, unit: Unit) -> Iterator[str]:
        """The operands of a unit as text, in order."""
        for operand in unit.operands:
            makers = ((stand_in(self._alias, key), k) for key, k in operand.makers)
            names = dict.fromkeys(self._names[of] for of in makers if of in self._names)
            text = operand.text or "|".join(names)
            if text:
                yield _bracketed(operand, text)

    def around(self, group: BlockGroup) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What a block makes for others, and what it reads of others."""
        made, given = self._made.get(id(group), {}), self._given.get(id(group), {})
        return tuple(made), tuple(given.values())

    def _cross(
        self,
        ways: Mapping[int, list[BlockGroup]],
        unit: Unit,
        operand: Operand,
        of: tuple[int, int],
    ) -> None:
        name = self._names.get(of)
        if name is None:
            return
        source, target = ways.get(of[0], []), ways[unit.key]
        for group in source:
            if not any(group is other for other in target):
                self._made.setdefault(id(group), {})[name] = None
        for group in target:
            if not any(group is other for other in source):
                result = self._given.setdefault(id(group), {})
                if result.get(name) != name:
                    result[name] = _bracketed(operand, name)


def _bracketed(operand: Operand, text: str) -> str:
    """An operand's text: ✕ if it loses a derivative, in brackets if none flows through it."""
    if operand.cut:
        return f"✕{text}"
    weak = operand.makers and operand.strength < Dependence.DIFFERENTIABLE
    return f"[{text}]" if weak else text


def stand_in(alias: Mapping[int, int], key: int) -> int:
    """The visible unit that represents this one."""
    while key in alias:
        key = alias[key]
    return key


def letters(number: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    result = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        result = chr(ord("a") + rest) + result
    return result
