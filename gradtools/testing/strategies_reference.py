"""The meaning of a random composition, in NumPy alone.

A number is an array or a `Dual`: a primal and a tangent, which may be duals of lower levels. So
every derivative, of any order and in any mode, is forward mode through the same forty lines; a
gradient is one push for each entry (two where it is complex). Nothing here is shared with the
operators that it judges: not their pullbacks, not their chunks, not their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradtools.testing.strategies_program import Composition, Function, Line, constant

Number = Any  # an array or a Dual
THRESHOLD = 0.1234  # where a composition's `where` switches


@dataclass(frozen=True)
class Dual:
    """primal + tangent e, where e^2 = 0 and e belongs to a level."""

    primal: Number
    tangent: Number
    level: int


@dataclass
class Sight:
    """What evaluation came across: how large numbers were, how near a switch."""

    largest: float = 1.0
    nearest: float = np.inf
    levels: int = 0


def base(x: Number) -> np.ndarray:
    """The value itself, at the bottom of all levels."""
    return base(x.primal) if isinstance(x, Dual) else np.asarray(x)


def linear(f: Callable[..., Any], *xs: Number) -> Number:
    """A real-linear function, jointly in xs."""
    level = max((x.level for x in xs if isinstance(x, Dual)), default=0)
    if not level:
        return f(*xs)
    parts = [_split(x, level) for x in xs]
    return Dual(linear(f, *(p for p, _ in parts)), linear(f, *(t for _, t in parts)), level)


def bilinear(f: Callable[..., Any], x: Number, y: Number) -> Number:
    """A function that is linear in each of two."""
    level = max((v.level for v in (x, y) if isinstance(v, Dual)), default=0)
    if not level:
        return f(x, y)
    (a, b), (c, d) = _split(x, level), _split(y, level)
    both = linear(np.add, bilinear(f, a, d), bilinear(f, b, c))
    return Dual(bilinear(f, a, c), both, level)


def _split(x: Number, level: int) -> tuple[Number, Number]:
    """The primal and the tangent at a level, which is the highest one."""
    if isinstance(x, Dual) and x.level == level:
        return x.primal, x.tangent
    return x, linear(np.zeros_like, x)


def smooth(f: Callable[..., Any], slope: Callable[[Number], Number], x: Number) -> Number:
    """A function of each entry, with its derivative as a function of numbers."""
    if not isinstance(x, Dual):
        return f(x)
    return Dual(smooth(f, slope, x.primal), mul(slope(x.primal), x.tangent), x.level)


add = partial(linear, np.add)
sub = partial(linear, np.subtract)
mul = partial(bilinear, np.multiply)


def _scaled(x: Number, factor: Any) -> Number:
    return linear(lambda a: factor * a, x)


def plus(x: Number, c: float) -> Number:
    """x + c."""
    return Dual(plus(x.primal, c), x.tangent, x.level) if isinstance(x, Dual) else x + c


def _sin(x: Number) -> Number:
    return smooth(np.sin, _cos, x)


def _cos(x: Number) -> Number:
    return smooth(np.cos, lambda a: _scaled(_sin(a), -1.0), x)


def _exp(x: Number) -> Number:
    return smooth(np.exp, _exp, x)


def _tanh(x: Number) -> Number:
    return smooth(np.tanh, lambda a: plus(_scaled(mul(_tanh(a), _tanh(a)), -1.0), 1.0), x)


def _inverse(x: Number) -> Number:
    return smooth(lambda a: 1 / a, lambda a: _scaled(mul(_inverse(a), _inverse(a)), -1.0), x)


def _log(x: Number) -> Number:
    return smooth(np.log, _inverse, x)


def _root(x: Number) -> Number:
    return smooth(np.sqrt, lambda a: _scaled(_inverse(_root(a)), 0.5), x)


def _real(x: Number) -> Number:
    return linear(np.real, x)


def _conj(x: Number) -> Number:
    return linear(np.conj, x)


def total(x: Number) -> Number:
    """A real number of any array: what a composition differentiates."""
    return linear(lambda a: np.sum(a.real) + 0.5 * np.sum(np.imag(a)), x)


def edited(x: Number, factor: float) -> Number:
    """The value of x with its derivative times the factor."""
    if not isinstance(x, Dual):
        return x
    return Dual(edited(x.primal, factor), _scaled(x.tangent, factor), x.level)


def with_value(x: Number, value: np.ndarray) -> Number:
    """The derivatives of x beside another value."""
    if not isinstance(x, Dual):
        return value
    return Dual(with_value(x.primal, value), x.tangent, x.level)


# --- the operations ----------------------------------------------------------------------


def _where(sight: Sight, x: Number, y: Number) -> Number:
    switch = base(x)
    sight.nearest = min(sight.nearest, float(np.abs(switch - THRESHOLD).min(initial=np.inf)))
    return linear(lambda a, b: np.where(switch > THRESHOLD, a, b), y, _sin(x))


def _of(f: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that is linear in all its operands."""
    return lambda line, *xs: linear(f, *xs)


def _bent(x: Number) -> Number:
    return with_value(_sin(x), 0.9 * base(x) + 0.01)


