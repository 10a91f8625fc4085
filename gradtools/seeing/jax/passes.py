"""Records the forward and backward passes of a JAX program, as a graph or at given values.

The jaxpr is evaluated inside of `jax.vjp`. Each equation is evaluated in a named scope that
contains the index of the equation. JAX copies the scope to all forward and backward equations that
are derived from the equation, so each derived equation gets the source line, modules and mark of
the original equation.

An equation that depends on an output cotangent belongs to the backward pass; an equation that
depends on the cotangent of a gradient belongs to the backward of the backward. All other equations
belong to the forward pass, even if only a later pass reads the result: for sin, PyTorch saves x,
and JAX computes and saves cos x in the forward pass.

For `seeing/diagnostics/gradients_at_values.py`, both passes are evaluated at given values, equation
by equation. Calls, branches and short scans are inlined, so operations inside of their bodies are
examined.
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

from gradtools.errors import GradtoolsError
from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal, scopes_of
from gradtools.jax.jaxprs import is_ref
from gradtools.jax.trees import conj, is_inexact
from gradtools.rules import replaced_at
from gradtools.seeing.diagnostics.gradients_at_values import PassesAtValues, PassStep
from gradtools.seeing.graphs.derivative_flow import behind
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph, needed, node_in_phase
from gradtools.seeing.graphs.passes import (
    BACKWARD,
    CUSTOM,
    EDITED,
    FORWARD,
    INNER,
    SECOND,
    cotangent_of,
    gradient_of,
    second_gradient_of,
    with_named_outputs,
)
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.jax.graphs import graph_of
from gradtools.seeing.jax.tracing import LEAVING, captured_arrays, trace
from gradtools.seeing.jax.unrolling import Evaluate, Unrolling

_STEP = "gradtools_step_"


def differentiated(
    closed: Any, leaves: int, wrt: Sequence[int], outs: Sequence[int], order: int = BACKWARD
) -> Callable[..., list[Any]]:
    """Returns a function that runs all passes: (leaves, cotangents) -> (outputs, gradients).

    Args:
        closed: The closed jaxpr of the forward pass.
        leaves: The number of inputs of the jaxpr.
        wrt: The positions of the differentiated inputs.
        outs: The positions of the outputs that have a cotangent.
        order: 1 for the backward pass, 2 to add the backward of the backward.
    """

    def step(i: int, eqn: Any, xs: list[Any]) -> list[Any]:
        with jax.named_scope(f"{_STEP}{i}"):
            return with_its_line(eqn, xs)

    def backward(given: Any, active: Any, cts: Any) -> tuple[list[Any], list[Any]]:
        """Returns the gradients and the outputs of the forward pass."""

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
    """Returns the position of the forward equation from which JAX derived `eqn`."""
    derived = (name for name, _ in scopes_of(eqn) if name.startswith(_STEP))
    return next((int(name.removeprefix(_STEP)) for name in derived), None)


def with_its_line(eqn: Any, xs: Sequence[Any]) -> list[Any]:
    """Evaluates an equation with operands `xs`; `eval_jaxpr` preserves the source line."""
    pairs = zip(eqn.invars, xs, strict=True)
    given = {atom: x for atom, x in pairs if not isinstance(atom, Literal)}
    one = _empty().replace(eqns=[eqn], invars=list(given), outvars=list(eqn.outvars))
    return jax.core.eval_jaxpr(one, [], *given.values())


@cache
def _empty() -> Any:
    empty = jaxprs.open_jaxpr(jax.make_jaxpr(lambda: ())())
    return empty.replace(debug_info=empty.debug_info.with_unknown_names())


# --- as a graph ----------------------------------------------------------------------------


def graph_of_outputs(outputs: Any) -> PlainGraph:
    """Raises an error, because JAX arrays have no autograd graph."""
    raise GradtoolsError(
        "gradient_graph: a JAX array does not record how it was computed, so outputs= is for "
        "PyTorch only. Fix: pass the function and its arguments: gradient_graph(f, *args)."
    )


def gradient_graph(program: LeafProgram, order: int) -> PlainGraph:
    """Returns the forward and backward passes of a program as one graph.

    order: 0 for the forward pass, 1 to add the backward pass, 2 to add the backward of the
        backward.
    """
    try:
        traced = trace(program.run, program.leaves)
    except LEAVING as error:
        raise GradtoolsError(
            f"{program.caller}: an array leaves JAX: "
            f"{str(error).strip().splitlines()[0]}. Call why_zero, which suggests a fix."
        ) from error
    captured = captured_arrays(program.run)
    forward = graph_of(traced.closed, program.names, captured=captured)
    nodes = (
        replace(node_in_phase(n, FORWARD), mark=n.mark or INNER) if n.phase else n
        for n in forward.nodes
    )
    forward = replace(forward, nodes=tuple(nodes))
    avals = traced.closed.out_avals
    outs = [k for k, a in enumerate(avals) if is_inexact(a) and k not in traced.host_outputs]
    matters = behind(forward, tuple(forward.outputs[k] for k in outs))
    strength = [matters.get(value, Dependence.NONE) for value in forward.inputs]
    wrt = [i for i in program.wrt if strength[i] > Dependence.CUT]
    if not (order and wrt):
        return with_named_outputs(forward, program.out_names)
    run = differentiated(traced.closed, len(program.leaves), wrt, outs, order)
    inputs, out_names = _ends(program, avals, wrt, outs, order)
    examples, names, phases = zip(*inputs, strict=True)
    closed = jax.make_jaxpr(run)(*examples)
    graph = graph_of(closed, names, captured=captured)
    return _in_passes(graph, closed, forward, phases, out_names)


def _ends(
    program: LeafProgram, avals: Sequence[Any], wrt: Sequence[int], outs: Sequence[int], order: int
) -> tuple[list[tuple[Any, str, int]], list[str]]:
    """Returns (example array, name, pass) of each input, and the names of the outputs."""
    names, cts = [program.names[k] for k in wrt], []
    inputs = [(x, name, FORWARD) for x, name in zip(program.leaves, program.names, strict=True)]
    for k in outs:
        name = cotangent_of(program.out_names[k])
        inputs.append((jnp.zeros(avals[k].shape, avals[k].dtype), name, BACKWARD))
        cts.append(name)
    out_names = [*program.out_names, *map(gradient_of, names)]
    if order == SECOND:
        of_gradients = [cotangent_of(gradient_of(name)) for name in names]
        active = [program.leaves[k] for k in wrt]
        inputs += [(x, name, SECOND) for x, name in zip(active, of_gradients, strict=True)]
        out_names += map(second_gradient_of, [*names, *cts])
    return inputs, out_names


# --- the graph of all passes -------------------------------------------------------------


def _in_passes(
    whole: PlainGraph,
    closed: Any,
    forward: PlainGraph,
    entering: Sequence[int],
    names: Sequence[str],
) -> PlainGraph:
    """Assigns nodes to passes; backward nodes get the source line of their forward node.

    entering: The pass that first reads each input.
    names: The names of the outputs.
    """
    phase_of = dict(zip(whole.inputs, entering, strict=True))
    phases = _phases(whole, phase_of)
    same: dict[int, int] = {}
    nodes: list[Node] = []
    for node, phase, eqn in zip(whole.nodes, phases, closed.jaxpr.eqns, strict=True):
        step = step_of(eqn)
        node = _attributed(node, phase, None if step is None else forward.nodes[step])
        node = replace(node, inputs=tuple(same.get(v, v) for v in node.inputs))
        if node.operation == "stop" and (node.phase or node.mark in _RULES):  # added by gradtools
            same[node.outputs[0]] = node.inputs[0]
        else:
            nodes.append(node)

    leaving = [(same.get(v, v), name) for v, name in zip(whole.outputs, names, strict=True)]
    ends = [  # omit second gradients that are always zero
        (value, name)
        for value, name in leaving
        if not name.startswith(second_gradient_of("")) or phase_of.get(value, FORWARD) == SECOND
    ]

    outputs = tuple(value for value, _ in ends)
    nodes = [nodes[i] for i in needed(nodes, outputs)]
    read = {value for node in nodes for value in node.inputs}.union(outputs)
    captured = tuple(value for value in whole.captured if value in read)
    whole = replace(whole, nodes=tuple(nodes), outputs=outputs, captured=captured)
    return with_named_outputs(whole, [name for _, name in ends])


# Marks of nodes in which a rule replaces the derivatives of the operations.
_RULES = (CUSTOM, EDITED, "frozen")
_WHOLE = ("chunked", "frozen")


def _phases(graph: PlainGraph, phase_of: dict[int, int]) -> list[int]:
    """Returns the pass of each node; adds the pass of each computed value to `phase_of`."""
    result = []
    for node in graph.nodes:
        phase = max((phase_of.get(v, FORWARD) for v in node.inputs), default=FORWARD)
        phase_of.update(dict.fromkeys(node.outputs, phase))
        result.append(phase)
    readers: dict[int, int] = {}
    for i in reversed(range(len(result))):
        node = graph.nodes[i]
        if all(v in graph.captured for v in node.inputs):  # use the pass of the first reader
            result[i] = min((readers.get(v, SECOND) for v in node.outputs), default=result[i])
        for v in node.inputs:
            readers[v] = min(result[i], readers.get(v, SECOND))
    return result


def _attributed(node: Node, phase: int, origin: Node | None) -> Node:
    """Returns the node with its pass, and with the source line and mark of its forward node."""
    node = node_in_phase(node, phase)
    if origin is None:
        return node
    if phase and node.native == "add_any":  # accumulation of cotangents, not part of a rule
        return replace(node, source=origin.source, scope=origin.scope)
    inner = (part.mark for body in origin.bodies for _, part in body.graph.walk())
    mark = next((mark for mark in inner if mark in _WHOLE), origin.mark)
    source = origin.source if phase and mark not in _RULES else node.source or origin.source
    node = replace(node, source=source, scope=origin.scope, mark=mark or node.mark)
    if mark == CUSTOM and origin.attributes.get("name"):
        node = replace(node, attributes={**node.attributes, "rule": origin.attributes["name"]})
    return replace(node, links=None, loss=None) if mark in _RULES else node


# --- at given values ---------------------------------------------------------------------


def passes_at(
    closed: Any,
    forward: PlainGraph,
    leaves: Sequence[Any],
    wrt: Sequence[int],
    outs: Sequence[int],
) -> PassesAtValues:
    """Returns the forward and backward passes at the given leaves.

    Args:
        closed: The program's closed jaxpr.
        forward: The graph of the jaxpr.
        leaves: The values of the program's inputs.
        wrt: The positions of the differentiated leaves.
        outs: The positions of the outputs that have a cotangent.
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
    """Returns the node to report: `origin`, or a copy of `node` if `origin` contains bodies."""
    if not origin.bodies or origin.links is not None:
        return origin
    return replace(node, source=node.source or origin.source, scope=node.scope or origin.scope)


