"""Operations by their names, simplified where they are elementwise; powers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradtools.seeing.formulas.algebra.arrays import broadcast, broadcast_shape, scale, times
from gradtools.seeing.formulas.algebra.constants import constant_of, full, lifted, tidy
from gradtools.seeing.formulas.algebra.products import contracts, parts, product
from gradtools.seeing.formulas.algebra.reshapes import is_reshape, reshape
from gradtools.seeing.formulas.expressions import REAL, Expr, expr, several, widest
from gradtools.seeing.formulas.operation_record import OPERATIONS


def apply(name: str, /, *of: Any, **attributes: Any) -> Any:
    """The operation of this name, of expressions and numbers; a list if it has several outputs."""
    operation, args = OPERATIONS[name], tuple(map(lifted, of))
    result = operation.result(*args, **attributes)
    if isinstance(result, list):
        return several(name, args, result, **attributes)
    shape, kind = result
    if operation.elementwise:
        return _in_each_place(name, args, kind, attributes)
    return expr(name, args, shape, kind, **attributes)


def _in_each_place(op: str, args: Sequence[Expr], kind: str, attributes: dict[str, Any]) -> Expr:
    """A function of each place, broadcast as in NumPy; broadcasts move outwards."""
    shape = broadcast_shape(*(a.shape for a in args))
    args = [broadcast(a, shape) for a in args]
    rank = len(shape)
    used = {l for a in args for names in parts(a)[2] for l in names}
    kept = [a for a in range(rank) if a in used]
    if len(kept) < rank:
        inner = [drop_axes(a, kept) for a in args]
        return product([_in_each_place(op, inner, kind, attributes)], [kept], range(rank), shape)
    moved = _outside(op, args, kind, attributes)
    return expr(op, args, shape, kind, **attributes) if moved is None else moved


def drop_axes(x: Expr, kept: Sequence[int]) -> Expr:
    """X without the axes along which it is broadcast."""
    c, factors, labels, _ = parts(x)
    return product(factors, labels, kept, [x.shape[a] for a in kept], c)


def _outside(op: str, args: Sequence[Expr], kind: str, attributes: dict[str, Any]) -> Expr | None:
    """Transposes of one argument and reshapes of all move out of a function."""
    if len(args) == 1:
        c, factors, labels, out = parts(args[0])
        leaf = len(factors) == 1 and factors[0].op == "placeholder"
        if leaf and c == 1 and labels[0] != out and sorted(labels[0]) == list(out):
            inner = expr(op, factors, factors[0].shape, kind, **attributes)
            return product([inner], [labels[0]], out, args[0].shape)
    plain = [a for a in args if constant_of(a) is None]
    if plain and all(map(is_reshape, plain)):
        shapes = {a.args[0].shape for a in plain}
        if len(shapes) == 1:
            (shape,) = shapes
            inner = [reshape(a, shape) for a in args]
            return reshape(_in_each_place(op, inner, kind, attributes), args[0].shape)
    return None


def power(x: Expr, exponent: Any) -> Expr:
    """X to a constant power, in each place."""
    exponent = tidy(exponent)
    if exponent == 1:
        return x
    if exponent == 0:
        return full(1.0, x.shape)
    constant = constant_of(x)
    if constant is not None and (constant != 0 or not _is_negative(exponent)):
        value = (
            complex(constant) ** exponent
            if _leaves_reals(constant, exponent)
            else constant**exponent
        )
        return full(value, x.shape)
    whole = not isinstance(exponent, complex) and float(exponent).is_integer()
    if x.op == "power" and whole:
        return power(x.args[0], x["exponent"] * exponent)
    if x.op == "einsum" and not contracts(x):
        return _power_of_product(x, exponent, whole)
    return apply("power", x, exponent=exponent)


def divide(a: Expr, b: Expr) -> Expr:
    """A over b, elementwise."""
    return times(a, power(b, -1))


def _is_negative(exponent: Any) -> bool:
    return isinstance(exponent, complex) or exponent < 0


def _leaves_reals(constant: Any, exponent: Any) -> bool:
    return isinstance(constant, complex) or isinstance(exponent, complex)


def _power_of_product(x: Expr, exponent: Any, whole: bool) -> Expr:
    c, factors, labels, out = parts(x)
    positive = not isinstance(c, complex) and c > 0
    # Off a diagonal that is read the power need not exist, and its derivative would be NaN.
    everywhere = (whole and exponent > 0) or all(len(set(n)) == len(n) for n in labels)
    if everywhere and (whole or (positive and len(factors) == 1)):
        raised = [power(f, exponent) for f in factors]
        return product(raised, labels, out, x.shape, c**exponent)
    if positive and c != 1:
        return scale(c**exponent, power(product(factors, labels, out, x.shape), exponent))
    kept = [a for a in out if any(a in names for names in labels)]
    if len(kept) < x.rank:
        return product([power(drop_axes(x, kept), exponent)], [kept], out, x.shape)
    return expr("power", (x,), x.shape, widest(x.kind, REAL), exponent=exponent)