def _cube(x: Number) -> Number:
    return _scaled(mul(x, mul(x, x)), 1 / 3)


SIMPLE: dict[str, Callable[..., Any]] = {
    "sin": lambda line, x: _sin(x),
    "half": lambda line, x: _scaled(x, -0.5),
    "add": _of(np.add),
    "multiply": lambda line, x, y: mul(x, y),
    "subtract": _of(np.subtract),
    "divide": lambda line, x, y: mul(x, _inverse(plus(mul(y, y), 2.0))),
    "tanh": lambda line, x: _tanh(x),
    "exp": lambda line, x: _exp(_scaled(x, 0.5)),
    "square": lambda line, x: mul(x, x),
    "power": lambda line, x: mul(x, mul(x, x)),
    "root": lambda line, x: _root(plus(mul(x, x), 1.0)),
    "log": lambda line, x: _log(plus(mul(x, x), 1.5)),
    "inverse": lambda line, x: _inverse(plus(mul(x, x), 2.0)),
    "matmul": lambda line, x, y: bilinear(np.matmul, x, y),
    "sum": _of(np.sum),
    "mean": _of(np.mean),
    "sum of rows": _of(partial(np.sum, axis=0)),
    "cumulative sum": _of(partial(np.cumsum, axis=0)),
    "log of sum": lambda line, x: _log(linear(np.sum, _exp(_scaled(x, 0.5)))),
    "first": _of(lambda a: a[0]),
    "rest": _of(lambda a: a[1:]),
    "flip": _of(partial(np.flip, axis=0)),
    "take": _of(lambda a: a[np.array([1, 0, 1])]),
    "transpose": _of(np.transpose),
    "reshape": _of(np.ravel),
    "stack": _of(lambda *xs: np.stack(xs)),
    "concat": _of(lambda *xs: np.concatenate(xs)),
    "broadcast": _of(lambda a: np.broadcast_to(a, (2, *np.shape(a)))),
    "complex": lambda line, x, y: add(x, _scaled(_sin(y), 1j)),
    "turn": lambda line, x: _exp(_scaled(x, 1j)),
    "real": lambda line, x: _real(x),
    "imag": _of(np.imag),
    "conj": lambda line, x: _conj(x),
    "modulus": lambda line, x: _real(mul(x, _conj(x))),
    "reverse": lambda line, x: edited(x, -line.option),
    "scale": lambda line, x: edited(x, line.option),
    "transform": lambda line, x: edited(x, 2.0),
    "stop": lambda line, x: base(x),
    "straight": lambda line, x: _bent(x),
    "rule, vjp": lambda line, x: _cube(x),
    "rule, jvp": lambda line, x: _cube(x),
    "rule, both": lambda line, x: _cube(x),
    "host": lambda line, x: _sin(x),
    "constant": lambda line: constant(line.kind, line.option),
}


# --- the operators -----------------------------------------------------------------------


@dataclass
class Evaluation:
    """One evaluation of a composition; `sight` is what it came across."""

    sight: Sight

    def function(self, f: Function, outer: dict[str, Number], *xs: Number) -> Number:
        """The result of f at xs, where outer are the names it may see."""
        names = outer | dict(zip((name for name, _ in f.params), xs, strict=True))
        for line in f.lines:
            names[line.name] = self._line(line, names)
            self._note(names[line.name])
        return names[f.out]

    def _note(self, x: Number) -> None:
        if isinstance(x, Dual):
            self._note(x.primal)
            self._note(x.tangent)
            return
        found = float(np.abs(x).max(initial=0.0))
        self.sight.largest = max(self.sight.largest, found if np.isfinite(found) else np.inf)

    def _line(self, line: Line, names: dict[str, Number]) -> Number:
        xs = [names[a] for a in line.args]
        if line.op == "where":
            return _where(self.sight, *xs)
        if line.op in SIMPLE:
            return SIMPLE[line.op](line, *xs)
        fs = [partial(self.function, f, names) for f in line.inner]
        return CALLS[line.op](self, line, fs, *xs)

    def push(self, f: Callable[..., Any], xs: Sequence[Number], ts: Sequence[Number]) -> Number:
        """The tangent of f at xs along ts."""
        self.sight.levels += 1
        level = self.sight.levels
        try:
            out = f(*(Dual(x, t, level) for x, t in zip(xs, ts, strict=True)))
        finally:
            self.sight.levels -= 1
        if isinstance(out, Dual) and out.level == level:
            return out.tangent
        return linear(np.zeros_like, out)

    def gradient(self, f: Callable[..., Any], xs: Sequence[Number], k: int) -> Number:
        """Of the total of f's result to argument k: one push for each entry."""
        loss = lambda x: total(f(*xs[:k], x, *xs[k + 1 :]))
        return self.pulled(loss, xs[k])

    def pulled(self, loss: Callable[..., Any], x: Number) -> Number:
        """The gradient of a real number, df/dRe + i df/dIm."""
        at = base(x)
        found: Number = np.zeros_like(at)
        for direction, answer in _directions(at):
            slope = self.push(loss, [x], [direction])
            found = add(found, linear(lambda s, e=answer: s * e, slope))
        return found

    def second(
        self, f: Callable[..., Any], xs: Sequence[Number], k: int, t: Number, rows: bool = False
    ) -> Number:
        """The Hessian to argument k times t; transposed (equal but for edits) if rows."""
        gradient = lambda x: self.gradient(f, [*xs[:k], x, *xs[k + 1 :]], k)
        return self.push(gradient, [xs[k]], [t])

    def rows(self, f: Callable[..., Any], xs: Sequence[Number], mapped: Sequence[bool]) -> Number:
        """f row by row of what is mapped."""
        count = next(len(base(x)) for x, m in zip(xs, mapped, strict=True) if m)
        row = lambda i: [
            linear(lambda a: a[i], x) if m else x for x, m in zip(xs, mapped, strict=True)
        ]
        return linear(lambda *ys: np.stack(ys), *(f(*row(i)) for i in range(count)))


