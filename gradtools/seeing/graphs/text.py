"""A graph as text for a terminal: one line for each box, with indented blocks, pass by pass.

Values are named by letters. A line is an assignment with the shape, and with the bytes that are
saved for a later pass::

    forward
      a = argument 0           8×4 float32
      b = tanh(a)              8×4 float32   kept: 128 B
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradtools.seeing.graphs import outlining
from gradtools.seeing.graphs.nodes import PlainGraph
from gradtools.seeing.graphs.outline import Block, Box, Outline, counted
from gradtools.seeing.pictures.box_text import short, shown

_FIT = 90  # lines that blocks are opened for
_WIDEST = 56  # characters; the greatest column of the shapes


def to_text(graph: PlainGraph, **view: Any) -> str:
    """A graph as text; the options are those of `drawing.to_svg`."""
    outline, opened = outlining.shown(graph, limit=_FIT, **view)
    lines = [*_Listing(outline, opened).lines()]
    left = min(max((len(text) for text, sizes, _ in lines if sizes), default=0), _WIDEST)
    width = max((len(sizes) for _, sizes, _ in lines), default=0)
    padded = [
        f"{text:{left}}{'   ' if sizes else ''}{sizes:{width}}   {notes}".rstrip()
        for text, sizes, notes in lines
    ]
    return "\n".join([*([outline.title, ""] if outline.title else []), *padded])


_Line = tuple[str, str, str]  # an assignment, its shape, and notes


class _Listing:
    def __init__(self, outline: Outline, opened: frozenset[int]) -> None:
        self.opened, self.outline = opened, outline
        self.kept: dict[int, set[int]] = {}
        for arrow in outline.seen_arrows(opened):
            if arrow.saved:
                self.kept.setdefault(arrow.source, set()).update(arrow.values)

    def lines(self) -> Iterator[_Line]:
        """All lines, pass by pass."""
        for number, column in enumerate(self.outline.columns):
            if number:
                yield "", "", ""
            yield column.title, "", ""
            yield from self._inside(column, 1)

    def _inside(self, block: Block, depth: int) -> Iterator[_Line]:
        for child in block.children:
            if isinstance(child, Block) and child.key in self.opened:
                yield "  " * depth + "▾ " + short(child.title), "", _marked(child.mark)
                yield from self._inside(child, depth + 1)
            else:
                yield self._line(child, "  " * depth)

    def _line(self, item: Box | Block, indent: str) -> _Line:
        if isinstance(item, Block):
            made, given = ", ".join(item.made), ", ".join(item.given)
            call = f"▸ {short(item.title)}({given})"
            return indent + (f"{made} = {call}" if made else call), "", self._notes(item)
        more, sizes = [item.name] if item.name else [], ", ".join(item.sizes)
        arrow = "→ " if item.kind == "output" else ""
        notes = "  ".join(filter(None, (*map(shown, more), self._notes(item))))
        return f"{indent}{arrow}{shown(item.heading)}", sizes, notes

    def _notes(self, item: Box | Block) -> str:
        kept = self.kept.get(item.key)
        notes = [f"kept: {self.outline.kept_text(kept)}"] if kept else []
        if isinstance(item, Block):
            notes += [counted(item.operations, "operation"), *item.lines[1:]]
        else:
            notes += [f"✕ {item.alert}"] if item.alert else []
        return "  ".join(filter(None, (_marked(item.mark), *notes)))


def _marked(mark: str) -> str:
    return f"◆ {mark}" if mark else ""
