"""`Primitive`: an operation's value in NumPy, its pullback, its notation, and which axes match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.typesetting import Written

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

Form = Callable[["ExpressionWriter", Expr], Written]
Ties = Callable[["Axes", Expr], None]


@dataclass(frozen=True)
class Primitive:
    """An operation on whole arrays.

    Attributes:
        evaluate: The value in NumPy, of the expression and the arguments' values; a tuple where
            there are several outputs.
        pullback: The arguments' cotangents, of the expression (or its outputs), the cotangent
            (or cotangents) and the arguments; None where there is no derivative.
        form: How it is written; None for its name and its arguments.
        ties: Which axes of the arguments are axes of the result; None where none is.
    """

    evaluate: Callable[..., Any]
    pullback: Callable[..., Any] | None = None
    form: Form | None = None
    ties: Ties | None = None


def linear(back):
    """The pullback of a linear operation of its first argument, the others being integers."""
    return lambda y, g, x, *rest: [back(y, g, x, *rest)] + [None] * len(rest)


def listed(values: Sequence[Any]) -> str:
    """A number for each axis: one where all are equal, else as 2x3."""
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


def tie_same(axes: Axes, y: Expr) -> None:
    """Every axis of each argument, from the last on."""
    for a in y.args:
        axes.tie_all(y, a)


def tie_first(axes: Axes, y: Expr) -> None:
    """Of all arguments, wherever the axis is as long."""
    for x in y.args:
        if x.rank == y.rank:
            axes.tie_all(y, x)
