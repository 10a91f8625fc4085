"""Linearizes a rule: creates jvp and vjp maps whose residuals are explicit inputs.

Cotangents in JAX are the conjugates of cotangents in gradtools. A linearized rule uses JAX's
convention. The function `_native` converts the maps of a rule to this convention.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.errors import GradtoolsError
from gradtools.jax import reachability
from gradtools.jax.jaxprs import traced
from gradtools.jax.known_errors import READS_A_VALUE
from gradtools.jax.rules.checking import loss_of, refuse_loss
from gradtools.jax.rules.primitives import (
    Mask,
    TracedRule,
    eval_forward,
    flow_of,
    is_linearized,
    memoized,
    primal_p,
    value_p,
)
from gradtools.jax.rules.transposing import NOT_LINEAR, transpose_map
from gradtools.jax.shardings import varies
from gradtools.jax.trees import (
    all_known,
    conj,
    filled,
    is_inexact,
    likes_of,
    struct_of,
    without_none,
    zeros_of,
)
from gradtools.rules import (
    Entries,
    JvpRule,
    Linearized,
    Rule,
    captured_objects,
    closed_over_error,
    spread,
)

_local = threading.local()


def local_list(what: str) -> list[Any]:
    """Returns this thread's stack of the rules that are being lifted or linearized.

    what: "lifting" (a stack of rules) or "linearizing" (a stack of the rules' origins).
    """
    return _local.__dict__.setdefault(what, [])


@contextmanager
def pushed_on(stack: list[Any], entry: Any) -> Iterator[None]:
    stack.append(entry)
    try:
        yield
    finally:
        stack.pop()


def forward_pass(
    rule: Rule, xs: Sequence[Any], given: Mask | None = None
) -> tuple[list[Any], Rule, list[Any]]:
    """Returns the outputs, the linearized rule, and the residuals of its maps.

    The operations of the forward pass are inlined into the surrounding program: a loop stores its
    loop-invariant residuals once, and extras are differentiated like any other value. The outputs
    pass through the value primitive, whose derivative is the rule.
    """
    if rule.linearize is None and not isinstance(rule, JvpRule) and not is_linearized(rule):
        ys = primal_p.bind(*xs, rule=rule)  # the residuals are inputs and outputs
        key = "maps", *[jax.typeof(x) for x in (*xs, *ys)]

        def make() -> TracedRule:
            return _linearized(rule, _native(rule, rule.linearized_from(xs, list(ys)), xs))

        maps = memoized(rule, key, make)
        return ys, maps, maps.saved(xs, ys)
    if is_linearized(rule) or any(isinstance(x, jax.core.Tracer) for x in xs):
        # fwd is traced first to determine whether the rule has extras. Only extras are
        # differentiated through the code of fwd, which may contain callbacks.
        maps = linearized_rule(rule, xs, given)
        out = eval_forward(maps, xs)
    else:  # fwd may branch on the values of concrete inputs
        forward, linearized = _forward_of(rule, given)
        out = forward(*xs)
        maps = linearized()
    count = len(out) - maps.extras
    raw, extras = [jax.lax.stop_gradient(y) for y in out[:count]], out[count:]
    ys = value_p.bind(*xs, *raw, *extras, rule=maps, xs=len(xs))
    return ys, maps, maps.saved(xs, ys, extras)


def linearized_rule(rule: Rule, xs: Sequence[Any], perturbed: Mask | None = None) -> Any:
    """Returns the rule with both maps and explicit residuals.

    The maps of the result follow JAX's convention: cotangents are conjugated, and only floating
    outputs have cotangents and tangents.

    perturbed: For a rule with `symbolic_zeros`, whether each input is differentiated. The maps are
        then valid only for the differentiated inputs.
    """
    if is_linearized(rule):
        return rule
    forward, linearized = _forward_of(rule, perturbed)
    program, consts = traced(forward, *map(jax.typeof, xs))
    return linearized(lambda *xs: program(consts, *xs))


def _forward_of(rule: Rule, perturbed: Mask | None) -> tuple[Callable[..., list[Any]], Any]:
    """Returns the forward pass, and a function that then returns the linearized rule.

    The forward pass returns outputs and extras. The second function may be called with a function
    that repeats the forward pass.
    """
    perturbed, made = perturbed if rule.symbolic_zeros else None, list[Linearized]()

    def forward(*xs: Any) -> list[Any]:
        with pushed_on(local_list("linearizing"), rule.origin):
            linearized = None
            if isinstance(rule, JvpRule) and rule.linearize is None:
                linearized = _split(rule, xs, perturbed)
            if linearized is None:
                linearized = _native(rule, rule.at(*xs, perturbed=perturbed), xs, perturbed)
        made[:] = [linearized.without_arrays()]  # tracers would leak
        return [*linearized.ys, *linearized.extras]

    return forward, lambda repeated=None: _linearized(rule, made[0], perturbed, repeated)


def _linearized(
    rule: Rule, made: Linearized, perturbed: Mask | None = None, forward: Any = None
) -> TracedRule:
    """Returns the rule with the maps of one evaluation, `made`.

    `forward` repeats the evaluation.
    """
    return TracedRule.of(
        rule,
        tangent=made.tangent,
        cotangent=made.cotangent,
        saves=made.saves,
        linearize=None,
        forward=forward,
        extras=len(made.extras),
        perturbed=perturbed,
        whole=None if perturbed is None else rule,
    )


def _native(
    rule: Rule, linearized: Linearized, xs: Sequence[Any], perturbed: Mask | None = None
) -> Linearized:
    """Converts the maps to JAX's convention. A missing map is the transpose of the other map."""
    given_tangent, given_cotangent = linearized.tangent, linearized.cotangent
    like_xs, like_ys = likes_of(xs), likes_of(linearized.ys)
    signature = *map(jax.typeof, xs), perturbed
    inexact = [like is not None for like in like_ys]
    moving = differentiated_inputs(rule, like_xs, perturbed)

    def tangent(saved: Entries, dxs: Entries) -> list[Any]:
        if given_tangent is not None:
            if rule.fills("tangent"):
                dxs = filled(dxs, like_xs)
            pairs = zip(given_tangent(saved, dxs), like_ys, strict=True)
            return [_dense(dy, like) for dy, like in pairs if like is not None]

        def pull(*cts: Any) -> list[Any]:
            pairs = zip(cotangent(saved, cts), dxs, strict=True)
            return [None if dx is None else ct for ct, dx in pairs]

        examples = without_none(like_ys)
        present = lambda *cts: without_none(pull(*cts))
        refuse_loss(rule, loss_of(rule, "cotangent", signature, present, examples))
        return transpose_map(rule, "cotangent", present, examples, without_none(dxs))

    def cotangent(saved: Entries, cts: Entries) -> list[Any]:
        if given_cotangent is not None:
            if rule.fills("cotangent"):
                cts = filled(cts, without_none(like_ys))
            conjugated = spread([None if ct is None else conj(ct) for ct in cts], inexact)
            triples = zip(given_cotangent(saved, conjugated), like_xs, moving, strict=True)
            return [conj(_dense(ct, like)) if moves else None for ct, like, moves in triples]

        def push(*dxs: Any) -> list[Any]:
            return tangent(saved, spread(dxs, moving))

        examples = [like for like, m in zip(like_xs, moving, strict=True) if m]
        refuse_loss(rule, loss_of(rule, "tangent", signature, push, examples))
        full = filled(cts, without_none(like_ys))
        return spread(transpose_map(rule, "tangent", push, examples, full), moving)

    return replace(linearized, tangent=tangent, cotangent=cotangent)


def _split(rule: JvpRule, xs: Sequence[Any], perturbed: Mask | None = None) -> Linearized | None:
    """Splits a forward rule into a forward pass and a linear map of its residuals.

    The transposition of the rule evaluates all operations that do not depend on a tangent. The
    values that the transpose closes over are the residuals, which are stored as extras (partial
    evaluation, as in Radul et al., You only linearize once, 2023).
    """
    full_like = likes_of(xs)
    mask = differentiated_inputs(rule, full_like, perturbed)
    like_xs = [like for like, m in zip(full_like, mask, strict=True) if m]
    ys: list[Any] = []
    staged: list[bool] = []

    def evaluated(*dxs: Any) -> tuple[list[Any], list[Any]]:
        full = spread(dxs, mask)
        values, dys = rule.jvp(xs, filled(full, full_like) if rule.fills("tangent") else full)
        pairs = zip(dys, likes_of(values), strict=True)
        return values, [_dense(dy, y) for dy, y in pairs if y is not None]

    def push(*dxs: Any) -> list[Any]:
        ys[:], dys = evaluated(*dxs)
        kinds = {type(dx) for dx in dxs if isinstance(dx, jax.core.Tracer)}
        staged[:] = [type(y) in kinds for y in ys]  # values that depend on a tangent
        return dys

    if any(varies(x) for x in xs):
        return None
    tangents = lambda *dxs: evaluated(*dxs)[1]
    if loss_of(rule, "tangent", (*map(jax.typeof, xs), perturbed), tangents, like_xs):
        return None
    try:
        pull = jax.linear_transpose(push, *map(struct_of, like_xs))
        if any(staged):
            return None
        like_ys = without_none(likes_of(ys))
        back, consts = traced(lambda *cts: list(pull(list(cts))), *map(zeros_of, like_ys))
    except (*READS_A_VALUE, jax.errors.JaxRuntimeError):  # memory exhausted
        raise
    except (*NOT_LINEAR, GradtoolsError):
        return None  # forward mode needs no transpose; reverse mode will raise an error

    def tangent(saved: Entries, dxs: Entries) -> list[Any]:
        full = filled([dx for dx, m in zip(dxs, mask, strict=True) if m], like_xs)
        return transpose_map(rule, "tangent", lambda *cts: back(saved, *cts), like_ys, full)

    def cotangent(saved: Entries, cts: Entries) -> list[Any]:
        return spread(back(saved, *filled(cts, like_ys)), mask)

    places = {id(x): i for i, x in reversed(list(enumerate([*xs, *ys])))}
    own = list({id(c): c for c in consts if id(c) not in places}.values())
    places |= {id(c): len(xs) + len(ys) + k for k, c in enumerate(own)}
    return Linearized(list(ys), own, tuple([places[id(c)] for c in consts]), tangent, cotangent)


def differentiated_inputs(rule: Rule, likes: Sequence[Any], perturbed: Mask | None) -> list[bool]:
    """Returns, for each input, whether it is differentiated."""
    moving = perturbed or [like is not None for like in likes]
    return [m and i not in rule.nondifferentiable for i, m in enumerate(moving)]


def _dense(value: Any, like: Any) -> Any:
    """Returns a result of a map as an array; None is replaced by zeros."""
    return zeros_of(like) if value is None else jnp.asarray(value, like.dtype)


# --- closure conversion: arrays that a rule closes over become its inputs ------------------------
#
# A rule may run after its trace has ended, so its closure must not contain tracers of the trace.


def captured_tracers(rule: Rule) -> list[Any]:
    """Returns the tracers that a rule's user functions close over, if a trace is running."""
    is_tracer = lambda x: isinstance(x, jax.core.Tracer)
    functions = rule.user_functions if reachability.within_a_trace() else ()
    return list(captured_objects(functions, is_tracer, jax.Array))


def lift_value(rule: Rule, xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
    """Hoists the closed-over arrays of the primal only. `lift` converts the maps later."""
    n = len(xs)
    hoisted, consts = traced(lambda *a: list(rule.primal(*a)), *xs)

    def lift(xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
        # The arrays that the primal captured may have been batched or belong to another trace, so
        # entries of xs replace these arrays. The closure references the captured arrays, because a
        # new array may have the id of a deleted array.
        at = {id(c): n + i for i, c in enumerate(consts)}
        lifted, captured = lift_captured(rule, xs[:n], differentiated=True)
        return lifted, [*range(n), *[at.get(id(c), c) for c in captured]]

    lifted = TracedRule.of(
        rule,
        primal=lambda *a: hoisted(a[n:], *a[:n]),
        user_functions=(),
        closed_over=tuple(range(n, n + len(consts))),
        flow=None,
        lift=lift,
    )
    return lifted, consts


def lift_captured(
    rule: Rule, xs: Sequence[Any], differentiated: bool = False
) -> tuple[Rule, list[Any]]:
    """Returns a rule that takes its closed-over arrays as additional inputs, and these arrays.

    Each map is traced with tangents or cotangents of all differentiated inputs and outputs. A rule
    that closes over no arrays is returned unchanged.

    Args:
        rule: The rule.
        xs: The inputs of the rule.
        differentiated: Whether concrete inputs are differentiated too.
    """
    n, consts = len(xs), list[Any]()

    def lift(fun: Any, *examples: Any) -> Any:
        if fun is None:
            return None
        hoisted, result = traced(fun, *examples)
        start, stop = len(consts), len(consts) + len(result)
        consts.extend(result)
        return lambda own, *args: hoisted(own[start:stop], *args)

    def of_inputs(fun: Any) -> Any:
        lifted = lift(fun, *xs)
        return None if lifted is None else lambda *a: lifted(a[n:], *a[:n])

    maps, extras, more = rule, 0, dict[str, Any]()
    tangent: Any = None
    cotangent: Any = None
    dxs, cts = list[Any](), list[Any]()
    with pushed_on(local_list("lifting"), rule):
        primal = of_inputs(lambda *a: list(rule.primal(*a)))
        anyway = differentiated or rule.reverse_only
        moving = [
            is_inexact(x) and i not in rule.nondifferentiable and (anyway or not all_known([x]))
            for i, x in enumerate(xs)
        ]  # concrete inputs are differentiated only if the rule is an edit
        flow = primal if flow_of(rule) is rule.primal else of_inputs(flow_of(rule))
        if any(moving):
            maps = rule if rule.reverse_only else linearized_rule(rule, xs)
            if isinstance(maps, TracedRule) and maps.extras is not None:
                extras, more["forward"] = maps.extras, of_inputs(maps.forward)
            run = more.get("forward", primal)
            results = jax.make_jaxpr(lambda *a: run(*a, *consts))(*xs).out_avals
            ys, avals = results[: len(results) - extras], [*map(jax.typeof, xs), *results]
            zeros = [zeros_of(aval) for aval in avals]
            saved = [zeros_of(aval) for aval in maps.saved(avals[:n], ys, results[len(ys) :])]
            dxs = [z if m else None for z, m in zip(zeros, moving, strict=False)]
            cts = [z for z in zeros[n : n + len(ys)] if is_inexact(z) or rule.reverse_only]
            tangent = lift(maps.tangent, saved, dxs)
            cotangent = lift(maps.cotangent, saved, cts)
    if not consts:
        return rule, []
    # The maps must not reference the rule, whose functions close over the tracers.
    name, count = rule.name, len(consts)
    positions = range(n) if maps.saves is None else maps.saves
    saves = [i if i < n else i + count for i in positions]
    dxs, cts = ([None if x is None else jax.typeof(x) for x in vs] for vs in (dxs, cts))

    def run_tangent(a: Any, v: Any) -> list[Any]:
        if tangent is None:  # only captured inputs are differentiated
            raise closed_over_error(name)
        return tangent(a[len(saves) :], list(a[: len(saves)]), _zeros_for(v[:n], dxs))

    def run_cotangent(a: Any, v: Any) -> list[Any]:
        result = cotangent(a[len(saves) :], list(a[: len(saves)]), _zeros_for(v, cts))
        return [*result, *([None] * count)]

    lifted = replace(
        maps if isinstance(maps, TracedRule) else TracedRule.of(maps),
        primal=primal,
        flow=flow,
        tangent=run_tangent if tangent or not cotangent else None,
        cotangent=run_cotangent if cotangent else None,
        linearize=None if cotangent else maps.linearize,
        saves=(*saves, *range(n, n + count)),
        closed_over=tuple(range(n, n + count)),
        user_functions=(),
        **more,
    )
    return lifted, consts


def _zeros_for(values: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
    """Replaces None in `values` with zeros. Where `examples` contains None, the result is None."""
    return [
        None if e is None else zeros_of(e) if v is None else v
        for v, e in zip(values, examples, strict=True)
    ]
