"""Layered graph layout (Sugiyama, Tagawa and Toda, 1981): rows of each block, and their order.

Each block is laid out separately. Children are layered by longest path, with a limit on the width
of a row. An arrow that spans several rows gets a dummy place in each of them. The order within rows
comes from barycentre sweeps, of which the one with fewest crossings is kept. An arrow that enters
or leaves a block has a port: a place in an extra row above the first or below the last.

Arrows between columns, and those that span more than `LONGEST` rows, are *threads*. `layout.js`
routes them around boxes and between rows after all places are known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradtools.seeing.graphs.outline import Arrow, Block, Outline

LONGEST = 30  # rows that a strand may span; longer arrows are threads
_SWEEPS = 6
_PLACES_TO_COUNT = 3000  # crossings are not counted in larger levels


@dataclass(frozen=True)
class Strand:
    """A polyline in a block, through one place in each row from its source to its target.

    Attributes:
        places: The numbers of its places, row by row.
        arrows: The numbers of its arrows.
    """

    places: tuple[int, ...]
    arrows: tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """The layout of a block's children.

    Attributes:
        rows: The places in each row, from left to right.
        items: For each place the key of its child, or -1 for a dummy or a port.
        strands: The polylines.
        ports_in: The port in the first row of each strand that comes from outside, by the key of
            the outside block and the number of the outside strand.
        ports_out: Likewise the ports in the last row of strands that lead outside.
    """

    rows: tuple[tuple[int, ...], ...]
    items: tuple[int, ...]
    strands: tuple[Strand, ...]
    ports_in: dict[tuple[int, int], int]
    ports_out: dict[tuple[int, int], int]


@dataclass(frozen=True)
class Arrangement:
    """The layout of all blocks.

    Attributes:
        outline: The outline.
        levels: The layout of each block, by its key.
        threads: The numbers of the arrows that are not strands.
    """

    outline: Outline
    levels: dict[int, Level]
    threads: tuple[int, ...]


def arrange(outline: Outline) -> Arrangement:
    """Lays out every block of an outline."""
    ways = _paths(outline)
    blocks = (*outline.columns, *outline.blocks)
    order = {child.key: i for block in blocks for i, child in enumerate(block.children)}
    journeys = [_journey(order, ways, arrow) for arrow in outline.arrows]
    pairs: dict[int, set[tuple[int, int]]] = {block.key: set() for block in blocks}
    for journey in journeys:
        if journey is not None:
            pairs[journey.block].add((journey.source[-1], journey.target[-1]))
    ranks = {block.key: _ranks(block, pairs[block.key]) for block in blocks}
    drafts = {block.key: _Draft(block, ranks[block.key]) for block in blocks}
    threads = []
    for number, journey in enumerate(journeys):
        if journey is None or _is_long(journey, ranks, drafts):
            threads.append(number)
        else:
            _lay(drafts, journey, number)
    return Arrangement(
        outline, {key: draft.level() for key, draft in drafts.items()}, tuple(threads)
    )


# --- where an arrow goes ------------------------------------------------------------------


@dataclass(frozen=True)
class _Journey:
    """An arrow within one column: the lowest common block of its ends, and the paths to them.

    `source` and `target` list the keys from each box up to a child of `block`.
    """

    block: int
    source: tuple[int, ...]
    target: tuple[int, ...]


def _paths(outline: Outline) -> dict[int, tuple[int, ...]]:
    """For each box and block the keys from itself up to its column."""
    return {key: (key, *(block.key for block in outline.around(key))) for key in outline.parents}


def _journey(
    order: dict[int, int], ways: dict[int, tuple[int, ...]], arrow: Arrow
) -> _Journey | None:
    """The arrow's path; None between columns, or against program order."""
    source, target = ways[arrow.source], ways[arrow.target]
    if source[-1] != target[-1]:
        return None
    shared = 0
    while source[-1 - shared] == target[-1 - shared] and shared < min(len(source), len(target)) - 1:
        shared += 1
    ups, downs = source[: len(source) - shared], target[: len(target) - shared]
    if order[ups[-1]] >= order[downs[-1]]:
        return None
    return _Journey(source[-shared], ups, downs)


