"""Defines the vocabulary, which maps neutral names to functions that build expressions.

The PyTorch and JAX translators convert each recorded operation to a neutral name, operands and
attributes, which `gradient_graph` also prints (`operands.py`); `translated` looks up the name in
the vocabulary. An operation outside of the vocabulary is opaque (`opaque.py`).

Conventions: axes are counted from 0 and never negative; ``axes`` is a tuple, ``axis`` is one
number; ``keep`` (default False) keeps a reduced axis with length 1; elementwise operations
broadcast as in NumPy.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gradtools.seeing.formulas import algebra, expressions, operations
from gradtools.seeing.formulas.algebra import apply, broadcast
from gradtools.seeing.formulas.expressions import (
    BOOLEAN,
    INTEGER,
    REAL,
    Expr,
    constant_of,
    lifted,
    order,
)
from gradtools.seeing.formulas.operations import FUNCTIONS, along
from gradtools.seeing.formulas.patterns import named


def _power(a: Expr, b: Expr) -> Expr | None:
    """Returns a**b if b is a constant real exponent, otherwise None."""
    exponent = constant_of(b)
    shape = np.broadcast_shapes(a.shape, b.shape)
    return broadcast(a, shape) ** exponent if isinstance(exponent, float) else None


def _maximum(a: Expr, b: Expr) -> Expr | None:
    """Returns relu(a) for maximum(a, 0) or maximum(0, a), and None for other operands."""
    a, b = (a, b) if constant_of(a) is None else (b, a)
    whole = broadcast(a, np.broadcast_shapes(a.shape, b.shape))
    return apply("relu", whole) if expressions.is_zero(b) else None


def _cast(x: Expr, *, dtype: Any = None) -> Expr | None:
    """Casts x to a dtype; returns None for casts to integers or booleans that change values."""
    kind = x.kind if dtype is None else expressions.kind_of(dtype)
    if kind in (INTEGER, BOOLEAN) and kind != x.kind and (kind, x.kind) != (INTEGER, BOOLEAN):
        return None
    return algebra.real(x) if kind == REAL else x


def _variance(
    x: Expr, *, axes: Any = None, correction: float = 0, keep: bool = False
) -> list[Expr]:
    """Returns the variance, sum(abs(x - mean)**2) / (n - correction), and the mean."""
    n = math.prod(x.shape if axes is None else (x.shape[a] for a in axes))
    scale = n / (n - correction) if n > correction else math.nan
    return [scale * along("var", x, axes, keep), algebra.mean(x, axes, keep)]


def _einsum(*xs: Expr, subscripts: str) -> Expr | None:
    """Returns an einsum, or None if `subscripts` has an ellipsis, a diagonal or no output."""
    text = subscripts.replace(" ", "")
    once = all(len(set(part)) == len(part) for part in text.split("->")[0].split(","))
    return algebra.einsum(text, *xs) if once and "->" in text and "." not in text else None


def _norm(x: Expr, *, ord: Any = 2, p: Any = 2, **how: Any) -> Expr | None:
    """Returns the Euclidean norm of x, or None if the order of the norm is not 2."""
    return _reduction("norm")(x, **how) if x.rank and ord == p == 2 else None


def _reduction(name: str) -> Callable[..., Expr]:
    return lambda x, *, axes=None, keep=False: along(name, x, axes or None, keep)


def _unless_complex(name: str) -> Callable[[Expr], Expr | None]:
    real_only = ("sigmoid", "softplus", "relu")
    return lambda x: None if x.is_complex and name in real_only else apply(name, x)


WORDS: dict[str, Callable[..., Any]] = {
    **{name: _unless_complex(name) for name in FUNCTIONS},
    "identity": lambda x: x,
    "add": lambda a, b, *, alpha=1: a + alpha * b,
    "subtract": lambda a, b, *, alpha=1: a - alpha * b,
    "negate": lambda x: -x,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b if a.is_inexact or b.is_inexact else None,
    "power": _power,
    "square": lambda x: x**2,
    "sqrt": lambda x: x**0.5,
    "rsqrt": lambda x: x**-0.5,
    "reciprocal": lambda x: x**-1,
    "abs": lambda x: x if x.op == "abs" else apply("abs", x, kind=REAL),
    "sign": lambda x: None if x.is_complex else apply("sgn", x),
    "real": algebra.real,
    "imag": algebra.imag,
    "conj": algebra.conj,
    "complex": lambda re, im: re + 1j * im,
    "stop": operations.stop,
    "cast": _cast,
    "compare": operations.indicator,
    "where": operations.where,
    "maximum": _maximum,
    "expm1": lambda x: apply("exp", x) - 1,
    "log1p": lambda x: apply("log", 1 + x),
    "logaddexp": lambda a, b: apply("softplus", a) if expressions.is_zero(b) else None,
    "silu": lambda x: x * apply("sigmoid", x),
    "einsum": _einsum,
    "matmul": algebra.matmul,
    "linear": lambda x, w, *b: algebra.plus(x @ (algebra.swap(w) if w.rank > 1 else w), *b),
    "vdot": lambda a, b: algebra.conj(a) @ b,
    "transpose": algebra.transpose,
    "reshape": algebra.reshape,
    "broadcast": broadcast,
    **dict.fromkeys(("update", "fill"), lambda x, value: broadcast(lifted(value), x.shape)),
    "zero": lambda x: expressions.full(0.0, x.shape),
    "slice": operations.sliced,
    "split": operations.split,
    "one_hot": operations.one_hot,
    "take_along": operations.take_along,
    "sum": algebra.total,
    "mean": algebra.mean,
    **{name: _reduction(name) for name in ("max", "min", "logsumexp")},
    "norm": _norm,
    "variance": _variance,
    "deviation": lambda x, **how: _variance(x, **how)[0] ** 0.5,
    "softmax": operations.softmax,
    "log_softmax": lambda x, *, axis: x - along("logsumexp", x, [axis][: x.rank], keep=True),
}

Like = tuple[Sequence[int], str]  # shape and kind of a result
_WRAPS: dict[str, Callable[..., Any]] = {"where": np.where, "remainder": np.remainder}
_CLOSED = ("add", "subtract", "multiply", "negate", "sum")  # these map integers to integers
_BRANCHED = ("power", "sqrt", "rsqrt", "log", "log1p")  # f(x + 0i) may differ from f(x)


def made(name: str, operands: Sequence[Expr], attributes: Mapping[str, Any]) -> Any:
    """Returns the expressions of an operation, or None if the vocabulary lacks the operation."""
    if name not in WORDS:
        return None
    try:
        bound = inspect.signature(WORDS[name]).bind(*operands, **attributes)
    except TypeError:
        return None
    return WORDS[name](*bound.args, **bound.kwargs)


def _unwrapped(
    name: str, xs: Sequence[Expr], value_of: Callable[[Expr], np.ndarray]
) -> Expr | None:
    """Returns i if the operation is where(i < 0, i + n, i) or i % n and equals i in this run."""
    i = xs[2] if name == "where" else xs[0] if name == "remainder" else None
    if i is None or any(x.op == "placeholder" and x.is_inexact for x in order(xs)):
        return None
    condition, index = (x.args[0] if algebra.is_wrapper(x) else x for x in (xs[0], i))
    if name == "where" and condition is not operations.indicator(index, 0, "<"):
        return None
    return i if np.array_equal(value_of(i), _WRAPS[name](*map(value_of, xs))) else None


def translated(
    name: str,
    operands: Sequence[Expr],
    attributes: Mapping[str, Any],
    likes: Sequence[Like],
    value_of: Callable[[Expr], np.ndarray],
) -> list[Expr | None] | None:
    """Returns the results of an operation, or None if the vocabulary cannot express all results.

    An integer result that has no expression, such as the indices of a maximum, is None.

    value_of: A function that returns the NumPy value of an operand in this run.
    """
    if [kind for _, kind in likes] == [INTEGER] and (i := _unwrapped(name, operands, value_of)):
        return [i]
    if name not in _BRANCHED:
        operands = [x.args[0] if x.op == "cast" and x.is_complex else x for x in operands]
    attributes = {k: v for k, v in attributes.items() if k != "dtype" or name == "cast"}
    result = made(name, operands, attributes)
    if result is None:
        return None
    results = result[: len(likes)] if isinstance(result, list) else [result]
    likes, more = likes[: len(results)], likes[len(results) :]
    if any(kind in (REAL, expressions.COMPLEX) for _, kind in more):
        return None
    for x, (shape, kind) in zip(results, likes, strict=True):
        counts = kind == BOOLEAN or (kind == INTEGER and name not in _CLOSED)
        if x is None or x.shape != tuple(shape):
            return None
        if counts and x.is_inexact and constant_of(x) is None:
            return None
    return [*results, *[None] * len(more)]


def fitted(x: Expr, like: Like) -> Expr:
    """Applies `named` to x, and converts the expression to the shape and kind of `like`."""
    shape, kind = like
    x = named(x)
    x = x if x.shape == tuple(shape) else broadcast(x, tuple(shape))
    plain = kind not in (expressions.COMPLEX, INTEGER) or x.is_complex or constant_of(x) is not None
    return x if plain or x.kind in (kind, BOOLEAN) else apply("cast", x, kind=kind, to=kind)


def constant(value: Any) -> Expr:
    """Returns the expression of a captured number or array."""
    value = np.asarray(value)
    if value.ndim or value.dtype.kind == "b":
        return expressions.array(value)
    return expressions.full(value[()], ())


def has_opaque_part(results: Sequence[Expr], operands: Sequence[Expr]) -> bool:
    """Returns whether the results depend on the operands through an opaque operation."""
    before = set(order(operands))
    return any(x.op == "by_name" and x not in before for x in order(results))
