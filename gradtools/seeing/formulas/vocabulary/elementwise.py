"""Lowering of elementwise operations to primitives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gradtools.seeing.formulas import algebra, constructors
from gradtools.seeing.formulas.algebra import (
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
from gradtools.seeing.formulas.expressions import BOOLEAN, COMPLEX, INTEGER, Expr, expr, kind_of
from gradtools.seeing.formulas.primitives.elementwise import apply, indicator, negation, one
from gradtools.seeing.formulas.vocabulary.record import words

Lowering = Callable[..., Any]


def _zero(x: Expr) -> Expr:
    return full(0.0, x.shape)


def _constant(value: Any) -> Expr:
    """A number is written as it is; an integer array stays one, for indices."""
    value = np.asarray(value)
    if value.ndim or value.dtype.kind == "b":
        return array(value)
    return number(value[()])


def _cast(x: Expr, dtype: Any = None) -> Expr:
    kind = x.kind if dtype is None else kind_of(dtype)
    if kind == COMPLEX or kind == x.kind:
        return x
    if x.kind == COMPLEX and kind == "real":
        return real(x)
    if kind in (INTEGER, BOOLEAN):
        return x if kind == INTEGER and x.kind == BOOLEAN else apply_cast(x, kind)
    return x


def apply_cast(x: Expr, kind: str) -> Expr:
    """To integers or booleans; to complex numbers, which is written as nothing."""
    return algebra.ufunc("cast", [x], kind, to=kind)


def _stop(x: Expr) -> Expr:
    if x.op in ("number", "stop") or constant_of(x) is not None:
        return x
    return algebra.ufunc("stop", [x], x.kind)


def _softplus(x: Expr, beta: float = 1.0, threshold: float | None = None) -> Expr:
    result = scale(1 / beta, apply("softplus", scale(beta, x)))
    if threshold is None:
        return result
    return _where(indicator(scale(beta, x), ">", number(float(threshold))), x, result)


def _where_positive(x: Expr, below: Expr) -> Expr:
    return apply("where", indicator(x, ">", _zero(x)), x, below)


def _elu(x: Expr, alpha: float = 1.0, scale: float = 1, input_scale: float = 1) -> Expr:
    x = scaled(input_scale, x)
    below = algebra.scale(float(alpha), subtract(apply("exp", x), one(x)))
    return scaled(scale, _where_positive(x, below))


def scaled(factor: Any, x: Expr) -> Expr:
    """A product with a number; with one nothing."""
    return x if factor == 1 else ELEMENTWISE["multiply"].lower(number(factor), x)  # type: ignore[misc]


def _gelu(x: Expr, approximate: str = "none") -> Expr:
    if approximate != "tanh":
        return times(x, apply("normal_cdf", x))
    inner = scale(math.sqrt(2 / math.pi), plus(x, scale(0.044715, power(x, 3))))
    return scale(0.5, times(x, plus(one(x), apply("tanh", inner))))


def _celu(x: Expr, alpha: float = 1.0) -> Expr:
    below = scale(alpha, _expm1(divide(x, number(alpha))))
    return _where(indicator(x, ">", number(0.0)), x, below)


def _hard(x: Expr) -> Expr:
    """A sixth of what of x + 3 lies between 0 and 6."""
    return divide(_clip(plus(x, number(3.0)), low=0.0, high=6.0), number(6.0))


def _softshrink(x: Expr, lambd: float = 0.5) -> Expr:
    above, below = subtract(x, number(lambd)), plus(x, number(lambd))
    inner = _where(indicator(x, "<", number(-lambd)), below, number(0.0))
    return _where(indicator(x, ">", number(lambd)), above, inner)


def _glu(x: Expr, axis: int) -> Expr:
    half = x.shape[axis] // 2
    bounds = lambda k: [k * half if a == axis else 0 for a in range(x.rank)]
    limits = lambda k: [k * half if a == axis else n for a, n in enumerate(x.shape)]
    a, b = (constructors.cut(x, bounds(k), limits(k + 1)) for k in (0, 1))
    return times(a, apply("sigmoid", b))


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


def _expm1(x: Expr) -> Expr:
    return subtract(apply("exp", x), one(x))


def _power(a: Expr, b: Expr) -> Expr:
    exponent = constant_of(b)
    shape = algebra.broadcast_shape(a.shape, b.shape)
    if exponent is not None:
        return power(algebra.broadcast(a, shape), exponent)
    base = constant_of(a)
    if base is not None and not isinstance(base, complex) and base > 0:
        return apply("exp", scale(math.log(base), algebra.broadcast(b, shape)))
    return apply("pow", a, b)


def _polynomial(x: Expr, *coefficients: Expr) -> Expr:
    """By Horner's rule."""
    result = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        result = plus(c, times(x, result))
    return algebra.broadcast(result, x.shape)


