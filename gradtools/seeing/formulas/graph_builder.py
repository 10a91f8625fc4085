"""A small NumPy-like way to write a `Graph`: what JAX's wing writes with, and the tests.

Calling the builder with the name of an operation adds a node and returns
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

from gradtools.seeing.formulas.expressions import Expr, kind_of, placeholder
from gradtools.seeing.formulas.operation_record import OPERATIONS
from gradtools.seeing.graphs.nodes import Body, Node, PlainGraph, Value

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

    def _node(
        self,
        operation: str,
        inputs: tuple[int, ...],
        results: Any,
        attributes: dict[str, Any],
        bodies: Sequence[Body] = (),
    ) -> Any:
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

    def graph(self, *outputs: int) -> PlainGraph:
        """The program as it stands, with these outputs."""
        return PlainGraph(
            tuple(self._nodes),
            dict(self._values),
            tuple(self._inputs),
            tuple(outputs),
            tuple(self._captured),
        )