def _directions(x: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for index in np.ndindex(x.shape):
        e = np.zeros_like(x)
        e[index] = 1
        yield e, e
        if np.iscomplexobj(x):
            yield 1j * e, 1j * e


def _jvp(e: Evaluation, line: Line, fs: Any, *xs: Number) -> Number:
    half = len(xs) // 2
    return e.push(fs[0], xs[:half], xs[half:])


def _vjp(e: Evaluation, line: Line, fs: Any, *xs: Number) -> Number:
    """Re<c, f> has the pullback of c for its gradient."""
    (*given, c), k = xs, line.option
    paired = lambda x: linear(
        lambda a: np.sum(np.real(a)), mul(_conj(c), fs[0](*given[:k], x, *given[k + 1 :]))
    )
    return e.pulled(paired, given[k])


def _gradient(e: Evaluation, line: Line, fs: Any, *xs: Number) -> Number:
    return e.gradient(fs[0], xs, line.option)


def _hvp(e: Evaluation, line: Line, fs: Any, x: Number, t: Number) -> Number:
    return e.second(fs[0], [x], 0, t)


def _hessian(e: Evaluation, line: Line, fs: Any, x: Number) -> Number:
    return e.second(fs[0], [x], 0, np.ones_like(base(x)))


def _plain(e: Evaluation, line: Line, fs: Any, *xs: Number) -> Number:
    return fs[0](*xs)


def _mapped(e: Evaluation, line: Line, fs: Any, *xs: Number) -> Number:
    return e.rows(fs[0], xs, [True] + [False] * (len(xs) - 1))


def _each(e: Evaluation, line: Line, fs: Any, w: Number, x: Number) -> Number:
    return e.rows(lambda w, x: e.gradient(fs[0], [w, x], 0), [w, x], [False, True])


def _micro(e: Evaluation, line: Line, fs: Any, w: Number, x: Number) -> Number:
    return linear(partial(np.mean, axis=0), _each(e, line, fs, w, x))


def _minimax(e: Evaluation, line: Line, fs: Any, x: Number, y: Number) -> Number:
    k = line.option
    touched = lambda *xs: add(add(total(fs[0](*xs)), total(xs[0])), total(xs[1]))
    loss = lambda x_k: touched(*(x_k if i == k else v for i, v in enumerate((x, y))))
    return _scaled(e.pulled(loss, (x, y)[k]), -1.0 if k else 1.0)


def _mixed(e: Evaluation, line: Line, fs: Any, y: Number, z: Number, u: Number) -> Number:
    through = lambda y, z: total(fs[0](y, mul(_sin(z), z)))
    return e.pulled(lambda y: e.push(partial(through, y), [z], [u]), y)


def _loop(e: Evaluation, line: Line, fs: Any, x: Number) -> Number:
    for _ in range(line.option):
        x = _sin(fs[0](x))
    return x


CALLS: dict[str, Callable[..., Any]] = {
    "gt.grad": _gradient,
    "gt.jvp": _jvp,
    "gt.vjp": _vjp,
    "gt.vmap": _mapped,
    "gt.chunked": _mapped,
    "gt.hvp": _hvp,
    "gt.checkpoint": _plain,
    "gt.frozen": _plain,
    "compiled": _plain,
    "loop": _loop,
    "gt.linearize": _jvp,
    "gt.value_and_grad": _gradient,
    "gt.grad of a tree": _gradient,
    "gt.jacobian": _gradient,
    "gt.jacobian, forward": _gradient,
    "gt.hessian": _hessian,
    "gt.per_example_grad": _each,
    "gt.microbatched": _micro,
    "gt.minimax_value_and_grad": _minimax,
    "gt.mixed_partial": _mixed,
    "native.grad": _gradient,
    "native.jvp": _jvp,
    "native.vjp": _vjp,
    "native.vmap": _mapped,
}


def evaluated(composition: Composition) -> tuple[np.ndarray, Sight]:
    """The result of a composition, and what its evaluation came across."""
    sight = Sight()
    with np.errstate(all="ignore"):
        found = Evaluation(sight).function(composition.function, {}, *composition.inputs())
    return base(found), sight
