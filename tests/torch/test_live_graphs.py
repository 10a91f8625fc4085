"""Tests gradient graphs of existing tensors, which gradtools reads from autograd's graph."""

import pytest
import torch

import gradtools.torch as gt

X = torch.linspace(0.1, 1.2, 12).reshape(3, 4)


def operations(graph):
    return [node.operation for node in graph.nodes]


def test_live_tensors_are_drawn_without_a_run():
    w = torch.ones(4, 2, requires_grad=True)
    loss = torch.tanh(X @ w).sum()
    graph = gt.gradient_graph(outputs=loss)
    assert operations(graph) == ["matmul", "tanh", "sum"]
    assert [graph.values[v].name for v in graph.outputs] == ["output"]
    assert [graph.values[v].shape for v in graph.inputs] == [(4, 2)]
    assert "tanh(" in graph.to_svg()


def test_the_graph_of_live_tensors_is_the_one_that_autograd_walks():
    x = X.clone().requires_grad_()
    y = torch.sin(x)
    graph = gt.gradient_graph(outputs={"a": y * x, "b": y.exp()})
    seen, todo = set(), [(y * x).grad_fn, y.exp().grad_fn]
    while todo:
        fn = todo.pop()
        if fn is not None and not hasattr(fn, "variable"):
            seen.add(fn.name())
            todo += [given for given, _ in fn.next_functions]
    assert {node.native for node in graph.nodes} == seen
    sin = next(node for node in graph.nodes if node.operation == "sin")
    assert sum(sin.outputs[0] in node.inputs for node in graph.nodes) == 2
    assert {graph.values[v].name for v in graph.outputs} == {"output['a']", "output['b']"}


def drawn(y):
    """Return the text of the last operation in the gradient graph of the tensor y."""
    lines = str(gt.gradient_graph(outputs=y)).splitlines()
    return [line.split("=", 1)[1].split("  ")[0].strip() for line in lines if "(" in line][-1]


@pytest.mark.parametrize(
    ("f", "told"),
    [
        (lambda x, w: x @ w, "matmul(a)"),
        (lambda x, w: w.T @ x.T, "matmul(b)"),
        (lambda x, w: w - w.T.sin().T, "subtract(a, d)"),
        (lambda x, w: torch.addmm(w[0], x, w), "addmm(b, a)"),
        (lambda x, w: 1 - w, "rsub(a)"),
        (lambda x, w: w**2, "power(a)"),
    ],
)
def test_operands_of_live_tensors_keep_their_places(f, told):
    w = torch.ones(4, 2, requires_grad=True)
    assert drawn(f(X, w)) == told
