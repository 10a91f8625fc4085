"""A rule in JAX: three primitives (primal, tangent, cotangent) that jvp and transpose exchange.

JAX lets a function have a forward rule or a reverse rule, not both (jax#3996). Three primitives
of our own have both, because differentiation and transposition only exchange them:

    primal     y = f(x)             its jvp binds primal and tangent
    tangent    dy = J(x) dx         linear in dx; its transpose is cotangent
    cotangent  x' = J(x)^T y'       linear in y'; its transpose is tangent

A rule is *linearized* when it is first differentiated: the residuals of its maps are determined,
and a missing map is made by transposing the other one. The forward pass then also returns residuals
that are neither inputs nor outputs (*extras*). An extra is differentiated through the code that
computed it; an output is differentiated by the rule, at every order. The jvp of the linear
primitives in their residuals is that of the Python maps. The rule of a primitive, unlike that of a
`custom_jvp`, survives scan, cond, remat and jit.

The primal of a rule with `remat=True` also computes the extras when it is differentiated. Dead code
elimination replaces it by the function alone if no extra is used, as in a forward pass that will be
recomputed.

`primitives` defines what each primitive computes and how it is batched, `linearizing` how a rule is
linearized; this module defines how the primitives are differentiated and transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from gradtools.jax import jaxprs, shardings
from gradtools.jax.rules.checking import check_linear
from gradtools.jax.rules.kept_alive import memoized, mortal
from gradtools.jax.rules.linearizing import (
    captured_tracers,
    forward_pass,
    lift_captured,
    lift_value,
    local_list,
)
from gradtools.jax.rules.primitives import (
    LinearizedRule,
    Mask,
    TracedRule,
    ValueLiftedRule,
    as_arrays,
    cotangent_p,
    eval_cotangent,
    eval_forward,
    eval_primal,
    eval_tangent,
    flow_of,
    primal_p,
    promoting,
    reverse_only_p,
    tangent_p,
    value_p,
)
from gradtools.jax.shardings import varies, varying, varying_alike
from gradtools.jax.trees import (
    conj,
    is_inexact,
    likes_of,
    struct_of,
    without_none,
    zeros_of,
)
from gradtools.rules import Rule, closed_over_error, replaced_at, replaced_where, spread


def apply_rule(rule: Rule, *xs: Any) -> list[Any]:
    """`rule.primal(*xs)`, differentiated by the rule in every mode, at every order."""
    arrays = [  # arrays and tracers without a weak type are passed unconverted
        x if isinstance(x, jax.Array) and not jax.typeof(x).weak_type else jnp.asarray(x)
        for x in xs
    ]
    xs = varying_alike(arrays)
    shared = tuple([varies(x) - varies(a) for x, a in zip(xs, arrays, strict=True)])
    if any(shared) and rule.contract is not None and rule.linearize is not None:
        rule = memoized(rule, ("shared", shared), lambda: _with_unvarying_inputs(rule, shared))
    if rule.reverse_only:
        return _apply_reverse_only(rule, xs)
    if rule.user_functions and (tracers := captured_tracers(rule)):
        # The captured tracers become inputs: all inputs must vary over the same mesh axes.
        axes = frozenset().union(*map(varies, tracers))
        xs = [varying(x, axes) for x in xs]
        lift = lift_value if rule in local_list("lifting") else lift_captured
        rule, captured = lift(rule, xs)
        xs = [*xs, *captured]  # the captured ones keep the types at which the maps were traced
    return list(primal_p.bind(*xs, rule=rule))


def _with_unvarying_inputs(rule: Rule, shared: Sequence[frozenset[Any]]) -> Rule:
    """The rule for inputs that do not vary over some mesh axes of shard_map (`shared`).

    JAX sums the cotangent of such an input over these axes. If the author has summed it already, as
    `jax.custom_vjp` demands, it is kept on the first device and zero on the others.
    """

    def linearize(*xs: Any, **options: Any) -> Any:
        assert rule.linearize is not None
        linearized = rule.linearize(*xs, **options)
        pull: Any = linearized.cotangent  # so that the closure keeps no arrays of `linearized`

        def summed_once(saved: Any, cts: Any) -> list[Any]:
            result = list(pull(saved, cts))
            for i, axes in enumerate(shared):
                ct = result[i]
                summed = axes - varies(ct) if hasattr(ct, "dtype") else ()
                first = [jax.lax.axis_index(axis) == 0 for axis in sorted(summed)]
                if first:
                    result[i] = jnp.where(jnp.stack(first).all(), ct, jnp.zeros_like(ct))
            return result

        return replace(linearized, cotangent=summed_once)

    return replace(rule, linearize=linearize)


def attempt(fun: Callable[..., list[Any]], *xs: Any) -> list[Any]:
    """`fun(*xs)`; errors of the rules in it are raised at once, not when the result is lowered."""
    closed = jax.make_jaxpr(fun)(*xs)
    for _ in jaxprs.equations(closed, within_rules=True):  # traces them all
        pass
    return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs))


def _primal_dce(used: list[bool], *live_and_eqn: Any) -> tuple[list[bool], Any]:
    """Dead code elimination: f replaces fwd if no extra is used. All inputs are kept.

    JAX 0.12 passes which inputs are live before the equation.
    """
    eqn = live_and_eqn[-1]
    if not any(used):
        return [False] * len(eqn.invars), None
    count = len(used) - eqn.params["rule"].extras if "extras" in eqn.params else len(used)
    if not any(used[count:]):
        params = {name: value for name, value in eqn.params.items() if name != "extras"}
        eqn = eqn.replace(outvars=eqn.outvars[:count], params=params)
    return [True] * len(eqn.invars), eqn


def _primal_jvp(xs: Any, dxs: Any, *, rule: Rule, extras: bool = False) -> tuple[Any, Any]:
    if extras:
        return _forward_jvp(xs, dxs, rule)
    given, xs = _perturbed(rule, dxs), as_arrays(xs)
    if not any(given):
        ys = primal_p.bind(*xs, rule=rule)
        return ys, [_zero(y) for y in ys]
    if isinstance(rule, ValueLiftedRule):
        rule, inputs = rule.lift(xs)
        dxs = [dxs[x] if isinstance(x, int) else _zero(x) for x in inputs]
        xs, given = [xs[x] if isinstance(x, int) else x for x in inputs], _perturbed(rule, dxs)
    ys, maps, saved = forward_pass(rule, xs, given)
    return ys, _bind_tangent(maps, ys, saved, dxs, given)


def _forward_jvp(xs: Any, dxs: Any, rule: Any) -> tuple[list[Any], list[Any]]:
    """The jvp by the rule for the outputs, through the forward pass's code for the extras."""
    given, out = _perturbed(rule, dxs), primal_p.bind(*xs, rule=rule, extras=True)
    if not any(given):
        return out, [_zero(y) for y in out]
    n = len(out) - rule.extras
    dys = _bind_tangent(rule, out[:n], rule.saved(xs, out[:n], out[n:]), dxs, given)
    run = lambda *xs, rule: eval_forward(rule, xs)[n:]
    tangents = [dx if g else _zero(x) for x, dx, g in zip(xs, dxs, given, strict=True)]
    return out, [*dys, *_jvp_where_perturbed(run, xs, tangents, {"rule": rule})[1]]


