"""Tests passes, names, residuals, marks and stopped gradients in graphs of both backends."""

import html

import numpy as np
import pytest

X = np.asarray([0.5, 1.0, 2.0], np.float32)
W = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)


@pytest.fixture
def x(gt):
    return gt.asarray(X)


@pytest.fixture
def w(gt):
    return gt.asarray(W)


def names(graph, numbers):
    return [graph.values[number].name for number in numbers]


def operations(graph, phase):
    return [node.operation for node in graph.nodes if node.phase == phase]


def kept(graph):
    """Return the size in bytes of each residual of a graph."""
    return {edge.value: edge.bytes for edge in graph.edges if edge.saved}


def is_in_order(graph):
    """Return whether every value is defined exactly once and before it is read."""
    known = [*graph.inputs, *graph.captured]
    for node in graph.nodes:
        if not set(node.inputs) <= set(known):
            return False
        known += node.outputs
    return len(known) == len(set(known)) and set(graph.outputs) <= set(known)


# --- passes and names --------------------------------------------------------------------


def test_inputs_outputs_and_cotangents_are_named_by_their_paths(gt, x, w):
    def f(p, x):
        return {"y": gt.xp.matmul(x, p["w"])}

    graph = gt.gradient_graph(f, {"w": w}, x)
    ends = names(graph, graph.inputs), names(graph, graph.outputs)
    assert ends[0] == ["p['w']", "x", "cotangent of output['y']"]
    assert ends[1] == ["output['y']", "gradient of p['w']"]


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", ["square", "exp", "sinh", "cube"])
def test_the_tutorials_functions_have_a_pass_for_each_order(gt, x, name, order):
    f = {
        "square": lambda x: x**2,
        "exp": lambda x: gt.xp.exp(x),
        "sinh": lambda x: (gt.xp.exp(x) - gt.xp.exp(-x)) / 2,
        "cube": lambda x: x**3,
    }[name]
    graph = gt.gradient_graph(f, x, order=order)
    assert is_in_order(graph)
    assert {node.phase for node in graph.nodes} == set(range(order + 1))
    for phase in range(order + 1):
        assert operations(graph, phase)
    again = ["second gradient of x", "second gradient of cotangent of output"]
    expected = ["output", "gradient of x", *again]
    assert names(graph, graph.outputs) == expected[: (1, 2, 4)[order]]
    cotangents = ["cotangent of output", "cotangent of gradient of x"]
    assert names(graph, graph.inputs) == ["x", *cotangents[:order]]


def test_a_linear_function_needs_nothing_of_its_argument_in_the_second_pass(gt, x):
    graph = gt.gradient_graph(lambda x: x * 3.0, x, order=2)
    assert names(graph, graph.outputs) == [
        "output",
        "gradient of x",
        "second gradient of cotangent of output",
    ]
    assert not kept(graph)


def test_every_node_names_the_line_of_the_user(gt, x):
    def f(x):
        y = gt.xp.sin(x)  # line 1
        return y * y  # line 2

    graph = gt.gradient_graph(f, x)
    first = f.__code__.co_firstlineno
    found = {n.phase: [] for n in graph.nodes}
    for node in graph.nodes:
        found[node.phase].append(node.source.line - first)
    assert set(found[0]) == set(found[1]) == {1, 2}
    assert {node.source.file for node in graph.nodes} == {__file__}


# --- residuals ---------------------------------------------------------------------------


def test_exp_keeps_its_output(gt, x):
    graph = gt.gradient_graph(gt.xp.exp, x)
    assert kept(graph) == {graph.outputs[0]: X.nbytes}


# --- marks -------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", ["reverse", "clip"])
def test_an_edited_gradient_is_marked(gt, x, edit):
    edited = {"reverse": gt.reverse_gradient, "clip": lambda x: gt.clip_gradient(x, 1.0)}[edit]
    graph = gt.gradient_graph(lambda x: gt.xp.exp(x) + edited(x), x)
    assert "edited gradient" in {n.mark for n in graph.nodes if n.phase == 1}


def test_a_checkpoint_is_marked_and_computed_again(gt, x):
    graph = gt.gradient_graph(lambda x: gt.checkpoint(lambda x: gt.xp.sin(gt.xp.exp(x)))(x), x)
    inside = [node.operation for _, node in graph.walk() if node.phase == 1]
    assert "checkpoint" in {n.mark for n in graph.nodes}
    assert "exp" in inside


def test_a_frozen_function_is_marked(gt, x):
    f = gt.frozen(lambda x: gt.xp.exp(x))
    graph = gt.gradient_graph(lambda x: f(x) * x, x)
    assert {n.phase for n in graph.nodes if n.mark == "frozen"} == {0, 1}
    assert not [edge for edge in graph.edges if edge.cut]


# --- cuts --------------------------------------------------------------------------------


def test_a_stopped_gradient_is_a_cut_edge(gt, x):
    graph = gt.gradient_graph(lambda x: x * gt.stop_gradient(gt.xp.exp(x)), x)
    cuts = [edge for edge in graph.edges if edge.cut]
    assert [edge.cut for edge in cuts] == ["detached"]
    assert graph.nodes[cuts[0].target].operation == "stop"
    assert graph.nodes[cuts[0].source].operation == "exp"


# --- names of arguments ------------------------------------------------------------------


def by_keyword(params, x, *rest, scale):
    return (params["w"] * x * rest[0]).sum() * scale


@pytest.mark.slow_at("jax")
def test_arguments_have_the_names_of_their_parameters(gt, x):
    named = gt.gradient_graph(by_keyword, {"w": x}, x, x, scale=x, order=2)
    text, picture = str(named), html.unescape(named.to_svg())
    for name in ("params['w']", "x", "rest[0]", "scale"):
        assert f" = {name} " in text and f" = {name}<" in picture
    for shown in ("→ gradient of params['w'] = ", " = cotangent of gradient of params['w'] "):
        assert shown in text
    assert "argument" not in text + picture
