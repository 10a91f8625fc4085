"""`WORDS`, what the graph's names mean as expressions, and `FormulaCall`, one call of a framework.

Both recorders fill a `FormulaCall` for each operation of a run: a name, operands, attributes, as
`gradient_graph` prints them. Its meaning is read in a table: the recorder's own readings, else
`WORDS`. An operation without one is kept by its name (`opaque.py`).

Conventions: axes are counted from 0 and never negative; ``axes`` is a tuple, ``axis`` one number;
``keep`` (default False) keeps a reduced axis with length 1; elementwise operations broadcast as in
NumPy.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.seeing.formulas import algebra, arrays, elementwise, reductions
from gradtools.seeing.formulas.algebra import apply, broadcast, broadcast_shape
from gradtools.seeing.formulas.expressions import (
    BOOLEAN,
    COMPLEX,
    INTEGER,
    REAL,
    Expr,
    constant_of,
    evaluate,
    is_zero,
    order,
)
from gradtools.seeing.formulas.recorded import named


def _power(a: Expr, b: Expr) -> Expr | None:
    """A power with a constant exponent or base; None for others."""
    exponent, base = constant_of(b), constant_of(a)
    if exponent is not None:
        return broadcast(a, broadcast_shape(a.shape, b.shape)) ** exponent
    if base is not None and not isinstance(base, complex) and base > 0:
        return apply("exp", math.log(base) * broadcast(b, broadcast_shape(a.shape, b.shape)))
    return None


def _reduction(name: str) -> Callable[..., Expr]:
    return lambda x, *, axes=None, keep=False: reductions.reduced(name, x, axes or None, keep)


def _unary(name: str) -> Callable[..., Expr]:
    return lambda x: apply(name, x)


_FUNCTIONS = "exp log sin cos sinh cosh tanh erf sigmoid relu softplus".split()
WORDS: dict[str, Callable[..., Any]] = {
    **{name: _unary(name) for name in _FUNCTIONS},
    "identity": lambda x: x,
    "add": lambda a, b, *, alpha=1: a + alpha * b,
    "subtract": lambda a, b, *, alpha=1: a - alpha * b,
    "negate": lambda x: -x,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "power": _power,
    "square": lambda x: x**2,
    "sqrt": lambda x: x**0.5,
    "rsqrt": lambda x: x**-0.5,
    "reciprocal": lambda x: x**-1,
    "abs": elementwise.modulus,
    "sign": _unary("sign"),
    "real": algebra.real,
    "imag": algebra.imag,
    "conj": algebra.conj,
    "complex": lambda re, im: re + 1j * im,
    "stop": elementwise.stop,
    "cast": elementwise.cast,
    "compare": elementwise.indicator,
    "where": elementwise.where,
    "maximum": lambda a, b: elementwise.extreme("maximum", a, b),
    "minimum": lambda a, b: elementwise.extreme("minimum", a, b),
    "clip": elementwise.clip,
    "expm1": lambda x: apply("exp", x) - 1,
    "log1p": lambda x: apply("log", 1 + x),
    "logaddexp": lambda a, b: apply("softplus", b) if is_zero(a) else b + apply("softplus", a - b),
    "log_sigmoid": lambda x: -apply("softplus", -x),
    "silu": lambda x: x * apply("sigmoid", x),
    "erfc": lambda x: 1 - apply("erf", x),
    "einsum": lambda *xs, subscripts: algebra.einsum(subscripts, *xs),
    "matmul": algebra.matmul,
    "outer": lambda a, b: algebra.einsum("i,j->ij", a, b),
    "vdot": lambda a, b: algebra.conj(a) @ b,
    "transpose": algebra.transpose,
    "reshape": algebra.reshape,
    "broadcast": broadcast,
    "slice": arrays.sliced,
    "split": arrays.split,
    "concatenate": arrays.concatenate,
    "stack": arrays.stack,
    "one_hot": arrays.one_hot,
    "take_along": arrays.take_along,
    "sum": algebra.total,
    "mean": algebra.mean,
    **{name: _reduction(name) for name in ("max", "min", "logsumexp")},
    "norm": reductions.norm,
    "variance": reductions.variance,
    "deviation": reductions.deviation,
    "softmax": reductions.softmax,
    "log_softmax": reductions.log_softmax,
    "standardize": reductions.standardize,
}


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


# --- one call of a framework


Like = tuple[Sequence[int], str]  # shape and kind
Reading = Callable[[Any], Any]  # from a `FormulaCall` to one or several expressions, or None
# These commute with a elementwise.cast from algebra.real to complex.
_LINEAR = """
add subtract multiply negate einsum matmul outer sum mean reshape transpose broadcast concatenate
stack split slice real imag conj abs identity
""".split()


@dataclass(eq=False)
class FormulaCall:
    """One call of a framework; a recorder's own class can compute it."""

    name: str  # as the graph says it
    operands: Sequence[Expr]
    attributes: Mapping[str, Any]
    likes: Sequence[Like]  # the shape and the kind of each result
    own: Any  # the arguments by the framework's names, with expressions in place of arrays

    def leaf(self, x: Expr) -> Any:
        """The numbers of a leaf in this run."""
        raise NotImplementedError

    def value_of(self, x: Expr) -> np.ndarray:
        """The numbers of an operand in this run."""
        leaves = [p for p in order([x]) if p.op == "placeholder"]
        return evaluate([x], {p: self.leaf(p) for p in leaves})[0]

    def computed(self, first: np.ndarray) -> np.ndarray:
        """The result at another first operand; the other operands are constants."""
        raise NotImplementedError

    def translated(self, readings: Mapping[str, Reading], key: str = "") -> list[Any] | None:
        """The results, by a reading or by the name; None if the vocabulary has none.

        A result that is None, such as the places of a elementwise.maximum, is taken as a constant.
        """
        result = readings.get(key, FormulaCall._in_vocabulary)(self)
        return result if result is None or isinstance(result, list) else [result]

    def _in_vocabulary(self) -> Any:
        name, operands = self.name, self.operands
        if name in _LINEAR:
            operands = [x.args[0] if x.op == "cast" and x.is_complex else x for x in operands]
        attributes = {k: v for k, v in self.attributes.items() if k != "dtype" or name == "cast"}
        result = made(name, operands, attributes)
        results = result if isinstance(result, list) else [result]
        likes, more = self.likes[: len(results)], self.likes[len(results) :]
        shapes = [getattr(r, "shape", None) for r in results]
        lacking = any(kind in (REAL, COMPLEX) for _, kind in more)
        if lacking or shapes != [tuple(shape) for shape, _ in likes]:
            return None
        return [*map(fitted, results, likes), *[None] * len(more)]

    def arranged(self) -> Expr | None:
        """The result as entries of the first operand; None if it fills in constants."""
        x = self.operands[0]
        counts = np.arange(1, 1 + math.prod(x.shape)).reshape(x.shape)
        once, twice = self.computed(counts), self.computed(2 * counts)
        if not once.all() or not np.array_equal(2 * once, twice):
            return None
        return arrays.arrange(x, np.round(once.real).astype(int) - 1)


