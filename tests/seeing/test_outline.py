"""From a graph to its outline: bodies, runs of one scope, leaves at their readers."""

from __future__ import annotations

import pytest

from gradtools.seeing.graphs.nodes import Dependence
from gradtools.seeing.graphs.outline import Block, matches
from gradtools.seeing.graphs.outlining import outline_of
from tests.support.seeing_graphs import Builder, loop, shared_module, transformer


def titles(block: Block) -> list[str]:
    return [child.title for child in block.children]


def block(outline, name: str, phase: int = 0) -> Block:
    return next(b for b in outline.blocks if b.title == name and b.phase == phase)


def test_consecutive_steps_of_one_scope_are_a_block_each_time():
    outline = outline_of(shared_module())
    (net,) = [child for child in outline.columns[0].children if isinstance(child, Block)]
    assert titles(net) == ["shared", "own", "shared", "own", "shared", "own"]


def test_a_leaf_stands_in_the_innermost_block_of_all_its_readers():
    outline = outline_of(transformer(2, backward=False))
    query = block(outline, "query")
    assert titles(query)[0].endswith("query.weight")
    b = Builder()
    w, x = b.input("w", 3), b.input("x", 3)
    for name in ("one", "two"):
        x = b.op("add", b.op("multiply", x, w, scope=(name,)), x, scope=(name,))
    outline = outline_of(b.graph(x))
    assert titles(outline.columns[0])[:3] == ["w", "x", "one"]


def test_values_are_followed_through_bodies():
    outline = outline_of(loop())
    at = {box.title: box.key for column in outline.columns for box in column.boxes}
    pairs = {(arrow.source, arrow.target) for arrow in outline.arrows}
    expected = [
        *(("carry", "matmul"), ("w", "matmul"), ("matmul", "add"), ("xs", "add")),
        *(("add", "tanh"), ("tanh", "sin"), ("tanh", "cos"), ("flag", "cond")),
        *(("sin", "output 0"), ("cos", "output 0"), ("tanh", "output 1")),
    ]
    assert pairs == {(at[one], at[two]) for one, two in expected}
    assert [found.kind for found in outline.blocks] == ["loop", "branch", "branch", "branch"]
    assert block(outline, "scan").mark == "checkpoint"


def test_the_shift_of_a_softmax_is_no_cut():
    def program(reduction):
        b = Builder()
        x = b.input("x", 4)
        top = b.op("maximum", b.constant("-inf"), b.op(reduction, x, shape=(1,)))
        top = b.op("stop", b.op("broadcast", top), links=((Dependence.CUT,),), loss="detached")
        return b.graph(b.op("exp", b.op("subtract", x, top)))

    assert not [edge for edge in program("max").edges if edge.cut]
    assert [edge.cut for edge in program("mean").edges if edge.cut] == ["stopped on purpose"]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        *(("layers.3", "encoder.layers.3", True), ("layers.*", "encoder.layers.3", True)),
        *(("layers.*", "encoder.layers.3.mlp", False), ("*.mlp", "encoder.layers.3.mlp", True)),
        *(("mlp", "encoder.layers.3.mlp", True), ("lp", "encoder.layers.3.mlp", False)),
        *(("a[0]", "a[0]", True), ("a.c", "abc", False), ("*", "encoder", True)),
    ],
)
def test_a_pattern_names_the_end_of_a_path(pattern, path, expected):
    assert matches(path, pattern) is expected


def test_what_is_seen_is_a_graph_that_flows_one_way():
    outline = outline_of(transformer(12))
    order = {item.key: i for c in outline.columns for i, item in enumerate((c, *c.walk()))}
    phases = {item.key: item.phase for c in outline.columns for item in c.walk()}
    for depth in range(6):
        for arrow in outline.seen_arrows(outline.opened(depth)):
            if phases[arrow.source] == phases[arrow.target]:
                assert order[arrow.source] < order[arrow.target]
