"""A graph as a Mermaid flowchart, which Markdown pages and notebooks draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradtools.seeing.graphs import outlining
from gradtools.seeing.graphs.nodes import Dependence, PlainGraph
from gradtools.seeing.graphs.outline import Arrow, Block, Box, Outline
from gradtools.seeing.pictures.box_text import card_of, short, shown
from gradtools.seeing.pictures.palette import LIGHT

_SHAPES = {"input": ("([", "])"), "output": ("([", "])"), "captured": ("[/", "/]")}


def to_mermaid(graph: PlainGraph, **view: Any) -> str:
    """A graph as a Mermaid flowchart; the options are those of `drawing.to_svg`."""
    outline, opened = outlining.shown(graph, **view)
    arrows = outline.seen_arrows(opened)
    lines = ["flowchart TD"]
    for column in outline.columns:
        lines += _subgraph(column, opened, "  ")
    lines += [_arrow(outline, arrow) for arrow in arrows]
    lines += _styles(arrows)
    heading = ["---", f"title: {quoted(outline.title)}", "---"] if outline.title else []
    return "\n".join([*heading, *lines]) + "\n"


def _subgraph(block: Block, opened: frozenset[int], indent: str) -> Iterator[str]:
    yield f"{indent}subgraph s{block.key}[{quoted(short(block.title))}]"
    if block.phase % 2 and block.kind == "pass":
        yield f"{indent}  direction BT"
    for child in block.children:
        if isinstance(child, Block) and child.key in opened:
            yield from _subgraph(child, opened, indent + "  ")
        else:
            yield indent + "  " + _node(child)
    yield indent + "end"


def _node(item: Box | Block) -> str:
    text = quoted("<br/>".join(safe(row.text) for row in card_of(item).rows), escaped=True)
    opens, closes = _SHAPES.get(item.kind, ("[", "]"))
    if isinstance(item, Block):
        opens, closes = "[[", "]]"
    style = "alert" if isinstance(item, Box) and item.alert else f"pass{item.phase % 3}"
    return f"n{item.key}{opens}{text}{closes}:::{style}"


def _arrow(outline: Outline, arrow: Arrow) -> str:
    pair = f"n{arrow.source} {{}} n{arrow.target}"
    if arrow.cut:
        return "  " + pair.format(f"-- {quoted('✕ ' + arrow.cut)} --x")
    if arrow.saved:
        size = quoted(outline.kept_text(arrow.values))
        return "  " + pair.format(f"-. {size} .->")
    return "  " + pair.format("-->" if arrow.strength == Dependence.DIFFERENTIABLE else "-.->")


def _styles(arrows: list[Arrow]) -> Iterator[str]:
    for number, (edge, fill) in enumerate(LIGHT.passes):
        yield f"  classDef pass{number} fill:{fill},stroke:{edge},color:{LIGHT.ink}"
    fill = LIGHT.passes[0][1]
    yield f"  classDef alert fill:{fill},stroke:{LIGHT.cut},color:{LIGHT.cut},stroke-width:2px"
    for number, arrow in enumerate(arrows):
        if arrow.cut:
            yield f"  linkStyle {number} stroke:{LIGHT.cut},stroke-width:2px"


def quoted(text: str, escaped: bool = False) -> str:
    """A text as a quoted label, with the special characters of Mermaid and HTML escaped."""
    return f'"{text if escaped else safe(text)}"'


def safe(text: str) -> str:
    """Escapes the special characters of Mermaid and HTML as ``#code;``."""
    return "".join(
        letter if letter.isalnum() or letter in _PLAIN else f"#{ord(letter)};"
        for letter in shown(text)
    )


_PLAIN = " .,_-+=×…▸→'?✕≠∂"
