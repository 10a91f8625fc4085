"""Two graphs compared: the same model in both frameworks, or before and after a change.

`alignment.py` says which operations belong together; here each pair is held against the other: the
name, the size and dtype of what comes out, whether a derivative flows, what it is marked with.
Layouts, reshapes and how an operation is made of smaller ones are no difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradtools.errors import GradtoolsError
from gradtools.seeing.differences.alignment import AlignedStep, aligned, forward_alone
from gradtools.seeing.differences.equality import ELSE, GraphPair
from gradtools.seeing.graphs.attributes import are_numbers
from gradtools.seeing.graphs.collapse import outline_of
from gradtools.seeing.graphs.edges import kept_anew, reason, strengths_of
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph, Value
from gradtools.seeing.graphs.outline import Arrow, Block, Outline, counted, size_text, value_text
from gradtools.seeing.graphs.passes import INNER
from gradtools.seeing.pictures import saving


@dataclass(frozen=True)
class Change:
    """An operation of both graphs that is not the same in both.

    Attributes:
        first: It in the first graph.
        second: It in the second.
        what: What differs, each as "dtype: float32 ≠ float64".
    """

    first: Node
    second: Node
    what: tuple[str, ...]


@dataclass(frozen=True)
class GraphDifference:
    """How two graphs differ; true if they do.

    Attributes:
        first: The first graph.
        second: The second.
        names: What they are called.
        matched: Pairs of groups of operations that are the same: one of one graph may be made of
            several of the other.
        changed: The operations of both that are not the same.
        only_a: Those of the first graph alone.
        only_b: Those of the second alone.
        by_name: Those of ``matched`` that are alike by name and shape, and of which no more is
            known: an operation, and what it is made of in the other graph.
    """

    first: PlainGraph
    second: PlainGraph
    names: tuple[str, str]
    matched: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    changed: tuple[Change, ...]
    only_a: tuple[Node, ...]
    only_b: tuple[Node, ...]
    by_name: tuple[Node, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.only_a or self.only_b)

    def __repr__(self) -> str:
        return f"GraphDifference({self.headline()})"

    def __str__(self) -> str:
        told = *self._kept(), *self._unproved(), *self._unread(), *self._told()
        return "\n".join([self.headline(), *told])

    def headline(self) -> str:
        """One line: how much is alike, and how much is not."""
        if not self:
            return f"{counted(len(self.matched), 'step')} matched, no difference"
        one, two = self.names
        parts = [f"{counted(len(self.matched), 'step')} matched"]
        parts += [f"{len(self.changed)} changed"] if self.changed else []
        parts += [f"{len(self.only_a)} only in {one}"] if self.only_a else []
        parts += [f"{len(self.only_b)} only in {two}"] if self.only_b else []
        return ", ".join(parts)

    def _kept(self) -> list[str]:
        kept = [kept_bytes(graph) for graph in (self.first, self.second)]
        if not any(kept):
            return []
        pairs = zip(self.names, kept, strict=True)
        return ["kept for backward: " + ", ".join(f"{name} {size_text(n)}" for name, n in pairs)]

    def _unproved(self) -> list[str]:
        names = dict.fromkeys(node.operation for node in self.by_name)
        return [f"alike by name and shape alone: {', '.join(names)}"] if names else []

    def _unread(self) -> list[str]:
        """Captured arrays whose numbers are not compared: those that have names, or are large."""
        graphs = self.first, self.second
        held = [[g.values[v] for v in g.captured] for g in graphs]
        counts = [sum(1 for x in side if x.shape and not are_numbers(x.name)) for side in held]
        made = [[n for n in g.nodes if n.operation == "constant"] for g in graphs]
        counts = [
            count + sum(1 for n in nodes if not (n.inputs or n.attributes))
            for count, nodes in zip(counts, made, strict=True)
        ]
        if not any(counts):
            return []
        return [f"the numbers in {counted(max(counts), 'captured array')} are not compared"]

    def _told(self) -> list[str]:
        lines = []
        for change in self.changed:
            lines.append(f"≠ {_place(change.first)}: {'; '.join(change.what)}")
        for sign, nodes, name in (("-", self.only_a, 0), ("+", self.only_b, 1)):
            lines += [f"{sign} {_place(node)} (only in {self.names[name]})" for node in nodes]
        return lines

    def to_svg(self, **view: Any) -> str:
        """Both graphs beside each other, what differs marked; `view` as in `Graph.to_svg`.

        Blocks with a difference are open, others closed, unless depth or expand say otherwise.
        """
        from gradtools.seeing.pictures.drawing import svg_of

        theme, depth, expand = _view(view, "to_svg")
        outline = self._outline(expand)
        return svg_of(outline, self._opened(outline, depth, expand), expand, theme)

    def to_html(self, **view: Any) -> str:
        """The same as a page in which blocks open and close."""
        from gradtools.seeing.pictures.page import page_of

        theme, depth, expand = _view(view, "to_html")
        outline = self._outline(expand)
        return page_of(outline, self._opened(outline, depth, expand), expand, theme)

    def save(self, path: str | os.PathLike[str], **view: Any) -> None:
        """Writes a picture (.svg), a page (.html) or the text (.txt), by the suffix."""
        saving.save(self, _FORMS, path, **view)

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        from gradtools.seeing.pictures.page import framed

        return framed(self.to_html())

    def _notes(self, side: int) -> dict[int, tuple[str, str]]:
        alone = f"only in {self.names[side]}"
        notes = {id(node): (("first", "second")[side], alone) for node in self._alone(side)}
        for change in self.changed:
            node = (change.first, change.second)[side]
            notes[id(node)] = ("changed", "; ".join(change.what))
        return notes

    def _alone(self, side: int) -> tuple[Node, ...]:
        return (self.only_a, self.only_b)[side]

    def _outline(self, expand: str | Iterable[str]) -> Outline:
        sides = [
            outline_of(graph, expand=expand, notes=self._notes(side))
            for side, graph in enumerate((self.first, self.second))
        ]
        return beside(sides[0], sides[1], self.names, self.headline(), self._pairs())

    def _pairs(self) -> list[tuple[Node, Node]]:
        """What should stand beside each other: the last of what was matched, what was changed."""
        pairs = [(one[-1], two[-1]) for one, two in self.matched]
        return pairs + [(change.first, change.second) for change in self.changed]

    def _opened(
        self, outline: Outline, depth: int | None, expand: str | Iterable[str]
    ) -> frozenset[int] | None:
        """The blocks around what differs; None, as many as fit, where nothing does."""
        if depth is not None:
            return outline.opened(depth, expand)
        marked = [box.key for column in outline.columns for box in column.boxes if box.tint]
        if not marked:
            return None
        around = {block.key for key in marked for block in outline.around(key)}
        return frozenset(around) | outline.opened(0, expand)


_FORMS: saving.Forms = {
    ".svg": GraphDifference.to_svg,
    ".html": GraphDifference.to_html,
    ".htm": GraphDifference.to_html,
    ".txt": lambda found, **view: f"{found}\n",
}


def graph_diff(a: Any, b: Any, names: tuple[str, str] = ("first", "second")) -> GraphDifference:
    """Two graphs aligned, with what differs; what `gt.graph_diff` returns."""
    for name, graph in (("a", a), ("b", b)):
        if not isinstance(graph, PlainGraph):
            raise GradtoolsError(
                f"graph_diff: {name} must be a Graph, got {type(graph).__name__}. Mend: pass "
                "gradient_graph(f, *args) of each."
            )
    return compared(a, b, names)


def compared(a: PlainGraph, b: PlainGraph, names: tuple[str, str]) -> GraphDifference:
    """How two graphs differ."""
    crossing = _is_crossing(a, b)
    ones, twos = (forward_alone(a), forward_alone(b)) if crossing else (a, b)
    alignment, pair = aligned(ones, twos), GraphPair(ones, twos, crossing)
    of = _owners(a), _owners(b)
    equal = pair.is_equal()
    matched, changed = [], []
    otherwise = {} if equal else pair.held_against(alignment)
    for one, two in alignment.pairs:
        steps = [alignment.first[i] for i in one], [alignment.second[j] for j in two]
        last = steps[0][-1], steps[1][-1]
        what: tuple[str, ...] = ()
        if len(one) == len(two) == 1:
            same = (one, two) in pair.same
            what = _differences(*last, of, equal, equal or same, crossing)
        more = otherwise.get((one, two), ())
        what += tuple(w for w in more if not (what and w == ELSE))
        if what == (ELSE,) and last[0].node.operation != last[1].node.operation:
            what = (f"{last[0].node.operation} ≠ {last[1].node.operation}",)
        if what:
            changed.append(Change(last[0].node, last[1].node, what))
        else:
            groups = tuple(tuple(step.node for step in side) for side in steps)
            matched.append((groups[0], groups[1]))
    alone = [
        tuple(steps[i].node for i in ([] if equal else alignment.left(side)))
        for side, steps in enumerate((alignment.first, alignment.second))
    ]
    if not equal:
        changed += [Change(*nodes, what) for nodes, what in (*pair.loops(), *pair.outputs())]
        if not (changed or alone[0] or alone[1] or pair.by_name) and not pair.is_equal():
            changed += [Change(*nodes, what) for nodes, what in pair.outputs()]
    if crossing:
        missing = _lost_gradients(a, b)
        alone = [(*nodes, *more) for nodes, more in zip(alone, missing, strict=True)]
    by_name = tuple(one[-1] for one, two in matched if {id(one[-1]), id(two[-1])} & pair.by_name)
    only_a, only_b = alone
    return GraphDifference(a, b, names, tuple(matched), tuple(changed), only_a, only_b, by_name)


def _is_crossing(a: PlainGraph, b: PlainGraph) -> bool:
    """Whether the two are of two frameworks."""
    kinds = [{n.native.startswith("aten.") for _, n in g.walk() if n.native} for g in (a, b)]
    return bool(kinds[0] and kinds[1]) and (True in kinds[0]) != (True in kinds[1])


def _lost_gradients(a: PlainGraph, b: PlainGraph) -> list[list[Node]]:
    """Of each graph what makes a gradient of an argument that the other has none of."""
    makers = [{v: n for n in graph.nodes for v in n.outputs} for graph in (a, b)]
    result = []
    for graph, of in zip((a, b), makers, strict=True):
        ends = {graph.values[v].name: of.get(v) for v in graph.outputs}
        result.append({k: n for k, n in ends.items() if "gradient of argument" in k and n})
    return [
        [node for name, node in result[side].items() if name not in result[1 - side]]
        for side in (0, 1)
    ]


def _owners(graph: PlainGraph) -> dict[int, PlainGraph]:
    return {id(node): owner for owner, node in graph.walk()}


def _differences(
    one: AlignedStep,
    two: AlignedStep,
    owners: tuple[Mapping[int, PlainGraph], ...],
    equal: bool,
    same: bool,
    crossing: bool,
) -> tuple[str, ...]:
    """What differs of two operations by themselves, whatever they read."""
    result = []
    if one.name != two.name and not same:
        result.append(f"{one.node.operation} ≠ {two.node.operation}")
    if one.size != two.size and not equal:
        result.append(f"shape: {_first(one)} ≠ {_first(two)}")
    dtypes = [tuple(v.dtype for v in step.outputs[:1]) for step in (one, two)]
    inexact = any(v.is_inexact for step in (one, two) for v in step.outputs[:1])
    renamed = equal and one.name != two.name  # paired by their places alone
    if dtypes[0] != dtypes[1] and (inexact or not crossing) and not renamed:
        result.append(f"dtype: {' '.join(dtypes[0])} ≠ {' '.join(dtypes[1])}")
    marks = ["" if step.node.mark == INNER else step.node.mark for step in (one, two)]
    if marks[0] != marks[1]:
        result.append(f"{marks[0] or 'no mark'} ≠ {marks[1] or 'no mark'}")
    if equal and crossing:
        return tuple(result)
    flows = [_flow(owners[side][id(step.node)], step) for side, step in enumerate((one, two))]
    if flows[0] != flows[1]:
        result.append(f"derivative: {flows[0]} ≠ {flows[1]}")
    return tuple(result)


def _first(step: AlignedStep) -> str:
    return value_text(step.outputs[0]) if step.outputs else "nothing"


def _flow(graph: PlainGraph, step: AlignedStep) -> str:
    """How a derivative flows through a step: the strongest of its links."""
    if not any(value.is_inexact for value in step.outputs):
        return "none"
    strengths = strengths_of(graph, step.node)
    inexact = [
        strength
        for value, strength in zip(step.node.inputs, strengths, strict=True)
        if graph.values[value].is_inexact
    ]
    strongest = max(inexact, default=None)
    if strongest is None:
        return "none"
    cut = strongest == Dependence.CUT and step.node.loss
    return reason(step.node.loss) if cut else str(strongest)


def kept_bytes(graph: PlainGraph) -> int:
    """The bytes that the forward pass keeps anew for later ones."""
    return sum(kept_anew(graph).values())


def _place(node: Node) -> str:
    where = f" at {node.source}" if node.source else ""
    scope = f" in {'.'.join(node.scope)}" if node.scope else ""
    return f"{node.operation}{scope}{where}"


def _view(view: dict[str, Any], name: str) -> tuple[str, int | None, str | Iterable[str]]:
    unknown = sorted(view.keys() - {"theme", "depth", "expand"})
    if unknown:
        raise GradtoolsError(
            f"{name}: a difference is drawn with theme, depth and expand; got {unknown[0]!r}."
        )
    return view.get("theme", "auto"), view.get("depth"), view.get("expand", ())


# --- both beside each other --------------------------------------------------------------


def beside(
    one: Outline,
    two: Outline,
    names: tuple[str, str],
    title: str,
    pairs: Iterable[tuple[Node, Node]] = (),
) -> Outline:
    """Two outlines as one, the columns of the second after those of the first."""
    shift = 1 + max((block.key for block in (*one.columns, *one.blocks)), default=0)
    values = len(one.values)
    columns = [_named(column, names[0], 0) for column in one.columns]
    columns += [_named(column, names[1], shift) for column in two.columns]
    arrows = [*one.arrows, *(_moved(arrow, shift, values) for arrow in two.arrows)]
    all_values = {**one.values, **{k + values: _shown(v, values) for k, v in two.values.items()}}
    ties = tuple(
        (one.keys[id(a)], two.keys[id(b)] + shift)
        for a, b in pairs
        if id(a) in one.keys and id(b) in two.keys
    )
    alive = one.alive | {value + values for value in two.alive}
    return Outline(tuple(columns), tuple(arrows), all_values, title, ties=ties, alive=alive)


def _shown(value: Value, shift: int) -> Value:
    return value if value.base is None else replace(value, base=value.base + shift)


def _named(column: Block, name: str, shift: int) -> Block:
    return replace(_shifted(column, shift), title=f"{name}: {column.title}")


def _shifted(block: Block, shift: int) -> Block:
    children = tuple(
        _shifted(child, shift)
        if isinstance(child, Block)
        else replace(child, key=child.key + shift)
        for child in block.children
    )
    return replace(block, key=block.key + shift, children=children)


def _moved(arrow: Arrow, shift: int, values: int) -> Arrow:
    moved = frozenset(value + values for value in arrow.values)
    return replace(arrow, source=arrow.source + shift, target=arrow.target + shift, values=moved)
