"""`Builder`: a program as expressions, written operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtools.seeing.formulas.arrays import constant
from gradtools.seeing.formulas.calls import made
from gradtools.seeing.formulas.expressions import Expr, kind_of, placeholder
from gradtools.seeing.formulas.recorded import Recorded, named


class Builder:
    """A program that is being written; calling it with a name and operands gives an operation."""

    def __init__(self) -> None:
        self._inputs: list[Expr] = []

    def input(self, name: str, shape: Sequence[int], dtype: str = "float64") -> Expr:
        """An argument's leaf."""
        self._inputs.append(placeholder(name, shape, kind_of(dtype)))
        return self._inputs[-1]

    def __call__(self, operation: str, *operands: Expr, **attributes: Any) -> Any:
        """The result of an operation, or a list of them."""
        result = made(operation, operands, attributes)
        if result is None:
            raise TypeError(f"{operation} of {len(operands)} with {attributes} is no operation")
        return [named(y) for y in result] if isinstance(result, list) else named(result)

    def shape(self, x: Expr) -> tuple[int, ...]:
        """The shape of a value."""
        return x.shape

    def number(self, value: Any) -> Expr:
        """A constant, of a number or an array."""
        return constant(value)

    def graph(self, *outputs: Expr) -> Recorded:
        """The program as it stands, with these outputs."""
        return Recorded(tuple(self._inputs), tuple(outputs))
