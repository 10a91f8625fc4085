"""The meaning of a random composition, in NumPy alone.

Every derivative, of any order and in any mode, is forward mode through the few lines of
`numbers.py`; a gradient is one push for each entry (two where it is complex). Where a
cotangent is clipped or replaced there is no forward mode, and gradients are pulled back over a
tape. Nothing here is shared with the operators that it judges: not their pullbacks, not their
chunks, not their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tests.support.strategies.numbers import (
    Dual,
    Number,
    Taped,
    add,
    base,
    bilinear,
    by_modulus,
    by_norm,
    conj,
    directions,
    edited,
    edited_by,
    exp,
    inverse,
    known,
    linear,
    log,
    mul,
    plus,
    pulled,
    real,
    root,
    scaled,
    sin,
    tanh,
    total,
    with_value,
)
from tests.support.strategies.program import (
    REVERSE_ONLY,
    ArrayKind,
    Composition,
    DrawnFunction,
    DrawnLine,
    constant,
)

THRESHOLD = 0.1234  # where a composition's `where` switches


@dataclass
class Sight:
    """What evaluation came across.

    Attributes:
        largest: The largest number.
        nearest: The distance to the nearest switch.
        levels: How many derivatives are being taken.
        taped: Whether gradients are pulled back over tapes.
    """

    largest: float = 1.0
    nearest: float = np.inf
    levels: int = 0
    taped: bool = False

    def switch(self, x: Any, at: float) -> None:
        """Notes that something is decided by whether x is above a number."""
        self.nearest = min(self.nearest, float(np.min(np.abs(x - at), initial=np.inf)))


# --- the operations ----------------------------------------------------------------------


def _where(sight: Sight, x: Number, y: Number) -> Number:
    switch = base(x)
    sight.switch(switch, THRESHOLD)
    return linear(lambda a, b: np.where(switch > THRESHOLD, a, b), y, sin(x))


def _of(f: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that is linear in all its operands."""
    return lambda line, *xs: linear(f, *xs)


def _bent(x: Number) -> Number:
    return with_value(sin(x), 0.9 * base(x) + 0.01)


def _cube(x: Number) -> Number:
    return scaled(mul(x, mul(x, x)), 1 / 3)


def _clipped(sight: Sight, x: Number, norm: float | None, value: float | None) -> Number:
    """The value of x, its cotangent clipped: by modulus, then by the norm of all of it."""

    def edit(c: Number) -> Number:
        if value is not None:
            sight.switch(np.abs(base(c)), value)
            c = by_modulus(c, value)
        if norm is not None:
            sight.switch(np.linalg.norm(base(c)), norm)
            c = by_norm(c, norm)
        return c

    return edited_by(edit, x)


def _clipped_pair(sight: Sight, bound: float, x: Number, y: Number) -> Number:
    both = _clipped(sight, linear(lambda *xs: np.stack(xs), x, y), bound, 1.1)
    return mul(linear(lambda a: a[0], both), linear(lambda a: a[1], both))


