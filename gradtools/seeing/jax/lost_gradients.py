"""The backward pass of a jaxpr at given values, for `seeing/diagnostics/bad_gradients.py`.

The jaxpr is evaluated equation by equation inside of one `jax.vjp`. Identities around each equation
note the cotangents of its operands and results when JAX computes them, and whether a value is NaN
or infinite. Calls, branches and short loops are inlined, so that the operations inside of them are
seen. The `Graph` of the jaxpr says which operations are differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.jax import jaxprs
from gradtools.jax.jaxprs import is_ref
from gradtools.jax.trees import is_inexact
from gradtools.rules import replaced_at
from gradtools.seeing.diagnostics import bad_gradients
from gradtools.seeing.diagnostics.bad_gradients import BackwardStep
from gradtools.seeing.graphs.derivative_flow import any_of, links_of
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph
from gradtools.seeing.graphs.recording import Vanished

_UNROLLED = 2000  # the most equations of an unrolled loop


def vanished(
    closed: Any, graph: PlainGraph, leaves: Sequence[Any]
) -> tuple[list[Vanished] | None, ...]:
    """For each leaf the operations at which its gradient becomes zero or NaN; None if it is sound.

    Args:
        closed: The program's closed jaxpr.
        graph: Its graph.
        leaves: The arrays at which it is differentiated.
    """
    tape = _Tape()
    moving = [i for i, x in enumerate(leaves) if is_inexact(x)]
    args: list[_Moving] = []
    ends: list[_Moving] = []

    def fun(*xs: Any) -> list[Any]:
        full = replaced_at(leaves, moving, xs)
        args[:] = [tape.moving(x, 1 << i if i in moving else 0) for i, x in enumerate(full)]
        ends[:] = tape.run(closed, graph, args)
        return [y.array for y in ends if is_inexact(y.array)]

    outs, pullback = jax.vjp(fun, *[leaves[i] for i in moving])
    reaching = any_of(y.leaves for y in ends)  # others have their own findings
    grads = dict(zip(moving, pullback(_seeds(outs)), strict=True))
    sizes = {args[i].number: _size(ct) for i, ct in grads.items() if ct.size and reaching >> i & 1}
    places = bad_gradients.lost_at_values(tape.steps, sizes)
    result = [places.get(x.number) for x in args]
    if not all(math.isfinite(_size(y)) for y in outs):
        numbers = [y.number for y in ends]
        nodes = bad_gradients.origins_of_bad_values(tape.flows, tape.bad, numbers)
        result = [
            bad_gradients.at_origins(of, nodes) if x.number in sizes else of
            for x, of in zip(args, result, strict=True)
        ]
    return tuple(result)


# --- what is noted of an array -----------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _noted(value: Callable[[Any], None], cotangent: Callable[[Any], None], x: Any) -> Any:
    """x, with calls of `value(x)` and, when it is differentiated, of `cotangent(its cotangent)`."""
    value(x)
    return x


def _noted_forward(value: Any, cotangent: Any, x: Any) -> tuple[Any, None]:
    value(x)
    return x, None


def _noted_backward(value: Any, cotangent: Any, _: None, ct: Any) -> tuple[Any]:
    cotangent(ct)
    return (ct,)


_noted.defvjp(_noted_forward, _noted_backward)


def _nothing(x: Any) -> None:
    """Notes nothing."""


def _size(x: Any) -> float:
    """The greatest modulus of an array's entries; NaN if one is NaN."""
    return float(np.max(np.abs(np.asarray(x)))) if x.size else 0.0


def _seeds(outs: Sequence[Any]) -> list[Any]:
    """The outputs' cotangents: 1 for a single scalar, random otherwise."""
    rng = np.random.default_rng(0)
    if len(outs) == 1 and outs[0].size == 1:
        return [jnp.ones_like(outs[0])]
    return [jnp.asarray(rng.uniform(0.5, 1.5, y.shape), y.dtype) for y in outs]


# --- the evaluation ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Moving:
    """An array on the tape.

    Attributes:
        array: The array.
        leaves: A bit mask of the leaves on which it depends differentiably.
        number: Its number on the tape.
    """

    array: Any
    leaves: int
    number: int


@dataclass
class _Reference:
    """A mutable reference (`jax.new_ref`) on the tape; its content is what was last written."""

    content: _Moving


