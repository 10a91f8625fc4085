"""Defines the evaluation and batching of a rule's primitives: primal, value and tangent.

The operands of the tangent primitive are the residuals, followed by the tangents that are not
symbolic zeros. The parameters of the tangent primitive are `given`, the mask of nonzero tangents,
and `ys`, the avals of the floating outputs. `installing.py` defines the derivatives of the
primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from gradtools.jax import jaxprs, reachability, shardings
from gradtools.jax._upstream import RulePrimitive, weakly_cached
from gradtools.jax.shardings import varies, varying, with_varying_tangent
from gradtools.jax.trees import is_inexact
from gradtools.rules import Rule, batched, saved_from, spread

T = TypeVar("T")
Mask = tuple[bool, ...]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TracedRule(Rule):
    """A rule with additional fields that are needed when the rule is traced.

    Attributes:
        closed_over: The positions of the inputs that are closed-over arrays. A derivative with
            respect to these inputs raises an error.
        flow: A function with the same data flow as the rule, from which `reachability` determines
            on which inputs each output depends. The cotangent map is then evaluated only for the
            required inputs. If None, each output is assumed to depend on each input.
        extras: The number of extras of a linearized rule, which has both maps and explicit
            residuals, or None if the rule is not linearized.
        forward: A function that evaluates a linearized rule: `forward(*xs)` returns `[*ys,
            *extras]`.
        perturbed: If the rule was linearized for some inputs only, a mask of the inputs for which
            the maps are valid; otherwise None.
        whole: The original rule, which is not linearized, if `perturbed` is given; otherwise None.
        lift: If the closed-over arrays of the primal were hoisted, but not the closed-over arrays
            of the maps, a function to call as `lift(xs)`. The function returns the rule with
            hoisted maps and a list with an entry for each input of that rule: a position in `xs`,
            or the captured array.
    """

    closed_over: tuple[int, ...] = ()
    flow: Callable[..., list[Any]] | None = None
    extras: int | None = None
    forward: Callable[..., list[Any]] | None = None
    perturbed: Mask | None = None
    whole: Rule | None = None
    lift: Callable[[Sequence[Any]], tuple[Rule, list[Any]]] | None = None


def flow_of(rule: Rule) -> Callable[..., list[Any]] | None:
    """Returns a function with the data flow of a rule, or None if the data flow is unknown."""
    return getattr(rule, "flow", None)


def is_linearized(rule: Rule) -> bool:
    """Returns whether a rule has both maps and explicit residuals."""
    return getattr(rule, "extras", None) is not None


def memoized(owner: Any, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """Returns `make()`, memoized on the owner by key. The newest 64 entries are stored."""
    kept = vars(owner).setdefault("_memo", {})
    if key in kept:
        return kept[key]
    made = make()
    for old in list(kept)[: len(kept) - 63]:
        kept.pop(old, None)
    kept[key] = made
    return made


# --- evaluation --------------------------------------------------------------------------


def as_arrays(xs: Sequence[Any]) -> list[Any]:
    """Converts Python numbers in xs, such as the values of literals of a jaxpr, to arrays."""
    return [x if hasattr(x, "shape") else jnp.asarray(x) for x in xs]


def promoting(rule: Rule) -> Any:
    """Context manager that allows dtype promotion in edits (a real scale, a complex cotangent)."""
    return jax.numpy_dtype_promotion("standard") if rule.reaches == "identity" else nullcontext()


def eval_primal(*xs: Any, rule: Rule) -> list[Any]:
    """Evaluates the primal function of a rule."""
    return list(rule.primal(*as_arrays(xs)))


def _value(*operands: Any, rule: TracedRule, xs: int) -> list[Any]:
    assert rule.extras is not None
    return list(operands[xs : len(operands) - rule.extras])


def eval_tangent(*operands: Any, rule: Rule, given: Mask, ys: Any) -> list[Any]:
    """Evaluates the tangent map of a rule."""
    n, operands = len(operands) - sum(given), tuple(as_arrays(operands))
    assert rule.tangent is not None
    with promoting(rule):
        dys = rule.tangent(operands[:n], spread(operands[n:], given))
    return [varying(dy, varies(y)) for dy, y in zip(dys, ys, strict=True)]


def eval_forward(rule: Rule, xs: Any) -> list[Any]:
    """Evaluates a linearized rule, and returns outputs and extras."""
    assert isinstance(rule, TracedRule)
    assert rule.forward is not None
    if not rule.extras:
        return rule.forward(*[jax.lax.stop_gradient(x) for x in xs])
    moving = [with_varying_tangent(x) if varies(x) and is_inexact(x) else x for x in xs]
    return rule.forward(*moving)


def _flow(*operands: Any, rule: Rule, xs: int | None = None) -> list[Any]:
    """Evaluates the function that has the data flow of a rule."""
    flow = flow_of(rule)
    assert flow is not None
    return list(flow(*operands[:xs]))


def jaxpr_of(run: Any, avals: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """Returns the jaxpr of a primitive with the given parameters, memoized on the rule."""
    rule = params["rule"]

    def make() -> Any:
        program = lambda *xs: run(*xs, **params)
        if run is eval_primal and rule.contract is not None and rule.user_functions:
            program = jaxprs.named_after(rule.user_functions[0], program)
        return jax.make_jaxpr(program)(*avals)

    others = tuple([item for item in params.items() if item[0] != "rule"])
    x64 = jax.dtypes.canonicalize_dtype(float)
    return memoized(rule, (run, avals, others, x64), make)


def _define(
    name: str,
    run: Callable[..., list[Any]],
    outs: Callable[..., list[Any]] | None = None,
    flow: Callable[..., list[Any]] | None = None,
) -> RulePrimitive:
    """Defines a primitive that evaluates `run`.

    outs: A function that returns the avals of the results; if None, `run` is traced to determine
        the avals.
    flow: A function with the same data flow as `run`, or None if all inputs flow to all outputs.
    """

    def program(eqn: Any, run: Any = run) -> Any:
        return jaxpr_of(run, tuple([v.aval for v in eqn.invars]), eqn.params)

    def traced_outs(*avals: Any, **params: Any) -> list[Any]:
        # Unlike `eval_shape`, `make_jaxpr` returns avals with weak types and, under shard_map, with
        # the axes over which a value varies.
        return list(jaxpr_of(run, tuple(avals), params).out_avals)

    primitive = RulePrimitive(name)
    primitive.def_impl(run)
    primitive.def_abstract_eval(outs or traced_outs)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    primitive.gradtools_program = program
    if flow is not None:

        def flow_program(eqn: Any) -> Any:
            if flow_of(eqn.params["rule"]) is None:
                return None
            # The flow is traced outside of a shard_map, where no operation returns varying types.
            avals = [v.aval for v in eqn.invars]
            avals = [jax.core.ShapedArray(a.shape, a.dtype) if varies(a) else a for a in avals]
            return jaxpr_of(flow, tuple(avals), eqn.params)

        primitive.gradtools_flow = flow_program
    return primitive


weakly_cached.add(TracedRule)
primal_p = _define("gradtools_primal", eval_primal, flow=_flow)
value_p = _define("gradtools_value", _value, outs=_value, flow=_flow)
mlir.register_lowering(value_p, lambda ctx, *operands, **params: _value(*operands, **params))
tangent_p = _define(
    "gradtools_tangent", eval_tangent, outs=lambda *_, ys, **__: list(ys), flow=eval_tangent
)

reverse_only_p = RulePrimitive("gradtools_reverse_only")
reverse_only_p.__doc__ = "Marks a function without forward mode in a jaxpr."
_same = lambda *xs, name: list(xs)
reverse_only_p.def_impl(_same)
reverse_only_p.def_abstract_eval(_same)
mlir.register_lowering(reverse_only_p, mlir.lower_fun(_same, multiple_results=True))
batching.primitive_batchers[reverse_only_p] = lambda args, dims, name: (
    reverse_only_p.bind(*args, name=name),
    dims,
)


# --- under vmap --------------------------------------------------------------------------
#
# A batching rule binds the primitive again with a batched rule, whose maps are the vmap of the maps
# of one example (`rules.batched`).


@dataclass(frozen=True)
class _Vmaps:
    """The vmap functions that `rules.batched` requires from a framework.

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
        """Applies vmap to `fun`. Extras that do not depend on a mapped input are not batched.

        The result is a function that returns outputs and out_axes.
        """
        trace = jax.make_jaxpr(lambda *a: list(fun(*a)), axis_env=[(self.axis.name, size)])

        def run(*xs: Any) -> tuple[list[Any], list[Any]]:
            pairs = zip(map(jax.typeof, xs), axes, strict=True)
            one = [x if axis is None else shardings.without_axis(x, 0) for x, axis in pairs]
            closed = trace(*one)
            flow = [] if closed.effects else reachability.reached_matrix(closed, raw=True)
            mapped = [any(r and a == 0 for r, a in zip(row, axes, strict=True)) for row in flow]
            first = len(closed.out_avals) - extras()
            varying = lambda i: closed.effects or i < first or mapped[i]
            out_axes = [0 if varying(i) else None for i in range(len(closed.out_avals))]
            if not out_axes:
                return [], []
            one_example = partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)
            if all(a is None for a in out_axes):
                return one_example(*xs), out_axes
            return self._vmap(one_example, axes, out_axes, size)(*xs), out_axes

        return run


