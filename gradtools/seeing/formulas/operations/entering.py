"""How operations are registered in `OPERATIONS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gradtools.seeing.formulas.algebra import apply, broadcast_shape, conj, times
from gradtools.seeing.formulas.expressions import REAL, Expr, widest
from gradtools.seeing.formulas.operation_record import OPERATIONS, Cotangents, Make, Operation

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes

Made = TypeVar("Made", bound=Make)
Derivatives = Callable[..., Sequence[Expr | None]]


def operation(name: str, evaluate: Make | None = None, pullback: Any = None, **known: Any) -> None:
    """Register an operation."""
    OPERATIONS[name] = Operation(name, evaluate=evaluate, pullback=pullback, **known)


def word(name: str, make: Make) -> None:
    """What a program says, and what it means in other operations."""
    operation(name, make=make)


def makes(name: str, enter: Callable[..., None] = operation, *of: Any, **known: Any) -> Any:
    """A decorator that registers the function as the `Operation.make` of this operation."""

    def decorate(make: Made) -> Made:
        enter(name, *of, make=make, **known)
        return make

    return decorate


def entrywise(
    name: str,
    evaluate: Make,
    derivatives: Derivatives | None = None,
    *,
    pullback: Any = None,
    kind: str | Callable[..., str] = "",
    make: Make | None = None,
    **known: Any,
) -> None:
    """Register an elementwise operation.

    Args:
        name: Its name.
        evaluate: Computes it in NumPy from the arguments and the attributes.
        derivatives: The partial derivatives f' of a holomorphic function, from its value and its
            arguments; the cotangent of an argument is conj(f') g.
        pullback: As in `Operation`, instead of derivatives.
        kind: The kind of the result; by default the widest of the arguments', at least real.
        make: As in `Operation`; by default the operation itself, without attributes.
        known: Further fields of `Operation`.
    """

    def result(*args: Expr, **attributes: Any) -> tuple[tuple[int, ...], str]:
        of = kind(*args, **attributes) if callable(kind) else kind
        shape = broadcast_shape(*(a.shape for a in args))
        return shape, of or widest(REAL, *(a.kind for a in args))

    operation(
        name,
        lambda y, *args: evaluate(*args, **dict(y.attributes)),
        pullback or (derivatives and _chain_rule(derivatives)),
        make=make or (lambda *xs: apply(name, *xs)),
        result=result,
        elementwise=True,
        ties=tie_same,
        **known,
    )


def _chain_rule(derivatives: Derivatives) -> Callable[..., Cotangents]:
    def pullback(y: Expr, g: Expr, *args: Expr) -> Cotangents:
        return [None if d is None else times(conj(d), g) for d in derivatives(y, *args)]

    return pullback


def tie_same(axes: Axes, y: Expr) -> None:
    """Tie every axis of each argument to the result's, aligned at the last as in broadcasting."""
    for a in y.args:
        axes.tie_all(y, a)


def tie_first(axes: Axes, y: Expr) -> None:
    """Tie the axes of each argument of the same rank to the result's."""
    for x in y.args:
        if x.rank == y.rank:
            axes.tie_all(y, x)
