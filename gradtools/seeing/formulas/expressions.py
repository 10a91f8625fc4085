"""Defines hash-consed expressions, in which programs are differentiated and written.

An `Expr` is an operation on other expressions, with a shape and a kind. Equal expressions are the
same object (hash consing), so common subexpressions are identical. Inputs are placeholders.

Products, sums over axes, broadcasts and transposes are represented by the operation ``einsum``,
which multiplies a coefficient and factors with axis labels. Labels that are not in the result are
summed over; the result is broadcast along labels that no factor has::

    out[i, j] = c * sum over k of  A[i, k] * B[k, j] * v[i]

`OPERATIONS` defines the evaluation, derivative and notation of the other operations. Operations
outside of the vocabulary are written by name (`opaque.py`). Expressions are evaluated in float64,
complex128 and int64.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from gradtools.seeing.formulas.typesetting import Written
    from gradtools.seeing.formulas.writing import Writer

REAL, COMPLEX, INTEGER, BOOLEAN, SEVERAL = "real", "complex", "integer", "boolean", "several"
DTYPES = {REAL: np.float64, COMPLEX: np.complex128, INTEGER: np.int64, BOOLEAN: np.bool_}
Shape = tuple[int, ...]
Attributes = tuple[tuple[str, Any], ...]
_RANK = {BOOLEAN: 0, INTEGER: 1, REAL: 2, COMPLEX: 3}
_serial = itertools.count()
_known: weakref.WeakValueDictionary[Any, Expr] = weakref.WeakValueDictionary()


class Expr:
    """An immutable value of a program, created by `expr`."""

    __add__: ClassVar[Callable[[Expr, Any], Expr]]  # `algebra.py` defines these operators
    __radd__: ClassVar[Callable[[Expr, Any], Expr]]
    __sub__: ClassVar[Callable[[Expr, Any], Expr]]
    __rsub__: ClassVar[Callable[[Expr, Any], Expr]]
    __mul__: ClassVar[Callable[[Expr, Any], Expr]]
    __rmul__: ClassVar[Callable[[Expr, Any], Expr]]
    __truediv__: ClassVar[Callable[[Expr, Any], Expr]]
    __pow__: ClassVar[Callable[[Expr, Any], Expr]]
    __matmul__: ClassVar[Callable[[Expr, Any], Expr]]
    __neg__: ClassVar[Callable[[Expr], Expr]]
    __slots__ = ("__weakref__", "args", "attributes", "kind", "op", "serial", "shape", "turn")

    def __init__(
        self, op: str, args: tuple[Expr, ...], attributes: Attributes, shape: Shape, kind: str
    ) -> None:
        self.op, self.args = op, args
        self.attributes = attributes  # static parameters, as sorted pairs
        # An opaque operation has the kind "several"; its outputs are separate expressions.
        self.shape, self.kind = shape, kind
        self.serial = next(_serial)  # increases with each new Expr
        # `turn` is the sort key of factors and terms; constants come last.
        constant = op != "placeholder" and all(a.turn[0] for a in args)
        self.turn: tuple[bool, int] = (constant, self.serial)

    def __getitem__(self, name: str) -> Any:
        return dict(self.attributes)[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the attribute `name` of the expression, or `default`."""
        return dict(self.attributes).get(name, default)

    @property
    def rank(self) -> int:
        """Returns the number of axes."""
        return len(self.shape)

    @property
    def is_complex(self) -> bool:
        """Returns whether the kind is complex."""
        return self.kind == COMPLEX

    @property
    def is_constant(self) -> bool:
        """Returns whether the expression is independent of all placeholders."""
        return self.turn[0]

    @property
    def is_inexact(self) -> bool:
        """Returns whether the kind is real or complex, which have derivatives."""
        return self.kind in (REAL, COMPLEX)


def expr(op: str, args: Iterable[Expr], shape: Iterable[int], kind: str, **attributes: Any) -> Expr:
    """Returns the expression of an operation; calls with equal arguments return the same object."""
    args, shape = tuple(args), tuple(int(n) for n in shape)
    pairs = tuple(sorted(attributes.items()))
    key = (op, tuple(id(a) for a in args), pairs, shape, kind)
    result = _known.get(key)
    if result is None:
        result = Expr(op, args, pairs, shape, kind)
        _known[key] = result
    return result


