"""The picture as SVG, with no other program: one element for each box, frame and line.

The text of each box is in the card that its room was measured for. Colours come from a style sheet
in the picture itself, so it follows the reader's light or dark setting; arrowheads are plain
shapes, so that several pictures on one page share no names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from gradtools.errors import GradtoolsError
from gradtools.seeing.cards import LINE, Card, short, shown, text_width
from gradtools.seeing.collapse import outline_of
from gradtools.seeing.graph import Dependence, Graph
from gradtools.seeing.layout import Frame, Placed
from gradtools.seeing.outline import Arrow, Block, Box, Outline, value_text
from gradtools.seeing.palette import style_sheet
from gradtools.seeing.picture import fitted, picture_of
from gradtools.seeing.scene import MARGIN, Label, Line, Picture

_HEAD = 7.0  # the length of an arrowhead
_KEY_ROW = 20.0


def to_svg(
    graph: Graph,
    *,
    depth: int | None = None,
    expand: str | Iterable[str] = (),
    fold: bool | None = None,
    theme: str = "auto",
    engine: str = "gradtools",
    title: str = "",
) -> str:
    """A graph as a picture.

    Args:
        graph: The graph.
        depth: How many levels of blocks are open; None: as many as fit one screen.
        expand: Names of blocks to open in any case, such as "layers.3.attention" or "*.attention".
        fold: Whether repeated blocks are drawn once with their count; None: in large graphs.
        theme: "light", "dark", or "auto": as the reader's system is set.
        engine: "gradtools", or "graphviz" for the layout of an installed `dot`.
        title: What stands above the picture.

    Returns:
        An SVG document.

    Raises:
        GradtoolsError: an unknown theme or engine; `dot` is asked for and not installed.
    """
    _choice("theme", theme, ("auto", "light", "dark"))
    _choice("engine", engine, ("gradtools", "graphviz"))
    if engine == "graphviz":
        from gradtools.seeing.dot import drawn_by_graphviz

        return drawn_by_graphviz(graph, depth=depth, expand=expand, fold=fold, title=title)
    outline = outline_of(graph, fold=fold, expand=expand, title=title)
    if depth is None:
        return drawn(fitted(outline, expand), theme)
    return svg_of(outline, outline.opened(depth, expand), theme)


def _choice(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise GradtoolsError(f"to_svg: {name}={given!r} is not known; expected one of {known}.")


def svg_of(outline: Outline, opened: frozenset[int], theme: str = "auto") -> str:
    """An outline as SVG, with some blocks open."""
    return drawn(picture_of(outline, opened), theme)


def drawn(picture: Picture, theme: str = "auto") -> str:
    """A picture as an SVG document."""
    entries = [*_legend(picture)]
    width = max(picture.width, 300.0, text_width(shown(picture.outline.title), 15) + 2 * MARGIN)
    rows = _rows(entries, width - 2 * MARGIN)
    above = 30.0 if picture.outline.title else 0.0
    below = len(rows) * _KEY_ROW + 12 if rows else 0.0
    top, height = picture.top - above, picture.height + above + below
    box = f"0 {_n(top)} {_n(width)} {_n(height)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gt" viewBox="{box}" '
        f'width="{_n(width)}" height="{_n(height)}" role="img" '
        f'aria-label="{_attribute(_summary(picture))}">',
        f"<style>\n{style_sheet(theme)}</style>",
        f'<rect class="paper" x="0" y="{_n(top)}" width="{_n(width)}" height="{_n(height)}"/>',
        *_title(picture, top),
        *body(picture),
        *_key(rows, picture.top + picture.height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def key_of(picture: Picture) -> str:
    """What the colours and lines of a picture mean: a picture for each, so that a page wraps them.

    The styles are those of the page.
    """
    return "".join(_key_entry(entry) for entry in _legend(picture))


def _key_entry(entry: tuple[str, str, str]) -> str:
    size = f'width="{_n(_key_width(entry))}" height="{_n(_KEY_ROW)}"'
    return f'<svg class="gt" {size}>{"".join(_key([[(0.0, entry)]], 2.0, 2.0))}</svg>'


def body(picture: Picture) -> Iterator[str]:
    """Frames, lines, boxes and labels, what is in front last."""
    for heading in picture.headings:
        phase = _p(heading.block.phase)
        yield _text(heading.x, heading.y, heading.block.title, f"heading h{phase}")
    for frame in sorted(picture.frames, key=lambda frame: frame.depth):
        yield from _frame(frame)
    phases = {box.key: box.phase for c in picture.outline.columns for box in (c, *c.walk())}
    for line in sorted(picture.lines, key=lambda line: bool(line.arrow.cut)):
        yield _line(picture.outline, line, phases)
    for placed in picture.boxes:
        yield _box(placed)
    for label in picture.labels:
        yield from _label(label)


def _summary(picture: Picture) -> str:
    names = ", ".join(column.title for column in picture.outline.columns)
    operations = sum(column.operations for column in picture.outline.columns)
    return picture.outline.title or f"A graph of {operations} operations: {names}"


def _title(picture: Picture, top: float) -> Iterator[str]:
    if picture.outline.title:
        text = shown(picture.outline.title)
        yield _text(MARGIN, top + MARGIN + 6, text, "heading", ' style="font-size:15px"')


# --- boxes and frames --------------------------------------------------------------------


def _box(placed: Placed) -> str:
    item = placed.item
    classes = ["box", f"p{_p(item.phase)}"]
    behind = ""
    if isinstance(item, Box):
        classes += ["leaf", item.kind] if item.kind != "operation" else []
        classes += ["differs"] if item.tint else []
        hint = item.hint
        radius = placed.height / 2 if item.kind in ("input", "output") else 5.0
        radius = min(radius, 16.0)
    else:
        classes += ["block"]
        hint, radius = item.path, 5.0
        if item.count > 1:
            behind = _rect(placed.x + 4, placed.y + 4, placed.width, placed.height, 5, "behind")
    classes += ["marked"] if item.mark else []
    card = _rect(placed.x, placed.y, placed.width, placed.height, radius, "card")
    texts = "".join(_card_text(placed.card, placed.x + placed.width / 2, placed.y))
    about = f"<title>{_content(hint)}</title>" if hint else ""
    return f'<g class="{" ".join(classes)}" data-key="{item.key}">{about}{behind}{card}{texts}</g>'


def _card_text(card: Card, middle: float, top: float) -> Iterator[str]:
    for row in card.rows:
        if row.style == "mark":
            width = text_width(row.text, LINE) + 10
            yield _rect(middle - width / 2, top + row.y - 10.5, width, 14, 7, "pill")
        yield _text(middle, top + row.y, row.text, row.style, ' text-anchor="middle"')


def _frame(frame: Frame) -> Iterator[str]:
    classes = f"frame p{_p(frame.block.phase)}"
    name = ("▾ " if frame.block.kind != "pass" else "") + frame.block.name
    yield (
        f'<g class="{classes}" data-key="{frame.block.key}">'
        f"<title>{_content(frame.block.path)}</title>"
        + _rect(frame.x, frame.y, frame.width, frame.height, 8, "around")
        + _text(frame.name_x, frame.y + 17, short(name, 62), f"h{_p(frame.block.phase)} note-name")
        + "</g>"
    )


def _p(phase: int) -> int:
    return phase % 3


# --- lines -------------------------------------------------------------------------------


def look_of(arrow: Arrow, phases: dict[int, int]) -> tuple[str, str]:
    """The classes of a line and of its head."""
    if arrow.cut:
        return "edge cut", "acut"
    number = _p(phases[arrow.source])
    saved = " saved" if arrow.saved else ""
    if arrow.strength == Dependence.ZERO_DERIVATIVE:
        return "edge zero", "azero"
    if arrow.strength < Dependence.ZERO_DERIVATIVE:
        return f"edge data{saved}", "adata"
    return f"edge e{number}{saved}", f"a{number}"


def _line(outline: Outline, line: Line, phases: dict[int, int]) -> str:
    edge, head = look_of(line.arrow, phases)
    path = " ".join(f"{name}{','.join(map(_n, numbers))}" for name, numbers in line.steps)
    ends = f'data-from="{line.arrow.source}" data-to="{line.arrow.target}"'
    parts = [f"<g {ends}><title>{_content(_about(outline, line.arrow))}</title>"]
    parts.append(f'<path class="{edge}" d="{path}"/>')
    if line.head:
        parts.append(f'<path class="{head}" d="{_arrowhead(line)}"/>')
    if line.arrow.cut:
        parts.append(_cross(line))
    return "".join(parts) + "</g>"


def _about(outline: Outline, arrow: Arrow) -> str:
    texts = [value_text(outline.values[v]) for v in sorted(arrow.values)]
    told = ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
    return f"{told}: {arrow.cut}" if arrow.cut else told


def _arrowhead(line: Line) -> str:
    (x, y), (from_x, from_y) = line.end
    length = math.hypot(x - from_x, y - from_y) or 1.0
    dx, dy = (x - from_x) / length, (y - from_y) / length
    back_x, back_y = x - _HEAD * dx, y - _HEAD * dy
    side_x, side_y = -dy * _HEAD * 0.48, dx * _HEAD * 0.48
    corners = ((x, y), (back_x + side_x, back_y + side_y), (back_x - side_x, back_y - side_y))
    return "M" + " L".join(f"{_n(px)},{_n(py)}" for px, py in corners) + " Z"


def _cross(line: Line) -> str:
    """The cross on a cut line, just before its end."""
    (x, y), (from_x, from_y) = line.end
    length = math.hypot(x - from_x, y - from_y) or 1.0
    back = min(14.0, length / 2)
    x, y = x - back * (x - from_x) / length, y - back * (y - from_y) / length
    left, right, upper, lower = (_n(n) for n in (x - 4.2, x + 4.2, y - 4.2, y + 4.2))
    d = f"M{left},{upper} L{right},{lower} M{left},{lower} L{right},{upper}"
    return f'<path class="edge cut" d="{d}"/>'


def _label(label: Label) -> Iterator[str]:
    width = text_width(label.text, LINE) + 6
    style = "alert" if label.arrow.cut else "label"
    yield _rect(label.x - 3, label.y - 7, width, 14, 4, "halo")
    yield _text(label.x, label.y + 3.8, label.text, style)


# --- the key -----------------------------------------------------------------------------


def _legend(picture: Picture) -> Iterator[tuple[str, str, str]]:
    """What appears in the picture and needs a word: (kind, classes, word)."""
    phases = {box.key: box.phase for c in picture.outline.columns for box in (c, *c.walk())}
    boxes = [placed.item for placed in picture.boxes]
    seen = {(_p(box.phase), box.phase) for box in boxes}
    names = ("forward", "backward", "backward of the backward")
    if len(seen) > 1:
        for number, phase in sorted(seen):
            yield "box", f"box p{number}", names[phase] if phase < 3 else f"pass {phase}"
    kinds = {box.kind for box in boxes}
    words = {"input": "input or output", "captured": "parameter or constant"}
    for kind, word in words.items():
        if kind in kinds:
            yield "box", f"box leaf {kind} p0", word
    looks = {look_of(line.arrow, phases)[0] for line in picture.lines}
    saved = max((look for look in looks if "saved" in look), default=None)
    if saved:
        yield "line", saved, "kept for a later pass, with its bytes"
    for look, word in _WORDS:
        if any(look in classes.split() for classes in looks):
            yield "line", f"edge {look}", word
    if any(isinstance(item, Block) and item.count > 1 for item in boxes) or any(
        frame.block.count > 1 for frame in picture.frames
    ):
        yield "", "", "×n: n alike in a row, drawn once"


_WORDS = (
    ("data", "data without a derivative"),
    ("zero", "derivative zero everywhere"),
    ("cut", "✕ the gradient is cut here"),
)


def _rows(
    entries: Iterable[tuple[str, str, str]], width: float
) -> list[list[tuple[float, tuple[str, str, str]]]]:
    rows: list[list[tuple[float, tuple[str, str, str]]]] = []
    x = width
    for entry in entries:
        need = _key_width(entry)
        if x + need > width or not rows:
            rows.append([])
            x = 0.0
        rows[-1].append((x, entry))
        x += need
    return rows


def _key_width(entry: tuple[str, str, str]) -> float:
    return text_width(entry[2], LINE) + (36 if entry[0] else 0) + 18


def _key(rows: Iterable[list[Any]], top: float, left: float = MARGIN) -> Iterator[str]:
    for number, row in enumerate(rows):
        y = top + 8 + number * _KEY_ROW
        for offset, (kind, classes, word) in row:
            x = left + offset
            if kind == "box":
                card = _rect(x, y - 6, 26, 12, 6 if "leaf" in classes else 3, "card")
                yield f'<g class="{classes}">{card}</g>'
            elif kind == "line":
                yield f'<path class="{classes}" d="M{_n(x)},{_n(y)} L{_n(x + 26)},{_n(y)}"/>'
            yield _text(x + (33 if kind else 0), y + 3.8, word, "label")


# --- SVG ---------------------------------------------------------------------------------


def _rect(x: float, y: float, width: float, height: float, radius: float, name: str) -> str:
    return (
        f'<rect class="{name}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" '
        f'height="{_n(height)}" rx="{_n(radius)}"/>'
    )


def _text(x: float, y: float, text: str, name: str, more: str = "") -> str:
    return f'<text class="{name}" x="{_n(x)}" y="{_n(y)}"{more}>{_content(text)}</text>'


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _content(text: str) -> str:
    return escape("\n".join(shown(line) for line in text.split("\n")), quote=False)


def _attribute(text: str) -> str:
    return escape(shown(text), quote=True)
