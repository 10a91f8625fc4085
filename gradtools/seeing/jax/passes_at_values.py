"""Differentiates a jaxpr as one program of all passes, and evaluates it at given values.

The jaxpr is evaluated equation by equation inside of `jax.vjp`, each in a named scope with its
index. JAX attaches the scope to all forward and backward equations that it derives from the
equation, so each derived equation gets the line, the modules and the mark of its origin.

For `seeing/diagnostics/gradients_at_values.py`, the program of both passes is evaluated at given
values, equation by equation. Calls, branches and short loops are inlined, so that the operations
inside of them are visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from gradtools.seeing.jax.unrolling import Evaluate, Unrolling

_UNROLLED = 2000  # maximum number of equations of an unrolled loop
_STEP = "gradtools_step_"


def differentiated(
    closed: Any, leaves: int, wrt: Sequence[int], outs: Sequence[int], order: int = BACKWARD
) -> Callable[..., list[Any]]:
    """Returns the program of all passes, from leaves and cotangents to outputs and gradients.

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
        """Returns the gradients and the outputs."""

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
    """Returns the index of the forward equation from which JAX derived this equation."""
    derived = (name for name, _ in scopes_of(eqn) if name.startswith(_STEP))
    return next((int(name.removeprefix(_STEP)) for name in derived), None)


def _with_its_line(eqn: Any, xs: Sequence[Any]) -> list[Any]:
    """Evaluates an equation at other operands; `eval_jaxpr` preserves its line."""
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
    """Evaluates both passes at these leaves.

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
        {i: (inputs[i][1], gradient) for i, gradient in gradients},
    )


def _reported(node: Node, origin: Node) -> Node:
    """Returns the forward node; for a node with bodies, the node itself with its line."""
    if not origin.bodies or origin.links is not None:
        return origin
    return replace(node, source=node.source or origin.source, scope=node.scope or origin.scope)


def _seeds(avals: Sequence[Any]) -> list[Any]:
    """Returns the outputs' cotangents: 1 for a single scalar, random otherwise."""
    rng = np.random.default_rng(0)
    if len(avals) == 1 and avals[0].size == 1:
        return [jnp.ones(avals[0].shape, avals[0].dtype)]
    return [jnp.asarray(rng.uniform(0.5, 1.5, a.shape), a.dtype) for a in avals]


Known = tuple[Any, int]  # an array and its number
Nodes = Sequence[Node]


class _Tape(Unrolling[Known, Node, Nodes]):
    """Evaluates a jaxpr along its graph.

    Attributes:
        steps: The operations so far.
        sizes: Maps the number of each array to its maximum modulus, as in `PassesAtValues`.
    """

    def __init__(self) -> None:
        self.steps: list[PassStep] = []
        self.sizes: dict[int, float | None] = {}
        self._held: dict[int, int] = {}  # maps a mutable reference's id to its contents' number

    def new(self, x: Any) -> Known:
        """Numbers an array; for a mutable reference, its contents are examined."""
        content = x[...] if isinstance(x, jax.Ref) else x
        number = len(self.sizes)
        is_known = is_inexact(content) and content.size
        self.sizes[number] = float(np.max(np.abs(np.asarray(content)))) if is_known else None
        return x, number

    def run(self, closed: Any, graph: PlainGraph, args: Sequence[Known]) -> list[Known]:
        """The outputs of a closed jaxpr."""
        pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        consts = [self.new(jax.new_ref(x[...]) if is_ref(var) else x) for var, x in pairs]
        return self.evaluated(closed.jaxpr, [*consts, *args], graph.nodes)

    def array(self, value: Known) -> Any:
        return value[0]

    def literal(self, literal: Any) -> Known:
        return self.new(np.asarray(literal.val, literal.aval.dtype))

    def constant(self, x: Any) -> Known:
        return self.new(x)

    def place(self, at: Nodes, i: int, eqn: Any) -> Node:
        return at[i]

    def inside(self, at: Node, k: int, iteration: int | None) -> Nodes:
        return [replace(n, source=n.source or at.source) for n in at.bodies[k].graph.nodes]

    def enters(self, eqn: Any, at: Node) -> bool:
        inner = [len(body.jaxpr.eqns) for body in jaxprs.bodies(eqn)]
        drawn = [len(body.graph.nodes) for body in at.bodies]  # it may be another program
        is_known = bool(inner) and inner == drawn and eqn.primitive.name != "while"
        return is_known and super().enters(eqn, at)

    def operation(
        self, at: Node, name: str, evaluate: Evaluate, xs: Sequence[Known]
    ) -> list[Known]:
        entries = [(x, self._held.get(id(x), number)) for x, number in xs]
        results = evaluate([x for x, _ in entries])
        written = [x for x, _ in entries if isinstance(x, jax.Ref)]
        outs = [*map(self.new, [*results, *written])]
        node = None if name in ("row", "stack") else at  # not reported
        self.steps.append(PassStep(node, [n for _, n in entries], [n for _, n in outs]))
        self._held.update((id(x), number) for x, number in outs if isinstance(x, jax.Ref))
        return outs[: len(results)]
