"""A rule under vmap in JAX: each primitive is bound again, with the rule of a batch.

The maps of a batch are those of one example under vmap (`rules.batched`). An extra that does not
depend on the batch has no batch axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.jax import reachability, shardings
from gradtools.jax._upstream import Primitive
from gradtools.jax.rules.closure_conversion import ValueLiftedRule
from gradtools.jax.rules.kept_alive import memoized
from gradtools.jax.rules.primitives import (
    LinearizedRule,
    PartialRule,
    evaluation_p,
    flow_of,
    primal_p,
    tangent_p,
    value_p,
)
from gradtools.rules import Rule, batched, saved_from, spread


@dataclass(frozen=True)
class _Vmaps:
    """The vmap functions that `rules.batched` needs of a framework.

    Attributes:
        axis: JAX's AxisData: the size and the names of the mapped axis.
    """

    axis: Any

    def vmap_list(self, fun: Callable[..., Any], axes: tuple[Any, ...], size: int) -> Any:
        if not axes:
            return lambda *xs: [jnp.broadcast_to(y, (size, *y.shape)) for y in fun(*xs)]
        return self._vmap(fun, axes, 0, size)

    def _vmap(self, fun: Callable[..., Any], axes: Any, out_axes: Any, size: int) -> Any:
        names = {"axis_name": self.axis.name, "spmd_axis_name": self.axis.spmd_name}
        return jax.vmap(fun, axes, out_axes, axis_size=size, **names)

    def vmap_extras(self, fun: Callable[..., Any], axes: Any, size: int, extras: Any) -> Any:
        """vmap that leaves extras unbatched which do not depend on the batch; returns out_axes."""
        trace = jax.make_jaxpr(lambda *a: list(fun(*a)), axis_env=[(self.axis.name, size)])

        def run(*xs: Any) -> tuple[list[Any], list[Any]]:
            pairs = zip(map(jax.typeof, xs), axes, strict=True)
            one = [x if axis is None else shardings.without_axis(x, 0) for x, axis in pairs]
            closed = trace(*one)
            out_axes = _out_axes(closed, axes, extras())
            if not out_axes:
                return [], []
            if all(a is None for a in out_axes):
                return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs), out_axes
            one_example = partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)
            return self._vmap(one_example, axes, out_axes, size)(*xs), out_axes

        return run


def _out_axes(closed: Any, axes: Sequence[Any], extras: int) -> list[Any]:
    """0 for each result; None for an extra that does not depend on a mapped input."""
    if closed.effects:
        return [0] * len(closed.out_avals)
    flow = reachability.raw_matrix(closed)
    carried = [any(r and a == 0 for r, a in zip(row, axes, strict=True)) for row in flow]
    first = len(carried) - extras
    return [0 if i < first or c else None for i, c in enumerate(carried)]


def _batched(rule: Rule, x_axes: Any, saved_axes: Any, axis: Any, run: Any = None) -> Rule:
    """The rule of a batch; `run` is its batched forward pass, by default vmap of the rule's own."""
    lists, size = _Vmaps(axis), axis.size

    def forward(*xs: Any) -> list[Any]:
        assert isinstance(rule, LinearizedRule)
        return lists.vmap_extras(rule.forward, x_axes, size, lambda: rule.extras)(*xs)[0]

    def lift(xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
        """Lifts the maps at one example, then batches them."""
        assert isinstance(rule, ValueLiftedRule)
        pairs = zip(xs, x_axes, strict=True)
        lifted, inputs = rule.lift([x if a is None else x[0] for x, a in pairs])
        of_inputs = tuple([x_axes[x] if isinstance(x, int) else None for x in inputs])
        return _batched(lifted, of_inputs, None, axis), inputs

    def make() -> Rule:
        more: dict[str, Any] = {}
        if isinstance(rule, LinearizedRule):
            more |= {"forward": run or forward, "source": None}
        flow = flow_of(rule)
        if flow is not None:
            more["flow"] = lists.vmap_list(lambda *x: flow(*x), x_axes, size)
        if isinstance(rule, ValueLiftedRule):
            more["lift"] = lift
        if isinstance(rule, LinearizedRule | PartialRule) and rule.whole is not None:
            more["whole"] = _batched(rule.whole, x_axes, None, axis)
        return batched(rule, lists, x_axes, saved_axes, size, **more)

    return memoized(rule, ("batched", x_axes, saved_axes, axis, run is None), make)


def batching_rule(primitive: Primitive) -> Any:
    """The batching rule of one of the primitives, which binds it with the rule of a batch."""

    def run(axis: Any, args: Any, dims: Any, *, rule: Any, **params: Any) -> Any:
        if all(d is None for d in dims):
            out = primitive.bind(*args, rule=rule, **params)
            return out, [None] * len(out)
        size = axis.size
        pairs = zip(args, dims, strict=True)
        args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
        axes = [None if d is None else 0 for d in dims]
        n = len(args) - sum(params["given"]) if "given" in params else 0
        like = next(x for x, a in zip(args, axes, strict=True) if a == 0)

        def with_batch(avals: Any) -> Any:
            return tuple([shardings.with_leading(a, size, like) for a in avals])

        if primitive is primal_p:
            rule = _batched(rule, tuple(axes), None, axis)
        elif primitive is evaluation_p:
            # All extras have the batch axis, for they are results of this equation.
            run = _Vmaps(axis).vmap_list(rule.forward, tuple(axes), size)
            rule = _batched(rule, tuple(axes), saved_from(rule.saves, axes), axis, run)
        elif primitive is value_p:
            first, last = params["xs"], len(args) - rule.extras
            saved_axes = saved_from(rule.saves, axes[:first], axes[first:])
            args[first:last] = [
                x if a == 0 else shardings.spread(x, size, like)
                for x, a in zip(args[first:last], axes[first:last], strict=True)
            ]
            rule = _batched(rule, tuple(axes[:first]), saved_axes, axis)
        elif primitive is tangent_p:
            dx_axes = spread(axes[n:], params["given"])
            rule = _batched(rule, tuple(dx_axes), tuple(axes[:n]), axis)
            params["ys"] = with_batch(params["ys"])
        else:
            cts = zip(args[n:], axes[n:], strict=True)
            args[n:] = [x if a == 0 else shardings.spread(x, size, like) for x, a in cts]
            rule = _batched(rule, (0,) * len(params["wanted"]), tuple(axes[:n]), axis)
            params["xs"], params["ys"] = with_batch(params["xs"]), with_batch(params["ys"])
        out = primitive.bind(*args, rule=rule, **params)
        return out, [0] * len(out)

    return run
