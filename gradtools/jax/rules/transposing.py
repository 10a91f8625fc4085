"""Computes a missing jvp or vjp map of a rule by transposing the other map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from gradtools.errors import GradtoolsError, is_of
from gradtools.jax import reachability
from gradtools.jax.known_errors import READS_A_VALUE
from gradtools.jax.rules.checking import check_linear
from gradtools.jax.rules.primitives import primal_p
from gradtools.jax.shardings import varies, varying
from gradtools.jax.trees import conj, struct_of, without_none, zero_cotangent, zeros_of
from gradtools.rules import Rule

NOT_LINEAR = (NotImplementedError, TypeError, ValueError, AssertionError, RuntimeError)


def transpose_map(rule: Rule, which: str, linear: Any, examples: Any, values: Any) -> list[Any]:
    """Applies the transpose of `linear`, a map of arrays with the avals `examples`, to `values`."""
    try:
        if any(varies(v) for v in (*values, *examples)):
            return _transposed_by_vjp(linear, examples, values)
        return list(jax.linear_transpose(linear, *map(struct_of, examples))(list(values)))
    except READS_A_VALUE:
        raise
    except RecursionError as error:
        raise GradtoolsError(
            f"rule {rule.name!r}: its {which} map calls the function itself, directly or through "
            f"the rule of another function, so transposing the {which} map for the other mode "
            "recurses infinitely. Give the missing map as well: defvjp(fwd, bwd) if there is a "
            "forward rule, defjvp(rule) if there is a reverse rule."
        ) from error
    except NOT_LINEAR as error:
        if not is_of("jax", error):
            raise
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode is derived by transposing its {which} map, "
            f"but JAX cannot transpose it: a {which} map must be linear in its {which}s. "
            f"Give the missing map as well, or make this map linear. JAX says: {error}"
        ) from error


def _transposed_by_vjp(linear: Any, examples: Any, values: Any) -> list[Any]:
    """Applies the transpose as the pullback at zero, for values that vary over axes of shard_map.

    `jax.linear_transpose` cannot express varying types (check_vma=True). The map is linear if the
    jaxpr of the pullback does not depend on the point; otherwise an error is raised.
    """
    zeros = [zeros_of(e) for e in examples]

    def pulled(at: Any, cts: Any) -> Any:
        outs, pullback = jax.vjp(lambda *v: linear(*v), *at)
        return pullback([varying(ct, varies(y)) for ct, y in zip(cts, outs, strict=True)])

    closed = jax.make_jaxpr(lambda *v: linear(*v))(*zeros)
    eqns = [e for e in closed.jaxpr.eqns if e.primitive.name != "pvary"]
    if [e.primitive for e in eqns] == [primal_p] and not eqns[0].params["rule"].contract:
        # The map is a single gradtools equation, such as the backward pass of a host function. The
        # linearity of the map is checked numerically, because its jaxpr is not known.
        moving = tuple([v not in closed.jaxpr.constvars for v in eqns[0].invars])
        likes = [zeros_of(v.aval.update(weak_type=False)) for v in eqns[0].invars]
        check_linear(eqns[0].params["rule"], likes, moving)
    else:
        flow = reachability.reached_matrix(jax.make_jaxpr(pulled)(zeros, list(values)), raw=True)
        if any(any(row[: len(zeros)]) for row in flow):
            raise ValueError("the derivative of the map depends on the point")
    return list(pulled(zeros, list(values)))


def transpose(
    rule: Rule, which: str, linear: Any, at: Sequence[Any], examples: Any, values: Any
) -> list[Any]:
    """Applies the transpose of `vs -> linear(at, *vs)` to `values`, in gradtools' convention."""

    def own(*vs: Any) -> list[Any]:
        return [conj(y) for y in linear(at, *map(conj, vs))]

    axes = frozenset().union(*map(varies, [*at, *values]))  # examples do not vary over mesh axes
    return transpose_map(rule, which, own, [jax.typeof(varying(x, axes)) for x in examples], values)


def pull(fun: Callable[..., list[Any]], xs: Sequence[Any], cts: Any) -> list[Any]:
    """Applies the pullback of `fun` at xs to `cts`, a list or a function of the outputs."""
    known = [] if callable(cts) else without_none(cts)
    axes = frozenset().union(*map(varies, [*xs, *known]))
    outs, pullback = jax.vjp(lambda *a: list(fun(*a)), *[varying(x, axes) for x in xs])
    pairs = zip(outs, cts(outs) if callable(cts) else cts, strict=True)
    full = [zero_cotangent(y) if ct is None else conj(varying(ct, axes)) for y, ct in pairs]
    return [conj(x) for x in pullback(full)]
