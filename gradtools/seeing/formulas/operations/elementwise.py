"""Elementwise operations: arithmetic, comparison, complex parts, the usual functions.

A holomorphic function defines its partial derivatives f' as expressions of its value y and its
arguments; the cotangent of an argument is then conj(f') g, and the real part of that where the
argument is real. A function that is not holomorphic (modulus, sign, angle) defines its pullback.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    apply,
    broadcast,
    broadcast_shape,
    conj,
    constant_of,
    imag,
    is_zero,
    lifted,
    negate,
    real,
    times,
)
from gradtools.seeing.formulas.expressions import (
    BOOLEAN,
    COMPLEX,
    INTEGER,
    REAL,
    Expr,
    kind_of,
    widest,
)
from gradtools.seeing.formulas.operation_record import Cotangents, EntryForm
from gradtools.seeing.formulas.operations.entering import (
    entrywise,
    makes,
    operation,
    tie_same,
    word,
)


def indicator(a: Any, relation: str, b: Any) -> Expr:
    """The indicator function: 1 where a and b, expressions or numbers, satisfy the relation."""
    return apply("compare", a, b, relation=relation)


def negation(c: Expr) -> Expr:
    """Logical not."""
    if c.op == "compare":
        return indicator(c.args[0], _RELATIONS[c["relation"]][1], c.args[1])
    if c.op == "logical_not":
        return c.args[0]
    return apply("logical_not", c)


def scaled(factor: Any, x: Expr) -> Expr:
    """A number times x; x itself for the number one."""
    return x if factor == 1 else factor * x


def is_integer(x: Expr) -> bool:
    """Whether its dtype is integer or boolean."""
    return x.kind in (INTEGER, BOOLEAN)


# Identities of the value. The name "identity" includes copies and aliases.

word("identity", lambda x: x)


@makes("stop", entrywise, lambda x: x, kind=lambda x: x.kind)
def stop(x: Expr) -> Expr:
    """stop_gradient: x with no derivative."""
    if x.op in ("number", "stop") or constant_of(x) is not None:
        return x
    return apply("stop", x)


def _cast_value(x: np.ndarray, to: str) -> np.ndarray:
    if to == BOOLEAN:
        return x != 0
    if to == INTEGER:
        return np.trunc(x).astype(np.int64)
    return np.asarray(x, complex if to == COMPLEX else float)


def _cast_form(x: Expr, args: list[ts.Written], matrix: bool) -> ts.Written:
    """Writes a cast to complex as x + 0i, because √x and √(x + 0i) differ below zero."""
    return ts.summed([args[0], ts.Written("0i")]) if x.is_complex else args[0]


@makes(
    "cast",
    entrywise,
    _cast_value,
    pullback=lambda y, g, x: [g if y.is_complex else None],
    kind=lambda x, to: to,
    entry=_cast_form,
)
def cast(x: Expr, *, dtype: Any = None) -> Expr:
    """X in another dtype; a cast to integers truncates."""
    kind = x.kind if dtype is None else kind_of(dtype)
    if x.kind == COMPLEX and kind == REAL:
        return real(x)
    if kind in (INTEGER, BOOLEAN) and kind != x.kind and (kind, x.kind) != (INTEGER, BOOLEAN):
        return apply("cast", x, to=kind)
    return x


# Arithmetic.

operation(
    "add",
    lambda y, *xs: sum(xs[1:], xs[0] + 0.0),
    lambda y, g, *xs: [g] * len(xs),
    ties=tie_same,
    make=lambda a, b, *, alpha=1: a + scaled(alpha, b),
)
word("subtract", lambda a, b, *, alpha=1: a - scaled(alpha, b))
word("negate", lambda x: negate(x))
word("multiply", lambda a, b: times(a, b))
word("divide", lambda a, b: a / b)


def _power_form(x: Expr, args: list[ts.Written], matrix: bool) -> ts.Written:
    (base,) = args
    exponent = x["exponent"]
    if isinstance(exponent, complex) or exponent >= 0:
        return _raised(base, exponent, matrix)
    return ts.over(ts.number(1.0), _raised(base, -exponent, matrix))


def _raised(base: ts.Written, exponent: Any, matrix: bool) -> ts.Written:
    if exponent == 1:
        return base
    if matrix and exponent != 0.5:
        return ts.power(base, exponent, "∘")
    return ts.power(base, exponent)


@makes(
    "power",
    entrywise,
    lambda x, exponent: np.power(x + 0.0, exponent),
    lambda y, x: [y["exponent"] * x ** (y["exponent"] - 1)],
    kind=lambda x, exponent: widest(x.kind, COMPLEX if isinstance(exponent, complex) else REAL),
    entry=_power_form,
)
def _power(a: Expr, b: Expr) -> Expr:
    exponent = constant_of(b)
    shape = broadcast_shape(a.shape, b.shape)
    if exponent is not None:
        return broadcast(a, shape) ** exponent
    base = constant_of(a)
    if base is not None and not isinstance(base, complex) and base > 0:
        return apply("exp", math.log(base) * broadcast(b, shape))
    return apply("pow", a, b)


def _pow_form(x: Expr, args: list[ts.Written], matrix: bool) -> ts.Written:
    return ts.Written(f"{args[0].at(ts.ATOM).text}^({args[1].text})", ts.POWER)


entrywise(
    "pow",
    lambda a, b: np.power(a + 0.0, b),
    lambda y, a, b: [b * apply("pow", a, b - 1), y * apply("log", a)],
    entry=_pow_form,
)
word("square", lambda x: x**2)
word("sqrt", lambda x: x**0.5)
word("rsqrt", lambda x: x**-0.5)
word("reciprocal", lambda x: x**-1)
word("addcmul", lambda x, a, b, *, value=1: x + scaled(value, a * b))
word("addcdiv", lambda x, a, b, *, value=1: x + scaled(value, a / b))
word("lerp", lambda a, b, t: a + t * (b - a))
word("hypot", lambda a, b: (a**2 + b**2) ** 0.5)

# Modulus, sign, and the parts of complex numbers.


def named(text: str) -> EntryForm:
    """A name other than its own."""
    return lambda x, args, matrix: ts.function(text, args)


@makes(
    "abs",
    entrywise,
    np.abs,
    pullback=lambda y, g, x: [real(g) * apply("sign", x)],
    kind=REAL,
    entry=lambda x, args, matrix: ts.Written(f"|{args[0].text}|"),
)
def modulus(x: Expr) -> Expr:
    """The modulus |x|."""
    return x if x.op == "abs" else apply("abs", x)


def _sign(x: np.ndarray) -> np.ndarray:
    size = np.abs(x)
    return (
        np.where(size > 0, x / np.where(size > 0, size, 1), 0) if np.iscomplexobj(x) else np.sign(x)
    )


def _sign_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    if not x.is_complex:
        return [None]
    along = y * real(conj(y) * g)
    return [(g - along) * apply("abs", x) ** -1]


entrywise("sign", _sign, pullback=_sign_pullback, entry=named("sgn"))
entrywise(
    "angle",
    np.angle,
    pullback=lambda y, g, x: [1j * (real(g) * conj(x) ** -1) if x.is_complex else None],
    kind=REAL,
    entry=named("arg"),
)
entrywise(
    "real",
    np.real,
    pullback=lambda y, g, x: [real(g)],
    kind=REAL,
    entry=named("Re"),
    make=lambda x: real(x),
)
entrywise(
    "imag",
    np.imag,
    pullback=lambda y, g, x: [1j * real(g)],
    kind=REAL,
    entry=named("Im"),
    make=lambda x: imag(x),
)
entrywise(
    "conj",
    np.conj,
    pullback=lambda y, g, x: [conj(g)],
    entry=lambda x, args, matrix: ts.superscript(args[0], "*"),
    make=lambda x: conj(x),
)
word("complex", lambda re, im: re + 1j * im)

# Rounding, comparison and truth.


def _between(left: str, right: str) -> EntryForm:
    """An entry form that encloses the argument in two delimiters."""
    return lambda x, args, matrix: ts.Written(f"{left}{args[0].text}{right}")


def _rounding(name: str, evaluate: Any, entry: EntryForm | None = None) -> None:
    """Register a rounding function; integers are returned as they are."""
    make = lambda x: x if is_integer(x) else apply(name, x)
    entrywise(name, evaluate, make=make, entry=entry)


_rounding("floor", np.floor, _between("⌊", "⌋"))
_rounding("ceil", np.ceil, _between("⌈", "⌉"))
_rounding("trunc", np.trunc)
_rounding("round", np.round)


# NumPy's function, the negated relation, and the sign.
_RELATIONS = {
    "<": (np.less, ">=", "<"),
    "<=": (np.less_equal, ">", "≤"),
    ">": (np.greater, "<=", ">"),
    ">=": (np.greater_equal, "<", "≥"),
    "==": (np.equal, "!=", "="),
    "!=": (np.not_equal, "==", "≠"),
}


def _compare_form(x: Expr, args: list[ts.Written], matrix: bool) -> ts.Written:
    a, b = (arg.at(ts.PRODUCT).text for arg in args)
    return ts.Written(f"1[{a} {_RELATIONS[x['relation']][2]} {b}]")


@makes(
    "compare",
    entrywise,
    lambda a, b, relation: _RELATIONS[relation][0](a, b),
    kind=BOOLEAN,
    entry=_compare_form,
)
def _compare(a: Expr, b: Expr, *, relation: str) -> Expr:
    return indicator(a, relation, b)


entrywise("is_finite", np.isfinite, kind=BOOLEAN)
entrywise("is_nan", np.isnan, kind=BOOLEAN)


def _truth(x: Expr) -> Expr:
    """The boolean x != 0."""
    return x if x.kind == BOOLEAN else indicator(x, "!=", 0)


entrywise(
    "logical_not",
    np.logical_not,
    kind=BOOLEAN,
    entry=_between("1[not ", "]"),
    make=lambda x: negation(_truth(x)),
)


def _logical(name: str, evaluate: Any, sign: str) -> None:
    entrywise(
        name,
        evaluate,
        kind=BOOLEAN,
        entry=lambda x, args, matrix: ts.join(
            [a.at(ts.POWER) for a in args], f" {sign} ", ts.PRODUCT
        ),
        make=lambda a, b: apply(name, _truth(a), _truth(b)),
    )


_logical("logical_and", np.logical_and, "∧")
_logical("logical_or", np.logical_or, "∨")
_logical("logical_xor", np.logical_xor, "⊕")

# Choice.


def _number_last(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    return (a, b) if constant_of(a) is None else (b, a)


@makes(
    "maximum",
    entrywise,
    np.maximum,
    lambda y, a, b: [indicator(a, ">", b), indicator(a, "<=", b)],
    entry=named("max"),
)
def maximum(a: Expr, b: Expr) -> Expr:
    """The elementwise maximum; relu where one of them is zero."""
    a, b = _number_last(a, b)
    if not is_zero(b):
        return apply("maximum", a, b)
    return apply("relu", broadcast(a, broadcast_shape(a.shape, b.shape)))


entrywise(
    "minimum",
    np.minimum,
    lambda y, a, b: [indicator(a, "<", b), indicator(a, ">=", b)],
    entry=named("min"),
    make=lambda a, b: apply("minimum", *_number_last(a, b)),
)


@makes("clip")
def clip(x: Expr, *bounds: Expr, low: Any = None, high: Any = None) -> Expr:
    """min(max(x, low), high), with both bounds as numbers or both as operands."""
    low, high = bounds or (low, high)
    result = x if low is None else maximum(x, lifted(low))
    return result if high is None else apply("minimum", result, high)


def _where_form(x: Expr, args: list[ts.Written], matrix: bool) -> ts.Written:
    c, a, b = args
    bare = x.args[0].op == "compare" and c.text.startswith("1[")
    condition = c.text[2:-1] if bare else c.text
    return ts.Written(f"{{{a.text} if {condition}; {b.text} otherwise}}")


@makes(
    "where",
    entrywise,
    np.where,
    pullback=lambda y, g, c, a, b: [None, c * g, negation(c) * g],
    kind=lambda c, a, b: widest(a.kind, b.kind),
    entry=_where_form,
)
def where(c: Expr, a: Any, b: Any) -> Expr:
    """A where c, else b."""
    c, a, b = _truth(c), lifted(a), lifted(b)
    if a is not b:
        return apply("where", c, a, b)
    return broadcast(a, broadcast_shape(c.shape, a.shape))
