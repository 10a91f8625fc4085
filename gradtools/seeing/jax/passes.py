"""A JAX program with its backward passes, as a graph.

The program is traced once. Its jaxpr is evaluated equation by equation inside of `jax.vjp`, each in
a named scope with its number. JAX attaches the scope to all equations that it derives from this
one, forward and backward, so each node gets the line, the modules and the mark of its origin.

An equation that depends on a cotangent is backward, one that depends on the cotangent of a gradient
is backward of the backward. All others run forward, also those that only a later pass reads: where
PyTorch saves x for the backward pass of sin, JAX computes cos x in the forward pass and saves that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.errors import GradtoolsError
from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal, scopes_of
from gradtools.jax.trees import conj, is_inexact
from gradtools.rules import replaced_at
from gradtools.seeing.graphs.derivative_flow import dependence_matrix
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph, needed, node_in_phase
from gradtools.seeing.graphs.passes import (
    BACKWARD,
    CUSTOM,
    FORWARD,
    INNER,
    SECOND,
    cotangent_of,
    gradient_of,
    second_gradient_of,
    with_named_outputs,
)
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.jax import recorded_run
from gradtools.seeing.jax.graphs import graph_of

_STEP = "gradtools_step_"


def graph_of_outputs(outputs: Any) -> PlainGraph:
    """Raises: arrays of JAX hold no graph."""
    raise GradtoolsError(
        "gradient_graph: a JAX array holds no graph of what made it, so outputs= is for PyTorch "
        "alone. Fix: pass the function and its arguments: gradient_graph(f, *args)."
    )


def gradient_graph(program: LeafProgram, order: int) -> PlainGraph:
    """The passes of a program as one graph.

    order: 0 forward alone, 1 with backward, 2 with backward of the backward.
    """
    try:
        traced = recorded_run.trace(program.run, program.leaves)
    except recorded_run.LEAVING as error:
        raise GradtoolsError(
            f"{program.caller}: an array leaves JAX on the way: "
            f"{str(error).strip().splitlines()[0]}. Ask why_zero, which says what to write instead."
        ) from error
    captured = recorded_run.captured_arrays(program.run)
    forward = graph_of(traced.closed, program.names, captured=captured, in_places=True)
    nodes = (
        replace(node_in_phase(n, FORWARD), mark=n.mark or INNER) if n.phase else n
        for n in forward.nodes
    )
    forward = replace(forward, nodes=tuple(nodes))
    connected, avals = dependence_matrix(forward), traced.closed.out_avals
    outs = [k for k, a in enumerate(avals) if is_inexact(a) and k not in traced.host_outputs]
    reached = lambda i: any(connected[k][i] > Dependence.CUT for k in outs)
    wrt = [i for i in program.wrt if reached(i)]
    if not (order and wrt):
        return with_named_outputs(forward, program.out_names)
    run, inputs, out_names = _differentiated(program, traced.closed, wrt, outs, order)
    examples, names, phases = zip(*inputs, strict=True)
    closed = jax.make_jaxpr(run)(*examples)
    graph = graph_of(closed, names, captured=captured, in_places=True)
    return _in_passes(graph, closed, forward, phases, out_names)


def _differentiated(
    program: LeafProgram, closed: Any, wrt: Sequence[int], outs: Sequence[int], order: int
) -> tuple[Callable[..., list[Any]], list[tuple[Any, str, int]], list[str]]:
    """The program of all passes as a function of arrays.

    wrt, outs: The differentiated leaves that a derivative reaches, the outputs with a cotangent.

    Returns:
        The function; for each input an example to trace at, its name and the pass in which it
        enters; the names of the outputs.
    """

    def step(i: int, eqn: Any, xs: list[Any]) -> list[Any]:
        with jax.named_scope(f"{_STEP}{i}"):
            return _with_its_line(eqn, xs)

    def backward(leaves: Any, active: Any, cts: Any) -> tuple[list[Any], list[Any]]:
        """The gradients, and the outputs."""

        def fun(*moving: Any) -> Any:
            full = replaced_at(leaves, wrt, moving)
            results = jaxprs.interpreted(closed.jaxpr, [*closed.consts, *full], step)
            return [results[k] for k in outs], results

        _, pull, results = jax.vjp(fun, *active, has_aux=True)
        return [conj(g) for g in pull([conj(ct) for ct in cts])], results

    def run(*flat: Any) -> list[Any]:
        given = iter(flat)
        leaves, cts = [*islice(given, len(program.leaves))], [*islice(given, len(outs))]
        active = [leaves[k] for k in wrt]
        if order == BACKWARD:
            grads, results = backward(leaves, active, cts)
            return [*results, *grads]
        pulled = lambda active, cts: backward(leaves, active, cts)
        grads, pull, results = jax.vjp(pulled, active, cts, has_aux=True)
        seconds, of_cts = pull([conj(v) for v in given])
        return [*results, *grads, *map(conj, seconds), *map(conj, of_cts)]

    names, cts = [program.names[k] for k in wrt], []
    inputs = [(x, name, FORWARD) for x, name in zip(program.leaves, program.names, strict=True)]
    for k in outs:
        aval, name = closed.out_avals[k], cotangent_of(program.out_names[k])
        inputs.append((jnp.zeros(aval.shape, aval.dtype), name, BACKWARD))
        cts.append(name)
    out_names = [*program.out_names, *map(gradient_of, names)]
    if order == SECOND:
        of_gradients = [cotangent_of(gradient_of(name)) for name in names]
        active = [program.leaves[k] for k in wrt]
        inputs += [(x, name, SECOND) for x, name in zip(active, of_gradients, strict=True)]
        out_names += map(second_gradient_of, [*names, *cts])
    return run, inputs, out_names


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


# --- the graph of all passes -------------------------------------------------------------


def _in_passes(
    whole: PlainGraph,
    closed: Any,
    forward: PlainGraph,
    entering: Sequence[int],
    names: Sequence[str],
) -> PlainGraph:
    """The graph with its nodes in passes, each with the origin of its forward node.

    entering, names: The pass in which each input enters, and the names of the outputs.
    """
    phase_of = dict(zip(whole.inputs, entering, strict=True))
    phases = _phases(whole, phase_of)
    same: dict[int, int] = {}
    nodes: list[Node] = []
    for node, phase, eqn in zip(whole.nodes, phases, closed.jaxpr.eqns, strict=True):
        derived = (name for name, _ in scopes_of(eqn) if name.startswith(_STEP))
        step = next((int(name.removeprefix(_STEP)) for name in derived), None)
        node = _attributed(node, phase, None if step is None else forward.nodes[step])
        node = replace(node, inputs=tuple(same.get(v, v) for v in node.inputs))
        if node.operation == "stop" and (node.phase or node.mark in _RULES):  # not the user's
            same[node.outputs[0]] = node.inputs[0]
        else:
            nodes.append(node)

    leaving = [(same.get(v, v), name) for v, name in zip(whole.outputs, names, strict=True)]
    ends = [  # without the second gradients that no gradient's cotangent reaches: always zero
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


# The derivatives of operations inside of these are replaced by a rule.
_RULES = ("custom rule", "edited gradient", "frozen")
_WHOLE = ("chunked", "frozen")


def _phases(graph: PlainGraph, phase_of: dict[int, int]) -> list[int]:
    """The pass of each node; adds those of its results to `phase_of`."""
    result = []
    for node in graph.nodes:
        phase = max((phase_of.get(v, FORWARD) for v in node.inputs), default=FORWARD)
        phase_of.update(dict.fromkeys(node.outputs, phase))
        result.append(phase)
    readers: dict[int, int] = {}
    for i in reversed(range(len(result))):
        node = graph.nodes[i]
        if all(v in graph.captured for v in node.inputs):  # assign it to its first reader
            result[i] = min((readers.get(v, SECOND) for v in node.outputs), default=result[i])
        for v in node.inputs:
            readers[v] = min(result[i], readers.get(v, SECOND))
    return result


def _attributed(node: Node, phase: int, origin: Node | None) -> Node:
    """A node with its pass, and the line, modules and mark of its forward node."""
    node = node_in_phase(node, phase)
    if origin is None:
        return node
    if phase and node.native == "add_any":  # accumulation of cotangents, part of no rule
        return replace(node, source=origin.source, scope=origin.scope)
    inner = (part.mark for body in origin.bodies for _, part in body.graph.walk())
    mark = next((mark for mark in inner if mark in _WHOLE), origin.mark)
    source = origin.source if phase and mark not in _RULES else node.source or origin.source
    node = replace(node, source=source, scope=origin.scope, mark=mark or node.mark)
    if mark == CUSTOM and origin.attributes.get("name"):
        named = {**node.attributes, "rule": origin.attributes["name"]}
        node = replace(node, attributes=MappingProxyType(named))
    return replace(node, links=None, loss=None) if mark in _RULES else node