def _integer_of(x: Expr, whole: Expr) -> Expr:
    """What is made of integers by +, -, * stays integer, so that it can be an index."""
    return apply_cast(whole, INTEGER) if x.kind in (INTEGER, BOOLEAN) else whole


def _arithmetic(make: Callable[..., Expr]) -> Lowering:
    def lowered(*xs: Expr, **attributes: Any) -> Expr:
        result = make(*xs, **attributes)
        integers = all(x.kind in (INTEGER, BOOLEAN) or _is_whole(x) for x in xs)
        some = any(x.kind in (INTEGER, BOOLEAN) for x in xs)
        return apply_cast(result, INTEGER) if integers and some else result

    return lowered


def _sum(make: Callable[..., Expr]) -> Lowering:
    lowered = _arithmetic(make)
    return lambda a, b, alpha=1: lowered(a, scaled(alpha, b))


def _is_whole(x: Expr) -> bool:
    value = constant_of(x)
    return value is not None and not isinstance(value, complex) and float(value).is_integer()


def _divide(a: Expr, b: Expr, rounding_mode: str | None = None) -> Expr:
    if rounding_mode == "floor":
        return _arithmetic(_floor_divide)(a, b)
    return divide(a, b) if rounding_mode is None else _arithmetic(_truncated)(a, b)


def _truncated(a: Expr, b: Expr) -> Expr:
    return apply("trunc", divide(a, b))


def _round(x: Expr, decimals: int = 0, rounding_method: str = "to_nearest_even") -> Expr:
    if rounding_method == "away_from_zero":
        return times(apply("sign", x), apply("floor", plus(_abs(x), number(0.5))))
    if not decimals:
        return _flat("round")(x)
    ten = number(10.0**decimals)
    return divide(apply("round", times(x, ten)), ten)


def _floor_divide(a: Expr, b: Expr) -> Expr:
    return apply("floor", divide(a, b))


def _complex(re: Expr, im: Expr) -> Expr:
    return plus(re, scale(1j, im))


def _logaddexp(a: Expr, b: Expr) -> Expr:
    """Log(e**a + e**b) = b + softplus(a - b)."""
    return plus(b, apply("softplus", subtract(a, b)))


def _sinc(x: Expr) -> Expr:
    x = times(number(math.pi), x)
    at_zero = indicator(x, "==", number(0.0))
    safe = _where(at_zero, number(1.0), x)
    return _where(at_zero, number(1.0), divide(apply("sin", safe), safe))


def _logit(x: Expr, eps: float | None = None) -> Expr:
    x = x if eps is None else _clip(x, low=eps, high=1 - eps)
    return apply("log", divide(x, subtract(number(1.0), x)))


def _heaviside(x: Expr, y: Expr) -> Expr:
    above = indicator(x, ">", number(0.0))
    return _where(indicator(x, "==", number(0.0)), y, above)


def _truth(x: Expr) -> Expr:
    return x if x.kind == BOOLEAN else indicator(x, "!=", _zero(x))


def _clip(x: Expr, *bounds: Expr, low: Any = None, high: Any = None) -> Expr:
    if bounds:
        least, most = bounds
        low, high = map(constant_of, bounds)
    if bounds and (low is None or high is None):
        return _extreme("minimum", "<")(_extreme("maximum", ">")(x, least), most)
    plain = lambda v: None if v is None else float(v)
    if low is None and high is None:
        return x
    if plain(low) == 0 and high is None:
        return apply("relu", x)
    return _integer_of(x, apply("clip", x, low=plain(low), high=plain(high)))


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
cast          | x       | dtype?         | x in another dtype; to integers it truncates
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
softplus      | x       | beta? threshold?  |
    log(1 + e**(beta x)) / beta; beta = 1; where beta x > threshold: x
