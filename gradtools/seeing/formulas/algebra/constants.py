"""Numbers, and arrays that hold one number throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradtools.seeing.formulas.expressions import COMPLEX, INTEGER, REAL, ArrayValue, Expr, expr


def number(value: Any) -> Expr:
    """A constant without axes."""
    value = value.item() if hasattr(value, "item") else value
    kind = COMPLEX if isinstance(value, complex) else REAL
    return expr("number", (), (), kind, value=tidy(value))


def lifted(x: Any) -> Expr:
    """An expression as it is, a number as one."""
    return x if isinstance(x, Expr) else number(x)


def tidy(value: Any) -> Any:
    """A plain number: complex only if it must be, no negative zero."""
    value = complex(value)
    return value if value.imag else float(value.real) + 0.0


def full(value: Any, shape: Sequence[int]) -> Expr:
    """A constant in each place."""
    one = number(value)
    if not shape:
        return one
    coefficient = one["value"]
    kind = COMPLEX if isinstance(coefficient, complex) else REAL
    return expr("einsum", (), tuple(shape), kind, labels=(), coefficient=coefficient)


def zeros(shape: Sequence[int]) -> Expr:
    """Zeros."""
    return full(0.0, shape)


def array(value: Any) -> Expr:
    """An array that the program holds."""
    value = np.asarray(value)
    if value.size and np.all(value == value.flat[0]) and value.dtype.kind in "fc":
        return full(value.flat[0].item(), value.shape)
    n = value.shape[0] if value.ndim == 2 else 0
    if n > 1 and value.shape == (n, n) and np.array_equal(value, np.eye(n)):
        return identity(n)
    kind = {"f": REAL, "c": COMPLEX, "b": "boolean"}.get(value.dtype.kind, INTEGER)
    return expr("array", (), value.shape, kind, value=ArrayValue(value))


def identity(n: int) -> Expr:
    """The unit matrix."""
    return expr("unit_matrix", (), (n, n), REAL) if n > 1 else full(1.0, (n, n))


def constant_of(x: Expr) -> Any:
    """The number that x is in each place, or None."""
    if x.op == "number":
        return x["value"]
    if x.op == "einsum" and not x.args:
        return x["coefficient"]
    return None


def is_zero(x: Expr) -> bool:
    """Whether x is known to be zero."""
    return constant_of(x) == 0
