"""Records of the canonical form: numbered (hash-consed) expressions, and values laid on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Form:
    """A value: an expression, by number, and which of its axes lie on each axis of the array.

    Attributes:
        key: The expression's number.
        sizes: The lengths of the expression's axes.
        dims: For each axis of the array the axes of the expression that are merged in it, in
            order; none where the array only repeats.
        shape: The array's shape.
    """

    key: int
    sizes: tuple[int, ...]
    dims: Dims
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CanonicalExpression:
    """An expression: an operation, what makes it what it is, and its operands.

    Each operand is a number with the labels of its axes: the same label, the same axis.
    """

    operation: str
    attributes: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[int, tuple[int, ...]], ...]


def widened(x: Form, shape: Sequence[int]) -> Form:
    """A value that repeats along new axes, the first of this shape."""
    more = len(shape) - len(x.shape)
    return Form(x.key, x.sizes, (*((),) * more, *x.dims), tuple(shape))


class Expressions:
    """Numbers for expressions: equal ones have the same."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self.known: list[Any] = []

    def number(self, expression: Any) -> int:
        """The number of an expression."""
        if expression not in self._numbers:
            self._numbers[expression] = len(self.known)
            self.known.append(expression)
        return self._numbers[expression]

    def value(self, key: int) -> complex | float | None:
        """The number that an expression is, if it is one."""
        expression = self.known[key]
        is_number = isinstance(expression, tuple) and expression[0] == "number"
        return expression[1] if is_number else None


class NoForm(Exception):
    """An operation on axes that only a whole array has."""


__all__ = ["CanonicalExpression", "Dims", "Expressions", "Form", "NoForm", "widened"]
