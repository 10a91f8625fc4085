"""Conjugates and real parts, simplified by moving them to the leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradtools.seeing.formulas.algebra.arrays import scale, swap
from gradtools.seeing.formulas.algebra.constants import number, tidy, zeros
from gradtools.seeing.formulas.algebra.elementwise import power
from gradtools.seeing.formulas.algebra.products import parts, product
from gradtools.seeing.formulas.algebra.reshapes import reshape
from gradtools.seeing.formulas.algebra.sums import add
from gradtools.seeing.formulas.expressions import COMPLEX, REAL, Expr, expr


def conj(x: Expr) -> Expr:
    """The complex conjugate, moved to the leaves."""
    if not x.is_complex:
        return x
    if x.op == "conj":
        return x.args[0]
    if x.op == "number":
        return number(np.conj(x["value"]))
    if x.op == "einsum":
        c = tidy(np.conj(x["coefficient"]))
        return product([conj(f) for f in x.args], x["labels"], range(x.rank), x.shape, c)
    if x.op == "add":
        return add([conj(t) for t in x.args])
    if x.op == "reshape":
        return reshape(conj(x.args[0]), x.shape)
    if x.op == "power" and float(np.real(x["exponent"])) == x["exponent"] and _whole(x["exponent"]):
        return power(conj(x.args[0]), x["exponent"])
    return expr("conj", (x,), x.shape, COMPLEX)


def adjoint_matrix(x: Expr) -> Expr:
    """The conjugate transpose of the last two axes."""
    return conj(swap(x))


def _whole(value: Any) -> bool:
    return float(np.real(value)).is_integer()


def real(x: Expr) -> Expr:
    """The real part."""
    return _part(x, 0)


def imag(x: Expr) -> Expr:
    """The imaginary part."""
    return _part(x, 1)


def _part(x: Expr, which: int) -> Expr:
    """The real (0) or imaginary (1) part."""
    name = ("real", "imag")[which]
    if not x.is_complex:
        return (x, zeros(x.shape))[which]
    if x.op == "conj":
        return scale((1.0, -1.0)[which], _part(x.args[0], which))
    if x.op == "number":
        return number((x["value"].real, x["value"].imag)[which])
    if x.op == "add":
        result = [_part(t, which) for t in x.args]
        if any(f.op not in ("real", "imag") for f in result):
            return add(result)
    if x.op == "einsum":
        return _part_of_product(x, which)
    if x.op == "reshape":
        return reshape(_part(x.args[0], which), x.shape)
    return expr(name, (x,), x.shape, REAL)


def _part_of_product(x: Expr, which: int) -> Expr:
    c, factors, labels, out = parts(x)
    complex_ones = [k for k, f in enumerate(factors) if f.is_complex]
    if not complex_ones:
        c = complex(c)
        return product(factors, labels, out, x.shape, (c.real, c.imag)[which])
    if complex(c).real == 0:  # Re(i c z) = -c Im z, Im(i c z) = c Re z
        turned = product(factors, labels, out, x.shape)
        return scale((-complex(c).imag, complex(c).imag)[which], _part(turned, 1 - which))
    if len(complex_ones) == 1 and not isinstance(c, complex):
        k = complex_ones[0]
        factors[k] = _part(factors[k], which)
        return product(factors, labels, out, x.shape, c)
    if not isinstance(c, complex) and c != 1:
        return scale(c, _part(product(factors, labels, out, x.shape), which))
    return expr(("real", "imag")[which], (x,), x.shape, REAL)
