"""Whether two graphs compute the same, and if not, in which operation they begin to differ.

Equal are graphs whose outputs have the same canonical form (`canonical.py`). Where they have not,
each pair of operations that belong together is held against each other as if everything that is
paired before them were the same: operands in their places, constants, attributes, and which axis
of what they read is which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradtools.seeing.differences.alignment import Alignment
from gradtools.seeing.differences.canonical import BRANCHING, Canonical
from gradtools.seeing.differences.canonical_forms import CanonicalExpression, Expressions, Form
from gradtools.seeing.differences.canonical_indexing import counts_from_the_end
from gradtools.seeing.differences.canonical_rules import WRITTEN_OUT
from gradtools.seeing.graphs.attributes import are_numbers, text_of
from gradtools.seeing.graphs.nodes import Node, PlainGraph

ELSE = "computes something else"
Groups = tuple[tuple[int, ...], tuple[int, ...]]


class GraphPair:
    """Two graphs that are compared.

    Args:
        a: One.
        b: The other.
        crossing: Whether they are of two frameworks.
    """

    def __init__(self, a: PlainGraph, b: PlainGraph, crossing: bool) -> None:
        self.graphs, self.crossing = (a, b), crossing
        self.names = _names_of_leaves(a, b)
        self.same: set[Groups] = set()  # pairs of steps that do the same with what they read
        self.by_name: set[int] = set()  # ids of what is held by its name and shape alone
        self._local: list[Canonical] = []
        self._ends: list[tuple[Node, ...]] = []
        self._loose: list[Canonical] = []

    def is_equal(self) -> bool:
        """Whether both compute the same."""
        self._local = self._canonical(({}, {}), (frozenset(), frozenset()))
        same = self._local[0].outputs == self._local[1].outputs
        return same and self._dtypes(0) == self._dtypes(1)

    def _dtypes(self, side: int) -> list[str]:
        """Those of what leaves."""
        graph = self.graphs[side]
        return [self._local[side].dtype(graph.values[v].dtype) for v in graph.outputs]

    def held_against(self, alignment: Alignment) -> Mapping[Groups, tuple[str, ...]]:
        """For the pairs of steps that differ, how."""
        steps = alignment.first, alignment.second
        ends = {
            pair: tuple(steps[side][pair[side][-1]].node for side in (0, 1))
            for pair in alignment.pairs
        }
        tokens: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._ends = [*ends.values()]
        for number, nodes in enumerate(self._ends):
            for side in (0, 1):
                tokens[side][id(nodes[side])] = number
        apart: dict[Groups, tuple[str, ...]] = {}
        for _ in range(3):
            ids = tuple(frozenset(id(ends[p][side]) for p in apart) for side in (0, 1))
            self._local = self._canonical(tokens, ids)
            self._loose = self._canonical(tokens, ids, loosely=True)
            result = {
                pair: what
                for pair, nodes in ends.items()
                if (what := self._held(nodes, len(pair[0]) == len(pair[1]) == 1))
            }
            if result.keys() == apart.keys():
                break
            apart = result
        self.same = ends.keys() - apart.keys()
        return apart

    def loops(self) -> Iterator[tuple[tuple[Node, Node], tuple[str, ...]]]:
        """Loops and branches that do not run alike, whatever is inside of them."""
        sides = [
            [n for _, n in graph.walk() if n.bodies and n.operation in BRANCHING]
            for graph in self.graphs
        ]
        if len(sides[0]) == len(sides[1]):
            for nodes in zip(*sides, strict=True):
                what = tuple(_attributes(*nodes))
                if what:
                    yield nodes, what

    def outputs(self) -> Iterator[tuple[tuple[Node, Node], tuple[str, ...]]]:
        """What leaves differently, with what makes it."""
        a, b = self.graphs
        forms = [c.outputs for c in self._local]
        for k in range(max(len(a.outputs), len(b.outputs))):
            nodes = _maker(a, k), _maker(b, k)
            if k >= len(a.outputs) or k >= len(b.outputs):
                yield nodes, (f"outputs: {len(a.outputs)} ≠ {len(b.outputs)}",)
                return
            dtypes = self._dtypes(0)[k], self._dtypes(1)[k]
            if dtypes[0] != dtypes[1]:
                yield nodes, (f"dtype: {dtypes[0]} ≠ {dtypes[1]}",)
            one, two = forms[0][k], forms[1][k]
            if one != two and not self._is_of_unknown_axes(one, two):
                yield nodes, (_otherwise(a.values[a.outputs[k]].name or f"output {k}", one, two),)

    def _is_of_unknown_axes(self, one: Form, two: Form) -> bool:
        """Whether both are what is alike by name alone, of which no one knows axis by axis."""
        made = self._local[0].expressions.known[one.key]
        step = isinstance(made, tuple) and made[0] == "step"
        if not step or one.key != two.key or one.shape != two.shape:
            return False
        return any(id(node) in self.by_name for node in self._ends[made[1]])

    def _canonical(
        self,
        tokens: Sequence[Mapping[int, int]],
        apart: Sequence[frozenset[int]],
        loosely: bool = False,
    ) -> list[Canonical]:
        expressions, loosely = Expressions(), loosely or self.crossing
        told = self.crossing, not self.crossing or any(map(counts_from_the_end, self.graphs))
        return [
            Canonical(graph, expressions, names, loosely, tokens[side], apart[side], *told)
            for side, (graph, names) in enumerate(zip(self.graphs, self.names, strict=True))
        ]

    def _held(self, nodes: Sequence[Node], single: bool) -> tuple[str, ...]:
        one, two = (c.steps.get(id(n)) for c, n in zip(self._local, nodes, strict=True))
        if one is None or two is None:
            return ()
        if [f.key for f in one] == [f.key for f in two]:
            self._excused(nodes, [f.shape for f in one] != [f.shape for f in two])
            return ()
        if not single or any(node.bodies for node in nodes):
            return self._held_as_parts(nodes)
        expressions = self._local[0].expressions
        given = [c.operands[id(n)] for c, n in zip(self._local, nodes, strict=True)]
        said = [c.said.get(id(n)) for c, n in zip(self._local, nodes, strict=True)]
        known = [result for result in said if result is not None]
        differ = _unlike(*known) if len(known) == len(nodes) else _attributes(*nodes)
        result = [*differ, *_operands(expressions, *given)]
        if result:
            return tuple(dict.fromkeys(result))
        settled = all(_is_settled(expressions, form.key) for side in given for form in side)
        shapes = [[sorted(f.shape) for f in side] for side in (one, two)]
        other_layout = shapes[0] == shapes[1] and [f.shape for f in one] != [f.shape for f in two]
        return (ELSE,) if settled and not self._excused(nodes, other_layout) else ()

    def _held_as_parts(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """An operation against those that it is made of, where it can be written as them."""
        one, two = (c.steps[id(n)] for c, n in zip(self._loose, nodes, strict=True))
        opaque = any(id(n) in c.opaque for c, n in zip(self._loose, nodes, strict=True))
        known = any(node.operation in WRITTEN_OUT for node in nodes)
        given = [c.operands[id(n)] for c, n in zip(self._loose, nodes, strict=True)]
        settled = all(_is_settled(self._loose[0].expressions, f.key) for f in given[0])
        differ = [f.key for f in one[:1]] != [f.key for f in two[:1]]
        if not differ or not settled or self._excused(nodes, opaque or not known):
            return ()
        return (ELSE,)

    def _excused(self, nodes: Sequence[Node], unknown: bool) -> bool:
        if unknown:
            self.by_name |= {id(node) for node in nodes}
        return unknown


def _is_settled(expressions: Expressions, key: int) -> bool:
    """Whether a value is a number, enters, or is made by a step that has its counterpart."""
    expression = expressions.known[key]
    if not isinstance(expression, CanonicalExpression):
        return not (isinstance(expression, tuple) and expression[0] == "later")
    arranged = expression.operation in ("split", "iota")
    return arranged and all(_is_settled(expressions, k) for k, _ in expression.operands)


def _attributes(one: Node, two: Node) -> Iterator[str]:
    if one.operation != two.operation:
        return
    unsaid = {"name", "rule", "drop", "shape"}
    yield from _unlike(
        *({k: v for k, v in n.attributes.items() if k not in unsaid} for n in (one, two))
    )


def _unlike(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*one, *two}):
        values = [side.get(name) for side in (one, two)]
        if values[0] != values[1]:
            told = ["none" if value is None else text_of(_single(value)) for value in values]
            plural = any(isinstance(v, tuple) and len(v) != 1 for v in values)
            yield f"{'axis' if name == 'axes' and not plural else name}: {told[0]} ≠ {told[1]}"


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _operands(
    expressions: Expressions, ones: Sequence[Form], twos: Sequence[Form]
) -> Iterator[str]:
    if len(ones) != len(twos):
        yield f"operands: {len(ones)} ≠ {len(twos)}"
        return
    if not all(_is_settled(expressions, form.key) for form in (*ones, *twos)):
        return
    keys = [[form.key for form in side] for side in (ones, twos)]
    if keys[0] != keys[1] and sorted(keys[0]) == sorted(keys[1]):
        yield "operands in another order"
        return
    for place, (one, two) in enumerate(zip(ones, twos, strict=True)):
        if one.key == two.key:
            if one.dims != two.dims:
                yield _axes(f"operand {place + 1}", one, two)
            continue
        values = [_held(expressions, form.key) for form in (one, two)]
        if None not in values:
            yield f"constant: {_number(values[0])} ≠ {_number(values[1])}"
        else:
            yield "reads something else"


def _otherwise(name: str, one: Form, two: Form) -> str:
    """How two values that leave under one name differ."""
    if one.key != two.key:
        return f"{name} is another value"
    if one.dims != two.dims:
        return _axes(name, one, two)
    return f"shape of {name}: {text_of(one.shape)} ≠ {text_of(two.shape)}"


def _held(expressions: Expressions, key: int) -> Any:
    """The number or numbers that a value is, where that is known."""
    known = expressions.known[key]
    if isinstance(known, tuple) and known[0] == "leaf" and are_numbers(known[1]):
        return text_of(known[1])
    return expressions.value(key)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def _axes(name: str, one: Form, two: Form) -> str:
    return f"axes of {name}: {_told(one)} ≠ {_told(two)}"


def _told(form: Form) -> str:
    """For each axis of an array which axis of what it was made as it is."""
    return f"({', '.join('·'.join(map(str, axes)) or '–' for axes in form.dims)})"


def _maker(graph: PlainGraph, k: int) -> Node:
    """What makes an output; of one that goes through, or that there is not, a stand-in."""
    if k >= len(graph.outputs):
        return Node("output", (), ())
    value = graph.outputs[k]
    makers = (node for node in graph.nodes if value in node.outputs)
    return next(makers, Node("output", (value,), ()))


def _names_of_leaves(a: PlainGraph, b: PlainGraph) -> tuple[dict[int, str], dict[int, str]]:
    """What enters, called alike in both: by name where both have it once, else by turn."""
    result: tuple[dict[int, str], dict[int, str]] = ({}, {})
    for kind in ("inputs", "captured"):
        sides = [_in_turn(graph, getattr(graph, kind)) for graph in (a, b)]
        names = [
            [graph.values[v].name for v in side] for graph, side in zip((a, b), sides, strict=True)
        ]
        shared = {n for n in names[0] if n in names[1] and all(x.count(n) == 1 for x in names)}
        for side in (0, 1):
            turns = iter(range(len(sides[side])))
            for v, name in zip(sides[side], names[side], strict=True):
                known = name in shared or are_numbers(name)
                result[side][v] = name if known else f"{kind} {next(turns)}"
    return result


def _in_turn(graph: PlainGraph, values: Sequence[int]) -> list[int]:
    """Values that enter, inputs as they stand, what is captured as it is first read."""
    if values == graph.inputs:
        return list(values)
    wanted = {v for v in values if graph.values[v].shape or not graph.values[v].name}
    read: dict[int, None] = {}
    for node in graph.nodes:
        read.update(dict.fromkeys(v for v in node.inputs if v in wanted))
    return [*read, *(v for v in wanted if v not in read)]
