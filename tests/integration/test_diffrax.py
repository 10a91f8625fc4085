"""Tests gradients of a neural differential equation with diffrax's solvers and adjoints."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
diffrax = pytest.importorskip("diffrax", reason="diffrax is not installed")
equinox = pytest.importorskip("equinox", reason="equinox is not installed")
import jax.numpy as jnp

import gradtools.jax as gt
from gradtools import GradtoolsError

pytestmark = [pytest.mark.integration, pytest.mark.jax]
STARTS = jnp.asarray(np.random.default_rng(1).normal(size=(6, 2)))
ALONG = STARTS[::-1]
NET, STATIC = equinox.partition(
    equinox.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(0)),
    equinox.is_inexact_array,
)
ADJOINTS = {
    "recursive": diffrax.RecursiveCheckpointAdjoint(),
    "direct": diffrax.DirectAdjoint(),
}


def misfit(net, start, adjoint="recursive"):
    """Return the squared distance between the end point of the path and 1."""
    found = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, net: equinox.combine(net, STATIC)(y)),
        diffrax.Heun(),
        0.0,
        1.0,
        0.25,
        start,
        args=net,
        adjoint=ADJOINTS[adjoint],
    )
    return jnp.square(found.ys[-1] - 1).sum()


def agree(found, expected, tolerance=1e-9):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_paths_in_chunks_have_the_loss_and_the_gradients_of_the_loop():
    paths = lambda net, starts: jax.vmap(lambda y: misfit(net, y))(starts)
    in_chunks = gt.chunked(paths, 2, in_axes=(None, 0))
    looped = lambda net, starts: jnp.concatenate([paths(net, starts[:2]), paths(net, starts[2:])])
    found = jax.jit(gt.value_and_grad(lambda net: in_chunks(net, STARTS[:4]).mean()))(NET)
    expected = jax.jit(jax.value_and_grad(lambda net: looped(net, STARTS[:4]).mean()))(NET)
    agree(found, expected)


def test_modes_agree_where_the_adjoint_has_them():
    f = lambda y: misfit(NET, y, "direct")
    start, along = STARTS[0], ALONG[0]
    gradient = jax.jit(gt.grad(f))
    slope = lambda h: gradient(start + h * along) @ along
    twice = (slope(1e-5) - slope(-1e-5)) / 2e-5
    pushed = jax.jit(lambda y: gt.jvp(f, (y,), (along,))[1])(start)
    np.testing.assert_allclose(pushed, gradient(start) @ along, rtol=1e-10)
    product = jax.jit(lambda y: gt.hvp(f, (y,), (along,))[1][0])(start)
    np.testing.assert_allclose(product @ along, twice, rtol=1e-6)


def test_forward_mode_through_a_reverse_adjoint_is_refused_by_name():
    f = lambda y: misfit(NET, y, "recursive")
    with pytest.raises((GradtoolsError, TypeError), match=r"custom_vjp|forward"):
        gt.jvp(f, (STARTS[0],), (ALONG[0],))


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_what_looks_at_gradients_looks_through_a_solver(adjoint):
    f = lambda y: misfit(NET, y, adjoint)
    report = gt.why_zero(f, STARTS[0])
    assert not report
    graph = gt.gradient_graph(f, STARTS[0])
    assert "→ gradient of y" in str(graph) or "→ gradient of argument 0" in str(graph)
