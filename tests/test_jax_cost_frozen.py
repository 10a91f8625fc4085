"""What second derivatives through `frozen` keep and cost in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt

WIDTH = 32
Y = jnp.ones(WIDTH)
Z = jnp.asarray(np.random.default_rng(0).normal(size=(4, WIDTH)))


def network(depth):
    w = jnp.asarray(np.random.default_rng(1).normal(size=(depth, WIDTH, WIDTH)) / 6)

    def G(z):
        return jax.lax.scan(lambda z, w: (jnp.tanh(z @ w), None), z, w)[0]

    return G, w


def by_z(G):
    return lambda y, z: jax.grad(lambda z: jnp.sum(jnp.tanh(y * G(z)) * y))(z)


def kept(G, w):
    """Bytes that a pullback of the gradient function holds, besides the weights."""
    _, pull = jax.vjp(lambda y: by_z(G)(y, Z), Y)
    arrays = {id(x): x for x in jax.tree.leaves(pull) if hasattr(x, "nbytes")}
    return sum(x.nbytes for x in arrays.values() if x.size != w.size)


def test_what_a_use_keeps_does_not_grow_with_depth():
    ours = []
    for depth in (4, 24):
        G, w = network(depth)
        ours.append(kept(gt.frozen(G), w))
    assert ours[0] == ours[1] > 0
    assert ours[1] <= kept(*network(24)) / 3


@pytest.mark.parametrize("G_of", [gt.frozen, lambda G: G])
def test_temporary_bytes_in_a_scan_over_z(G_of):
    G, _ = network(24)
    G = G_of(G)

    def total(y, zs):
        return jax.lax.scan(lambda c, z: (c + (by_z(G)(y, z) ** 2).sum(), None), 0.0, zs)[0]

    def temp(count):
        zs = jnp.zeros((count, *Z.shape))
        compiled = jax.jit(jax.grad(total)).lower(Y, zs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    slope = (temp(24) - temp(8)) / 16
    graph = 24 * Z.nbytes
    assert slope <= 8 * Z.nbytes if G_of is gt.frozen else slope > graph
