"""Converts an outline to JSON data for layout.js, markup.js and page.js.

The widths of texts are measured in Python, except for byte sizes. The scripts compute the width of
a byte size as `advance` times the number of characters.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from gradtools.seeing.graphs.nodes import memory_of
from gradtools.seeing.graphs.outline import ALIVE, PHASES, Arrow, Block, Box, Outline, value_text
from gradtools.seeing.pictures.box_text import LINE, card_of, short, shown, text_width

_WORDS: dict[int | str, str] = {
    **dict(enumerate(PHASES)),
    "input": "input or output",
    "captured": "parameter or constant",
    "saved": "kept for a later pass, with its bytes",
    "data": "data without a derivative",
    "zero": "derivative zero everywhere",
    "cut": "✕ the gradient is cut here",
}


@cache
def script(name: str) -> str:
    """Reads a script, style sheet or HTML page from this folder."""
    return files("gradtools.seeing.pictures").joinpath(name).read_text(encoding="utf-8")


def data_of(outline: Outline, depth: int | None = None) -> dict[str, Any]:
    """Converts an outline to a dict that can be written as JSON.

    Args:
        outline: The outline of a graph.
        depth: The number of expanded levels of blocks; None expands as many levels as fit on a
            screen.
    """
    views = [outline.opened(depth)]
    while depth is None and 0 < len(views[-1]) < len(outline.blocks):  # collapse one more level
        levels = max(len(outline.around[key]) for key in views[-1])
        views.append(outline.opened(levels - 1))
    items = [item for column in outline.columns for item in (column, *column.walk())]
    names = ", ".join(column.title for column in outline.columns)
    count = sum(column.operations for column in outline.columns)
    return {
        "columns": [column.key for column in outline.columns],
        "items": {item.key: _item(item) for item in items},
        "arrows": [_arrow(arrow) for arrow in outline.arrows],
        "bytes": [outline.bytes_of([v]) for v in range(len(outline.values))],
        "memory": [memory_of(outline.values, v) for v in range(len(outline.values))],
        "alive": ALIVE,
        "views": [sorted(opened) for opened in views],
        "title": {"text": shown(outline.title), "width": text_width(shown(outline.title), 15)},
        "summary": shown(outline.title or f"A graph of {count} operations: {names}"),
        "words": {name: (word, text_width(word, LINE)) for name, word in _WORDS.items()},
        "texts": [_shown(value_text(outline.values[v])) for v in range(len(outline.values))],
        "advance": text_width("0", LINE),
    }


def _item(item: Box | Block) -> dict[str, Any]:
    card, block = card_of(item), dict[str, Any]()
    name, hint = shown(item.title), _shown(item.path if isinstance(item, Block) else item.hint)
    if isinstance(item, Block):
        heading = short(item.title)
        width = text_width(heading if item.kind == "pass" else f"▾ {heading}", LINE)
        children = [child.key for child in item.children]
        block = dict[str, Any](children=children, short=heading, nameWidth=width)
    # width of the rounded frame around a mark
    pills = [text_width(x.text, LINE) + 10 if x.style == "mark" else 0.0 for x in card.rows]
    rows = zip(card.rows, pills, strict=True)
    return {
        "kind": item.kind,
        "name": name,
        "phase": item.phase,
        "mark": item.mark,
        "rows": [(shown(row.text), row.style, row.y, pill) for row, pill in rows],
        "width": card.width,
        "height": card.height,
        **block,
        "hint": hint,
        "search": " ".join((name, hint, *(row.text for row in card.rows))).lower(),
    }


def _arrow(arrow: Arrow) -> dict[str, Any]:
    cut = _shown(arrow.cut) if arrow.cut else None
    return {
        "source": arrow.source,
        "target": arrow.target,
        "values": sorted(arrow.values),
        "saved": arrow.saved,
        "strength": int(arrow.strength),
        "cut": cut,
        "cutWidth": text_width(f"✕ {cut}", LINE) if cut else 0.0,
    }


def _shown(text: str) -> str:
    return "\n".join(map(shown, text.split("\n")))
