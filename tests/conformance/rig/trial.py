"""One cell of the scenario matrix: what each operator is asked, and what its answer must be.

An `Ask` is a computation of the active leaves in the framework, as a user would write it, and a
judge of its answer. The computation runs under the cell's transform; the judge holds the answer
against the reference in NumPy, against a closed form, or against the other mode. Tangents and
cotangents are independent draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradtools.testing.checking.probe import inner, size
from gradtools.testing.report import widened
from tests.conformance.rig.matrix import Cell
from tests.conformance.rig.problem import (
    CLOSED,
    DIFFERENCES,
    DOT,
    EAGER,
    BatchProblem,
    CellComparison,
    Problem,
)
from tests.conformance.rig.reference import Leaves, each_leaf, leaves_of, moved

Judge = Callable[[list[np.ndarray]], Iterator[CellComparison]]
_SCALE = 0.6


@dataclass(frozen=True)
class Ask:
    """What an operator computes from the active leaves, and how the answer is judged."""

    compute: Callable[..., Any]
    judge: Judge


def compared(cell: Cell, backend: str) -> list[CellComparison]:
    """Computes a cell in one backend and judges it. What the framework raises goes through."""
    problem, ask = _posed(cell, backend)
    result, second = _transformed(problem, ask.compute)
    return [*ask.judge(result), *second]


def answers(cell: Cell, backend: str) -> list[np.ndarray]:
    """What a cell computes in one backend, leaf by leaf in NumPy, without a judgement."""
    problem, ask = _posed(cell, backend)
    return _transformed(problem, ask.compute)[0]


def _posed(cell: Cell, backend: str) -> tuple[Problem, Ask]:
    problem = (BatchProblem if cell.operator.batched else Problem)(cell, backend)
    return problem, ASKS[cell.operator.name](problem)


# --- transforms --------------------------------------------------------------------------


def _transformed(
    p: Problem, compute: Callable[..., Any]
) -> tuple[list[np.ndarray], list[CellComparison]]:
    """The answer under the cell's transform; of vmap and loop a second row, held to eager."""
    flat = lambda *leaves: [x for x in p.waist.flatten(compute(*leaves))[0] if x is not None]
    at = p.arrays(p.ref.leaves)
    if p.cell.transform in ("eager", "checkpoint"):
        return p.numpy(flat(*at)), []
    if p.cell.transform == "compile":
        return p.numpy(_compiled(p, flat)(*at)), []
    return _two_rows(p, flat, at)


def _compiled(p: Problem, flat: Callable[..., Leaves]) -> Callable[..., Leaves]:
    if p.name == "jax":
        return p.gt.compile(flat)
    import torch

    torch.compiler.reset()  # after eight functions of one text dynamo would run the rest eagerly
    return p.gt.compile(flat, backend="aot_eager")


def _two_rows(p: Problem, flat: Any, at: Any) -> tuple[list[np.ndarray], list[CellComparison]]:
    second = p.arrays(moved(p.ref.leaves, 0.01, p.ref.draw(7)))
    rows = [p.gt.xp.stack([a, b]) for a, b in zip(at, second, strict=True)]
    mapped = p.gt.vmap(flat) if p.cell.transform == "vmap" else _looped(p, flat)
    result = p.numpy(mapped(*rows))
    eager = p.numpy(flat(*second))
    order = p.cell.operator.order
    pairs = zip(result, eager, strict=True)
    return [x[0] for x in result], [p.near(EAGER, x[1], y, y, order) for x, y in pairs]


def _looped(p: Problem, flat: Callable[..., Leaves]) -> Callable[..., Leaves]:
    if p.name == "jax":
        from jax import lax

        return lambda *rows: lax.map(lambda xs: flat(*xs), rows)

    def loop(*rows: Any) -> Leaves:
        each = [flat(*(row[i] for row in rows)) for i in range(2)]
        return [p.gt.xp.stack(list(pair)) for pair in zip(*each, strict=True)]

    return loop


# --- what each operator is asked ---------------------------------------------------------

ASKS: dict[str, Callable[[Any], Ask]] = {}


def _asks(*names: str) -> Callable[[Callable[..., Ask]], Callable[..., Ask]]:
    def register(make: Callable[..., Ask]) -> Callable[..., Ask]:
        ASKS.update({name: partial(make, name=name) for name in names})
        return make

    return register