SIMPLE: dict[str, Callable[..., Any]] = {
    "sin": lambda line, x: sin(x),
    "half": lambda line, x: scaled(x, -0.5),
    "add": _of(np.add),
    "multiply": lambda line, x, y: mul(x, y),
    "subtract": _of(np.subtract),
    "divide": lambda line, x, y: mul(x, inverse(plus(mul(y, y), 2.0))),
    "tanh": lambda line, x: tanh(x),
    "exp": lambda line, x: exp(scaled(x, 0.5)),
    "square": lambda line, x: mul(x, x),
    "power": lambda line, x: mul(x, mul(x, x)),
    "root": lambda line, x: root(plus(mul(x, x), 1.0)),
    "log": lambda line, x: log(plus(mul(x, x), 1.5)),
    "inverse": lambda line, x: inverse(plus(mul(x, x), 2.0)),
    "matmul": lambda line, x, y: bilinear(np.matmul, x, y),
    "sum": _of(np.sum),
    "mean": _of(np.mean),
    "sum of rows": _of(partial(np.sum, axis=0)),
    "cumulative sum": _of(partial(np.cumsum, axis=0)),
    "log of sum": lambda line, x: log(linear(np.sum, exp(scaled(x, 0.5)))),
    "first": _of(lambda a: a[0]),
    "rest": _of(lambda a: a[1:]),
    "flip": _of(partial(np.flip, axis=0)),
    "take": _of(lambda a: a[np.array([1, 0, 1])]),
    "transpose": _of(np.transpose),
    "reshape": _of(np.ravel),
    "stack": _of(lambda *xs: np.stack(xs)),
    "concat": _of(lambda *xs: np.concatenate(xs)),
    "broadcast": _of(lambda a: np.broadcast_to(a, (2, *np.shape(a)))),
    "complex": lambda line, x, y: add(x, scaled(sin(y), 1j)),
    "turn": lambda line, x: exp(scaled(x, 1j)),
    "real": lambda line, x: real(x),
    "imag": _of(np.imag),
    "conj": lambda line, x: conj(x),
    "modulus": lambda line, x: real(mul(x, conj(x))),
    "reverse": lambda line, x: edited(x, -line.option),
    "scale": lambda line, x: edited(x, line.option),
    "transform": lambda line, x: edited(x, 2.0),
    "stop": lambda line, x: base(x),
    "straight": lambda line, x: _bent(x),
    "rule, vjp": lambda line, x: _cube(x),
    "rule, jvp": lambda line, x: _cube(x),
    "rule, both": lambda line, x: _cube(x),
    "host": lambda line, x: sin(x),
    "constant": lambda line: constant(line.kind, line.option),
    "known": lambda line, x, dx: known(x, dx),
}
SWITCHED: dict[str, Callable[..., Any]] = {
    "where": lambda sight, line, x, y: _where(sight, x, y),
    "clip norm": lambda sight, line, x: _clipped(sight, x, line.option, None),
    "clip value": lambda sight, line, x: _clipped(sight, x, None, line.option),
    "clip pair": lambda sight, line, x, y: _clipped_pair(sight, line.option, x, y),
}


# --- the operators -----------------------------------------------------------------------


@dataclass
class CompositionValue:
    """One evaluation of a composition.

    Attributes:
        sight: What it came across.
        shared: Within rows, each line that was met with what it was given: what is the same for
            all rows is computed once, by vmap too, so a cotangent that is clipped there is
            the sum of theirs.
        turn: Which chunk and which trip through a loop this is; nothing is shared among them.
    """

    sight: Sight
    shared: dict[Any, tuple[Number, Any]] | None = None
    turn: tuple[int, ...] = ()

    def function(self, f: DrawnFunction, outer: dict[str, Number], *xs: Number) -> Number:
        """The result of f at xs, where outer are the names it may see."""
        names = outer | dict(zip((name for name, _ in f.params), xs, strict=True))
        for line in f.lines:
            names[line.name] = self._once(line, names)
            self._note(names[line.name])
        return names[f.out]

    def _note(self, x: Number) -> None:
        if isinstance(x, Dual):
            self._note(x.tangent)
        if isinstance(x, Dual | Taped):
            return self._note(x.primal)
        sizes = np.abs(x)
        if self.sight.taped:  # where forward mode has no answer, that answer has no size
            sizes = sizes[~np.isnan(sizes)]
        result = float(sizes.max(initial=0.0))
        self.sight.largest = max(self.sight.largest, result if np.isfinite(result) else np.inf)

    def _once(self, line: DrawnLine, names: dict[str, Number]) -> Number:
        if self.shared is None:
            return self._line(line, names)
        read = [names[n] for n in sorted(line.names()) if n in names]
        key = (self.turn, id(line), *(id(x) for x in read))
        if key not in self.shared:
            self.shared[key] = self._line(line, names), read
        return self.shared[key][0]

    def _line(self, line: DrawnLine, names: dict[str, Number]) -> Number:
        xs = [names[a] for a in line.args]
        if line.op in SWITCHED:
            return SWITCHED[line.op](self.sight, line, *xs)
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
        return np.zeros_like(base(out))

    def gradient(self, f: Callable[..., Any], xs: Sequence[Number], k: int) -> Number:
        """Of the total of f's result to argument k: one push for each entry."""
        loss = lambda x: total(f(*xs[:k], x, *xs[k + 1 :]))
        return self.pulled(loss, xs[k])

    def pulled(self, loss: Callable[..., Any], x: Number) -> Number:
        """The gradient of a real number, df/dRe + i df/dIm."""
        if self.sight.taped:
            return self.pull(loss, x, np.ones(()))
        at = base(x)
        result: Number = np.zeros_like(at)
        for direction, answer in directions(at):
            slope = self.push(loss, [x], [direction])
            result = add(result, linear(lambda s, e=answer: s * e, slope))
        return result

    def pull(self, f: Callable[..., Any], x: Number, *cs: Number) -> Number:
        """The sum of what each of cs, at f's result, is pulled back to; f is evaluated once."""
        self.sight.levels += 1
        leaf = Taped(x, (), self.sight.levels)
        try:
            out = f(leaf)
            result = [pulled(out, c, leaf) for c in cs]
        finally:
            self.sight.levels -= 1
        if not result:
            return np.zeros_like(base(x))
        both = linear(lambda *xs: sum(xs), *result)
        self._note(both)
        return both

    def each(self, f: Callable[..., Any], x: Number, kind: ArrayKind) -> Number:
        """The sum of the rows of f's Jacobian: one pull for each, where that matters."""
        if not self.sight.taped:
            return self.pulled(lambda x: total(f(x)), x)
        return self.pull(f, x, *(e for e, _ in directions(np.zeros(kind.shape))))

    def second(self, f: Callable[..., Any], x: Number, t: Number, mode: str) -> Number:
        """The Hessian times t: the push of the gradient, or with edits what the mode says."""
        gradient = lambda x: self.gradient(f, [x], 0)
        if self.sight.taped and mode != "forward_over_reverse":
            return self.pull(gradient, x, t)
        return self.push(gradient, [x], [t])

    def rows(
        self, f: Callable[..., Any], xs: Sequence[Number], mapped: Sequence[bool], at_once: int = 0
    ) -> Number:
        """f row by row of what is mapped, in chunks of `at_once` rows (0: all)."""
        count = next(len(base(x)) for x, m in zip(xs, mapped, strict=True) if m)
        row = lambda i: [
            linear(lambda a: a[i], x) if m else x for x, m in zip(xs, mapped, strict=True)
        ]
        result: list[Number] = []
        for start in range(0, count, at_once or count):
            with self._rows(start if at_once else None):
                result += [f(*row(i)) for i in range(start, min(count, start + (at_once or count)))]
        return linear(lambda *ys: np.stack(ys), *result)

    @contextmanager
    def _rows(self, turn: int | None) -> Iterator[None]:
        before = self.shared, self.turn
        self.shared = {} if self.shared is None else self.shared
        self.turn = self.turn if turn is None else (*self.turn, turn)
        try:
            yield
        finally:
            self.shared, self.turn = before


