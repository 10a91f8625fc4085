"""`graph_diff` of what reads and writes at indices, within a framework and across."""

import importlib
from functools import cache
from itertools import product

import numpy as np
import pytest

import gradtools
from tests.support.index_ways import differing, equal

pytestmark = pytest.mark.skipif(
    len(gradtools.available_backends()) < 2, reason="needs both frameworks"
)
rng = np.random.default_rng(0)
FLOATS = [rng.uniform(0.5, 1.5, s).astype(np.float32) for s in ((3, 4), (4, 4), (3, 4, 5))]
INDICES = [np.array(n) for n in ([0, 2, 1, 0], [3, 1, 0, 2], [[0, 2, 1, 0], [1, 1, 2, 0]])]
BACKENDS = ("torch", "jax")


def of(side, f, order):
    """The graph of a program of one framework."""
    gt = importlib.import_module(f"gradtools.{BACKENDS[side]}")
    words = importlib.import_module(BACKENDS[side])
    arrays = map(gt.asarray, (*FLOATS, *INDICES))
    return gt.gradient_graph(lambda *xs: f(words, *xs), *arrays, wrt=(0, 1, 2), order=order)


@cache
def graph(name, side, order):
    return of(side, equal()[name][side], order)


@cache
def numbers(name):
    torch = importlib.import_module("torch")
    return equal()[name][0](torch, *map(torch.tensor, (*FLOATS, *INDICES))).numpy()


def diff(one, two):
    return importlib.import_module("gradtools.torch").graph_diff(one, two)


def told(found):
    alone = [node.operation for node in (*found.only_a, *found.only_b)]
    return [*(what for change in found.changed for what in change.what), *alone]


@pytest.mark.parametrize("name", equal())
@pytest.mark.parametrize("order", [0, 1])
def test_one_way_of_indexing_is_the_same_in_both_frameworks(name, order):
    graphs = [graph(name, side, order) for side in (0, 1)]
    for one, two in (graphs, graphs[::-1]):
        found = diff(one, two)
        assert not found and not found.by_name, str(found)


@pytest.mark.parametrize("name", differing())
def test_what_looks_alike_and_is_not_differs(name):
    *programs, words = differing()[name]
    found = diff(*(of(side, f, 1) for side, f in enumerate(programs)))
    assert found and any(words in what for what in told(found)), str(found)


@pytest.mark.parametrize("sides", [(0, 1), (0, 0), (1, 1)], ids=["across", "torch", "jax"])
def test_two_ways_that_give_other_numbers_differ(sides):
    ways = {name: numbers(name) for name in equal()}
    pairs = [
        (one, two)
        for one, two in product(ways, ways)
        if ways[one].shape == ways[two].shape and not np.allclose(ways[one], ways[two])
    ]
    graphs = lambda pair: (graph(name, side, 0) for name, side in zip(pair, sides, strict=True))
    silent = [pair for pair in pairs if not diff(*graphs(pair))]
    assert len(pairs) > 500
    assert not silent


def test_there_are_more_than_fifty_ways_and_ten_that_differ():
    assert len(equal()) >= 50 and len(differing()) >= 10


def test_a_write_to_a_view_says_where_it_writes():
    torch, torch_gt = (importlib.import_module(n) for n in ("torch", "gradtools.torch"))

    def f(x, w, k):
        y = x.clone()
        y[k] = w[0]
        return y

    graphs = [
        torch_gt.gradient_graph(f, torch.ones(3, 4), torch.ones(4, 4), k, order=0) for k in (1, 2)
    ]
    found = torch_gt.graph_diff(*graphs)
    assert any("start: (1, 0) ≠ (2, 0)" in what for what in told(found)), str(found)
    updates = [node for node in graphs[0].nodes if node.native == "update"]
    assert updates[0].attributes["start"] == (1, 0) and updates[0].attributes["drop"] == (0,)
    assert "y[k] = w[0]" in updates[0].source.text


def test_integers_are_compared_to_the_last_digit():
    torch, torch_gt = (importlib.import_module(n) for n in ("torch", "gradtools.torch"))
    x = torch.arange(3)
    pair = [
        torch_gt.gradient_graph(lambda x, n=n: x + n, x, order=0, wrt=())
        for n in (1234567, 1234568)
    ]
    assert torch_gt.graph_diff(*pair)
