"""A graph in Graphviz' language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gradtools.seeing.graphs import outlining
from gradtools.seeing.graphs.nodes import Dependence, PlainGraph
from gradtools.seeing.graphs.outline import Arrow, Block, Box, Outline
from gradtools.seeing.pictures.box_text import card_of, short, shown
from gradtools.seeing.pictures.palette import LIGHT


def to_dot(graph: PlainGraph, **view: Any) -> str:
    """A graph in Graphviz' language; the options are those of `drawing.to_svg`."""
    outline, opened = outlining.shown(graph, **view)
    phases = {item.key: item.phase for c in outline.columns for item in c.walk()}
    arrows = outline.seen_arrows(opened)
    lines = [
        "digraph gradtools {",
        f"  graph [fontname=monospace, fontsize=11, newrank=true, label={quoted(outline.title)},",
        '         labelloc=t, ranksep=0.4, nodesep=0.3, bgcolor="white"];',
        '  node [shape=box, style="rounded,filled", fontname=monospace, fontsize=11];',
        "  edge [fontname=monospace, fontsize=9, arrowsize=0.7];",
        *(line for column in outline.columns for line in _cluster(column, opened, "  ")),
        *(_edge(outline, arrow, phases) for arrow in arrows),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _cluster(block: Block, opened: frozenset[int], indent: str) -> Iterator[str]:
    colour = LIGHT.passes[block.phase % 3][0]
    yield f"{indent}subgraph cluster_{block.key} {{"
    style = f'style=rounded, color="{colour}80", fontcolor="{colour}"'
    yield f"{indent}  graph [label={quoted(short(block.title))}, {style}];"
    for child in block.children:
        if isinstance(child, Block) and child.key in opened:
            yield from _cluster(child, opened, indent + "  ")
        else:
            yield indent + "  " + _node(child)
    yield indent + "}"


def _node(item: Box | Block) -> str:
    edge, fill = LIGHT.passes[item.phase % 3]
    text = "\n".join(row.text for row in card_of(item).rows)
    looks = [f"label={quoted(text)}", f'color="{edge}"', f'fillcolor="{fill}"']
    if isinstance(item, Block):
        looks.append("penwidth=1.6")
    elif item.kind == "captured":
        looks.append('style="rounded,filled,dashed"')
    elif item.kind != "operation":
        looks.append("shape=oval")
    looks += ["penwidth=2"] if item.mark else []
    hint = item.path if isinstance(item, Block) else item.hint
    looks += [f"tooltip={quoted(hint)}"] if hint else []
    return f"n{item.key} [{', '.join(looks)}];"


def _edge(outline: Outline, arrow: Arrow, phases: dict[int, int]) -> str:
    colour = LIGHT.passes[phases[arrow.source] % 3][0]
    looks = [f'color="{colour}"']
    if arrow.cut:
        looks = [f'color="{LIGHT.cut}"', "penwidth=2", f'fontcolor="{LIGHT.cut}"']
        looks.append(f"label={quoted('✕ ' + arrow.cut)}")
    elif arrow.strength == Dependence.ZERO_DERIVATIVE:
        looks = [f'color="{LIGHT.line}"', "style=dotted"]
    elif arrow.strength < Dependence.ZERO_DERIVATIVE:
        looks = [f'color="{LIGHT.line}"']
    if arrow.saved:
        size = outline.kept_text(arrow.values)
        looks += ["style=dashed", "constraint=false", f"label={quoted(size)}"]
    return f"  n{arrow.source} -> n{arrow.target} [{', '.join(looks)}];"


def quoted(text: str) -> str:
    """A text as a quoted string of Graphviz, with centred lines."""
    lines = [shown(line) for line in text.split("\n")]
    safe = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return f'"{re.sub("&", "&amp;", safe)}"'
