"""A graph without bodies: the operations of loops, branches and calls in the place of their nodes.

The values of a call are renamed. A value that enters or leaves a loop or a branch is *joined* to
its name on the other side, by a node "join" with the strength of the flow::

    loop     initial -> carry,  result -> carry,  condition -cut-> result
    branch   result of each branch -> result,  predicate -cut-> result

So a value may be the result of several nodes, and the joins of a loop form a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradtools.seeing.graphs.nodes import Body, Dependence, Node, PlainGraph, Value, memoized

_CUT, _FULL = Dependence.CUT, Dependence.DIFFERENTIABLE
JOIN = "join"


def flat(graph: PlainGraph) -> PlainGraph:
    """The graph without bodies; the values of the graph itself keep their numbers."""
    return flattened(graph)[0]


def join(source: int, target: int, strength: Dependence = _FULL) -> Node:
    """A node by which data flows from one value to another."""
    return Node(JOIN, (source,), (target,), links=((strength,),))


@memoized
def flattened(graph: PlainGraph) -> tuple[PlainGraph, Mapping[int, Node]]:
    """The graph without bodies, and the original of each of its nodes, by id."""
    if not any(node.bodies and node.links is None for node in graph.nodes):
        return graph, {id(node): node for node in graph.nodes}
    values, captured = dict(graph.values), list(graph.captured)
    nodes, originals = list[Node](), dict[int, Node]()

    def new(value: Value) -> int:
        values[len(values)] = value
        return len(values) - 1

    def add(program: PlainGraph, numbers: dict[int, int], call: Node | None) -> None:
        for node in program.nodes:
            inputs = [numbers[v] for v in node.inputs]
            is_own = call is None
            made = [v if is_own else new(program.values[v]) for v in node.outputs]
            numbers.update(zip(node.outputs, made, strict=True))
            if node.bodies and node.links is None:
                results = enter(node, inputs, made, call or node)
                numbers.update(zip(node.outputs, results, strict=True))
                continue
            if call is not None:
                source, scope = node.source or call.source, node.scope or call.scope
                nodes.append(replace(node, source=source, scope=scope))
            else:
                nodes.append(node)
            nodes[-1] = replace(nodes[-1], inputs=tuple(inputs), outputs=tuple(made))
            originals[id(nodes[-1])] = node

    def enter(node: Node, inputs: Sequence[int], made: Sequence[int], call: Node) -> Sequence[int]:
        """Adds the bodies of a node; returns its results."""
        results: Sequence[int] = made
        is_call = len(node.bodies) == 1 and not (node.bodies[0].carries or node.bodies[0].gate)
        deciding = set(range(len(inputs))).difference(*(body.inputs for body in node.bodies))
        nodes.extend(join(inputs[i], v, _CUT) for i in sorted(deciding) for v in made)
        for body in node.bodies:
            program = body.graph
            inner = dict(zip(program.inputs, (inputs[i] for i in body.inputs), strict=True))
            inner |= {v: new(program.values[v]) for v in program.captured}
            captured.extend(inner[v] for v in program.captured)
            carry(body, inner, made)
            add(program, inner, call)
            ends = [inner[v] for v in program.outputs]
            if body.gate:
                nodes.extend(join(end, v, _CUT) for end in ends for v in made)
            else:
                nodes.extend(map(join, ends, made))
            results = ends if is_call else made
        return results

    def carry(body: Body, inner: dict[int, int], made: Sequence[int]) -> None:
        for k, i in body.carries:
            v = body.graph.inputs[i]
            initial, inner[v] = inner[v], new(body.graph.values[v])
            nodes.extend((join(initial, inner[v]), join(made[k], inner[v])))
            if body.skippable:
                is_inexact = body.graph.values[v].is_inexact
                nodes.append(join(initial, made[k], _FULL if is_inexact else _CUT))

    own = {v: v for v in graph.values}
    add(graph, own, None)
    outputs = tuple(own[v] for v in graph.outputs)
    ends = replace(graph, nodes=tuple(nodes), values=values, outputs=outputs)
    return replace(ends, captured=tuple(captured)), originals
