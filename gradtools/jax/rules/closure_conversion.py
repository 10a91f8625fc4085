"""Closure conversion: arrays that a rule closes over become its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from gradtools.jax import reachability
from gradtools.jax.rules.linearizing import hoist, linearized_rule, local_list, pushed_on
from gradtools.jax.rules.primitives import LinearizedRule, TracedRule, flow_of
from gradtools.jax.trees import all_known, is_inexact, zeros_of
from gradtools.rules import Rule, captured_objects, closed_over_error


def captured_tracers(rule: Rule) -> list[Any]:
    """The tracers that the user's functions of a rule close over, if a trace is running."""
    if not reachability.within_a_trace():
        return []
    return list(
        captured_objects(rule.user_functions, lambda x: isinstance(x, jax.core.Tracer), jax.Array)
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ValueLiftedRule(TracedRule):
    """A rule whose primal has been lifted, but not its maps.

    Attributes:
        lift: `lift(xs)` returns the rule with its maps lifted, too, and one entry for each of its
            inputs: the position in `xs`, or the captured array itself.
    """

    lift: Callable[[Sequence[Any]], tuple[Rule, list[Any]]]


def lift_value(rule: Rule, xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
    """Lifts the primal only, for a rule whose maps apply the rule itself; the maps follow later."""
    n = len(xs)
    hoisted, consts = hoist(lambda *a: list(rule.primal(*a)), *xs)
    at = {id(c): n + i for i, c in enumerate(consts)}

    def lift(xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
        # Arrays that the primal captured are taken from xs: they may have been batched since, or
        # belong to another trace.
        lifted, captured = lift_captured(rule, xs[:n], differentiated=True)
        return lifted, [*range(n), *[at.get(id(c), c) for c in captured]]

    lifted = ValueLiftedRule.of(
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
    """The rule with the arrays it closes over appended to its inputs, and those arrays.

    Each map is traced with all tangents. A rule that closes over nothing is returned unchanged.

    Args:
        rule: The rule.
        xs: Its inputs.
        differentiated: Whether concrete inputs are differentiated, too.
    """
    n, consts = len(xs), list[Any]()

    def lift(fun: Any, *examples: Any) -> Any:
        if fun is None:
            return None
        hoisted, result = hoist(fun, *examples)
        start, stop = len(consts), len(consts) + len(result)
        consts.extend(result)
        return lambda own, *args: hoisted(own[start:stop], *args)

    with pushed_on(local_list("lifting"), rule):
        primal = lift(lambda *a: list(rule.primal(*a)), *xs)
        anyway = differentiated or rule.reverse_only
        moving = [
            is_inexact(x) and i not in rule.nondifferentiable and (anyway or not all_known([x]))
            for i, x in enumerate(xs)
        ]  # concrete inputs are not differentiated, except by an edit, which records what it cuts
        flow = primal if flow_of(rule) is rule.primal else lift(flow_of(rule), *xs)
        if not any(moving):
            return (rule, []) if not consts else _lifted(rule, n, consts, primal, flow)
        maps = rule if rule.reverse_only else linearized_rule(rule, xs)
        both, extras = (
            (maps.forward, maps.extras) if isinstance(maps, LinearizedRule) else (None, 0)
        )
        results = jax.make_jaxpr(both or partial(primal, consts))(*xs).out_avals
        ys, avals = results[: len(results) - extras], [*map(jax.typeof, xs), *results]
        zeros = [zeros_of(aval) for aval in avals]
        saved = [zeros_of(aval) for aval in maps.saved(avals[:n], ys, results[len(ys) :])]
        dxs = [z if m else None for z, m in zip(zeros, moving, strict=False)]
        cts = [z for z in zeros[n : n + len(ys)] if is_inexact(z) or rule.reverse_only]
        forward = lift(both, *xs)
        tangent = lift(maps.tangent, saved, dxs)
        cotangent = lift(maps.cotangent, saved, cts)
    if not consts:
        return rule, []
    return _lifted(maps, n, consts, primal, flow, forward, tangent, cotangent, dxs, cts)


def _lifted(
    rule: Rule,
    n: int,
    consts: list[Any],
    primal: Any,
    flow: Any,
    forward: Any = None,
    tangent: Any = None,
    cotangent: Any = None,
    dxs: Sequence[Any] = (),
    cts: Sequence[Any] = (),
) -> tuple[Rule, list[Any]]:
    """The rule of these lifted maps, which take the captured arrays first."""
    count, more = len(consts), dict[str, Any]()
    positions = range(n) if rule.saves is None else rule.saves
    saves = [i if i < n else i + count for i in positions]
    dxs, cts = ([None if x is None else jax.typeof(x) for x in xs] for xs in (dxs, cts))

    def run_tangent(a: Any, v: Any) -> list[Any]:
        if tangent is None:  # no input moves but a captured one
            raise closed_over_error(rule.name)
        return tangent(a[len(saves) :], list(a[: len(saves)]), _zeros_for(v[:n], dxs))

    def run_cotangent(a: Any, v: Any) -> list[Any]:
        result = cotangent(a[len(saves) :], list(a[: len(saves)]), _zeros_for(v, cts))
        return [*result, *([None] * count)]

    if isinstance(rule, LinearizedRule):
        more["forward"] = lambda *a: forward(a[n:], *a[:n])
    if flow_of(rule) is not None:
        more["flow"] = lambda *a: flow(a[n:], *a[:n])
    lifted = replace(
        rule if isinstance(rule, TracedRule) else TracedRule.of(rule),
        primal=lambda *a: primal(a[n:], *a[:n]),
        tangent=run_tangent if tangent or not cotangent else None,
        cotangent=cotangent and run_cotangent,
        linearize=None if cotangent else rule.linearize,
        saves=(*saves, *range(n, n + count)),
        closed_over=tuple(range(n, n + count)),
        user_functions=(),
        **more,
    )
    return lifted, consts


def _zeros_for(values: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
    """`values` with zeros for None wherever `examples` has an array, and None elsewhere."""
    return [
        None if e is None else zeros_of(e) if v is None else v
        for v, e in zip(values, examples, strict=True)
    ]
