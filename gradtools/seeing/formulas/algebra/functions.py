"""Canonical sums, elementwise functions, conjugates and real and imaginary parts.

A sum collects like terms and factors common factors out. Broadcasts are moved out of
elementwise functions. Conjugates and real parts are moved to the leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradtools.seeing.formulas.algebra.products import (
    broadcast,
    broadcast_shape,
    constant_of,
    contracts,
    full,
    is_zero,
    lifted,
    matmul,
    negate,
    number,
    parts,
    product,
    reshape,
    scale,
    tidy,
    times,
    zeros,
)
from gradtools.seeing.formulas.expressions import COMPLEX, REAL, Expr, expr, widest
from gradtools.seeing.formulas.operation_record import OPERATIONS


def add(terms: Sequence[Expr]) -> Expr:
    """The sum of terms of one shape, with like terms collected and common factors factored out."""
    if len(terms) == 1:
        return terms[0]
    shape = terms[0].shape
    gathered = _gather(terms)
    opened = _gather([t for term in terms for t in _terms(term)])
    if len(opened) < len(gathered) or len(opened) < sum(len(_terms(t)) for t in terms):
        gathered = opened
    if not gathered:
        return zeros(shape)
    cores = [scale(c, core) for core, c in gathered.items()]
    if len(cores) == 1:
        return cores[0]
    return _without_common(cores, shape)


def _terms(x: Expr) -> tuple[Expr, ...]:
    if x.op == "add":
        return x.args
    if x.op == "einsum" and len(x.args) == 1 and x.args[0].op == "add" and not contracts(x):
        c, (inner,), (names,) = x["coefficient"], x.args, x["labels"]
        return tuple(product([t], [names], range(x.rank), x.shape, c) for t in inner.args)
    return (x,)


def _gather(terms: Sequence[Expr]) -> dict[Expr, Any]:
    result: dict[Expr, Any] = {}
    for term in terms:
        coefficient, core = _coefficient(term)
        result[core] = result.get(core, 0) + coefficient
    return {core: c for core, c in result.items() if c != 0 and not is_zero(core)}


def _coefficient(x: Expr) -> tuple[Any, Expr]:
    constant = constant_of(x)
    if constant is not None:
        return constant, full(1.0, x.shape)
    if x.op == "einsum" and x["coefficient"] != 1:
        c = x["coefficient"]
        return c, product(x.args, x["labels"], range(x.rank), x.shape)
    return 1.0, x


def _without_common(terms: list[Expr], shape: tuple[int, ...]) -> Expr:
    """The sum with common factors, a common coefficient and common broadcasts factored out."""
    split = [parts(t) for t in terms]
    used = {l for _, _, labels, _ in split for names in labels for l in names}
    kept = [a for a in range(len(shape)) if a in used]
    if len(kept) < len(shape):
        inner = add([drop_axes(t, kept) for t in terms])
        return product([inner], [kept], range(len(shape)), shape)
    common = _common_factors(split)
    coefficient = _common_coefficient([s[0] for s in split])
    if not common and coefficient == 1:
        terms = sorted(terms, key=lambda t: t.turn)
        return expr("add", terms, shape, widest(*(t.kind for t in terms)))
    left = [_remove(s, common, coefficient, shape) for s in split]
    factors, labels = [f for f, _ in common], [n for _, n in common]
    rest = add(left)
    out = range(len(shape))
    return product([*factors, rest], [*labels, out], out, shape, coefficient)


def _common_factors(split: list) -> list:
    """The factors that occur with equal labels in each term, without summed labels."""
    terms = [list(zip(factors, labels, strict=True)) for _, factors, labels, _ in split]
    out = split[0][3]
    shared = set(terms[0]).intersection(*terms[1:])
    chosen: list = []
    for entry in sorted(shared, key=lambda f: f[0].turn):
        if all(l in out for l in entry[1]):
            chosen.append(entry)
    return chosen


def _common_coefficient(coefficients: list) -> Any:
    """The common modulus of all coefficients, negative if most terms are; else 1."""
    sizes = [abs(c) for c in coefficients]
    if any(isinstance(c, complex) for c in coefficients):
        return 1.0
    if any(abs(s - sizes[0]) > 1e-15 * sizes[0] for s in sizes):
        return 1.0
    negative = sum(c < 0 for c in coefficients) * 2 > len(coefficients)
    return -sizes[0] if negative else sizes[0]


def _remove(s: tuple, common: list, coefficient: Any, shape: tuple[int, ...]) -> Expr:
    c, factors, labels, out = s
    left = list(zip(factors, labels, strict=True))
    for entry in common:
        left.remove(entry)
    rest = c / coefficient
    if abs(abs(rest) - 1) < 1e-14 and not isinstance(rest, complex):
        rest = 1.0 if rest > 0 else -1.0
    return product([f for f, _ in left], [n for _, n in left], out, shape, rest)


def subtract(a: Expr, b: Expr) -> Expr:
    """a - b, broadcast as in NumPy."""
    return plus(a, negate(b))


def plus(*terms: Expr) -> Expr:
    """The sum, broadcast as in NumPy."""
    shape = broadcast_shape(*(t.shape for t in terms))
    return add([broadcast(t, shape) for t in terms])


# --- elementwise functions


def apply(name: str, /, *of: Any, **attributes: Any) -> Any:
    """Applies the named operation to expressions and numbers."""
    operation, args = OPERATIONS[name], tuple(map(lifted, of))
    result = operation.result(*args, **attributes)
    shape, kind = result
    if operation.elementwise:
        return _elementwise(name, args, kind, attributes)
    return expr(name, args, shape, kind, **attributes)


def _elementwise(op: str, args: Sequence[Expr], kind: str, attributes: dict[str, Any]) -> Expr:
    """A function of each place, broadcast as in NumPy; broadcasts move outwards."""
    shape = broadcast_shape(*(a.shape for a in args))
    args = [broadcast(a, shape) for a in args]
    rank = len(shape)
    used = {l for a in args for names in parts(a)[2] for l in names}
    kept = [a for a in range(rank) if a in used]
    if len(kept) < rank:
        inner = [drop_axes(a, kept) for a in args]
        return product([_elementwise(op, inner, kind, attributes)], [kept], range(rank), shape)
    return expr(op, args, shape, kind, **attributes)


def drop_axes(x: Expr, kept: Sequence[int]) -> Expr:
    """x restricted to the axes `kept`; it must be broadcast along the others."""
    c, factors, labels, _ = parts(x)
    return product(factors, labels, kept, [x.shape[a] for a in kept], c)


def power(x: Expr, exponent: Any) -> Expr:
    """x to a constant power, elementwise."""
    exponent = tidy(exponent)
    if exponent == 1:
        return x
    if exponent == 0:
        return full(1.0, x.shape)
    constant = constant_of(x)
    if constant is not None and (constant != 0 or not _is_negative(exponent)):
        return full(constant**exponent, x.shape)
    whole = not isinstance(exponent, complex) and float(exponent).is_integer()
    if x.op == "power" and whole:
        return power(x.args[0], x["exponent"] * exponent)
    if x.op == "einsum" and not contracts(x):
        return _power_of_product(x, exponent, whole)
    return apply("power", x, exponent=exponent)


def divide(a: Expr, b: Expr) -> Expr:
    """a / b, elementwise."""
    return times(a, power(b, -1))


def _is_negative(exponent: Any) -> bool:
    return isinstance(exponent, complex) or exponent < 0


def _power_of_product(x: Expr, exponent: Any, whole: bool) -> Expr:
    c, factors, labels, out = parts(x)
    positive = not isinstance(c, complex) and c > 0
    if whole or (positive and len(factors) == 1):
        raised = [power(f, exponent) for f in factors]
        return product(raised, labels, out, x.shape, c**exponent)
    if positive and c != 1:
        return scale(c**exponent, power(product(factors, labels, out, x.shape), exponent))
    return apply("power", x, exponent=exponent)  # type: ignore[no-any-return]


# --- parts of complex numbers


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
    exponent = x["exponent"] if x.op == "power" else 0.5
    if not isinstance(exponent, complex) and float(exponent).is_integer():
        return power(conj(x.args[0]), exponent)
    return expr("conj", (x,), x.shape, COMPLEX)


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


def squeeze(x: Expr, axes: tuple[int, ...]) -> Expr:
    """Removes axes of length 1."""
    shape = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    if x.op == "einsum":
        kept = tuple(a for a in range(x.rank) if a not in axes)
        return product(x.args, x["labels"], kept, shape, x["coefficient"])
    return reshape(x.args[0], shape) if x.op == "reshape" else expr("reshape", (x,), shape, x.kind)


# --- Python's operators


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
    "reshape": reshape,
    "squeeze": squeeze,
    "__array_ufunc__": None,  # NumPy scalars defer to Expr's operators
}
for _name, _operator in OPERATORS.items():
    setattr(Expr, _name, _operator)
