"""The primal, tangent and cotangent primitives of a rule: evaluation and vmap.

The operands of a linear primitive are the residuals, then the tangents (or cotangents) that are
not symbolic zeros. Its parameters: `given`, the mask of these tangents; `wanted`, the mask of the
input cotangents to be computed; `xs` and `ys`, the avals of inputs and outputs. The primal of a
whole forward pass has the parameter `extras`, for these follow its outputs.
`installing.py` defines how the primitives are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from gradtools.errors import refusal
from gradtools.jax import jaxprs, reachability, shardings
from gradtools.jax._upstream import Primitive
from gradtools.jax.rules.kept_alive import LIFE, MortalPrimitive, memoized, mortal
from gradtools.jax.shardings import varies, with_varying_tangent
from gradtools.jax.trees import is_inexact
from gradtools.rules import Linearized, Rule, batched, saved_from, spread

Mask = tuple[bool, ...]

READS_A_VALUE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
_IS_TRACED = (
    "its rule reads the value of an array (a Python if or while, bool(), float(), NumPy) where it "
    "is traced, as it is under jit, vmap, in loops and at second order. Use jax.numpy.where or "
    "jax.lax.cond; pass what selects the program by static_argnames; take NumPy code into the "
    "program by host_function."
)


@contextmanager
def naming_rule(rule: Rule) -> Iterator[None]:
    """Names the user's rule in JAX's error about reading the value of a traced array."""
    try:
        yield
    except READS_A_VALUE as error:
        if rule.contract is None:
            raise
        raise refusal(error, f"{rule.contract.name}: {_IS_TRACED} JAX says: {error}") from error


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TracedRule(Rule):
    """A rule with the facts that tracing needs.

    Attributes:
        closed_over: Positions of inputs that were closed over; differentiating them raises.
        flow: The function whose data flow is the rule's: it determines which inputs each output
            depends on, and the cotangent map is evaluated for the wanted inputs only. Default
            None: each output depends on each input.
    """

    closed_over: tuple[int, ...] = ()
    flow: Callable[..., list[Any]] | None = None


def flow_of(rule: Rule) -> Callable[..., list[Any]] | None:
    """The function whose data flow is the rule's; None: each output depends on each input."""
    return rule.flow if isinstance(rule, TracedRule) else None


