"""Threads: lines between columns, and those too long for a place in every row.

A thread leaves its box to the side, goes between the rows to the border of its column, up or down
in the gutter between two columns, and in again in the same way, so it never runs through a box.
Residuals are threads, each with its bytes beside the column that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from gradtools.seeing.cards import LINE, text_width
from gradtools.seeing.layout import GAP, rows_near
from gradtools.seeing.outline import Arrow, Outline, size_text
from gradtools.seeing.paths import Point, rounded
from gradtools.seeing.scene import LABEL, SPREAD, Label, Line, Spot, Stage

_TRACK = 7.0  # between two threads in a gutter
_GUTTER = 30.0
_MOST_TRACKS = 40
_MOST_LABELS = 300


class Threads:
    """The threads of a picture.

    Attributes:
        threads: What they stand for, between what is seen.
        gutters: The left and right side of the room before each column and after the last.
        lines: The lines, when they are led.
        labels: What stands beside them.
    """

    def __init__(self, outline: Outline, numbers: Sequence[int], opened: frozenset[int]) -> None:
        arrows = tuple(outline.arrows[number] for number in numbers)
        self.outline, self._count = outline, len(outline.columns)
        self._column_of = {
            item.key: number
            for number, column in enumerate(outline.columns)
            for item in column.walk()
        }
        self.threads = Outline(outline.columns, arrows, outline.values).seen_arrows(opened)
        self.gutters: list[tuple[float, float]] = []
        self.lines: list[Line] = []
        self.labels: list[Label] = []

    def gutter(self, number: int, x: float) -> float:
        """Leaves room between two columns for the threads that run there, and their labels."""
        crossing = [t for t in self.threads if number in self.gutters_of(t)]
        labels = [self.label_text(t) for t in crossing if self.labels_at(t) == number]
        room = max((text_width(text, LINE) + 16 for text in labels), default=0.0)
        tracks = min(len(crossing), _MOST_TRACKS) * _TRACK
        ends = 0 < number < self._count
        width = _GUTTER + tracks + room if crossing else _GUTTER * ends
        self.gutters.append((x, x + width))
        return x + width

    def gutters_of(self, thread: Arrow) -> range:
        """The gutters that a thread passes; that right of its column if it stays in it."""
        source, target = self.ends(thread)
        low, high = min(source, target), max(source, target)
        return range(low + 1, high + 1) if low < high else range(low + 1, low + 2)

    def ends(self, thread: Arrow) -> tuple[int, int]:
        """The columns in which it begins and ends."""
        return self._column_of[thread.source], self._column_of[thread.target]

    def labels_at(self, thread: Arrow) -> int:
        """The gutter in which its label stands: beside the column that it goes into."""
        source, target = self.ends(thread)
        return target if source < target else target + 1

    def label_text(self, thread: Arrow) -> str:
        """What stands beside it: why it is cut, or the bytes that are kept."""
        if thread.cut:
            return f"✕ {thread.cut}"
        return size_text(self.outline.bytes_of(thread.values)) if thread.saved else ""

    def lead(self, spots: Mapping[int, Spot], columns: Sequence[Stage]) -> None:
        """Leads every thread, when all boxes have their places."""
        self._spots, self.columns = spots, columns
        rights, lefts = self._sides()
        plans = []
        for thread in self.threads:
            source, target = self.ends(thread)
            out_right = source <= target
            in_left = source < target
            start = self._way_out(thread.source, 1 if out_right else -1, rights[thread])
            stop = self._way_out(thread.target, -1 if in_left else 1, lefts[thread])
            plans.append((thread, start, stop))
        tracks = self._tracks(plans)
        levels = self._label_levels(plans)
        for thread, start, stop in plans:
            self._thread(thread, start, stop, tracks[thread], levels.get(thread))

    def _sides(self) -> tuple[dict[Arrow, float], dict[Arrow, float]]:
        """How far below the top of its box each thread begins and ends."""
        sides: dict[tuple[int, bool], list[tuple[float, Arrow, bool]]] = {}
        for thread in self.threads:
            source, target = self.ends(thread)
            for key, other, right, out in (
                (thread.source, thread.target, source <= target, True),
                (thread.target, thread.source, source >= target, False),
            ):
                y = self._spots[other].y
                sides.setdefault((key, right), []).append((y, thread, out))
        outs: dict[Arrow, float] = {}
        intos: dict[Arrow, float] = {}
        for (key, _), ends in sides.items():
            height = self._spots[key].height
            step = min(SPREAD, (height - 10) / max(1, len(ends)))
            for i, (_, name, out) in enumerate(sorted(ends, key=itemgetter(0))):
                (outs if out else intos)[name] = height / 2 + (i - (len(ends) - 1) / 2) * step
        return outs, intos

    def _way_out(self, key: int, side: int, y_in: float) -> list[Point]:
        """From a box to the border of its column, between the rows."""
        spot = self._spots[key]
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
    def _is_blocked(stage: Stage, key: int, side: int) -> bool:
        inside = stage.inside
        place = inside.place_of[key]
        row = inside.level.rows[inside.row_of[place]]
        at = row.index(place)
        beyond = row[at + 1 :] if side > 0 else row[:at]
        return any(inside.level.items[other] >= 0 for other in beyond)

    @staticmethod
    def _channel(stage: Stage, key: int) -> float:
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
    ) -> dict[Arrow, dict[int, float]]:
        """Where each thread runs in each gutter: no two in one place, few crossings."""
        found: dict[Arrow, dict[int, float]] = {thread: {} for thread, _, _ in plans}
        for number, (left, _) in enumerate(self.gutters):
            here = [plan for plan in plans if number in self.gutters_of(plan[0])]
            here.sort(key=_track_order)
            step = min(_TRACK, _TRACK * _MOST_TRACKS / max(1, len(here)))
            for i, (thread, _, _) in enumerate(here):
                found[thread][number] = left + _GUTTER / 2 + i * step
        return found

    def _label_levels(
        self, plans: Sequence[tuple[Arrow, list[Point], list[Point]]]
    ) -> dict[Arrow, float]:
        """The height of each label, near to where its thread goes in, none over another."""
        found: dict[Arrow, float] = {}
        if len(plans) > _MOST_LABELS:
            return found
        for number in range(len(self.gutters)):
            here = [
                (stop[-1][1], thread)
                for thread, _, stop in plans
                if self.labels_at(thread) == number and self.label_text(thread)
            ]
            here.sort(key=itemgetter(0))
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
        gutters = [*self.gutters_of(thread)]
        source, target = self.ends(thread)
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
        self.lines.append(Line(rounded(points), thread, True, True))

    def _labelled(
        self, thread: Arrow, number: int, track: float, level: float, from_left: bool
    ) -> list[Point]:
        """The way past a thread's label; puts the label there."""
        text = self.label_text(thread)
        width = text_width(text, LINE)
        left, right = self.gutters[number]
        end = right - 6 if from_left else left + _GUTTER / 2
        x = right - 10 - width
        self.labels.append(Label(x, level, text, thread))
        if from_left:
            return [(track, level), (end, level)]
        return [(track, level)]

    def _between_rows(self, column: int, y: float) -> float:
        """The height nearest to y at which a column has a gap between two rows."""
        stage = self.columns[column]
        inside = stage.inside
        gaps = [
            stage.at((inside.end(r) + inside.tops[r + 1]) / 2)
            for r in range(1, len(inside.tops) - 2)
        ]
        gaps += [stage.at(-GAP / 4), stage.at(inside.height + GAP / 4)]
        return min(gaps, key=lambda gap: abs(gap - y))


def _track_order(plan: tuple[Arrow, list[Point], list[Point]]) -> tuple[int, float]:
    """Threads that go down: the lower ones first. Those that go up: the upper ones first."""
    begin, end = plan[1][-1][1], plan[2][-1][1]
    return (0, -begin) if end > begin else (1, begin)
