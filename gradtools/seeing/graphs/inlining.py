"""Inlines the calls of a graph: functions under jit, checkpoints and other bodies that run once."""

from __future__ import annotations

from dataclasses import replace

from gradtools.seeing.graphs.nodes import Node, PlainGraph, Value, memoized


@memoized
def inlined(graph: PlainGraph) -> PlainGraph:
    """Replaces each call by its nodes; loops, branches and rules remain."""
    if not any(map(_is_call, graph.nodes)):
        return graph
    values, captured, nodes = dict(graph.values), list(graph.captured), list[Node]()

    def new(value: Value) -> int:
        values[len(values)] = value
        return len(values) - 1

    def add(program: PlainGraph, numbers: dict[int, int], call: Node | None) -> None:
        for node in program.nodes:
            inputs = tuple(numbers[v] for v in node.inputs)
            if _is_call(node):
                (body,) = node.bodies
                pairs = zip(body.graph.inputs, body.inputs, strict=True)
                inner = {v: inputs[i] for v, i in pairs}
                for v in body.graph.captured:
                    inner[v] = new(body.graph.values[v])
                    captured.append(inner[v])
                add(body.graph, inner, node if call is None else call)
                numbers.update(
                    (out, inner[v]) for out, v in zip(node.outputs, body.graph.outputs, strict=True)
                )
                continue
            if call is None:
                numbers.update((v, v) for v in node.outputs)
            else:
                numbers.update((v, new(program.values[v])) for v in node.outputs)
                source, scope = node.source or call.source, node.scope or call.scope
                node = replace(node, source=source, scope=scope)
            outputs = tuple(numbers[v] for v in node.outputs)
            nodes.append(replace(node, inputs=inputs, outputs=outputs))

    own = {v: v for v in graph.values}
    add(graph, own, None)
    outputs = tuple(own[v] for v in graph.outputs)
    return replace(
        graph, nodes=tuple(nodes), values=values, outputs=outputs, captured=tuple(captured)
    )


def _is_call(node: Node) -> bool:
    """Returns whether a node runs one program once, which determines its derivative."""
    (body, *more) = node.bodies or (None,)
    return body is not None and not (more or body.carries or body.gate) and node.links is None