def captures_nothing(rule: Rule) -> bool:
    """Whether a rule's maps have no closures and no defaults, as those of the edits."""
    maps = rule.primal, rule.tangent, rule.cotangent, rule.linearize
    return all(
        m is None or (type(m) is FunctionType and not (m.__closure__ or m.__defaults__))
        for m in maps
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LinearizedRule(TracedRule):
    """A rule with both maps and explicit residuals.

    Attributes:
        forward: `forward(*xs)` returns `[*ys, *extras]`.
        extras: The number of extras.
        perturbed: The inputs for which the maps are valid, if the rule was linearized for some
            inputs only; None for all.
        whole: The rule for all inputs, if `perturbed` is given.
        source: A key that is equal for linearizations that compute the same; None if unknown.
    """

    forward: Callable[..., list[Any]]
    extras: int
    perturbed: Mask | None = None
    whole: Rule | None = None
    source: Hashable = None

    @classmethod
    def made_of(
        cls,
        rule: Rule,
        made: Linearized,
        forward: Callable[..., list[Any]],
        given: Mask | None = None,
    ) -> LinearizedRule:
        """The rule with the maps `made` by one evaluation; `forward` repeats that evaluation."""
        return cls.of(
            rule,
            tangent=made.tangent,
            cotangent=made.cotangent,
            saves=made.saves,
            linearize=None,
            forward=forward,
            extras=len(made.extras),
            perturbed=given,
            whole=None if given is None else rule,
            source=None if made.key is None else (rule, made.key, given),
        )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ValueLiftedRule(TracedRule):
    """A rule whose primal has been lifted, but not its maps.

    Attributes:
        lift: `lift(xs)` returns the rule with its maps lifted, too, and one entry for each of its
            inputs: the position in `xs`, or the captured array itself.
    """

    lift: Callable[[Sequence[Any]], tuple[Rule, list[Any]]]


def as_arrays(xs: Sequence[Any]) -> list[Any]:
    """xs with Python numbers converted to arrays; JAX passes literals on unconverted."""
    return [x if hasattr(x, "shape") else jnp.asarray(x) for x in xs]


def promoting(rule: Rule) -> Any:
    """Allows dtype promotion in an edit's own arithmetic (a real scale, a complex cotangent)."""
    return jax.numpy_dtype_promotion("standard") if rule.reaches == "identity" else nullcontext()


def eval_primal(*xs: Any, rule: Rule, extras: bool = False) -> list[Any]:
    """The outputs of the rule's function, or outputs and extras of its forward pass."""
    arrays = as_arrays(xs)
    if extras:
        assert isinstance(rule, LinearizedRule)
        return eval_forward(rule, arrays)
    return list(rule.primal(*arrays))


def _value(*operands: Any, rule: LinearizedRule, xs: int) -> list[Any]:
    return list(operands[xs : len(operands) - rule.extras])


def eval_tangent(*operands: Any, rule: Rule, given: Mask, ys: Any) -> list[Any]:
    """The rule's tangent map."""
    n, operands = len(operands) - sum(given), tuple(as_arrays(operands))
    assert rule.tangent is not None
    with promoting(rule), naming_rule(rule):
        return rule.tangent(operands[:n], spread(operands[n:], given))


def eval_cotangent(*operands: Any, rule: Rule, given: Mask, wanted: Mask, xs: Any, ys: Any) -> Any:
    """The rule's cotangent map; returns the cotangents of the wanted inputs."""
    n, operands = len(operands) - sum(given), tuple(as_arrays(operands))

    def run(*operands: Any) -> list[Any]:
        assert rule.cotangent is not None
        with promoting(rule), naming_rule(rule):
            result = rule.cotangent(operands[:n], spread(operands[n:], given))
        return [ct for ct, w in zip(result, wanted, strict=True) if w]

    return run(*operands) if flow_of(rule) is None else evaluate_live(run, operands)


def evaluate_live(run: Callable[..., list[Any]], operands: Sequence[Any]) -> list[Any]:
    """`run(*operands)` after dead code elimination, which outside of jit XLA does not do."""
    closed = jax.make_jaxpr(run)(*operands)
    return jax.core.eval_jaxpr(jaxprs.live(closed.jaxpr), closed.consts, *operands)


def eval_forward(maps: LinearizedRule, xs: Any) -> list[Any]:
    """Outputs and extras of a linearized rule."""
    if not maps.extras:
        return list(maps.forward(*[jax.lax.stop_gradient(x) for x in xs]))
    return list(
        maps.forward(*[with_varying_tangent(x) if varies(x) and is_inexact(x) else x for x in xs])
    )


def jaxpr_of(run: Any, avals: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """The jaxpr of a primitive with these parameters, memoized on its rule."""
    params = {name: value for name, value in params.items() if name != LIFE}
    rule = params["rule"]

    def make() -> Any:
        program = lambda *xs: run(*xs, **params)
        if run is eval_primal and rule.contract is not None and rule.user_functions:
            program = jaxprs.named_after(rule.user_functions[0], program)
        return jax.make_jaxpr(program)(*avals)

    return memoized(rule, _jaxpr_key(run, avals, params), make)


def _jaxpr_key(run: Any, avals: tuple[Any, ...], params: dict[str, Any]) -> tuple[Any, ...]:
    others = tuple([item for item in params.items() if item[0] not in ("rule", LIFE)])
    return run, avals, others, jax.dtypes.canonicalize_dtype(float)  # the last one: whether x64


def _define(
    name: str,
    run: Callable[..., list[Any]],
    outs: Callable[..., list[Any]] | None = None,
    flow: Callable[..., list[Any]] | None = None,
) -> MortalPrimitive:
    """A primitive that evaluates `run`.

    outs: The avals of its results; None: they are traced.
    flow: Like `run`, with the data flow of a rule that has one; None: all flows to all.
    """

    def program(eqn: Any, run: Any = run) -> Any:
        return jaxpr_of(run, tuple([v.aval for v in eqn.invars]), eqn.params)

    def traced_outs(*avals: Any, **params: Any) -> list[Any]:
        # `make_jaxpr`, not `eval_shape`: its avals keep weak types and, under shard_map, the
        # axes over which a value varies.
        return list(jaxpr_of(run, tuple(avals), params).out_avals)

    primitive = MortalPrimitive(name, "rule")
    primitive.def_impl(mortal(run))
    primitive.def_abstract_eval(mortal(outs or traced_outs))
    mlir.register_lowering(primitive, mlir.lower_fun(mortal(run), multiple_results=True))
    primitive.gradtools_program = program
    if flow is not None:
        has_flow = lambda eqn: flow_of(eqn.params["rule"]) is not None
        primitive.gradtools_flow = lambda eqn: program(eqn, flow) if has_flow(eqn) else None
    return primitive


def _flow(*operands: Any, rule: Rule, xs: int | None = None) -> list[Any]:
    """The rule's data flow, from its inputs to its outputs."""
    flow = flow_of(rule)
    assert flow is not None
    return list(flow(*operands[:xs]))


primal_p = _define("gradtools_primal", eval_primal, flow=_flow)
value_p = _define("gradtools_value", _value, outs=_value, flow=_flow)
mlir.register_lowering(value_p, lambda ctx, *operands, life, **params: _value(*operands, **params))
tangent_p = _define(
    "gradtools_tangent", eval_tangent, outs=lambda *_, ys, **__: list(ys), flow=eval_tangent
)
cotangent_p = _define(
    "gradtools_cotangent", eval_cotangent, outs=lambda *_, xs, **__: list(xs), flow=eval_cotangent
)

reverse_only_p = Primitive("gradtools_reverse_only")
reverse_only_p.multiple_results = True
reverse_only_p.__doc__ = "Marks, in a jaxpr, a function that forward mode cannot enter."
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
# Each primitive is bound again, with the rule of a batch, whose maps are those of one example under
# vmap (`rules.batched`).


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
        """vmap; extras that depend on no mapped input have no batch axis. Returns also out_axes."""
        trace = jax.make_jaxpr(lambda *a: list(fun(*a)), axis_env=[(self.axis.name, size)])

        def run(*xs: Any) -> tuple[list[Any], list[Any]]:
            pairs = zip(map(jax.typeof, xs), axes, strict=True)
            one = [x if axis is None else shardings.without_axis(x, 0) for x, axis in pairs]
            closed = trace(*one)
            flow = [] if closed.effects else reachability.raw_matrix(closed)
            mapped = [any(r and a == 0 for r, a in zip(row, axes, strict=True)) for row in flow]
            first = len(closed.out_avals) - extras()
            varying = lambda i: closed.effects or i < first or mapped[i]
            out_axes = [0 if varying(i) else None for i in range(len(closed.out_avals))]
            if not out_axes:
                return [], []
            if all(a is None for a in out_axes):
                return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs), out_axes
            one_example = partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)
            return self._vmap(one_example, axes, out_axes, size)(*xs), out_axes

        return run


