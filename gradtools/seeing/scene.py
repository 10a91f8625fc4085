"""What a picture holds: boxes, frames, lines, labels and headings, each with its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradtools.seeing.cards import Card, card_of
from gradtools.seeing.outline import Arrow, Block, Box, Outline

Point = tuple[float, float]
Step = tuple[str, tuple[float, ...]]  # "M", "L" or "C" with its coordinates


@dataclass(frozen=True)
class Placed:
    """A box, or a closed block, where it stands."""

    item: Box | Block
    x: float
    y: float

    @property
    def card(self) -> Card:
        """Its text."""
        return card_of(self.item)

    @property
    def width(self) -> float:
        """Its width."""
        return self.card.width

    @property
    def height(self) -> float:
        """Its height."""
        return self.card.height


@dataclass(frozen=True)
class Frame:
    """An open block, where it stands; `depth` counts the frames around it."""

    block: Block
    x: float
    y: float
    width: float
    height: float
    depth: int
    name_x: float


@dataclass(frozen=True)
class SceneLine:
    """A line of the picture.

    Attributes:
        steps: Its path: moves, straight lines and cubic curves.
        arrow: What it stands for.
        head: Whether it ends at a box, with an arrowhead; else at a frame.
        thread: Whether it is led around the boxes, between the rows.
    """

    steps: tuple[Step, ...]
    arrow: Arrow
    head: bool
    thread: bool

    @property
    def end(self) -> tuple[Point, Point]:
        """The last point, and the one before it that says from where it comes."""
        flat = [n for _, numbers in self.steps for n in numbers]
        return (flat[-2], flat[-1]), (flat[-4], flat[-3])


@dataclass(frozen=True)
class Label:
    """A piece of text beside a line: its left side and its middle."""

    x: float
    y: float
    text: str
    arrow: Arrow


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn, with its place.

    Attributes:
        outline: What it shows.
        opened: The keys of the blocks that are open.
        data: The outline as data, for a page.
        body: All of it as SVG, without a document around it.
        looks: The classes of its lines.
    """

    outline: Outline
    opened: frozenset[int]
    data: dict[str, Any]
    boxes: tuple[Placed, ...]
    frames: tuple[Frame, ...]
    lines: tuple[SceneLine, ...]
    labels: tuple[Label, ...]
    top: float
    width: float
    height: float
    body: str
    looks: tuple[str, ...]
