"""The picture: columns side by side, everything in coordinates of the page, lines drawn through.

A *strand* is a smooth line through its places; a *thread* leaves its box to the side, goes between
the rows to the border of its column, up or down in the gutter between two columns, and in again
in the same way. Residuals are threads, each with its bytes beside the column that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gradtools.seeing.arrange import Arrangement, arrange
from gradtools.seeing.cards import LINE, Card, text_width
from gradtools.seeing.layout import (
    GAP,
    Frame,
    Inside,
    Placed,
    inside_of,
    port_offset,
    rows_near,
)
from gradtools.seeing.outline import Arrow, Block, Outline, size_text

MARGIN = 24.0
COLUMN_HEAD = 34.0
LABEL = 14.0  # the height of a label
TRACK = 7.0  # between two threads in a gutter
_GUTTER = 30.0
_MOST_TRACKS = 40
_MOST_LABELS = 300
_SCREEN = 1800.0, 1400.0
_LIMITS = (44, 36, 30, 25, 21, 17, 14, 11, 8, 5, 2)  # boxes
_SPREAD = 13.0  # between two lines at one side of a box

Point = tuple[float, float]
Step = tuple[str, tuple[float, ...]]  # "M", "L" or "C" with its coordinates


@dataclass(frozen=True)
class Line:
    """A line of the picture.

    Attributes:
        steps: Its path: moves, straight lines and cubic curves.
        arrow: What it stands for.
        head: Whether it ends at a box, with an arrowhead; else at a frame.
        thread: Whether it is a thread.
    """

    steps: tuple[Step, ...]
    arrow: Arrow
    head: bool
    thread: bool = False

    @property
    def end(self) -> tuple[Point, Point]:
        """The last point, and the one before it that says from where it comes."""
        numbers = [step[1] for step in self.steps]
        flat = [n for coordinates in numbers for n in coordinates]
        return (flat[-2], flat[-1]), (flat[-4], flat[-3])


@dataclass(frozen=True)
class Label:
    """A piece of text beside a line: its left side and its middle."""

    x: float
    y: float
    text: str
    arrow: Arrow


@dataclass(frozen=True)
class Heading:
    """The name of a column."""

    x: float
    y: float
    block: Block


@dataclass
class Picture:
    """Everything that is drawn, with its place."""

    outline: Outline
    arrangement: Arrangement
    opened: frozenset[int]
    boxes: list[Placed] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    headings: list[Heading] = field(default_factory=list)
    top: float = 0.0
    width: float = 0.0
    height: float = 0.0


def picture_of(outline: Outline, opened: frozenset[int]) -> Picture:
    """Lays an outline out, with some blocks open."""
    return _Drafting(arrange(outline), opened).picture


def fitted(outline: Outline, expand: str | Iterable[str] = ()) -> Picture:
    """The picture with as many blocks open as fit one screen."""
    arrangement = arrange(outline)
    views = dict.fromkeys(outline.opened(None, expand, limit) for limit in _LIMITS)
    for opened in views:
        picture = _Drafting(arrangement, opened).picture
        if picture.width <= _SCREEN[0] and picture.height <= _SCREEN[1]:
            break
    return picture


@dataclass
class _Spot:
    """A box or open block on the page, and the inside that it stands in."""

    x: float
    y: float
    width: float
    height: float
    column: int
    around: _Stage | None


@dataclass
class _Stage:
    """The inside of an open block, on the page."""

    inside: Inside
    x: float
    y: float
    flips: bool
    spot: _Spot | None
    channels: dict[int, int] = field(default_factory=dict)

    def at(self, along: float) -> float:
        """The y on the page of a place along the flow."""
        return self.y + (self.inside.height - along if self.flips else along)

    def middle(self, place: int) -> float:
        """The x on the page of a place."""
        return self.x + self.inside.x[place]


class _Drafting:
    """Puts columns, boxes and lines on the page."""

    def __init__(self, arrangement: Arrangement, opened: frozenset[int]) -> None:
        self.arrangement, self.opened = arrangement, opened
        self.outline = arrangement.outline
        self.picture = Picture(self.outline, arrangement, opened)
        self.cards: dict[int, Card] = {}
        self.spots: dict[int, _Spot] = {}
        self.stages: list[_Stage] = []
        self.threads = self._threads()
        self._columns()
        self._strands()
        self._led_around()
        self._fit()

    # --- columns

    def _threads(self) -> list[Arrow]:
        """What is no strand, between what is seen, merged."""
        arrows = tuple(self.outline.arrows[number] for number in self.arrangement.threads)
        self._column_of = {
            item.key: number
            for number, column in enumerate(self.outline.columns)
            for item in column.walk()
        }
        within = Outline(self.outline.columns, arrows, self.outline.values)
        return within.seen_arrows(self.opened)

    def _columns(self) -> None:
        x = MARGIN
        self._gutters: list[tuple[float, float]] = []
        for number, column in enumerate(self.outline.columns):
            flips = column.phase % 2 == 1
            inside = inside_of(self.arrangement, column, self.opened, self.cards, flips)
            x = self._gutter(number, x)
            stage = self._beside(number, inside, x, flips)
            self._put(stage, number, 0)
            name = text_width(column.title, LINE) + 30
            x += max(inside.width, name)
        self._gutter(len(self.outline.columns), x)

    def _gutter(self, number: int, x: float) -> float:
        """Leaves room between two columns for the threads that run there, and their labels."""
        crossing = [t for t in self.threads if number in self._gutters_of(t)]
        labels = [self._label_text(t) for t in crossing if self._labels_at(t) == number]
        room = max((text_width(text, LINE) + 16 for text in labels), default=0.0)
        tracks = min(len(crossing), _MOST_TRACKS) * TRACK
        ends = 0 < number < len(self.outline.columns)
        width = _GUTTER + tracks + room if crossing else _GUTTER * ends
        self._gutters.append((x, x + width))
        return x + width

    def _gutters_of(self, thread: Arrow) -> range:
        """The gutters that a thread passes; that right of its column if it stays in it."""
        source, target = self._ends(thread)
        low, high = min(source, target), max(source, target)
        return range(low + 1, high + 1) if low < high else range(low + 1, low + 2)

    def _ends(self, thread: Arrow) -> tuple[int, int]:
        return self._column_of[thread.source], self._column_of[thread.target]

    def _labels_at(self, thread: Arrow) -> int:
        source, target = self._ends(thread)
        return target if source < target else target + 1

    def _label_text(self, thread: Arrow) -> str:
        if thread.cut:
            return f"✕ {thread.cut}"
        return size_text(self.outline.bytes_of(thread.values)) if thread.saved else ""

    def _beside(self, number: int, inside: Inside, x: float, flips: bool) -> _Stage:
        """A column's stage, its rows near to those that its threads come from."""
        stage = _Stage(inside, x, MARGIN + COLUMN_HEAD, flips, None)
        pulls = []
        if number:
            local: dict[int, tuple[int, float]] = {}
            for key, place in inside.place_of.items():
                row = inside.row_of[place]
                for inner, y in self._heights(inside, key, stage, place):
                    local[inner] = (row, y)
            for thread in self.threads:
                ends = [thread.source, thread.target]
                ends = ends if ends[1] in local else ends[::-1]
                if ends[0] in self.spots and ends[1] in local:
                    spot = self.spots[ends[0]]
                    row, y = local[ends[1]]
                    pulls.append((row, spot.y + spot.height / 2 - y))
        if pulls:
            self._move_rows(stage, pulls)
        return stage

    def _heights(
        self, inside: Inside, key: int, stage: _Stage, place: int
    ) -> Iterator[tuple[int, float]]:
        """The middle on the page of everything that stands in a place of a column."""
        top = inside.tops[inside.row_of[place]]
        room = inside.heights[inside.row_of[place]]
        size = inside.sizes[place][1]
        middle = stage.at(top + room / 2)
        yield key, middle
        if key in inside.inner:
            within = inside.inner[key]
            below = _Stage(within, 0.0, middle - size / 2, stage.flips, None)
            for child, at in within.place_of.items():
                yield from self._heights(within, child, below, at)

    def _move_rows(self, stage: _Stage, pulls: Sequence[tuple[int, float]]) -> None:
        inside = stage.inside
        count = len(inside.tops)
        rows = [*range(count)][::-1] if stage.flips else [*range(count)]
        edges = [stage.at(inside.end(r) if stage.flips else inside.tops[r]) for r in rows]
        number = {r: i for i, r in enumerate(rows)}
        wanted = [(number[r], edges[number[r]] + move) for r, move in pulls]
        heights = [inside.heights[r] for r in rows]
        moved = rows_near(edges, heights, wanted)
        top = min(stage.y, moved[0])
        bottom = max(m + h for m, h in zip(moved, heights, strict=True))
        stage.y, inside.height = top, bottom - top
        for r, edge in zip(rows, moved, strict=True):
            inside.tops[r] = (bottom - edge - inside.heights[r]) if stage.flips else edge - top

    def _put(self, stage: _Stage, column: int, depth: int) -> None:
        """Puts what stands in a stage on the page, inner stages too."""
        self.stages.append(stage)
        inside = stage.inside
        children = {child.key: child for child in inside.block.children}
        for key, place in inside.place_of.items():
            width, height = inside.sizes[place]
            row = inside.row_of[place]
            y = stage.at(inside.tops[row] + inside.heights[row] / 2) - height / 2
            spot = _Spot(stage.middle(place) - width / 2, y, width, height, column, stage)
            self.spots[key] = spot
            child = children[key]
            if key in inside.inner and isinstance(child, Block):
                within = inside.inner[key]
                frame = Frame(child, spot.x, y, width, height, depth, spot.x + within.name_x)
                self.picture.frames.append(frame)
                self._put(_Stage(within, spot.x, y, stage.flips, spot), column, depth + 1)
            else:
                self.picture.boxes.append(Placed(child, self.cards[key], spot.x, y))

    # --- strands

    def _strands(self) -> None:
        for stage in self.stages:
            self._strands_of(stage)

    def _strands_of(self, stage: _Stage) -> None:
        level, inside = stage.inside.level, stage.inside
        outs, intos = self._spread(stage)
        for number, strand in enumerate(level.strands):
            points = [self._passage(stage, strand.places, i) for i in range(len(strand.places))]
            points[0] = (points[0][0] + outs[number], *points[0][1:])
            points[-1] = (points[-1][0] + intos[number], *points[-1][1:])
            target = level.items[strand.places[-1]]
            head = target >= 0 and target not in inside.inner
            self.picture.lines.append(Line(_smooth(points), self._carried(strand.arrows), head))

    @staticmethod
    def _passage(stage: _Stage, places: Sequence[int], i: int) -> tuple[float, float, float]:
        """The x of a line in one of its places, and the y between which it runs straight."""
        inside, place = stage.inside, places[i]
        row = inside.row_of[place]
        begin, end = inside.tops[row], inside.end(row)
        if inside.level.items[place] >= 0:
            margin = (end - begin - inside.sizes[place][1]) / 2
            begin, end = (end - margin, end) if i == 0 else (begin, begin + margin)
        return stage.middle(place), stage.at(begin), stage.at(end)

    def _carried(self, numbers: Sequence[int]) -> Arrow:
        arrows = [self.outline.arrows[number] for number in numbers]
        if len(arrows) == 1:
            return arrows[0]
        cuts = [arrow.cut for arrow in arrows]
        return Arrow(
            arrows[0].source,
            arrows[0].target,
            frozenset().union(*(arrow.values for arrow in arrows)),
            all(arrow.saved for arrow in arrows),
            max(arrow.strength for arrow in arrows),
            None if None in cuts else cuts[0],
        )

    def _spread(self, stage: _Stage) -> tuple[list[float], list[float]]:
        """How far from the middle of its box each strand begins and ends."""
        inside, level = stage.inside, stage.inside.level
        outs, intos = [0.0] * len(level.strands), [0.0] * len(level.strands)
        for offsets, kind, end, near in ((outs, "out", 0, 1), (intos, "in", -1, -2)):
            at: dict[int, list[int]] = {}
            for number, strand in enumerate(level.strands):
                at.setdefault(strand.places[end], []).append(number)
            for place, numbers in at.items():
                key = level.items[place]
                if key in inside.inner:
                    for number in numbers:
                        strand_id = (inside.block.key, number)
                        offsets[number] = port_offset(inside.inner, key, strand_id, kind)
                elif key >= 0:
                    numbers.sort(key=lambda n: inside.x[level.strands[n].places[near]])
                    step = _step(len(numbers), inside.sizes[place][0])
                    for i, number in enumerate(numbers):
                        offsets[number] = (i - (len(numbers) - 1) / 2) * step
        return outs, intos

    # --- threads

    def _led_around(self) -> None:
        rights, lefts = self._sides()
        plans = []
        for thread in self.threads:
            source, target = self._ends(thread)
            out_right = source <= target
            in_left = source < target
            start = self._way_out(thread.source, 1 if out_right else -1, rights[id(thread)])
            stop = self._way_out(thread.target, -1 if in_left else 1, lefts[id(thread)])
            plans.append((thread, start, stop))
        tracks = self._tracks(plans)
        levels = self._label_levels(plans)
        for thread, start, stop in plans:
            self._thread(thread, start, stop, tracks[id(thread)], levels.get(id(thread)))

    def _sides(self) -> tuple[dict[int, float], dict[int, float]]:
        """How far below the top of its box each thread begins and ends."""
        sides: dict[tuple[int, bool], list[tuple[float, int, bool]]] = {}
        for thread in self.threads:
            source, target = self._ends(thread)
            for key, other, right, out in (
                (thread.source, thread.target, source <= target, True),
                (thread.target, thread.source, source >= target, False),
            ):
                y = self.spots[other].y
                sides.setdefault((key, right), []).append((y, id(thread), out))
        outs: dict[int, float] = {}
        intos: dict[int, float] = {}
        for (key, _), ends in sides.items():
            height = self.spots[key].height
            step = min(_SPREAD, (height - 10) / max(1, len(ends)))
            for i, (_, name, out) in enumerate(sorted(ends)):
                (outs if out else intos)[name] = height / 2 + (i - (len(ends) - 1) / 2) * step
        return outs, intos

    def _way_out(self, key: int, side: int, y_in: float) -> list[Point]:
        """From a box to the border of its column, between the rows."""
        spot = self.spots[key]
        y = spot.y + y_in
        x = spot.x + spot.width if side > 0 else spot.x
        points = [(x, y)]
        current, at = key, spot
        while at.around is not None:
            stage = at.around
            if self._is_blocked(stage, current, side):
                x = (at.x + at.width if side > 0 else at.x) + side * 7.0
                points.append((x, y))
                y = self._channel(stage, current)
                points.append((x, y))
            if stage.spot is None:
                break
            current, at = stage.inside.block.key, stage.spot
        return points

    @staticmethod
    def _is_blocked(stage: _Stage, key: int, side: int) -> bool:
        inside = stage.inside
        place = inside.place_of[key]
        row = inside.level.rows[inside.row_of[place]]
        at = row.index(place)
        beyond = row[at + 1 :] if side > 0 else row[:at]
        return any(inside.level.items[other] >= 0 for other in beyond)

    @staticmethod
    def _channel(stage: _Stage, key: int) -> float:
        """A free height between the row of a box and the next row."""
        inside = stage.inside
        row = inside.row_of[inside.place_of[key]]
        used = stage.channels.get(row, 0)
        stage.channels[row] = used + 1
        low, high = inside.end(row), inside.tops[row + 1]
        share = (0.5, 0.3, 0.7, 0.4, 0.6, 0.2, 0.8)[used % 7]
        return stage.at(low + (high - low) * share)

    def _tracks(
        self, plans: Sequence[tuple[Arrow, list[Point], list[Point]]]
    ) -> dict[int, dict[int, float]]:
        """Where each thread runs in each gutter: no two in one place, few crossings."""
        found: dict[int, dict[int, float]] = {id(thread): {} for thread, _, _ in plans}
        for number, (left, _) in enumerate(self._gutters):
            here = [plan for plan in plans if number in self._gutters_of(plan[0])]
            here.sort(key=_track_order)
            step = min(TRACK, TRACK * _MOST_TRACKS / max(1, len(here)))
            for i, (thread, _, _) in enumerate(here):
                found[id(thread)][number] = left + _GUTTER / 2 + i * step
        return found

    def _label_levels(
        self, plans: Sequence[tuple[Arrow, list[Point], list[Point]]]
    ) -> dict[int, float]:
        """The height of each label, near to where its thread goes in, none over another."""
        found: dict[int, float] = {}
        if len(plans) > _MOST_LABELS:
            return found
        for number in range(len(self._gutters)):
            here = [
                (stop[-1][1], id(thread))
                for thread, _, stop in plans
                if self._labels_at(thread) == number and self._label_text(thread)
            ]
            here.sort()
            edges = [i * LABEL for i in range(len(here))]
            wanted = [(i, y) for i, (y, _) in enumerate(here)]
            for y, (_, name) in zip(rows_near(edges, edges, wanted), here, strict=True):
                found[name] = y
        return found

    def _thread(
        self,
        thread: Arrow,
        start: list[Point],
        stop: list[Point],
        tracks: dict[int, float],
        level: float | None,
    ) -> None:
        gutters = [*self._gutters_of(thread)]
        source, target = self._ends(thread)
        if source > target:
            gutters.reverse()
        points = [*start]
        y = start[-1][1]
        for i, number in enumerate(gutters):
            points.append((tracks[number], y))
            if i + 1 < len(gutters):
                y = self._between_rows(max(number, gutters[i + 1]) - 1, y)
                points.append((tracks[number], y))
        entry = stop[-1][1]
        number = gutters[-1]
        if level is not None:
            points += self._labelled(thread, number, tracks[number], level, source < target)
        else:
            points.append((tracks[number], entry))
        last_x = points[-1][0]
        if level is not None:
            points.append((last_x, entry))
        points += stop[::-1]
        self.picture.lines.append(Line(_rounded(points), thread, True, True))

    def _labelled(
        self, thread: Arrow, number: int, track: float, level: float, from_left: bool
    ) -> list[Point]:
        """The way past a thread's label; puts the label there."""
        text = self._label_text(thread)
        width = text_width(text, LINE)
        left, right = self._gutters[number]
        end = right - 6 if from_left else left + _GUTTER / 2
        x = right - 10 - width
        self.picture.labels.append(Label(x, level, text, thread))
        if from_left:
            return [(track, level), (end, level)]
        return [(track, level)]

    def _between_rows(self, column: int, y: float) -> float:
        """The height nearest to y at which a column has a gap between two rows."""
        stage = next(s for s in self.stages if s.inside.block is self.outline.columns[column])
        inside = stage.inside
        gaps = [
            stage.at((inside.end(r) + inside.tops[r + 1]) / 2)
            for r in range(1, len(inside.tops) - 2)
        ]
        gaps += [stage.at(-GAP / 4), stage.at(inside.height + GAP / 4)]
        return min(gaps, key=lambda gap: abs(gap - y))

    # --- the page

    def _fit(self) -> None:
        """Measures the page, and puts the columns' names above all."""
        picture = self.picture
        ys = [y for spot in self.spots.values() for y in (spot.y, spot.y + spot.height)]
        for line in picture.lines:
            ys += [step[1][-1] for step in line.steps if line.thread]
        ys += [label.y + side * LABEL / 2 for label in picture.labels for side in (-1, 1)]
        top, bottom = min(ys, default=0.0), max(ys, default=0.0)
        picture.top = top - COLUMN_HEAD - MARGIN
        picture.width = self._gutters[-1][1] + MARGIN
        picture.height = bottom + MARGIN - picture.top
        for number, column in enumerate(self.outline.columns):
            x = self._gutters[number][1]
            picture.headings.append(Heading(x, picture.top + MARGIN + 8, column))