def _value_jvp(operands: Any, tangents: Any, *, rule: LinearizedRule, xs: int) -> Any:
    """The jvp by the rule; the code that computed the values is not differentiated."""
    given = _perturbed(rule, tangents[:xs])
    if rule.perturbed is not None:
        assert rule.whole is not None
        wanted = tuple([g or p for g, p in zip(given, rule.perturbed, strict=True)])
        if wanted != rule.perturbed:  # its maps are not valid for some of these inputs
            ys, maps, saved = forward_pass(rule.whole, operands[:xs], wanted)
            return ys, _bind_tangent(maps, ys, saved, tangents[:xs], given)
    ys = value_p.bind(*operands, rule=rule, xs=xs)
    if not any(given):
        return ys, [_zero(y) for y in ys]
    saved = rule.saved(operands[:xs], ys, operands[xs + len(ys) :])
    return ys, _bind_tangent(rule, ys, saved, tangents[:xs], given)


def _perturbed(rule: Rule, dxs: Any) -> Mask:
    given = tuple([_carries(dx) and i not in rule.nondifferentiable for i, dx in enumerate(dxs)])
    if isinstance(rule, TracedRule) and any(given[i] for i in rule.closed_over):
        raise closed_over_error(rule.name)
    return given


def _bind_tangent(maps: Rule, ys: Any, saved: Any, dxs: Any, given: Mask) -> list[Any]:
    axes = frozenset().union(*map(varies, ys))
    moving = [varying(dx, axes) for dx, g in zip(dxs, given, strict=True) if g]
    operands, likes = [*saved, *moving], tuple(without_none(likes_of(ys)))
    params: dict[str, Any] = {"rule": maps, "given": given, "ys": likes}
    dys = iter(tangent_p.bind(*operands, **params))
    return [next(dys) if is_inexact(y) else _zero(y) for y in ys]


def _zero(y: Any) -> Any:
    return ad.Zero(jax.typeof(y).to_tangent_aval())


def _carries(dx: Any) -> bool:
    return type(dx) is not ad.Zero and getattr(dx, "dtype", None) != jax.dtypes.float0


def _tangent_jvp(operands: Any, tangents: Any, *, rule: Rule, given: Mask, ys: Any) -> Any:
    """The jvp: linear in the tangents, plus the derivative of the Python map in the residuals."""
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
    return out, [reduce(ad.add_tangents, terms) for terms in zip(*parts, strict=True)]


