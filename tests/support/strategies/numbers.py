"""Numbers that carry derivatives, in NumPy alone: duals for forward mode, tapes for reverse.

A `Dual` is a primal and a tangent. A `Taped` is a primal and what pulls a cotangent back to the
numbers that it was made of. Either may stand within the other, each with a level of its own, and
all arithmetic is made of three kinds of functions: linear ones, bilinear ones, and smooth ones of
each entry. A transposed linear function is read off its columns, one for each entry (two where it
is complex), so nothing here is a rule that someone wrote by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

Number = Any  # an array, a Dual or a Taped


@dataclass(frozen=True)
class Dual:
    """primal + tangent e, where e^2 = 0 and e belongs to a level."""

    primal: Number
    tangent: Number
    level: int


@dataclass(frozen=True, eq=False)
class Taped:
    """A primal, and for each number that it was made of what pulls a cotangent back to it."""

    primal: Number
    parents: tuple[tuple[Taped, Callable[[Number], Number]], ...]
    level: int


def base(x: Number) -> np.ndarray:
    """The value itself, at the bottom of all levels."""
    return base(x.primal) if isinstance(x, Dual | Taped) else np.asarray(x)


def level_of(*xs: Number) -> int:
    """The highest level among numbers; 0 where all are arrays."""
    return max((x.level for x in xs if isinstance(x, Dual | Taped)), default=0)


def _taped(xs: tuple[Number, ...], level: int) -> bool:
    return any(isinstance(x, Taped) and x.level == level for x in xs)


def _below(x: Number, level: int) -> Number:
    """The primal of a number that is taped at this level."""
    return x.primal if isinstance(x, Taped) and x.level == level else x


def _node(
    level: int, out: Number, xs: tuple[Number, ...], pulls: list[Callable[[Number], Number]]
) -> Taped:
    """A number made of xs, of which those that are taped at this level are its parents."""
    pairs = zip(xs, pulls, strict=True)
    parents = tuple((x, pull) for x, pull in pairs if isinstance(x, Taped) and x.level == level)
    return Taped(out, parents, level)


def linear(f: Callable[..., Any], *xs: Number) -> Number:
    """A real-linear function, jointly in xs."""
    level = level_of(*xs)
    if not level:
        return f(*xs)
    if _taped(xs, level):
        below = [_below(x, level) for x in xs]
        pulls = [_transposed(f, [base(x) for x in xs], i) for i in range(len(xs))]
        return _node(level, linear(f, *below), xs, pulls)
    parts = [_split(x, level) for x in xs]
    return Dual(linear(f, *(p for p, _ in parts)), linear(f, *(t for _, t in parts)), level)


def bilinear(f: Callable[..., Any], x: Number, y: Number) -> Number:
    """A function that is linear in each of two."""
    level = level_of(x, y)
    if not level:
        return f(x, y)
    if _taped((x, y), level):
        a, b = _below(x, level), _below(y, level)
        to_x = lambda c: bilinear(lambda c, d: columns(lambda e: f(e, d), base(x), c), c, b)
        to_y = lambda c: bilinear(lambda c, d: columns(lambda e: f(d, e), base(y), c), c, a)
        return _node(level, bilinear(f, a, b), (x, y), [to_x, to_y])
    (a, b), (c, d) = _split(x, level), _split(y, level)
    both = linear(np.add, _product(f, a, d), _product(f, b, c))
    return Dual(bilinear(f, a, c), both, level)


def _product(f: Callable[..., Any], x: Number, y: Number) -> Number:
    """Zeros, that depend on nothing, where a tangent is: as the frameworks have it."""
    if any(not level_of(v) and not np.any(v) for v in (x, y)):
        return np.zeros_like(f(base(x), base(y)))
    return bilinear(f, x, y)


def columns(f: Callable[..., Any], at: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The transposed of a real-linear f at a cotangent: its product with each of f's columns."""
    result = np.zeros_like(at)
    for direction, answer in directions(at):
        result = result + answer * np.sum(np.real(np.conj(c) * f(direction)))
    return result


def _transposed(f: Callable[..., Any], xs: list[np.ndarray], i: int) -> Callable[[Number], Number]:
    zeros = [np.zeros_like(x) for x in xs]
    column = lambda e: f(*zeros[:i], e, *zeros[i + 1 :])
    return partial(linear, lambda c: columns(column, zeros[i], c))


