"""A jaxpr with its backward passes as one program, and its evaluation at given values.

The jaxpr is evaluated equation by equation inside of `jax.vjp`, each in a named scope with its
number. JAX attaches the scope to all equations that it derives from this one, forward and backward,
so each gets the line, the modules and the mark of its origin.

At given values, for `seeing/diagnostics/gradients_at_values.py`, the program of both passes is
evaluated equation by equation. Calls, branches and short loops are inlined, so that the operations
inside of them are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal, scopes_of
from gradtools.jax.jaxprs import is_ref
from gradtools.jax.trees import conj, is_inexact
from gradtools.rules import replaced_at
from gradtools.seeing.diagnostics.gradients_at_values import PassesAtValues, PassStep
from gradtools.seeing.graphs.nodes import Node, PlainGraph
from gradtools.seeing.graphs.passes import BACKWARD
from gradtools.seeing.jax.graphs import graph_of

_UNROLLED = 2000  # the most equations of an unrolled loop
_STEP = "gradtools_step_"


def differentiated(
    closed: Any, leaves: int, wrt: Sequence[int], outs: Sequence[int], order: int = BACKWARD
) -> Callable[..., list[Any]]:
    """The program of all passes: takes leaves and cotangents, returns outputs and gradients.

    Args:
        closed: The closed jaxpr of the forward pass.
        leaves: The number of its inputs.
        wrt: The differentiated inputs.
        outs: The outputs with a cotangent.
        order: 1 with backward, 2 with backward of the backward.
    """

    def step(i: int, eqn: Any, xs: list[Any]) -> list[Any]:
        with jax.named_scope(f"{_STEP}{i}"):
            return _with_its_line(eqn, xs)

    def backward(given: Any, active: Any, cts: Any) -> tuple[list[Any], list[Any]]:
        """The gradients, and the outputs."""

        def fun(*moving: Any) -> Any:
            full = replaced_at(given, wrt, moving)
            results = jaxprs.interpreted(closed.jaxpr, [*closed.consts, *full], step)
            return [results[k] for k in outs], results

        _, pull, results = jax.vjp(fun, *active, has_aux=True)
        return [conj(g) for g in pull([conj(ct) for ct in cts])], results

    def run(*flat: Any) -> list[Any]:
        rest = iter(flat)
        given, cts = [*islice(rest, leaves)], [*islice(rest, len(outs))]
        active = [given[k] for k in wrt]
        if order == BACKWARD:
            grads, results = backward(given, active, cts)
            return [*results, *grads]
        pulled = lambda active, cts: backward(given, active, cts)
        grads, pull, results = jax.vjp(pulled, active, cts, has_aux=True)
        seconds, of_cts = pull([conj(v) for v in rest])
        return [*results, *grads, *map(conj, seconds), *map(conj, of_cts)]

    return run


def step_of(eqn: Any) -> int | None:
    """The position of the equation of the forward pass from which JAX derived this one."""
    derived = (name for name, _ in scopes_of(eqn) if name.startswith(_STEP))
    return next((int(name.removeprefix(_STEP)) for name in derived), None)


def _with_its_line(eqn: Any, xs: Sequence[Any]) -> list[Any]:
    """The results of an equation at other operands; `eval_jaxpr` passes on its line."""
    pairs = zip(eqn.invars, xs, strict=True)
    given = {atom: x for atom, x in pairs if not isinstance(atom, Literal)}
    one = _empty().replace(eqns=[eqn], invars=list(given), outvars=list(eqn.outvars))
    return jax.core.eval_jaxpr(one, [], *given.values())


@cache
def _empty() -> Any:
    empty = jaxprs.open_jaxpr(jax.make_jaxpr(lambda: ())())
    return empty.replace(debug_info=empty.debug_info.with_unknown_names())


# --- at given values ---------------------------------------------------------------------


def passes_at(
    closed: Any,
    forward: PlainGraph,
    leaves: Sequence[Any],
    wrt: Sequence[int],
    outs: Sequence[int],
) -> PassesAtValues:
    """Both passes at these leaves.

    Args:
        closed: The program's closed jaxpr.
        forward: Its graph.
        leaves: Its inputs.
        wrt: The leaves that are differentiated.
        outs: The outputs that have a cotangent.
    """
    run = differentiated(closed, len(leaves), wrt, outs)
    args = [*leaves, *_seeds([closed.out_avals[k] for k in outs])]
    joint = jax.make_jaxpr(run)(*args)
    names = [step_of(eqn) for eqn in joint.jaxpr.eqns]
    graph = graph_of(joint)
    nodes = [
        node if k is None else _reported(node, forward.nodes[k])
        for node, k in zip(graph.nodes, names, strict=True)
    ]
    tape = _Tape()
    inputs = [tape.new(x) for x in args]
    results = tape.run(joint, replace(graph, nodes=tuple(nodes)), inputs)
    numbers = [number for _, number in results]
    gradients = zip(wrt, numbers[-len(wrt) :], strict=True)
    return PassesAtValues(
        tape.steps,
        tape.sizes,
        [numbers[k] for k in outs],
        [number for _, number in inputs[len(leaves) :]],
        {forward.inputs[i]: (inputs[i][1], gradient) for i, gradient in gradients},
    )


def _reported(node: Node, origin: Node) -> Node:
    """The node of the forward pass; for a node with bodies, the node itself with its line."""
    if not origin.bodies or origin.links is not None:
        return origin
    return replace(node, source=node.source or origin.source, scope=node.scope or origin.scope)


def _seeds(avals: Sequence[Any]) -> list[Any]:
    """The outputs' cotangents: 1 for a single scalar, random otherwise."""
    rng = np.random.default_rng(0)
    if len(avals) == 1 and avals[0].size == 1:
        return [jnp.ones(avals[0].shape, avals[0].dtype)]
    return [jnp.asarray(rng.uniform(0.5, 1.5, a.shape), a.dtype) for a in avals]


