"""The layout of an outline: `layout.js` and `markup.js`, run as a reader's browser runs them.

There is one layout, in the language of the page that lays a graph out again whenever a block opens
or closes. QuickJS, a small interpreter, runs it here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from gradtools.seeing.arrange import arrange
from gradtools.seeing.data import data_of
from gradtools.seeing.nodes import Dependence
from gradtools.seeing.outline import Arrow, Block, Outline
from gradtools.seeing.scene import Frame, Label, Picture, Placed, SceneLine

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


@cache
def script(name: str) -> str:
    """The text of a script of this folder."""
    return files("gradtools.seeing").joinpath(name).read_text(encoding="utf-8")


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
    shown = len(picture.boxes)
    if nearly and shown < _HARDLY and len(nearly.boxes) >= 2 * shown:
        return nearly
    return picture


class _OutlineLayout:
    """An outline that is laid out with one choice of open blocks after another."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.data = data_of(arrange(outline))
        self._context = interpreter()
        self._drawn = self._context.eval(_DRAWN)(json.dumps(self.data))
        self._items = {item.key: item for c in outline.columns for item in (c, *c.walk())}

    def picture(self, opened: frozenset[int]) -> Picture:
        result = json.loads(self._drawn(json.dumps(sorted(opened))))
        return Picture(
            self.outline,
            opened,
            self.data,
            tuple(Placed(self._items[b["key"]], b["x"], b["y"]) for b in result["boxes"]),
            tuple(self._frame(frame) for frame in result["frames"]),
            tuple(_line(line) for line in result["lines"]),
            tuple(Label(t["x"], t["y"], t["text"], _arrow(t["arrow"])) for t in result["labels"]),
            result["top"],
            result["width"],
            result["height"],
            result["body"],
            tuple(result["looks"]),
        )

    def _frame(self, found: dict[str, Any]) -> Frame:
        block = self._items[found["key"]]
        assert isinstance(block, Block)
        x, y, width, height = (found[name] for name in ("x", "y", "width", "height"))
        return Frame(block, x, y, width, height, found["depth"], found["nameX"])


def _line(found: dict[str, Any]) -> SceneLine:
    steps = tuple((name, tuple(numbers)) for name, numbers in found["steps"])
    return SceneLine(steps, _arrow(found["arrow"]), found["head"], found["thread"])


def _arrow(found: dict[str, Any]) -> Arrow:
    return Arrow(
        found["source"],
        found["target"],
        frozenset(found["values"]),
        found["saved"],
        Dependence(found["strength"]),
        found["cut"],
    )
