"""What a rule's own backward loses of a second derivative is drawn, with its mend."""

import torch
from torch.autograd import Function

import gradtools.torch as gt
from tests.support.gallery import Sinh, SinhLost, Square

X = torch.tensor([0.5, 1.0, 2.0])
MEND = "computed inside the rule: save it as an output"
SECOND = "second gradient of argument 0"


class Step(Function):
    """A mask that no derivative goes through anyway."""

    @staticmethod
    def forward(ctx, x):
        ctx.mask = (x > 1).to(x.dtype)
        return x * ctx.mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.mask


def made(graph, name):
    """What makes an output."""
    number = next(v for v in graph.outputs if graph.values[v].name == name)
    return next(node for node in graph.nodes if number in node.outputs)


def test_a_second_gradient_that_is_lost_on_ctx_is_drawn_as_missing():
    graph = gt.gradient_graph(SinhLost.apply, X, order=2)
    assert made(graph, SECOND).operation == "missing"
    assert "missing(✕b, ✕d)" in str(graph) and "◆ custom rule SinhLost" in str(graph)
    y = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(SinhLost.apply(y).sum(), y, create_graph=True)
    assert (
        torch.autograd.grad(g.sum(), y, allow_unused=True)[0] is None if g.requires_grad else True
    )


def test_the_cut_stands_where_backward_reads_what_has_no_graph():
    graph = gt.gradient_graph(SinhLost.apply, X, order=2)
    cut = {graph.nodes[edge.target].operation for edge in graph.edges if edge.cut == MEND}
    assert cut == {"add", "missing"}
    assert MEND.split(":")[0] in graph.to_svg() and "missing(" in graph.to_svg()


def test_what_is_saved_as_an_output_is_not_cut():
    for f in (lambda x: Sinh.apply(x)[0], Square.apply, Step.apply):
        graph = gt.gradient_graph(f, X, order=2)
        assert not any(edge.cut for edge in graph.edges)
        assert all(node.operation != "missing" for node in graph.nodes)


def test_a_first_derivative_alone_loses_nothing_on_ctx():
    assert not any(edge.cut for edge in gt.gradient_graph(SinhLost.apply, X).edges)


def test_a_second_gradient_that_has_another_way_is_cut_and_not_missing():
    graph = gt.gradient_graph(lambda x: SinhLost.apply(x) * x, X, order=2)
    assert any(edge.cut == MEND for edge in graph.edges)
    assert made(graph, SECOND).operation != "missing"
