"""Lays out a picture of a graph: boxes, frames, lines and labels with positions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from gradtools.seeing.graphs.outline import Outline
from gradtools.seeing.pictures.box_text import card_of
from gradtools.seeing.pictures.drawing import interpreter
from gradtools.seeing.pictures.page_data import data_of

_DRAWN = """
(data, opened) => {
  const G = JSON.parse(data);
  const view = opened === null ? layout.fitted(G) : { opened: new Set(JSON.parse(opened)) };
  const { spots, ...picture } = view.picture || layout.layout(G, view.opened);
  const body = markup.body(G, picture);
  return JSON.stringify({ ...picture, body, opened: [...view.opened] });
}
"""


@dataclass(frozen=True)
class Scene:
    """A picture of a graph.

    Attributes:
        outline: The outline of the graph.
        drawn: The output of the layout scripts: positions of boxes, frames, lines and labels.
        boxes: The boxes and collapsed blocks, each with `item`, `card`, position and size.
        frames: The expanded blocks, each with `block`, position and size.
    """

    outline: Outline
    drawn: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        """Return an entry of `drawn`, such as the top, width, height or body of the picture."""
        return self.drawn[name]

    @cached_property
    def opened(self) -> frozenset[int]:
        return frozenset(self.drawn["opened"])

    @cached_property
    def boxes(self) -> list[Any]:
        items = self._items()
        cards = [card_of(items[box["key"]]) for box in self.drawn["boxes"]]
        pairs = zip(self.drawn["boxes"], cards, strict=True)
        size = lambda card: {"width": card.width, "height": card.height, "card": card}
        return [SimpleNamespace(**box | size(c), item=items[box["key"]]) for box, c in pairs]

    @cached_property
    def frames(self) -> list[Any]:
        items = self._items()
        return [SimpleNamespace(**f, block=items[f["key"]]) for f in self.drawn["frames"]]

    @cached_property
    def lines(self) -> list[Any]:
        return [SimpleNamespace(**line) for line in self.drawn["lines"]]

    @cached_property
    def labels(self) -> list[Any]:
        return [SimpleNamespace(**label) for label in self.drawn["labels"]]

    def _items(self) -> dict[int, Any]:
        return {x.key: x for column in self.outline.columns for x in (column, *column.walk())}


def picture_of(outline: Outline, opened: frozenset[int] | None) -> Scene:
    """Lay out an outline with the given blocks expanded, or with as many as fit on one screen."""
    keys = None if opened is None else json.dumps(sorted(opened))
    drawn = interpreter().eval(_DRAWN)(json.dumps(data_of(outline)), keys)
    return Scene(outline, json.loads(drawn))


def fitted(outline: Outline) -> Scene:
    """Lay out an outline with as many expanded blocks as fit on one screen."""
    return picture_of(outline, None)
