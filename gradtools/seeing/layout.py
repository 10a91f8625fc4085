"""Coordinates: where every box, frame and line of an arrangement stands, for given open blocks.

From the inside out, each open block is laid out by itself. Along a row, the places are pulled
towards the mean of their neighbours in the next row and keep their order and distance::

    minimise  sum_i w_i (x_i - d_i)^2   subject to   x_(i+1) - x_i >= s_i

which is solved exactly by pooling adjacent violators; a few sweeps down and up settle it. Lines
that pass weigh more than boxes, so long lines are straight. Rows never overlap, and between two
rows there are only lines: a line cannot run through a box.

Columns stand side by side. Forward runs down and backward runs up, each row as near as may be to
the rows whose residuals it reads.

`page.js` does the same in the reader's browser, when blocks open and close; change both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradtools.seeing.arrange import Arrangement, Level
from gradtools.seeing.cards import LINE, Card, card_of, short, text_width
from gradtools.seeing.outline import Block, Box

GAP = 34.0  # between two rows
SIDE = 26.0  # between two boxes of a row
BESIDE = 16.0  # between a box and a line
LINES = 11.0  # between two lines
PAD = 16.0  # between a frame and what it holds
HEAD = 30.0  # the room for a frame's name
_SWEEPS = 7
_STILL = 0.2  # what moves less does not move


@dataclass
class Placed:
    """A box, or a closed block, where it stands."""

    item: Box | Block
    card: Card
    x: float
    y: float

    @property
    def width(self) -> float:
        """Its width."""
        return self.card.width

    @property
    def height(self) -> float:
        """Its height."""
        return self.card.height


@dataclass
class Frame:
    """An open block, where it stands; `depth` counts the frames around it."""

    block: Block
    x: float
    y: float
    width: float
    height: float
    depth: int
    name_x: float


@dataclass
class Inside:
    """A block's inside in its own coordinates; y runs along the flow, from the first row.

    Attributes:
        block: The block.
        level: Its arrangement.
        x: The middle of each place.
        row_of: The row of each place.
        tops: Where each row begins.
        heights: How high each row is.
        width: The width of all.
        height: The height of all, from frame to frame.
        name_x: Where its name stands.
        inner: The insides of the open blocks in it.
        sizes: The width and height of each place.
    """

    block: Block
    level: Level
    x: list[float]
    row_of: list[int]
    tops: list[float]
    heights: list[float]
    width: float
    height: float
    name_x: float
    inner: dict[int, Inside]
    sizes: list[tuple[float, float]]
    place_of: dict[int, int] = field(default_factory=dict)

    def end(self, row: int) -> float:
        """Where a row ends."""
        return self.tops[row] + self.heights[row]


def inside_of(
    arrangement: Arrangement,
    block: Block,
    opened: frozenset[int],
    cards: dict[int, Card],
    flips: bool,
) -> Inside:
    """The layout of a block, with the open blocks in it."""
    level = arrangement.levels[block.key]
    inner = {
        child.key: inside_of(arrangement, child, opened, cards, flips)
        for child in block.children
        if isinstance(child, Block) and child.key in opened
    }
    for child in block.children:
        if child.key not in inner and child.key not in cards:
            cards[child.key] = card_of(child)
    sizes = [_size(key, inner, cards) for key in level.items]
    joints = _joints(block.key, level, inner)
    x = _across(level, sizes, joints)
    place_of = {key: place for place, key in enumerate(level.items) if key >= 0}
    return _stacked(block, level, x, sizes, joints, inner, place_of, flips)


def _size(key: int, inner: dict[int, Inside], cards: dict[int, Card]) -> tuple[float, float]:
    if key < 0:
        return 0.0, 0.0
    if key in inner:
        return inner[key].width, inner[key].height
    return cards[key].width, cards[key].height


# --- across ------------------------------------------------------------------------------

Joint = tuple[int, float, float, float]  # other place, own offset, its offset, weight


def _joints(
    block: int, level: Level, inner: dict[int, Inside]
) -> tuple[list[list[Joint]], list[list[Joint]]]:
    """For each place the lines to the row above and to the row below."""
    above: list[list[Joint]] = [[] for _ in level.items]
    below: list[list[Joint]] = [[] for _ in level.items]
    for number, strand in enumerate(level.strands):
        for upper, lower in zip(strand.places, strand.places[1:], strict=False):
            out = port_offset(inner, level.items[upper], (block, number), "out")
            into = port_offset(inner, level.items[lower], (block, number), "in")
            passing = (level.items[upper] < 0) + (level.items[lower] < 0)
            weight = (1.0, 3.0, 12.0)[passing]
            below[upper].append((lower, out, into, weight))
            above[lower].append((upper, into, out, weight))
    return above, below


def port_offset(inner: dict[int, Inside], key: int, strand: tuple[int, int], kind: str) -> float:
    """Where a line enters or leaves an open block, from the block's middle."""
    if key not in inner:
        return 0.0
    inside = inner[key]
    ports = inside.level.ports_in if kind == "in" else inside.level.ports_out
    return inside.x[ports[strand]] - inside.width / 2


def _across(
    level: Level,
    sizes: Sequence[tuple[float, float]],
    joints: tuple[list[list[Joint]], list[list[Joint]]],
) -> list[float]:
    """The middle of each place along its row."""
    x = [0.0] * len(level.items)
    rooms = [_rooms(row, level.items, sizes) for row in level.rows]
    for row, room in zip(level.rows, rooms, strict=True):
        middle = room[-1] / 2 if room else 0.0
        for place, offset in zip(row, room, strict=True):
            x[place] = offset - middle
    above, below = joints
    both = [a + b for a, b in zip(above, below, strict=True)]
    order = [*range(len(level.rows))]
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        near = both if sweep > _SWEEPS else above if down else below
        moved = 0.0
        for r in order if down else reversed(order):
            if level.rows[r]:
                moved = max(moved, _settle(x, level.rows[r], rooms[r], near))
        if moved < _STILL and sweep > _SWEEPS:
            break
    return x