class _Tape:
    """Evaluates a jaxpr along its graph.

    Attributes:
        steps: The differentiable operations, whose sizes are filled in by the backward pass.
        flows: All operations, each with the numbers of its operands and results.
        bad: The numbers of the arrays that have a NaN or infinite entry.
    """

    def __init__(self) -> None:
        self.steps: list[BackwardStep] = []
        self.flows: list[tuple[Node, list[int], list[int]]] = []
        self.bad: set[int] = set()
        self._count = 0

    def run(self, closed: Any, graph: PlainGraph, args: Sequence[_Moving]) -> list[_Moving]:
        consts = [
            _Reference(self.moving(const[...])) if is_ref(var) else self.moving(const)
            for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        ]
        return [*map(_content, self._jaxpr(closed.jaxpr, graph, [*consts, *args]))]

    def moving(self, array: Any, leaves: int = 0) -> _Moving:
        self._count += 1
        return _Moving(array, leaves if is_inexact(array) else 0, self._count)

    def _jaxpr(self, jaxpr: Any, graph: PlainGraph, args: Sequence[Any]) -> list[Any]:
        def step(i: int, eqn: Any, entries: list[Any]) -> list[Any]:
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
            outs = self._step(partial(_evaluated, eqn), operands, leaves, node)
            written = [x for x in entries if isinstance(x, _Reference)]
            for reference, content in zip(written, outs[len(eqn.outvars) :], strict=False):
                reference.content = content
            return [
                _Reference(y) if is_ref(var) else y
                for var, y in zip(eqn.outvars, outs, strict=False)
            ]

        constant = lambda literal: self.moving(np.asarray(literal.val, literal.aval.dtype))
        return jaxprs.interpreted(jaxpr, args, step, constant)

    def _step(
        self,
        apply: Callable[[Sequence[Any]], Sequence[Any]],
        operands: Sequence[_Moving],
        leaves: Sequence[int],
        node: Node,
        packs: bool = False,
    ) -> list[_Moving]:
        """Evaluates one operation; packs: It only stacks or unstacks a loop's arrays."""
        arrays = [x.array for x in operands]
        given, passed = list[float | None](), list[float | None]()
        if any(leaves):
            for i, x in enumerate(operands):
                if x.leaves:
                    arrays[i] = _noted(_nothing, _noting(passed), x.array)
        else:  # nothing is differentiated here, and JAX may not be able to
            arrays = [jax.lax.stop_gradient(x) if is_inexact(x) else x for x in arrays]

        outs = []
        for y, of in zip(apply(arrays), leaves, strict=False):
            number = self._count + 1
            if is_inexact(y):
                y = _noted(partial(self._look, number), _noting(given) if of else _nothing, y)
            outs.append(self.moving(y, of))
        self.flows.append((node, [x.number for x in operands], [y.number for y in outs]))
        entering, leaving = [x for x in operands if x.leaves], [y for y in outs if y.leaves]
        if entering and leaving:
            empty = {k for k, x in enumerate(entering) if not x.array.size}
            numbers = [y.number for y in leaving], [x.number for x in entering]
            self.steps.append(BackwardStep(None if packs else node, *numbers, given, passed, empty))
        return outs

    def _look(self, number: int, x: Any) -> None:
        """Notes whether an array has a NaN or infinite entry."""
        if not math.isfinite(_size(x)):
            self.bad.add(number)

    # --- inlining

    def _inlined(self, eqn: Any, node: Node, operands: Sequence[_Moving]) -> list[_Moving] | None:
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

    def _body(self, node: Node, k: int, inner: Any, operands: Sequence[_Moving]) -> list[_Moving]:
        args = [operands[i] for i in inner.inputs]
        return self._jaxpr(inner.jaxpr, node.bodies[k].graph, args)

    def _loop(
        self, eqn: Any, node: Node, inner: Any, operands: Sequence[_Moving]
    ) -> list[_Moving] | None:
        length = eqn.params["length"]
        if not length or length * len(inner.jaxpr.eqns) > _UNROLLED:
            return None
        consts, carried = jaxprs.scan_counts(eqn)
        first, carry = operands[:consts], list(operands[consts : consts + carried])
        columns = [
            self._step(_rows, [x], [x.leaves] * length, node, packs=True)
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
            carry += self._step(stacked, column, leaves, node, packs=True)
        return carry


def _noting(sizes: list[float | None]) -> Callable[[Any], None]:
    """A function that puts the size of a cotangent in the list's next place."""
    place = len(sizes)
    sizes.append(None)

    def note(ct: Any) -> None:
        sizes[place] = _size(ct)

    return note


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


def _content(entry: Any) -> _Moving:
    return entry.content if isinstance(entry, _Reference) else entry


def _rows(arrays: Sequence[Any]) -> Sequence[Any]:
    (x,) = arrays
    return list(jnp.unstack(x)) if is_inexact(x) else [x[i] for i in range(len(x))]