def _seeds(avals: Sequence[Any]) -> list[Any]:
    """Returns the cotangents of the outputs: 1 for a single scalar, otherwise random arrays."""
    rng = np.random.default_rng(0)
    if len(avals) == 1 and avals[0].size == 1:
        return [jnp.ones(avals[0].shape, avals[0].dtype)]
    return [jnp.asarray(rng.uniform(0.5, 1.5, a.shape), a.dtype) for a in avals]


Known = tuple[Any, int]  # an array and its index
Nodes = Sequence[Node]


class _Tape(Unrolling[Known, Node, Nodes]):
    """Evaluates a jaxpr and records a step for each node of its graph.

    Attributes:
        steps: The steps of the operations that have been evaluated.
        sizes: Maps the index of each array to its largest absolute value, as in `PassesAtValues`.
    """

    def __init__(self) -> None:
        self.steps: list[PassStep] = []
        self.sizes: dict[int, float | None] = {}
        self._held: dict[int, int] = {}  # index of the contents of each mutable reference

    def new(self, x: Any) -> Known:
        """Assigns an index to an array, or to the contents of a mutable reference."""
        content = x[...] if isinstance(x, jax.Ref) else x
        number = len(self.sizes)
        is_known = is_inexact(content) and content.size
        self.sizes[number] = float(np.max(np.abs(np.asarray(content)))) if is_known else None
        return x, number

    def run(self, closed: Any, graph: PlainGraph, args: Sequence[Known]) -> list[Known]:
        """Evaluates a closed jaxpr and returns the outputs."""
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
        drawn = [len(body.graph.nodes) for body in at.bodies]  # `at` may have other bodies
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
