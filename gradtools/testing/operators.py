"""The operators that `gradtools check` tests.

Each entry takes a `Problem` of `gradtools.testing.check_command` and its leaves. It returns a known
multiple of the loss's gradient, or at order 2 of the Hessian's product with the direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gradtools.testing.check_command import Problem

Loss = Callable[..., Any]
_SCALE = 0.6
_WEIGHTS = (1.0, 2.0, 3.0)  # of the rows of a batch, which has a full chunk of 2 and a half one


@dataclass(frozen=True)
class Operator:
    """A test of an operator.

    Attributes:
        compute: A function of a problem and its leaves, to arrays like the leaves or to a number.
        factor: The factor of the result over the derivative of the loss.
        order: The order of the derivative.
        number: Whether the result is the inner product with the direction, not an array per leaf.
        cubed: Whether the loss is evaluated at x + x^3 / 10, which a custom rule computes.
        real: Whether the operator accepts only real arguments.
    """

    compute: Callable[[Problem, tuple[Any, ...]], Any]
    factor: float = 1.0
    order: int = 1
    number: bool = False
    cubed: bool = False
    real: bool = False


def cube(x: Any) -> Any:
    """The function of the custom rules below."""
    return x + x**3 / 10


def _edited(p: Problem, edit: Callable[[Any], Any]) -> Loss:
    return lambda *xs: p.loss(*[edit(x) for x in xs])


def _wrapped(p: Problem, wrap: Callable[[Loss], Loss]) -> Loss:
    """The loss of the program inside of an operator that takes a function."""
    return lambda *xs: p.total(wrap(p.outputs)(*xs))


def _matrix_times(p: Problem, rows: Any) -> list[Any]:
    times = lambda h, t: p.gt.xp.tensordot(h, t, axes=t.ndim)
    products = [[times(h, t) for h, t in zip(row, p.tangents, strict=True)] for row in rows]
    return [sum(row[1:], row[0]) for row in products]


def _clipped(p: Problem, xs: Any) -> list[Any]:
    """The gradient clipped to a norm of 0.25, and scaled back."""
    xp, bound = p.gt.xp, 0.25
    plain = p.grad(p.loss)(*xs)
    norm = xp.sqrt(sum(xp.sum(xp.abs(g) ** 2) for g in plain))
    clipped = p.grad(lambda *xs: p.loss(*p.gt.clip_gradient(xs, max_norm=bound)))(*xs)
    back = xp.where(norm > bound, norm / bound, xp.ones_like(norm))
    return [p.backend.cast(back, g) * g for g in clipped]


def _replaced(p: Problem, xs: Any) -> Any:
    given = [2 * g for g in p.grad(p.loss)(*xs)]
    return p.grad(lambda *xs: p.loss(*map(p.gt.replace_gradient, xs, given)))(*xs)


def _minimax(p: Problem, xs: Any) -> list[Any]:
    count = len(xs)
    game = p.gt.minimax_value_and_grad(
        lambda *both: p.loss(*both[:count]) + p.loss(*both[count:]),
        p.positions,
        tuple([count + i for i in p.positions]),
    )
    grads = game(*xs, *xs)[1]
    return [down - up for down, up in zip(grads[:count], grads[count:], strict=True)]


def _accumulated(p: Problem, xs: Any) -> Any:
    accumulator = p.gt.GradientAccumulator()
    accumulator.add(p.grad(p.loss)(*xs), 3.0)
    accumulator.add(p.grad(lambda *xs: 2 * p.loss(*xs))(*xs), 1.0)
    return accumulator.mean()


def _chunked(p: Problem) -> Loss:
    """The weighted sum of the losses of three equal rows."""
    weights = p.array(np.array(_WEIGHTS))

    def loss(*xs: Any) -> Any:
        values = p.gt.chunked(p.gt.vmap(p.loss), 2)(*[p.gt.xp.stack([x, x, x]) for x in xs])
        return p.gt.xp.sum(p.backend.cast(weights, values) * values)

    return loss


def _over_rows(p: Problem, xs: Any, grad: Callable[[Loss], Loss]) -> Any:
    """A gradient with respect to a step along the direction, shared by three weighted rows."""

    def loss(step: Any, weight: Any, *row: Any) -> Any:
        pairs = zip(row, p.tangents, strict=True)
        value = p.loss(*[x + p.backend.cast(step, x) * t for x, t in pairs])
        return p.backend.cast(weight, value) * value

    rows = [p.gt.xp.stack([x, x, x]) for x in xs]
    return grad(loss)(p.array(np.asarray(0.0)), p.array(np.array(_WEIGHTS)), *rows)


def _microbatched(p: Problem, xs: Any) -> Any:
    def mean(loss: Loss) -> Loss:
        axes = (None, *[0] * (len(xs) + 1))
        return p.gt.microbatched_value_and_grad(
            lambda *args: p.gt.xp.mean(p.gt.vmap(loss, axes)(*args)), 2
        )  # type: ignore[no-any-return]

    return _over_rows(p, xs, mean)[1]


def _mixed(p: Problem, xs: tuple[Any, ...]) -> Any:
    y = p.array(np.asarray(0.75))
    square = lambda y, value: p.backend.cast(y, value) ** 2 * value
    return p.gt.mixed_partial(square, lambda z: p.loss(*z), y, xs, p.tangents)


def _ruled(p: Problem, kind: str, reverse: bool = True) -> Loss:
    """The loss of `cube(x)`, computed by a custom rule or a host function."""
    rule = p.gt.custom_rule(cube) if kind == "custom_rule" else p.gt.host_function(cube)
    if reverse:
        conj = lambda x: p.gt.xp.conj(x) if p.backend.is_complex(x) else x
        rule.defvjp(lambda x: (rule(x), x), lambda x, ct: (conj(1 + 0.3 * x**2) * ct,))
    else:
        rule.defjvp(lambda xs, ts: (rule(xs[0]), (1 + 0.3 * xs[0] ** 2) * ts[0]))
    return _edited(p, rule)


def _jacobian(p: Problem, xs: Any, mode: str) -> Any:
    return p.gt.jacobian(p.loss, p.positions, mode=mode)(*xs)


def _slope(p: Problem, loss: Loss, xs: Any) -> Any:
    return p.gt.jvp(loss, xs, p.tangents)[1]


def _of(loss: Callable[[Problem], Loss], factor: float = 1.0, **more: Any) -> Operator:
    """The gradient of an edited loss."""
    return Operator(lambda p, xs: p.grad(loss(p))(*xs), factor, **more)


def _twice(loss: Callable[[Problem], Loss], factor: float = 1.0, **more: Any) -> Operator:
    """The Hessian of an edited loss, reverse over reverse."""
    return Operator(lambda p, xs: p.product(loss(p), xs), factor, 2, **more)


def _forward(loss: Callable[[Problem], Loss], factor: float = 1.0, **more: Any) -> Operator:
    """The directional derivative of an edited loss, in forward mode."""
    return Operator(lambda p, xs: _slope(p, loss(p), xs), factor, number=True, **more)


_scaled = lambda p: _edited(p, lambda x: p.gt.scale_gradient(x, _SCALE))
_reversed = lambda p: _edited(p, lambda x: p.gt.reverse_gradient(x, _SCALE))
_doubled = lambda p: lambda x: p.gt.transform_gradient(x, lambda ct: 2.5 * ct)
_straight = lambda p: _edited(
    p, p.gt.straight_through(lambda x: x + 0, surrogate=lambda x: 1.5 * x)
)
_frozen = lambda p: _wrapped(p, p.gt.frozen)
_checkpoint = lambda p: _wrapped(p, p.gt.checkpoint)

OPERATORS: dict[str, Operator] = {
    "grad": _of(lambda p: p.loss),
    "value_and_grad": Operator(
        lambda p, xs: p.gt.value_and_grad(p.loss, p.positions, disconnected_inputs="zeros")(*xs)[1]
    ),
    "vjp": Operator(
        lambda p, xs: (lambda y, pull: pull(p.gt.xp.ones_like(y)))(*p.gt.vjp(p.loss, *xs))
    ),
    "jvp": _forward(lambda p: p.loss),
    "linearize": Operator(lambda p, xs: p.gt.linearize(p.loss, *xs)[1](*p.tangents), number=True),
    **{
        f"jacobian, {mode}": Operator(partial(_jacobian, mode=mode), real=True)
        for mode in ("forward", "reverse")
    },
    "hvp, forward over reverse": Operator(
        lambda p, xs: p.product(p.loss, xs, "forward_over_reverse"), order=2
    ),
    "hvp, reverse over reverse": _twice(lambda p: p.loss),
    "grad of jvp": Operator(lambda p, xs: p.grad(lambda *xs: _slope(p, p.loss, xs))(*xs), order=2),
    "hessian": Operator(
        lambda p, xs: _matrix_times(p, p.gt.hessian(p.loss, p.positions)(*xs)), order=2, real=True
    ),
    "per_example_grad": Operator(
        lambda p, xs: p.gt.xp.sum(_over_rows(p, xs, p.gt.per_example_grad)), 6.0, number=True
    ),
    "minimax_value_and_grad": Operator(_minimax, 2.0),
    "mixed_partial": Operator(_mixed, 1.5, number=True),
    "reverse_gradient": _of(_reversed, -_SCALE),
    "reverse_gradient, twice": _twice(_reversed, _SCALE**2),
    "scale_gradient": _of(_scaled, _SCALE),
    "scale_gradient, forward": _forward(_scaled, _SCALE),
    "stop_gradient": _of(lambda p: lambda *xs: p.loss(*xs) + _edited(p, p.gt.stop_gradient)(*xs)),
    "clip_gradient": Operator(_clipped),
    "transform_gradient": _of(lambda p: _edited(p, _doubled(p)), 2.5),
    "replace_gradient": Operator(_replaced, 2.0),
    "straight_through": _of(_straight, 1.5),
    "straight_through, twice": _twice(_straight, 1.5**2),
    **{
        f"{kind}{how}": make(partial(_ruled, kind=kind, reverse=how in ("", ", twice")), cubed=True)
        for kind in ("custom_rule", "host_function")
        for how, make in {
            "": _of,
            ", twice": _twice,
            ", forward": _forward,
            ", transposed": _of,
        }.items()
    },
    "chunked": _of(_chunked, 6.0),
    "chunked, twice": _twice(_chunked, 6.0),
    "microbatched_value_and_grad": Operator(_microbatched, 2.0, number=True),
    "GradientAccumulator": Operator(_accumulated, 1.25),
    "frozen": _of(_frozen),
    "frozen, twice": _twice(_frozen),
    "checkpoint": _of(_checkpoint),
    "checkpoint, twice": _twice(_checkpoint),
}
