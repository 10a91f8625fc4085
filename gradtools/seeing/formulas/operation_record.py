"""`Operation`: all that is known of an operation; `OPERATIONS`: these records, by name.

A wing records a program as a `Graph` whose nodes carry these names, operands and attributes; from
there on no framework is needed. Lowered, it is a program of `Expr`, whose ``op`` is such a name
too. Some operations are only said by programs (log1p), some only made by lowering or by a pullback
(max_unpool), most are both. The records stand in `operations/`, by family; what an operation means
is the formula of its lowering, with what the docstring adds, or its value in NumPy.

Conventions that hold for what a program says:

- Axes are counted from 0 and never negative. ``axes`` is a tuple, ``axis`` one number.
- ``axes`` that may be left out are then all axes.
- ``keep`` (default False) keeps a reduced axis with length 1.
- Elementwise operations broadcast as in NumPy; a number is a node ``constant``.
- Numbers are exact: everything is evaluated in float64 and complex128, integers in int64.
- Indices are not negative and within bounds.
- An operation that is not in the table keeps its native name. It is shown with a mark, and
  evaluated only if its attributes hold a NumPy ``function`` (and ``adjoint``, see ``opaque``).
- Attributes that are not in its signature, or needed ones that are missing, are refused.
- The residuals of a ``custom_rule`` are differentiated through its forward program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.typesetting import Written

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

Form = Callable[["ExpressionWriter", Expr], Written]
EntryForm = Callable[[Expr, list[Written], bool], Written]
Outputs = Sequence[Expr]  # of one operation, or their cotangents
Cotangents = list[Expr | None]  # of the arguments; None where one has no derivative
Ties = Callable[["Axes", Expr], None]


def _of_the_first(x: Expr, *rest: Expr, **attributes: Any) -> tuple[tuple[int, ...], str]:
    return x.shape, x.kind


@dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        name: What a node's ``operation`` says, and an expression's ``op``.
        operands: The node's inputs, in order; ``?`` marks what may be left out, ``*`` what repeats.
            None where no program says it.
        attributes: The names of the node's attributes; those with a ``?`` may be left out.
        outputs: What comes out, where it is more than one array.
        lower: The result as expressions, of the operands and the attributes; None where it takes
            more than these, such as a program inside (`lowering.py`).
        evaluate: The value in NumPy, of the expression and the arguments' values; a tuple where
            there are several outputs.
        pullback: The arguments' cotangents, of the expression (or its outputs), the cotangent
            (or cotangents) and the arguments; None where there is no derivative.
        result: The shape and the kind of the expression (a list of them, where there are several
            outputs), of its arguments and its attributes; by default those of the first argument.
            What these do not tell (the shape of index_add) has a function that makes it.
        elementwise: Whether it is a function of each place.
        form: How it is written; None for its name and its arguments.
        entry: How an elementwise operation is written: of the expression, its arguments as they
            are written, and whether it is a matrix that is written whole, where a power must not
            be mistaken for a product of matrices.
        ties: Which axes of the arguments are axes of the result; None where none is.
        definition: Of the name, where a program that spells it out is written by it.
    """

    name: str
    operands: str | None = None
    attributes: tuple[str, ...] = ()
    outputs: str = ""
    lower: Callable[..., Any] | None = None
    evaluate: Callable[..., Any] | None = None
    pullback: Callable[..., Any] | None = None
    result: Callable[..., Any] = _of_the_first
    elementwise: bool = False
    form: Form | None = None
    entry: EntryForm | None = None
    ties: Ties | None = None
    definition: Written | None = None

    def takes(self, operands: int, attributes: Collection[str]) -> bool:
        """Whether a program says it with so many operands and these attributes."""
        names = (self.operands or "").split()
        most = operands if any(name.startswith("*") for name in names) else len(names)
        least = sum(not name.endswith("?") and not name.startswith("*") for name in names)
        return least <= operands <= most and self.has(attributes)

    def has(self, attributes: Collection[str]) -> bool:
        """Whether these are attributes of it, and none that it needs is missing."""
        known = {name.rstrip("?") for name in self.attributes}
        needed = {name for name in self.attributes if not name.endswith("?")}
        return needed <= set(attributes) <= known


OPERATIONS: dict[str, Operation] = {}


def of_vocabulary(name: str) -> Operation | None:
    """What a recorded program means by this name; None if it is not of the vocabulary."""
    operation = OPERATIONS.get(name)
    return operation if operation and operation.operands is not None else None


def is_elementwise(x: Expr) -> bool:
    """Whether it is a function of each place."""
    return x.op in OPERATIONS and OPERATIONS[x.op].elementwise
