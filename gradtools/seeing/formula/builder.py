"""A small NumPy-like way to write a `Graph`: what a wing may use, and what the tests use.

Calling the builder with an operation of the vocabulary (`operations.py`) adds a node and returns
the number of its result, or a tuple of numbers::

    b = Builder()
    w, x = b.input("W", (3, 4)), b.input("x", (4,))
    y = b("matmul", w, x)
    graph = b.graph(y)

Python numbers and NumPy arrays given as operands become nodes ``constant``. Shapes and dtypes of
results are those of the lowered expressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradtools.seeing.formula.expressions import Expr, kind_of, placeholder
from gradtools.seeing.formula.vocabulary import OPERATIONS
from gradtools.seeing.nodes import Body, Node, PlainGraph, Value

_DTYPES = {"real": "float64", "complex": "complex128", "integer": "int64", "boolean": "bool"}


class Builder:
    """A program that is being written, node by node."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._values: dict[int, Value] = {}
        self._known: dict[int, Expr] = {}
        self._inputs: list[int] = []
        self._captured: list[int] = []

    def input(self, name: str, shape: Sequence[int], dtype: str = "float64") -> int:
        """An argument's leaf."""
        self._inputs.append(self._leaf(name, shape, dtype))
        return self._inputs[-1]

    def captured(self, name: str, shape: Sequence[int], dtype: str = "float64") -> int:
        """A value that the program reads and was not given."""
        self._captured.append(self._leaf(name, shape, dtype))
        return self._captured[-1]

    def _leaf(self, name: str, shape: Sequence[int], dtype: str) -> int:
        return self._add(placeholder(name, shape, kind_of(dtype)), name)

    def _add(self, x: Expr, name: str = "") -> int:
        number = len(self._values)
        self._values[number] = Value(x.shape, _DTYPES[x.kind], name)
        self._known[number] = x
        return number

    def __call__(self, operation: str, *operands: Any, **attributes: Any) -> Any:
        """Add a node; the number of its result, or a tuple of them."""
        inputs = tuple(self._operand(x) for x in operands)
        args = [self._known[v] for v in inputs]
        lower: Any = OPERATIONS[operation].lower
        return self._node(operation, inputs, lower(*args, **attributes), attributes)

    def _node(self, operation, inputs, results, attributes, bodies=()) -> Any:
        many = isinstance(results, (list, tuple))
        outputs = tuple(self._add(r) for r in (results if many else [results]))
        self._nodes.append(
            Node(operation, inputs, outputs, attributes=attributes, bodies=tuple(bodies))
        )
        return outputs if many else outputs[0]

    def _operand(self, x: Any) -> int:
        if isinstance(x, int) and not isinstance(x, bool) and x in self._values:
            return x
        raise TypeError(f"{x!r} is no value of this builder; write a number as b.number({x!r})")

    def shape(self, v: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self._values[v].shape

    def number(self, value: Any) -> int:
        """A constant, of a number or an array."""
        return self("constant", value=np.asarray(value))

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

    def graph(self, *outputs: int) -> PlainGraph:
        """The program as it stands, with these outputs."""
        return PlainGraph(
            tuple(self._nodes),
            dict(self._values),
            tuple(self._inputs),
            tuple(outputs),
            tuple(self._captured),
        )


def _results(graph: PlainGraph) -> list[Expr]:
    values = [graph.values[v] for v in graph.outputs]
    return [placeholder("", v.shape, kind_of(v.dtype)) for v in values]