def _jvp(e: CompositionValue, line: DrawnLine, fs: Any, *xs: Number) -> Number:
    half = len(xs) // 2
    return e.push(fs[0], xs[:half], xs[half:])


def _vjp(e: CompositionValue, line: DrawnLine, fs: Any, *xs: Number) -> Number:
    """Re<c, f> has the pullback of c for its gradient."""
    (*given, c), k = xs, line.option
    f = lambda x: fs[0](*given[:k], x, *given[k + 1 :])
    if e.sight.taped:
        return e.pull(f, given[k], c)
    paired = lambda x: linear(lambda a: np.sum(np.real(a)), mul(conj(c), f(x)))
    return e.pulled(paired, given[k])


def _gradient(e: CompositionValue, line: DrawnLine, fs: Any, *xs: Number) -> Number:
    return e.gradient(fs[0], xs, line.option)


def _rows(e: CompositionValue, line: DrawnLine, fs: Any, *xs: Number) -> Number:
    """The Jacobian in reverse mode, summed over its rows."""
    k = line.option
    f = lambda x: fs[0](*xs[:k], x, *xs[k + 1 :])
    return e.each(f, xs[k], line.inner[0].kind)


def _pushed_rows(e: CompositionValue, line: DrawnLine, fs: Any, *xs: Number) -> Number:
    """The Jacobian in forward mode, summed over its rows."""
    k, at = line.option, base(xs[line.option])
    loss = lambda x: total(fs[0](*xs[:k], x, *xs[k + 1 :]))
    result: Number = np.zeros_like(at)
    for direction, _ in directions(at):
        slope = e.push(loss, [xs[k]], [direction])
        result = add(result, linear(lambda s, d=direction: s * d, slope))
    return result


def _hvp(e: CompositionValue, line: DrawnLine, fs: Any, x: Number, t: Number) -> Number:
    return e.second(fs[0], x, t, line.option)


def _hessian(e: CompositionValue, line: DrawnLine, fs: Any, x: Number) -> Number:
    if e.sight.taped:
        return e.each(lambda x: e.gradient(fs[0], [x], 0), x, line.kind)
    return e.second(fs[0], x, np.ones_like(base(x)), "auto")


def _plain(e: CompositionValue, line: DrawnLine, fs: Any, *xs: Number) -> Number:
    return fs[0](*xs)


def _mapped(e: CompositionValue, line: DrawnLine, fs: Any, *xs: Number) -> Number:
    return e.rows(fs[0], xs, [True] + [False] * (len(xs) - 1))


