"""`graph_diff` names what differs of two programs, and is silent where nothing does."""

import importlib

import numpy as np
import pytest

import gradtools
from tests.support.equal_graph_pairs import across, shared_equal
from tests.support.graph_pairs import of_jax, of_torch, shared

rng = np.random.default_rng(0)
X, Y, W = (rng.uniform(0.5, 1.5, shape).astype(np.float32) for shape in ((3, 4), (3, 4), (4, 4)))
needs_both = pytest.mark.skipif(
    len(gradtools.available_backends()) < 2, reason="needs both frameworks"
)


def graph(gt, words, f, order=1):
    """The graph of f, which is given a framework's words and three arrays."""
    arrays = [gt.asarray(a) for a in (X, Y, W)]
    return gt.gradient_graph(lambda *xs: f(words, *xs), *arrays, wrt=(0, 1, 2), order=order)


def name_of(gt):
    return gt.__name__.rpartition(".")[2]


def words_of(gt):
    return importlib.import_module({"torch": "torch", "jax": "jax.numpy"}[name_of(gt)])


def told(difference):
    """All that a difference says."""
    alone = [node.operation for node in (*difference.only_a, *difference.only_b)]
    return [*(what for change in difference.changed for what in change.what), *alone]


def own(gt):
    framework = importlib.import_module(name_of(gt))
    return (of_torch if name_of(gt) == "torch" else of_jax)(framework)


@pytest.mark.parametrize("name", shared())
@pytest.mark.parametrize("order", [0, 1])
def test_what_differs_is_named(gt, name, order):
    one, two, words = shared()[name]
    found = gt.graph_diff(*(graph(gt, words_of(gt), f, order) for f in (one, two)))
    assert found and any(words in what for what in told(found)), str(found)


def test_what_differs_in_a_frameworks_own_words_is_named(gt):
    for name, (one, two, words) in own(gt).items():
        found = gt.graph_diff(
            *(graph(gt, importlib.import_module(name_of(gt)), f) for f in (one, two))
        )
        assert found and any(words in what for what in told(found)), f"{name}: {found}"


@pytest.mark.parametrize("name", shared_equal())
@pytest.mark.parametrize("order", [1, 2])
def test_equal_programs_have_no_difference(gt, name, order):
    found = gt.graph_diff(*(graph(gt, words_of(gt), f, order) for f in shared_equal()[name]))
    assert not found, str(found)


@needs_both
@pytest.mark.parametrize("name", across())
def test_equal_programs_of_two_frameworks_have_no_difference(name):
    gts = [importlib.import_module(f"gradtools.{backend}") for backend in ("torch", "jax")]
    words = [importlib.import_module(backend) for backend in ("torch", "jax")]
    graphs = [graph(*given) for given in zip(gts, words, across()[name], strict=True)]
    for one, two in (graphs, graphs[::-1]):
        found = gts[0].graph_diff(one, two)
        assert not found and not found.by_name, str(found)


@needs_both
@pytest.mark.parametrize("name", shared())
def test_another_program_of_the_other_framework_differs(name):
    gts = [importlib.import_module(f"gradtools.{backend}") for backend in ("torch", "jax")]
    one, two, _ = shared()[name]
    first, second = (graph(gt, words_of(gt), f) for gt, f in zip(gts, (one, two), strict=True))
    assert gts[0].graph_diff(first, second)
    assert not gts[0].graph_diff(first, graph(gts[1], words_of(gts[1]), one))


@needs_both
def test_there_are_a_hundred_pairs_that_differ_and_fifty_that_do_not():
    gts = [importlib.import_module(f"gradtools.{backend}") for backend in ("torch", "jax")]
    assert len(shared()) + sum(len(own(gt)) for gt in gts) >= 100
    assert len(shared_equal()) + len(across()) >= 50


def test_that_captured_numbers_are_not_compared_is_said(gt):
    w = gt.asarray(W)
    found = gt.graph_diff(*(graph(gt, words_of(gt), lambda p, x, *_: x @ w) for _ in range(2)))
    assert not found and "the numbers in 1 captured array are not compared" in str(found)
    plain = gt.graph_diff(*(graph(gt, words_of(gt), lambda p, x, *_: x * x) for _ in range(2)))
    assert "not compared" not in str(plain)
