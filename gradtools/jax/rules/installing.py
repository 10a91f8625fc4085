"""A rule in JAX: three primitives (primal, tangent, cotangent) that jvp and transpose exchange.

JAX lets a function have a forward rule or a reverse rule, not both (jax#3996). Three primitives
of our own have both, because differentiation and transposition only exchange them:

    primal     y = f(x)             its jvp binds primal and tangent
    tangent    dy = J(x) dx         linear in dx; its transpose is cotangent
    cotangent  x' = J(x)^T y'       linear in y'; its transpose is tangent

A rule is *linearized* when it is first differentiated: what its maps read becomes known, and a
missing map is made from the other one. The primal primitive then also gives the extras that
they read; their derivative is that of the code that made them, while an output's derivative is
the rule at every order. The jvp of the linear primitives is that of the Python maps. A
primitive's rule, unlike `custom_jvp`'s, survives scan, cond, remat and jit. A fourth one,
evaluation, holds a whole forward pass of rules that say so (`remat`): where its extras are not
used, as before a recomputation, the primal takes its place.

What the primitives compute stands in `primitives`, how a rule is linearized in `linearizing`; here
is how they are differentiated, transposed and batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.jet import jet_rules
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from gradtools.errors import NotImplementedRefusal
from gradtools.jax import jaxprs, reachability, shardings
from gradtools.jax._upstream import Primitive
from gradtools.jax.rules import linearity
from gradtools.jax.rules.checking import check_linear, check_symbolic
from gradtools.jax.rules.closure_conversion import (
    ValueLiftedRule,
    held_tracers,
    lift_captured,
    lift_value,
)
from gradtools.jax.rules.kept_alive import mortal, owned_by, remembered
from gradtools.jax.rules.linearizing import evaluated_now, linearized_rule, local_list, plain_maps
from gradtools.jax.rules.primitives import (
    LinearizedRule,
    Mask,
    PartialRule,
    TracedRule,
    as_arrays,
    cotangent_p,
    eval_cotangent,
    eval_forward,
    eval_primal,
    eval_tangent,
    evaluation_p,
    flow_of,
    jaxpr_of,
    primal_p,
    promoting,
    reverse_only_p,
    tangent_p,
    value_p,
    without_the_rest,
)
from gradtools.jax.shardings import varies, varying, varying_alike
from gradtools.jax.trees import (
    all_known,
    conj,
    is_inexact,
    likes_of,
    struct_of,
    without_none,
    zeros_of,
)
from gradtools.rules import JvpRule, Rule, batched, closed_over_error, saved_from, spread


def apply_rule(rule: Rule, *xs: Any) -> list[Any]:
    """`rule.primal(*xs)`, differentiated by the rule in every mode, at every order."""
    given = [_as_array(x) for x in xs]
    xs = varying_alike(given)
    shared = tuple([varies(x) - varies(g) for x, g in zip(xs, given, strict=True)])
    if any(shared) and rule.contract is not None:
        rule = remembered(rule, ("shared", shared), lambda: _of_shared(rule, shared))
    if rule.reverse_only:
        return _apply_reverse_only(rule, xs)
    if rule.user_functions and (held := held_tracers(rule)):
        # traced at the types that inputs have beside what becomes one of them
        axes = frozenset().union(*map(varies, held))
        xs = [varying(x, axes) for x in xs]
        lift = lift_value if rule in local_list("lifting") else lift_captured
        rule, captured = lift(rule, xs)
        xs = [*xs, *captured]  # these keep the types at which the maps were traced
    return list(primal_p.bind(*xs, rule=rule))


def _of_shared(rule: Rule, shared: Sequence[frozenset[Any]]) -> Rule:
    """The rule where some inputs do not vary over mesh axes of shard_map, as the others do.

    The cotangent of such an input is summed over these axes. An author may have summed it already,
    as `jax.custom_vjp` demands: then it counts on one device alone.
    """

    def once(ct: Any, axes: frozenset[Any]) -> Any:
        if ct is None or not hasattr(ct, "dtype"):
            return ct
        summed = axes - varies(ct)
        first = [jax.lax.axis_index(axis) == 0 for axis in sorted(summed)]
        return jnp.where(jnp.stack(first).all(), ct, jnp.zeros_like(ct)) if first else ct

    def counted(cotangent: Any) -> Any:
        if cotangent is None:
            return None
        return lambda saved, cts: [*map(once, cotangent(saved, cts), shared)]

    def linearize(*xs: Any, **told: Any) -> Any:
        assert rule.linearize is not None
        made = rule.linearize(*xs, **told)
        return replace(made, cotangent=counted(made.cotangent))

    return replace(
        rule,
        cotangent=counted(rule.cotangent),
        linearize=None if rule.linearize is None else linearize,
    )


def _as_array(x: Any) -> Any:
    """x; a number, or a tracer that may stand for one, as an array, which costs an operation."""
    return x if isinstance(x, jax.Array) and not jax.typeof(x).weak_type else jnp.asarray(x)


def attempt(fun: Callable[..., list[Any]], *xs: Any) -> list[Any]:
    """`fun(*xs)`, raising now what else would be raised when the derivatives in it are run."""
    closed = jax.make_jaxpr(fun)(*xs)
    _check_runs(closed)
    return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs))


def _check_runs(closed: Any) -> None:
    def expand(eqn: Any) -> bool:
        if eqn.primitive in (tangent_p, cotangent_p, primal_p):
            _check_runs(eqn.primitive.gradtools_program(eqn))
        return False

    jaxprs.uses_primitive(closed, expand)


def _primal_dce(used: list[bool], *live_and_eqn: Any) -> tuple[list[bool], Any]:
    """Without what is computed for outputs that nobody uses; a derivative may read any input.

    JAX 0.12 says before the equation which inputs are alive.
    """
    eqn = live_and_eqn[-1]
    if not any(used):
        return [False] * len(eqn.invars), None
    if not all(used):
        outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]
        rule = eqn.params["rule"]
        part = remembered(rule, ("part", *used), lambda: _part(rule, tuple(used)))
        eqn = eqn.replace(outvars=outvars, params=owned_by(part, "rule"))
    return [True] * len(eqn.invars), eqn


def _part(rule: Rule, used: Mask) -> PartialRule:
    """A rule that gives these outputs alone."""

    def reaches(*specs: Any) -> Any:
        assert callable(rule.reaches)
        result = rule.reaches(*specs)
        return result and part.pick(result)

    flow = flow_of(rule)
    part: PartialRule = PartialRule.of(
        rule,
        primal=lambda *xs: without_the_rest(lambda *xs: part.pick(rule.primal(*xs)), xs),
        flow=None if flow is None else lambda *xs: part.pick(flow(*xs)),
        reaches=reaches if callable(rule.reaches) else rule.reaches,
        used=used,
        whole=rule,
    )
    return part


def _primal_jvp(xs: Any, dxs: Any, *, rule: Rule) -> tuple[list[Any], list[Any]]:
    if isinstance(rule, PartialRule):
        ys, dys = _primal_jvp(xs, dxs, rule=rule.whole)
        return rule.pick(ys), rule.pick(dys)
    given, xs = _given(rule, dxs), as_arrays(xs)
    if not any(given):
        ys = primal_p.bind(*xs, rule=rule)
        return ys, [_zero(y) for y in ys]
    if isinstance(rule, ValueLiftedRule):
        rule, inputs = rule.lift(xs)
        dxs = [dxs[x] if isinstance(x, int) else _zero(x) for x in inputs]
        xs, given = [xs[x] if isinstance(x, int) else x for x in inputs], _given(rule, dxs)
    ys, maps, saved = _evaluated(rule, xs, given)
    return ys, _pushed(maps, ys, saved, dxs, given)


def _evaluation_jvp(xs: Any, dxs: Any, *, rule: LinearizedRule) -> tuple[list[Any], list[Any]]:
    """The rule for the outputs; extras are differentiated through the code that made them."""
    given, out = _given(rule, dxs), evaluation_p.bind(*xs, rule=rule)
    if not any(given):
        return out, [_zero(y) for y in out]
    n = len(out) - rule.extras
    dys = _pushed(rule, out[:n], rule.saved(xs, out[:n], out[n:]), dxs, given)
    run = lambda *xs, rule: eval_forward(rule, xs)[n:]
    tangents = [dx if g else _zero(x) for x, dx, g in zip(xs, dxs, given, strict=True)]
    return out, [*dys, *_moved(run, xs, tangents, {"rule": rule})[1]]


def _evaluation_dce(used: list[bool], *live_and_eqn: Any) -> tuple[list[bool], Any]:
    """Where no extra is used, as in a forward pass that will be recomputed, f takes fwd's place.

    JAX 0.12 says before the equation which inputs are alive.
    """
    eqn = live_and_eqn[-1]
    n = len(used) - eqn.params["rule"].extras
    if not any(used):
        return [False] * len(eqn.invars), None
    if any(used[n:]):
        return [True] * len(eqn.invars), eqn
    return _primal_dce(used[:n], eqn.replace(primitive=primal_p, outvars=eqn.outvars[:n]))


def _value_jvp(operands: Any, tangents: Any, *, rule: LinearizedRule, xs: int) -> Any:
    """The rule, whatever code made the values."""
    given = _given(rule, tangents[:xs])
    if rule.perturbed is not None:
        assert rule.whole is not None
        wanted = tuple([g or p for g, p in zip(given, rule.perturbed, strict=True)])
        if wanted != rule.perturbed:  # its maps know nothing of some input
            ys, maps, saved = _evaluated(rule.whole, operands[:xs], wanted)
            return ys, _pushed(maps, ys, saved, tangents[:xs], given)
    ys = value_p.bind(*operands, rule=rule, xs=xs)
    if not any(given):
        return ys, [_zero(y) for y in ys]
    saved = rule.saved(operands[:xs], ys, operands[xs + len(ys) :])
    return ys, _pushed(rule, ys, saved, tangents[:xs], given)


def _given(rule: Rule, dxs: Any) -> Mask:
    given = tuple([_carries(dx) and i not in rule.nondifferentiable for i, dx in enumerate(dxs)])
    if isinstance(rule, TracedRule) and any(given[i] for i in rule.closed_over):
        raise closed_over_error(rule.name)
    return given


def _pushed(maps: Rule, ys: Any, saved: Any, dxs: Any, given: Mask) -> list[Any]:
    axes = frozenset().union(*map(varies, ys))
    moving = [varying(dx, axes) for dx, g in zip(dxs, given, strict=True) if g]
    params = {"rule": maps, "given": given, "ys": tuple(without_none(likes_of(ys)))}
    zero = _symbolically_zero([*saved, *moving], params)
    result = iter(tangent_p.bind(*saved, *moving, **params))
    dys = iter([_zero(dy) if z else dy for dy, z in zip(result, zero, strict=True)])
    return [next(dys) if is_inexact(y) else _zero(y) for y in ys]


def _symbolically_zero(operands: Sequence[Any], params: dict[str, Any]) -> list[bool]:
    """Which tangents are zero whatever the others are; asked of rules that can tell alone."""
    if "tangent" not in params["rule"].symbolic_zeros:
        return [False] * len(params["ys"])
    closed = jaxpr_of(eval_tangent, tuple(map(jax.typeof, operands)), params)
    return linearity.proved_zero(closed, [False] * len(operands))


def _evaluated(rule: Rule, xs: Any, given: Mask | None = None) -> tuple[list[Any], Rule, list[Any]]:
    """The outputs, the rule's maps, and what these read.

    What the forward pass does is part of the program around it: a loop keeps what no step of it
    changes once, and extras are differentiated like anything else. Its outputs are handed on by
    a primitive, for their derivative is the rule.
    """
    if rule.linearize is None and not isinstance(rule, JvpRule | LinearizedRule):
        ys = primal_p.bind(*xs, rule=rule)
        maps = plain_maps(rule, xs, ys)
        return ys, maps, maps.saved(xs, ys)
    if not isinstance(rule, LinearizedRule) and all_known(xs):
        out, maps = evaluated_now(rule, xs, given)
    else:
        maps = linearized_rule(rule, xs, given)
        if maps.contract is not None and maps.contract.remat:
            out = evaluation_p.bind(*xs, rule=maps)
            ys, extras = out[: len(out) - maps.extras], out[len(out) - maps.extras :]
            return ys, maps, maps.saved(xs, ys, extras)
        out = eval_forward(maps, xs)
    first = len(out) - maps.extras
    raw, extras = [jax.lax.stop_gradient(y) for y in out[:first]], out[first:]
    ys = value_p.bind(*xs, *raw, *extras, rule=maps, xs=len(xs))
    return ys, maps, maps.saved(xs, ys, extras)


def _zero(y: Any) -> Any:
    return ad.Zero(jax.typeof(y).to_tangent_aval())


def _carries(dx: Any) -> bool:
    return type(dx) is not ad.Zero and getattr(dx, "dtype", None) != jax.dtypes.float0


def _tangent_jvp(operands: Any, tangents: Any, *, rule: Rule, given: Mask, ys: Any) -> Any:
    """Itself on the new tangent, plus the derivative of the Python map in what it reads."""
    n = len(operands) - sum(given)
    params = {"rule": rule, "given": given, "ys": ys}
    out = tangent_p.bind(*operands, **params)
    parts = []
    if any(_carries(dv) for dv in tangents[n:]):
        pairs = zip(tangents[n:], operands[n:], strict=True)
        dvs = [varying(ad.instantiate_zeros(dv), varies(v)) for dv, v in pairs]
        parts.append(tangent_p.bind(*operands[:n], *dvs, **params))
    if any(_carries(dx) for dx in tangents[:n]):
        parts.append(_python_jvp(eval_tangent, operands, tangents[:n], params)[1])
    if not parts:
        return out, [_zero(o) for o in out]
    return out, [_add(*terms) for terms in zip(*parts, strict=True)]


def _cotangent_jvp(operands: Any, tangents: Any, **params: Any) -> Any:
    """The derivative of the Python map, in the cotangents too: it need not be linear in them."""
    moves = any(_carries(dv) for dv in tangents)
    if moves and flow_of(params["rule"]) is not None:  # its value costs as much as it does
        return _python_jvp(eval_cotangent, operands, tangents, params)
    out = cotangent_p.bind(*operands, **params)
    if not moves:
        return out, [_zero(o) for o in out]
    return out, _python_jvp(eval_cotangent, operands, tangents, params)[1]


def _python_jvp(run: Any, operands: Any, tangents: Any, params: Any) -> tuple[Any, Any]:
    rule, n = params["rule"], len(operands) - sum(params["given"])
    sources = range(n) if rule.saves is None else rule.saves
    moved = [i for i, dx in zip(sources, tangents[:n], strict=False) if _carries(dx)]
    if isinstance(rule, TracedRule) and not set(moved).isdisjoint(rule.closed_over):
        raise closed_over_error(rule.name)
    return _moved(run, operands, tangents, params)


def _moved(run: Any, operands: Any, tangents: Any, params: dict[str, Any]) -> tuple[Any, Any]:
    """The jvp of Python code in the operands that have a tangent."""
    moving = [i for i, dx in enumerate(tangents) if _carries(dx)]

    def at(*changed: Any) -> list[Any]:
        full = list(operands)
        for i, x in zip(moving, changed, strict=True):
            full[i] = x
        return run(*full, **params)

    steps = [varying(tangents[i], varies(operands[i])) for i in moving]
    return jax.jvp(at, [operands[i] for i in moving], steps)


def _add(first: Any, *more: Any) -> Any:
    for term in more:
        first = ad.add_tangents(first, term)
    return first


def _tangent_transpose(cts: Any, *operands: Any, rule: Rule, given: Mask, ys: Any) -> list[Any]:
    n = len(operands) - sum(given)
    present = tuple([type(ct) is not ad.Zero for ct in cts])
    if not any(present):
        return [None] * len(operands)
    params = {
        "rule": rule,
        "given": present,
        "wanted": given,
        "xs": tuple([v.aval for v in operands[n:]]),
        "ys": ys,
    }
    at = [*operands[:n], *[ct for ct, p in zip(cts, present, strict=True) if p]]
    if rule.contract is not None and not rule.fills("cotangent"):
        check_symbolic(rule.contract, at, n, params)
    return [None] * n + list(cotangent_p.bind(*at, **params))


def _cotangent_transpose(
    dxs: Any, *operands: Any, rule: Rule, given: Mask, wanted: Mask, xs: Any, ys: Any
) -> list[Any]:
    n = len(operands) - sum(given)
    full = spread(dxs, wanted)
    moving = tuple([dx is not None and type(dx) is not ad.Zero for dx in full])
    if not any(moving):
        return [None] * len(operands)
    present = [dx for dx, m in zip(full, moving, strict=True) if m]
    dys = tangent_p.bind(*operands[:n], *present, rule=rule, given=moving, ys=ys)
    return [None] * n + [dy for dy, g in zip(dys, given, strict=True) if g]


def _primal_transpose(cts: Any, *xs: Any, rule: Rule) -> list[Any]:
    """Of a rule that stands in a linear function: its pullback anywhere, say at zero."""
    if isinstance(rule, PartialRule):
        return _primal_transpose(_cotangents_of_all(rule, cts, xs), *xs, rule=rule.whole)
    unknown = tuple([ad.is_undefined_primal(x) for x in xs])
    if (rule.contract or rule) in local_list("linearizing"):
        return _code_transposed(cts, xs, rule, unknown)
    at = [zeros_of(x.aval) if u else x for x, u in zip(xs, unknown, strict=True)]
    check_linear(rule, at, unknown)
    ys, maps, saved = _evaluated(rule, at)
    inexact = [is_inexact(y) for y in ys]
    present = [type(ct) is not ad.Zero for ct in cts]
    given = tuple([p for p, i in zip(present, inexact, strict=True) if i])
    if not any(given):
        return [None] * len(xs)
    result = cotangent_p.bind(
        *saved,
        *(ct for ct, p in zip(cts, present, strict=True) if p),
        rule=maps,
        given=given,
        wanted=unknown,
        xs=tuple([x.aval for x, u in zip(xs, unknown, strict=True) if u]),
        ys=tuple(without_none(likes_of(ys))),
    )
    return spread(result, unknown)


def _cotangents_of_all(part: PartialRule, cts: Any, xs: Any) -> list[Any]:
    """The cotangents of the outputs that are used, with zeros for the others."""
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in xs]
    outs, left = jaxpr_of(eval_primal, tuple(avals), {"rule": part.whole}).out_avals, iter(cts)
    return [
        next(left) if u else ad.Zero(aval.to_tangent_aval())
        for aval, u in zip(outs, part.used, strict=True)
    ]


def _code_transposed(cts: Any, xs: Any, rule: Rule, unknown: Mask) -> list[Any]:
    """Of a linear function that its own forward rule uses: here ends what would never end."""

    def run(*moved: Any) -> list[Any]:
        new = iter(moved)
        full = [next(new) if u else x for x, u in zip(xs, unknown, strict=True)]
        return list(rule.primal(*full))

    likes = [struct_of(x.aval) for x, u in zip(xs, unknown, strict=True) if u]
    full = [ad.instantiate_zeros(ct) for ct in cts]
    return spread(jax.linear_transpose(run, *likes)(full), unknown)


ad.primitive_jvps[primal_p] = mortal(_primal_jvp)
ad.primitive_jvps[evaluation_p] = mortal(_evaluation_jvp)
pe.dce_rules[primal_p] = _primal_dce
pe.dce_rules[evaluation_p] = _evaluation_dce
ad.primitive_jvps[value_p] = mortal(_value_jvp)
ad.primitive_jvps[tangent_p] = mortal(_tangent_jvp)
ad.primitive_jvps[cotangent_p] = mortal(_cotangent_jvp)
ad.primitive_transposes[primal_p] = mortal(_primal_transpose)
ad.primitive_transposes[tangent_p] = mortal(_tangent_transpose)
ad.primitive_transposes[cotangent_p] = mortal(_cotangent_transpose)


# --- vmap --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lists:
    """What `rules.batched` asks of a framework. axis: JAX's record of what is mapped over."""

    axis: Any

    def vmap_list(self, fun: Callable[..., Any], axes: tuple[Any, ...], size: int) -> Any:
        if not axes:
            return lambda *xs: [jnp.broadcast_to(y, (size, *y.shape)) for y in fun(*xs)]
        return self._vmap(fun, axes, 0, size)

    def _vmap(self, fun: Callable[..., Any], axes: Any, out_axes: Any, size: int) -> Any:
        names = {"axis_name": self.axis.name, "spmd_axis_name": self.axis.spmd_name}
        return jax.vmap(fun, axes, out_axes, axis_size=size, **names)

    def vmap_extras(self, fun: Callable[..., Any], axes: Any, size: int, extras: Any) -> Any:
        """vmap, and which results carry the batch: extras that do not depend on it need not."""
        trace = jax.make_jaxpr(lambda *a: list(fun(*a)), axis_env=[(self.axis.name, size)])

        def run(*xs: Any) -> tuple[list[Any], list[Any]]:
            closed = trace(*_examples(xs, axes))
            out_axes = _out_axes(closed, axes, extras())
            if not out_axes:
                return [], []
            if all(a is None for a in out_axes):
                return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs), out_axes
            again = partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)
            return self._vmap(again, axes, out_axes, size)(*xs), out_axes

        return run

    @staticmethod
    def sum_leading(x: Any) -> Any:
        return jnp.sum(x, axis=0)


