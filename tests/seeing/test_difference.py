"""Two graphs compared: what is alike is found, in other words too, and what differs is told."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from gradtools.errors import GradtoolsError
from gradtools.seeing.differences import alignment
from gradtools.seeing.differences.alignment import Alignment, aligned
from gradtools.seeing.differences.difference import graph_diff
from gradtools.seeing.graphs.graph import Graph
from gradtools.seeing.graphs.nodes import Body, Dependence
from tests.support.scenes import picture_of
from tests.support.seeing_graphs import SHAPES, Builder, transformer


def share(alignment: Alignment) -> float:
    """How much of both programs is paired, from 0 to 1."""
    paired = sum(len(one) + len(two) for one, two in alignment.pairs)
    return paired / (len(alignment.first) + len(alignment.second))


def short_words(**change) -> Graph:
    """A small classifier in few large operations."""
    b = Builder()
    x, w = b.input("x", 5, 4), b.input("w", 4, 3)
    h = b.op("matmul", x, w, shape=(5, 3), saved=(x, w))
    said = {"attributes": {"approximate": "tanh"}, "dtype": change.get("dtype"), "saved": (h,)}
    h = b.op(change.get("activation", "gelu"), h, **said)
    h = b.op("layer_norm", h, mark=change.get("mark", ""))
    if change.get("stopped"):
        h = b.op("stop", h, links=((Dependence.CUT,),), loss="detached")
    p = b.op("softmax", h, attributes={"axis": change.get("axis", 1)})
    return b.graph(b.op("mean", p, shape=()), names=["loss"])


def many_words() -> Graph:
    """The same in many small operations, reshaped, with a call inside."""
    b = Builder()
    x, w = b.input("x", 5, 4), b.input("w", 4, 3)
    h = b.op("dot_general", x, w, shape=(5, 3))
    inner = b.op("multiply", b.op("power", h, b.constant("3")), b.constant("0.044715"))
    inner = b.op("tanh", b.op("multiply", b.op("add", h, inner), b.constant("0.797885")))
    half = b.op("multiply", b.op("add", inner, b.constant("1")), b.constant("0.5"))
    h = b.op("multiply", h, half)
    mean = b.op("divide", b.op("sum", h, shape=(5,)), b.constant("3"))
    centred = b.op("subtract", h, b.op("broadcast", mean, shape=(5, 1)))
    spread = b.op("sum", b.op("power", centred), shape=(5,))
    spread = b.op("sqrt", b.op("add", b.op("divide", spread, b.constant("3")), b.constant("1e-5")))
    h = b.op("divide", centred, b.op("broadcast", spread, shape=(5, 1)))
    s = Builder()
    z = s.input("z", 5, 3)
    e = s.op("exp", s.op("subtract", z, s.op("max", z, shape=(5, 1))))
    body = Body(s.graph(s.op("divide", e, s.op("sum", e, shape=(5, 1)))), (0,))
    p = b.op("call", h, bodies=(body,), attributes={"name": "softmax"})
    flat = b.op("reshape", p, shape=(15,))
    loss = b.op("divide", b.op("sum", flat, shape=()), b.constant("15"))
    return b.graph(loss, names=["loss"])


@pytest.mark.parametrize("name", SHAPES)
def test_a_graph_does_not_differ_from_itself(name):
    found = graph_diff(SHAPES[name](), SHAPES[name]())
    assert not found
    assert not (found.changed or found.only_a or found.only_b)
    assert str(found).splitlines()[0].endswith("no difference")


def test_what_is_made_of_small_steps_is_the_same():
    for one, two in ((short_words(), many_words()), (many_words(), short_words())):
        found = graph_diff(one, two)
        assert not found, str(found)
    groups = {(a[0].operation, len(b)) for a, b in graph_diff(short_words(), many_words()).matched}
    assert groups == {
        *(("matmul", 1), ("gelu", 8), ("layer_norm", 9), ("softmax", 1), ("mean", 2)),
    }


def test_what_comes_after_the_parts_is_no_part():
    def graph(whole):
        b = Builder()
        x = b.input("x", 5, 3)
        if whole:
            return b.graph(b.op("softmax", x))
        e = b.op("exp", x)
        p = b.op("divide", e, b.op("sum", e, shape=(5, 1)))
        return b.graph(b.op("sum", p, shape=()))

    found = graph_diff(graph(True), graph(False))
    assert [node.operation for node in found.only_b] == ["sum"] and not found.only_a


def test_another_activation_is_told():
    found = graph_diff(short_words(), short_words(activation="sin"), names=("torch", "jax"))
    assert found and not found.only_a and not found.only_b
    assert [change.what for change in found.changed] == [("gelu ≠ sin",)]
    assert "≠ gelu: gelu ≠ sin" in str(found)


def test_another_dtype_is_told():
    found = graph_diff(short_words(), short_words(dtype="float64"))
    assert found.changed[0].what == ("dtype: float32 ≠ float64",)
    found = graph_diff(short_words(dtype="int32"), short_words(dtype="int64"))
    assert [change.what for change in found.changed] == [("dtype: int32 ≠ int64",)] * 5


def test_a_mark_of_one_alone_is_told():
    found = graph_diff(short_words(), short_words(mark="frozen"))
    assert [change.what for change in found.changed] == [("no mark ≠ frozen",)]


def test_another_axis_is_told():
    found = graph_diff(short_words(), short_words(axis=0))
    assert [change.what for change in found.changed] == [("axis: 1 ≠ 0",)]


def test_a_stopped_gradient_of_one_alone_is_told():
    found = graph_diff(short_words(), short_words(stopped=True), names=("torch", "jax"))
    assert [node.operation for node in found.only_b] == ["stop"] and not found.only_a
    assert "+ stop (only in jax)" in str(found)


def test_a_link_that_is_cut_in_one_alone_is_told():
    def graph(strength):
        b = Builder()
        x = b.input("x", 4)
        return b.graph(b.op("custom_rule", x, links=((strength,),), loss="rule"))

    found = graph_diff(graph(Dependence.DIFFERENTIABLE), graph(Dependence.CUT))
    assert found.changed[0].what == ("derivative: differentiable ≠ its rule carries none",)


def test_a_missing_skip_connection_is_told():
    def graph(skips):
        b = Builder()
        x = b.input("x", 4)
        h = b.op("tanh", b.op("sin", x))
        return b.graph(b.op("exp", b.op("add", h, x) if skips else h))

    found = graph_diff(graph(True), graph(False))
    assert [node.operation for node in found.only_a] == ["add"] and not found.only_b


def test_another_wiring_is_told():
    def graph(first):
        b = Builder()
        x = b.input("x", 4)
        one, two = b.op("sin", x), b.op("exp", x)
        return b.graph(b.op("add", b.op("tanh", one if first else two), b.op("multiply", one, two)))

    found = graph_diff(graph(True), graph(False))
    assert [(c.first.operation, c.what) for c in found.changed] == [
        ("tanh", ("reads something else",))
    ]


def test_steps_in_another_order_are_found():
    def graph(names):
        b = Builder()
        x = b.input("x", 6)
        made = {name: b.op(name, x) for name in names}
        return b.graph(b.op("concatenate", *(made[name] for name in sorted(made)), shape=(18,)))

    assert not graph_diff(graph(("tanh", "exp", "log")), graph(("log", "exp", "tanh")))


def test_of_several_in_another_order_each_is_paired_with_its_own():
    def one_of_many(names: list[str], last: str) -> Graph:
        b = Builder()
        x = b.input("x", 4)
        parts = {name: b.op(name, x) for name in names}
        total = b.op("add", b.op("add", parts["sin"], parts["exp"]), parts["tanh"])
        return b.graph(b.op(last, total))

    found = graph_diff(
        one_of_many(["sin", "exp", "tanh"], "cos"), one_of_many(["tanh", "exp", "sin"], "sqrt")
    )
    assert [change.what for change in found.changed] == [("cos ≠ sqrt",)]
    assert not (found.only_a or found.only_b)


def test_layouts_are_no_difference():
    def graph(shape):
        b = Builder()
        x = b.input("x", *shape)
        return b.graph(b.op("sum", b.op("sin", x), shape=()))

    assert not graph_diff(graph((2, 3, 8, 8)), graph((2, 8, 8, 3)))
    found = graph_diff(graph((2, 3)), graph((2, 4)))
    assert found.changed[0].what == ("shape: 2×3 float32 ≠ 2×4 float32",)


def test_the_backward_passes_are_compared_too():
    one, two = SHAPES["linear_with_backward"](), SHAPES["linear_with_backward"]()
    nodes = [n for n in two.nodes if n.operation != "tanh_backward"]
    other = Graph(tuple(nodes), two.values, two.inputs, two.outputs, two.captured)
    found = graph_diff(one, other)
    assert [node.operation for node in found.only_a] == ["tanh_backward"]
    assert found.only_a[0].phase == 1


def test_what_is_kept_for_backward_is_told():
    text = str(graph_diff(short_words(), many_words(), names=("torch", "jax")))
    assert "kept for backward: torch 60 B, jax 0 B" in text


def test_layers_of_a_transformer_are_aligned():
    eleven, twelve = transformer(11, backward=False), transformer(12, backward=False)
    found = graph_diff(eleven, twelve)
    assert len(found.only_b) == 18 and not found.only_a and not found.changed
    assert {node.scope[:2] for node in found.only_b} == {("encoder", "layers.11")}


def test_long_programs_are_cut_where_they_surely_agree(monkeypatch):
    graph = transformer(6)
    whole = aligned(graph, graph)
    monkeypatch.setattr(alignment, "_CELLS", 900)
    parts = aligned(graph, graph)
    assert share(parts) == share(whole) == 1.0
    assert all(one == two for one, two in parts.pairs)


def test_the_table_finds_the_common_subsequence_of_most_weight():
    rng = np.random.default_rng(0)
    for _ in range(20):
        words = [[str(k) for k in rng.integers(0, 4, size=n)] for n in rng.integers(1, 9, size=2)]
        graphs = []
        for sequence in words:
            b = Builder()
            x = b.input("x", 2)
            for word in sequence:
                x = b.op(word, x)
            graphs.append(b.graph(x))
        steps = [alignment.steps_of(graph) for graph in graphs]
        pairs = alignment._by_table(*steps)
        assert all(words[0][i] == words[1][j] for i, j in pairs)
        assert all(a < b and c < d for (a, c), (b, d) in pairwise(pairs))
        assert len(pairs) == longest_common(*words)


def longest_common(one: list[str], two: list[str]) -> int:
    for size in range(min(len(one), len(two)), 0, -1):
        parts = {tuple(c) for c in combinations(one, size)}
        if parts & {tuple(c) for c in combinations(two, size)}:
            return size
    return 0


def test_the_picture_shows_both_and_marks_what_differs():
    found = graph_diff(short_words(), short_words(stopped=True), names=("torch", "jax"))
    svg = found.to_svg()
    root = ElementTree.fromstring(svg)
    told = ["".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"torch: forward", "jax: forward", "≠ only in jax"} <= set(told)
    assert svg.count('class="box p0 differs"') == 1
    assert "<h1>5 steps matched, 1 only in jax</h1>" in found.to_html()


def test_what_is_alike_stands_at_one_height():
    found = graph_diff(short_words(), many_words())
    outline = found._outline(())
    opened = outline.opened(0)
    picture, seen = picture_of(outline, opened), outline.seen_as(opened)
    at = {placed.item.key: placed.y + placed.height / 2 for placed in picture.boxes}
    apart = [abs(at[seen[one]] - at[seen[two]]) for one, two in outline.ties]
    assert len(apart) == 5 and max(apart) < 12


def test_a_difference_in_one_of_many_layers_is_not_folded_away():
    one, two = transformer(12, backward=False), transformer(12, backward=False)
    nodes = list(two.nodes)
    place = next(i for i, n in enumerate(nodes) if n.scope[1:] == ("layers.7", "mlp"))
    gelu = next(i for i in range(place, len(nodes)) if nodes[i].operation == "gelu")
    nodes[gelu] = type(nodes[gelu])(
        *("silu", nodes[gelu].inputs, nodes[gelu].outputs), scope=nodes[gelu].scope
    )
    other = Graph(tuple(nodes), two.values, two.inputs, two.outputs, two.captured)
    found = graph_diff(one, other)
    assert [change.what for change in found.changed] == [("gelu ≠ silu",)]
    assert "gelu ≠ silu" in found.to_svg()


def test_a_file_has_the_form_of_its_suffix(tmp_path):
    found = graph_diff(short_words(), many_words())
    for suffix, start in ((".svg", "<svg"), (".html", "<!doctype"), (".txt", "5 steps matched")):
        found.save(tmp_path / f"d{suffix}")
        assert (tmp_path / f"d{suffix}").read_text(encoding="utf-8").startswith(start)
    with pytest.raises(GradtoolsError, match=r"expected one of \.svg, \.html, \.htm, \.txt"):
        found.save(tmp_path / "d.pdf")


def test_what_is_no_graph_is_refused():
    with pytest.raises(GradtoolsError, match="graph_diff: b must be a Graph, got int"):
        graph_diff(short_words(), 3)
    with pytest.raises(GradtoolsError, match="got 'engine'"):
        graph_diff(short_words(), many_words()).to_svg(engine="graphviz")


def test_the_parts_of_operations_are_names_of_the_vocabulary():
    from gradtools.seeing.formulas.operation_record import OPERATIONS, of_vocabulary

    known = {alignment.NAMES.get(name, name) for name in OPERATIONS if of_vocabulary(name)} | {
        "random_bits",
        "bernoulli",
    }
    unknown = {part for parts in alignment.PARTS.values() for part in parts} - known
    assert not {
        name for name in unknown if not re.match("random|update|lu|custom_linear_solve", name)
    }
