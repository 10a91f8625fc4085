"""Draws a JAX program with its backward passes as a graph.

An equation that depends on a cotangent is backward; if it depends on the cotangent of a gradient,
it is backward of the backward. All others run forward, even if only a later pass reads the result:
where PyTorch saves x for the backward pass of sin, JAX computes cos x in the forward pass and saves
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.errors import GradtoolsError
from gradtools.jax.trees import is_inexact
from gradtools.seeing.graphs.derivative_flow import behind
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
from gradtools.seeing.jax.passes_at_values import differentiated, step_of


def graph_of_outputs(outputs: Any) -> PlainGraph:
    """Raises an error: arrays of JAX hold no graph."""
    raise GradtoolsError(
        "gradient_graph: a JAX array does not record how it was made, so outputs= is for PyTorch "
        "only. Fix: pass the function and its arguments: gradient_graph(f, *args)."
    )


def gradient_graph(program: LeafProgram, order: int) -> PlainGraph:
    """Returns the passes of a program as one graph.

    order: 0 for forward only, 1 with backward, 2 with backward of the backward.
    """
    try:
        traced = recorded_run.trace(program.run, program.leaves)
    except recorded_run.LEAVING as error:
        raise GradtoolsError(
            f"{program.caller}: an array leaves JAX: "
            f"{str(error).strip().splitlines()[0]}. Call why_zero, which names the fix."
        ) from error
    captured = recorded_run.captured_arrays(program.run)
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
    """Returns each input's example, name and pass, and the outputs' names."""
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
    """Assigns nodes to passes; nodes of later passes get the origin of their forward node.

    entering, names: The pass in which each input enters, and the names of the outputs.
    """
    phase_of = dict(zip(whole.inputs, entering, strict=True))
    phases = _phases(whole, phase_of)
    same: dict[int, int] = {}
    nodes: list[Node] = []
    for node, phase, eqn in zip(whole.nodes, phases, closed.jaxpr.eqns, strict=True):
        step = step_of(eqn)
        node = _attributed(node, phase, None if step is None else forward.nodes[step])
        node = replace(node, inputs=tuple(same.get(v, v) for v in node.inputs))
        if node.operation == "stop" and (node.phase or node.mark in _RULES):  # gradtools' own
            same[node.outputs[0]] = node.inputs[0]
        else:
            nodes.append(node)

    leaving = [(same.get(v, v), name) for v, name in zip(whole.outputs, names, strict=True)]
    ends = [  # second gradients without a gradient's cotangent are always zero
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


# A rule replaces the derivatives of operations inside nodes with these marks.
_RULES = ("custom rule", "edited gradient", "frozen")
_WHOLE = ("chunked", "frozen")


def _phases(graph: PlainGraph, phase_of: dict[int, int]) -> list[int]:
    """Returns the pass of each node; adds the passes of its results to `phase_of`."""
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
    """Assigns a node to its pass, with the line, modules and mark of its forward node."""
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
        named = {**node.attributes, "rule": origin.attributes["name"]}
        node = replace(node, attributes=MappingProxyType(named))
    return replace(node, links=None, loss=None) if mark in _RULES else node