def _batched(rule: Rule, x_axes: Any, saved_axes: Any, axis: Any) -> Rule:
    """The rule of a batch."""
    lists, size = _Vmaps(axis), axis.size

    def lift(xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
        """Lifts the maps at one example, then batches them."""
        assert isinstance(rule, ValueLiftedRule)
        pairs = zip(xs, x_axes, strict=True)
        lifted, inputs = rule.lift([x if a is None else x[0] for x, a in pairs])
        of_inputs = tuple([x_axes[x] if isinstance(x, int) else None for x in inputs])
        return _batched(lifted, of_inputs, None, axis), inputs

    def make() -> Rule:
        more: dict[str, Any] = {}
        if isinstance(rule, LinearizedRule):  # all extras have the batch axis
            more |= {"forward": lists.vmap_list(rule.forward, x_axes, size), "source": None}
            if rule.whole is not None:
                more["whole"] = _batched(rule.whole, x_axes, None, axis)
        flow = flow_of(rule)
        if flow is not None:
            more["flow"] = lists.vmap_list(lambda *x: flow(*x), x_axes, size)
        if isinstance(rule, ValueLiftedRule):
            more["lift"] = lift
        return batched(rule, lists, x_axes, saved_axes, size, **more)

    return memoized(rule, ("batched", x_axes, saved_axes, axis), make)


def _batching_rule(primitive: MortalPrimitive) -> Any:
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

        def spread_from(first: int, last: int) -> None:
            """Gives all of these operands the batch axis."""
            pairs = zip(args[first:last], axes[first:last], strict=True)
            args[first:last] = [x if a == 0 else shardings.spread(x, size, like) for x, a in pairs]
            axes[first:last] = [0] * (last - first)

        x_axes: Any = axes
        saved_axes: Any = None
        if primitive is value_p:
            first, last = params["xs"], len(args) - rule.extras
            spread_from(first, last)
            x_axes, saved_axes = axes[:first], saved_from(rule.saves, axes[:first], axes[first:])
        elif primitive is tangent_p:
            x_axes, saved_axes = spread(axes[n:], params["given"]), tuple(axes[:n])
            params["ys"] = with_batch(params["ys"])
        elif primitive is cotangent_p:
            spread_from(n, len(args))
            x_axes, saved_axes = [0] * len(params["wanted"]), tuple(axes[:n])
            params["xs"], params["ys"] = with_batch(params["xs"]), with_batch(params["ys"])
        out = primitive.bind(*args, rule=_batched(rule, tuple(x_axes), saved_axes, axis), **params)
        return out, [0] * len(out)

    return run


for _primitive in (primal_p, value_p, tangent_p, cotangent_p):
    batching.fancy_primitive_batchers[_primitive] = mortal(_batching_rule(_primitive))
