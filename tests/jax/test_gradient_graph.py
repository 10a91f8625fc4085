"""Tests graphs of JAX programs with loops, branches on values and callbacks."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402  (only where JAX is installed)

import gradtools.jax as gt  # noqa: E402
from gradtools.errors import GradtoolsError  # noqa: E402

X = jnp.asarray([0.5, 1.0, 2.0], jnp.float32)
TWO = np.float32(2.0)


def test_a_scan_has_a_body_in_both_passes_and_keeps_one_array_for_each_round():
    def f(w):
        return jax.lax.scan(lambda c, _: (jnp.sin(w * c), None), X, None, length=4)[0]

    graph = gt.gradient_graph(f, X)
    scans = [n for n in graph.nodes if n.operation == "scan"]
    assert [n.phase for n in scans] == [0, 1]
    for node in scans:
        inner = {part.phase for body in node.bodies for part in body.graph.nodes}
        assert inner == {node.phase}
    stacked = [e.bytes for e in graph.edges if e.saved and e.bytes == 4 * X.nbytes]
    assert stacked


def test_a_number_that_one_branch_gives_is_drawn():
    def f(x):
        return (jax.lax.cond(x.sum() > 0, lambda x: x.sum(), lambda x: TWO, x) * x).sum()

    drawn = str(gt.gradient_graph(f, X))
    assert " = 2 " in drawn
    assert gt.gradient_graph(f, X).to_svg()


def test_what_leaves_jax_is_refused_with_what_to_ask():
    with pytest.raises(GradtoolsError, match=r"leaves JAX: .*why_zero"):
        gt.gradient_graph(lambda x: jnp.asarray(np.sin(x)), X)


def test_complex_gradients_keep_gradtools_convention():
    x = jnp.asarray([1 + 2j], jnp.complex64)
    graph = gt.gradient_graph(lambda x: x * (1 + 2j), x)
    assert [n.operation for n in graph.nodes if n.phase == 1] == ["conj", "multiply", "conj"]


def test_a_flax_module_gives_its_layers_scopes_in_both_passes():
    linen = pytest.importorskip("flax.linen")

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1, name="last")(jnp.tanh(linen.Dense(4, name="first")(x)))

    network = Network()
    params = network.init(jax.random.key(0), X)
    graph = gt.gradient_graph(network.apply, params, X)
    scopes = {(n.phase, n.scope[-1]) for n in graph.nodes if n.native == "dot_general"}
    assert {(0, "first"), (0, "last"), (1, "first"), (1, "last")} <= scopes
