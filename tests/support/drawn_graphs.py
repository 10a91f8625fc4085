"""Evaluates a graph in PyTorch, using only its operations, edges and constants.

The table below implements each operation independently of the recorders, so a graph with a wrong
edge evaluates to a wrong result. The table also evaluates graphs of JAX programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradtools.seeing.graphs.gradient_graphs import Graph
from gradtools.seeing.graphs.nodes import Node

aten = torch.ops.aten


def _axes(node: Node) -> list[int]:
    return list(node.attributes.get("axes", ()))


def _total(node: Node, x: Tensor, of: Any) -> Tensor:
    axes = _axes(node) or list(range(x.ndim))
    return of(x, dim=axes, keepdim=bool(node.attributes.get("keep")))


def _slice(node: Node, x: Tensor) -> Tensor:
    limits = zip(node.attributes["start"], node.attributes["limit"], strict=True)
    found = x[tuple(slice(a, b) for a, b in limits)]
    dropped = node.attributes.get("drop", ())
    return found.reshape([n for k, n in enumerate(found.shape) if k not in dropped])


def _broadcast(node: Node, x: Tensor) -> Tensor:
    """Expand x to `shape`; axis k of x becomes axis `axes[k]`, by default one of the last axes."""
    shape = node.attributes["shape"]
    axes = node.attributes.get("axes", range(len(shape) - x.ndim, len(shape)))
    return x.reshape([shape[k] if k in axes else 1 for k in range(len(shape))]).expand(shape)


def _padding(node: Node) -> list[int]:
    return [low for low, _ in node.attributes["padding"]]


def _convolution_backward(node: Node, g: Tensor, x: Tensor, w: Tensor) -> Any:
    how = ([0], [1, 1], _padding(node), [1, 1], False, [0, 0], 1)
    return aten.convolution_backward(g, x, w, *how, [True, True, False])


def _select_backward(node: Node, g: Tensor) -> Tensor:
    sizes, at = node.attributes["input_sizes"], node.attributes
    return aten.select_backward(g, sizes, at["axis"], at["index"])


# Implementation of each operation as a function of the node and its operands in order.
MEANING: dict[str, Any] = {
    "add": lambda n, a, b: a + b,
    "subtract": lambda n, a, b: a - b,
    "multiply": lambda n, a, b: a * b,
    "divide": lambda n, a, b: a / b,
    "power": lambda n, a, b: a**b,
    "negate": lambda n, a: -a,
    "exp": lambda n, a: torch.exp(a),
    "tanh": lambda n, a: torch.tanh(a),
    "relu": lambda n, a: torch.relu(a),
    "identity": lambda n, a: a,
    "stop": lambda n, a: a.detach(),
    "round": lambda n, a: torch.round(a),
    "matmul": lambda n, a, b: a @ b,
    "addmm": lambda n, c, a, b: c + a @ b,
    "transpose": lambda n, a: a.permute(n.attributes["permutation"]),
    "reshape": lambda n, a: a.reshape(n.attributes["shape"]),
    "broadcast": _broadcast,
    "einsum": lambda n, *xs: torch.einsum(n.attributes["subscripts"], *xs),
    "sqrt": lambda n, a: torch.sqrt(a),
    "slice": _slice,
    "split": lambda n, a: torch.split(a, n.attributes["sizes"], n.attributes["axis"]),
    "concatenate": lambda n, *xs: torch.cat(xs, n.attributes["axis"]),
    "constant": lambda n: torch.tensor(float(n.attributes.get("value", 0))),
    "sum": lambda n, a: _total(n, a, torch.sum),
    "mean": lambda n, a: _total(n, a, torch.mean),
    "norm": lambda n, a: torch.linalg.vector_norm(a, dim=_axes(n)),
    "compare": lambda n, a, b: {"==": torch.eq(a, b)}[n.attributes["relation"]],
    "where": lambda n, c, a, b: torch.where(c.bool(), a, b),
    "tanh_backward": lambda n, g, y: g * (1 - y**2),
    "threshold_backward": lambda n, g, x, least: torch.where(x > least, g, 0.0),
    "convolution": lambda n, x, w: torch.conv2d(x, w, padding=_padding(n)),
    "convolution_backward": _convolution_backward,
    "layer_norm": lambda n, x, w, b: aten.native_layer_norm(
        x, [x.shape[-1]], w, b, n.attributes["eps"]
    ),
    "native_layer_norm_backward": lambda n, g, x, mean, scale, w, b: (
        aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, scale, w, b, [True] * 3)
    ),
    "batch_norm": lambda n, x, w, b, mean, var: aten.native_batch_norm(
        x, w, b, mean.clone(), var.clone(), True, 0.1, n.attributes["eps"]
    ),
    "native_batch_norm_backward": lambda n, g, x, w, *rest: aten.native_batch_norm_backward(
        g, x, w, *rest, True, n.attributes["eps"], [True] * 3
    ),
    "attention": lambda n, q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v),
    "scaled_dot_product_flash_attention_for_cpu_backward": lambda n, *xs: (
        aten._scaled_dot_product_flash_attention_for_cpu_backward(*xs, 0.0, False)
    ),
    "select_backward": _select_backward,
}


def computed(graph: Graph, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the named outputs of a graph, evaluated from its operations, edges and constants."""
    values = values_of(graph, known)
    return {graph.values[v].name: values[v] for v in graph.outputs if v in values}


def values_of(graph: Graph, known: Mapping[str, Tensor]) -> dict[int, Any]:
    """Return every value of a graph by its index."""
    values: dict[int, Any] = {}
    for number in (*graph.inputs, *graph.captured):
        name = graph.values[number].name  # the name of a constant is its value
        values[number] = known[name].detach() if name in known else torch.tensor(float(name))
    for node in graph.nodes:
        if any(v not in values for v in node.inputs) or node.operation == "missing":
            continue
        made = MEANING[node.operation](node, *(values[v] for v in node.inputs))
        found = made if isinstance(made, tuple) else (made,)
        values.update(zip(node.outputs, found, strict=False))
    return values


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> set[str]:
    """Return the names of results that are missing or differ from the expected results."""
    close = lambda a, b: a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    names = found.keys() | expected.keys()
    both = found.keys() & expected.keys()
    return {n for n in names if n not in both or not close(found[n], expected[n].detach())}
