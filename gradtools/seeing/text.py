"""A graph as text for a terminal: one line for each box, blocks indented, passes under each other.

Every value has a letter, as in a program; a line says what is made from what, of which shape, and
what is kept for a later pass::

    forward
      a = argument 0           8×4 float32
      b = tanh(a)              8×4 float32   kept: 128 B
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gradtools.seeing.cards import short, shown
from gradtools.seeing.collapse import outline_of
from gradtools.seeing.graph import Dependence, Graph
from gradtools.seeing.outline import Arrow, Block, Box, Outline, counted, size_text

_FIT = 90  # lines
_WIDEST = 56  # letters before the shape stands


def to_text(
    graph: Graph,
    *,
    depth: int | None = None,
    expand: str | Iterable[str] = (),
    fold: bool | None = None,
    title: str = "",
) -> str:
    """A graph as text; the options are those of `drawing.to_svg`."""
    outline = outline_of(graph, fold=fold, expand=expand, title=title)
    return text_of(outline, outline.opened(depth, expand, _FIT))


def text_of(outline: Outline, opened: frozenset[int]) -> str:
    """An outline as text, with some blocks open."""
    lines = [*_Listing(outline, opened).lines()]
    left = max((len(line.left) for line in lines if line.right), default=0)
    left = min(left, _WIDEST)
    width = max((len(line.right) for line in lines), default=0)
    told = [line.told(left, width) for line in lines]
    return "\n".join([*([outline.title, ""] if outline.title else []), *told])


@dataclass(frozen=True)
class _Text:
    """A line: what is made, of which shape, and what else there is to say."""

    left: str
    right: str = ""
    notes: str = ""

    def told(self, left: int, width: int) -> str:
        gap = "   " if self.right else ""
        return f"{self.left:{left}}{gap}{self.right:{width}}   {self.notes}".rstrip()


class _Listing:
    def __init__(self, outline: Outline, opened: frozenset[int]) -> None:
        self.opened, self.outline = opened, outline
        self.entering: dict[int, list[Arrow]] = {}
        self.kept: dict[int, set[int]] = {}
        for arrow in outline.seen_arrows(opened):
            self.entering.setdefault(arrow.target, []).append(arrow)
            if arrow.saved:
                self.kept.setdefault(arrow.source, set()).update(arrow.values)
        self.names: dict[int, str] = {}

    def lines(self) -> Iterator[_Text]:
        """Every line, the passes one after the other."""
        for number, column in enumerate(self.outline.columns):
            self._name(column)
            if number:
                yield _Text("")
            yield _Text(column.title)
            yield from self._inside(column, 1)

    def _name(self, block: Block) -> None:
        for child in block.children:
            if isinstance(child, Block) and child.key in self.opened:
                self._name(child)
            elif not (isinstance(child, Box) and child.kind == "output"):
                self.names[child.key] = letters(len(self.names))

    def _inside(self, block: Block, depth: int) -> Iterator[_Text]:
        for child in block.children:
            if isinstance(child, Block) and child.key in self.opened:
                yield _Text("  " * depth + "▾ " + short(child.name), "", _marked(child.mark))
                yield from self._inside(child, depth + 1)
            else:
                yield self._line(child, "  " * depth)

    def _line(self, item: Box | Block, indent: str) -> _Text:
        reads = self.entering.get(item.key, [])
        given = ", ".join(self._given(arrow) for arrow in reads if arrow.source in self.names)
        name = self.names.get(item.key, "")
        if isinstance(item, Block):
            left = f"{indent}{name} = ▸ {short(item.name)}({given})"
            return _Text(left, "", self._notes(item))
        *more, last = item.lines or ("",)
        if item.kind == "output":
            return _Text(f"{indent}→ {shown(item.title)} = {given}", last, self._notes(item))
        if item.kind != "operation":
            return _Text(f"{indent}{name} = {shown(item.title)}", last, self._notes(item))
        numbers = [text.removeprefix("with ") for text in more if text.startswith("with ")]
        scope = [text for text in more if not text.startswith("with ")]
        given = ", ".join(filter(None, (given, *numbers)))
        said = "  ".join(filter(None, (*map(shown, scope), self._notes(item))))
        return _Text(f"{indent}{name} = {shown(item.title)}({given})", last, said)

    def _given(self, arrow: Arrow) -> str:
        """An argument; one through which no derivative flows is told by its brackets."""
        name = self.names[arrow.source]
        if arrow.cut:
            return f"✕{name}"
        return f"[{name}]" if arrow.strength < Dependence.DIFFERENTIABLE else name

    def _notes(self, item: Box | Block) -> str:
        kept = self.kept.get(item.key)
        said = [f"kept: {size_text(self.outline.bytes_of(kept))}"] if kept else []
        if isinstance(item, Block):
            said += [counted(item.operations, "operation"), *item.lines[1:]]
        else:
            said += [f"✕ {item.alert}"] if item.alert else []
            said += [f"≠ {item.note}"] if item.note else []
        return "  ".join(filter(None, (_marked(item.mark), *said)))


def _marked(mark: str) -> str:
    return f"◆ {mark}" if mark else ""


def letters(number: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    found = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        found = chr(ord("a") + rest) + found
    return found
