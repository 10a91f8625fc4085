"""Reads the autograd graph of existing tensors.

No program runs. Autograd nodes are visited from the results to the leaves, and are listed in
forward order. Each edge is a tensor that requires grad; constants are not in the autograd graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import Node as GradFn

from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.nodes import Node, PlainGraph, Value
from gradtools.seeing.graphs.passes import CUSTOM, with_named_outputs
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.values import like
from gradtools.torch.trees import flatten, leaf_paths

Tensor = torch.Tensor


def graph_of_outputs(outputs: Any) -> PlainGraph:
    """Reads the autograd graph of a pytree of tensors."""
    pairs = zip(leaf_paths(outputs), flatten(outputs)[0], strict=True)
    named = {f"output{path}": y for path, y in pairs if isinstance(y, Tensor) and y.requires_grad}
    if not named:
        raise GradtoolsError(
            "gradient_graph: outputs has no tensor with a graph: each tensor was detached, "
            "computed under no_grad, or computed from constants. Fix: pass a result before it is "
            "detached, or call why_zero, which names the line that stops the gradient."
        )
    values: dict[int, Value] = {}
    numbers: dict[Any, int] = {}  # maps (node, output index) to a value index
    nodes, inputs = list[Node](), list[int]()

    def new(x: Any, name: str = "") -> int:
        values[len(values)] = Value(*like(x), name)
        return len(values) - 1

    def number_of(fn: Any, k: int) -> int:
        if (fn, k) not in numbers:  # an AccumulateGrad node of a leaf
            numbers[fn, k] = new(fn.variable, f"leaf {len(inputs)}")
            inputs.append(numbers[fn, k])
        return numbers[fn, k]

    for fn in in_order([y.grad_fn for y in named.values()]):
        operands = tuple(number_of(*edge) for edge in fn.next_functions if edge[0] is not None)
        made = tuple(map(new, private.described(fn)))
        numbers.update(((fn, k), number) for k, number in enumerate(made))
        is_rule, name = isinstance(fn, torch.autograd.function.BackwardCFunction), fn.name()
        if is_rule:
            rule = {"rule": operations.word_of(fn)}
            nodes.append(Node("custom_rule", operands, made, name, rule, mark=CUSTOM))
        else:
            nodes.append(Node(operations.neutral_of_node(fn), operands, made, name))
    edges = [torch.autograd.graph.get_gradient_edge(y) for y in named.values()]
    outputs = tuple(number_of(edge.node, edge.output_nr) for edge in edges)
    graph = PlainGraph(tuple(nodes), values, tuple(inputs), outputs)
    return with_named_outputs(graph, [*named])


def in_order(ends: list[Any]) -> Iterator[GradFn]:
    """Yields the ancestors of `ends` in topological order, without AccumulateGrad nodes."""
    done: set[Any] = set()
    todo = [(fn, False) for fn in reversed(ends) if fn is not None]
    while todo:
        fn, ready = todo.pop()
        if ready:
            yield fn
        elif fn not in done and not hasattr(fn, "variable"):
            done.add(fn)
            todo.append((fn, True))
            todo += [(given, False) for given, _ in fn.next_functions if given is not None]
