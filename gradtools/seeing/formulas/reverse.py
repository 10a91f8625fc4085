"""Reverse mode on expressions: the adjoint program.

Values are visited in reverse topological order; the pullback of each maps its cotangent to those of
its arguments. The result is an expression again: it can be simplified, written, evaluated, and
differentiated once more, which is double backward::

    first order    x_bar = J^H g
    second order   the adjoint of <u, x_bar>, as a function of x and g
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gradtools.seeing.formulas.algebra import add, is_zero, real, unbroadcast, zeros
from gradtools.seeing.formulas.expressions import Expr, order, siblings
from gradtools.seeing.formulas.operation_record import OPERATIONS


def adjoint(
    outputs: Sequence[Expr], cotangents: Sequence[Expr], wrt: Sequence[Expr]
) -> tuple[list[Expr], dict[Expr, Expr]]:
    """The adjoint program.

    Args:
        outputs: The expressions to differentiate.
        cotangents: The cotangent of each output, of its shape.
        wrt: The values with respect to which it differentiates.

    Returns:
        The cotangents of ``wrt``, and the cotangent of every value between.
    """
    values = order(outputs)
    active = _active(values, wrt)
    gathered: dict[Expr, list[Expr]] = {}
    for out, g in zip(outputs, cotangents, strict=True):
        gathered.setdefault(out, []).append(_projected(g, out))
    summed: dict[Expr, Expr] = {}
    waiting = _families(values)
    leaves = set(wrt)
    for y in reversed(values):
        if y not in active:
            continue
        if y in gathered:
            summed[y] = add(gathered.pop(y))
        family = waiting.get(y.family)
        if family is not None:
            family.discard(y)
            if family:
                continue
        if y not in leaves:
            _hand_on(y, summed, gathered, active)
    result = [summed[x] if x in summed else zeros(x.shape) for x in wrt]
    return result, summed


def _active(values: Sequence[Expr], wrt: Sequence[Expr]) -> set[Expr]:
    active = set(wrt)
    for y in values:
        if y.is_inexact and any(a in active for a in y.args):
            active.add(y)
    return active


def _families(values: Sequence[Expr]) -> dict[tuple, set[Expr]]:
    """The used outputs of each operation with several outputs: all need their cotangents first."""
    result: dict[tuple, set[Expr]] = {}
    for y in values:
        if y.get("output") is not None and y.is_inexact:
            result.setdefault(y.family, set()).add(y)
    return result


def _hand_on(y: Expr, summed: dict, gathered: dict, active: set) -> None:
    result = _pullback(y, summed, active)
    for arg, g in zip(y.args, result, strict=True):
        if g is None or arg not in active or is_zero(g):
            continue
        gathered.setdefault(arg, []).append(unbroadcast(_projected(g, arg), arg.shape))


def _projected(g: Expr, x: Expr) -> Expr:
    """A cotangent of x: real where x is."""
    return real(g) if g.is_complex and not x.is_complex else g


def _pullback(y: Expr, summed: dict, active: set) -> Sequence[Expr | None]:
    """The arguments' cotangents; called once all outputs of the operation have theirs."""
    several = y.get("output") is not None
    outputs = siblings(y) if several else [y]
    if y.op == "placeholder" or not any(o in summed for o in outputs):
        return [None] * len(y.args)
    operation = OPERATIONS[y.op]
    pullback = operation.pullback
    if pullback is None:
        return [None] * len(y.args)
    if operation.selective:
        pullback = partial(pullback, tuple(a in active for a in y.args))
    cotangents = [summed[o] if o in summed else zeros(o.shape) for o in outputs]
    ours = (outputs, cotangents) if several else (y, summed[y])
    result: Sequence[Expr | None] = pullback(*ours, *y.args)
    return result
