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
    drop_axes,
    full,
    is_wrapper,
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
    varying,
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
    opened = _gather([t for term in terms for t in summands(term)])
    if len(opened) < len(gathered) or len(opened) < sum(len(summands(t)) for t in terms):
        gathered = opened
    if not gathered:
        return zeros(shape)
    cores = [scale(c, core) for core, c in gathered.items()]
    return cores[0] if len(cores) == 1 else _without_common(cores, shape)


def summands(x: Expr) -> list[Expr]:
    """The terms of a sum, which may be scaled, transposed or broadcast; else x alone."""
    if x.op == "add":
        return list(x.args)
    if is_wrapper(x) and x.args[0].op == "add":
        (names,), out = x["labels"], range(x.rank)
        return [product([(t, names)], out, x.shape, x["coefficient"]) for t in x.args[0].args]
    return [x]


def _gather(terms: Sequence[Expr]) -> dict[Expr, Any]:
    """The sum of the coefficients of each distinct term."""
    result: dict[Expr, Any] = {}
    for x in terms:
        coefficient, core = constant_of(x), x
        if coefficient is not None:
            core = full(1.0, x.shape)
        elif x.op == "einsum" and x["coefficient"] != 1:
            coefficient = x["coefficient"]
            core = product(zip(x.args, x["labels"], strict=True), range(x.rank), x.shape)
        result[core] = result.get(core, 0) + (1.0 if coefficient is None else coefficient)
    return {core: c for core, c in result.items() if c != 0 and not is_zero(core)}


def _without_common(terms: list[Expr], shape: tuple[int, ...]) -> Expr:
    """The sum with common factors, a common coefficient and common broadcasts factored out."""
    kept = sorted(set().union(*map(varying, terms)))
    if len(kept) < len(shape):
        return broadcast(add([drop_axes(t, kept) for t in terms]), shape, kept)
    split = [parts(t) for t in terms]
    out = range(len(shape))
    shared = set(split[0][1]).intersection(*(entries for _, entries, _ in split[1:]))
    common = [e for e in sorted(shared, key=lambda e: e[0].turn) if set(e[1]) <= set(out)]
    coefficient = _common_coefficient([c for c, _, _ in split])
    if not common and coefficient == 1:
        terms = sorted(terms, key=lambda t: t.turn)
        return expr("add", terms, shape, widest(*(t.kind for t in terms)))
    left = []
    for c, entries, _ in split:
        for entry in common:
            entries.remove(entry)
        ratio = c / coefficient
        if not isinstance(ratio, complex) and abs(abs(ratio) - 1) < 1e-14:
            ratio = 1.0 if ratio > 0 else -1.0
        left.append(product(entries, out, shape, ratio))
    return product([*common, (add(left), out)], out, shape, coefficient)


def _common_coefficient(coefficients: list) -> Any:
    """The common modulus of all coefficients, negative if most terms are; else 1."""
    sizes = [abs(c) for c in coefficients]
    if any(isinstance(c, complex) for c in coefficients):
        return 1.0
    if any(abs(s - sizes[0]) > 1e-15 * sizes[0] for s in sizes):
        return 1.0
    negative = sum(c < 0 for c in coefficients) * 2 > len(coefficients)
    return -sizes[0] if negative else sizes[0]


def plus(*terms: Expr) -> Expr:
    """The sum, broadcast as in NumPy."""
    shape = broadcast_shape(*(t.shape for t in terms))
    return add([broadcast(t, shape) for t in terms])


# --- elementwise functions


def apply(name: str, /, *of: Any, **attributes: Any) -> Expr:
    """Applies the named operation to expressions and numbers."""
    operation, args = OPERATIONS[name], tuple(map(lifted, of))
    shape, kind = operation.result(*args, **attributes)
    if operation.elementwise:
        return _elementwise(name, args, kind, attributes)
    return expr(name, args, shape, kind, **attributes)


def _elementwise(op: str, args: Sequence[Expr], kind: str, attributes: dict[str, Any]) -> Expr:
    """A function of each place, broadcast as in NumPy; broadcasts move outwards."""
    shape = broadcast_shape(*(a.shape for a in args))
    args = [broadcast(a, shape) for a in args]
    kept = sorted(set().union(*map(varying, args)))
    if len(kept) < len(shape):
        inner = _elementwise(op, [drop_axes(a, kept) for a in args], kind, attributes)
        return broadcast(inner, shape, kept)
    return expr(op, args, shape, kind, **attributes)


