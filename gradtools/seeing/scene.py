"""What a picture holds: boxes, frames, lines, labels and headings, each with its place.

`Spot` and `Stage` say where things stand while lines are drawn to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradtools.seeing.arrange import Arrangement
from gradtools.seeing.layout import Frame, Inside, Placed
from gradtools.seeing.outline import Arrow, Block, Outline
from gradtools.seeing.paths import Point, Step

MARGIN = 24.0
COLUMN_HEAD = 34.0
LABEL = 14.0  # the height of a label
SPREAD = 13.0  # between two lines at one side of a box


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


@dataclass
class Spot:
    """A box or open block on the page, and the inside that it stands in."""

    x: float
    y: float
    width: float
    height: float
    column: int
    around: Stage | None


@dataclass
class Stage:
    """The inside of an open block, on the page."""

    inside: Inside
    x: float
    y: float
    flips: bool
    spot: Spot | None
    channels: dict[int, int] = field(default_factory=dict)

    def at(self, along: float) -> float:
        """The y on the page of a place along the flow."""
        return self.y + (self.inside.height - along if self.flips else along)

    def middle(self, place: int) -> float:
        """The x on the page of a place."""
        return self.x + self.inside.x[place]
