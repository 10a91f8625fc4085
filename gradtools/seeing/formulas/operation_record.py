"""`Operation`, the definition of an operation, and the registry `OPERATIONS`.

A recorded program and its adjoint are expressions in these operations; `evaluate` computes them in
NumPy. An operation that is not registered is kept by its name (`operations/opaque.py`); the
framework computes and differentiates it.

Conventions of the functions that build expressions:

- Axes are counted from 0 and never negative; ``axes`` is a tuple, ``axis`` one number.
- ``keep`` (default False) keeps a reduced axis with length 1.
- Elementwise operations broadcast as in NumPy.
- Everything is evaluated in float64 and complex128, integers in int64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas.expressions import DTYPES, Expr, order
from gradtools.seeing.formulas.typesetting import Written

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import ExpressionWriter

Form = Callable[["ExpressionWriter", Expr], Written]
EntryForm = Callable[[Expr, list[Written], bool], Written]
Make = Callable[..., Any]
Made = TypeVar("Made", bound=Make)


@dataclass(frozen=True)
class Operation:
    """An operation: how it is built, evaluated, differentiated and written."""

    name: str  # an expression's `op`, or the name in both frameworks' recorded programs
    # Builds it from operands and attributes; None if it occurs in adjoints or by recognition only.
    make: Make | None = None
    evaluate: Make | None = None  # in NumPy, from the expression and the arguments' values
    # Maps the expression, its cotangent and the arguments to the arguments' cotangents.
    pullback: Make | None = None
    # Maps the arguments and the attributes to the shape and the kind.
    result: Make = lambda x, *rest, **attributes: (x.shape, x.kind)
    elementwise: bool = False
    form: Form | None = None  # writes it; None for its name and its arguments
    # Writes an elementwise operation from its written arguments, and whether these are whole
    # matrices (where a power is marked as elementwise, because it would read as a matrix power).
    entry: EntryForm | None = None
    # For each argument the label of each axis. Axes with one label correspond and get one letter;
    # the labels of the result's axes are 0, 1, ...; None corresponds to none.
    labels: Callable[[Expr], Sequence[Sequence[int | None]]] = lambda y: [
        range(y.rank) if a.rank == y.rank else () for a in y.args
    ]
    definition: str = ""  # of the name, for a composition that is recognised and written by it


OPERATIONS: dict[str, Operation] = {}


def operation(
    name: str, evaluate: Make | None = None, pullback: Make | None = None, **known: Any
) -> Callable[[Made], Made]:
    """Register an operation. What it returns is a decorator of its `Operation.make`, if any."""
    OPERATIONS[name] = Operation(name, evaluate=evaluate, pullback=pullback, **known)

    def decorate(make: Made) -> Made:
        OPERATIONS[name] = replace(OPERATIONS[name], make=make)
        return make

    return decorate


def word(name: str, make: Make) -> None:
    """Register what a program says, and what it means in other operations."""
    operation(name, make=make)


def made(name: str, operands: Sequence[Expr], attributes: dict[str, Any]) -> Any:
    """What a program means by this name; None if the vocabulary has no such form of it."""
    operation = OPERATIONS.get(name)
    if operation is None or operation.make is None:
        return None
    try:
        inspect.signature(operation.make).bind(*operands, **attributes)
    except TypeError:
        return None
    return operation.make(*operands, **attributes)


def is_elementwise(x: Expr) -> bool:
    """Whether its operation is applied to each entry."""
    return x.op in OPERATIONS and OPERATIONS[x.op].elementwise


# --- numbers


def evaluate(roots: Sequence[Expr], known: Mapping[Expr, Any]) -> list[np.ndarray]:
    """The roots' values from those of the placeholders; each subexpression is computed once.

    Raises:
        GradtoolsError: A placeholder has no value, or an operation cannot be computed.
    """
    values: dict[Expr, np.ndarray] = {}
    for x, value in known.items():
        array = np.asarray(value)
        if array.shape != x.shape:
            raise GradtoolsError(
                f"formula: {x.get('name') or x.op} has shape {x.shape}; "
                f"it was given a value of shape {array.shape}"
            )
        values[x] = array.astype(DTYPES[x.kind], copy=False)
    with np.errstate(all="ignore"):
        for y in order(roots):
            if y in values:
                continue
            if y.op == "placeholder":
                raise GradtoolsError(f"formula: no value is given for {y['name'] or 'an input'}")
            compute: Any = OPERATIONS[y.op].evaluate
            values[y] = compute(y, *(values[a] for a in y.args))
    return [values[root] for root in roots]