def _is_long(
    journey: _Journey, ranks: dict[int, dict[int, int]], drafts: dict[int, _Draft]
) -> bool:
    across = ranks[journey.block]
    spans = [across[journey.target[-1]] - across[journey.source[-1]]]
    for key, block in zip(journey.source, journey.source[1:], strict=False):
        spans.append(drafts[block].last - ranks[block][key])
    for key, block in zip(journey.target, journey.target[1:], strict=False):
        spans.append(ranks[block][key])
    return max(spans) > LONGEST


def _lay(drafts: dict[int, _Draft], journey: _Journey, number: int) -> None:
    """Adds an arrow to its strand in the common block, and to those in the blocks at its ends."""
    source, target = journey.source[-1], journey.target[-1]
    strand = outer = drafts[journey.block].strand(("item", source), ("item", target), number)
    outside = journey.block
    for key, block in zip(journey.source[-2::-1], journey.source[:0:-1], strict=True):
        strand = drafts[block].strand(("item", key), ("out", (outside, strand)), number)
        outside = block
    strand, outside = outer, journey.block
    for key, block in zip(journey.target[-2::-1], journey.target[:0:-1], strict=True):
        strand = drafts[block].strand(("in", (outside, strand)), ("item", key), number)
        outside = block


# --- rows --------------------------------------------------------------------------------


def _ranks(block: Block, pairs: set[tuple[int, int]]) -> dict[int, int]:
    """The row of each child: below all that it reads, in the first row that is not full."""
    before: dict[int, list[int]] = {child.key: [] for child in block.children}
    after: dict[int, list[int]] = {child.key: [] for child in block.children}
    for source, target in pairs:
        before[target].append(source)
        after[source].append(target)
    room = max(8, math.isqrt(len(block.children)))
    ranks = _downward(block, before, room)
    _pull_down(block, before, after, ranks, room)
    used = {rank: i for i, rank in enumerate(sorted(set(ranks.values())))}
    return {key: used[rank] for key, rank in ranks.items()}


def _downward(block: Block, before: dict[int, list[int]], room: int) -> dict[int, int]:
    ranks: dict[int, int] = {}
    filled: dict[int, int] = {}
    first_free: dict[int, int] = {}
    for child in block.children:
        if not before[child.key]:
            ranks[child.key] = 0
            continue
        rank = max(ranks[key] for key in before[child.key]) + 1
        rank = _free(first_free, filled, rank, room)
        filled[rank] = filled.get(rank, 0) + 1
        ranks[child.key] = rank
    return ranks


def _free(first_free: dict[int, int], filled: dict[int, int], rank: int, room: int) -> int:
    """The first row from `rank` on that is not full; path compression skips full ones."""
    passed = []
    while filled.get(rank, 0) >= room:
        passed.append(rank)
        rank = first_free.get(rank, rank + 1)
    for full in passed:
        first_free[full] = rank
    return rank


def _pull_down(
    block: Block,
    before: dict[int, list[int]],
    after: dict[int, list[int]],
    ranks: dict[int, int],
    room: int,
) -> None:
    """Moves children without inputs down to just above their first reader, if there is room."""
    sources = [child.key for child in block.children if not before[child.key]]
    filled: dict[int, int] = {}
    for key, rank in ranks.items():
        if before[key]:
            filled[-rank] = filled.get(-rank, 0) + 1
    above: dict[int, int] = {}
    for key in sources:
        wanted = min((ranks[other] for other in after[key]), default=1) - 1
        rank = _free(above, filled, -wanted, room)  # upwards: by negative numbers
        filled[rank] = filled.get(rank, 0) + 1
        ranks[key] = -rank


# --- places ------------------------------------------------------------------------------

_End = tuple[str, int | tuple[int, int]]


