"""Elementwise operations: arithmetic, complex parts, comparison, choice, the usual functions.

Of a holomorphic function f the derivatives f' are given as expressions of its value y and its
arguments; the cotangent of an argument is conj(f') g, and the real part of that where the argument
is real. Functions that are not holomorphic (modulus, sign, real part) give their pullback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import apply, broadcast, broadcast_shape, conj, real
from gradtools.seeing.formulas.expressions import (
    BOOLEAN,
    DTYPES,
    INTEGER,
    Expr,
    constant_of,
    is_zero,
    kind_of,
    lifted,
    operation,
    widest,
)

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import Writer


def _entrywise(
    name: str,
    evaluate: Callable[..., Any],
    derivatives: Callable[..., Sequence[Expr]] | None = None,
    pullback: Callable[..., Sequence[Expr | None]] | None = None,
    form: Callable[[Writer, Expr], ts.Written] | None = None,
    definition: str = "",
) -> None:
    """Registers an operation that NumPy computes from the arguments and the attributes."""

    def chain_rule(y: Expr, g: Expr, *args: Expr) -> list[Expr | None]:
        assert derivatives is not None
        return [conj(d) * g for d in derivatives(y, *args)]

    operation(
        name,
        lambda y, *args: evaluate(*args, **dict(y.attributes)),
        chain_rule if derivatives else pullback,
        form=form,
        definition=definition,
    )


def _named(name: str) -> Callable[[Writer, Expr], ts.Written]:
    """Writes an operation by another name than its own."""
    return lambda w, x: ts.function(name, map(w.write, x.args))


# --- arithmetic, modulus, and the parts of complex numbers


def _write_sum(w: Writer, x: Expr) -> ts.Written:
    """The terms: compositions first, then named values, then numbers."""
    rank = lambda a: 2 if constant_of(a) is not None else int(w.is_named(a))
    return ts.summed([w.aligned(a, x) for a in sorted(x.args, key=rank)])


def _write_power(w: Writer, x: Expr) -> ts.Written:
    base, exponent = w.write(x.args[0]), x["exponent"]
    negative = not isinstance(exponent, complex) and exponent < 0
    size = -exponent if negative else exponent
    raised = base
    if size != 1:  # the power of a whole matrix is marked as elementwise
        raised = ts.power(base, size, "∘" if x.rank > 1 and size != 0.5 else "")
    return ts.over(ts.number(1.0), raised) if negative else raised


def _sign(x: np.ndarray) -> np.ndarray:
    if not np.iscomplexobj(x):
        return np.sign(x)
    size = np.abs(x)
    return np.where(size > 0, x / np.where(size > 0, size, 1), 0)


def _pull_sign(y: Expr, g: Expr, x: Expr) -> list[Expr | None]:
    if not x.is_complex:
        return [None]
    return [(g - y * real(conj(y) * g)) * apply("abs", x, kind="real") ** -1]


operation(
    "add",
    lambda y, *xs: sum(xs[1:], xs[0] + 0.0),
    lambda y, g, *xs: [g] * len(xs),
    form=_write_sum,
)
_entrywise(
    "power",
    lambda x, exponent: np.power(x + 0.0, exponent),
    lambda y, x: [y["exponent"] * x ** (y["exponent"] - 1)],
    form=_write_power,
)
_entrywise(
    "abs",
    np.abs,
    pullback=lambda y, g, x: [real(g) * apply("sign", x)],
    form=lambda w, x: ts.Written(f"|{w.write(x.args[0]).text}|"),
)
_entrywise("sign", _sign, pullback=_pull_sign, form=_named("sgn"))
_entrywise("real", np.real, pullback=lambda y, g, x: [real(g)], form=_named("Re"))
_entrywise("imag", np.imag, pullback=lambda y, g, x: [1j * real(g)], form=_named("Im"))
_entrywise(
    "conj",
    np.conj,
    pullback=lambda y, g, x: [conj(g)],
    form=lambda w, x: ts.superscript(w.write(x.args[0]), "*"),
)


def modulus(x: Expr) -> Expr:
    """The modulus |x|."""
    return x if x.op == "abs" else apply("abs", x, kind="real")


# --- identities of the value


def _write_cast(w: Writer, x: Expr) -> ts.Written:
    """√x and √(x + 0i) differ below zero, so that a cast to complex is written."""
    inner = w.write(x.args[0])
    return ts.Written(f"{inner.text} + 0i", ts.SUM) if x.is_complex else inner


_entrywise("stop", lambda x: x)
_entrywise(
    "cast",
    lambda x, to: x.astype(DTYPES[to]),
    pullback=lambda y, g, x: [g if y.is_complex else None],
    form=_write_cast,
)


def stop(x: Expr) -> Expr:
    """stop_gradient: x with no derivative."""
    plain = x.op == "stop" or constant_of(x) is not None
    return x if plain else apply("stop", x, kind=x.kind)


def cast_to(x: Expr, kind: str) -> Expr:
    """x as values of another kind."""
    return apply("cast", x, kind=kind, to=kind)


def cast(x: Expr, *, dtype: Any = None) -> Expr:
    """x in another dtype; a cast to integers truncates."""
    kind = x.kind if dtype is None else kind_of(dtype)
    if x.is_complex and kind == "real":
        return real(x)
    if kind in (INTEGER, BOOLEAN) and kind != x.kind and (kind, x.kind) != (INTEGER, BOOLEAN):
        return cast_to(x, kind)
    return x


# --- comparison and choice

# NumPy's function, the negated relation, and the sign.
_RELATIONS = {
    "<": (np.less, ">=", "<"),
    "<=": (np.less_equal, ">", "≤"),
    ">": (np.greater, "<=", ">"),
    ">=": (np.greater_equal, "<", "≥"),
    "==": (np.equal, "!=", "="),
    "!=": (np.not_equal, "==", "≠"),
}


def indicator(a: Any, b: Any, relation: str) -> Expr:
    """The indicator function: 1 where a and b, expressions or numbers, satisfy the relation."""
    return apply("compare", a, b, kind=BOOLEAN, relation=relation)


def negation(c: Expr) -> Expr:
    """Logical not."""
    if c.op == "compare":
        a, b = c.args
        return indicator(a, b, _RELATIONS[c["relation"]][1])
    return 1 - c


def _write_compare(w: Writer, x: Expr) -> ts.Written:
    a, b = (w.write(arg).at(ts.PRODUCT).text for arg in x.args)
    return ts.Written(f"1[{a} {_RELATIONS[x['relation']][2]} {b}]")


def _write_where(w: Writer, x: Expr) -> ts.Written:
    c, a, b = (w.write(arg).text for arg in x.args)
    condition = c[2:-1] if x.args[0].op == "compare" and c.startswith("1[") else c
    return ts.Written(f"{{{a} if {condition}; {b} otherwise}}")


_entrywise("compare", lambda a, b, relation: _RELATIONS[relation][0](a, b), form=_write_compare)
_entrywise(
    "where",
    np.where,
    pullback=lambda y, g, c, a, b: [None, c * g, negation(c) * g],
    form=_write_where,
)
for _name, _relation, _other, _evaluate in (
    ("maximum", ">", "<=", np.maximum),
    ("minimum", "<", ">=", np.minimum),
):
    _entrywise(
        _name,
        _evaluate,
        lambda y, a, b, one=_relation, other=_other: [indicator(a, b, one), indicator(a, b, other)],
        form=_named(_name[:3]),
    )


def where(c: Expr, a: Any, b: Any) -> Expr:
    """a where c, else b; one of them for a constant c that is everywhere the same."""
    c, a, b = c if c.kind == BOOLEAN else indicator(c, 0, "!="), lifted(a), lifted(b)
    mask = c["value"].array if c.op == "array" else None
    if mask is not None and mask.all() == mask.any():
        return broadcast(a if mask.all() else b, broadcast_shape(c.shape, a.shape, b.shape))
    return apply("where", c, a, b, kind=widest(a.kind, b.kind))


def extreme(name: str, a: Expr, b: Expr) -> Expr:
    """The elementwise "maximum" or "minimum", a number last; relu for a maximum with zero."""
    a, b = (a, b) if constant_of(a) is None else (b, a)
    if name == "minimum" or constant_of(b) not in (0, -math.inf):
        return apply(name, a, b)
    whole = broadcast(a, broadcast_shape(a.shape, b.shape))
    return apply("relu", whole) if is_zero(b) else whole


def clip(x: Expr, *bounds: Expr, low: Any = None, high: Any = None) -> Expr:
    """min(max(x, low), high), with both bounds as numbers or both as operands."""
    low, high = bounds or (low, high)
    result = x if low is None else extreme("maximum", x, lifted(low))
    return result if high is None else extreme("minimum", result, lifted(high))


# --- functions


def _sigmoid(x: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(x):
        return 1 / (1 + np.exp(-x))
    e = np.exp(-np.abs(x))  # no overflow, and full relative precision in both tails
    return np.where(x >= 0, 1.0, e) / (1 + e)


_entrywise("exp", np.exp, lambda y, x: [y])
_entrywise("log", np.log, lambda y, x: [x**-1])
_entrywise("sin", np.sin, lambda y, x: [apply("cos", x)])
_entrywise("cos", np.cos, lambda y, x: [-apply("sin", x)])
_entrywise("sinh", np.sinh, lambda y, x: [apply("cosh", x)])
_entrywise("cosh", np.cosh, lambda y, x: [apply("sinh", x)])
_entrywise("tanh", np.tanh, lambda y, x: [1 - y**2])
_entrywise(
    "erf",
    np.vectorize(math.erf, otypes=[float]),
    lambda y, x: [2 / math.sqrt(math.pi) * apply("exp", -(x**2))],
)
_entrywise(
    "softplus",
    lambda x: np.logaddexp(x, 0),
    lambda y, x: [apply("sigmoid", x)],
    definition="softplus(x) := log(1 + e^x)",
)
_entrywise(
    "sigmoid",
    _sigmoid,
    lambda y, x: [y * (1 - y)],
    definition="sigmoid(x) := 1 / (1 + e^(-x))",
)
_entrywise(
    "relu",
    lambda x: np.maximum(x, 0),
    lambda y, x: [indicator(x, 0, ">")],
    definition="relu(x) := max(x, 0)",
)
