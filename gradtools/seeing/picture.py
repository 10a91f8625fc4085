"""The picture: columns side by side, everything in coordinates of the page, lines drawn through.

A *strand* is a smooth line through its places; *threads* are led around (`threads.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gradtools.seeing.arrange import Arrangement, arrange
from gradtools.seeing.cards import LINE, Card, text_width
from gradtools.seeing.layout import Frame, Inside, Placed, inside_of, port_offset, rows_near
from gradtools.seeing.outline import Arrow, Block, Outline
from gradtools.seeing.paths import smooth
from gradtools.seeing.scene import (
    COLUMN_HEAD,
    LABEL,
    MARGIN,
    SPREAD,
    Heading,
    Line,
    Picture,
    Spot,
    Stage,
)
from gradtools.seeing.threads import Threads

_SCREEN = 1800.0, 1400.0
_NEARLY = 1.25  # screens: so large is still better than hardly anything to see
_HARDLY = 12  # boxes, where the nearly fitting view has twice as many
_LIMITS = (44, 36, 30, 25, 21, 17, 14, 11, 8, 5, 2)  # boxes


def picture_of(outline: Outline, opened: frozenset[int]) -> Picture:
    """Lays an outline out, with some blocks open."""
    return _Drafting(arrange(outline), opened).picture


def fitted(outline: Outline, expand: str | Iterable[str] = ()) -> Picture:
    """The picture with as many blocks open as fit one screen.

    One block of all may be what fits; then the view before it is shown, if it nearly fits.
    """
    arrangement = arrange(outline)
    views = dict.fromkeys(outline.opened(None, expand, limit) for limit in _LIMITS)
    nearly: Picture | None = None
    for opened in views:
        picture = _Drafting(arrangement, opened).picture
        screens = max(picture.width / _SCREEN[0], picture.height / _SCREEN[1])
        if screens <= _NEARLY and nearly is None:
            nearly = picture
        if screens <= 1:
            break
    shown = len(picture.boxes)
    if nearly and shown < _HARDLY and len(nearly.boxes) >= 2 * shown:
        return nearly
    return picture


class _Drafting:
    """Puts columns, boxes and lines on the page."""

    def __init__(self, arrangement: Arrangement, opened: frozenset[int]) -> None:
        self.arrangement, self.opened = arrangement, opened
        self.outline = arrangement.outline
        self.picture = Picture(self.outline, arrangement, opened)
        self.cards: dict[int, Card] = {}
        self.spots: dict[int, Spot] = {}
        self.stages: list[Stage] = []
        self.threads = Threads(self.outline, arrangement.threads, opened)
        self._columns()
        self._strands()
        self._thread()
        self._fit()

    # --- columns

    def _columns(self) -> None:
        stages = [self._column(column) for column in self.outline.columns]
        middles = [self._middles(stage) for stage in stages]
        ties = self._ties()
        for number in range(1, len(stages)):
            self._align(number, stages, middles, ties, range(number))
        for number in range(len(stages)) if self.outline.ties else ():
            self._align(number, stages, middles, ties, range(len(stages)))
        x = MARGIN
        for number, stage in enumerate(stages):
            stage.x = x = self.threads.gutter(number, x)
            self._put(stage, number, 0)
            name = text_width(stage.inside.block.title, LINE) + 30
            x += max(stage.inside.width, name)
        self.threads.gutter(len(stages), x)

    def _column(self, column: Block) -> Stage:
        flips = column.phase % 2 == 1
        inside = inside_of(self.arrangement, column, self.opened, self.cards, flips)
        return Stage(inside, 0.0, MARGIN + COLUMN_HEAD, flips, None)

    def _ties(self) -> list[tuple[int, int]]:
        """What should stand beside each other: the ends of threads, and what was found alike."""
        seen = self.outline.seen_as(self.opened)
        ties = [(thread.source, thread.target) for thread in self.threads.threads]
        return ties + [(seen[one], seen[two]) for one, two in self.outline.ties]

    def _middles(self, stage: Stage) -> dict[int, tuple[int, float]]:
        """The row and the middle, on the page, of everything in a column."""
        inside = stage.inside
        return {
            inner: (inside.row_of[place], y)
            for key, place in inside.place_of.items()
            for inner, y in self._heights(inside, key, stage, place)
        }

    def _align(
        self,
        number: int,
        stages: Sequence[Stage],
        middles: list[dict[int, tuple[int, float]]],
        ties: Iterable[tuple[int, int]],
        others: Iterable[int],
    ) -> None:
        """Moves a column's rows near to what they are tied to in other columns."""
        own = middles[number]
        known = {key: y for k in others if k != number for key, (_, y) in middles[k].items()}
        pulls = []
        for one, two in ties:
            if one in own and two in known:
                pulls.append((own[one][0], known[two] - own[one][1]))
            elif two in own and one in known:
                pulls.append((own[two][0], known[one] - own[two][1]))
        if pulls:
            self._move_rows(stages[number], pulls)
            middles[number] = self._middles(stages[number])

    def _heights(
        self, inside: Inside, key: int, stage: Stage, place: int
    ) -> Iterator[tuple[int, float]]:
        """The middle on the page of everything that stands in a place of a column."""
        top = inside.tops[inside.row_of[place]]
        room = inside.heights[inside.row_of[place]]
        size = inside.sizes[place][1]
        middle = stage.at(top + room / 2)
        yield key, middle
        if key in inside.inner:
            within = inside.inner[key]
            below = Stage(within, 0.0, middle - size / 2, stage.flips, None)
            for child, at in within.place_of.items():
                yield from self._heights(within, child, below, at)

    def _move_rows(self, stage: Stage, pulls: Sequence[tuple[int, float]]) -> None:
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

    def _put(self, stage: Stage, column: int, depth: int) -> None:
        """Puts what stands in a stage on the page, inner stages too."""
        self.stages.append(stage)
        inside = stage.inside
        children = {child.key: child for child in inside.block.children}
        for key, place in inside.place_of.items():
            width, height = inside.sizes[place]
            row = inside.row_of[place]
            y = stage.at(inside.tops[row] + inside.heights[row] / 2) - height / 2
            spot = Spot(stage.middle(place) - width / 2, y, width, height, column, stage)
            self.spots[key] = spot
            child = children[key]
            if key in inside.inner and isinstance(child, Block):
                within = inside.inner[key]
                frame = Frame(child, spot.x, y, width, height, depth, spot.x + within.name_x)
                self.picture.frames.append(frame)
                self._put(Stage(within, spot.x, y, stage.flips, spot), column, depth + 1)
            else:
                self.picture.boxes.append(Placed(child, self.cards[key], spot.x, y))

    # --- strands

    def _strands(self) -> None:
        for stage in self.stages:
            self._strands_of(stage)

    def _strands_of(self, stage: Stage) -> None:
        level, inside = stage.inside.level, stage.inside
        outs, intos = self._spread(stage)
        for number, strand in enumerate(level.strands):
            points = [self._passage(stage, strand.places, i) for i in range(len(strand.places))]
            points[0] = (points[0][0] + outs[number], *points[0][1:])
            points[-1] = (points[-1][0] + intos[number], *points[-1][1:])
            target = level.items[strand.places[-1]]
            head = target >= 0 and target not in inside.inner
            self.picture.lines.append(Line(smooth(points), self._carried(strand.arrows), head))

    @staticmethod
    def _passage(stage: Stage, places: Sequence[int], i: int) -> tuple[float, float, float]:
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

    def _spread(self, stage: Stage) -> tuple[list[float], list[float]]:
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

    # --- the page

    def _thread(self) -> None:
        columns = [stage for stage in self.stages if stage.spot is None]
        self.threads.lead(self.spots, columns)
        self.picture.lines += self.threads.lines
        self.picture.labels += self.threads.labels

    def _fit(self) -> None:
        """Measures the page, and puts the columns' names above all."""
        picture = self.picture
        ys = [y for spot in self.spots.values() for y in (spot.y, spot.y + spot.height)]
        for line in picture.lines:
            ys += [step[1][-1] for step in line.steps if line.thread]
        ys += [label.y + side * LABEL / 2 for label in picture.labels for side in (-1, 1)]
        top, bottom = min(ys, default=0.0), max(ys, default=0.0)
        picture.top = top - COLUMN_HEAD - MARGIN
        picture.width = self.threads.gutters[-1][1] + MARGIN
        picture.height = bottom + MARGIN - picture.top
        for number, column in enumerate(self.outline.columns):
            x = self.threads.gutters[number][1]
            picture.headings.append(Heading(x, picture.top + MARGIN + 8, column))


def _step(count: int, width: float) -> float:
    return 0.0 if count < 2 else min(SPREAD, (width - 20) / (count - 1))