Known = tuple[Any, int]  # an array and its number


class _Tape:
    """Evaluates a jaxpr along its graph.

    Attributes:
        steps: The operations so far.
        sizes: The greatest modulus of each array, by number, as in `PassesAtValues`.
    """

    def __init__(self) -> None:
        self.steps: list[PassStep] = []
        self.sizes: dict[int, float | None] = {}
        self._held: dict[int, int] = {}  # the number of the contents of a mutable reference, by id

    def new(self, x: Any) -> Known:
        """An array with its number; for a mutable reference, its contents are examined."""
        content = x[...] if isinstance(x, jax.Ref) else x
        number = len(self.sizes)
        is_known = is_inexact(content) and content.size
        self.sizes[number] = float(np.max(np.abs(np.asarray(content)))) if is_known else None
        return x, number

    def run(self, closed: Any, graph: PlainGraph, args: Sequence[Known]) -> list[Known]:
        pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        consts = [self.new(jax.new_ref(x[...]) if is_ref(var) else x) for var, x in pairs]
        return self._jaxpr(closed.jaxpr, graph, [*consts, *args])

    def _jaxpr(self, jaxpr: Any, graph: PlainGraph, args: Sequence[Known]) -> list[Known]:
        def step(i: int, eqn: Any, entries: list[Known]) -> list[Known]:
            entries = [(x, self._held.get(id(x), number)) for x, number in entries]
            inlined = self._inlined(eqn, graph.nodes[i], entries)
            if inlined is not None:
                return inlined
            results = jaxprs.bound(eqn, [x for x, _ in entries])
            written = [x for x, _ in entries if isinstance(x, jax.Ref)]
            outs = self._step(graph.nodes[i], entries, [*results, *written])
            self._held.update((id(x), number) for x, number in outs if isinstance(x, jax.Ref))
            return outs[: len(results)]

        constant = lambda literal: self.new(np.asarray(literal.val, literal.aval.dtype))
        return jaxprs.interpreted(jaxpr, args, step, constant)

    def _step(
        self, node: Node | None, entries: Sequence[Known], results: Sequence[Any]
    ) -> list[Known]:
        outs = [self.new(x) for x in results]
        self.steps.append(PassStep(node, [n for _, n in entries], [n for _, n in outs]))
        return outs

    # --- inlining

    def _inlined(self, eqn: Any, node: Node, entries: Sequence[Known]) -> list[Known] | None:
        name, inner = eqn.primitive.name, jaxprs.bodies(eqn)
        if not inner or any(body.jaxpr.constvars for body in inner):  # their values are unknown
            return None
        sizes = [len(body.graph.nodes) for body in node.bodies]
        if sizes != [len(body.jaxpr.eqns) for body in inner]:  # drawn as another program
            return None
        if name == "cond":
            k = min(max(int(entries[0][0]), 0), len(inner) - 1)
            return self._body(node, k, inner[k], entries)
        if name == "scan":
            return self._loop(eqn, node, inner[0], entries)
        return self._body(node, 0, inner[0], entries) if name in jaxprs.CALLS else None

    def _body(self, node: Node, k: int, inner: Any, entries: Sequence[Known]) -> list[Known]:
        graph = node.bodies[k].graph
        nodes = (replace(n, source=n.source or node.source) for n in graph.nodes)
        args = [entries[i] for i in inner.inputs]
        return self._jaxpr(inner.jaxpr, replace(graph, nodes=tuple(nodes)), args)

    def _loop(
        self, eqn: Any, node: Node, inner: Any, entries: Sequence[Known]
    ) -> list[Known] | None:
        length = eqn.params["length"]
        if not length or length * len(inner.jaxpr.eqns) > _UNROLLED:
            return None
        consts, carried = jaxprs.scan_counts(eqn)
        first, carry = entries[:consts], list(entries[consts : consts + carried])
        columns = [self._step(None, [x], [*_rows(x[0])]) for x in entries[consts + carried :]]
        rounds: list[Any] = [None] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            rows = [column[i] for column in columns]
            outs = self._body(node, 0, inner, [*first, *carry, *rows])
            carry, rounds[i] = outs[:carried], outs[carried:]
        for column in zip(*rounds, strict=True):
            carry += self._step(None, column, [jnp.stack([x for x, _ in column])])
        return carry


def _rows(x: Any) -> Iterator[Any]:
    return (x[i] for i in range(len(x)))
