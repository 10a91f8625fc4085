"""Evaluates a jaxpr and records each differentiable operation on a tape.

Calls, branches and short loops are inlined, so that a step is an operation inside of them. A step
has its operands, the leaves on which they depend, and a pullback of this operation alone::

    ct of the operands = (d results / d operands)^T  ct of the results

The pullback is compiled once for each operation, parameters and shapes, so equal layers and later
calls share it. The `Graph` of the jaxpr determines which operations are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.jax import jaxprs
from gradtools.jax.jaxprs import is_ref
from gradtools.jax.trees import is_inexact
from gradtools.rules import replaced_at
from gradtools.seeing.diagnostics.bad_gradients import ValueOrigins
from gradtools.seeing.graphs.derivative_flow import any_of, links_of
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph

_UNROLLED = 2000  # the most equations of an unrolled loop
_Apply = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Moving:
    """An array on the tape.

    Attributes:
        array: The array.
        leaves: A bit mask of the leaves on which it depends differentiably.
        number: Its number on the tape.
    """

    array: Any
    leaves: int = 0
    number: int = -1


@dataclass(frozen=True)
class TapeStep:
    """One recorded operation.

    Attributes:
        apply: The operation, from its operands to its results.
        arrays: Its operands.
        operands: The differentiable operands, by position.
        results: The differentiable results, by position.
        node: Its node in the graph.
        packs: Whether it only unstacks or stacks a loop's arrays.
        key: The key of its compiled pullback; None if it cannot be shared.
        context: JAX's context (such as x64) in which it ran.
    """

    apply: _Apply
    arrays: tuple[Any, ...]
    operands: Mapping[int, Moving]
    results: Mapping[int, Moving]
    node: Node
    packs: bool = False
    key: Hashable = None
    context: Any = None

    def pulled(
        self, given: Mapping[int, Any], wanted: Sequence[int], arrays: Sequence[Any] = ()
    ) -> list[Any]:
        """Pulls cotangents of results back to the wanted operands, optionally at other arrays."""
        op = _Pull(self.apply, tuple(given), tuple(wanted), self.key)
        pull = _compiled if self.key is not None else _at_once
        at = tuple(arrays or self.arrays)
        with nullcontext() if self.context is None else self.context.manager:
            return list(pull(op, at, list(given.values())))


@dataclass(frozen=True)
class _Pull:
    """The static arguments of a pullback; equal ones share a compilation."""

    apply: _Apply = field(compare=False)
    given: tuple[int, ...]
    wanted: tuple[int, ...]
    key: Hashable


def _at_once(op: _Pull, arrays: Sequence[Any], cts: Sequence[Any]) -> Sequence[Any]:
    def fun(*moving: Any) -> list[Any]:
        outs = op.apply(replaced_at(arrays, op.wanted, moving))
        return [outs[k] for k in op.given]

    result: Sequence[Any] = jax.vjp(fun, *[arrays[i] for i in op.wanted])[1](cts)
    return result


_compiled = partial(jax.jit, static_argnums=0)(_at_once)


@dataclass
class Reference:
    """A mutable reference (`jax.new_ref`) on the tape; its content is what was last written."""

    content: Moving


_Entry = Moving | Reference


@dataclass
class Tape:
    """Evaluates a jaxpr along its graph; `steps` are the differentiable operations, in order.

    If `origins` is given, it records where NaN and infinite values come from.
    """

    steps: list[TapeStep] = field(default_factory=list)
    origins: ValueOrigins | None = None
    _count: int = 0
    _held: list[Any] = field(default_factory=list)  # so that no id is used again

    def run(self, closed: Any, graph: PlainGraph, args: Sequence[Moving]) -> list[Moving]:
        consts = [
            Reference(Moving(const[...])) if is_ref(var) else Moving(const)
            for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        ]
        return [*map(_content, self._jaxpr(closed.jaxpr, graph, [*consts, *args]))]

    def moving(self, array: Any, leaves: int) -> Moving:
        if not leaves or not is_inexact(array):
            return Moving(array)
        self._count += 1
        return Moving(array, leaves, self._count)

    def _jaxpr(self, jaxpr: Any, graph: PlainGraph, args: Sequence[_Entry]) -> list[Any]:
        def step(i: int, eqn: Any, entries: list[_Entry]) -> list[Any]:
            operands, node = [*map(_content, entries)], graph.nodes[i]
            if any(x.leaves for x in operands):
                inlined = self._inlined(eqn, node, operands)
                if inlined:
                    return inlined
            full, masks = Dependence.DIFFERENTIABLE, [x.leaves for x in operands]
            leaves = [
                any_of(mask for link, mask in zip(row, masks, strict=True) if link == full)
                for row in links_of(graph, node)
            ]
            apply, key = partial(_evaluated, eqn), _key(eqn)
            outs = self._step(apply, operands, leaves, node, key=key, context=eqn.ctx)
            written = [x for x in entries if isinstance(x, Reference)]
            for reference, content in zip(written, outs[len(eqn.outvars) :], strict=False):
                reference.content = content
            return [
                Reference(y) if is_ref(var) else y
                for var, y in zip(eqn.outvars, outs, strict=False)
            ]

        constant = lambda literal: Moving(np.asarray(literal.val, literal.aval.dtype))
        return jaxprs.interpreted(jaxpr, args, step, constant)

    def _step(
        self,
        apply: _Apply,
        operands: Sequence[Moving],
        leaves: Sequence[int],
        node: Node,
        **about: Any,
    ) -> list[Moving]:
        arrays = tuple(x.array for x in operands)
        outs = [self.moving(y, of) for y, of in zip(apply(arrays), leaves, strict=False)]
        if self.origins is not None:
            bad = [y.array for y in outs if _is_bad(y.array)]
            self.origins.add(node, map(id, filter(_is_bad, arrays)), map(id, bad))
            self._held += bad
        entering = {i: x for i, x in enumerate(operands) if x.leaves}
        leaving = {k: y for k, y in enumerate(outs) if y.leaves}
        if entering and leaving:
            self.steps.append(TapeStep(apply, arrays, entering, leaving, node, **about))
        return outs

    # --- inlining

    def _inlined(self, eqn: Any, node: Node, operands: Sequence[Moving]) -> list[Moving] | None:
        name, inner = eqn.primitive.name, jaxprs.bodies(eqn)
        if not inner or any(body.jaxpr.constvars for body in inner):  # their values are unknown
            return None
        if name == "cond":
            k = min(max(int(operands[0].array), 0), len(inner) - 1)
            return self._body(node, k, inner[k], operands)
        if name == "scan":
            return self._loop(eqn, node, inner[0], operands)
        if name in jaxprs.CALLS:
            return self._body(node, 0, inner[0], operands)
        return None

    def _body(self, node: Node, k: int, inner: Any, operands: Sequence[Moving]) -> list[Moving]:
        args = [operands[i] for i in inner.inputs]
        return self._jaxpr(inner.jaxpr, node.bodies[k].graph, args)

    def _loop(
        self, eqn: Any, node: Node, inner: Any, operands: Sequence[Moving]
    ) -> list[Moving] | None:
        length = eqn.params["length"]
        if not length or length * len(inner.jaxpr.eqns) > _UNROLLED:
            return None
        consts, carried = jaxprs.scan_counts(eqn)
        first, carry = operands[:consts], list(operands[consts : consts + carried])
        columns = [
            self._step(_rows, [x], [x.leaves] * length, node, packs=True, key="rows")
            for x in operands[consts + carried :]
        ]
        rounds: list[Any] = [None] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            rows = [column[i] for column in columns]
            outs = self._body(node, 0, inner, [*first, *carry, *rows])
            carry, rounds[i] = outs[:carried], outs[carried:]
        stacked = lambda arrays: [jnp.stack(arrays)]
        for column in zip(*rounds, strict=True):
            leaves = [any_of(x.leaves for x in column)]
            carry += self._step(stacked, column, leaves, node, packs=True, key="stacked")
        return carry


def _evaluated(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """An equation as a function of arrays: mutable references enter and leave by their contents."""
    operands = [
        jax.new_ref(x) if is_ref(var) else x for var, x in zip(eqn.invars, arrays, strict=True)
    ]
    results = zip(eqn.outvars, jaxprs.bound(eqn, operands), strict=True)
    outs = [y[...] if is_ref(var) else y for var, y in results]
    if eqn.primitive.name in ("freeze", "free_ref"):  # the reference is not read again
        return outs
    return outs + [x[...] for v, x in zip(eqn.invars, operands, strict=True) if is_ref(v)]


def _content(entry: _Entry) -> Moving:
    return entry.content if isinstance(entry, Reference) else entry


def _is_bad(x: Any) -> bool:
    """Whether an array has a NaN or infinite entry."""
    return is_inexact(x) and not bool(jnp.isfinite(x).all())


def _rows(arrays: Sequence[Any]) -> Sequence[Any]:
    (x,) = arrays
    return list(jnp.unstack(x)) if is_inexact(x) else [x[i] for i in range(len(x))]


def _key(eqn: Any) -> Hashable:
    """The primitive and parameters; None if these hold functions, which differ at each trace."""
    params = eqn.params
    if any(map(callable, params.values())) or any(jaxprs.sub_jaxprs(params)):
        return None
    key = eqn.primitive, tuple(sorted(params.items(), key=lambda item: item[0]))
    try:
        hash(key)
    except TypeError:  # an unhashable parameter: compile each time
        return None
    return key
