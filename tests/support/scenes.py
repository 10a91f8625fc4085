"""A picture with boxes, frames, lines and labels as objects, where the layout put them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradtools.seeing.graphs.nodes import Dependence
from gradtools.seeing.graphs.outline import Arrow, Block, Box
from gradtools.seeing.pictures import layout
from gradtools.seeing.pictures.box_text import Card, card_of

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
        return card_of(self.item)

    @property
    def width(self) -> float:
        return self.card.width

    @property
    def height(self) -> float:
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


class Scene(layout.Picture):
    """A picture, of which every part is an object."""

    @cached_property
    def boxes(self) -> list[Placed]:
        places = [(box["x"], box["y"]) for box in self.drawn["boxes"]]
        return [Placed(item, *at) for item, at in zip(self.items, places, strict=True)]

    @cached_property
    def frames(self) -> list[Frame]:
        names = ("x", "y", "width", "height", "depth", "nameX")
        places = [[frame[name] for name in names] for frame in self.drawn["frames"]]
        return [Frame(block, *at) for block, at in zip(self.blocks, places, strict=True)]

    @cached_property
    def lines(self) -> list[SceneLine]:
        return [_line(line) for line in self.drawn["lines"]]

    @cached_property
    def labels(self) -> list[Label]:
        labels = self.drawn["labels"]
        return [Label(t["x"], t["y"], t["text"], _arrow(t["arrow"])) for t in labels]


def _line(found: dict[str, Any]) -> SceneLine:
    steps = tuple((name, tuple(numbers)) for name, numbers in found["steps"])
    return SceneLine(steps, _arrow(found["arrow"]), found["head"], found["thread"])


def _arrow(found: dict[str, Any]) -> Arrow:
    ends = found["source"], found["target"], frozenset(found["values"])
    return Arrow(*ends, found["saved"], Dependence(found["strength"]), found["cut"])


def _scene(picture: layout.Picture) -> Scene:
    return Scene(**vars(picture))


def picture_of(*how: Any) -> Scene:
    """`layout.picture_of`, as a scene."""
    return _scene(layout.picture_of(*how))


def fitted(*how: Any) -> Scene:
    """`layout.fitted`, as a scene."""
    return _scene(layout.fitted(*how))