def _rooms(
    row: Sequence[int], items: Sequence[int], sizes: Sequence[tuple[float, float]]
) -> list[float]:
    """The least distance of each place's middle from the first one's."""
    found = [0.0] if row else []
    for left, right in itertools.pairwise(row):
        passing = (items[left] < 0) + (items[right] < 0)
        gap = (SIDE, BESIDE, LINES)[passing]
        found.append(found[-1] + (sizes[left][0] + sizes[right][0]) / 2 + gap)
    return found


def _settle(
    x: list[float], row: Sequence[int], room: Sequence[float], near: list[list[Joint]]
) -> float:
    """Moves a row as near to its neighbours as its order and distances allow; says how far."""
    wanted, weights = [], []
    for place, offset in zip(row, room, strict=True):
        total, pull = 0.02, 0.02 * x[place]
        for other, own, its, weight in near[place]:
            total += weight
            pull += weight * (x[other] + its - own)
        wanted.append(pull / total - offset)
        weights.append(total)
    moved = 0.0
    levels = wanted if len(row) == 1 else pooled(wanted, weights)
    for place, offset, level in zip(row, room, levels, strict=True):
        moved = max(moved, abs(x[place] - level - offset))
        x[place] = level + offset
    return moved


def pooled(wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nondecreasing numbers nearest to those wanted, by pooling adjacent violators."""
    means: list[float] = []
    masses: list[float] = []
    counts: list[int] = []
    for mean, mass in zip(wanted, weights, strict=True):
        count = 1
        while means and means[-1] >= mean:
            other = masses.pop()
            mean = (means.pop() * other + mean * mass) / (other + mass)
            mass += other
            count += counts.pop()
        means.append(mean)
        masses.append(mass)
        counts.append(count)
    return [mean for mean, count in zip(means, counts, strict=True) for _ in range(count)]


# --- along -------------------------------------------------------------------------------


def _stacked(
    block: Block,
    level: Level,
    x: list[float],
    sizes: list[tuple[float, float]],
    joints: tuple[list[list[Joint]], list[list[Joint]]],
    inner: dict[int, Inside],
    place_of: dict[int, int],
    flips: bool,
) -> Inside:
    """The rows below each other, and the name in the frame where no line is."""
    row_of = [0] * len(x)
    for r, row in enumerate(level.rows):
        for place in row:
            row_of[place] = r
    heights = [max((sizes[place][1] for place in row), default=0.0) for row in level.rows]
    if block.kind != "pass":
        heights[-1 if flips else 0] = HEAD - 6  # lines go straight past the name
    tops = _tops(level, x, heights, joints[1])
    height = tops[-1] + heights[-1]
    if block.kind == "pass":
        left, width, name_x = *_span(x, sizes), 0.0
    else:
        left, width, name_x = _framed(block, level, x, sizes, flips)
    x = [middle - left for middle in x]
    return Inside(
        block, level, x, row_of, tops, heights, width, height, name_x, inner, sizes, place_of
    )


def _span(x: Sequence[float], sizes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    left = min((m - w / 2 for m, (w, _) in zip(x, sizes, strict=True)), default=0.0)
    right = max((m + w / 2 for m, (w, _) in zip(x, sizes, strict=True)), default=0.0)
    return left, right - left


def _tops(
    level: Level, x: Sequence[float], heights: Sequence[float], below: list[list[Joint]]
) -> list[float]:
    """Where each row begins; the first and last hold ports and lie on the frame."""
    tops = [0.0]
    for r, row in enumerate(level.rows[:-1]):
        reach = [abs(x[p] + own - x[q] - its) for p in row for q, own, its, _ in below[p]]
        ends = r in (0, len(level.rows) - 2)
        least = PAD if ends else GAP
        gap = least + min(46.0, 0.08 * max(reach)) if reach else PAD / 2 if ends else GAP
        tops.append(tops[-1] + heights[r] + gap)
    return tops


def _framed(
    block: Block,
    level: Level,
    x: Sequence[float],
    sizes: Sequence[tuple[float, float]],
    flips: bool,
) -> tuple[float, float, float]:
    """The frame's left side, its width, and where between the lines its name has room."""
    left, width = _span(x, sizes)
    left, width = left - PAD, width + 2 * PAD
    need = text_width("▾ " + short(block.name), LINE) + 2 * BESIDE
    width = max(width, need)
    ports = level.ports_out if flips else level.ports_in
    stops = sorted(x[place] - left for place in ports.values())
    start = 0.0
    for stop in [*stops, width]:
        if stop - start >= need:
            return left, width, start + BESIDE
        start = stop
    wider = need - stops[0]
    return left - wider, width + wider, BESIDE


def rows_near(
    tops: Sequence[float], heights: Sequence[float], wanted: Iterable[tuple[int, float]]
) -> list[float]:
    """Rows moved apart, so that each is near to where it is wanted and keeps its distance.

    Args:
        tops: Where each row begins, ascending.
        heights: How high it is.
        wanted: Pairs (row, where it would like to begin).

    Returns:
        Where each row begins.
    """
    pulls: list[list[float]] = [[] for _ in tops]
    for row, top in wanted:
        pulls[row].append(top - tops[row])
    shift, known, weights = 0.0, [], []
    for pull in pulls:
        shift = sum(pull) / len(pull) if pull else shift
        known.append(shift)
        weights.append(1.0 if pull else 0.001)
    return [top + move for top, move in zip(tops, pooled(known, weights), strict=True)]
