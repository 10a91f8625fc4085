"""Converts a graph to its outline: nested blocks of boxes, with arrows between them.

`inlining.py` inlines bodies, `nesting.py` groups consecutive operations of one scope into blocks.
This module runs both, names the values, and turns operands into arrows between boxes. The names are
letters, assigned in the order of the whole outline, so that they are the same in the text and in
all pictures of a graph, whichever blocks are open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradtools.seeing.graphs.attributes import call_text
from gradtools.seeing.graphs.inlining import InlinedGraph
from gradtools.seeing.graphs.nesting import in_parts, nested, paths_to
from gradtools.seeing.graphs.nodes import Dependence, PlainGraph
from gradtools.seeing.graphs.outline import Arrow, Block, Box, Operand, Outline, merged


def shown(
    graph: PlainGraph,
    *,
    depth: int | None = None,
    expand: str | Iterable[str] = (),
    title: str = "",
    limit: int = 44,
) -> tuple[Outline, frozenset[int]]:
    """The outline and the keys of its open blocks; options of `drawing.to_svg`, limit in boxes."""
    outline = outline_of(graph, title=title)
    return outline, outline.opened(depth, expand, limit)


def outline_of(graph: PlainGraph, *, title: str = "") -> Outline:
    """The outline of a graph, with one column for each pass."""
    flat = InlinedGraph(graph)
    columns = [in_parts(block) for block in nested(flat)]
    blocks = [b for c in columns for b in (c, *c.walk()) if isinstance(b, Block)]
    for key, block in enumerate(blocks, len(flat.boxes)):
        block.key = key
    _name_values(flat.boxes, columns)
    arrows = [
        Arrow(
            *(maker, box.key, frozenset({operand.number})),
            saved=box.phase > flat.boxes[maker].phase,
            strength=operand.strength,
            cut=operand.cut,
        )
        for box in flat.boxes
        for operand in box.reads
        for maker in dict.fromkeys(key for key, _ in operand.makers)
    ]
    values = dict(enumerate(flat.values))
    return Outline(tuple(columns), tuple(merged(arrows)), values, title, frozenset(flat.alive))


def _name_values(boxes: Sequence[Box], columns: Sequence[Block]) -> None:
    """Writes the letters of values into boxes, and into the blocks whose border they cross."""
    read: dict[int, set[int]] = {}
    for box in boxes:
        for operand in box.operands:
            for key, k in operand.makers:
                read.setdefault(key, set()).add(k)
    paths = paths_to(columns)
    names: dict[tuple[int, int], str] = {}
    for key in paths:
        if boxes[key].kind != "output":
            for k in sorted(read.get(key, {0})):
                names[key, k] = letters(len(names))
    made: dict[Block, dict[str, None]] = {}
    given: dict[Block, dict[str, str]] = {}
    for key, path in paths.items():
        box, texts = boxes[key], []
        for operand in box.operands:
            crossing = {of: names[of] for of in operand.makers if of in names}
            if text := operand.text or "|".join(crossing.values()):
                texts.append(_bracketed(operand, text))
            for of, name in crossing.items():
                for block in paths[of[0]][:-1]:
                    if block not in path:
                        made.setdefault(block, {})[name] = None
                for block in path[:-1]:
                    if block not in paths[of[0]]:
                        given.setdefault(block, {})[name] = _bracketed(operand, name)
        outputs = range(max(read.get(key, {0})) + 1)
        box.made = ", ".join(names.get((key, k), "_") for k in outputs)
        box.call = ", ".join(texts)
        if box.node is not None:
            first = box.operands[0].makers[:1] if box.operands else ()
            shape = next((boxes[maker].values[k].shape for maker, k in first), ())
            box.call = call_text(box.node, texts, shape)
    for block, outside in made.items():
        block.made = tuple(outside)
    for block, inside in given.items():
        block.given = tuple(inside.values())


def _bracketed(operand: Operand, text: str) -> str:
    """An operand's text: ✕ if it loses a derivative, in brackets if none flows through it."""
    if operand.cut:
        return f"✕{text}"
    weak = operand.makers and operand.strength < Dependence.DIFFERENTIABLE
    return f"[{text}]" if weak else text


def letters(number: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    result = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        result = chr(ord("a") + rest) + result
    return result
