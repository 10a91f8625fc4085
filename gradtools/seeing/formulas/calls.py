"""`FormulaCall`: one call of a framework in the graph's words, and what it means in the vocabulary.

Both translators fill one for each operation of a run. `translated` makes expressions of it, by a
reading of the translator's own, or by the name, operands and attributes. An operation without one
is kept by its name (`operations/opaque.py`), with its parameters `in_words`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gradtools.seeing.formulas.algebra import apply, broadcast
from gradtools.seeing.formulas.expressions import (
    BOOLEAN,
    COMPLEX,
    INTEGER,
    REAL,
    Expr,
    constant_of,
    order,
)
from gradtools.seeing.formulas.operation_record import made
from gradtools.seeing.formulas.operations.arrays import arrange
from gradtools.seeing.formulas.recorded import named

Like = tuple[Sequence[int], str]  # shape and kind
Reading = Callable[[Any], Any]  # from a `FormulaCall` to one or several expressions, or None


@dataclass(eq=False)
class FormulaCall:
    """One call of a framework; a translator's own class can compute it."""

    name: str  # as the graph says it
    operands: Sequence[Expr]
    attributes: Mapping[str, Any]
    likes: Sequence[Like]  # the shape and the kind of each result
    own: Any  # the arguments by the framework's names, with expressions in place of arrays

    def value_of(self, x: Expr) -> np.ndarray:
        """The numbers of an operand in this run."""
        raise NotImplementedError

    def computed(self, first: np.ndarray) -> np.ndarray:
        """The result at another first operand; the other operands are constants."""
        raise NotImplementedError

    def translated(self, readings: Mapping[str, Reading], key: str = "") -> list[Any] | None:
        """The results, by a reading or by the name; None if the vocabulary has none.

        A result that is None, such as the places of a maximum, is taken as a constant.
        """
        result = readings.get(key, FormulaCall._in_vocabulary)(self)
        return result if result is None or isinstance(result, list) else [result]

    def _in_vocabulary(self) -> Any:
        """What the vocabulary means by the name; None if there is no such form of it."""
        name, operands = self.name, self.operands
        if name in _LINEAR:
            operands = [x.args[0] if x.op == "cast" and x.is_complex else x for x in operands]
        attributes = {k: v for k, v in self.attributes.items() if k != "dtype" or name == "cast"}
        result = made(name, operands, attributes)
        results = result if isinstance(result, list) else [result]
        likes, more = self.likes[: len(results)], self.likes[len(results) :]
        shapes = [getattr(r, "shape", None) for r in results]
        if shapes != [tuple(shape) for shape, _ in likes] or any(
            k in (REAL, COMPLEX) for _, k in more
        ):
            return None
        return [*map(fitted, results, likes), *[None] * len(more)]

    def arranged(self) -> Expr | None:
        """The result as entries of the first operand; None if it fills in constants."""
        x = self.operands[0]
        counts = np.arange(1, 1 + prod(x.shape)).reshape(x.shape)
        once, twice = self.computed(counts), self.computed(2 * counts)
        if not once.all() or not np.array_equal(2 * once, twice):
            return None
        return arrange(x, np.round(once.real).astype(int) - 1)


_LINEAR = """
add subtract multiply negate einsum matmul outer sum mean trace reshape transpose broadcast
concatenate stack split slice flip real imag conj abs identity
""".split()  # commute with a cast from real to complex


def fitted(x: Expr, like: Like) -> Expr:
    """X by its name, of this shape, and of the kind of the framework's result."""
    shape, kind = like
    x = named(x)
    if x.is_inexact and kind in (INTEGER, BOOLEAN) and constant_of(x) is None:
        x = apply("cast", x, to=kind)
    x = x if x.shape == tuple(shape) else broadcast(x, tuple(shape))
    plain = x.is_complex or constant_of(x) is not None
    return x if kind != COMPLEX or plain else apply("cast", x, to=COMPLEX)


def has_opaque_part(results: Sequence[Expr], operands: Sequence[Expr]) -> bool:
    """Whether some part of what makes the results of the operands is an opaque operation."""
    before = set(order(operands))
    return any(x.op == "by_name" and x not in before for x in order(results))


def in_words(attributes: Mapping[str, Any], rank: int) -> str:
    """The parameters of an operation by name, those that are numbers or words."""

    def short(value: Any) -> Any:
        """A tuple of equal numbers as one number: (2, 2) is 2."""
        if isinstance(value, tuple | list) and value:
            parts = [short(v) for v in value]
            return parts[0] if all(p == parts[0] for p in parts) else tuple(parts)
        return value

    plain = {k: short(v) for k, v in attributes.items() if rank > 1 or k not in ("axis", "axes")}
    return ", ".join(f"{k} {v}" for k, v in plain.items() if len(str(v)) <= 30)
