"""A `Builder` that also writes loops, branches, calls, draws, rules and unknown operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtools.seeing.formulas import graph_builder
from gradtools.seeing.formulas.expressions import Expr, kind_of, placeholder
from gradtools.seeing.graphs.nodes import Body, Node, PlainGraph


class Builder(graph_builder.Builder):
    """A program that is being written, node by node."""

    def unknown(self, native: str, *operands: int, shape: Sequence[int], **attributes: Any) -> int:
        """An operation that is not in the vocabulary."""
        result = placeholder("", shape)
        number = self._add(result)
        self._nodes.append(Node(native, operands, (number,), native=native, attributes=attributes))
        return number

    def draw(self, name: str, shape: Sequence[int], value: Any = None) -> int:
        """A random draw."""
        attributes = {"name": name, "value": value}
        return self._node("random", (), placeholder(name, shape), attributes)

    def scan(
        self,
        body: PlainGraph,
        consts: Sequence[int],
        carries: Sequence[int],
        xs: Sequence[int],
        length: int,
        reverse: bool = False,
    ) -> tuple[int, ...]:
        """A loop over slices of xs."""
        attributes = {
            "consts": len(consts),
            "carries": len(carries),
            "length": length,
            "reverse": reverse,
        }
        outputs = [body.values[v] for v in body.outputs]
        shapes = [
            v.shape if k < len(carries) else (length, *v.shape) for k, v in enumerate(outputs)
        ]
        results = [
            placeholder("", s, kind_of(v.dtype)) for s, v in zip(shapes, outputs, strict=True)
        ]
        inputs = (*consts, *carries, *xs)
        pairs = tuple((k, len(consts) + k) for k in range(len(carries)))
        inner = Body(body, tuple(range(len(inputs))), carries=pairs)
        return self._node("scan", inputs, results, attributes, [inner])

    def cond(self, index: int, *operands: int, branches: Sequence[PlainGraph]) -> tuple[int, ...]:
        """One of several programs."""
        inner = [Body(g, tuple(range(1, len(operands) + 1))) for g in branches]
        return self._node("cond", (index, *operands), _results(branches[0]), {}, inner)

    def loop(
        self,
        condition: PlainGraph,
        body: PlainGraph,
        condition_consts: Sequence[int],
        body_consts: Sequence[int],
        carries: Sequence[int],
    ) -> tuple[int, ...]:
        """Rounds for as long as a condition holds."""
        first, second = len(condition_consts), len(body_consts)
        attributes = {"condition_consts": first, "body_consts": second}
        places = tuple(range(first + second + len(carries)))
        inner = [
            Body(condition, (*places[:first], *places[first + second :]), gate=True),
            Body(body, places[first:]),
        ]
        inputs = (*condition_consts, *body_consts, *carries)
        return self._node("while", inputs, _results(body), attributes, inner)

    def call(self, graph: PlainGraph, *operands: int) -> tuple[int, ...]:
        """A program as one operation."""
        inner = [Body(graph, tuple(range(len(operands))))]
        return self._node("call", operands, _results(graph), {}, inner)

    def custom_rule(
        self, name: str, *operands: int, forward: PlainGraph, backward: PlainGraph, residuals: int
    ) -> tuple[int, ...]:
        """A function with a rule of its own."""
        places = tuple(range(len(operands)))
        results = _results(forward)[: len(forward.outputs) - residuals]
        attributes = {"name": name, "residuals": residuals}
        inner = [Body(forward, places), Body(backward, ())]
        return self._node("custom_rule", operands, results, attributes, inner)


def _results(graph: PlainGraph) -> list[Expr]:
    values = [graph.values[v] for v in graph.outputs]
    return [placeholder("", v.shape, kind_of(v.dtype)) for v in values]
