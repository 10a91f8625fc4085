"""Records of the canonical form: numbered (hash-consed) expressions, and values laid on them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
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


def operand(form: Form, place: int, made: CanonicalExpression) -> Form:
    """One operand of the elementwise operation that a value is, as it lies in the value."""
    key, labels = made.operands[place]
    number = {label: i for i, label in enumerate(labels)}
    dims = tuple(tuple(number[a] for a in axes if a in number) for axes in form.dims)
    return replace(form, key=key, sizes=tuple(form.sizes[a] for a in labels), dims=dims)


class Labels:
    """Numbers for the axes of operands, by the names of their arrays' axes: one name, one axis.

    Attributes:
        numbers: The number of each name, with which of the axes that are merged there it is.
        sizes: The length of each.
        operands: The operands as an expression has them.
    """

    def __init__(self, operands: Iterable[tuple[Form, Sequence[Hashable]]]) -> None:
        self.numbers: dict[tuple[Any, int], int] = {}
        self.sizes: list[int] = []
        self.operands: list[tuple[int, tuple[int, ...]]] = []
        for form, names in operands:
            axes = zip(names, form.dims, strict=True)
            where = {a: (name, j) for name, merged in axes for j, a in enumerate(merged)}
            labels = tuple(self.number(where[a], n) for a, n in enumerate(form.sizes))
            self.operands.append((form.key, labels))

    def number(self, name: tuple[Any, int], size: int) -> int:
        """The number of an axis; a new one has this length."""
        if name not in self.numbers:
            self.numbers[name] = len(self.numbers)
            self.sizes.append(size)
        return self.numbers[name]

    def of(self, name: Hashable) -> tuple[int, ...]:
        """The numbers of an axis, which may be several that are merged."""
        result = [(j, k) for (known, j), k in self.numbers.items() if known == name]
        return tuple(k for _, k in sorted(result))

    def form(
        self, key: int, kept: Iterable[int], names: Iterable[Hashable], shape: Sequence[int]
    ) -> Form:
        """The value that has these of the axes, which lie at these names."""
        left = sorted(kept)
        number = {k: i for i, k in enumerate(left)}
        dims = tuple(tuple(number[k] for k in self.of(name)) for name in names)
        return Form(key, tuple(self.sizes[k] for k in left), dims, tuple(shape))


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
