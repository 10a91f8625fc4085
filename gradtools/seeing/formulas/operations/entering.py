"""How a record is entered in the table of operations.

What a program says is written as ``"name(operands; attributes) -> outputs"``, or is the name alone
and the signature of its lowering, whose keyword-only parameters are the attributes. A name alone
without a lowering is an operation that no program says.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import apply, broadcast_shape, conj, times
from gradtools.seeing.formulas.expressions import REAL, Expr, widest
from gradtools.seeing.formulas.operation_record import OPERATIONS, Cotangents, Form, Operation

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

Lowering = Callable[..., Any]
Pullback = Callable[..., Any] | None
Lowered = TypeVar("Lowered", bound=Lowering)
Derivatives = Callable[..., Sequence[Expr | None]]
_SAID = re.compile(r"(\w+)(?:\((.*?)(?:; (.*))?\))?(?: -> (.*))?")


def word(said: str, lower: Lowering | None = None, **known: Any) -> None:
    """An operation that a program says, and how it is written in others."""
    match = _SAID.fullmatch(said)
    assert match, said
    name, operands, attributes, outputs = match.groups(default="")
    if lower and match[2] is None:
        operands, attributes = _parameters(lower)
    OPERATIONS[name] = Operation(
        name,
        operands.replace(",", "") if lower or match[2] is not None else None,
        tuple(attributes.replace(",", "").split()),
        outputs,
        lower,
        **known,
    )


def _parameters(lower: Lowering) -> tuple[str, str]:
    """Its operands, and its attributes."""
    parameters = inspect.signature(lower).parameters.values()
    marked = lambda p: (
        "*" * (p.kind == p.VAR_POSITIONAL) + p.name + "?" * (p.default is not p.empty)
    )
    attributes = [marked(p) for p in parameters if p.kind == p.KEYWORD_ONLY]
    operands = [marked(p) for p in parameters if p.kind != p.KEYWORD_ONLY]
    return " ".join(operands), " ".join(attributes)


def lowers(
    said: str, enter: Callable[..., None] = word, *of: Any, **known: Any
) -> Callable[[Lowered], Lowered]:
    """A decorator: the function is the lowering of this operation, its docstring the meaning."""

    def decorate(lower: Lowered) -> Lowered:
        enter(said, *of, lower=lower, **known)
        return lower

    return decorate


def operation(
    said: str, evaluate: Lowering, pullback: Pullback = None, *, lower: Any = None, **known: Any
) -> None:
    """An operation of expressions; by default a program that says it means just this."""
    name, *operands = said.split("(")
    lower = lower or (partial(apply, name) if operands else None)
    word(said, lower, evaluate=evaluate, pullback=pullback, **known)


def entrywise(
    said: str,
    evaluate: Lowering,
    derivatives: Derivatives | None = None,
    *,
    pullback: Pullback = None,
    kind: str | Callable[..., str] = "",
    **known: Any,
) -> None:
    """A function of each place.

    Args:
        said: As a program says it.
        evaluate: In NumPy, of the arguments and the attributes.
        derivatives: A holomorphic function's partial derivatives f', of its value and its
            arguments; the cotangent of an argument is conj(f') g.
        pullback: The cotangents, where no derivatives say them.
        kind: Of the result; by default the widest of the arguments', at least real.
        known: What else is known of it.
    """

    def result(*args: Expr, **attributes: Any) -> tuple[tuple[int, ...], str]:
        of = kind(*args, **attributes) if callable(kind) else kind
        shape = broadcast_shape(*(a.shape for a in args))
        return shape, of or widest(REAL, *(a.kind for a in args))

    operation(
        said,
        lambda y, *args: evaluate(*args, **dict(y.attributes)),
        pullback or (derivatives and _chain_rule(derivatives)),
        result=result,
        elementwise=True,
        ties=tie_same,
        **known,
    )


def _chain_rule(derivatives: Derivatives) -> Callable[..., Cotangents]:
    def pullback(y: Expr, g: Expr, *args: Expr) -> Cotangents:
        return [None if d is None else times(conj(d), g) for d in derivatives(y, *args)]

    return pullback


def linear(back: Callable[..., Expr]) -> Callable[..., Cotangents]:
    """The pullback of a linear operation of its first argument, the others being integers."""
    return lambda y, g, x, *rest: [back(y, g, x, *rest)] + [None] * len(rest)


def called(name: str, note: str = "", latex: str = "") -> Form:
    """A function of this name, with what the reader must know of it."""

    def form(w: ExpressionWriter, x: Expr) -> ts.Written:
        if note:
            w.note(note)
        return ts.function(name, [w.whole(a) for a in x.args], latex=latex)

    return form


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
