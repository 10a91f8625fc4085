"""Lowers a recorded `Graph` to expressions of a few primitives.

`lower` walks the nodes and writes each with the operations of this house. Every result must have
the shape that the graph says it has; a node that is not understood, or that comes out with
another shape, stays as it is called by the framework and is marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas.algebra import apply, constant_of
from gradtools.seeing.formulas.expressions import COMPLEX, REAL, Expr, Program, kind_of, placeholder
from gradtools.seeing.formulas.operation_record import Operation, of_vocabulary
from gradtools.seeing.formulas.operations import control
from gradtools.seeing.graphs.nodes import Node, PlainGraph, Value


@dataclass
class Lowered:
    """A graph as expressions.

    Attributes:
        program: From the graph's inputs to its outputs.
        captured: The placeholder of each value that the program reads and was not given.
        draws: The placeholder of each random draw, with the value as it was drawn, or None.
        marked: The native names of operations without a translation.
    """

    program: Program
    captured: dict[int, Expr] = field(default_factory=dict)
    draws: dict[Expr, Any] = field(default_factory=dict)
    marked: list[str] = field(default_factory=list)


def lower(graph: PlainGraph, names: Mapping[int, str] | None = None) -> Lowered:
    """The graph as expressions.

    Args:
        graph: A recorded program.
        names: How inputs and captured values are called, by number; by default their own names.
    """
    names = names or {}
    lowered = Lowered(Program((), ()))
    inputs = [
        _leaf(graph, v, names.get(v) or graph.values[v].name or f"x{k}")
        for k, v in enumerate(graph.inputs)
    ]
    for k, v in enumerate(graph.captured):
        name = names.get(v) or graph.values[v].name or f"c{k}"
        lowered.captured[v] = _leaf(graph, v, name, "captured")
    known = {**lowered.captured, **dict(zip(graph.inputs, inputs, strict=True))}
    outputs = [
        apply("cast", y, to=REAL) if graph.values[v].is_inexact and not y.is_inexact else y
        for v, y in zip(graph.outputs, _walk(graph, known, lowered), strict=True)
    ]
    lowered.program = Program(tuple(inputs), tuple(outputs))
    return lowered


def _leaf(graph: PlainGraph, v: int, name: str, role: str = "input") -> Expr:
    value = graph.values[v]
    return placeholder(name, value.shape, kind_of(value.dtype), role=role)


def _walk(graph: PlainGraph, known: dict[int, Expr], lowered: Lowered) -> list[Expr]:
    for node in graph.nodes:
        args = [_read(known, graph, node, v) for v in node.inputs]
        results = _lower_node(node, graph, args, lowered)
        for v, result in zip(node.outputs, results, strict=True):
            known[v] = result
    return [_read(known, graph, None, v) for v in graph.outputs]


def _read(known: Mapping[int, Expr], graph: PlainGraph, node: Node | None, v: int) -> Expr:
    if v in known:
        return known[v]
    where = f"the node {node.native or node.operation}" if node else "the result"
    raise GradtoolsError(
        f"formula: {where} reads value {v} ({graph.values[v]}), which nothing made; a value from "
        "outside of the program belongs to the graph's inputs or captured values"
    )


def _check_attributes(node: Node, word: Operation) -> None:
    """The attributes are those of the vocabulary."""
    if not word.has(node.attributes):
        allowed, given = ", ".join(word.attributes), ", ".join(sorted(node.attributes))
        raise GradtoolsError(
            f"formula: {node.operation} has the attributes {allowed or 'none'}; the record "
            f"of {node.native or 'it'} gives {given or 'none'}. The record does not follow the "
            "vocabulary"
        )


def _lower_node(
    node: Node, graph: PlainGraph, args: list[Expr], lowered: Lowered
) -> Sequence[Expr]:
    expected = [graph.values[v] for v in node.outputs]
    if "function" in node.attributes:  # a kernel, which may be called like a word
        return _marked(node, expected, args, lowered)
    word = of_vocabulary(node.operation)
    if word and node.operation != "opaque":
        _check_attributes(node, word)
    if node.operation in _LINEAR:
        args = [x.args[0] if x.op == "cast" and x.is_complex else x for x in args]
    if node.operation in _WITH_BODIES:
        results = _WITH_BODIES[node.operation](node, args, lowered)
    elif node.operation == "random":
        results = [_draw(node, expected[0], lowered)]
    elif word and word.lower:
        results = word.lower(*args, **dict(node.attributes))
    else:
        return _marked(node, expected, args, lowered)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    _check(node, results, expected, args)
    return [
        apply("cast", r, to=COMPLEX) if kind_of(v.dtype) == COMPLEX and not _is_plain(r) else r
        for r, v in zip(results, expected, strict=True)
    ]


def _is_plain(x: Expr) -> bool:
    """Whether x is complex already, or a number, of which any kind is written alike."""
    return x.is_complex or x.op == "number" or constant_of(x) is not None


_LINEAR = """
add subtract multiply negate einsum matmul outer sum mean trace reshape transpose broadcast
concatenate stack split slice pad flip fft ifft cumsum triangle roll diagonal diagonal_matrix index
real imag conj abs identity
""".split()  # what does the same to real numbers as to the complex ones that they are


def _check(node: Node, results: list[Expr], expected: list[Value], args: list[Expr]) -> None:
    result, wanted = [r.shape for r in results], [tuple(v.shape) for v in expected]
    if result != wanted:
        raise GradtoolsError(
            f"formula: {node.operation} of shapes {[a.shape for a in args]} with "
            f"{dict(node.attributes)} gives {result}; the record of {node.native or 'it'} says "
            f"{wanted}. The record does not follow the vocabulary"
        )


def _draw(node: Node, value: Value, lowered: Lowered) -> Expr:
    name = node.attributes.get("name") or "ε"
    draw = placeholder(name, value.shape, kind_of(value.dtype), role="draw")
    lowered.draws[draw] = node.attributes.get("value")
    return draw


def _marked(node: Node, expected: list[Value], args: list[Expr], lowered: Lowered) -> list[Expr]:
    name = node.native or node.operation
    attributes = dict(node.attributes)
    function, adjoint = attributes.get("function"), attributes.get("adjoint")
    outputs = [(tuple(v.shape), kind_of(v.dtype)) for v in expected]
    lowered.marked.append(name)
    return control.opaque(name, args, outputs, function, adjoint)


def _body(graph: PlainGraph, lowered: Lowered) -> Program:
    """A program inside. What it captures must come through the node's operands."""
    if graph.captured:
        raise GradtoolsError(
            f"formula: a program inside captures {len(graph.captured)} values; the wing must "
            "pass them as operands of the node"
        )
    inputs = [_leaf(graph, v, graph.values[v].name) for v in graph.inputs]
    outputs = _walk(graph, dict(zip(graph.inputs, inputs, strict=True)), lowered)
    return Program(tuple(inputs), tuple(outputs))


