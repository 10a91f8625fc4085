"""How derivatives flow through hand-made graphs, and where they are lost."""

import pytest

from gradtools.seeing.graphs.derivative_flow import dependence_matrix, links_of
from gradtools.seeing.graphs.gradient_graphs import Graph
from gradtools.seeing.graphs.gradient_losses import losses
from gradtools.seeing.graphs.nodes import Body, Dependence, Node, Value

NONE, CUT, ZERO, FULL = Dependence
X, Y, INT = Value((3,), "float32"), Value((), "complex64"), Value((3,), "int32")


def op(operation, inputs, *outputs, **more):
    return Node(operation, tuple(inputs), outputs, **more)


def graph(nodes, inputs, outputs, **kinds):
    """Values are floats, but for the numbers in `integers`."""
    integers = kinds.pop("integers", ())
    numbers = {*inputs, *outputs, *(v for n in nodes for v in (*n.inputs, *n.outputs))}
    values = {v: INT if v in integers else X for v in numbers}
    return Graph(tuple(nodes), values, tuple(inputs), tuple(outputs), **kinds)


def cut(operation, x, y, kind="detached"):
    return op(operation, [x], y, links=((CUT,),), loss=kind)


def zero(operation, x, y):
    return op(operation, [x], y, links=((ZERO,),), loss="zero_derivative")


def found(g, index=0):
    return [(loss.node.operation, loss.whole) for loss in losses(g, g.inputs[index])]


def test_the_weakest_link_of_a_path_counts():
    g = graph([op("exp", [0], 1), zero("round", 1, 2), cut("stop", 2, 3)], [0], [1, 2, 3])
    assert dependence_matrix(g) == [[FULL], [ZERO], [CUT]]


def test_the_strongest_of_several_paths_counts():
    g = graph([cut("stop", 0, 1), op("add", [0, 1], 2)], [0], [2])
    assert dependence_matrix(g) == [[FULL]]


def test_without_links_integers_are_cut_and_floats_differentiable():
    g = graph([op("index", [0, 1], 2)], [0, 1], [2], integers=[1])
    assert links_of(g, g.nodes[0]) == ((FULL, CUT),)


def test_what_flows_outside_of_the_framework_is_cut():
    g = graph([op("exp", [0], 1), op("exp", [2], 3)], [0], [3], outside=((1, 2),))
    assert dependence_matrix(g) == [[CUT]]


def test_the_whole_loss_names_where_the_derivative_ends():
    g = graph([op("exp", [0], 1), cut("stop", 1, 2), op("exp", [2], 3)], [0], [3])
    assert found(g) == [("stop", True)]


def test_a_cut_that_does_not_reach_the_output_is_no_loss():
    g = graph([op("exp", [0], 1), cut("item", 1, 2)], [0], [1])
    assert found(g) == []


def test_every_path_that_is_cut_is_named():
    nodes = [cut("stop", 0, 1), cut("compare", 0, 2), op("multiply", [1, 2], 3)]
    assert found(graph(nodes, [0], [3])) == [("stop", True), ("compare", True)]


@pytest.mark.parametrize("join", ["multiply", "where", "index"])
def test_a_mask_or_an_index_is_no_lost_term(join):
    nodes = [op("exp", [0], 1), cut("compare", 0, 2), op(join, [1, 2], 3)]
    assert found(graph(nodes, [0], [3])) == []


def test_what_is_computed_from_the_value_it_is_added_to_is_no_lost_term():
    nodes = [op("exp", [0], 1), zero("floor", 1, 2), op("subtract", [1, 2], 3)]
    assert found(graph(nodes, [0], [3])) == []


# --- programs inside ---------------------------------------------------------------------


def test_a_call_is_as_strong_as_its_body():
    inner = graph([cut("stop", 10, 11)], [10, 12], [11, 12])
    g = graph([op("call", [0, 1], 2, 3, bodies=(Body(inner, (0, 1)),))], [0, 1], [2, 3])
    assert dependence_matrix(g) == [[CUT, NONE], [NONE, FULL]]
    assert found(g, 0) == [("stop", True)]
    assert found(g, 1) == []


def test_a_carry_ties_values_over_several_rounds():
    inner = graph([], [10, 11, 12], [11, 12, 12])  # (a, b, c) -> (b, c, c)
    body = Body(inner, (0, 1, 2), carries=((0, 0), (1, 1), (2, 2)), skippable=True)
    g = graph([op("scan", [0, 1, 2], 3, 4, 5, bodies=(body,))], [0, 1, 2], [3])
    assert dependence_matrix(g) == [[FULL, FULL, FULL]]


def test_a_loop_that_always_runs_does_not_hand_its_carry_through():
    body = Body(graph([], [10, 11], [11, 11]), (0, 1), carries=((0, 0), (1, 1)))
    g = graph([op("scan", [0, 1], 2, 3, bodies=(body,))], [0, 1], [2])
    assert dependence_matrix(g) == [[NONE, FULL]]


def test_a_cut_inside_a_loop_is_found_and_names_its_call():
    inner = graph([cut("stop", 10, 12), op("add", [12, 11], 13)], [10, 11], [13])
    node = op("scan", [0, 1], 2, bodies=(Body(inner, (0, 1), carries=((0, 0),)),))
    g = graph([node], [0, 1], [2])
    (loss,) = losses(g, g.inputs[0])
    assert (loss.node.operation, loss.call) == ("stop", node)
    assert dependence_matrix(g) == [[CUT, FULL]]


def test_what_chooses_a_branch_is_cut():
    branch = Body(graph([], [10], [10]), (1,))
    g = graph([op("cond", [0, 1], 2, bodies=(branch, branch))], [0, 1], [2], integers=[0])
    assert dependence_matrix(g) == [[CUT, FULL]]


def test_the_condition_of_a_loop_cuts_and_its_carry_flows():
    gate = Body(graph([op("less", [20], 21)], [20], [21], integers=[21]), (0,), ((0, 0),), True)
    step = Body(graph([op("exp", [10], 11)], [10], [11]), (0,), ((0, 0),), skippable=True)
    g = graph([op("while", [0], 1, bodies=(gate, step))], [0], [1])
    assert dependence_matrix(g) == [[FULL]]


def test_given_links_hide_what_is_inside():
    inner = graph([cut("stop", 10, 11)], [10], [11])
    node = op("rule", [0], 1, bodies=(Body(inner, (0,)),), links=((FULL,),))
    g = graph([node], [0], [1])
    assert dependence_matrix(g) == [[FULL]]
    assert found(g) == []
