"""Formats a graph as text for terminals, Mermaid and Graphviz.

In terminal text, letters name the values. A line contains an assignment, the shape of the value
and, if the value is saved for a later pass, its size in bytes::

    forward
      a = argument 0           8×4 float32
      b = tanh(a)              8×4 float32   kept: 128 B
"""

from __future__ import annotations

from gradtools.seeing.graphs.nodes import Dependence, PlainGraph
from gradtools.seeing.graphs.outline import Block, Box, counted
from gradtools.seeing.graphs.outlining import outline_of
from gradtools.seeing.pictures.box_text import card_of, short, shown
from gradtools.seeing.pictures.palette import LIGHT

_FIT = 90  # maximum number of drawn operations and collapsed blocks
_WIDEST = 56  # maximum width of the column of assignments, in characters


def to_text(graph: PlainGraph, *, depth: int | None = None, title: str = "") -> str:
    """Formats a graph as text for a terminal; see `to_svg` for the options."""
    outline = outline_of(graph, title=title)
    opened = outline.opened(depth, limit=_FIT)
    kept: dict[int, set[int]] = {}
    for arrow in outline.seen_arrows(opened):
        if arrow.saved:
            kept.setdefault(arrow.source, set()).update(arrow.values)
    lines: list[tuple[str, str, str]] = []  # (assignment, shape, notes)
    for event, depth, item in outline.drawn(opened):
        indent, mark = "  " * depth, f"◆ {item.mark}" if item.mark else ""
        notes = [mark, f"kept: {outline.kept_text(kept[item.key])}" if item.key in kept else ""]
        if item.kind == "pass":
            lines += [("", "", "")] if lines and event == "open" else []
            lines += [(item.title, "", "")] if event == "open" else []
        elif event == "open":
            lines.append((f"{indent}▾ {short(item.title)}", "", mark))
        elif isinstance(item, Block) and event == "box":
            call = f"▸ {short(item.title)}({', '.join(item.given.values())})"
            made = f"{', '.join(item.made)} = " if item.made else ""
            notes += [counted(item.operations, "operation"), *item.lines[1:]]
            lines.append((f"{indent}{made}{call}", "", "  ".join(filter(None, notes))))
        elif isinstance(item, Box):
            arrow_to = "→ " if item.kind == "output" else ""
            notes = [shown(item.name), *notes, f"✕ {item.alert}" if item.alert else ""]
            text = f"{indent}{arrow_to}{shown(item.heading)}"
            lines.append((text, ", ".join(item.sizes), "  ".join(filter(None, notes))))
    left = min(max((len(text) for text, sizes, _ in lines if sizes), default=0), _WIDEST)
    width = max((len(sizes) for _, sizes, _ in lines), default=0)
    padded = [
        f"{text:{left}}{'   ' if sizes else ''}{sizes:{width}}   {notes}".rstrip()
        for text, sizes, notes in lines
    ]
    return "\n".join([*([outline.title, ""] if outline.title else []), *padded])


# --- Mermaid -----------------------------------------------------------------------------

_SHAPES = {"input": ("([", "])"), "output": ("([", "])"), "captured": ("[/", "/]")}
_SAFE = " .,_-+=×…▸→'?✕≠∂"


def to_mermaid(graph: PlainGraph, *, depth: int | None = None, title: str = "") -> str:
    """Formats a graph as a Mermaid flowchart for Markdown; see `to_svg` for the options."""
    outline = outline_of(graph, title=title)
    opened = outline.opened(depth)
    arrows = outline.seen_arrows(opened)
    lines = ["---", f"title: {_in_mermaid(outline.title)}", "---"] if outline.title else []
    lines += ["flowchart TD"]
    for event, depth, item in outline.drawn(opened):
        indent = "  " * (depth + 1)
        if event == "close":
            lines.append(f"{indent}end")
        elif event == "open":
            lines.append(f"{indent}subgraph s{item.key}[{_in_mermaid(short(item.title))}]")
            if item.phase % 2 and item.kind == "pass":
                lines.append(f"{indent}  direction BT")
        else:
            text = _in_mermaid(*(row.text for row in card_of(item).rows))
            opens, closes = _SHAPES.get(item.kind, ("[", "]"))
            if isinstance(item, Block):
                opens, closes = "[[", "]]"
            style = "alert" if isinstance(item, Box) and item.alert else f"pass{item.phase % 3}"
            lines.append(f"{indent}n{item.key}{opens}{text}{closes}:::{style}")
    for arrow in arrows:
        line = "-->" if arrow.strength == Dependence.DIFFERENTIABLE else "-.->"
        if arrow.cut:
            line = f"-- {_in_mermaid('✕ ' + arrow.cut)} --x"
        elif arrow.saved:
            line = f"-. {_in_mermaid(outline.kept_text(arrow.values))} .->"
        lines.append(f"  n{arrow.source} {line} n{arrow.target}")
    for number, (edge, fill) in enumerate(LIGHT.passes):
        lines.append(f"  classDef pass{number} fill:{fill},stroke:{edge},color:{LIGHT.ink}")
    fill, cut = LIGHT.passes[0][1], LIGHT.cut
    lines.append(f"  classDef alert fill:{fill},stroke:{cut},color:{cut},stroke-width:2px")
    for number, arrow in enumerate(arrows):
        if arrow.cut:
            lines.append(f"  linkStyle {number} stroke:{cut},stroke-width:2px")
    return "\n".join(lines) + "\n"


