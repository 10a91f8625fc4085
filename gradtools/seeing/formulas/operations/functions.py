"""Functions of each place: exponentials, trigonometric, special functions, activations."""

from __future__ import annotations

import math

import numpy as np

from gradtools.seeing.formulas import special_functions
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import apply, conj, number
from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.operations.elementwise import (
    clip,
    indicator,
    modulus,
    named,
    scaled,
    where,
)
from gradtools.seeing.formulas.operations.entering import Derivatives, entrywise, lowers, word
from gradtools.seeing.formulas.operations.slicing import split

# Exponentials and logarithms.

entrywise("exp(x)", np.exp, lambda y, x: [y])
word("exp2", lambda x: apply("exp", math.log(2) * x))
word("expm1", lambda x: apply("exp", x) - 1)
entrywise("log(x)", np.log, lambda y, x: [x**-1])
word("log2", lambda x: 1 / math.log(2) * apply("log", x))
word("log10", lambda x: 1 / math.log(10) * apply("log", x))
word("log1p", lambda x: apply("log", 1 + x))


@lowers("logaddexp")
def _logaddexp(a: Expr, b: Expr) -> Expr:
    """log(e**a + e**b)."""
    return b + apply("softplus", a - b)


word("logaddexp2", lambda a, b: 1 / math.log(2) * _logaddexp(math.log(2) * a, math.log(2) * b))


@lowers("logit")
def _logit(x: Expr, *, eps: float | None = None) -> Expr:
    """log(x / (1 - x)), x between eps and 1 - eps."""
    x = x if eps is None else clip(x, low=eps, high=1 - eps)
    return apply("log", x / (1 - x))


word("xlogy", lambda a, b: where(indicator(a, "==", 0), 0, a * apply("log", b)))

# Trigonometric functions and their inverses.

entrywise("sin(x)", np.sin, lambda y, x: [apply("cos", x)])
entrywise("cos(x)", np.cos, lambda y, x: [-apply("sin", x)])
entrywise("tan(x)", np.tan, lambda y, x: [1 + y**2])
entrywise("sinh(x)", np.sinh, lambda y, x: [apply("cosh", x)])
entrywise("cosh(x)", np.cosh, lambda y, x: [apply("sinh", x)])
entrywise("tanh(x)", np.tanh, lambda y, x: [1 - y**2])
word("tanh_backward", lambda g, y: g * (1 - conj(y) ** 2))


def _inverse_trigonometric(sign: float, inner: float) -> Derivatives:
    """Sign / sqrt(1 - inner x**2)."""
    return lambda y, x: [sign * (1 - inner * x**2) ** -0.5]


entrywise("arcsin(x)", np.arcsin, _inverse_trigonometric(1.0, 1.0))
entrywise("arccos(x)", np.arccos, _inverse_trigonometric(-1.0, 1.0))
entrywise("arctan(x)", np.arctan, lambda y, x: [(1 + x**2) ** -1])
entrywise("arcsinh(x)", np.arcsinh, _inverse_trigonometric(1.0, -1.0))
entrywise("arccosh(x)", np.arccosh, lambda y, x: [(x - 1) ** -0.5 * (x + 1) ** -0.5])
entrywise("arctanh(x)", np.arctanh, lambda y, x: [(1 - x**2) ** -1])


def _arctan2_derivatives(y: Expr, a: Expr, b: Expr) -> list[Expr]:
    under = (a**2 + b**2) ** -1
    return [b * under, -(a * under)]


entrywise("arctan2(a, b)", np.arctan2, _arctan2_derivatives, entry=named("atan2"))


@lowers("sinc")
def _sinc(x: Expr) -> Expr:
    """sin(pi x) / (pi x)."""
    x = number(math.pi) * x
    at_zero = indicator(x, "==", 0)
    safe = where(at_zero, 1, x)
    return where(at_zero, 1, apply("sin", safe) / safe)


word("deg2rad", lambda x: math.pi / 180 * x)
word("rad2deg", lambda x: 180 / math.pi * x)

# Special functions.

entrywise(
    "erf(x)", special_functions.erf, lambda y, x: [2 / math.sqrt(math.pi) * apply("exp", -(x**2))]
)
word("erfc", lambda x: 1 - apply("erf", x))
entrywise(
    "erfinv(x)",
    special_functions.erfinv,
    lambda y, x: [math.sqrt(math.pi) / 2 * apply("exp", y**2)],
)
entrywise(
    "lgamma(x)",
    special_functions.lgamma,
    lambda y, x: [apply("polygamma", x, order=0)],
    entry=named("log Γ", r"\log\Gamma"),
)
word("digamma", lambda x: apply("polygamma", x, order=0))


def _polygamma_form(x: Expr, args: list[ts.Written], matrix: bool) -> ts.Written:
    order = x["order"]
    name = "ψ" + "′" * order if order < 4 else f"ψ^({order})"
    return ts.function(name, args, latex=r"\psi" + (f"^{{({order})}}" if order else ""))


entrywise(
    "polygamma(x; order)",
    lambda x, order: special_functions.polygamma(order, x),
    lambda y, x: [apply("polygamma", x, order=y["order"] + 1)],
    entry=_polygamma_form,
)

