"""Elementwise functions: NumPy's value, the derivative, the result's kind, the notation.

One table, `FUNCTIONS`. A holomorphic function states its partial derivatives f' as expressions
of its value y and its arguments; the cotangent of an argument is then conj(f') g, its real part
where the argument is real. A function of a complex argument that is not holomorphic (modulus,
sign, angle) states its pullback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.seeing.formulas import special_functions
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    conj,
    full,
    negate,
    plus,
    power,
    real,
    register_elementwise,
    scale,
    subtract,
    times,
    ufunc,
)
from gradtools.seeing.formulas.expressions import BOOLEAN, COMPLEX, INTEGER, REAL, Expr, widest
from gradtools.seeing.formulas.typesetting import (
    ATOM,
    POWER,
    PRODUCT,
    SUM,
    Written,
    function,
    join,
    number,
    over,
    summed,
    superscript,
)

Derivative = Callable[..., Sequence[Expr | None]]
PlaceForm = Callable[[Expr, list[Written], bool], Written]
"""Of the expression, its arguments as they are written, and whether it is a matrix that is written
whole, where a power must not be mistaken for a product of matrices."""


@dataclass(frozen=True)
class PlaceFunction:
    """A function of each place.

    Attributes:
        evaluate: In NumPy, of the arguments and the attributes.
        derivatives: The partial derivatives, of (value, *arguments), or None: it has none.
        pullback: Of (value, cotangent, *arguments), where derivatives do not say it.
        kind: Of the result; empty: that of the arguments.
        form: How it is written; None for its name and its arguments.
    """

    evaluate: Callable[..., np.ndarray]
    derivatives: Derivative | None = None
    pullback: Derivative | None = None
    kind: str = ""
    form: PlaceForm | None = None

    def result_kind(self, args: Sequence[Expr]) -> str:
        """The kind of the value at these arguments."""
        return self.kind or widest(REAL, *(a.kind for a in args))


def one(x: Expr) -> Expr:
    """A one in each place of x."""
    return full(1.0, x.shape)


def _minus(x: Expr) -> Expr:
    """One minus x."""
    return subtract(one(x), x)


def apply(name: str, *args: Expr, **attributes) -> Expr:
    """The function of this name, in each place."""
    function = FUNCTIONS[name]
    return ufunc(name, args, function.result_kind(args), **attributes)


def indicator(a: Expr, relation: str, b: Expr) -> Expr:
    """One where the relation holds."""
    return apply("compare", a, b, relation=relation)


OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


def negation(c: Expr) -> Expr:
    """One where c does not hold."""
    if c.op == "compare":
        return indicator(c.args[0], OPPOSITE[c["relation"]], c.args[1])
    if c.op == "logical_not":
        return c.args[0]
    return apply("logical_not", c)


def _sigmoid(x):
    e = np.exp(-np.abs(x))  # far from zero the smaller of both sides keeps its digits
    return np.where(x >= 0, 1.0, e) / (1 + e)


def _any_sigmoid(x):
    return 1 / (1 + np.exp(-x)) if np.iscomplexobj(x) else _sigmoid(x)


def _sign(x):
    size = np.abs(x)
    return (
        np.where(size > 0, x / np.where(size > 0, size, 1), 0) if np.iscomplexobj(x) else np.sign(x)
    )


def _inverse_trigonometric(sign: float, inner: float) -> Derivative:
    """Sign / sqrt(1 - inner x**2)."""
    return lambda y, x: [scale(sign, power(subtract(one(x), scale(inner, power(x, 2))), -0.5))]


def _power_derivatives(y, a, b):
    first = times(b, apply("pow", a, subtract(b, one(b))))
    return [first, times(y, apply("log", a))]


def _arctan2_derivatives(y, a, b):
    under = power(plus(power(a, 2), power(b, 2)), -1)
    return [times(b, under), negate(times(a, under))]


def _sign_pullback(y, g, x):
    if not x.is_complex:
        return [None]
    along = times(y, real(times(conj(y), g)))
    return [times(subtract(g, along), power(apply("abs", x), -1))]


def _angle_pullback(y, g, x):
    if not x.is_complex:
        return [None]
    return [scale(1j, times(real(g), power(conj(x), -1)))]


def _clip_derivative(y, x):
    limits = dict(y.attributes)
    inside = [
        indicator(x, relation, full(limits[name], x.shape))
        for name, relation in (("low", ">"), ("high", "<"))
        if limits[name] is not None
    ]
    return [times(*inside)]


def _compare(a, b, relation):
    return {
        "<": np.less,
        "<=": np.less_equal,
        ">": np.greater,
        ">=": np.greater_equal,
        "==": np.equal,
        "!=": np.not_equal,
    }[relation](a, b)


def _cast(x, to):
    if to == BOOLEAN:
        return x != 0
    if to == INTEGER:
        return np.trunc(x).astype(np.int64)
    return np.asarray(x, complex if to == COMPLEX else float)


# --- notation


def _power_form(x: Expr, args: list[Written], matrix: bool) -> Written:
    (base,) = args
    exponent = x["exponent"]
    if isinstance(exponent, complex) or exponent >= 0:
        return _raised(base, exponent, matrix)
    return over(number(1.0), _raised(base, -exponent, matrix))


def _raised(base: Written, exponent: Any, matrix: bool) -> Written:
    if exponent == 1:
        return base
    if matrix and exponent != 0.5:
        shown = number(exponent)
        plain = ts.power(Written("", ""), exponent).text
        return superscript(base, "^∘" + plain.lstrip("^"), rf"\circ {shown.latex}")
    return ts.power(base, exponent)


_SIGNS = {"<=": ("≤", r"\le"), ">=": ("≥", r"\ge"), "==": ("=", "="), "!=": ("≠", r"\ne")}


def _condition(x: Expr, args: list[Written]) -> Written:
    text, latex = _SIGNS.get(x["relation"], (x["relation"],) * 2)
    a, b = (arg.at(PRODUCT) for arg in args)
    return Written(f"{a.text} {text} {b.text}", f"{a.latex} {latex} {b.latex}", SUM)


def _compare_form(x: Expr, args: list[Written], matrix: bool) -> Written:
    inner = _condition(x, args)
    return Written(f"1[{inner.text}]", rf"\mathbf{{1}}\left[{inner.latex}\right]")


def _where_form(x: Expr, args: list[Written], matrix: bool) -> Written:
    c, a, b = args
    bare = x.args[0].op == "compare" and c.text.startswith("1[")
    condition = c.text[2:-1] if bare else c.text
    low = c.latex.removeprefix(r"\mathbf{1}\left[").removesuffix(r"\right]") if bare else c.latex
    return Written(
        f"{{{a.text} if {condition}; {b.text} otherwise}}",
        rf"\begin{{cases}} {a.latex} & {low} \\ {b.latex} & \text{{otherwise}} \end{{cases}}",
    )


def _clip_form(x: Expr, args: list[Written], matrix: bool) -> Written:
    low, high = (
        number(default if x[n] is None else x[n])
        for n, default in (("low", float("-inf")), ("high", float("inf")))
    )
    below = f"[{low.text}, {high.text}]"
    return function("clip", args, below)


def _polygamma_form(x: Expr, args: list[Written], matrix: bool) -> Written:
    order = x["order"]
    name = "ψ" + "′" * order if order < 4 else f"ψ^({order})"
    return function(name, args, latex=r"\psi" + (f"^{{({order})}}" if order else ""))


def _pow_form(x: Expr, args: list[Written], matrix: bool) -> Written:
    base = args[0].at(ATOM)
    return Written(f"{base.text}^({args[1].text})", f"{base.latex}^{{{args[1].latex}}}", POWER)


def _floor_form(left: str, right: str, name: str) -> PlaceForm:
    return lambda x, args, matrix: Written(
        f"{left}{args[0].text}{right}", rf"\left\l{name} {args[0].latex} \right\r{name}"
    )


def _logical_form(text: str, latex: str) -> PlaceForm:
    def form(x: Expr, args: list[Written], matrix: bool) -> Written:
        return join([a.at(POWER) for a in args], f" {text} ", f" {latex} ", PRODUCT)

    return form


def _named_form(text: str, latex: str = "") -> PlaceForm:
    return lambda x, args, matrix: function(text, args, latex=latex)


def _cast_form(x: Expr, args: list[Written], matrix: bool) -> Written:
    """Real numbers as complex ones are told: √x and √(x + 0i) differ below zero."""
    return summed([args[0], Written("0i", "0i")]) if x.is_complex else args[0]


FUNCTIONS: dict[str, PlaceFunction] = {
    "power": PlaceFunction(
        lambda x, exponent: np.power(x + 0.0, exponent),
        lambda y, x: [scale(y["exponent"], power(x, y["exponent"] - 1))],
        form=_power_form,
    ),
    "pow": PlaceFunction(lambda a, b: np.power(a + 0.0, b), _power_derivatives, form=_pow_form),
    "exp": PlaceFunction(np.exp, lambda y, x: [y]),
    "log": PlaceFunction(np.log, lambda y, x: [power(x, -1)]),
    "sin": PlaceFunction(np.sin, lambda y, x: [apply("cos", x)]),
    "cos": PlaceFunction(np.cos, lambda y, x: [negate(apply("sin", x))]),
    "tan": PlaceFunction(np.tan, lambda y, x: [plus(one(x), power(y, 2))]),
    "sinh": PlaceFunction(np.sinh, lambda y, x: [apply("cosh", x)]),
    "cosh": PlaceFunction(np.cosh, lambda y, x: [apply("sinh", x)]),
    "tanh": PlaceFunction(np.tanh, lambda y, x: [_minus(power(y, 2))]),
    "arcsin": PlaceFunction(np.arcsin, _inverse_trigonometric(1.0, 1.0)),
    "arccos": PlaceFunction(np.arccos, _inverse_trigonometric(-1.0, 1.0)),
    "arctan": PlaceFunction(np.arctan, lambda y, x: [power(plus(one(x), power(x, 2)), -1)]),
    "arcsinh": PlaceFunction(np.arcsinh, _inverse_trigonometric(1.0, -1.0)),
    "arccosh": PlaceFunction(
        np.arccosh,
        lambda y, x: [times(power(subtract(x, one(x)), -0.5), power(plus(x, one(x)), -0.5))],
    ),
    "arctanh": PlaceFunction(np.arctanh, lambda y, x: [power(_minus(power(x, 2)), -1)]),
    "sigmoid": PlaceFunction(_any_sigmoid, lambda y, x: [times(y, _minus(y))]),
    "softplus": PlaceFunction(lambda x: np.logaddexp(x, 0), lambda y, x: [apply("sigmoid", x)]),
    "relu": PlaceFunction(
        lambda x: np.maximum(x, 0), lambda y, x: [indicator(x, ">", full(0.0, x.shape))]
    ),
    "normal_cdf": PlaceFunction(
        lambda x: (1 + special_functions.erf(x / math.sqrt(2))) / 2,
        lambda y, x: [apply("normal_density", x)],
        form=_named_form("Φ", r"\Phi"),
    ),
    "normal_density": PlaceFunction(
        lambda x: np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
        lambda y, x: [negate(times(x, y))],
        form=_named_form("φ", r"\varphi"),
    ),
    "erf": PlaceFunction(
        special_functions.erf,
        lambda y, x: [scale(2 / math.sqrt(math.pi), apply("exp", negate(power(x, 2))))],
    ),
    "erfinv": PlaceFunction(
        special_functions.erfinv,
        lambda y, x: [scale(math.sqrt(math.pi) / 2, apply("exp", power(y, 2)))],
    ),
    "lgamma": PlaceFunction(
        special_functions.lgamma,
        lambda y, x: [apply("polygamma", x, order=0)],
        form=_named_form("log Γ", r"\log\Gamma"),
    ),
    "polygamma": PlaceFunction(
        lambda x, order: special_functions.polygamma(order, x),
        lambda y, x: [apply("polygamma", x, order=y["order"] + 1)],
        form=_polygamma_form,
    ),
    "abs": PlaceFunction(
        np.abs,
        pullback=lambda y, g, x: [times(real(g), apply("sign", x))],
        kind=REAL,
        form=lambda x, args, matrix: Written(f"|{args[0].text}|", rf"\left|{args[0].latex}\right|"),
    ),
    "sign": PlaceFunction(_sign, pullback=_sign_pullback, form=_named_form("sgn")),
    "angle": PlaceFunction(
        np.angle, pullback=_angle_pullback, kind=REAL, form=_named_form("arg", r"\arg")
    ),
    "real": PlaceFunction(
        np.real, pullback=lambda y, g, x: [real(g)], kind=REAL, form=_named_form("Re")
    ),
    "imag": PlaceFunction(
        np.imag, pullback=lambda y, g, x: [scale(1j, real(g))], kind=REAL, form=_named_form("Im")
    ),
    "conj": PlaceFunction(
        np.conj,
        pullback=lambda y, g, x: [conj(g)],
        form=lambda x, args, matrix: superscript(args[0], "*", "*"),
    ),
    "maximum": PlaceFunction(
        np.maximum,
        lambda y, a, b: [indicator(a, ">", b), indicator(a, "<=", b)],
        form=_named_form("max", r"\max"),
    ),
    "minimum": PlaceFunction(
        np.minimum,
        lambda y, a, b: [indicator(a, "<", b), indicator(a, ">=", b)],
        form=_named_form("min", r"\min"),
    ),
    "clip": PlaceFunction(
        lambda x, low, high: np.clip(x, low, high), _clip_derivative, form=_clip_form
    ),
    "arctan2": PlaceFunction(np.arctan2, _arctan2_derivatives, form=_named_form("atan2")),
    "where": PlaceFunction(
        np.where,
        pullback=lambda y, g, c, a, b: [None, times(c, g), times(negation(c), g)],
        form=_where_form,
    ),
    "floor": PlaceFunction(np.floor, form=_floor_form("⌊", "⌋", "floor")),
    "ceil": PlaceFunction(np.ceil, form=_floor_form("⌈", "⌉", "ceil")),
    "round": PlaceFunction(np.round),
    "trunc": PlaceFunction(np.trunc),
    "stop": PlaceFunction(lambda x: x),
    "scale_gradient": PlaceFunction(
        lambda x, scale: x,
        pullback=lambda y, g, x: [scale(y["scale"], g)],
        form=lambda x, args, matrix: args[0],
    ),
    "cast": PlaceFunction(
        _cast, pullback=lambda y, g, x: [g if y.is_complex else None], form=_cast_form
    ),
    "compare": PlaceFunction(_compare, kind=BOOLEAN, form=_compare_form),
    "is_finite": PlaceFunction(np.isfinite, kind=BOOLEAN),
    "is_nan": PlaceFunction(np.isnan, kind=BOOLEAN),
    "logical_not": PlaceFunction(
        np.logical_not,
        kind=BOOLEAN,
        form=lambda x, args, matrix: Written(
            f"1[not {args[0].text}]", rf"\mathbf{{1}}[\lnot {args[0].latex}]"
        ),
    ),
    "logical_and": PlaceFunction(np.logical_and, kind=BOOLEAN, form=_logical_form("∧", r"\land")),
    "logical_or": PlaceFunction(np.logical_or, kind=BOOLEAN, form=_logical_form("∨", r"\lor")),
    "logical_xor": PlaceFunction(np.logical_xor, kind=BOOLEAN, form=_logical_form("⊕", r"\oplus")),
}
register_elementwise(FUNCTIONS)


def pull_back(y: Expr, g: Expr) -> list[Expr | None]:
    """The cotangents of the arguments of y, a function of each place, from that of y."""
    function = FUNCTIONS[y.op]
    if function.pullback is not None:
        return list(function.pullback(y, g, *y.args))
    if function.derivatives is None:
        return [None] * len(y.args)
    result = function.derivatives(y, *y.args)
    return [None if d is None else times(conj(d), g) for d in result]
