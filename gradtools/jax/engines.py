"""Computes vjp, jvp and linearize in JAX, and determines on which arguments the output depends.

JAX computes the derivatives, and this module conjugates JAX's pullback. The module `reachability`
determines from the jaxpr of f on which arguments the output depends. Under a trace, f is traced to
a jaxpr, and the jaxpr is differentiated. At concrete arrays, f is differentiated directly, and f is
traced only if the gradient of a whole argument is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.backend import Array, Evaluation, Fun, Staged
from gradtools.jax import jaxprs, reachability
from gradtools.jax._upstream import ClosedJaxpr, is_in_scope
from gradtools.jax.arrays import is_on_host
from gradtools.jax.known_errors import explained
from gradtools.jax.rules.primitives import reverse_only_p
from gradtools.jax.trees import LinearMap, all_known, conj, zeros_of

DERIVATIVE_SCOPE = "gradtools_derivative"
_UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.NonConcreteBooleanIndexError)


def vjp(fun: Fun, leaves: list[Array], *, groups: Sequence[int] | None, once: bool) -> Evaluation:
    """Evaluates fun once. The pullback returns None for a leaf on which no output depends."""
    caller, in_trace = _caller(fun), reachability.within_a_trace() or not all_known(leaves)
    with explained(caller):
        traced = _traced(fun, leaves) if in_trace and groups is not None else None
    run = fun if traced is None else _as_function(*traced)
    with explained(caller), jax.named_scope(DERIVATIVE_SCOPE):
        outs, native, extras = jax.vjp(run, *leaves, has_aux=True)
        _mark_passed(leaves, outs)
    likes = [jax.typeof(y) for y in outs]  # the pullback must not reference the outputs

    def pulled(native: Any, cts: Sequence[Array | None]) -> list[Array]:
        filled = [zeros_of(x) if ct is None else ct for ct, x in zip(cts, likes, strict=True)]
        with explained(caller), jax.named_scope(DERIVATIVE_SCOPE):
            return [conj(x) for x in native([conj(ct) for ct in filled])]

    pullback = LinearMap(pulled, native)
    evaluation = Evaluation(outs, extras, pullback, checked=False)
    if groups is None:
        return evaluation

    def of_connected(cts: Sequence[Array | None]) -> list[Array | None]:
        """Computes gradients. Traces fun if the gradients of a whole group of leaves are zero."""
        grads, ends, known = pullback(cts), [*accumulate(groups)], traced
        if known is None:
            parts = [grads[end - n : end] for end, n in zip(ends, groups, strict=True)]
            if in_trace or all(any(map(_is_nonzero, part)) for part in parts if part):
                return list(grads)
            known = _traced(fun, leaves)
        if known is None:
            evaluation.checked = False
            return list(grads)
        # the search also finds derivatives inside of cached jits
        evaluation.nested = is_in_scope(jaxprs.equations(known[0].jaxpr), DERIVATIVE_SCOPE)
        pairs = zip(grads, _reached(known, len(outs)), strict=True)
        return [g if connected else None for g, connected in pairs]

    evaluation.pullback, evaluation.checked = of_connected, not in_trace or traced is not None
    return evaluation


def reached(fun: Fun, leaves: list[Array]) -> list[bool]:
    """See `Backend.reached`. Outside of a trace, all leaves count as reached."""
    in_trace = reachability.within_a_trace() or not all_known(leaves)
    traced = _traced(fun, leaves) if in_trace and leaves else None
    if traced is None:
        return [True] * len(leaves)
    results = jax.tree.unflatten(traced[0].treedef, traced[0].avals)
    return _reached(traced, len(results[0]))


def _reached(traced: tuple[jaxprs.TracedProgram, list[Any]], outs: int) -> list[bool]:
    """Returns, for each leaf of a traced function, whether it reaches the first `outs` results."""
    closed = ClosedJaxpr(traced[0].jaxpr, traced[1])  # the only inputs are the leaves
    return [*map(any, zip(*reachability.reached_matrix(closed)[:outs], strict=True))]


def _mark_passed(leaves: Sequence[Array], outs: Sequence[Array]) -> None:
    """Adds an equation in the current name scope for each traced leaf that is also an output."""
    passed = {id(y) for y in outs if isinstance(y, jax.core.Tracer)}
    _ = [-x for x in leaves if id(x) in passed]


def jvp(
    fun: Fun, leaves: list[Array], tangents: list[Array]
) -> tuple[list[Array], list[Array], list[Array]]:
    names = _caller(fun, "jvp"), getattr(fun, "function", "f")
    with explained(*names), jax.named_scope(DERIVATIVE_SCOPE):
        outs, pushed, extras = jax.jvp(fun, leaves, tangents, has_aux=True)
        _mark_passed(leaves, outs)
    return outs, extras, pushed


def jvps(
    fun: Fun, leaves: list[Array], many: Sequence[list[Array]]
) -> tuple[list[Array], list[Array], list[list[Array]]]:
    """Computes `jvp` along many tangents with vmap. The primal outputs are not batched."""
    if len(many) == 1:
        outs, extras, pushed = jvp(fun, leaves, many[0])
        return outs, extras, [pushed]
    stacked = [jnp.stack(tangents) for tangents in zip(*many, strict=True)]
    each = jax.vmap(lambda *tangents: jvp(fun, leaves, list(tangents)), out_axes=(None, None, 0))
    outs, extras, pushed = each(*stacked)
    return outs, extras, [[x[k] for x in pushed] for k in range(len(many))]


def linearize(
    fun: Fun, leaves: list[Array]
) -> tuple[list[Array], list[Array], Callable[[list[Array]], list[Array]]]:
    """Returns `(outs, extras, pushforward)`.

    For reverse-only rules, pushforward raises an error.
    """
    with explained("linearize"), jax.named_scope(DERIVATIVE_SCOPE):
        outs, push, extras = jax.linearize(fun, *leaves, has_aux=True)
        _mark_passed(leaves, outs)
    return outs, extras, LinearMap(_pushed, push)


def _pushed(push: Any, tangents: list[Array]) -> list[Array]:
    with explained("linearize"):
        return push(*tangents)


def stage(fun: Fun, leaves: list[Array]) -> Staged:
    """Traces the function to a jaxpr, and determines the mode in which to differentiate it."""
    traced = _traced(fun, leaves)
    if traced is None:
        return Staged(fun)
    program, consts = traced
    reverse_only = jaxprs.holds(program.jaxpr, reverse_only_p.name)
    results = jax.tree.unflatten(program.treedef, program.avals)[0]
    outs, inputs = (sum(x.size for x in xs) for xs in (results, leaves))
    mode = "forward" if inputs < outs and not reverse_only else "reverse"
    run = _as_function(program, consts)
    run.caller, run.call = _caller(fun), fun  # type: ignore[attr-defined]
    return Staged(run, reverse_only, mode)


def _is_nonzero(x: Any) -> bool:
    on_host = is_on_host(x)
    return bool((jax.device_get(x) != 0).any() if on_host else jax.device_get(jnp.any(x)))


def _caller(fun: Fun, default: str = "vjp") -> str:
    return getattr(fun, "caller", default)


def _traced(fun: Fun, leaves: list[Array]) -> tuple[jaxprs.TracedProgram, list[Any]] | None:
    """Traces fun to a jaxpr. Returns None if fun branches on values or calls NumPy."""
    try:
        return jaxprs.traced(fun, *leaves)
    except _UNTRACEABLE:
        return None


def _as_function(program: jaxprs.TracedProgram, consts: list[Any]) -> Any:
    whole = lambda y: y if isinstance(y, jax.Array) else jnp.asarray(y)
    return lambda *leaves: jax.tree.map(whole, program(consts, *leaves))
