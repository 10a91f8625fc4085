"""A picture with boxes, frames, lines and labels as objects, where the layout put them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradtools.seeing.graphs.nodes import Dependence
from gradtools.seeing.graphs.outline import Arrow, Block, Box, Outline
from gradtools.seeing.pictures.box_text import Card, card_of
from gradtools.seeing.pictures.drawing import interpreter
from gradtools.seeing.pictures.page_data import data_of

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


_DRAWN = """
(data, opened) => {
  const G = JSON.parse(data);
  const view = opened === null ? layout.fitted(G) : { opened: new Set(JSON.parse(opened)) };
  const { spots, ...picture } = view.picture || layout.layout(G, view.opened);
  const body = markup.body(G, picture), file = markup.file(G, picture, "");
  return JSON.stringify({ ...picture, body, file, opened: [...view.opened] });
}
"""


@dataclass(frozen=True)
class Scene:
    """A picture, of which every part is an object.

    Attributes:
        outline: What it shows.
        opened: The keys of the blocks that are open.
        drawn: What the scripts gave: where each box, frame, line and label stands.
        body: All of it as SVG, without a document around it.
        file: The document, without a style sheet.
    """

    outline: Outline
    opened: frozenset[int]
    drawn: dict[str, Any]
    top: float
    width: float
    height: float
    body: str
    file: str

    @property
    def items(self) -> list[Box | Block]:
        """What stands in it as a box: boxes and closed blocks."""
        return self._of("boxes")

    @property
    def blocks(self) -> list[Block]:
        """The open blocks, which have a frame."""
        return self._of("frames")

    def _of(self, kind: str) -> list[Any]:
        known = {item.key: item for c in self.outline.columns for item in (c, *c.walk())}
        return [known[found["key"]] for found in self.drawn[kind]]

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


def picture_of(outline: Outline, opened: frozenset[int] | None) -> Scene:
    """An outline laid out with some blocks open; None: as many as fit one screen."""
    said = None if opened is None else json.dumps(sorted(opened))
    found = json.loads(interpreter().eval(_DRAWN)(json.dumps(data_of(outline)), said))
    whole = [found.pop(name) for name in ("top", "width", "height", "body", "file")]
    return Scene(outline, frozenset(found.pop("opened")), found, *whole)


def fitted(outline: Outline) -> Scene:
    """An outline with as many blocks open as fit one screen."""
    return picture_of(outline, None)