def _cotangent_jvp(operands: Any, tangents: Any, **params: Any) -> Any:
    """The jvp of the Python map, in residuals and cotangents; it may be nonlinear in the latter."""
    moves = any(_carries(dv) for dv in tangents)
    if moves and flow_of(params["rule"]) is not None:  # jvp computes the value at no extra cost
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
    return _jvp_where_perturbed(run, operands, tangents, params)


def _jvp_where_perturbed(
    run: Any, operands: Any, tangents: Any, params: dict[str, Any]
) -> tuple[Any, Any]:
    """The jvp of `run` in the operands whose tangent is not a symbolic zero."""
    moving = [i for i, dx in enumerate(tangents) if _carries(dx)]
    at = lambda *changed: run(*replaced_at(operands, moving, changed), **params)
    steps = [varying(tangents[i], varies(operands[i])) for i in moving]
    return jax.jvp(at, [operands[i] for i in moving], steps)


def _tangent_transpose(cts: Any, *operands: Any, rule: Rule, given: Mask, ys: Any) -> list[Any]:
    n = len(operands) - sum(given)
    present = tuple([type(ct) is not ad.Zero for ct in cts])
    if not any(present):
        return [None] * len(operands)
    params = {"wanted": given, "xs": tuple([v.aval for v in operands[n:]]), "ys": ys}
    return [None] * n + _bind_cotangent(rule, operands[:n], cts, present, **params)


def _bind_cotangent(
    maps: Rule, saved: Sequence[Any], cts: Any, given: Mask, **params: Any
) -> list[Any]:
    """The cotangent primitive, at the cotangents that are given: not the symbolic zeros."""
    return list(cotangent_p.bind(*saved, *compress(cts, given), rule=maps, given=given, **params))


def _cotangent_transpose(
    dxs: Any, *operands: Any, rule: Rule, given: Mask, wanted: Mask, xs: Any, ys: Any
) -> list[Any]:
    n, full = len(operands) - sum(given), spread(dxs, wanted)
    moving = tuple([dx is not None and type(dx) is not ad.Zero for dx in full])
    if not any(moving):
        return [None] * len(operands)
    present = [dx for dx, m in zip(full, moving, strict=True) if m]
    dys = tangent_p.bind(*operands[:n], *present, rule=rule, given=moving, ys=ys)
    return [None] * n + [dy for dy, g in zip(dys, given, strict=True) if g]


def _primal_transpose(cts: Any, *xs: Any, rule: Rule, extras: bool = False) -> list[Any]:
    """The transpose of a rule inside a linear function: its pullback, linearized at zero."""
    unknown = tuple([ad.is_undefined_primal(x) for x in xs])
    own = isinstance(rule, ValueLiftedRule) or rule.origin in local_list("linearizing")
    if extras or own:
        # A linear function that its own rule calls: transposing by the rule would recurse without
        # end, so the primal's code is transposed.
        likes = [struct_of(x.aval) for x, u in zip(xs, unknown, strict=True) if u]
        at = lambda moved: replaced_where(xs, unknown, moved)
        run = lambda *moved: eval_primal(*at(moved), rule=rule, extras=extras)
        transposed = jax.linear_transpose(run, *likes)
        return spread(transposed([ad.instantiate_zeros(ct) for ct in cts]), unknown)
    point = [zeros_of(x.aval) if u else x for x, u in zip(xs, unknown, strict=True)]
    check_linear(rule, point, unknown)
    ys, maps, saved = forward_pass(rule, point)
    cts = [ct for ct, y in zip(cts, ys, strict=True) if is_inexact(y)]
    given = tuple([type(ct) is not ad.Zero for ct in cts])
    if not any(given):
        return [None] * len(xs)
    avals = tuple([x.aval for x, u in zip(xs, unknown, strict=True) if u])
    params = {"wanted": unknown, "xs": avals, "ys": tuple(without_none(likes_of(ys)))}
    return spread(_bind_cotangent(maps, saved, cts, given, **params), unknown)


ad.primitive_jvps[primal_p] = mortal(_primal_jvp)
pe.dce_rules[primal_p] = _primal_dce
ad.primitive_jvps[value_p] = mortal(_value_jvp)
ad.primitive_jvps[tangent_p] = mortal(_tangent_jvp)
ad.primitive_jvps[cotangent_p] = mortal(_cotangent_jvp)
ad.primitive_transposes[primal_p] = mortal(_primal_transpose)
ad.primitive_transposes[tangent_p] = mortal(_tangent_transpose)
ad.primitive_transposes[cotangent_p] = mortal(_cotangent_transpose)


def _apply_reverse_only(rule: Rule, xs: Sequence[Any]) -> list[Any]:
    """The edit as a `custom_vjp`; fwd applies the edit itself, so that second order has it, too."""
    lifts = rule.user_functions and captured_tracers(rule)
    rule, captured = lift_captured(rule, xs) if lifts else (rule, [])

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
