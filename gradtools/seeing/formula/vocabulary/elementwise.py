"""Lowering of the vocabulary's elementwise operations to those of `functions.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gradtools.seeing.formula import algebra
from gradtools.seeing.formula.algebra import (
    array,
    conj,
    constant_of,
    divide,
    full,
    imag,
    is_zero,
    negate,
    number,
    plus,
    power,
    real,
    scale,
    subtract,
    times,
)
from gradtools.seeing.formula.expressions import BOOLEAN, COMPLEX, INTEGER, Expr, expr, kind_of
from gradtools.seeing.formula.primitives.elementwise import apply, indicator, negation, one
from gradtools.seeing.formula.vocabulary.record import words

Lowering = Callable[..., Any]


def _zero(x: Expr) -> Expr:
    return full(0.0, x.shape)


def _constant(value: Any) -> Expr:
    """A number is written as it is; an integer array stays one, for indices."""
    value = np.asarray(value)
    if value.ndim or value.dtype.kind == "b":
        return array(value)
    return number(value[()])


def _cast(x: Expr, dtype: Any) -> Expr:
    kind = kind_of(dtype)
    if kind == COMPLEX or kind == x.kind:
        return x
    if x.kind == COMPLEX and kind == "real":
        return real(x)
    if kind in (INTEGER, BOOLEAN):
        return x if kind == INTEGER and x.kind == BOOLEAN else apply_cast(x, kind)
    return x


def apply_cast(x: Expr, kind: str) -> Expr:
    """To integers or booleans; to complex numbers, which is written as nothing."""
    return algebra.elementwise("cast", [x], kind, to=kind)


def _stop(x: Expr) -> Expr:
    if x.op in ("number", "stop") or constant_of(x) is not None:
        return x
    return algebra.elementwise("stop", [x], x.kind)


def _log_sigmoid(x: Expr) -> Expr:
    return negate(apply("softplus", negate(x)))


def _softplus(x: Expr, beta: float = 1.0) -> Expr:
    return scale(1 / beta, apply("softplus", scale(beta, x)))


def _leaky_relu(x: Expr, slope: float) -> Expr:
    return apply("where", indicator(x, ">", _zero(x)), x, scale(slope, x))


def _elu(x: Expr, alpha: float = 1.0) -> Expr:
    below = scale(alpha, subtract(apply("exp", x), one(x)))
    return apply("where", indicator(x, ">", _zero(x)), x, below)


def _gelu(x: Expr, approximate: bool = False) -> Expr:
    if not approximate:
        return times(x, apply("normal_cdf", x))
    inner = scale(math.sqrt(2 / math.pi), plus(x, scale(0.044715, power(x, 3))))
    return scale(0.5, times(x, plus(one(x), apply("tanh", inner))))


def _where(c: Expr, a: Expr, b: Expr) -> Expr:
    if c.kind != BOOLEAN:
        c = indicator(c, "!=", _zero(c))
    shape = algebra.broadcast_shape(c.shape, a.shape, b.shape)
    if a is b:
        return algebra.broadcast(a, shape)
    return apply("where", c, a, b)


def _extreme(name: str, relation: str) -> Lowering:
    def lowered(a: Expr, b: Expr) -> Expr:
        if name == "maximum" and is_zero(b):
            return apply("relu", algebra.broadcast(a, algebra.broadcast_shape(a.shape, b.shape)))
        if name == "maximum" and is_zero(a):
            return lowered(b, a)
        return apply(name, a, b)

    return lowered


def _power(a: Expr, b: Expr) -> Expr:
    exponent = constant_of(b)
    shape = algebra.broadcast_shape(a.shape, b.shape)
    if exponent is not None:
        return power(algebra.broadcast(a, shape), exponent)
    base = constant_of(a)
    if base is not None and not isinstance(base, complex) and base > 0:
        return apply("exp", scale(math.log(base), algebra.broadcast(b, shape)))
    return apply("pow", a, b)


def _integer_of(x: Expr, whole: Expr) -> Expr:
    """What is made of integers by +, -, * stays integer, so that it can be an index."""
    return apply_cast(whole, INTEGER) if x.kind in (INTEGER, BOOLEAN) else whole


def _arithmetic(make: Callable[..., Expr]) -> Lowering:
    def lowered(*xs: Expr) -> Expr:
        result = make(*xs)
        integers = all(x.kind in (INTEGER, BOOLEAN) or _is_whole(x) for x in xs)
        some = any(x.kind in (INTEGER, BOOLEAN) for x in xs)
        return apply_cast(result, INTEGER) if integers and some else result

    return lowered


def _is_whole(x: Expr) -> bool:
    value = constant_of(x)
    return value is not None and not isinstance(value, complex) and float(value).is_integer()


def _floor_divide(a: Expr, b: Expr) -> Expr:
    return apply("floor", divide(a, b))


def _remainder(a: Expr, b: Expr) -> Expr:
    return subtract(a, times(b, _floor_divide(a, b)))


def _complex(re: Expr, im: Expr) -> Expr:
    return plus(re, scale(1j, im))


def _logaddexp(a: Expr, b: Expr) -> Expr:
    """Log(e**a + e**b) = b + softplus(a - b)."""
    return plus(b, apply("softplus", subtract(a, b)))


def _truth(x: Expr) -> Expr:
    return x if x.kind == BOOLEAN else indicator(x, "!=", _zero(x))


def _clip(x: Expr, low: Any = None, high: Any = None) -> Expr:
    plain = lambda v: None if v is None else float(v)
    if low is None and high is None:
        return x
    if plain(low) == 0 and high is None:
        return apply("relu", x)
    return _integer_of(x, apply("clip", x, low=plain(low), high=plain(high)))


def _iota(shape: Any, axis: int) -> Expr:
    return expr("iota", (), shape, INTEGER, axis=axis)


def _plain(name: str) -> Lowering:
    return lambda x: apply(name, x)


def _flat(name: str) -> Lowering:
    """Rounding, which leaves integers alone."""
    return lambda x: x if x.kind in (INTEGER, BOOLEAN) else apply(name, x)


def _abs(x: Expr) -> Expr:
    return x if x.op == "abs" else apply("abs", x)


_PLAIN = (
    *("exp", "log", "sin", "cos", "tan", "sinh", "cosh", "tanh"),
    *("arcsin", "arccos", "arctan", "arcsinh", "arccosh", "arctanh"),
    *("sigmoid", "relu", "erf", "erfinv", "lgamma", "sign", "angle", "is_finite", "is_nan"),
)

_WORDS = """
constant      |         | value          | a number or an array that the program holds
iota          |         | shape axis     | counts 0, 1, 2, ... along axis
identity      | x       |                | x; also copies and aliases
stop          | x       |                | x, with no derivative
cast          | x       | dtype          | x in another dtype; to integers it truncates
negate        | x       |                | -x
exp           | x       |                | e**x
exp2          | x       |                | 2**x
expm1         | x       |                | e**x - 1
log           | x       |                | natural logarithm
log2          | x       |                | logarithm to base 2
log10         | x       |                | logarithm to base 10
log1p         | x       |                | log(1 + x)
sqrt          | x       |                | square root
rsqrt         | x       |                | 1 / sqrt(x)
cbrt          | x       |                | real cube root
square        | x       |                | x * x (a complex x is not conjugated)
reciprocal    | x       |                | 1 / x
sin           | x       |                | sine
cos           | x       |                | cosine
tan           | x       |                | tangent
sinh          | x       |                | hyperbolic sine
cosh          | x       |                | hyperbolic cosine
tanh          | x       |                | hyperbolic tangent
arcsin        | x       |                | inverse of sin
arccos        | x       |                | inverse of cos
arctan        | x       |                | inverse of tan
arcsinh       | x       |                | inverse of sinh
arccosh       | x       |                | inverse of cosh
arctanh       | x       |                | inverse of tanh
sigmoid       | x       |                | 1 / (1 + e**-x)
log_sigmoid   | x       |                | log(sigmoid(x))
softplus      | x       | beta?          | log(1 + e**(beta x)) / beta; beta = 1
relu          | x       |                | max(x, 0)
leaky_relu    | x       | slope          | x where x > 0, else slope * x
elu           | x       | alpha?         | x where x > 0, else alpha (e**x - 1); alpha = 1
gelu          | x       | approximate?   | x Phi(x); approximate = True is the form with tanh
silu          | x       |                | x sigmoid(x)
erf           | x       |                | error function
erfc          | x       |                | 1 - erf(x)
erfinv        | x       |                | inverse of erf
lgamma        | x       |                | log abs Gamma(x)
digamma       | x       |                | derivative of lgamma
polygamma     | x       | order          | order-th derivative of digamma
abs           | x       |                | modulus
sign          | x       |                | x / abs(x), 0 at 0
floor         | x       |                | round down
ceil          | x       |                | round up
round         | x       |                | to the nearest integer, ties to even
trunc         | x       |                | round towards 0
real          | x       |                | real part
imag          | x       |                | imaginary part
conj          | x       |                | complex conjugate
angle         | x       |                | argument of a complex number
is_finite     | x       |                | boolean
is_nan        | x       |                | boolean
logical_not   | x       |                | boolean
clip          | x       | low? high?     | min(max(x, low), high); numbers or None
add           | a b     |                | a + b
subtract      | a b     |                | a - b
multiply      | a b     |                | a * b, elementwise
divide        | a b     |                | a / b
power         | a b     |                | a ** b
remainder     | a b     |                | a - b floor(a / b)
floor_divide  | a b     |                | floor(a / b)
maximum       | a b     |                | elementwise
minimum       | a b     |                | elementwise
arctan2       | a b     |                | angle of b + i a
logaddexp     | a b     |                | log(e**a + e**b)
complex       | re im   |                | re + i im
compare       | a b     | relation       | boolean; one of "<" "<=" ">" ">=" "==" "!="
logical_and   | a b     |                | boolean
logical_or    | a b     |                | boolean
logical_xor   | a b     |                | boolean
where         | c a b   |                | a where c, else b
scale_gradient | x      | scale          | x; its derivative times scale
"""

ELEMENTWISE = words(
    _WORDS,
    {
        **{name: _plain(name) for name in _PLAIN},
        **{name: _flat(name) for name in ("floor", "ceil", "round", "trunc")},
        "constant": _constant,
        "iota": _iota,
        "identity": lambda x: x,
        "stop": _stop,
        "cast": _cast,
        "abs": _abs,
        "negate": _arithmetic(negate),
        "exp2": lambda x: apply("exp", scale(math.log(2), x)),
        "expm1": lambda x: subtract(apply("exp", x), one(x)),
        "log2": lambda x: scale(1 / math.log(2), apply("log", x)),
        "log10": lambda x: scale(1 / math.log(10), apply("log", x)),
        "log1p": lambda x: apply("log", plus(one(x), x)),
        "sqrt": lambda x: power(x, 0.5),
        "rsqrt": lambda x: power(x, -0.5),
        "cbrt": lambda x: times(apply("sign", x), power(_abs(x), 1 / 3)),
        "square": _arithmetic(lambda x: power(x, 2)),
        "reciprocal": lambda x: power(x, -1),
        "log_sigmoid": _log_sigmoid,
        "softplus": _softplus,
        "leaky_relu": _leaky_relu,
        "elu": _elu,
        "gelu": _gelu,
        "silu": lambda x: times(x, apply("sigmoid", x)),
        "erfc": lambda x: subtract(one(x), apply("erf", x)),
        "digamma": lambda x: apply("polygamma", x, order=0),
        "polygamma": lambda x, order: apply("polygamma", x, order=int(order)),
        "real": real,
        "imag": imag,
        "conj": conj,
        "logical_not": lambda x: negation(_truth(x)),
        "clip": _clip,
        "add": _arithmetic(plus),
        "subtract": _arithmetic(subtract),
        "multiply": _arithmetic(times),
        "divide": divide,
        "power": _power,
        "remainder": _arithmetic(_remainder),
        "floor_divide": _arithmetic(_floor_divide),
        "maximum": _extreme("maximum", ">"),
        "minimum": _extreme("minimum", "<"),
        "arctan2": lambda a, b: apply("arctan2", a, b),
        "logaddexp": _logaddexp,
        "complex": _complex,
        "compare": lambda a, b, relation: indicator(a, relation, b),
        "where": _where,
        "scale_gradient": lambda x, scale: apply("scale_gradient", x, scale=float(scale)),
        **{
            f"logical_{name}": lambda a, b, name=name: apply(
                f"logical_{name}", _truth(a), _truth(b)
            )
            for name in ("and", "or", "xor")
        },
    },
)