relu          | x       |                | max(x, 0)
leaky_relu    | x       | negative_slope | x where x > 0, else negative_slope * x
elu           | x       | alpha? scale? input_scale?  |
    scale (z where z > 0, else alpha (e**z - 1)); z = input_scale x; all are 1
celu          | x       | alpha?         | x where x > 0, else alpha (e**(x / alpha) - 1)
gelu          | x       | approximate?   | x Phi(x); approximate = "tanh" is the form with tanh
silu          | x       |                | x sigmoid(x)
mish          | x       |                | x tanh(softplus(x))
hardsigmoid   | x       |                | min(max(x + 3, 0), 6) / 6
hardswish     | x       |                | x hardsigmoid(x)
softshrink    | x       | lambd?         | nearer to 0 by lambd, at most to 0
hardshrink    | x       | lambd?         | x where abs(x) > lambd, else 0
threshold     | x t v   |                | x where x > t, else v
prelu         | x w     |                | x where x > 0, else w x
glu           | x       | axis           | the first half of x times sigmoid of the other
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
round         | x       | decimals? rounding_method? |
    to the nearest integer, ties to even, or "away_from_zero"; of 10**decimals x
trunc         | x       |                | round towards 0
real          | x       |                | real part
imag          | x       |                | imaginary part
conj          | x       |                | complex conjugate
angle         | x       |                | argument of a complex number
is_finite     | x       |                | boolean
is_nan        | x       |                | boolean
logical_not   | x       |                | boolean
clip          | x *bound | low? high?    | min(max(x, low), high); both numbers or both operands
nan_to_num    | x       | nan?           | x, where that is NaN: nan = 0
deg2rad       | x       |                | x pi / 180
rad2deg       | x       |                | x 180 / pi
sinc          | x       |                | sin(pi x) / (pi x)
frac          | x       |                | x - trunc(x)
logit         | x       | eps?           | log(x / (1 - x)), x between eps and 1 - eps
add           | a b     | alpha?         | a + alpha b; alpha = 1
subtract      | a b     | alpha?         | a - alpha b; alpha = 1
multiply      | a b     |                | a * b, elementwise
divide        | a b     | rounding_mode? | a / b; rounded to the "floor" or by "trunc"
power         | a b     |                | a ** b
polynomial    | x *c    |                | c[0] + c[1] x + c[2] x**2 ..
one_minus_square | x    |                | 1 - x**2
remainder     | a b     |                | a - b floor(a / b)
fmod          | a b     |                | a - b trunc(a / b)
addcmul       | x a b   | value?         | x + value a b; value = 1
addcdiv       | x a b   | value?         | x + value a / b; value = 1
lerp          | a b t   |                | a + t (b - a)
hypot         | a b     |                | sqrt(a**2 + b**2)
xlogy         | a b     |                | a log(b), 0 where a is 0
heaviside     | x y     |                | 0 where x < 0, y where x = 0, else 1
floor_divide  | a b     |                | floor(a / b)
maximum       | a b     |                | elementwise
minimum       | a b     |                | elementwise
arctan2       | a b     |                | angle of b + i a
logaddexp     | a b     |                | log(e**a + e**b)
logaddexp2    | a b     |                | log2(2**a + 2**b)
complex       | re im   |                | re + i im
polar         | r phi   |                | r e**(i phi)
compare       | a b     | relation       | boolean; one of "<" "<=" ">" ">=" "==" "!="
logical_and   | a b     |                | boolean
logical_or    | a b     |                | boolean
logical_xor   | a b     |                | boolean
where         | c a b   |                | a where c, else b
scale_gradient | x      | scale          | x; its derivative times scale
tanh_backward | g y     |                | g (1 - conj(y)**2)
sigmoid_backward | g y  |                | g (1 - conj(y)) conj(y)
threshold_backward | g x t |             | 0 where x <= t, else g
"""

ELEMENTWISE = words(
    _WORDS,
    {
        **{name: _plain(name) for name in _PLAIN},
        **{name: _flat(name) for name in ("floor", "ceil", "trunc")},
        "constant": _constant,
        "iota": lambda shape, axis: expr("iota", (), shape, INTEGER, axis=axis),
        "identity": lambda x: x,
        "stop": _stop,
        "cast": _cast,
        "abs": _abs,
        "negate": _arithmetic(negate),
        "exp2": lambda x: apply("exp", scale(math.log(2), x)),
        "expm1": _expm1,
        "log2": lambda x: scale(1 / math.log(2), apply("log", x)),
        "log10": lambda x: scale(1 / math.log(10), apply("log", x)),
        "log1p": lambda x: apply("log", plus(one(x), x)),
        "sqrt": lambda x: power(x, 0.5),
        "rsqrt": lambda x: power(x, -0.5),
        "cbrt": lambda x: times(apply("sign", x), power(_abs(x), 1 / 3)),
        "square": _arithmetic(lambda x: power(x, 2)),
        "reciprocal": lambda x: power(x, -1),
        "log_sigmoid": lambda x: negate(apply("softplus", negate(x))),
        "softplus": _softplus,
        "leaky_relu": lambda x, negative_slope: _where_positive(x, scale(negative_slope, x)),
        "elu": _elu,
        "gelu": _gelu,
        "silu": lambda x: times(x, apply("sigmoid", x)),
        "celu": _celu,
        "mish": lambda x: times(x, apply("tanh", _softplus(x))),
        "hardsigmoid": _hard,
        "hardswish": lambda x: times(x, _hard(x)),
        "softshrink": _softshrink,
        "hardshrink": lambda x, lambd=0.5: _where(
            indicator(_abs(x), ">", number(lambd)), x, number(0.0)
        ),
        "threshold": lambda x, t, v: _where(indicator(x, ">", t), x, v),
        "prelu": lambda x, w: _where(indicator(x, ">", number(0.0)), x, times(w, x)),
        "glu": _glu,
        "round": _round,
        "nan_to_num": _arithmetic(
            lambda x, nan=0.0: _where(apply("is_nan", x), number(float(nan)), x)
        ),
        "deg2rad": lambda x: scale(math.pi / 180, x),
        "rad2deg": lambda x: scale(180 / math.pi, x),
        "sinc": _sinc,
        "frac": lambda x: subtract(x, _flat("trunc")(x)),
        "logit": _logit,
        "erfc": lambda x: subtract(one(x), apply("erf", x)),
        "digamma": lambda x: apply("polygamma", x, order=0),
        "polygamma": lambda x, order: apply("polygamma", x, order=int(order)),
        "real": real,
        "imag": imag,
        "conj": conj,
        "logical_not": lambda x: negation(_truth(x)),
        "clip": _clip,
        "add": _sum(plus),
        "subtract": _sum(subtract),
        "multiply": _arithmetic(times),
        "divide": _divide,
        "power": _arithmetic(_power),
        "polynomial": _polynomial,
        "one_minus_square": lambda x: subtract(number(1.0), power(x, 2)),
        "remainder": _arithmetic(lambda a, b: subtract(a, times(b, _floor_divide(a, b)))),
        "fmod": _arithmetic(lambda a, b: subtract(a, times(b, _truncated(a, b)))),
        "addcmul": _arithmetic(lambda x, a, b, value=1: plus(x, scaled(value, times(a, b)))),
        "addcdiv": lambda x, a, b, value=1: plus(x, scaled(value, divide(a, b))),
        "lerp": lambda a, b, t: plus(a, times(t, subtract(b, a))),
        "hypot": lambda a, b: power(plus(power(a, 2), power(b, 2)), 0.5),
        "xlogy": lambda a, b: _where(
            indicator(a, "==", number(0.0)), number(0.0), times(a, apply("log", b))
        ),
        "heaviside": _arithmetic(_heaviside),
        "floor_divide": _arithmetic(_floor_divide),
        "maximum": _extreme("maximum", ">"),
        "minimum": _extreme("minimum", "<"),
        "arctan2": lambda a, b: apply("arctan2", a, b),
        "logaddexp": _logaddexp,
        "logaddexp2": lambda a, b: scale(
            1 / math.log(2), _logaddexp(scale(math.log(2), a), scale(math.log(2), b))
        ),
        "complex": _complex,
        "polar": lambda r, phi: _complex(times(r, apply("cos", phi)), times(r, apply("sin", phi))),
        "tanh_backward": lambda g, y: times(g, subtract(number(1.0), power(conj(y), 2))),
        "sigmoid_backward": lambda g, y: times(g, times(subtract(number(1.0), conj(y)), conj(y))),
        "threshold_backward": lambda g, x, t: _where(indicator(x, "<=", t), number(0.0), g),
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
