"""Converts a graph to its outline: nested blocks of boxes, with arrows between them.

`flat_graph.py` inlines bodies, `nesting.py` groups consecutive operations of one scope into blocks,
`repeats.py` folds repeated blocks. This module runs the three and turns links between units into
arrows between boxes. Links from one copy of a repeated block to another are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gradtools.seeing.graphs.attributes import call_text, mark_text
from gradtools.seeing.graphs.flat_graph import BlockGroup, FlatGraph, Link, Unit
from gradtools.seeing.graphs.nesting import in_parts, nested
from gradtools.seeing.graphs.nodes import Node, PlainGraph
from gradtools.seeing.graphs.outline import Arrow, Block, Box, Outline, value_text
from gradtools.seeing.graphs.repeats import Folding
from gradtools.seeing.graphs.value_letters import Letters, stand_in

FOLD_FROM = 40  # boxes; smaller graphs are not folded


def shown(
    graph: PlainGraph,
    *,
    depth: int | None = None,
    expand: str | Iterable[str] = (),
    fold: bool | None = None,
    title: str = "",
    limit: int = 44,
) -> tuple[Outline, frozenset[int]]:
    """The outline and the keys of its open blocks; options of `drawing.to_svg`, limit in boxes."""
    outline = outline_of(graph, fold=fold, expand=expand, title=title)
    return outline, outline.opened(depth, expand, limit)


def outline_of(
    graph: PlainGraph,
    *,
    fold: bool | None = None,
    expand: str | Iterable[str] = (),
    title: str = "",
) -> Outline:
    """The outline of a graph.

    Args:
        graph: The graph.
        fold: Whether repeated parts are drawn once; None means from `FOLD_FROM` boxes on.
        expand: Names of blocks. A repeated part is not folded if one of its copies is named without
    ``*``.
        title: The picture's title.

    Returns:
        An `Outline` with one column for each pass.
    """
    patterns = (expand,) if isinstance(expand, str) else tuple(expand)
    flat = FlatGraph(graph)
    blocks = nested(flat)
    if fold if fold is not None else len(flat.units) > FOLD_FROM:
        folding = Folding(flat, patterns)
        blocks = [folding.block(block) for block in blocks]
        alias, copies = folding.alias, folding.copies
        blocks = [in_parts(block) for block in blocks]
    else:
        alias, copies = {}, {}
    numbers = iter(range(len(flat.units), 10**9))
    letters = Letters(flat, blocks, alias)
    columns = tuple(_frozen(flat, block, numbers, letters) for block in blocks)
    arrows, values = _arrows(flat, alias, copies), dict(enumerate(flat.values))
    return Outline(columns, arrows, values, title, frozenset(flat.alive))


def _frozen(flat: FlatGraph, group: BlockGroup, numbers: Iterator[int], letters: Letters) -> Block:
    children = tuple(
        _frozen(flat, item, numbers, letters)
        if isinstance(item, BlockGroup)
        else _box(flat, item, letters)
        for item in group.children
    )
    path = ".".join(group.scope) or group.title
    key = next(numbers)
    title, phase, mark = group.title, group.phase, group.mark
    made, given = letters.around(group)
    return Block(
        *(key, group.kind, title, path, phase, children, group.count, mark), made=made, given=given
    )


def _box(flat: FlatGraph, unit: Unit, letters: Letters) -> Box:
    alert = next((link.cut for link in flat.entering(unit.key) if link.cut), "")
    made, given = letters.made(unit), tuple(letters.operands(unit))
    if unit.node is None or unit.value is not None:
        lines = (value_text(unit.value),) if unit.value else ()
        return Box(
            *(unit.key, unit.kind, unit.name, lines, unit.phase),
            alert=alert,
            made=made,
            call=", ".join(given),
        )
    node = unit.node
    lines = [unit.name] if unit.name else []
    lines += [value_text(value) for value in unit.outputs[:2]]
    lines += [f"and {len(unit.outputs) - 2} more"] if len(unit.outputs) > 2 else []
    return Box(
        *(unit.key, unit.kind, node.operation, tuple(lines), node.phase, mark_text(node), alert),
        hint=_hint(node),
        made=made,
        call=call_text(node, given, flat.shape_of(unit)),
        named=bool(unit.name),
    )


def _hint(node: Node) -> str:
    native = node.native if node.native != node.operation else ""
    where = f"{node.source}: {node.source.text}" if node.source else ""
    return "\n".join(filter(None, (native, ".".join(node.scope), where)))


def _arrows(
    flat: FlatGraph, alias: Mapping[int, int], copies: Mapping[int, Mapping[int, int]]
) -> tuple[Arrow, ...]:
    """One arrow for each pair of units that are drawn; links between the same pair are merged."""
    groups: dict[tuple[int, int], list[Link]] = {}
    for link in flat.links:
        source, target = (_copies_of(alias, copies, key) for key in (link.source, link.target))
        if all(target.get(number, copy) == copy for number, copy in source.items()):
            pair = stand_in(alias, link.source), stand_in(alias, link.target)
            groups.setdefault(pair, []).append(link)
    return tuple(_arrow(flat, pair, links) for pair, links in groups.items())


def _arrow(flat: FlatGraph, pair: tuple[int, int], links: list[Link]) -> Arrow:
    cuts = [link.cut for link in links]
    return Arrow(
        *pair,
        frozenset(link.value for link in links),
        flat.units[pair[1]].phase > flat.units[pair[0]].phase,
        max(link.strength for link in links),
        None if None in cuts else cuts[0],
    )


def _copies_of(
    alias: Mapping[int, int], copies: Mapping[int, Mapping[int, int]], key: int
) -> dict[int, int]:
    """The copy's index, for each repeated part that contains the unit."""
    result = dict(copies.get(key, {}))
    while key in alias:
        key = alias[key]
        result = {**copies.get(key, {}), **result}
    return result