@_asks("grad", "value_and_grad", "checkpoint")
def _gradients(p: Problem, name: str) -> Ask:
    """All arguments are handed over, those that are not active by position."""
    gt, aux = p.gt, p.cell.arguments == "aux"

    def loss(*args: Any, **kwargs: Any) -> Any:
        value = p.total(p.f(*args, **kwargs))
        return (value, gt.xp.asarray(3)) if aux else value

    f = gt.checkpoint(loss) if name == "checkpoint" else loss
    operator = gt.value_and_grad if name == "value_and_grad" else gt.grad
    taken = operator(f, argnums=p.ref.actives, has_aux=aux, disconnected_inputs="zeros")
    call = lambda leaves: taken(*p.args(p.active(leaves)), **p.kwargs)
    if name != "value_and_grad":
        return Ask(lambda *leaves: call(leaves)[0] if aux else call(leaves), p.slopes)

    def both(*leaves: Any) -> Any:
        value, grads = call(leaves)
        return (value[0] if aux else value), grads

    def judge(found: list[np.ndarray]) -> Iterator[CellComparison]:
        yield p.value(found[0], p.ref.loss(p.ref.leaves))
        yield from p.slopes(found[1:])

    return Ask(both, judge)


@_asks("vjp")
def _vjp(p: Problem, name: str) -> Ask:
    cts, t = p.ref.draw(4, p.ref.weights), p.ref.draw(5)
    given = p.arrays(cts)
    outs, more = _with_aux(p)

    def compute(*leaves: Any) -> Any:
        result, pullback, *_ = p.gt.vjp(outs, *p.active(leaves), **more)
        like = [p.waist.cast(c, y) for c, y in zip(given, result, strict=True)]
        return pullback(like)

    def judge(grads: list[np.ndarray]) -> Iterator[CellComparison]:
        expected, scale = inner(cts, p.ref.push(t)), size(grads, t)
        yield p.near(DIFFERENCES, inner(grads, t), expected, scale)
        yield p.near(DOT, inner(grads, t), inner(cts, p.forward(p.ref.leaves, t)), scale)

    return Ask(compute, judge)


def _with_aux(p: Problem) -> tuple[Callable[..., Any], dict[str, bool]]:
    """The program's outputs, with something beside them if the cell asks for it."""
    if p.cell.arguments != "aux":
        return p.outs, {}
    return lambda *active: (p.outs(*active), p.gt.xp.asarray(3)), {"has_aux": True}


@_asks("jvp", "linearize")
def _pushed(p: Problem, name: str) -> Ask:
    t, (outs, more) = p.ref.draw(5), _with_aux(p)
    along = p.along(t)

    def compute(*leaves: Any) -> Any:
        if name == "jvp":
            return p.gt.jvp(outs, p.active(leaves), along, **more)[:2]
        out, pushforward = p.gt.linearize(p.outs, *p.active(leaves))
        return out, pushforward(*along)

    def judge(found: list[np.ndarray]) -> Iterator[CellComparison]:
        values = p.ref.outputs(p.ref.leaves)
        for x, y in zip(found[: len(values)], values, strict=True):
            yield p.value(x, y)
        yield from p.entries(found[len(values) :], p.ref.push(t))

    return Ask(compute, judge)