def _in_mermaid(*lines: str) -> str:
    """Quotes a label for Mermaid; escapes special characters as ``#code;``."""
    safe = lambda x: x if x.isalnum() or x in _SAFE else f"#{ord(x)};"
    return '"{}"'.format("<br/>".join("".join(map(safe, shown(line))) for line in lines))


# --- Graphviz ----------------------------------------------------------------------------


def to_dot(graph: PlainGraph, *, depth: int | None = None, title: str = "") -> str:
    """Formats a graph in the DOT language of Graphviz; see `to_svg` for the options."""
    outline = outline_of(graph, title=title)
    opened = outline.opened(depth)
    lines = [
        "digraph gradtools {",
        f"  graph [fontname=monospace, fontsize=11, newrank=true, label={_in_dot(outline.title)},",
        '         labelloc=t, ranksep=0.4, nodesep=0.3, bgcolor="white"];',
        '  node [shape=box, style="rounded,filled", fontname=monospace, fontsize=11];',
        "  edge [fontname=monospace, fontsize=9, arrowsize=0.7];",
    ]
    phases: dict[int, int] = {}
    for event, depth, item in outline.drawn(opened):
        indent, phases[item.key] = "  " * (depth + 1), item.phase
        colour, fill = LIGHT.passes[item.phase % 3]
        if event == "close":
            lines.append(f"{indent}}}")
        elif event == "open":
            style = f'style=rounded, color="{colour}80", fontcolor="{colour}"'
            lines.append(f"{indent}subgraph cluster_{item.key} {{")
            lines.append(f"{indent}  graph [label={_in_dot(short(item.title))}, {style}];")
        else:
            text = "\n".join(row.text for row in card_of(item).rows)
            looks = [f"label={_in_dot(text)}", f'color="{colour}"', f'fillcolor="{fill}"']
            if isinstance(item, Block):
                looks.append("penwidth=1.6")
            elif item.kind == "captured":
                looks.append('style="rounded,filled,dashed"')
            elif item.kind != "operation":
                looks.append("shape=oval")
            looks += ["penwidth=2"] if item.mark else []
            hint = item.path if isinstance(item, Block) else item.hint
            looks += [f"tooltip={_in_dot(hint)}"] if hint else []
            lines.append(f"{indent}n{item.key} [{', '.join(looks)}];")
    for arrow in outline.seen_arrows(opened):
        looks = [f'color="{LIGHT.passes[phases[arrow.source] % 3][0]}"']
        if arrow.cut:
            looks = [f'color="{LIGHT.cut}"', "penwidth=2", f'fontcolor="{LIGHT.cut}"']
            looks.append(f"label={_in_dot('✕ ' + arrow.cut)}")
        elif arrow.strength == Dependence.ZERO_DERIVATIVE:
            looks = [f'color="{LIGHT.line}"', "style=dotted"]
        elif arrow.strength < Dependence.ZERO_DERIVATIVE:
            looks = [f'color="{LIGHT.line}"']
        if arrow.saved:
            size = _in_dot(outline.kept_text(arrow.values))
            looks += ["style=dashed", "constraint=false", f"label={size}"]
        lines.append(f"  n{arrow.source} -> n{arrow.target} [{', '.join(looks)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _in_dot(text: str) -> str:
    """Quotes a label for Graphviz, with centered lines."""
    lines = [shown(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"{}"'.format("\\n".join(lines).replace("&", "&amp;"))