def _examples(xs: Sequence[Any], axes: Sequence[Any]) -> list[Any]:
    """What one example's inputs look like."""
    avals = [jax.typeof(x) for x in xs]
    pairs = zip(avals, axes, strict=True)
    return [a if axis is None else shardings.without_axis(a, 0) for a, axis in pairs]


def _out_axes(closed: Any, axes: Sequence[Any], extras: int) -> list[Any]:
    """0 for each result; None for an extra that neither a mapped input nor the axis reaches."""
    if closed.effects:
        return [0] * len(closed.out_avals)
    flow = reachability.raw_matrix(closed)
    carried = [any(r and a == 0 for r, a in zip(row, axes, strict=True)) for row in flow]
    first = len(carried) - extras
    return [0 if i < first or c else None for i, c in enumerate(carried)]


def _batched(rule: Rule, x_axes: Any, saved_axes: Any, axis: Any, run: Any = None) -> Rule:
    """The rule of a batch; `run` is its forward pass, if not the one that the rule's gives."""
    lists, size = _Lists(axis), axis.size

    def forward(*xs: Any) -> list[Any]:
        assert isinstance(rule, LinearizedRule)
        return lists.vmap_extras(rule.forward, x_axes, size, lambda: rule.extras)(*xs)[0]

    def make() -> Rule:
        more: dict[str, Any] = {}
        if isinstance(rule, LinearizedRule):
            more |= {"forward": run or forward, "source": None}
        flow = flow_of(rule)
        if flow is not None:
            more["flow"] = lists.vmap_list(lambda *x: flow(*x), x_axes, size)
        if isinstance(rule, ValueLiftedRule):
            more["lift"] = partial(_lift_batched, rule, x_axes, axis)
        if isinstance(rule, LinearizedRule | PartialRule) and rule.whole is not None:
            more["whole"] = _batched(rule.whole, x_axes, None, axis)
        return batched(rule, lists, x_axes, saved_axes, size, **more)

    return remembered(rule, ("batched", x_axes, saved_axes, axis, run is None), make)