def power(x: Expr, exponent: Any) -> Expr:
    """x to a constant power, elementwise."""
    exponent = tidy(exponent)
    if exponent == 1:
        return x
    if exponent == 0:
        return full(1.0, x.shape)
    constant = constant_of(x)
    negative = isinstance(exponent, complex) or exponent < 0
    if constant is not None and (constant != 0 or not negative):
        return full(constant**exponent, x.shape)
    whole = not isinstance(exponent, complex) and float(exponent).is_integer()
    if x.op == "power" and whole:
        return power(x.args[0], x["exponent"] * exponent)
    if x.op == "einsum" and not contracts(x):
        c, entries, out = parts(x)
        positive = not isinstance(c, complex) and c > 0
        if whole or (positive and len(entries) == 1):
            raised = [(power(f, exponent), names) for f, names in entries]
            return product(raised, out, x.shape, c**exponent)
        if positive and c != 1:
            return scale(c**exponent, power(product(entries, out, x.shape), exponent))
    return apply("power", x, exponent=exponent)


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
        entries = [(conj(f), names) for f, names in zip(x.args, x["labels"], strict=True)]
        return product(entries, range(x.rank), x.shape, tidy(np.conj(x["coefficient"])))
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
    if not x.is_complex:
        return (x, zeros(x.shape))[which]
    if x.op == "conj":
        return scale((1.0, -1.0)[which], _part(x.args[0], which))
    if x.op == "number":
        return number((x["value"].real, x["value"].imag)[which])
    if x.op == "reshape":
        return reshape(_part(x.args[0], which), x.shape)
    if x.op == "add":
        result = [_part(t, which) for t in x.args]
        if any(f.op not in ("real", "imag") for f in result):
            return add(result)
    if x.op == "einsum":
        c, entries, out = parts(x)
        complex_ones = [k for k, (f, _) in enumerate(entries) if f.is_complex]
        if not complex_ones:
            return product(entries, out, x.shape, (complex(c).real, complex(c).imag)[which])
        if complex(c).real == 0:  # Re(i c z) = -c Im z, Im(i c z) = c Re z
            turned = _part(product(entries, out, x.shape), 1 - which)
            return scale((-complex(c).imag, complex(c).imag)[which], turned)
        if len(complex_ones) == 1 and not isinstance(c, complex):
            f, names = entries[complex_ones[0]]
            entries[complex_ones[0]] = _part(f, which), names
            return product(entries, out, x.shape, c)
        if not isinstance(c, complex) and c != 1:
            return scale(c, _part(product(entries, out, x.shape), which))
    return expr(("real", "imag")[which], (x,), x.shape, REAL)


def squeeze(x: Expr, axes: tuple[int, ...]) -> Expr:
    """Removes axes of length 1."""
    shape = tuple(n for a, n in enumerate(x.shape) if a not in axes)
    if x.op == "einsum":
        kept = [a for a in range(x.rank) if a not in axes]
        entries = zip(x.args, x["labels"], strict=True)
        return product(entries, kept, shape, x["coefficient"])
    return reshape(x.args[0], shape) if x.op == "reshape" else expr("reshape", (x,), shape, x.kind)


# --- Python's operators


_times = lambda a, b: times(a, b) if isinstance(b, Expr) else scale(b, a)
_OPERATORS = {
    "__add__": lambda a, b: plus(a, lifted(b)),
    "__radd__": lambda a, b: plus(lifted(b), a),
    "__sub__": lambda a, b: plus(a, negate(lifted(b))),
    "__rsub__": lambda a, b: plus(lifted(b), negate(a)),
    "__mul__": _times,
    "__rmul__": _times,
    "__truediv__": lambda a, b: times(a, power(lifted(b), -1)),
    "__pow__": power,
    "__neg__": negate,
    "__matmul__": matmul,
    "reshape": reshape,
    "squeeze": squeeze,
    "__array_ufunc__": None,  # NumPy scalars defer to Expr's operators
}
for _name, _operator in _OPERATORS.items():
    setattr(Expr, _name, _operator)
