"""Implements `retained_gradients` in JAX: a primitive marks values, and an interpreter finds them.

The primitive is the identity and lowers to no operation. The interpreter adds an array of
negative zeros to each marked value. In a scan, each step adds one slice of an array, and JAX stacks
the cotangents of the slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from gradtools.arguments.marks import Mark, MarkedValues, not_retained
from gradtools.backend import Array, Evaluation
from gradtools.jax import engines, jaxprs, shardings
from gradtools.jax._upstream import Primitive
from gradtools.jax.compiled_once import run_compiled
from gradtools.jax.trees import zeros_of

mark_p = Primitive("gradtools_mark")
mark_p.multiple_results = True
mark_p.def_impl(lambda *xs, mark: list(xs))
mark_p.def_abstract_eval(lambda *avals, mark: list(avals))
mlir.register_lowering(mark_p, lambda ctx, *xs, mark: list(xs))


def marked(xs: Sequence[Array], mark: Mark) -> list[Array]:
    return mark_p.bind(*xs, mark=mark)


def _jvp(xs: Any, dxs: Any, *, mark: Mark) -> Any:
    return marked(xs, mark), list(dxs)


def _batched(xs: Any, axes: Any, *, mark: Mark) -> Any:
    moved = [x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(xs, axes, strict=True)]
    return marked(moved, mark), [None if a is None else 0 for a in axes]


ad.primitive_jvps[mark_p] = _jvp
batching.primitive_batchers[mark_p] = _batched


def retaining(call: Any) -> tuple[Evaluation, list[Mark], list[Array]]:
    call.tape = MarkedValues()
    program, consts = jaxprs.traced(call, *call.leaves)
    found = _marks(program.jaxpr)
    likes = [zeros_of(a) for _, avals in found for a in avals]

    def fun(*xs: Array) -> Any:
        count = len(call.leaves)
        outs = _evaluated(program.jaxpr, [*consts, *xs[:count]], xs[count:])
        return jax.tree.unflatten(program.treedef, [*map(jnp.asarray, outs)])

    fun.caller = call.caller  # type: ignore[attr-defined]
    xs = [*call.leaves, *[-x for x in likes]]
    return engines.vjp(fun, xs, groups=None, once=True), [m for m, _ in found], likes


def _marks(jaxpr: Any) -> list[tuple[Mark, list[Any]]]:
    """Returns the marks in a jaxpr at any depth, and the types of the marked leaves."""
    return [found for eqn in jaxpr.eqns for found in _marks_of(eqn)]


def _marks_of(eqn: Any) -> list[tuple[Mark, list[Any]]]:
    if eqn.primitive is mark_p:
        return [(eqn.params["mark"], [v.aval for v in eqn.outvars])]
    name = eqn.primitive.name
    found = [found for program in jaxprs.programs_of(eqn) for found in _marks(program.jaxpr)]
    if found and name == "scan":
        longer = lambda a: shardings.stacked(a, eqn.params["length"])
        return [(replace(m, loops=m.loops + 1), [*map(longer, avals)]) for m, avals in found]
    if found and name not in ("cond", *jaxprs.CALLS, *jaxprs.RULED):
        raise not_retained(found[0][0].name, name)
    return found


def _evaluated(jaxpr: Any, entries: Sequence[Any], arrays: Sequence[Array]) -> list[Any]:
    """Evaluates a jaxpr, and adds the arrays, in order, to the marked values."""
    left = iter(arrays)

    def step(_: int, eqn: Any, xs: list[Any]) -> Sequence[Any]:
        own = [*islice(left, sum(len(avals) for _, avals in _marks_of(eqn)))]
        if not own or jaxprs.is_ruled(eqn):  # the rule replaces the derivative of its function
            return jaxprs.bound(eqn, xs)
        if eqn.primitive is mark_p:
            return [x + d for x, d in zip(xs, own, strict=True)]
        xs = [jnp.asarray(x, v.aval.dtype) for x, v in zip(xs, eqn.invars, strict=True)]
        return run_compiled(partial(_inner, eqn), xs, own)

    return jaxprs.interpreted(jaxpr, entries, step)


def _inner(eqn: Any, xs: list[Array], arrays: list[Array]) -> Any:
    """Evaluates an equation with inner jaxprs, and adds the arrays to the marked values."""
    name, params, programs = eqn.primitive.name, eqn.params, jaxprs.programs_of(eqn)
    runs = [
        lambda xs, arrays, p=p: _typed(p.jaxpr, _evaluated(p.jaxpr, [*p.consts, *xs], arrays))
        for p in programs
    ]
    if name == "scan":
        consts, carried = jaxprs.scan_counts(eqn)

        def body(carry: list[Array], rows: Any) -> Any:
            outs = runs[0]([*xs[:consts], *carry, *rows[0]], rows[1])
            return outs[:carried], outs[carried:]

        end = consts + carried
        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(body, xs[consts:end], (xs[end:], arrays), **options)
        return [*carry, *ys]
    if name == "cond":
        left, branches = iter(arrays), []
        for run, program in zip(runs, programs, strict=True):
            own = [*islice(left, sum(len(avals) for _, avals in _marks(program.jaxpr)))]
            branches.append(partial(run, arrays=own))
        return jax.lax.switch(xs[0], branches, xs[1:])
    if name in ("remat", "remat2", "checkpoint"):
        options = {"prevent_cse": params["prevent_cse"], "policy": params["policy"]}
        return jax.checkpoint(runs[0], **options)(xs, arrays)
    return runs[0](xs, arrays)


def _typed(jaxpr: Any, outs: Sequence[Any]) -> list[Array]:
    return [jnp.asarray(y, v.aval.dtype) for y, v in zip(outs, jaxpr.outvars, strict=True)]
