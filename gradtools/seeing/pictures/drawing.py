"""The picture as an SVG document: a title, what layout.js and markup.js drew, and a key.

Colours come from a style sheet in the picture itself, so it follows the reader's light or dark
setting; arrowheads are plain shapes, so that several pictures on one page share no names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.collapse import outline_of
from gradtools.seeing.graphs.nodes import PlainGraph
from gradtools.seeing.graphs.outline import Block, Outline
from gradtools.seeing.pictures.box_text import LINE, shown, text_width
from gradtools.seeing.pictures.layout import Picture, fitted, picture_of
from gradtools.seeing.pictures.palette import style_sheet

_MARGIN = 24.0
_KEY_ROW = 20.0


def to_svg(
    graph: PlainGraph,
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
        from gradtools.seeing.pictures.dot import drawn_by_graphviz

        return drawn_by_graphviz(graph, depth=depth, expand=expand, fold=fold, title=title)
    outline = outline_of(graph, fold=fold, expand=expand, title=title)
    opened = None if depth is None else outline.opened(depth, expand)
    return svg_of(outline, opened, expand, theme)


def _choice(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise GradtoolsError(f"to_svg: {name}={given!r} is not known; expected one of {known}.")


def svg_of(
    outline: Outline,
    opened: frozenset[int] | None = None,
    expand: str | Iterable[str] = (),
    theme: str = "auto",
) -> str:
    """An outline as SVG, with some blocks open; None: as many as fit."""
    picture = fitted(outline, expand) if opened is None else picture_of(outline, opened)
    return drawn(picture, theme)


def drawn(picture: Picture, theme: str = "auto") -> str:
    """A picture as an SVG document."""
    entries = [*_legend(picture)]
    width = max(picture.width, 300.0, text_width(shown(picture.outline.title), 15) + 2 * _MARGIN)
    rows = _rows(entries, width - 2 * _MARGIN)
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
        *([picture.body] if picture.body else []),
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


def _summary(picture: Picture) -> str:
    names = ", ".join(column.title for column in picture.outline.columns)
    operations = sum(column.operations for column in picture.outline.columns)
    return picture.outline.title or f"A graph of {operations} operations: {names}"


def _title(picture: Picture, top: float) -> Iterator[str]:
    if picture.outline.title:
        text = shown(picture.outline.title)
        yield _text(_MARGIN, top + _MARGIN + 6, text, "heading", ' style="font-size:15px"')


# --- the key -----------------------------------------------------------------------------


def _legend(picture: Picture) -> Iterator[tuple[str, str, str]]:
    """What appears in the picture and needs a word: (kind, classes, word)."""
    boxes, looks = picture.items, picture.drawn["looks"]
    seen = {(box.phase % 3, box.phase) for box in boxes}
    names = ("forward", "backward", "backward of the backward")
    if len(seen) > 1:
        for number, phase in sorted(seen):
            yield "box", f"box p{number}", names[phase] if phase < 3 else f"pass {phase}"
    kinds = {box.kind for box in boxes}
    words = {"input": "input or output", "captured": "parameter or constant"}
    for kind, word in words.items():
        if kind in kinds:
            yield "box", f"box leaf {kind} p0", word
    saved = max((look for look in looks if "saved" in look), default=None)
    if saved:
        yield "line", saved, "kept for a later pass, with its bytes"
    for look, word in _WORDS:
        if any(look in classes.split() for classes in looks):
            yield "line", f"edge {look}", word
    if any(isinstance(item, Block) and item.count > 1 for item in (*boxes, *picture.blocks)):
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


def _key(rows: Iterable[list[Any]], top: float, left: float = _MARGIN) -> Iterator[str]:
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