# Activations of networks.


@lowers(
    "softplus",
    entrywise,
    lambda x: np.logaddexp(x, 0),
    lambda y, x: [apply("sigmoid", x)],
    definition=ts.Written(
        "softplus(x) := log(1 + e^x)", r"\operatorname{softplus}(x) := \log(1 + e^{x})"
    ),
)
def _softplus(x: Expr, *, beta: float = 1.0, threshold: float | None = None) -> Expr:
    """log(1 + e**(beta x)) / beta; beta = 1; where beta x > threshold: x."""
    result = 1 / beta * apply("softplus", beta * x)
    if threshold is None:
        return result
    return where(indicator(beta * x, ">", float(threshold)), x, result)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))  # far from zero the smaller of both sides keeps its digits
    return np.where(x >= 0, 1.0, e) / (1 + e)


def _any_sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x)) if np.iscomplexobj(x) else _sigmoid(x)


entrywise(
    "sigmoid(x)",
    _any_sigmoid,
    lambda y, x: [y * (1 - y)],
    definition=ts.Written(
        "sigmoid(x) := 1 / (1 + e^(-x))", r"\operatorname{sigmoid}(x) := 1 / (1 + e^{-x})"
    ),
)
word("sigmoid_backward", lambda g, y: g * ((1 - conj(y)) * conj(y)))
word("log_sigmoid", lambda x: -apply("softplus", -x))
entrywise(
    "relu(x)",
    lambda x: np.maximum(x, 0),
    lambda y, x: [indicator(x, ">", 0)],
    definition=ts.Written("relu(x) := max(x, 0)", r"\operatorname{relu}(x) := \max(x, 0)"),
)


def _where_positive(x: Expr, below: Expr) -> Expr:
    return apply("where", indicator(x, ">", 0), x, below)


word("leaky_relu", lambda x, *, negative_slope: _where_positive(x, negative_slope * x))
word("prelu", lambda x, w: where(indicator(x, ">", 0), x, w * x))
word("threshold", lambda x, t, v: where(indicator(x, ">", t), x, v))
word("threshold_backward", lambda g, x, t: where(indicator(x, "<=", t), 0, g))


@lowers("elu")
def _elu(x: Expr, *, alpha: float = 1.0, scale: float = 1, input_scale: float = 1) -> Expr:
    """Scale (z where z > 0, else alpha (e**z - 1)); z = input_scale x; all are 1."""
    x = scaled(input_scale, x)
    below = scaled(float(alpha), apply("exp", x) - 1)
    return scaled(scale, _where_positive(x, below))


@lowers("celu")
def _celu(x: Expr, *, alpha: float = 1.0) -> Expr:
    """X where x > 0, else alpha (e**(x / alpha) - 1)."""
    z = x / alpha
    below = alpha * (apply("exp", z) - 1)
    return where(indicator(x, ">", 0), x, below)


# Activations by the normal distribution.

entrywise(
    "normal_cdf",
    lambda x: (1 + special_functions.erf(x / math.sqrt(2))) / 2,
    lambda y, x: [apply("normal_density", x)],
    entry=named("Φ", r"\Phi"),
    definition=ts.Written(
        "Φ(x) := (1 + erf(x / √2)) / 2", r"\Phi(x) := (1 + \operatorname{erf}(x / \sqrt{2})) / 2"
    ),
)
entrywise(
    "normal_density",
    lambda x: np.exp(-x * x / 2) / math.sqrt(2 * math.pi),
    lambda y, x: [-(x * y)],
    entry=named("φ", r"\varphi"),
    definition=ts.Written(
        "φ(x) := e^(-x² / 2) / √(2π)", r"\varphi(x) := e^{-x^{2} / 2} / \sqrt{2 \pi}"
    ),
)


@lowers("gelu")
def _gelu(x: Expr, *, approximate: str = "none") -> Expr:
    """X Phi(x); approximate = "tanh" is the form with tanh."""
    if approximate != "tanh":
        return x * apply("normal_cdf", x)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * (x * (1 + apply("tanh", inner)))


# Activations by others.

word("silu", lambda x: x * apply("sigmoid", x))
word("mish", lambda x: x * apply("tanh", _softplus(x)))


@lowers("hardsigmoid")
def _hard(x: Expr) -> Expr:
    """min(max(x + 3, 0), 6) / 6."""
    return clip(x + 3, low=0.0, high=6.0) / 6


word("hardswish", lambda x: x * _hard(x))


@lowers("softshrink")
def _softshrink(x: Expr, *, lambd: float = 0.5) -> Expr:
    """Nearer to 0 by lambd, at most to 0."""
    above, below = x - lambd, x + lambd
    inner = where(indicator(x, "<", -lambd), below, 0)
    return where(indicator(x, ">", lambd), above, inner)


word(
    "hardshrink",
    lambda x, *, lambd=0.5: where(indicator(modulus(x), ">", lambd), x, 0),
)


@lowers("glu")
def _glu(x: Expr, *, axis: int) -> Expr:
    """The first half of x times sigmoid of the other."""
    a, b = split(x, sizes=[x.shape[axis] // 2] * 2, axis=axis)
    return a * apply("sigmoid", b)
