"""One cell of the scenario matrix, computed and held against oracles.

Every program becomes a real number by one loss with random weights w,

    L(x) = sum over outputs of Re<w, y> + |y|^2 / 2,    y = f(x)

so that its slope along a direction t, and its second derivative along s and t, are single numbers
for finite differences (sixth order, in 64 bits, plain calls of the framework: nothing of
gradtools). Tangents and cotangents are independent draws. An operator's answer is contracted with
them, or compared entry by entry where differences give the whole array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.testing.matrix import Cell
from gradtools.testing.tolerances import FINITE_DIFFERENCES, real_name, tolerance

Leaves = list[Any]
_STENCIL = ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60))
_FIRST, _SECOND = 3e-3, 5e-3  # steps whose error is near 1e-12 and 1e-9 for scales of one
_ROWS = 5  # of a batch: two whole chunks of two and a half one


@dataclass(frozen=True)
class Outcome:
    """One comparison of a cell.

    Attributes:
        oracle: What it is held against.
        error: The error in units of the tolerance: at most 1 agrees; NaN does not.
    """

    oracle: str
    error: float

    def __bool__(self) -> bool:
        return self.error <= 1


def trial(cell: Cell, backend: str) -> list[Outcome]:
    """Computes a cell in one backend. What the framework raises goes through."""
    problem = (Batch if cell.operator.batched else Problem)(cell, backend)
    ask = ASKS[cell.operator.name](problem)
    found, more = _transformed(problem, ask.compute)
    return [*ask.judge(found), *more]


@dataclass(frozen=True)
class Ask:
    """What an operator computes from the active leaves, and how the answer is judged."""

    compute: Callable[..., Any]
    judge: Callable[[list[np.ndarray]], Iterator[Outcome]]


class Problem:
    """A cell's program in one backend, at its arguments, with the loss made of it.

    Attributes:
        leaves: The active floating leaves in NumPy, in 64 bits, as the dtype rounds them.
    """

    def __init__(self, cell: Cell, backend: str) -> None:
        self.cell, self.name = cell, backend
        self.gt = import_module(f"gradtools.{backend}")
        self.waist = self.gt._api._backend
        f, args, self.kwargs, actives = _arranged(cell, self.gt, self.waist)
        self.f = self.gt.checkpoint(f) if cell.transform == "checkpoint" else f
        self.plain = f
        self.actives = actives
        flat = [self.waist.flatten(arg) for arg in args]
        self._trees = [tree for _, tree in flat]
        self._arrays = [[self._rounded(x) for x in found] for found, _ in flat]
        self.leaves = [x for i in actives for x in self._arrays[i]]
        outs = self.outputs(self.plain_out(self.leaves))
        self.weights = self.draw(9, [self._numpy(y) for y in outs])

    # --- arrays

    def _rounded(self, x: Any) -> np.ndarray:
        x = np.asarray(x)
        if x.dtype.kind not in "fc":
            return x
        dtype, wide = _dtype_for(x, self.cell.dtype), _wide(x)
        return x.astype(wide) if dtype == wide else self._numpy(self._cast(x, dtype)).astype(wide)

    def _cast(self, x: Any, dtype: str) -> Any:
        return self.waist.cast(self.gt.asarray(np.asarray(x)), dtype)

    def _numpy(self, x: Any) -> np.ndarray:
        return np.asarray(self.gt.to_numpy(x) if self.waist.is_array(x) else x)

    def array(self, x: Any) -> Any:
        """A NumPy array in the framework, floats in the cell's dtype."""
        x = np.asarray(x)
        return (
            self._cast(x, _dtype_for(x, self.cell.dtype))
            if x.dtype.kind in "fc"
            else (self.gt.asarray(x))
        )

    def arrays(self, leaves: Sequence[Any]) -> Leaves:
        """NumPy leaves in the framework, in the cell's dtype."""
        return [self.array(x) for x in leaves]

    def wide(self, leaves: Sequence[Any]) -> Leaves:
        """NumPy leaves in the framework, in 64 bits."""
        return [self.gt.asarray(np.asarray(x)) for x in leaves]

    def draw(self, seed: int, like: Sequence[Any] | None = None) -> list[np.ndarray]:
        """Independent normal numbers, one array for each leaf."""
        rng = np.random.default_rng([seed, 20261121])
        return [_normal(rng, x) for x in (self.leaves if like is None else like)]

    # --- the program and its loss, of the active leaves

    def active(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The active arguments with these leaves."""
        left = iter(leaves)
        return tuple(
            self.waist.unflatten(self._trees[i], [next(left) for _ in self._arrays[i]])
            for i in self.actives
        )

    def args(self, active: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
        """All arguments, those that are not active by `convert`."""
        moving = dict(zip(self.actives, active, strict=True))
        return [
            moving[i]
            if i in moving
            else self.waist.unflatten(self._trees[i], [convert(x) for x in self._arrays[i]])
            for i in range(len(self._trees))
        ]

    def outputs(self, out: Any) -> Leaves:
        """The floating leaves of what the program returned."""
        found, _ = self.waist.flatten(out)
        return [y for y in found if self.waist.is_array(y) and self.waist.is_inexact(y)]

    def total(self, out: Any) -> Any:
        """The loss of what the program returned."""
        total: Any = 0.0
        for y, w in zip(self.outputs(out), self.weights, strict=True):
            w = self.waist.cast(self.gt.asarray(w), y)
            product = self.gt.xp.conj(w) * y if self.waist.is_complex(y) else w * y
            square = self.gt.xp.abs(y) ** 2 if self.waist.is_complex(y) else y * y
            real = self.gt.xp.real(product) if self.waist.is_complex(y) else product
            total = total + self.gt.xp.sum(real + square / 2)
        return total

    def call(self, active: Sequence[Any], f: Callable[..., Any] | None = None) -> Any:
        """The program, or f in its place, at these active arguments."""
        args = self.args(active, self.array)
        return (f or self.f)(*args, **{k: self.array(x) for k, x in self.kwargs.items()})

    def loss(self, *active: Any) -> Any:
        """The loss as a function of the active arguments."""
        return self.total(self.call(active))

    def loss_of(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """The loss of another function in the program's place."""
        return lambda *active: self.total(self.call(active, f))

    def plain_out(self, leaves: Sequence[Any]) -> Any:
        """The program in 64 bits, by a plain call."""
        args = self.args(self.active(self.wide(leaves)), self.gt.asarray)
        return self.plain(*args, **{k: self.gt.asarray(x) for k, x in self.kwargs.items()})

    def plain_loss(self, leaves: Sequence[Any]) -> float:
        """The loss in 64 bits, by a plain call."""
        return float(self.total(self.plain_out(leaves)))

    # --- finite differences

    def slope(self, t: Sequence[Any], through: Callable[[Leaves], Leaves] = list) -> float:
        """d/de L(through(x + e t)) at 0."""
        return float(_slope(lambda e: self.plain_loss(through(_moved(self.leaves, e, t))), _FIRST))

    def curvature(
        self,
        s: Sequence[Any],
        t: Sequence[Any],
        through: Callable[[Leaves], Leaves] = list,
    ) -> float:
        """d/da d/db L(through(x + a s + b t)) at 0."""

        def inner(a: float) -> Any:
            at = _moved(self.leaves, a, s)
            return _slope(lambda b: self.plain_loss(through(_moved(at, b, t))), _SECOND)

        return float(_slope(inner, _SECOND))

    def push(self, t: Sequence[Any]) -> list[np.ndarray]:
        """J t, entry by entry."""

        def flat(e: float) -> np.ndarray:
            outs = self.outputs(self.plain_out(_moved(self.leaves, e, t)))
            return np.concatenate([np.ravel(self._numpy(y)).astype(complex) for y in outs])

        whole, start, found = _slope(flat, _FIRST), 0, []
        for w in self.weights:
            part = whole[start : start + w.size].reshape(w.shape)
            found.append(part if np.iscomplexobj(w) else part.real)
            start += w.size
        return found

    # --- judging

    def near(self, oracle: str, found: Any, expected: Any, scale: Any, order: int = 1) -> Outcome:
        """An outcome: the largest error relative to the largest entry of scale."""
        found, expected = np.asarray(found), np.asarray(expected)
        if found.shape != expected.shape:
            return Outcome(f"{oracle}: shape {found.shape}, not {expected.shape}", np.nan)
        if not found.size:
            return Outcome(oracle, 0.0)
        size = max(float(np.max(np.abs(scale))), float(np.max(np.abs(expected))), 1e-30)
        error = float(np.max(np.abs(found - expected))) / size
        return Outcome(oracle, error / self._allowed(oracle, order))

    def _allowed(self, oracle: str, order: int) -> float:
        dtype = real_name(self.cell.dtype)
        if oracle != "finite differences":
            return tolerance(dtype, order)
        if dtype == "float64":
            return FINITE_DIFFERENCES[dtype] * (10 if order == 2 else 1)
        return tolerance(dtype, order)

    def slopes(self, grads: Sequence[Any], factor: float = 1.0, **more: Any) -> Iterator[Outcome]:
        """<gradient, t> against the loss's slope, for two directions."""
        for seed in (1, 2):
            t = self.draw(seed)
            expected = factor * self.slope(t, **more)
            yield self.near("finite differences", dot(grads, t), expected, _size(grads, t))

    def curvatures(
        self, product: Sequence[Any], t: Any, factor: float = 1.0, **more: Any
    ) -> Iterator[Outcome]:
        """<H t, s> against the loss's second derivative, for one more direction."""
        s = self.draw(3)
        expected = factor * self.curvature(s, t, **more)
        yield self.near("finite differences", dot(product, s), expected, _size(product, s), 2)


# --- arguments ---------------------------------------------------------------------------


def _arranged(cell: Cell, gt: Any, waist: Any) -> Any:
    """The program, its NumPy arguments, keywords and active positions, as the cell asks."""
    f, args = cell.program.bind(gt), list(cell.program.args)
    actives = tuple(i for i, arg in enumerate(args) if _is_float(waist, arg))

    def scaled(out: Any, by: Any) -> Any:
        found, tree = waist.flatten(out)
        make = lambda y: y * waist.cast(by, y) if waist.is_inexact(y) else y
        return waist.unflatten(tree, [make(y) if waist.is_array(y) else y for y in found])

    if cell.arguments == "several":
        more = lambda *xs: scaled(f(*xs[:-1]), xs[-1])
        return more, [*args, _scalar(cell, 1.3)], {}, (*actives, len(args))
    if cell.arguments == "integer":
        total = lambda n: waist.cast(gt.xp.sum(n["count"]), "float32")
        more = lambda *xs: scaled(f(*xs[:-1]), total(xs[-1]) / 4)
        return more, [*args, {"count": np.array([2, 3])}], {}, actives
    if cell.arguments == "disconnected":
        more = lambda x, *xs: f(x["used"], *xs)
        unused = np.full((2,), 0.5, _float_of(cell))
        return more, [{"used": args[0], "unused": unused}, *args[1:]], {}, actives
    if cell.arguments == "keyword":
        more = lambda *xs, gain: scaled(f(*xs), gain)
        return more, args, {"gain": np.asarray(0.7)}, actives
    if cell.arguments == "shared":
        mixed = lambda x, y: waist.unflatten(
            waist.flatten(x)[1],
            [0.5 * (a + b) for a, b in zip(waist.flatten(x)[0], waist.flatten(y)[0], strict=True)],
        )
        more = lambda x, y, *xs: f(mixed(x, y), *xs)
        places = (0, 1, *(i + 1 for i in actives if i))
        return more, [args[0], args[0], *args[1:]], {}, places
    return f, args, {}, actives


def _is_float(waist: Any, arg: Any) -> bool:
    return all(np.asarray(x).dtype.kind in "fc" for x in waist.flatten(arg)[0])


def _float_of(cell: Cell) -> str:
    return "complex128" if cell.dtype.startswith("complex") else "float64"


def _scalar(cell: Cell, value: float) -> np.ndarray:
    return np.asarray(value, _float_of(cell))


def _dtype_for(x: np.ndarray, dtype: str) -> str:
    """The cell's dtype for an array; a real array beside complex ones keeps its kind."""
    if np.iscomplexobj(x):
        return dtype if dtype.startswith("complex") else "complex128"
    return real_name(dtype)


def _wide(x: np.ndarray) -> str:
    return "complex128" if np.iscomplexobj(x) else "float64"


def _normal(rng: np.random.Generator, like: Any) -> np.ndarray:
    shape = np.shape(like)
    drawn = rng.standard_normal(shape)
    return np.asarray(drawn + 1j * rng.standard_normal(shape) if np.iscomplexobj(like) else drawn)


# --- numbers -----------------------------------------------------------------------------


def _slope(at: Callable[[float], Any], h: float) -> Any:
    return sum(c * (at(k * h) - at(-k * h)) / h for k, c in _STENCIL)


def _moved(leaves: Sequence[Any], step: float, along: Sequence[Any]) -> Leaves:
    return [x + step * t for x, t in zip(leaves, along, strict=True)]


def dot(u: Sequence[Any], v: Sequence[Any]) -> float:
    """Re<u, v> over all leaves, in 64 bits."""
    return float(sum(np.real(np.vdot(_far(a), _far(b))) for a, b in zip(u, v, strict=True)))


def _size(u: Sequence[Any], v: Sequence[Any]) -> float:
    """What `dot` would be without cancellation."""
    pairs = zip(u, v, strict=True)
    return float(sum(np.vdot(np.abs(_far(a)), np.abs(_far(b))) for a, b in pairs))


def _far(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


# --- transforms --------------------------------------------------------------------------


def _transformed(p: Problem, compute: Callable[..., Any]) -> tuple[list[np.ndarray], list[Outcome]]:
    """The answer under the cell's transform; of vmap and loop a second row, held to eager."""
    transform = p.cell.transform
    flat = lambda *leaves: [x for x in p.waist.flatten(compute(*leaves))[0] if x is not None]
    at = p.arrays(p.leaves)
    if transform in ("eager", "checkpoint"):
        return [p._numpy(x) for x in flat(*at)], []
    if transform == "compile":
        options = {"backend": "aot_eager"} if p.name == "torch" else {}
        return [p._numpy(x) for x in p.gt.compile(flat, **options)(*at)], []
    second = p.arrays(_moved(p.leaves, 0.01, p.draw(7)))
    rows = [p.gt.xp.stack([a, b]) for a, b in zip(at, second, strict=True)]
    mapped = p.gt.vmap(flat) if transform == "vmap" else _looped(p, flat)
    found = [p._numpy(x) for x in mapped(*rows)]
    eager = [p._numpy(x) for x in flat(*second)]
    order = p.cell.operator.order
    more = [
        p.near(f"eager, for the second row of {transform}", x[1], y, y, order)
        for x, y in zip(found, eager, strict=True)
    ]
    return [x[0] for x in found], more


def _looped(p: Problem, flat: Callable[..., Leaves]) -> Callable[..., Leaves]:
    if p.name == "jax":
        from jax import lax

        return lambda *rows: lax.map(lambda xs: flat(*xs), rows)

    def loop(*rows: Any) -> Leaves:
        each = [flat(*(row[i] for row in rows)) for i in range(2)]
        return [p.gt.xp.stack(list(pair)) for pair in zip(*each, strict=True)]

    return loop


# --- what each operator is asked ---------------------------------------------------------

ASKS: dict[str, Callable[[Problem], Ask]] = {}


def _asks(*names: str) -> Callable[[Callable[..., Ask]], Callable[..., Ask]]:
    def register(make: Callable[..., Ask]) -> Callable[..., Ask]:
        for name in names:
            ASKS[name] = lambda p, name=name: make(p, name)
        return make

    return register


def _positions(p: Problem) -> tuple[int, ...]:
    return tuple(range(len(p.actives)))


@_asks("grad", "value_and_grad", "checkpoint")
def _gradients(p: Problem, name: str) -> Ask:
    """All arguments are handed over, those that are not active by position."""
    gt, aux = p.gt, p.cell.arguments == "aux"

    def loss(*args: Any, **kwargs: Any) -> Any:
        value = p.total(p.f(*args, **kwargs))
        return (value, gt.xp.asarray(3)) if aux else value

    kwargs = {k: p.array(x) for k, x in p.kwargs.items()}
    options = {"argnums": p.actives, "has_aux": aux, "disconnected_inputs": "zeros"}
    if name == "value_and_grad":

        def compute(*leaves: Any) -> Any:
            args = p.args(p.active(leaves), p.array)
            value, grads = gt.value_and_grad(loss, **options)(*args, **kwargs)
            return (value[0] if aux else value), grads

        def judge(found: list[np.ndarray]) -> Iterator[Outcome]:
            value = p.plain_loss(p.leaves)
            yield p.near("plain call", found[0], np.asarray(value), value, 0)
            yield from p.slopes(found[1:])

        return Ask(compute, judge)
    f = loss if name == "grad" else gt.checkpoint(loss)

    def only(*leaves: Any) -> Any:
        found = gt.grad(f, **options)(*p.args(p.active(leaves), p.array), **kwargs)
        return found[0] if aux else found

    return Ask(only, p.slopes)


@_asks("vjp")
def _vjp(p: Problem, name: str) -> Ask:
    cts, t = p.draw(4, p.weights), p.draw(5)
    aux = p.cell.arguments == "aux"

    def compute(*leaves: Any) -> Any:
        def outs(*active: Any) -> Any:
            found = p.outputs(p.call(active))
            return (found, p.gt.xp.asarray(3)) if aux else found

        found, pullback, *_ = p.gt.vjp(outs, *p.active(leaves), has_aux=aux)
        like = [p.waist.cast(p.gt.asarray(c), y) for c, y in zip(cts, found, strict=True)]
        return pullback(like)

    def judge(grads: list[np.ndarray]) -> Iterator[Outcome]:
        expected = dot(cts, p.push(t))
        yield p.near("finite differences", dot(grads, t), expected, _size(grads, t))
        tangents = p.active(p.arrays(t))
        f = lambda *active: p.outputs(p.call(active))
        _, pushed = p.gt.jvp(f, p.active(p.arrays(p.leaves)), tangents)
        forward = dot(cts, [p._numpy(x) for x in pushed])
        yield p.near("dot product", dot(grads, t), forward, _size(grads, t))

    return Ask(compute, judge)


@_asks("jvp", "linearize", "jacobian, forward", "jacobian, reverse")
def _pushed(p: Problem, name: str) -> Ask:
    t, gt = p.draw(5), p.gt
    aux = p.cell.arguments == "aux"
    outs = lambda *active: p.outputs(p.call(active))

    def jvp(*leaves: Any) -> Any:
        f = (lambda *active: (outs(*active), gt.xp.asarray(3))) if aux else outs
        return gt.jvp(f, p.active(leaves), p.active(p.arrays(t)), has_aux=aux)[1]

    def linearize(*leaves: Any) -> Any:
        return gt.linearize(outs, *p.active(leaves))[1](*p.active(p.arrays(t)))

    def jacobian(*leaves: Any) -> Any:
        flat = lambda *xs: outs(*p.active(xs))
        positions = tuple(range(len(leaves)))
        return gt.jacobian(flat, positions, mode=name.partition(", ")[2])(*leaves)

    def entries(found: list[np.ndarray]) -> Iterator[Outcome]:
        for x, y in zip(found, p.push(t), strict=True):
            yield p.near("finite differences", x, y, y)

    def contracted(found: list[np.ndarray]) -> Iterator[Outcome]:
        count = len(p.leaves)
        rows = [found[k : k + count] for k in range(0, len(found), count)]
        for row, y in zip(rows, p.push(t), strict=True):
            parts = [
                np.tensordot(_far(j), x, axes=x.ndim) if x.size else np.zeros(y.shape)
                for j, x in zip(row, t, strict=True)
            ]
            yield p.near("finite differences", sum(parts), y, y)

    ways = {"jvp": Ask(jvp, entries), "linearize": Ask(linearize, entries)}
    return ways.get(name, Ask(jacobian, contracted))


@_asks(
    "hvp, forward over reverse",
    "hvp, reverse over reverse",
    "grad of jvp",
    "hessian",
    "checkpoint, twice",
    "frozen, twice",
    "chunked, twice",
)
def _second(p: Problem, name: str) -> Ask:
    if name == "chunked, twice":
        loss = p.loss_of(p.chunked())
    elif name == "checkpoint, twice":
        loss = p.loss_of(p.gt.checkpoint(p.f))
    elif name == "frozen, twice":
        loss = p.loss_of(p.gt.frozen(p.f))
    else:
        loss = p.loss
    t, gt = p.draw(5), p.gt
    mode = name.partition(", ")[2].replace(" ", "_")
    mode = mode if mode.endswith("reverse") else "reverse_over_reverse"

    def product(*leaves: Any) -> Any:
        return gt.hvp(loss, p.active(leaves), p.active(p.arrays(t)), mode=mode)[1]

    def of_jvp(*leaves: Any) -> Any:
        along = p.active(p.arrays(t))
        return gt.grad(
            lambda *active: gt.jvp(loss, active, along)[1],
            _positions(p),
            disconnected_inputs="zeros",
        )(*p.active(leaves))

    def hessian(*leaves: Any) -> Any:
        flat = lambda *xs: loss(*p.active(xs))
        return gt.hessian(flat, tuple(range(len(leaves))))(*leaves)

    def contracted(found: list[np.ndarray]) -> Iterator[Outcome]:
        count = len(p.leaves)
        rows = [found[k : k + count] for k in range(0, len(found), count)]
        product = [
            sum(
                np.tensordot(_far(h), x, axes=x.ndim) if x.size else np.zeros(like.shape)
                for h, x in zip(row, t, strict=True)
            )
            for row, like in zip(rows, p.leaves, strict=True)
        ]
        yield from p.curvatures(product, t)

    judge = lambda found: p.curvatures(found, t)
    if name == "hessian":
        return Ask(hessian, contracted)
    return Ask(of_jvp if name == "grad of jvp" else product, judge)


# --- batches -----------------------------------------------------------------------------


class Batch(Problem):
    """The problem whose first argument is a batch, and whose loss is the sum over its rows.

    Attributes:
        row: The problem of one row.
        rows: The leaves of the first argument, row by row.
    """

    def __init__(self, cell: Cell, backend: str) -> None:
        super().__init__(cell, backend)
        self.row = Problem(cell, backend)
        first = self._arrays[0]
        self.rows = [_moved(first, 0.02 * k, self.draw(20 + k, first)) for k in range(_ROWS)]
        self._arrays[0] = [np.stack(xs) for xs in zip(*self.rows, strict=True)]
        self.leaves = [x for i in self.actives for x in self._arrays[i]]

    def plain_loss(self, leaves: Sequence[Any]) -> float:
        """The sum over rows of one row's loss, by plain calls."""
        count = len(self.rows[0])
        each = zip(*leaves[:count], strict=True)
        return sum(self.row.plain_loss([*xs, *leaves[count:]]) for xs in each)

    @property
    def axes(self) -> tuple[int | None, ...]:
        """The first argument is split, all others are shared."""
        return (0, *(None for _ in self._trees[1:]))

    def chunked(self) -> Callable[..., Any]:
        """The program on the batch, in chunks of two."""
        kwargs = {k: self.array(x) for k, x in self.kwargs.items()}
        one = lambda *args: self.outputs(self.f(*args, **kwargs))
        chunked = self.gt.chunked(self.gt.vmap(one, in_axes=self.axes), 2, in_axes=self.axes)
        return lambda *args, **_: chunked(*args)

    def scaled_loss(self, s: Any, first: Any) -> Any:
        """The loss of one row whose first argument is multiplied by a number."""
        leaves, tree = self.waist.flatten(first)
        rest = self.active(self.arrays(self.leaves))[1:]
        scaled = self.waist.unflatten(tree, [x * self.waist.cast(s, x) for x in leaves])
        return self.row.loss(scaled, *rest)

    def slopes_of_rows(self) -> np.ndarray:
        """What the loss of each row gains when its first argument is scaled up."""
        rest = self.leaves[len(self.rows[0]) :]
        scaled = lambda xs, e: self.row.plain_loss([*((1 + e) * x for x in xs), *rest])
        return np.array([_slope(lambda e, xs=xs: scaled(xs, e), _FIRST) for xs in self.rows])


@_asks("chunked")
def _chunked(p: Batch, name: str) -> Ask:
    return _gradient_of(p, p.loss_of(p.chunked()), p.slopes)


@_asks("per_example_grad", "microbatched")
def _rows(p: Batch, name: str) -> Ask:
    one = p.array(np.asarray(1.0))
    operator = p.gt.per_example_grad(p.scaled_loss)
    total = lambda s, batch: p.gt.xp.sum(p.gt.vmap(p.scaled_loss, in_axes=(None, 0))(s, batch))
    micro = p.gt.microbatched(total, 2, reduction="sum")

    def compute(*leaves: Any) -> Any:
        batch = p.active(leaves)[0]
        return operator(one, batch) if name == "per_example_grad" else micro(one, batch)[1]

    def judge(found: list[np.ndarray]) -> Iterator[Outcome]:
        each = p.slopes_of_rows()
        expected = each if name == "per_example_grad" else each.sum()
        yield p.near("finite differences", found[0], expected, np.abs(each).sum())

    return Ask(compute, judge)


# --- games, and second derivatives through a function --------------------------------------


def _gradient_of(p: Problem, loss: Callable[..., Any], judge: Callable[..., Any]) -> Ask:
    grad = p.gt.grad(loss, _positions(p), disconnected_inputs="zeros")
    return Ask(lambda *leaves: grad(*p.active(leaves)), judge)


def _product_of(p: Problem, loss: Callable[..., Any], t: Any, judge: Callable[..., Any]) -> Ask:
    mode = "reverse_over_reverse"
    along = lambda: p.active(p.arrays(t))
    return Ask(lambda *leaves: p.gt.hvp(loss, p.active(leaves), along(), mode=mode)[1], judge)


@_asks("minimax_value_and_grad")
def _minimax(p: Problem, name: str) -> Ask:
    """L(x) s: x goes down and s up, so that its gradient comes out as -L."""
    places = _positions(p)
    game = p.gt.minimax_value_and_grad(
        lambda *xs: p.loss(*xs[:-1]) * xs[-1], places, (len(places),)
    )
    s = 1.5

    def judge(found: list[np.ndarray]) -> Iterator[Outcome]:
        yield from p.slopes(found[1:-1], s)
        value = p.plain_loss(p.leaves)
        yield p.near("plain call", found[-1], np.asarray(-value), value, 1)

    like = lambda value: p.waist.cast(value, p.array(np.asarray(s)))
    return Ask(lambda *leaves: game(*p.active(leaves), like(s)), judge)


@_asks("mixed_partial")
def _mixed(p: Problem, name: str) -> Ask:
    """f(y, g) = y^2 L(g) and u: the answer is 2 y <u, dL/dz>."""
    u, y = p.draw(5), p.array(np.asarray(0.8))

    def compute(*leaves: Any) -> Any:
        first, *rest = p.active(leaves)
        G = lambda z: p.outputs(p.call((z, *rest)))
        direction = p.active(p.arrays(u))[0]
        return p.gt.mixed_partial(lambda y, out: y**2 * p.total(out), G, y, first, direction)

    def judge(found: list[np.ndarray]) -> Iterator[Outcome]:
        count = len(p._arrays[p.actives[0]])
        t = [x if k < count else 0 * x for k, x in enumerate(u)]
        expected = 2 * 0.8 * p.slope(t)
        yield p.near("finite differences", found[0], np.asarray(expected), _steep(p, t))

    return Ask(compute, judge)


def _steep(p: Problem, t: Sequence[Any]) -> float:
    """How large a slope along t is without cancellation: of one leaf at a time."""
    each = range(len(t))
    return sum(abs(p.slope([x if k == j else 0 * x for j, x in enumerate(t)])) for k in each)


@_asks("frozen")
def _frozen(p: Problem, name: str) -> Ask:
    return _gradient_of(p, p.loss_of(p.gt.frozen(p.f)), p.slopes)


# --- edits and own rules -------------------------------------------------------------------

_SCALE = 0.6


def _edited(p: Problem, edit: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *active: p.loss(*(edit(x) for x in active))


@_asks("reverse_gradient", "scale_gradient", "stop_gradient")
def _scaled(p: Problem, name: str) -> Ask:
    gt = p.gt
    if name == "stop_gradient":
        stopped = _edited(p, gt.stop_gradient)
        return _gradient_of(p, lambda *xs: p.loss(*xs) + stopped(*xs), p.slopes)
    sign = -1 if name == "reverse_gradient" else 1
    loss = _edited(p, lambda x: getattr(gt, name)(x, _SCALE))
    return _gradient_of(p, loss, lambda found: p.slopes(found, sign * _SCALE))


@_asks("reverse_gradient, twice")
def _reversed_twice(p: Problem, name: str) -> Ask:
    t, loss = p.draw(5), _edited(p, lambda x: p.gt.reverse_gradient(x, _SCALE))
    return _product_of(p, loss, t, lambda found: p.curvatures(found, t, _SCALE**2))


@_asks("scale_gradient, forward", "custom_rule, forward")
def _forward(p: Problem, name: str) -> Ask:
    t = p.draw(5)
    if name == "custom_rule, forward":
        loss = _edited(p, _cubic(p, forward=True))
        expected = lambda: p.slope(t, _cubic_leaves)
    else:
        loss = _edited(p, lambda x: p.gt.scale_gradient(x, _SCALE))
        expected = lambda: _SCALE * p.slope(t)

    def judge(found: list[np.ndarray]) -> Iterator[Outcome]:
        value = expected()
        yield p.near("finite differences", found[0], np.asarray(value), _steep(p, t))

    along = lambda: p.active(p.arrays(t))
    return Ask(lambda *leaves: p.gt.jvp(loss, p.active(leaves), along())[1], judge)


@_asks("clip_gradient", "transform_gradient", "known_gradient")
def _reverse_only(p: Problem, name: str) -> Ask:
    """Held against the closed form of the edit, of a gradient that differences confirm."""
    gt, largest = p.gt, 0.3
    given = p.draw(6)
    twice = lambda ct: p.waist.unflatten(
        p.waist.flatten(ct)[1], [2.5 * c for c in p.waist.flatten(ct)[0]]
    )
    plain = gt.grad(p.loss, _positions(p), disconnected_inputs="zeros")

    def compute(*leaves: Any) -> Any:
        active = p.active(leaves)
        if name == "known_gradient":
            dxs = p.active(p.arrays(given))
            loss = lambda *xs: p.loss(
                *(gt.known_gradient(x, d) for x, d in zip(xs, dxs, strict=True))
            )
        elif name == "clip_gradient":
            loss = lambda *xs: p.loss(*gt.clip_gradient(xs, max_value=largest, max_norm=0.5))
        else:
            loss = _edited(p, lambda x: gt.transform_gradient(x, twice))
        grads = gt.grad(loss, _positions(p), disconnected_inputs="zeros")(*active)
        return grads, plain(*active)

    def judge(found: list[np.ndarray]) -> Iterator[Outcome]:
        count = len(p.leaves)
        edited, grads = found[:count], found[count:]
        yield from p.slopes(grads)
        if name == "known_gradient":
            reached = [bool(np.any(g != 0)) for g in grads]
            expected = [_far(p._numpy(p.array(x))) for x in given]
            pairs = [
                e for e, r in zip(zip(edited, expected, strict=True), reached, strict=True) if r
            ]
        elif name == "clip_gradient":
            pairs = list(zip(edited, _clipped(grads, largest, 0.5), strict=True))
        else:
            pairs = [(e, 2.5 * _far(g)) for e, g in zip(edited, grads, strict=True)]
        for x, y in pairs:
            yield p.near("closed form", _far(x), y, y)

    return Ask(compute, judge)


def _clipped(grads: Sequence[Any], max_value: float, max_norm: float) -> Leaves:
    """The modulus of each entry to max_value, then the norm over all leaves to max_norm."""
    wide = [_far(g) for g in grads]
    found = [g * np.minimum(1, max_value / np.maximum(np.abs(g), 1e-300)) for g in wide]
    norm = np.sqrt(sum(float(np.sum(np.abs(g) ** 2)) for g in found))
    return [g * min(1.0, max_norm / max(norm, 1e-300)) for g in found]


@_asks("straight_through", "straight_through, twice")
def _straight(p: Problem, name: str) -> Ask:
    """The value 0.95 x + 0.01 with the derivative of 1.5 x."""
    each = lambda fun: (
        lambda x: p.waist.unflatten(
            p.waist.flatten(x)[1], [fun(leaf) for leaf in p.waist.flatten(x)[0]]
        )
    )
    through = p.gt.straight_through(
        each(lambda x: 0.95 * x + 0.01), surrogate=each(lambda x: 1.5 * x)
    )
    loss = _edited(p, through)
    moved = lambda leaves: [
        0.95 * at + 0.01 + 1.5 * (x - at) for x, at in zip(leaves, p.leaves, strict=True)
    ]
    if name == "straight_through":
        return _gradient_of(p, loss, lambda found: p.slopes(found, through=moved))
    t = p.draw(5)
    return _product_of(p, loss, t, lambda found: p.curvatures(found, t, through=moved))


def _cubic(p: Problem, forward: bool = False) -> Callable[[Any], Any]:
    """x + x^3 / 10 with a rule of its own, leaf by leaf."""
    xp, is_complex = p.gt.xp, p.waist.is_complex
    conj = lambda x: xp.conj(x) if is_complex(x) else x
    rule = p.gt.custom_rule(lambda x: x + x**3 / 10)
    if forward:
        rule.defjvp(
            lambda primals, tangents: (
                primals[0] + primals[0] ** 3 / 10,
                (1 + 0.3 * primals[0] ** 2) * tangents[0],
            )
        )
    else:
        rule.defvjp(
            lambda x: (x + x**3 / 10, x),
            lambda x, ct: (conj(1 + 0.3 * x**2) * ct,),
        )
    return lambda tree: p.waist.unflatten(
        p.waist.flatten(tree)[1], [rule(x) for x in p.waist.flatten(tree)[0]]
    )


def _cubic_leaves(leaves: Leaves) -> Leaves:
    return [x + x**3 / 10 for x in leaves]


@_asks("custom_rule", "custom_rule, twice")
def _ruled(p: Problem, name: str) -> Ask:
    loss = _edited(p, _cubic(p))
    if name == "custom_rule":
        return _gradient_of(p, loss, lambda found: p.slopes(found, through=_cubic_leaves))
    t = p.draw(5)
    return _product_of(p, loss, t, lambda found: p.curvatures(found, t, through=_cubic_leaves))