def _track_order(plan: tuple[Arrow, list[Point], list[Point]]) -> tuple[int, float]:
    """Threads that go down: the lower ones first. Those that go up: the upper ones first."""
    begin, end = plan[1][-1][1], plan[2][-1][1]
    return (0, -begin) if end > begin else (1, begin)


def _step(count: int, width: float) -> float:
    return 0.0 if count < 2 else min(_SPREAD, (width - 20) / (count - 1))


def _smooth(points: Sequence[tuple[float, float, float]]) -> tuple[Step, ...]:
    """A line through (x, top, bottom) of each place: straight in the rows, curved between."""
    x, top, bottom = points[0]
    steps: list[Step] = [("M", (x, top))]
    if top != bottom:
        steps.append(("L", (x, bottom)))
    for next_x, next_top, next_bottom in points[1:]:
        if abs(next_x - x) < 0.05:
            steps.append(("L", (next_x, next_top)))
        else:
            middle = (bottom + next_top) / 2
            steps.append(("C", (x, middle, next_x, middle, next_x, next_top)))
        if next_bottom != next_top:
            steps.append(("L", (next_x, next_bottom)))
        x, bottom = next_x, next_bottom
    return tuple(steps)


def _rounded(points: Sequence[Point], radius: float = 6.0) -> tuple[Step, ...]:
    """A line of level and upright stretches with round corners."""
    kept = [points[0]]
    for point in points[1:]:
        if abs(point[0] - kept[-1][0]) + abs(point[1] - kept[-1][1]) > 0.05:
            kept.append(point)
    steps: list[Step] = [("M", kept[0])]
    for before, corner, after in zip(kept, kept[1:], kept[2:], strict=False):
        reach = min(radius, _distance(before, corner) / 2, _distance(corner, after) / 2)
        enter, leave = _towards(corner, before, reach), _towards(corner, after, reach)
        steps += [("L", enter), ("C", (*corner, *corner, *leave))]
    steps.append(("L", kept[-1]))
    return tuple(steps)


def _distance(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(a: Point, b: Point, reach: float) -> Point:
    length = _distance(a, b) or 1.0
    return a[0] + (b[0] - a[0]) * reach / length, a[1] + (b[1] - a[1]) * reach / length