def _rows(p: Problem, found: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
    """The blocks of a matrix of leaves, one row for each output."""
    count = len(p.ref.leaves)
    return [found[k : k + count] for k in range(0, len(found), count)]


def _times(row: Sequence[np.ndarray], t: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """One row of blocks times t."""
    parts = [
        np.tensordot(widened(j), x, axes=x.ndim) for j, x in zip(row, t, strict=True) if x.size
    ]
    return np.asarray(sum(parts, np.zeros(shape)))


@_asks("jacobian, forward", "jacobian, reverse")
def _jacobian(p: Problem, name: str) -> Ask:
    t, positions = p.ref.draw(5), tuple(range(len(p.ref.leaves)))

    def judge(found: list[np.ndarray]) -> Iterator[CellComparison]:
        expected = p.ref.push(t)
        rows = zip(_rows(p, found), expected, strict=True)
        yield from p.entries([_times(row, t, y.shape) for row, y in rows], expected)

    return Ask(p.gt.jacobian(p.flat, positions, mode=name.partition(", ")[2]), judge)


@_asks("hessian")
def _hessian(p: Problem, name: str) -> Ask:
    t, positions = p.ref.draw(5), tuple(range(len(p.ref.leaves)))
    loss = lambda *leaves: p.loss(*p.active(leaves))

    def judge(found: list[np.ndarray]) -> Iterator[CellComparison]:
        rows = zip(_rows(p, found), p.ref.leaves, strict=True)
        yield from p.curvatures([_times(row, t, np.shape(x)) for row, x in rows], t)

    return Ask(p.gt.hessian(loss, positions), judge)


@_asks("hvp, forward over reverse", "hvp, reverse over reverse")
def _hvp(p: Problem, name: str) -> Ask:
    t, mode = p.ref.draw(5), name.partition(", ")[2].replace(" ", "_")
    along = p.along(t)

    def judge(found: list[np.ndarray]) -> Iterator[CellComparison]:
        count = len(p.ref.leaves)
        yield from p.slopes(found[:count])
        yield from p.curvatures(found[count:], t)

    return Ask(lambda *leaves: p.gt.hvp(p.loss, p.active(leaves), along, mode=mode), judge)


@_asks("grad of jvp")
def _grad_of_jvp(p: Problem, name: str) -> Ask:
    t = p.ref.draw(5)
    along = p.along(t)
    slope = lambda *active: p.gt.jvp(p.loss, active, along)[1]
    return _gradient_of(p, slope, lambda found: p.curvatures(found, t))


def _gradient_of(p: Problem, loss: Callable[..., Any], judge: Judge) -> Ask:
    grad = p.gt.grad(loss, p.positions, disconnected_inputs="zeros")
    return Ask(lambda *leaves: grad(*p.active(leaves)), judge)


def _twice(p: Problem, loss: Callable[..., Any], factor: float = 1.0, **more: Any) -> Ask:
    """A Hessian product of the loss by reverse over reverse."""
    t, mode = p.ref.draw(5), "reverse_over_reverse"
    along = p.along(t)
    product = lambda *leaves: p.gt.hvp(loss, p.active(leaves), along, mode=mode)[1]
    return Ask(product, lambda found: p.curvatures(found, t, factor, **more))


# --- memory ------------------------------------------------------------------------------


@_asks("checkpoint, twice", "frozen, twice", "chunked, twice")
def _memory_twice(p: Problem, name: str) -> Ask:
    if isinstance(p, BatchProblem):
        return _twice(p, p.loss_of(p.chunked()))
    kind = p.gt.frozen if name.startswith("frozen") else p.gt.checkpoint
    return _twice(p, p.loss_of(kind(p.f)))


@_asks("frozen")
def _frozen(p: Problem, name: str) -> Ask:
    return _gradient_of(p, p.loss_of(p.gt.frozen(p.f)), p.slopes)


@_asks("chunked")
def _chunked(p: BatchProblem, name: str) -> Ask:
    return _gradient_of(p, p.loss_of(p.chunked()), p.slopes)


@_asks("per_example_grad", "microbatched_value_and_grad")
def _of_rows(p: BatchProblem, name: str) -> Ask:
    one, gt = p.array(np.asarray(1.0)), p.gt
    each = gt.per_example_grad(p.scaled_loss)
    mean = lambda s, batch: gt.xp.mean(gt.vmap(p.scaled_loss, in_axes=(None, 0))(s, batch))
    micro = gt.microbatched_value_and_grad(mean, 2)
    operator = each if name == "per_example_grad" else micro

    def judge(found: list[np.ndarray]) -> Iterator[CellComparison]:
        rows = p.ref.slopes_of_rows()
        if name == "microbatched_value_and_grad":
            yield p.value(found[0], p.ref.loss(p.ref.leaves) / len(rows))
            rows = rows.mean()
        yield p.near(DIFFERENCES, found[-1], rows, rows)

    return Ask(lambda *leaves: operator(one, p.active(leaves)[0]), judge)


@_asks("GradientAccumulator")
def _accumulated(p: Problem, name: str) -> Ask:
    """Gradients at x and at 1.125 x with the weights 3 and 1."""
    grad = p.gt.grad(p.loss, p.positions, disconnected_inputs="zeros")
    at = lambda x: 1.125 * x

    def compute(*leaves: Any) -> Any:
        accumulator = p.gt.GradientAccumulator()
        accumulator.add(grad(*p.active(leaves)), 3.0)
        accumulator.add(grad(*p.active([at(x) for x in leaves])), 1.0)
        return accumulator.sum(), accumulator.mean()

    def judge(found: list[np.ndarray]) -> Iterator[CellComparison]:
        count, t = len(p.ref.leaves), p.ref.draw(1)
        shift = lambda leaves: [x + 0.125 * x0 for x, x0 in zip(leaves, p.ref.leaves, strict=True)]
        slopes = 3 * p.ref.slope(t), p.ref.slope(t, shift)
        for grads, factor in ((found[:count], 1.0), (found[count:], 0.25)):
            scale = max(size(grads, t), factor * (abs(slopes[0]) + abs(slopes[1])))
            yield p.near(DIFFERENCES, inner(grads, t), factor * sum(slopes), scale)

    return Ask(compute, judge)


# --- games, and derivatives along a direction ----------------------------------------------


@_asks("minimax_value_and_grad")
def _minimax(p: Problem, name: str) -> Ask:
    """L(x) s: x goes down and s up, so that its gradient comes out as -L."""
    players, s = len(p.positions), 1.5
    loss = lambda *xs: p.loss(*xs[:-1]) * xs[-1]
    game = p.gt.minimax_value_and_grad(loss, p.positions, (players,))
    rate = p.array(np.asarray(s))

    def judge(found: list[np.ndarray]) -> Iterator[CellComparison]:
        value = p.ref.loss(p.ref.leaves)
        yield p.value(found[0], s * value)
        yield from p.slopes(found[1:-1], s)
        yield p.value(found[-1], -value)

    return Ask(lambda *leaves: game(*p.active(leaves), rate), judge)


@_asks("mixed_partial")
def _mixed(p: Problem, name: str) -> Ask:
    """f(y, g) = y^2 L(g) and u: the answer is 2 y <u, dL/dz>."""
    u, y = p.ref.draw(5), p.array(np.asarray(0.75))
    count = len(leaves_of(p.ref.args[p.ref.actives[0]]))
    t = [x if k < count else 0 * x for k, x in enumerate(u)]
    direction = p.along(u)[0]

    def compute(*leaves: Any) -> Any:
        first, *rest = p.active(leaves)
        G = lambda z: p.outs(z, *rest)
        return p.gt.mixed_partial(lambda y, out: y**2 * p.total(out), G, y, first, direction)

    return Ask(compute, lambda found: iter([p.slope(found[0], t, 1.5)]))


# --- edits -------------------------------------------------------------------------------


@_asks("reverse_gradient", "scale_gradient", "stop_gradient")
def _scaled(p: Problem, name: str) -> Ask:
    if name == "stop_gradient":
        stopped = p.edited(p.gt.stop_gradient)
        return _gradient_of(p, lambda *xs: p.loss(*xs) + stopped(*xs), p.slopes)
    factor = -_SCALE if name == "reverse_gradient" else _SCALE
    loss = p.edited(lambda x: getattr(p.gt, name)(x, _SCALE))
    return _gradient_of(p, loss, lambda found: p.slopes(found, factor))


@_asks("reverse_gradient, twice")
def _reversed_twice(p: Problem, name: str) -> Ask:
    return _twice(p, p.edited(lambda x: p.gt.reverse_gradient(x, _SCALE)), _SCALE**2)


@_asks("scale_gradient, forward", "custom_rule, forward", "host_function, forward")
def _forward(p: Problem, name: str) -> Ask:
    t = p.ref.draw(5)
    tangents = p.along(t)
    along = lambda loss: lambda *leaves: p.gt.jvp(loss, p.active(leaves), tangents)[1]
    if name == "scale_gradient, forward":
        loss = p.edited(lambda x: p.gt.scale_gradient(x, _SCALE))
        return Ask(along(loss), lambda found: iter([p.slope(found[0], t, _SCALE)]))
    rule = _cubic(p) if name.startswith("custom") else _kernel(p)
    _with_forward_rule(rule)
    loss = p.edited(lambda x: each_leaf(rule, x))
    return Ask(along(loss), lambda found: iter([p.slope(found[0], t, through=_cubes)]))


@_asks("clip_gradient", "transform_gradient", "replace_gradient")
def _reverse_only(p: Problem, name: str) -> Ask:
    """Held against the closed form of the edit, of a gradient that differences confirm."""
    plain = p.gt.grad(p.loss, p.positions, disconnected_inputs="zeros")
    edited = p.gt.grad(EDITS[name](p), p.positions, disconnected_inputs="zeros")
    count = len(p.ref.leaves)

    def judge(found: list[np.ndarray]) -> Iterator[CellComparison]:
        grads = [widened(g) for g in found[count:]]
        yield from p.slopes(grads)
        for x, y in zip(found[:count], _expected(p, name, grads), strict=True):
            yield p.near(CLOSED, widened(x), y, y)

    return Ask(lambda *leaves: (edited(*p.active(leaves)), plain(*p.active(leaves))), judge)


def _known(p: Problem) -> Callable[..., Any]:
    given = p.along(p.ref.draw(6))
    return lambda *xs: p.loss(
        *(p.gt.replace_gradient(x, d) for x, d in zip(xs, given, strict=True))
    )


EDITS: dict[str, Callable[[Problem], Callable[..., Any]]] = {
    "clip_gradient": lambda p: (
        lambda *xs: p.loss(*p.gt.clip_gradient(xs, max_value=0.3, max_norm=0.5))
    ),
    "transform_gradient": lambda p: p.edited(
        lambda x: p.gt.transform_gradient(x, lambda ct: each_leaf(lambda c: 2.5 * c, ct))
    ),
    "replace_gradient": _known,
}


def _expected(p: Problem, name: str, grads: Leaves) -> Leaves:
    """What an edit makes of these gradients."""
    if name == "transform_gradient":
        return [2.5 * g for g in grads]
    if name == "clip_gradient":
        return _clipped(grads, 0.3, 0.5)
    given = zip(p.ref.draw(6), grads, strict=True)
    return [x if np.any(g != 0) else 0 * x for x, g in given]  # no data flow: nothing known


def _clipped(grads: Leaves, max_value: float, max_norm: float) -> Leaves:
    """The modulus of each entry to max_value, then the norm over all leaves to max_norm."""
    result = [g * np.minimum(1, max_value / np.maximum(np.abs(g), 1e-300)) for g in grads]
    norm = np.sqrt(sum(float(np.sum(np.abs(g) ** 2)) for g in result))
    return [g * min(1.0, max_norm / max(norm, 1e-300)) for g in result]


@_asks("straight_through", "straight_through, twice")
def _straight(p: Problem, name: str) -> Ask:
    """The value 0.95 x + 0.01 with the derivative of 1.5 x."""
    value, surrogate = (lambda x: 0.95 * x + 0.01), (lambda x: 1.5 * x)
    of = lambda fun: lambda x: each_leaf(fun, x)
    loss = p.edited(p.gt.straight_through(of(value), surrogate=of(surrogate)))
    bent = lambda leaves: [
        value(at) + surrogate(x - at) for x, at in zip(leaves, p.ref.leaves, strict=True)
    ]
    if name == "straight_through, twice":
        return _twice(p, loss, through=bent)
    return _gradient_of(p, loss, lambda found: p.slopes(found, through=bent))


# --- own rules ---------------------------------------------------------------------------


def _cube(x: Any) -> Any:
    return x + x**3 / 10


def _cubes(leaves: Leaves) -> Leaves:
    return [_cube(x) for x in leaves]


def _cubic(p: Problem) -> Any:
    return p.gt.custom_rule(_cube)


def _kernel(p: Problem) -> Any:
    return p.gt.host_function(lambda x: _cube(x))


def _with_reverse_rule(p: Problem, rule: Any) -> None:
    conj = lambda x: p.gt.xp.conj(x) if p.waist.is_complex(x) else x
    rule.defvjp(lambda x: (rule(x), x), lambda x, ct: (conj(1 + 0.3 * x**2) * ct,))


def _with_forward_rule(rule: Any) -> None:
    rule.defjvp(lambda xs, dxs: (rule(xs[0]), (1 + 0.3 * xs[0] ** 2) * dxs[0]))


@_asks(
    "custom_rule",
    "custom_rule, twice",
    "custom_rule, transposed",
    "host_function",
    "host_function, twice",
)
def _ruled(p: Problem, name: str) -> Ask:
    """Gradients by a reverse rule, or by the transpose of a forward rule."""
    rule = _cubic(p) if name.startswith("custom") else _kernel(p)
    if name.endswith("transposed"):
        _with_forward_rule(rule)
    else:
        _with_reverse_rule(p, rule)
    loss = p.edited(lambda x: each_leaf(rule, x))
    if name.endswith("twice"):
        return _twice(p, loss, through=_cubes)
    return _gradient_of(p, loss, lambda found: p.slopes(found, through=_cubes))