def _lift_batched(
    rule: ValueLiftedRule, axes: Sequence[Any], axis: Any, xs: Sequence[Any]
) -> tuple[Rule, list[Any]]:
    """The rest of a rule lifted at one example, and batched."""
    lifted, inputs = rule.lift([x if a is None else x[0] for x, a in zip(xs, axes, strict=True)])
    of_inputs = tuple([axes[x] if isinstance(x, int) else None for x in inputs])
    return _batched(lifted, of_inputs, None, axis), inputs


def _batched_evaluation(rule: LinearizedRule, axes: tuple[Any, ...], axis: Any) -> Rule:
    """The rule of a batch of which every extra carries the batch."""
    run = _Lists(axis).vmap_list(rule.forward, axes, axis.size)
    return _batched(rule, axes, saved_from(rule.saves, axes), axis, run)


def _batch(primitive: Primitive) -> Any:
    def run(axis: Any, args: Any, dims: Any, *, rule: Any, **params: Any) -> Any:
        if all(d is None for d in dims):
            out = primitive.bind(*args, rule=rule, **params)
            return out, [None] * len(out)
        size = axis.size
        args = [_to_front(x, d) for x, d in zip(args, dims, strict=True)]
        axes = [None if d is None else 0 for d in dims]
        n = len(args) - sum(params["given"]) if "given" in params else 0

        like = next(x for x, a in zip(args, axes, strict=True) if a == 0)

        def wide(avals: Any) -> Any:
            return tuple([shardings.with_leading(a, size, like) for a in avals])

        if primitive is primal_p:
            rule = _batched(rule, tuple(axes), None, axis)
        elif primitive is evaluation_p:
            rule = _batched_evaluation(rule, tuple(axes), axis)
        elif primitive is value_p:
            first, last = params["xs"], len(args) - rule.extras
            everything = [*axes[:first], *axes[first:last], *axes[last:]]
            saved_axes = saved_from(rule.saves, everything[:first], everything[first:])
            args[first:last] = [
                x if a == 0 else shardings.spread(x, size, like)
                for x, a in zip(args[first:last], axes[first:last], strict=True)
            ]
            rule = _batched(rule, tuple(axes[:first]), saved_axes, axis)
        elif primitive is tangent_p:
            dx_axes = spread(axes[n:], params["given"])
            rule = _batched(rule, tuple(dx_axes), tuple(axes[:n]), axis)
            params["ys"] = wide(params["ys"])
        else:
            cts = zip(args[n:], axes[n:], strict=True)
            args[n:] = [x if a == 0 else shardings.spread(x, size, like) for x, a in cts]
            rule = _batched(rule, (0,) * len(params["wanted"]), tuple(axes[:n]), axis)
            params["xs"], params["ys"] = wide(params["xs"]), wide(params["ys"])
        out = primitive.bind(*args, rule=rule, **params)
        return out, [0] * len(out)

    return run