def widest(*kinds: str) -> str:
    """Returns the kind to which the given kinds are promoted."""
    return max(kinds, key=_RANK.__getitem__, default=REAL)


def kind_of(dtype: Any) -> str:
    """Returns the kind of a dtype, which may be given by name."""
    name = str(dtype)
    if name.startswith(("float", "bfloat")):
        return REAL
    if name.startswith("complex"):
        return COMPLEX
    return BOOLEAN if name.startswith("bool") else INTEGER


class ArrayValue:
    """An immutable array for expression attributes, hashed and compared by its bytes."""

    def __init__(self, array: Any):
        self.array = np.array(array)
        self.array.flags.writeable = False
        self._key = (self.array.shape, str(self.array.dtype), self.array.tobytes())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayValue) and self._key == other._key


_fresh = itertools.count()


def placeholder(name: str, shape: Iterable[int], kind: str = REAL) -> Expr:
    """Returns a new placeholder, which is distinct from all other placeholders."""
    return expr("placeholder", (), shape, kind, name=name, number=next(_fresh))


def order(roots: Iterable[Expr]) -> list[Expr]:
    """Returns the roots and all expressions on which they depend, in topological order."""
    seen: set[Expr] = set()
    result: list[Expr] = []
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, done = stack.pop()
        if done:
            result.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)
    return result


# --- numbers and constant arrays


def lifted(x: Any) -> Expr:
    """Converts a number to an expression; returns an expression unchanged."""
    return x if isinstance(x, Expr) else full(x, ())


def tidy(value: Any) -> Any:
    """Converts a value to a Python number: real if the imaginary part is 0, and never -0.0."""
    value = complex(value)
    return value if value.imag else float(value.real) + 0.0


def full(value: Any, shape: Sequence[int]) -> Expr:
    """Returns a constant array of the given shape: a product without factors."""
    c = tidy(value.item() if hasattr(value, "item") else value)
    kind = COMPLEX if isinstance(c, complex) else REAL
    return expr("einsum", (), shape, kind, labels=(), coefficient=c)


def array(value: Any) -> Expr:
    """Converts a captured array to an expression; calls `full` if all entries are equal."""
    value = np.asarray(value)
    if value.size and np.all(value == value.flat[0]) and value.dtype.kind in "fc":
        return full(value.flat[0].item(), value.shape)
    return expr("array", (), value.shape, kind_of(value.dtype), value=ArrayValue(value))


def constant_of(x: Expr) -> Any:
    """Returns the value of all entries if x is a product without factors, otherwise None."""
    return x["coefficient"] if x.op == "einsum" and not x.args else None


def is_zero(x: Expr) -> bool:
    """Returns whether x is known to be zero."""
    return constant_of(x) == 0


# --- operations


@dataclass(frozen=True)
class Operation:
    """The evaluation, derivative and notation of an operation."""

    # Computes the NumPy value from the expression and the values of its arguments.
    evaluate: Callable[..., Any]
    # Maps the expression, its cotangent and its arguments to the cotangents of the arguments.
    pullback: Callable[..., Sequence[Expr | None]] | None = None
    form: Callable[[Writer, Expr], Written] | None = None  # if None, name(arguments) is written


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, evaluate: Callable[..., Any], pullback: Any = None, **more: Any) -> None:
    """Registers an operation in `OPERATIONS`."""
    OPERATIONS[name] = Operation(evaluate, pullback, **more)


def evaluate(roots: Sequence[Expr], known: Mapping[Expr, Any]) -> list[np.ndarray]:
    """Evaluates the roots at the values `known`; computes each subexpression once."""
    values: dict[Expr, Any] = {
        x: np.asarray(value).astype(DTYPES[x.kind], copy=False) for x, value in known.items()
    }
    with np.errstate(all="ignore"):
        for y in order(roots):
            if y not in values:
                values[y] = OPERATIONS[y.op].evaluate(y, *(values[a] for a in y.args))
    return [values[root] for root in roots]