def _chunked(e: CompositionValue, line: DrawnLine, fs: Any, *xs: Number) -> Number:
    return e.rows(fs[0], xs, [True] + [False] * (len(xs) - 1), line.option)


def _each(e: CompositionValue, line: DrawnLine, fs: Any, w: Number, x: Number) -> Number:
    return e.rows(lambda w, x: e.gradient(fs[0], [w, x], 0), [w, x], [False, True])


def _micro(e: CompositionValue, line: DrawnLine, fs: Any, w: Number, x: Number) -> Number:
    """The mean over all rows; each chunk's loss is its own mean, which clips may see."""
    count = len(base(x))
    result: Number = np.zeros_like(base(w))
    for start in range(0, count, line.option):
        e.turn = (*e.turn, start)
        chunk = linear(lambda a, k=start: a[k : k + line.option], x)
        part = len(base(chunk))
        loss = lambda w, x=chunk: linear(
            np.mean, e.rows(lambda w, x: total(fs[0](w, x)), [w, x], [False, True])
        )
        result = add(result, scaled(e.pulled(loss, w), part / count))
        e.turn = e.turn[:-1]
    return result


def _accumulated(e: CompositionValue, line: DrawnLine, fs: Any, w: Number, x: Number) -> np.ndarray:
    """A mean of the rows' gradients, by weights 1, 2, and so on, cut from what it was made of."""
    each = base(_each(e, line, fs, w, x))
    return np.asarray(np.average(each, axis=0, weights=1.0 + np.arange(len(each))))


def _minimax(e: CompositionValue, line: DrawnLine, fs: Any, x: Number, y: Number) -> Number:
    k = line.option
    touched = lambda *xs: add(add(total(fs[0](*xs)), total(xs[0])), total(xs[1]))
    loss = lambda x_k: touched(*(x_k if i == k else v for i, v in enumerate((x, y))))
    return scaled(e.pulled(loss, (x, y)[k]), -1.0 if k else 1.0)


def _mixed(
    e: CompositionValue, line: DrawnLine, fs: Any, y: Number, z: Number, u: Number
) -> Number:
    """(d/dy) <u, (d/dz) f(y, G(z))> = (d/dy) <w, (d/dg) f(y, g)>, where w = J_G u."""
    G = lambda z: mul(sin(z), z)
    g, w = G(z), e.push(G, [z], [u])
    loss = lambda y, g: total(fs[0](y, g))
    if e.sight.taped:
        return e.pull(lambda y: e.gradient(fs[0], [y, g], 1), y, w)
    return e.pulled(lambda y: e.push(partial(loss, y), [g], [w]), y)


def _loop(e: CompositionValue, line: DrawnLine, fs: Any, x: Number) -> Number:
    for trip in range(line.option):
        e.turn = (*e.turn, trip)
        x = sin(fs[0](x))
        e.turn = e.turn[:-1]
    return x


CALLS: dict[str, Callable[..., Any]] = {
    "gt.grad": _gradient,
    "gt.jvp": _jvp,
    "gt.vjp": _vjp,
    "gt.vmap": _mapped,
    "gt.chunked": _chunked,
    "gt.hvp": _hvp,
    "gt.checkpoint": _plain,
    "gt.frozen": _plain,
    "compiled": _plain,
    "loop": _loop,
    "gt.linearize": _jvp,
    "gt.value_and_grad": _gradient,
    "gt.grad of a tree": _gradient,
    "gt.jacobian": _rows,
    "gt.jacobian, forward": _pushed_rows,
    "gt.hessian": _hessian,
    "gt.per_example_grad": _each,
    "gt.microbatched_value_and_grad": _micro,
    "gt.GradientAccumulator": _accumulated,
    "gt.make_functional": _plain,
    "gt.minimax_value_and_grad": _minimax,
    "gt.mixed_partial": _mixed,
    "native.grad": _gradient,
    "native.jvp": _jvp,
    "native.vjp": _vjp,
    "native.vmap": _mapped,
}


def evaluated(composition: Composition, taped: bool = False) -> tuple[np.ndarray, Sight]:
    """The result of a composition, and what its evaluation came across.

    Gradients are pulled back over tapes if a cotangent is edited, or if `taped` asks for it.
    """
    sight = Sight(taped=taped or bool(composition.operators() & {*REVERSE_ONLY}))
    with np.errstate(all="ignore"):
        result = CompositionValue(sight).function(composition.function, {}, *composition.inputs())
    return base(result), sight
