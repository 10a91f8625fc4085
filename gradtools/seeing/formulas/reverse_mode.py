"""Implements reverse mode on expressions: transforms a recorded program into its adjoint.

The adjoint program consists of expressions, which can be simplified, written, evaluated, and
differentiated again (double backward)::

    first order    x_bar = J^H g
    second order   the adjoint of <u, x_bar>, as a function of x and g
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtools.seeing.formulas.algebra import add, real
from gradtools.seeing.formulas.expressions import OPERATIONS, SEVERAL, Expr, full, is_zero, order
from gradtools.seeing.formulas.opaque import pulled_back


@dataclass(frozen=True, eq=False)
class Recorded:
    """One recorded run of a program, as expressions."""

    inputs: tuple[Expr, ...]  # one placeholder per leaf of the arguments
    outputs: tuple[Expr, ...]
    held: dict[Expr, Any] = field(default_factory=dict)  # maps captured values to their arrays
    wanted: tuple[Expr, ...] = ()  # captured values that require grad
    captured: tuple[Any, ...] = ()  # the framework arrays of `wanted`
    dtypes: frozenset[str] = frozenset()  # the dtypes of floating and complex results

    @property
    def opened(self) -> tuple[Expr, ...]:
        """Returns the inputs and the captured values that require grad."""
        return (*self.inputs, *self.wanted)


def adjoint(
    outputs: Sequence[Expr], cotangents: Sequence[Expr], wrt: Sequence[Expr]
) -> tuple[list[Expr], dict[Expr, Expr]]:
    """Builds the adjoint program in reverse topological order of the values.

    Returns:
        The cotangents of ``wrt``, and a dict that maps each value of the program to its cotangent.
    """
    values, active = order(outputs), set(wrt)
    for y in values:
        if (y.is_inexact or y.kind == SEVERAL) and not active.isdisjoint(y.args):
            active.add(y)
    gathered: dict[Expr, list[Expr]] = {}
    summed: dict[Expr, Expr] = {}
    several: dict[Expr, dict[int, Expr]] = {}  # the cotangents of an opaque operation's outputs

    def contribute(x: Expr, g: Expr | None) -> None:
        """Adds g to the cotangents of x; if x is real, adds the real part of g."""
        if g is not None and x in active and not is_zero(g):
            gathered.setdefault(x, []).append(real(g) if g.is_complex and not x.is_complex else g)

    for out, g in zip(outputs, cotangents, strict=True):
        contribute(out, g)
    for y in reversed(values):
        if y in gathered:
            summed[y] = add(gathered.pop(y))
        elif y not in several:
            continue
        pullback = OPERATIONS[y.op].pullback if y.args else None
        pulled: Sequence[Expr | None] = ()
        if y in several:
            pulled = pulled_back(y, several[y], active)
        elif y.op == "output":
            several.setdefault(y.args[0], {})[y["index"]] = summed[y]
        elif pullback is not None:
            pulled = pullback(y, summed[y], *y.args)
        for arg, c in zip(y.args, pulled, strict=False):
            contribute(arg, c)
    return [summed[x] if x in summed else full(0.0, x.shape) for x in wrt], summed
