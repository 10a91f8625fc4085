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

from gradtools.seeing.formulas.algebra import add, is_zero, real, zeros
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
    values, leaves, active = order(outputs), set(wrt), set(wrt)
    waiting: dict[tuple, set[Expr]] = {}  # the outputs of an operation all need their cotangents
    for y in values:
        if y.is_inexact and any(a in active for a in y.args):
            active.add(y)
        if y.get("output") is not None and y.is_inexact:
            waiting.setdefault(y.family, set()).add(y)
    gathered: dict[Expr, list[Expr]] = {}
    for out, g in zip(outputs, cotangents, strict=True):
        gathered.setdefault(out, []).append(_projected(g, out))
    summed: dict[Expr, Expr] = {}
    for y in reversed(values):
        if y not in active:
            continue
        if y in gathered:
            summed[y] = add(gathered.pop(y))
        family = waiting.get(y.family, set())
        family.discard(y)
        if family or y in leaves:
            continue
        for arg, c in zip(y.args, _pullback(y, summed, active), strict=True):
            if c is not None and arg in active and not is_zero(c):
                gathered.setdefault(arg, []).append(_projected(c, arg))
    return [summed[x] if x in summed else zeros(x.shape) for x in wrt], summed


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
