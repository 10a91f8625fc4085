"""The layout of an outline: `layout.js` and `markup.js`, run as a reader's browser runs them.

There is one layout, in the language of the page that lays a graph out again whenever a block opens
or closes. QuickJS, a small interpreter, runs it here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from gradtools.seeing.graphs.outline import Block, Box, Outline
from gradtools.seeing.pictures.page_data import data_of
from gradtools.seeing.pictures.row_order import arrange

_SCREEN = 1800.0, 1400.0
_NEARLY = 1.75  # screens: so large is still better than hardly anything to see
_HARDLY = 12  # boxes, where the nearly fitting view has twice as many
_LIMITS = (44, 36, 30, 25, 21, 17, 14, 11, 8, 5, 2)  # boxes
_STACK = 64 << 20  # bytes: blocks may lie a thousand deep in one another
_DRAWN = """
(data) => {
  const G = JSON.parse(data);
  return (opened) => {
    const { spots, ...picture } = layout.layout(G, new Set(JSON.parse(opened)));
    const body = markup.body(G, picture), looks = markup.looks(G, picture);
    return JSON.stringify({ ...picture, body, looks });
  };
}
"""


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn, with its place.

    Attributes:
        outline: What it shows.
        opened: The keys of the blocks that are open.
        data: The outline as data, for a page.
        drawn: What the scripts gave: where each box, frame, line and label stands, and the classes
            of the lines.
        body: All of it as SVG, without a document around it.
    """

    outline: Outline
    opened: frozenset[int]
    data: dict[str, Any]
    drawn: dict[str, Any]
    top: float
    width: float
    height: float
    body: str

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


@cache
def script(name: str) -> str:
    """The text of a script of this folder."""
    return files("gradtools.seeing.pictures").joinpath(name).read_text(encoding="utf-8")


def interpreter() -> Any:
    """A JavaScript context that knows the layout and the markup; it stays in its thread."""
    import quickjs

    context = quickjs.Context()
    context.set_max_stack_size(_STACK)
    context.eval(script("layout.js") + script("markup.js"))
    return context


def picture_of(outline: Outline, opened: frozenset[int]) -> Picture:
    """Lays an outline out, with some blocks open."""
    return _OutlineLayout(outline).picture(opened)


def fitted(outline: Outline, expand: str | Iterable[str] = ()) -> Picture:
    """The picture with as many blocks open as fit one screen.

    One block of all may be what fits; then the view before it is shown, if it nearly fits.
    """
    layout = _OutlineLayout(outline)
    views = dict.fromkeys(outline.opened(None, expand, limit) for limit in _LIMITS)
    nearly: Picture | None = None
    for opened in views:
        picture = layout.picture(opened)
        screens = max(picture.width / _SCREEN[0], picture.height / _SCREEN[1])
        if screens <= _NEARLY and nearly is None:
            nearly = picture
        if screens <= 1:
            break
    shown = len(picture.drawn["boxes"])
    if nearly and shown < _HARDLY and len(nearly.drawn["boxes"]) >= 2 * shown:
        return nearly
    return picture


class _OutlineLayout:
    """An outline that is laid out with one choice of open blocks after another."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.data = data_of(arrange(outline))
        self._context = interpreter()
        self._drawn = self._context.eval(_DRAWN)(json.dumps(self.data))

    def picture(self, opened: frozenset[int]) -> Picture:
        drawn = json.loads(self._drawn(json.dumps(sorted(opened))))
        whole = [drawn.pop(name) for name in ("top", "width", "height", "body")]
        return Picture(self.outline, opened, self.data, drawn, *whole)
