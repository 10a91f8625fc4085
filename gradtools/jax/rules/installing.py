"""Defines rules in JAX as primitives with a jvp (the tangent map) and a transpose.

JAX lets a function have a forward rule or a reverse rule, but not both (jax#3996). gradtools'
primitives support both:

    primal     y = f(x)            its jvp binds tangent, and either primal or value
    value      y = f(x)            y is known, from a forward pass that also returns extras
    tangent    dy = J(x) dx        linear in dx; its transpose evaluates x' = J(x)^T y'

A rule is *linearized* when it is first differentiated. Linearization determines the residuals of
the rule's maps, and derives a missing map by transposing the other map. The forward pass of a
linearized rule also returns residuals that are neither inputs nor outputs (*extras*). An extra is
differentiated through the code that computed the extra. An output is differentiated by the rule, at
every order. The jvp of the maps with respect to their residuals is the jvp of their Python code.
Unlike the rule of a `custom_jvp`, the rule of a primitive remains active inside of scan, cond,
remat and jit.

`primitives` defines the evaluation and batching of each primitive, `linearizing` defines the
linearization of a rule, and this module defines derivatives and transposes of the primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from gradtools.jax import jaxprs, shardings
from gradtools.jax._upstream import define_linearization, weakly_cached
from gradtools.jax.rules.checking import check_linear
from gradtools.jax.rules.linearizing import (
    captured_tracers,
    forward_pass,
    lift_captured,
    lift_value,
    local_list,
)
from gradtools.jax.rules.primitives import (
    Mask,
    TracedRule,
    as_arrays,
    eval_primal,
    eval_tangent,
    flow_of,
    memoized,
    primal_p,
    promoting,
    reverse_only_p,
    tangent_p,
    value_p,
)
from gradtools.jax.shardings import varies, varying
from gradtools.jax.trees import (
    conj,
    is_inexact,
    struct_of,
    without_none,
    zeros_of,
)
from gradtools.rules import Rule, closed_over_error, replaced_at, replaced_where, spread


def apply_rule(rule: Rule, *xs: Any) -> list[Any]:
    """Calls `rule.primal(*xs)`, whose derivatives of all orders are defined by the rule."""
    arrays = [  # arrays and tracers without a weak type are not converted
        x if isinstance(x, jax.Array) and not jax.typeof(x).weak_type else jnp.asarray(x)
        for x in xs
    ]
    axes = frozenset().union(*map(varies, arrays))  # the cast's transpose is a sum over devices
    xs = [varying(x, axes) for x in arrays] if axes else arrays
    shared = tuple([axes - varies(x) for x in arrays])
    if any(shared) and rule.contract is not None and rule.linearize is not None:
        rule = memoized(rule, ("shared", shared), lambda: _with_unvarying_inputs(rule, shared))
    if rule.reverse_only:
        return _apply_reverse_only(rule, xs)
    weakly_cached.add(type(rule))
    if rule.user_functions and (tracers := captured_tracers(rule)):
        # The captured tracers become inputs: all inputs must vary over the same mesh axes.
        axes = frozenset().union(*map(varies, tracers))
        xs = [varying(x, axes) for x in xs]
        lift = lift_value if rule in local_list("lifting") else lift_captured
        rule, captured = lift(rule, xs)
        xs = [*xs, *captured]  # the maps were traced with the types of `captured`
    return list(primal_p.bind(*xs, rule=rule))


def _with_unvarying_inputs(rule: Rule, shared: Sequence[frozenset[Any]]) -> Rule:
    """Adapts a rule to inputs that do not vary over some mesh axes of shard_map (`shared`).

    JAX sums the cotangents of these inputs over the axes. If the rule has already summed a
    cotangent, as `jax.custom_vjp` requires, the sum is divided by the number of devices.
    """

    def linearize(*xs: Any, **options: Any) -> Any:
        assert rule.linearize is not None
        linearized = rule.linearize(*xs, **options)
        pull: Any = linearized.cotangent  # so that the closure does not reference `linearized`

        def in_parts(saved: Any, cts: Any) -> list[Any]:
            result = list(pull(saved, cts))
            for i, axes in enumerate(shared):
                summed = axes - varies(result[i]) if hasattr(result[i], "dtype") else ()
                if summed:
                    result[i] = result[i] / jax.lax.axis_size(tuple(sorted(summed)))
            return result

        return replace(linearized, cotangent=in_parts)

    return replace(rule, linearize=linearize)


def attempt(fun: Callable[..., list[Any]], *xs: Any) -> list[Any]:
    """Calls `fun(*xs)`. Errors in rules are raised immediately instead of at lowering."""
    closed = jax.make_jaxpr(fun)(*xs)
    for _ in jaxprs.equations(closed, within_rules=True):  # traces all rules
        pass
    return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs))


def _linearize(carried: Sequence[bool], *xs: Any, rule: Rule) -> Any:
    """Returns the outputs, the mask of differentiable outputs, the residuals, and the tangent map.

    carried: Whether each input has a tangent.
    """
    xs, inputs = as_arrays(xs), range(len(xs))
    carried = [c and is_inexact(x) for c, x in zip(carried, xs, strict=True)]
    given = _perturbed(rule, carried, xs)
    if not any(given):
        ys = primal_p.bind(*xs, rule=rule)
        avals = [*map(jax.typeof, ys)]
        return ys, [False] * len(ys), [], lambda _, *dxs: [*map(_zero, avals)]
    if isinstance(rule, TracedRule) and rule.lift is not None:
        rule, inputs = rule.lift(xs)
        xs = [xs[x] if isinstance(x, int) else x for x in inputs]
        given = _perturbed(rule, [isinstance(x, int) and carried[x] for x in inputs], xs)
    places = [x for x, g in zip(inputs, given, strict=True) if g]
    ys, maps, saved = forward_pass(rule, xs, given)
    avals = [*map(jax.typeof, ys)]

    def tangent(saved: Any, *dxs: Any) -> list[Any]:
        return _bind_tangent(maps, avals, saved, [dxs[i] for i in places], given)

    return ys, [*map(is_inexact, ys)], saved, tangent


def _primal_jvp(xs: Any, dxs: Any, *, rule: Rule) -> tuple[Any, Any]:
    ys, _, saved, tangent = _linearize([*map(_carries, dxs)], *xs, rule=rule)
    return ys, tangent(saved, *dxs)


def _value_jvp(operands: Any, tangents: Any, *, rule: TracedRule, xs: int) -> Any:
    """Applies the jvp of the rule. The code that computed the outputs is not differentiated."""
    given = _perturbed(rule, [*map(_carries, tangents[:xs])], operands)
    moving = [dx for dx, g in zip(tangents, given, strict=False) if g]
    if rule.perturbed is not None:
        assert rule.whole is not None
        wanted = tuple([g or p for g, p in zip(given, rule.perturbed, strict=True)])
        if wanted != rule.perturbed:  # the maps are not valid for some of the differentiated inputs
            ys, maps, saved = forward_pass(rule.whole, operands[:xs], wanted)
            return ys, _bind_tangent(maps, [*map(jax.typeof, ys)], saved, moving, given)
    ys = value_p.bind(*operands, rule=rule, xs=xs)
    if not any(given):
        return ys, [_zero(jax.typeof(y)) for y in ys]
    saved = rule.saved(operands[:xs], ys, operands[xs + len(ys) :])
    return ys, _bind_tangent(rule, [*map(jax.typeof, ys)], saved, moving, given)


def _perturbed(rule: Rule, carried: Sequence[bool], xs: Sequence[Any]) -> Mask:
    given = tuple([c and i not in rule.nondifferentiable for i, c in enumerate(carried)])
    for i in rule.closed_over if isinstance(rule, TracedRule) else ():
        if given[i]:
            raise closed_over_error(rule.name, xs[i])
    return given


def _bind_tangent(maps: Rule, ys: Any, saved: Any, moving: Any, given: Mask) -> list[Any]:
    """Returns the tangents of outputs with avals ys, for the tangents of the given inputs."""
    axes = frozenset().union(*map(varies, ys))
    likes = tuple([y.update(weak_type=False) for y in ys if is_inexact(y)])
    moving = [varying(dx, axes) for dx in moving]
    dys = iter(tangent_p.bind(*saved, *moving, rule=maps, given=given, ys=likes))
    return [next(dys) if is_inexact(y) else _zero(y) for y in ys]


def _zero(aval: Any) -> Any:
    return ad.Zero(aval.to_tangent_aval())


def _carries(dx: Any) -> bool:
    return type(dx) is not ad.Zero and getattr(dx, "dtype", None) != jax.dtypes.float0


def _tangent_jvp(operands: Any, tangents: Any, *, rule: Rule, given: Mask, ys: Any) -> Any:
    """Computes the jvp of the tangent primitive with respect to tangents and residuals."""
    n = len(operands) - sum(given)
    params = {"rule": rule, "given": given, "ys": ys}
    out, parts = tangent_p.bind(*operands, **params), []
    if any(_carries(dv) for dv in tangents[n:]):
        pairs = zip(tangents[n:], operands[n:], strict=True)
        dvs = [varying(ad.instantiate_zeros(dv), varies(v)) for dv, v in pairs]
        parts.append(tangent_p.bind(*operands[:n], *dvs, **params))
    moving = [i for i, dx in enumerate(tangents[:n]) if _carries(dx)]
    if moving:
        sources = range(n) if rule.saves is None else rule.saves
        closed_over = rule.closed_over if isinstance(rule, TracedRule) else ()
        for i in moving:
            if sources[i] in closed_over:
                raise closed_over_error(rule.name, operands[i])
        at = lambda *changed: eval_tangent(*replaced_at(operands, moving, changed), **params)
        steps = [varying(tangents[i], varies(operands[i])) for i in moving]
        parts.append(jax.jvp(at, [operands[i] for i in moving], steps)[1])
    if not parts:
        return out, [_zero(jax.typeof(o)) for o in out]
    return out, [reduce(ad.add_tangents, terms) for terms in zip(*parts, strict=True)]


def _tangent_transpose(cts: Any, *operands: Any, rule: Rule, given: Mask, ys: Any) -> list[Any]:
    n = len(operands) - sum(given)
    likes = spread([v.aval for v in operands[n:]], given)
    return [None] * n + _pulled(rule, operands[:n], cts, likes)


def _pulled(maps: Rule, saved: Sequence[Any], cts: Any, likes: Sequence[Any]) -> list[Any]:
    """Applies the cotangent map of a rule to cotangents, which may be symbolic zeros.

    likes: For each input, the aval if the cotangent is needed, otherwise None.
    """
    wanted, present = without_none(likes), [type(ct) is not ad.Zero for ct in cts]
    if not any(present):
        return [None] * len(wanted)
    n, operands = len(saved), [*saved, *[ct for ct, p in zip(cts, present, strict=True) if p]]

    def run(*operands: Any) -> list[Any]:
        assert maps.cotangent is not None
        with promoting(maps):
            result = maps.cotangent(operands[:n], spread(operands[n:], present))
        pairs = zip(result, likes, strict=True)
        return [varying(ct, varies(x)) for ct, x in pairs if x is not None]

    operands = as_arrays(operands)
    if flow_of(maps) is None:
        return run(*operands)
    # Dead-code elimination removes results that are not needed, which XLA removes only under jit.
    closed = jax.make_jaxpr(run)(*operands)
    return jax.core.eval_jaxpr(jaxprs.live(closed.jaxpr), closed.consts, *operands)


def _primal_transpose(cts: Any, *xs: Any, rule: Rule) -> list[Any]:
    """Transposes a rule inside of a linear function, with the pullback of the rule at zero."""
    unknown = tuple([ad.is_undefined_primal(x) for x in xs])
    is_lifted = isinstance(rule, TracedRule) and rule.lift is not None
    if is_lifted or rule.origin in local_list("linearizing"):
        # The rule of a linear function may call the function itself. A transposition by the rule
        # would then recurse infinitely, so the code of the primal is transposed.
        likes = [struct_of(x.aval) for x, u in zip(xs, unknown, strict=True) if u]
        run = lambda *moved: eval_primal(*replaced_where(xs, unknown, moved), rule=rule)
        transposed = jax.linear_transpose(run, *likes)
        return spread(transposed([ad.instantiate_zeros(ct) for ct in cts]), unknown)
    point = [zeros_of(x.aval) if u else x for x, u in zip(xs, unknown, strict=True)]
    check_linear(rule, point, unknown)
    ys, maps, saved = forward_pass(rule, point)
    cts = [ct for ct, y in zip(cts, ys, strict=True) if is_inexact(y)]
    likes = [x.aval if u else None for x, u in zip(xs, unknown, strict=True)]
    return spread(_pulled(maps, saved, cts, likes), unknown)


ad.primitive_jvps[primal_p] = _primal_jvp
define_linearization(primal_p, _linearize)
ad.primitive_jvps[value_p] = _value_jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[primal_p] = _primal_transpose
ad.primitive_transposes[tangent_p] = _tangent_transpose


def _apply_reverse_only(rule: Rule, xs: Sequence[Any]) -> list[Any]:
    """Applies an edit as a `custom_vjp`. fwd applies the edit too, for second derivatives."""
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