def _to_front(x: Any, dim: int | None) -> Any:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


for _p in (primal_p, evaluation_p, value_p, tangent_p, cotangent_p):
    batching.fancy_primitive_batchers[_p] = mortal(_batch(_p))


def _no_series(primitive: Primitive) -> Callable[..., Any]:
    def refuse(*_: Any, **params: Any) -> Any:
        rule = params.get("rule")
        raise NotImplementedRefusal(
            f"jet: f holds the rule {rule.name if rule else primitive.name!r}, which gives first "
            "derivatives and not series. Nest jvp or grad instead."
        )

    return refuse


for _p in (primal_p, evaluation_p, value_p, tangent_p, cotangent_p):
    jet_rules[_p] = _no_series(_p)


def _apply_reverse_only(rule: Rule, xs: Sequence[Any]) -> list[Any]:
    """A plain `custom_vjp`. Its fwd applies the edit again, so that second order sees it too."""
    rule, captured = lift_captured(rule, xs) if rule.user_functions else (rule, [])

    @jax.custom_vjp
    def edited(*operands: Any) -> list[Any]:
        return reverse_only_p.bind(*rule.primal(*operands), name=rule.name)

    def fwd(*operands: Any) -> Any:
        return edited(*operands), operands

    def bwd(operands: Any, cts: Any) -> Any:
        assert rule.cotangent is not None
        with promoting(rule):
            result = rule.cotangent(rule.saved(operands, []), [conj(ct) for ct in cts])
        return tuple(
            jnp.zeros_like(x) if ct is None else shardings.like(conj(jnp.asarray(ct, x.dtype)), x)
            for ct, x in zip(result, operands, strict=True)
        )

    edited.defvjp(fwd, bwd)
    return edited(*xs, *captured)
