"""Tests names, in-place writes, side effects and Functions in gradient graphs of PyTorch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gradtools.torch as gt  # noqa: E402  (only where PyTorch is installed)
from gradtools.seeing.graphs.outlining import outline_of  # noqa: E402


def names(graph, numbers):
    return [graph.values[number].name for number in numbers]


def node_of(graph, operation, phase=0):
    return next(n for n in graph.nodes if n.operation == operation and n.phase == phase)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))).sum()


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Network()


X = torch.ones(5, 3)


def test_parameters_of_a_module_are_captured_by_name_and_differentiated(network):
    graph = gt.gradient_graph(network, X, argnums=())
    assert {"first.weight", "first.bias", "last.weight"} <= set(names(graph, graph.captured))
    assert names(graph, graph.outputs) == [
        "output",
        *(f"gradient of {name}" for name, _ in network.named_parameters()),
    ]


def test_a_captured_parameter_that_is_called_like_an_argument_has_its_own_gradient():
    x = torch.ones(2, requires_grad=True)
    times = lambda y: x * y
    graph = gt.gradient_graph(lambda x: times(x), torch.ones(2))
    found = ["output", "gradient of x", "gradient of captured x"]
    assert names(graph, graph.outputs) == found


def test_what_was_written_in_place_is_another_value_for_its_views_too():
    def f(x):
        y = x * 1
        view = y.view(-1)
        y.mul_(3)
        return view + 1

    graph = gt.gradient_graph(f, torch.ones(3), order=0)
    assert [n.operation for n in graph.nodes] == [
        "multiply",
        "reshape",
        "multiply",
        "reshape",
        "add",
    ]
    again, add = graph.nodes[3], graph.nodes[4]
    assert again.inputs == graph.nodes[2].outputs
    assert add.inputs[0] == again.outputs[0]


def test_a_kernel_without_double_backward_gives_way_to_its_alternative():
    attention = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(1, 2, 4, 8)
    graph = gt.gradient_graph(lambda q: attention(q, q, q), q, order=2)
    assert {n.phase for n in graph.nodes} == {0, 1, 2}
    once = gt.gradient_graph(lambda q: attention(q, q, q), q, order=1)
    assert any("flash" in n.native for n in once.nodes)


def test_a_functions_backward_is_marked_at_its_own_line():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, ct):
            (x,) = ctx.saved_tensors
            return 2 * x * ct

    graph = gt.gradient_graph(lambda x: torch.exp(Square.apply(x)), torch.ones(3))
    marked = [n for n in graph.nodes if n.mark == "custom rule"]
    assert {n.phase for n in marked} == {0, 1}
    assert {n.source.function for n in marked} == {"forward", "backward"}
    assert node_of(graph, "exp").mark == ""


def test_gradients_switched_off_are_a_cut():
    def f(x):
        with torch.no_grad():
            y = torch.exp(x)
        return x * y

    graph = gt.gradient_graph(f, torch.ones(3))
    assert [edge.cut for edge in graph.edges if edge.cut] == ["no_grad"]


def test_complex_gradients_keep_gradtools_convention():
    x = torch.tensor(np.asarray([1 + 2j], np.complex64))
    graph = gt.gradient_graph(lambda x: x * (1 + 2j), x)
    assert "conj" in [n.operation for n in graph.nodes if n.phase == 1]


def test_what_a_result_is_written_to_is_no_operand():
    def f(x, w):
        out = torch.empty(3, 3)
        with torch.no_grad():
            torch.mm(x, w, out=out)
        return x * out

    graph = gt.gradient_graph(f, torch.ones(3, 3), torch.ones(3, 3), order=0)
    product = next(node for node in graph.nodes if node.operation == "matmul")
    assert product.inputs == graph.inputs


def test_a_view_is_kept_with_the_bytes_of_its_memory_and_with_it_once():
    def normed(x):
        return x / x.norm(dim=1, keepdim=True).clamp_min(1e-12).expand_as(x)

    graph = gt.gradient_graph(normed, torch.ones(4, 6))
    (view,) = [line for line in str(graph).splitlines() if "= broadcast(" in line]
    assert view.endswith("kept: 16 B")
    attention = torch.nn.functional.scaled_dot_product_attention
    for f in (normed, lambda x: attention(x, x, x)):
        graph = gt.gradient_graph(f, torch.ones(1, 4, 6))
        outline = outline_of(graph)
        saved = {value for arrow in outline.arrows if arrow.saved for value in arrow.values}
        assert outline.bytes_of(saved) == sum(graph.kept.values())


def test_a_write_to_a_view_says_where_it_writes():
    def f(x, w, k):
        y = x.clone()
        y[k] = w[0]
        return y

    for row in (1, 2):
        graph = gt.gradient_graph(f, torch.ones(3, 4), torch.ones(4, 4), row, order=0)
        (update,) = [node for node in graph.nodes if node.native == "update"]
        assert update.attributes["start"] == (row, 0) and update.attributes["drop"] == (0,)
        assert "y[k] = w[0]" in update.source.text
