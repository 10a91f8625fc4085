"""The vocabulary: the expressions of the graphs' neutral operation names.

Both frameworks' translators turn each recorded operation into a name, operands and attributes, as
`gradient_graph` prints them (`operands.py`); `translated` looks the name up here. An operation
without a word is kept by its name (`opaque.py`).

Conventions: axes are counted from 0 and never negative; ``axes`` is a tuple, ``axis`` one number;
``keep`` (default False) keeps a reduced axis with length 1; elementwise operations broadcast as in
NumPy.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradtools.seeing.formulas import algebra, operations
from gradtools.seeing.formulas.algebra import apply, broadcast, broadcast_shape
from gradtools.seeing.formulas.expressions import (
    BOOLEAN,
    COMPLEX,
    INTEGER,
    REAL,
    Expr,
    array,
    constant_of,
    full,
    is_zero,
    kind_of,
    order,
)
from gradtools.seeing.formulas.operations import cast_to, concatenate, reduced
from gradtools.seeing.formulas.patterns import named


def _power(a: Expr, b: Expr) -> Expr | None:
    """A power with a constant exponent or base; None for others."""
    exponent, base = constant_of(b), constant_of(a)
    if exponent is not None:
        return broadcast(a, broadcast_shape(a.shape, b.shape)) ** exponent
    if base is not None and not isinstance(base, complex) and base > 0:
        return apply("exp", math.log(base) * broadcast(b, broadcast_shape(a.shape, b.shape)))
    return None


def _maximum(a: Expr, b: Expr) -> Expr | None:
    """The maximum with the number 0, which is relu, or with -inf; None for any other."""
    a, b = (a, b) if constant_of(a) is None else (b, a)
    if constant_of(b) not in (0, -math.inf):
        return None
    whole = broadcast(a, broadcast_shape(a.shape, b.shape))
    return apply("relu", whole) if is_zero(b) else whole


def _cast(x: Expr, *, dtype: Any = None) -> Expr:
    """x in another dtype; a cast to integers truncates."""
    kind = x.kind if dtype is None else kind_of(dtype)
    if x.is_complex and kind == REAL:
        return algebra.real(x)
    if kind in (INTEGER, BOOLEAN) and kind != x.kind and (kind, x.kind) != (INTEGER, BOOLEAN):
        return cast_to(x, kind)
    return x


def _norm(x: Expr, *, axes: Any = None, ord: Any = 2, keep: bool = False) -> Expr | None:
    """The Euclidean norm; None for any other."""
    return reduced("norm", x, axes or None, keep) if x.rank and ord == 2 else None


def _variance(x: Expr, *, axes: Any = None, correction: float = 0, keep: bool = False) -> Expr:
    """sum(abs(x - mean)**2) / (n - correction)."""
    n = math.prod(x.shape if axes is None else (x.shape[a] for a in axes))
    scale = n / (n - correction) if n > correction else math.nan
    return scale * reduced("var", x, axes, keep)


def _reduction(name: str) -> Callable[..., Expr]:
    return lambda x, *, axes=None, keep=False: reduced(name, x, axes or None, keep)


_FUNCTIONS = "exp log sin cos sinh cosh tanh erf sigmoid relu softplus".split()
WORDS: dict[str, Callable[..., Any]] = {
    **{name: lambda x, name=name: apply(name, x) for name in _FUNCTIONS},
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
    "logaddexp": lambda a, b: apply("softplus", b) if is_zero(a) else b + apply("softplus", a - b),
    "log_sigmoid": lambda x: -apply("softplus", -x),
    "silu": lambda x: x * apply("sigmoid", x),
    "erfc": lambda x: 1 - apply("erf", x),
    "einsum": lambda *xs, subscripts: algebra.einsum(subscripts, *xs),
    "matmul": algebra.matmul,
    "outer": partial(algebra.einsum, "i,j->ij"),
    "vdot": lambda a, b: algebra.conj(a) @ b,
    "transpose": algebra.transpose,
    "reshape": algebra.reshape,
    "broadcast": broadcast,
    "slice": operations.sliced,
    "split": operations.split,
    "concatenate": concatenate,
    "stack": lambda *xs, axis: concatenate(*(algebra.unsqueeze(x, [axis]) for x in xs), axis=axis),
    "one_hot": operations.one_hot,
    "take_along": operations.take_along,
    "sum": algebra.total,
    "mean": algebra.mean,
    **{name: _reduction(name) for name in ("max", "min", "logsumexp")},
    "norm": _norm,
    "variance": _variance,
    "deviation": lambda x, **how: _variance(x, **how) ** 0.5,
    "softmax": operations.softmax,
    "log_softmax": lambda x, *, axis: x - reduced("logsumexp", x, [axis][: x.rank], keep=True),
    "standardize": operations.standardize,
}

Like = tuple[Sequence[int], str]  # the shape and the kind of a result
# These commute with a cast from real to complex.
_LINEAR = """
add subtract multiply negate einsum matmul outer sum mean reshape transpose broadcast concatenate
stack split slice real imag conj abs identity
""".split()


def made(name: str, operands: Sequence[Expr], attributes: Mapping[str, Any]) -> Any:
    """The expression of a word, or several; None if the vocabulary has no such form of it."""
    make = WORDS.get(name)
    if make is None:
        return None
    try:
        inspect.signature(make).bind(*operands, **attributes)
    except TypeError:
        return None
    return make(*operands, **attributes)


def translated(
    name: str, operands: Sequence[Expr], attributes: Mapping[str, Any], likes: Sequence[Like]
) -> list[Expr | None] | None:
    """The results of an operation; None if the vocabulary lacks it or a result of it.

    An integer result without a word, such as the places of a maximum, is None.
    """
    if name in _LINEAR:
        operands = [x.args[0] if x.op == "cast" and x.is_complex else x for x in operands]
    attributes = {k: v for k, v in attributes.items() if k != "dtype" or name == "cast"}
    result = made(name, operands, attributes)
    results = result if isinstance(result, list) else [result]
    likes, more = likes[: len(results)], likes[len(results) :]
    if any(kind in (REAL, COMPLEX) for _, kind in more):
        return None
    if [getattr(r, "shape", None) for r in results] != [tuple(shape) for shape, _ in likes]:
        return None
    return [*map(fitted, results, likes), *[None] * len(more)]


def fitted(x: Expr, like: Like) -> Expr:
    """x by its name, of this shape, and of the kind of the framework's result."""
    shape, kind = like
    x = named(x)
    if x.is_inexact and kind in (INTEGER, BOOLEAN) and constant_of(x) is None:
        x = cast_to(x, kind)
    x = x if x.shape == tuple(shape) else broadcast(x, tuple(shape))
    plain = x.is_complex or constant_of(x) is not None
    return x if kind != COMPLEX or plain else cast_to(x, COMPLEX)


def constant(value: Any) -> Expr:
    """A captured number or array."""
    value = np.asarray(value)
    return array(value) if value.ndim or value.dtype.kind == "b" else full(value[()], ())


def has_opaque_part(results: Sequence[Expr], operands: Sequence[Expr]) -> bool:
    """Whether the results depend on the operands through an opaque operation."""
    before = set(order(operands))
    return any(x.op == "by_name" and x not in before for x in order(results))
