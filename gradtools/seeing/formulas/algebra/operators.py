"""Python's operators between expressions, so that a pullback reads as its formula."""

from __future__ import annotations

from typing import Any

from gradtools.seeing.formulas.algebra.arrays import matmul, negate, scale, times
from gradtools.seeing.formulas.algebra.constants import lifted
from gradtools.seeing.formulas.algebra.elementwise import divide, power
from gradtools.seeing.formulas.algebra.sums import plus, subtract
from gradtools.seeing.formulas.expressions import Expr


def _times(a: Expr, b: Any) -> Expr:
    return times(a, b) if isinstance(b, Expr) else scale(b, a)


OPERATORS = {
    "__add__": lambda a, b: plus(a, lifted(b)),
    "__radd__": lambda a, b: plus(lifted(b), a),
    "__sub__": lambda a, b: subtract(a, lifted(b)),
    "__rsub__": lambda a, b: subtract(lifted(b), a),
    "__mul__": _times,
    "__rmul__": _times,
    "__truediv__": lambda a, b: divide(a, lifted(b)),
    "__pow__": power,
    "__neg__": negate,
    "__matmul__": matmul,
    "__array_ufunc__": None,  # a number of NumPy's leaves its product with an expression to us
}
for _name, _operator in OPERATORS.items():
    setattr(Expr, _name, _operator)