@dataclass
class _Draft:
    """A level under construction, to which strands are added."""

    block: Block
    ranks: dict[int, int]
    strands: dict[tuple[_End, _End], list[int]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last row of children."""
        return max(self.ranks.values(), default=0)

    def strand(self, source: _End, target: _End, arrow: int) -> int:
        """Adds an arrow to the strand between two ends; returns the strand's number."""
        arrows = self.strands.setdefault((source, target), [])
        arrows.append(arrow)
        if len(arrows) == 1:
            self._numbers[source, target] = len(self._numbers)
        return self._numbers[source, target]

    def __post_init__(self) -> None:
        self._numbers: dict[tuple[_End, _End], int] = {}

    def level(self) -> Level:
        """The finished level."""
        places = _LevelPlaces(self.block, self.ranks, self.last)
        strands = [
            Strand(places.through(source, target), tuple(arrows))
            for (source, target), arrows in self.strands.items()
        ]
        rows = _ordered(list(places.rows), strands, len(places.items))
        return Level(
            tuple(map(tuple, rows)),
            tuple(places.items),
            tuple(strands),
            places.ports("in"),
            places.ports("out"),
        )


class _LevelPlaces:
    """The places of a level: one for each child and port, and a dummy for each row in between."""

    def __init__(self, block: Block, ranks: dict[int, int], last: int) -> None:
        self.items: list[int] = []
        self.rows: list[list[int]] = [[] for _ in range(last + 3)]
        self._ends: dict[_End, int] = {}
        self._ranks = {("item", key): rank + 1 for key, rank in ranks.items()}
        self._last = last + 2
        for child in block.children:
            self._end(("item", child.key))

    def _new(self, row: int, item: int = -1) -> int:
        self.items.append(item)
        self.rows[row].append(len(self.items) - 1)
        return len(self.items) - 1

    def _row(self, end: _End) -> int:
        if end[0] == "item":
            return self._ranks[end]  # type: ignore[index]
        return 0 if end[0] == "in" else self._last

    def _end(self, end: _End) -> int:
        if end not in self._ends:
            item = end[1] if end[0] == "item" else -1
            self._ends[end] = self._new(self._row(end), item)  # type: ignore[arg-type]
        return self._ends[end]

    def through(self, source: _End, target: _End) -> tuple[int, ...]:
        """A place in each row from one end to the other."""
        first, last = self._end(source), self._end(target)
        between = range(self._row(source) + 1, self._row(target))
        return (first, *(self._new(row) for row in between), last)

    def ports(self, kind: str) -> dict[tuple[int, int], int]:
        """The places of the ports of one kind."""
        return {end[1]: place for end, place in self._ends.items() if end[0] == kind}  # type: ignore[misc]


# --- order -------------------------------------------------------------------------------


def _ordered(rows: list[list[int]], strands: Sequence[Strand], count: int) -> list[list[int]]:
    """Orders the rows by barycentre sweeps, keeping the order with fewest crossings."""
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for strand in strands:
        for upper, lower in zip(strand.places, strand.places[1:], strict=False):
            above[lower].append(upper)
            below[upper].append(lower)
    if max(map(len, rows)) < 2:
        return rows
    counted = count <= _PLACES_TO_COUNT
    best, fewest = rows, _crossings(rows, below) if counted else math.inf
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        rows = _swept(rows, above if down else below, down)
        crossings = _crossings(rows, below) if counted else -sweep
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _swept(rows: list[list[int]], near: list[list[int]], down: bool) -> list[list[int]]:
    """Sorts each row by the mean position of its neighbours in the previous row."""
    at: dict[int, float] = {}
    for row in rows:
        at.update({place: i for i, place in enumerate(row)})
    swept = [list(row) for row in rows]
    for i in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
        row = swept[i]
        mean = {
            place: sum(at[p] for p in near[place]) / len(near[place]) if near[place] else at[place]
            for place in row
        }
        row.sort(key=mean.__getitem__)
        at.update({place: float(k) for k, place in enumerate(row)})
    return swept


def _crossings(rows: list[list[int]], below: list[list[int]]) -> int:
    """The number of crossings between adjacent rows: inversions, counted by a Fenwick tree."""
    total = 0
    for upper, lower in itertools.pairwise(rows):
        at = {place: i for i, place in enumerate(lower)}
        ends = [end for place in upper for end in sorted(at[other] for other in below[place])]
        total += _inversions(ends, len(lower))
    return total


def _inversions(ends: Sequence[int], size: int) -> int:
    tree = [0] * (size + 1)
    total = 0
    for seen, end in enumerate(ends):
        i = end + 1
        smaller = 0
        while i:
            smaller += tree[i]
            i &= i - 1
        total += seen - smaller
        i = end + 1
        while i <= size:
            tree[i] += 1
            i += i & -i
    return total
