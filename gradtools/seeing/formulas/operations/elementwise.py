"""Elementwise operations: arithmetic, comparison, complex parts, the usual functions.

A holomorphic function defines its partial derivatives f' as expressions of its value y and its
arguments; the cotangent of an argument is then conj(f') g, and the real part of that where the
argument is real. A function that is not holomorphic (modulus, sign, angle) defines its pullback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import apply, broadcast, broadcast_shape, conj, imag, real
from gradtools.seeing.formulas.expressions import (
    BOOLEAN,
    COMPLEX,
    DTYPES,
    INTEGER,
    REAL,
    Expr,
    constant_of,
    is_zero,
    kind_of,
    lifted,
    widest,
)
from gradtools.seeing.formulas.operation_record import EntryForm, Made, Make, operation, word


def entrywise(
    name: str,
    evaluate: Make,
    derivatives: Callable[..., Sequence[Expr]] | None = None,
    *,
    pullback: Make | None = None,
    kind: str | Callable[..., str] = "",
    make: Make | None = None,
    **known: Any,
) -> Callable[[Made], Made]:
    """Register an elementwise operation; returns a decorator of its `make`.

    It is computed in NumPy from the arguments and the attributes. Of a holomorphic function the
    partial derivatives f' are given, from its value and its arguments; the cotangent of an argument
    is conj(f') g. The kind is by default the widest of the arguments', at least real.
    """

    def result(*args: Expr, **attributes: Any) -> tuple[tuple[int, ...], str]:
        of = kind(*args, **attributes) if callable(kind) else kind
        shape = broadcast_shape(*(a.shape for a in args))
        return shape, of or widest(REAL, *(a.kind for a in args))

    def chain_rule(y: Expr, g: Expr, *args: Expr) -> list[Expr | None]:
        assert derivatives is not None
        return [conj(d) * g for d in derivatives(y, *args)]

    return operation(
        name,
        lambda y, *args: evaluate(*args, **dict(y.attributes)),
        chain_rule if derivatives else pullback,
        make=make or (lambda *xs: apply(name, *xs)),
        result=result,
        elementwise=True,
        **known,
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


def is_integer(x: Expr) -> bool:
    """Whether its dtype is integer or boolean."""
    return x.kind in (INTEGER, BOOLEAN)


def _called(text: str) -> EntryForm:
    """An entry form that writes another name than the operation's own."""
    return lambda x, args, matrix: ts.function(text, args)


def _between(left: str, right: str) -> EntryForm:
    """An entry form that encloses the argument in two delimiters."""
    return lambda x, args, matrix: ts.Written(f"{left}{args[0].text}{right}")


# Identities of the value. The name "identity" includes copies and aliases.

word("identity", lambda x: x)


@entrywise("stop", lambda x: x, kind=lambda x: x.kind)
def stop(x: Expr) -> Expr:
    """stop_gradient: x with no derivative."""
    if x.op in ("number", "stop") or constant_of(x) is not None:
        return x
    return apply("stop", x)


@entrywise(
    "cast",
    lambda x, to: x.astype(DTYPES[to]),
    pullback=lambda y, g, x: [g if y.is_complex else None],
    kind=lambda x, to: to,
    # √x and √(x + 0i) differ below zero, so that a cast to complex is written.
    entry=lambda x, args, matrix: (
        ts.Written(f"{args[0].text} + 0i", ts.SUM) if x.is_complex else args[0]
    ),
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


def _scaled(factor: Any, x: Expr) -> Expr:
    return x if factor == 1 else factor * x


operation(
    "add",
    lambda y, *xs: sum(xs[1:], xs[0] + 0.0),
    lambda y, g, *xs: [g] * len(xs),
    make=lambda a, b, *, alpha=1: a + _scaled(alpha, b),
)
word("subtract", lambda a, b, *, alpha=1: a - _scaled(alpha, b))
word("negate", lambda x: -x)
word("multiply", lambda a, b: a * b)
word("divide", lambda a, b: a / b)


def _power_form(x: Expr, args: list[ts.Written], matrix: bool) -> ts.Written:
    (base,), exponent = args, x["exponent"]
    negative = not isinstance(exponent, complex) and exponent < 0
    size = -exponent if negative else exponent
    raised = base if size == 1 else ts.power(base, size, "∘" if matrix and size != 0.5 else "")
    return ts.over(ts.number(1.0), raised) if negative else raised


@entrywise(
    "power",
    lambda x, exponent: np.power(x + 0.0, exponent),
    lambda y, x: [y["exponent"] * x ** (y["exponent"] - 1)],
    kind=lambda x, exponent: widest(x.kind, COMPLEX if isinstance(exponent, complex) else REAL),
    entry=_power_form,
)
def _power(a: Expr, b: Expr) -> Any:
    exponent, base = constant_of(b), constant_of(a)
    shape = broadcast_shape(a.shape, b.shape)
    if exponent is not None:
        return broadcast(a, shape) ** exponent
    if base is not None and not isinstance(base, complex) and base > 0:
        return apply("exp", math.log(base) * broadcast(b, shape))
    return apply("pow", a, b)


entrywise(
    "pow",
    lambda a, b: np.power(a + 0.0, b),
    lambda y, a, b: [b * apply("pow", a, b - 1), y * apply("log", a)],
    entry=lambda x, args, matrix: ts.Written(
        f"{args[0].at(ts.ATOM).text}^({args[1].text})", ts.POWER
    ),
)
word("square", lambda x: x**2)
word("sqrt", lambda x: x**0.5)
word("rsqrt", lambda x: x**-0.5)
word("reciprocal", lambda x: x**-1)
word("addcmul", lambda x, a, b, *, value=1: x + _scaled(value, a * b))
word("addcdiv", lambda x, a, b, *, value=1: x + _scaled(value, a / b))
word("lerp", lambda a, b, t: a + t * (b - a))
word("hypot", lambda a, b: (a**2 + b**2) ** 0.5)

# Modulus, sign, and the parts of complex numbers.


@entrywise(
    "abs",
    np.abs,
    pullback=lambda y, g, x: [real(g) * apply("sign", x)],
    kind=REAL,
    entry=_between("|", "|"),
)
def modulus(x: Expr) -> Expr:
    """The modulus |x|."""
    return x if x.op == "abs" else apply("abs", x)


def _sign(x: np.ndarray) -> np.ndarray:
    if not np.iscomplexobj(x):
        return np.sign(x)
    size = np.abs(x)
    return np.where(size > 0, x / np.where(size > 0, size, 1), 0)


def _sign_pullback(y: Expr, g: Expr, x: Expr) -> list[Expr | None]:
    if not x.is_complex:
        return [None]
    along = y * real(conj(y) * g)
    return [(g - along) * apply("abs", x) ** -1]


entrywise("sign", _sign, pullback=_sign_pullback, entry=_called("sgn"))
entrywise(
    "angle",
    np.angle,
    pullback=lambda y, g, x: [1j * (real(g) * conj(x) ** -1) if x.is_complex else None],
    kind=REAL,
    entry=_called("arg"),
)
_real_part = lambda y, g, x: [real(g)]
_imaginary_part = lambda y, g, x: [1j * real(g)]
entrywise("real", np.real, pullback=_real_part, kind=REAL, entry=_called("Re"), make=real)
entrywise("imag", np.imag, pullback=_imaginary_part, kind=REAL, entry=_called("Im"), make=imag)
entrywise(
    "conj",
    np.conj,
    pullback=lambda y, g, x: [conj(g)],
    entry=lambda x, args, matrix: ts.superscript(args[0], "*"),
    make=conj,
)
word("complex", lambda re, im: re + 1j * im)

# Rounding, comparison and truth.


_rounded = lambda name: lambda x: x if is_integer(x) else apply(name, x)
entrywise("floor", np.floor, make=_rounded("floor"), entry=_between("⌊", "⌋"))
entrywise("ceil", np.ceil, make=_rounded("ceil"), entry=_between("⌈", "⌉"))
entrywise("trunc", np.trunc, make=_rounded("trunc"))
entrywise("round", np.round, make=_rounded("round"))

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


entrywise(
    "compare",
    lambda a, b, relation: _RELATIONS[relation][0](a, b),
    kind=BOOLEAN,
    entry=_compare_form,
    make=lambda a, b, *, relation: indicator(a, relation, b),
)
entrywise("is_finite", np.isfinite, kind=BOOLEAN)
entrywise("is_nan", np.isnan, kind=BOOLEAN)


def _truth(x: Expr) -> Expr:
    """The boolean x != 0."""
    return x if x.kind == BOOLEAN else indicator(x, "!=", 0)


def _logical(name: str, evaluate: Make, sign: str) -> None:
    make = lambda a, b: apply(name, _truth(a), _truth(b))
    operands = lambda args: [a.at(ts.POWER) for a in args]
    entry = lambda x, args, matrix: ts.join(operands(args), f" {sign} ", ts.PRODUCT)
    entrywise(name, evaluate, kind=BOOLEAN, entry=entry, make=make)


_logical("logical_and", np.logical_and, "∧")
_logical("logical_or", np.logical_or, "∨")
_logical("logical_xor", np.logical_xor, "⊕")
entrywise(
    "logical_not",
    np.logical_not,
    kind=BOOLEAN,
    entry=_between("1[not ", "]"),
    make=lambda x: negation(_truth(x)),
)

# Choice.


def _number_last(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    return (a, b) if constant_of(a) is None else (b, a)


@entrywise(
    "maximum",
    np.maximum,
    lambda y, a, b: [indicator(a, ">", b), indicator(a, "<=", b)],
    entry=_called("max"),
)
def maximum(a: Expr, b: Expr) -> Any:
    """The elementwise maximum; relu where one of them is zero."""
    a, b = _number_last(a, b)
    if constant_of(b) not in (0, -math.inf):
        return apply("maximum", a, b)
    whole = broadcast(a, broadcast_shape(a.shape, b.shape))
    return apply("relu", whole) if is_zero(b) else whole


entrywise(
    "minimum",
    np.minimum,
    lambda y, a, b: [indicator(a, "<", b), indicator(a, ">=", b)],
    entry=_called("min"),
    make=lambda a, b: apply("minimum", *_number_last(a, b)),
)


@operation("clip")
def clip(x: Expr, *bounds: Expr, low: Any = None, high: Any = None) -> Any:
    """min(max(x, low), high), with both bounds as numbers or both as operands."""
    low, high = bounds or (low, high)
    result = x if low is None else maximum(x, lifted(low))
    return result if high is None else apply("minimum", result, high)


def _where_form(x: Expr, args: list[ts.Written], matrix: bool) -> ts.Written:
    c, a, b = args
    bare = x.args[0].op == "compare" and c.text.startswith("1[")
    condition = c.text[2:-1] if bare else c.text
    return ts.Written(f"{{{a.text} if {condition}; {b.text} otherwise}}")


@entrywise(
    "where",
    np.where,
    pullback=lambda y, g, c, a, b: [None, c * g, negation(c) * g],
    kind=lambda c, a, b: widest(a.kind, b.kind),
    entry=_where_form,
)
def where(c: Expr, a: Any, b: Any) -> Expr:
    """A where c, else b; a constant mask may select one of them."""
    c, a, b = _truth(c), lifted(a), lifted(b)
    mask = c["value"].array if c.op == "array" else None
    if a is b or (mask is not None and mask.all() == mask.any()):
        chosen = b if mask is not None and not mask.all() else a
        return broadcast(chosen, broadcast_shape(c.shape, a.shape, b.shape))
    return apply("where", c, a, b)


# Exponentials, logarithms, trigonometric functions.

entrywise("exp", np.exp, lambda y, x: [y])
word("exp2", lambda x: apply("exp", math.log(2) * x))
word("expm1", lambda x: apply("exp", x) - 1)
entrywise("log", np.log, lambda y, x: [x**-1])
word("log2", lambda x: 1 / math.log(2) * apply("log", x))
word("log10", lambda x: 1 / math.log(10) * apply("log", x))
word("log1p", lambda x: apply("log", 1 + x))
word("logaddexp", lambda a, b: apply("softplus", b) if is_zero(a) else b + apply("softplus", a - b))
word("xlogy", lambda a, b: where(indicator(a, "==", 0), 0, a * apply("log", b)))
entrywise("sin", np.sin, lambda y, x: [apply("cos", x)])
entrywise("cos", np.cos, lambda y, x: [-apply("sin", x)])
entrywise("tan", np.tan, lambda y, x: [1 + y**2])
entrywise("sinh", np.sinh, lambda y, x: [apply("cosh", x)])
entrywise("cosh", np.cosh, lambda y, x: [apply("sinh", x)])
entrywise("tanh", np.tanh, lambda y, x: [1 - y**2])
entrywise("arcsin", np.arcsin, lambda y, x: [(1 - x**2) ** -0.5])
entrywise("arccos", np.arccos, lambda y, x: [-((1 - x**2) ** -0.5)])
entrywise("arctan", np.arctan, lambda y, x: [(1 + x**2) ** -1])
entrywise("arcsinh", np.arcsinh, lambda y, x: [(1 + x**2) ** -0.5])
entrywise("arccosh", np.arccosh, lambda y, x: [(x - 1) ** -0.5 * (x + 1) ** -0.5])
entrywise("arctanh", np.arctanh, lambda y, x: [(1 - x**2) ** -1])
entrywise(
    "arctan2",
    np.arctan2,
    lambda y, a, b: [b * (a**2 + b**2) ** -1, -(a * (a**2 + b**2) ** -1)],
    entry=_called("atan2"),
)
_erf = np.vectorize(math.erf, otypes=[float])
entrywise("erf", _erf, lambda y, x: [2 / math.sqrt(math.pi) * apply("exp", -(x**2))])
word("erfc", lambda x: 1 - apply("erf", x))

# Activations, and the functions that they are composed of.


def _sigmoid(x: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(x):
        return 1 / (1 + np.exp(-x))
    e = np.exp(-np.abs(x))  # no overflow, and full relative precision in both tails
    return np.where(x >= 0, 1.0, e) / (1 + e)


entrywise(
    "softplus",
    lambda x: np.logaddexp(x, 0),
    lambda y, x: [apply("sigmoid", x)],
    definition="softplus(x) := log(1 + e^x)",
)
entrywise(
    "sigmoid",
    _sigmoid,
    lambda y, x: [y * (1 - y)],
    definition="sigmoid(x) := 1 / (1 + e^(-x))",
)
word("log_sigmoid", lambda x: -apply("softplus", -x))
word("silu", lambda x: x * apply("sigmoid", x))
entrywise(
    "relu",
    lambda x: np.maximum(x, 0),
    lambda y, x: [indicator(x, ">", 0)],
    definition="relu(x) := max(x, 0)",
)