def _batched(rule: Rule, x_axes: Any, saved_axes: Any, axis: Any) -> Rule:
    """Returns the batched version of a rule, which evaluates a batch of examples."""
    lists, size = _Vmaps(axis), axis.size

    def lift(xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
        """Hoists the closed-over arrays of the maps of one example, and batches the maps."""
        assert isinstance(rule, TracedRule)
        assert rule.lift is not None
        pairs = zip(xs, x_axes, strict=True)
        lifted, inputs = rule.lift([x if a is None else x[0] for x, a in pairs])
        of_inputs = tuple([x_axes[x] if isinstance(x, int) else None for x in inputs])
        return _batched(lifted, of_inputs, None, axis), inputs

    def make() -> Rule:
        if not isinstance(rule, TracedRule):
            return batched(rule, lists, x_axes, saved_axes, size)
        flow, forward, whole = rule.flow, rule.forward, rule.whole  # all extras are batched
        return batched(
            rule,
            lists,
            x_axes,
            saved_axes,
            size,
            flow=flow and lists.vmap_list(lambda *x: flow(*x), x_axes, size),
            forward=forward and lists.vmap_list(forward, x_axes, size),
            whole=whole and _batched(whole, x_axes, None, axis),
            lift=rule.lift and lift,
        )

    return memoized(rule, ("batched", x_axes, saved_axes, axis), make)


def _batching_rule(primitive: RulePrimitive) -> Any:
    """Returns a batching rule that binds the primitive with the batched version of the rule."""

    def run(axis: Any, args: Any, dims: Any, *, rule: Any, **params: Any) -> Any:
        if all(d is None for d in dims):
            out = primitive.bind(*args, rule=rule, **params)
            return out, [None] * len(out)
        size = axis.size
        pairs = zip(args, dims, strict=True)
        args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
        axes = [None if d is None else 0 for d in dims]
        like = next(x for x, a in zip(args, axes, strict=True) if a == 0)
        x_axes: Any = axes
        saved_axes: Any = None
        if primitive is value_p:  # the known outputs are batched
            first, last = params["xs"], len(args) - rule.extras
            for i in range(first, last):
                args[i] = args[i] if axes[i] == 0 else shardings.spread(args[i], size, like)
            outs = [*[0] * (last - first), *axes[last:]]
            x_axes, saved_axes = axes[:first], saved_from(rule.saves, axes[:first], outs)
        elif primitive is tangent_p:
            n = len(args) - sum(params["given"])
            x_axes, saved_axes = spread(axes[n:], params["given"]), tuple(axes[:n])
            params["ys"] = tuple([shardings.with_leading(y, size, like) for y in params["ys"]])
        out = primitive.bind(*args, rule=_batched(rule, tuple(x_axes), saved_axes, axis), **params)
        return out, [0] * len(out)

    return run


for _primitive in (primal_p, value_p, tangent_p):
    batching.fancy_primitive_batchers[_primitive] = _batching_rule(_primitive)
