"""An arranged outline as plain data, which layout.js, markup.js and page.js read.

Widths of text are measured here, once; the scripts measure none but those of sizes in bytes,
whose letters are `advance` wide.
"""

from __future__ import annotations

from typing import Any

from gradtools.seeing.graphs.outline import ALIVE, Arrow, Block, Box, value_text
from gradtools.seeing.pictures.box_text import LINE, Row, card_of, short, shown, text_width
from gradtools.seeing.pictures.row_order import Arrangement, Level


def data_of(arrangement: Arrangement) -> dict[str, Any]:
    """An arranged outline as what JSON can hold."""
    outline = arrangement.outline
    items = [item for column in outline.columns for item in (column, *column.walk())]
    return {
        "columns": [column.key for column in outline.columns],
        "items": {item.key: _item(item) for item in items},
        "levels": {key: _level(level) for key, level in arrangement.levels.items()},
        "arrows": [_arrow(arrow) for arrow in outline.arrows],
        "threads": list(arrangement.threads),
        "bytes": [outline.bytes_of([v]) for v in range(len(outline.values))],
        "memory": [outline.memory_of(v) for v in range(len(outline.values))],
        "alive": ALIVE,
        "texts": [_shown(value_text(outline.values[v])) for v in range(len(outline.values))],
        "advance": text_width("0", LINE),
    }


def _item(item: Box | Block) -> dict[str, Any]:
    card = card_of(item)
    result: dict[str, Any] = {
        "kind": item.kind,
        "name": shown(item.title if isinstance(item, Box) else item.name),
        "phase": item.phase,
        "mark": item.mark,
        "rows": [_row(row) for row in card.rows],
        "width": card.width,
        "height": card.height,
    }
    if isinstance(item, Block):
        name = short(item.name)
        width = text_width(name if item.kind == "pass" else f"▾ {name}", LINE)
        result |= {"children": [child.key for child in item.children], "count": item.count}
        result |= {"short": name, "nameWidth": width, "hint": _shown(item.path)}
    else:
        result |= {"hint": _shown(item.hint)}
    words = (result["name"], result["hint"], *(row.text for row in card.rows))
    return result | {"search": " ".join(words).lower()}


def _row(row: Row) -> tuple[str, str, float, float]:
    """Its text, style and baseline, and how wide the pill around a mark is."""
    pill = text_width(row.text, LINE) + 10 if row.style == "mark" else 0.0
    return shown(row.text), row.style, row.y, pill


def _level(level: Level) -> dict[str, Any]:
    return {
        "rows": level.rows,
        "items": level.items,
        "strands": [(strand.places, strand.arrows) for strand in level.strands],
        "in": {f"{block} {number}": p for (block, number), p in level.ports_in.items()},
        "out": {f"{block} {number}": p for (block, number), p in level.ports_out.items()},
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