def _call(node: Node, args: list[Expr], lowered: Lowered) -> list[Expr]:
    graph = node.bodies[0].graph
    return _walk(graph, dict(zip(graph.inputs, args, strict=True)), lowered)


def _scan(node: Node, args: list[Expr], lowered: Lowered) -> list[Expr]:
    a = node.attributes
    body = _body(node.bodies[0].graph, lowered)
    reverse = bool(a.get("reverse", False))
    given = {name: a[name] for name in ("consts", "carries", "length")}
    return apply("scan", *args, body=body, reverse=reverse, tells=(), **given)


def _while(node: Node, args: list[Expr], lowered: Lowered) -> list[Expr]:
    a = node.attributes
    condition, body = (_body(b.graph, lowered) for b in node.bodies)
    return apply("while", *args, condition=condition, body=body, **a)


def _custom_rule(node: Node, args: list[Expr], lowered: Lowered) -> list[Expr]:
    forward, backward = (b.graph for b in node.bodies)
    results = _walk(forward, dict(zip(forward.inputs, args, strict=True)), lowered)
    count = len(node.outputs)
    given = {"name": node.attributes.get("name", ""), "once": bool(node.attributes.get("once"))}
    given |= {"backward": _body(backward, lowered), "outputs": count}
    return apply("ruled", *results, *args, residuals=len(results) - count, **given)


_WITH_BODIES = {
    "call": _call,
    "scan": _scan,
    "while": _while,
    "cond": lambda node, args, lowered: apply(
        "cond", *args, branches=tuple(_body(b.graph, lowered) for b in node.bodies)
    ),
    "custom_rule": _custom_rule,
}
