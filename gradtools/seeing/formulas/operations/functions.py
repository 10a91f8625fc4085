"""Exponentials, logarithms, trigonometric functions, activations: derivatives in closed form."""

from __future__ import annotations

import math

import numpy as np

from gradtools.seeing.formulas.algebra import apply, is_zero
from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.operations.elementwise import indicator, named, where
from gradtools.seeing.formulas.operations.entering import entrywise, word

entrywise("exp", np.exp, lambda y, x: [y])
word("exp2", lambda x: apply("exp", math.log(2) * x))
word("expm1", lambda x: apply("exp", x) - 1)
entrywise("log", np.log, lambda y, x: [x**-1])
word("log2", lambda x: 1 / math.log(2) * apply("log", x))
word("log10", lambda x: 1 / math.log(10) * apply("log", x))
word("log1p", lambda x: apply("log", 1 + x))
word(
    "logaddexp",
    lambda a, b: apply("softplus", b) if is_zero(a) else b + apply("softplus", a - b),
)
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


def _arctan2_derivatives(y: Expr, a: Expr, b: Expr) -> list[Expr]:
    under = (a**2 + b**2) ** -1
    return [b * under, -(a * under)]


entrywise("arctan2", np.arctan2, _arctan2_derivatives, entry=named("atan2"))
_erf = np.vectorize(math.erf, otypes=[float])
entrywise("erf", _erf, lambda y, x: [2 / math.sqrt(math.pi) * apply("exp", -(x**2))])
word("erfc", lambda x: 1 - apply("erf", x))

# Activations, and the functions that they are composed of.

entrywise(
    "softplus",
    lambda x: np.logaddexp(x, 0),
    lambda y, x: [apply("sigmoid", x)],
    definition="softplus(x) := log(1 + e^x)",
)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(x):
        return 1 / (1 + np.exp(-x))
    e = np.exp(-np.abs(x))  # no overflow, and full relative precision in both tails
    return np.where(x >= 0, 1.0, e) / (1 + e)


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