def fitted(x: Expr, like: Like) -> Expr:
    """x by its name, of this shape, and of the kind of the framework's result."""
    shape, kind = like
    x = named(x)
    if x.is_inexact and kind in (INTEGER, BOOLEAN) and constant_of(x) is None:
        x = elementwise.cast_to(x, kind)
    x = x if x.shape == tuple(shape) else broadcast(x, tuple(shape))
    plain = x.is_complex or constant_of(x) is not None
    return x if kind != COMPLEX or plain else elementwise.cast_to(x, COMPLEX)


def has_opaque_part(results: Sequence[Expr], operands: Sequence[Expr]) -> bool:
    """Whether some part of what makes the results of the operands is an opaque operation."""
    before = set(order(operands))
    return any(x.op == "by_name" and x not in before for x in order(results))


def in_words(attributes: Mapping[str, Any], rank: int) -> str:
    """The parameters of an operation by name, those that are numbers or words."""

    def short(value: Any) -> Any:
        """A tuple of equal numbers as one number: (2, 2) is 2."""
        if isinstance(value, tuple | list) and value:
            parts = [short(v) for v in value]
            return parts[0] if all(p == parts[0] for p in parts) else tuple(parts)
        return value

    plain = {k: short(v) for k, v in attributes.items() if rank > 1 or k not in ("axis", "axes")}
    return ", ".join(f"{k} {v}" for k, v in plain.items() if len(str(v)) <= 30)
