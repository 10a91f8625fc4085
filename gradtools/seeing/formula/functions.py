"""Elementwise functions: NumPy's value, the derivative, the result's kind.

One table, `FUNCTIONS`. A holomorphic function states its partial derivatives f' as expressions
of its value y and its arguments; the cotangent of an argument is then conj(f') g, its real part
where the argument is real. A function of a complex argument that is not holomorphic (modulus,
sign, angle) states its pullback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gradtools.seeing.formula import special
from gradtools.seeing.formula.algebra import (
    add,
    conj,
    elementwise,
    full,
    imag,
    negate,
    plus,
    power,
    real,
    register_elementwise,
    scale,
    subtract,
    times,
)
from gradtools.seeing.formula.expressions import BOOLEAN, COMPLEX, INTEGER, REAL, Expr, widest

Derivative = Callable[..., Sequence[Expr | None]]


@dataclass(frozen=True)
class PlaceFunction:
    """A function of each place.

    Attributes:
        evaluate: In NumPy, of the arguments and the attributes.
        derivatives: The partial derivatives, of (value, *arguments), or None: it has none.
        pullback: Of (value, cotangent, *arguments), where derivatives do not say it.
        kind: Of the result; empty: that of the arguments.
    """

    evaluate: Callable[..., np.ndarray]
    derivatives: Derivative | None = None
    pullback: Derivative | None = None
    kind: str = ""

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
    return elementwise(name, args, function.result_kind(args), **attributes)


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


def _tanh_derivative(y, x):
    return [_minus(power(y, 2))]


def _inverse_trigonometric(sign: float, inner: float) -> Derivative:
    """Sign / sqrt(1 - inner x**2)."""
    return lambda y, x: [scale(sign, power(subtract(one(x), scale(inner, power(x, 2))), -0.5))]


def _power_derivatives(y, a, b):
    first = times(b, apply("pow", a, subtract(b, one(b))))
    return [first, times(y, apply("log", a))]


def _gaussian(x: Expr) -> Expr:
    return apply("normal_density", x)


def _arctan2_derivatives(y, a, b):
    under = power(plus(power(a, 2), power(b, 2)), -1)
    return [times(b, under), negate(times(a, under))]


def _where_pullback(y, g, c, a, b):
    return [None, times(c, g), times(negation(c), g)]


def _abs_pullback(y, g, x):
    return [times(real(g), apply("sign", x))]


def _sign_pullback(y, g, x):
    if not x.is_complex:
        return [None]
    along = times(y, real(times(conj(y), g)))
    return [times(subtract(g, along), power(apply("abs", x), -1))]


def _angle_pullback(y, g, x):
    if not x.is_complex:
        return [None]
    return [scale(1j, times(real(g), power(conj(x), -1)))]


def _erf_derivative(y, x):
    return [scale(2 / math.sqrt(math.pi), apply("exp", negate(power(x, 2))))]


def _erfinv_derivative(y, x):
    return [scale(math.sqrt(math.pi) / 2, apply("exp", power(y, 2)))]


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


FUNCTIONS: dict[str, PlaceFunction] = {
    "power": PlaceFunction(
        lambda x, exponent: np.power(x + 0.0, exponent),
        lambda y, x: [scale(y["exponent"], power(x, y["exponent"] - 1))],
    ),
    "pow": PlaceFunction(lambda a, b: np.power(a + 0.0, b), _power_derivatives),
    "exp": PlaceFunction(np.exp, lambda y, x: [y]),
    "log": PlaceFunction(np.log, lambda y, x: [power(x, -1)]),
    "sin": PlaceFunction(np.sin, lambda y, x: [apply("cos", x)]),
    "cos": PlaceFunction(np.cos, lambda y, x: [negate(apply("sin", x))]),
    "tan": PlaceFunction(np.tan, lambda y, x: [plus(one(x), power(y, 2))]),
    "sinh": PlaceFunction(np.sinh, lambda y, x: [apply("cosh", x)]),
    "cosh": PlaceFunction(np.cosh, lambda y, x: [apply("sinh", x)]),
    "tanh": PlaceFunction(np.tanh, _tanh_derivative),
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
        lambda x: (1 + special.erf(x / math.sqrt(2))) / 2, lambda y, x: [_gaussian(x)]
    ),
    "normal_density": PlaceFunction(
        lambda x: np.exp(-x * x / 2) / math.sqrt(2 * math.pi), lambda y, x: [negate(times(x, y))]
    ),
    "erf": PlaceFunction(special.erf, _erf_derivative),
    "erfinv": PlaceFunction(special.erfinv, _erfinv_derivative),
    "lgamma": PlaceFunction(special.lgamma, lambda y, x: [apply("polygamma", x, order=0)]),
    "polygamma": PlaceFunction(
        lambda x, order: special.polygamma(order, x),
        lambda y, x: [apply("polygamma", x, order=y["order"] + 1)],
    ),
    "abs": PlaceFunction(np.abs, pullback=_abs_pullback, kind=REAL),
    "sign": PlaceFunction(_sign, pullback=_sign_pullback),
    "angle": PlaceFunction(np.angle, pullback=_angle_pullback, kind=REAL),
    "real": PlaceFunction(np.real, pullback=lambda y, g, x: [real(g)], kind=REAL),
    "imag": PlaceFunction(np.imag, pullback=lambda y, g, x: [scale(1j, real(g))], kind=REAL),
    "conj": PlaceFunction(np.conj, pullback=lambda y, g, x: [conj(g)]),
    "maximum": PlaceFunction(
        np.maximum, lambda y, a, b: [indicator(a, ">", b), indicator(a, "<=", b)]
    ),
    "minimum": PlaceFunction(
        np.minimum, lambda y, a, b: [indicator(a, "<", b), indicator(a, ">=", b)]
    ),
    "clip": PlaceFunction(lambda x, low, high: np.clip(x, low, high), _clip_derivative),
    "arctan2": PlaceFunction(np.arctan2, _arctan2_derivatives),
    "where": PlaceFunction(np.where, pullback=_where_pullback),
    "floor": PlaceFunction(np.floor),
    "ceil": PlaceFunction(np.ceil),
    "round": PlaceFunction(np.round),
    "trunc": PlaceFunction(np.trunc),
    "stop": PlaceFunction(lambda x: x),
    "scale_gradient": PlaceFunction(
        lambda x, scale: x, pullback=lambda y, g, x: [scale(y["scale"], g)]
    ),
    "cast": PlaceFunction(_cast, pullback=lambda y, g, x: [g if y.is_complex else None]),
    "compare": PlaceFunction(_compare, kind=BOOLEAN),
    "is_finite": PlaceFunction(np.isfinite, kind=BOOLEAN),
    "is_nan": PlaceFunction(np.isnan, kind=BOOLEAN),
    "logical_not": PlaceFunction(np.logical_not, kind=BOOLEAN),
    "logical_and": PlaceFunction(np.logical_and, kind=BOOLEAN),
    "logical_or": PlaceFunction(np.logical_or, kind=BOOLEAN),
    "logical_xor": PlaceFunction(np.logical_xor, kind=BOOLEAN),
}
register_elementwise(FUNCTIONS)


def pull_back(y: Expr, g: Expr) -> list[Expr | None]:
    """The cotangents of the arguments of y, a function of each place, from that of y."""
    function = FUNCTIONS[y.op]
    if function.pullback is not None:
        return list(function.pullback(y, g, *y.args))
    if function.derivatives is None:
        return [None] * len(y.args)
    found = function.derivatives(y, *y.args)
    return [None if d is None else times(conj(d), g) for d in found]


__all__ = [
    "FUNCTIONS",
    "OPPOSITE",
    "PlaceFunction",
    "add",
    "apply",
    "imag",
    "indicator",
    "negation",
    "one",
    "pull_back",
]
