"""Special functions in NumPy alone, to about fifteen digits.

`polygamma` follows the recurrence upwards until the asymptotic series holds; `erfinv` refines a
first guess by Newton's method on `erf`.
"""

from __future__ import annotations

import math

import numpy as np

# Bernoulli numbers B_2, B_4, ...
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_FAR = 16.0  # the asymptotic series is exact to rounding from here on

erf = np.vectorize(math.erf, otypes=[float])


def lgamma(x: np.ndarray) -> np.ndarray:
    """The logarithm of abs(Gamma(x))."""
    return np.vectorize(math.lgamma, otypes=[float])(x)


def polygamma(order: int, x: np.ndarray) -> np.ndarray:
    """The order-th derivative of digamma; order 0 is digamma itself."""
    return np.vectorize(lambda t: _polygamma(order, float(t)), otypes=[float])(x)


def _polygamma(order: int, x: float) -> float:
    if x <= 0 and x == math.floor(x):
        return math.nan
    if x <= 0 and order == 0:
        return _polygamma(0, 1 - x) - math.pi / math.tan(math.pi * x)
    below = 0.0
    while x < _FAR:
        below += 1 / x ** (order + 1)
        x += 1
    if order == 0:
        return _digamma_far(x) - below
    sign = -1.0 if order % 2 == 0 else 1.0
    return sign * (math.factorial(order) * below + _polygamma_far(order, x))


def _digamma_far(x: float) -> float:
    series = sum(b / (2 * k * x ** (2 * k)) for k, b in enumerate(_BERNOULLI, 1))
    return math.log(x) - 1 / (2 * x) - series


def _polygamma_far(order: int, x: float) -> float:
    head = math.factorial(order - 1) / x**order + math.factorial(order) / (2 * x ** (order + 1))
    factor = lambda k: math.factorial(2 * k + order - 1) / math.factorial(2 * k)
    return head + sum(b * factor(k) / x ** (2 * k + order) for k, b in enumerate(_BERNOULLI, 1))


def erfinv(y: np.ndarray) -> np.ndarray:
    """The inverse of the error function."""
    y = np.asarray(y, float)
    w = np.log1p(-y * y)
    a = 2 / (math.pi * 0.147) + w / 2
    x = np.sign(y) * np.sqrt(np.sqrt(a * a - w / 0.147) - a)
    for _ in range(4):
        x = x - (erf(x) - y) * math.sqrt(math.pi) / 2 * np.exp(x * x)
    return x