def directions(x: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each unit direction, with what a slope along it is multiplied by in a gradient."""
    for index in np.ndindex(x.shape):
        e = np.zeros_like(x)
        e[index] = 1
        yield e, e
        if np.iscomplexobj(x):
            yield 1j * e, 1j * e


def _split(x: Number, level: int) -> tuple[Number, Number]:
    """The primal and the tangent at a level, which is the highest one."""
    if isinstance(x, Dual) and x.level == level:
        return x.primal, x.tangent
    return x, np.zeros_like(base(x))


def smooth(f: Callable[..., Any], slope: Callable[[Number], Number], x: Number) -> Number:
    """A function of each entry, with its derivative as a function of numbers."""
    if not level_of(x):
        return f(x)
    if isinstance(x, Taped):
        below = x.primal
        pull = lambda c: mul(conj(slope(below)), c)
        return Taped(smooth(f, slope, below), ((x, pull),), x.level)
    tangent = _product(np.multiply, slope(x.primal), x.tangent)
    return Dual(smooth(f, slope, x.primal), tangent, x.level)


add = partial(linear, np.add)
sub = partial(linear, np.subtract)
mul = partial(bilinear, np.multiply)


def scaled(x: Number, factor: Any) -> Number:
    """x times a factor that is no number of ours."""
    return linear(lambda a: factor * a, x)


def plus(x: Number, c: float) -> Number:
    """x + c."""
    if isinstance(x, Taped):
        return Taped(plus(x.primal, c), ((x, lambda ct: ct),), x.level)
    return Dual(plus(x.primal, c), x.tangent, x.level) if isinstance(x, Dual) else x + c


def sin(x: Number) -> Number:
    """Of each entry."""
    return smooth(np.sin, cos, x)


def cos(x: Number) -> Number:
    """Of each entry."""
    return smooth(np.cos, lambda a: scaled(sin(a), -1.0), x)


def exp(x: Number) -> Number:
    """Of each entry."""
    return smooth(np.exp, exp, x)


def tanh(x: Number) -> Number:
    """Of each entry."""
    return smooth(np.tanh, lambda a: plus(scaled(mul(tanh(a), tanh(a)), -1.0), 1.0), x)


def inverse(x: Number) -> Number:
    """1 / x, of each entry."""
    return smooth(lambda a: 1 / a, lambda a: scaled(mul(inverse(a), inverse(a)), -1.0), x)


def log(x: Number) -> Number:
    """Of each entry."""
    return smooth(np.log, inverse, x)


def root(x: Number) -> Number:
    """The square root, of each entry."""
    return smooth(np.sqrt, lambda a: scaled(inverse(root(a)), 0.5), x)


def real(x: Number) -> Number:
    """The real part."""
    return linear(np.real, x)


def conj(x: Number) -> Number:
    """The conjugate."""
    return linear(np.conj, x)


def total(x: Number) -> Number:
    """A real number of any array: what a composition differentiates."""
    return linear(lambda a: np.sum(a.real) + 0.5 * np.sum(np.imag(a)), x)


def edited(x: Number, factor: float) -> Number:
    """The value of x with its derivative times the factor."""
    if isinstance(x, Taped):
        pull = lambda c: scaled(c, factor)
        return Taped(edited(x.primal, factor), ((x, pull),), x.level)
    if not isinstance(x, Dual):
        return x
    return Dual(edited(x.primal, factor), scaled(x.tangent, factor), x.level)


def with_value(x: Number, value: np.ndarray) -> Number:
    """The derivatives of x beside another value."""
    if isinstance(x, Taped):
        return Taped(with_value(x.primal, value), ((x, lambda c: c),), x.level)
    if not isinstance(x, Dual):
        return value
    return Dual(with_value(x.primal, value), x.tangent, x.level)


# --- reverse mode ------------------------------------------------------------------------


def pulled(out: Number, c: Number, x: Taped) -> Number:
    """The cotangent of x where that of out is c; zeros where x does not reach it."""
    cotangents: dict[int, Number] = {id(out): c}
    for node in _later_first(out, x.level):
        for parent, pull in node.parents:
            came, there = pull(cotangents[id(node)]), cotangents.get(id(parent))
            cotangents[id(parent)] = came if there is None else add(there, came)
    return cotangents.get(id(x), np.zeros_like(base(x)))


def _later_first(out: Number, level: int) -> list[Taped]:
    """What out was made of at a level, each before what it was made of itself."""
    result: dict[int, Taped] = {}

    def visit(node: Taped) -> None:
        if id(node) not in result:
            for parent, _ in node.parents:
                visit(parent)
            result[id(node)] = node

    if isinstance(out, Taped) and out.level == level:
        visit(out)
    return list(reversed(result.values()))


# --- edits of cotangents alone -----------------------------------------------------------


def edited_by(edit: Callable[[Number], Number], x: Number) -> Number:
    """The value of x, with its cotangent edited by any function."""
    if isinstance(x, Taped):
        return Taped(edited_by(edit, x.primal), ((x, edit),), x.level)
    return _no_forward(x, partial(edited_by, edit))


def known(x: Number, dx: Number) -> Number:
    """The value of x, whose cotangent is dx, as dx is outside of the derivative."""
    if not isinstance(x, Taped):
        return _no_forward(x, lambda x: known(x, dx))
    outside = dx
    while level_of(outside) >= x.level:
        outside = outside.primal
    return Taped(known(x.primal, dx), ((x, lambda c: outside),), x.level)


def _no_forward(x: Number, edit: Callable[[Number], Number]) -> Number:
    """A tangent that is not zero becomes NaN: whoever answers with a number is wrong."""
    if not isinstance(x, Dual):
        return x
    factor = np.where(base(x.tangent) == 0, 1.0, np.nan)
    return Dual(edit(x.primal), scaled(x.tangent, factor), x.level)


def by_modulus(c: Number, bound: float) -> Number:
    """Each entry times min(1, bound / its modulus)."""
    outside = np.abs(base(c)) > bound
    squares = add(scaled(_squares(c), outside), np.where(outside, 0.0, 1.0))
    shrunk = mul(scaled(c, outside), scaled(inverse(root(squares)), bound))
    return add(shrunk, scaled(c, ~outside))


def by_norm(c: Number, bound: float) -> Number:
    """All entries times min(1, bound / their norm)."""
    if np.linalg.norm(base(c)) <= bound:
        return c
    return mul(c, scaled(inverse(root(linear(np.sum, _squares(c)))), bound))


def _squares(c: Number) -> Number:
    return real(mul(c, conj(c)))
