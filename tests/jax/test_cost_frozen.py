"""Tests memory and FLOPs of second derivatives through `frozen` in JAX."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools.jax.rules.primitives import primal_p, tangent_p, value_p

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
    """Return the size in bytes of the residuals of the gradient function, without the weights."""
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


# --- operations -------------------------------------------------------------------------------


def flops(fun, *args):
    """Count the FLOPs of matrix products in a jaxpr, multiplied by the trip counts of loops."""
    return flops_of(jax.make_jaxpr(fun)(*args))


def flops_of(jaxpr):
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        assert eqn.primitive.name != "while", "a loop with an unknown trip count"
        if eqn.primitive in (primal_p, value_p, tangent_p):
            avals = [v.aval for v in eqn.invars]
            total += flops(partial(eqn.primitive.impl, **eqn.params), *avals)
            continue
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inside = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
        total += trips * sum(flops_of(x) for x in inside if is_jaxpr(x))
    return total


def is_jaxpr(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")


DEPTH, COUNT = 6, 5
FORWARD = 2 * Z.size * WIDTH * DEPTH
ZS = jnp.asarray(np.random.default_rng(2).normal(size=(COUNT, *Z.shape)))


def scanned(z):
    return network(DEPTH)[0](z)


def unrolled(z):
    for w in network(DEPTH)[1]:
        z = jnp.tanh(z @ w)
    return z


def in_a_loop(G):
    return lambda y: jax.lax.map(lambda z: (by_z(G)(y, z) ** 2).sum(), ZS).sum()


def one_by_one(G):
    return lambda y: sum((by_z(G)(y, z) ** 2).sum() for z in ZS)


def mapped(G):
    return lambda y: jax.vmap(lambda z: (by_z(G)(y, z) ** 2).sum())(ZS).sum()


@pytest.mark.slow_at("in_a_loop", "unrolled")
@pytest.mark.whole_at("in_a_loop", ("mapped", "scanned"))
@pytest.mark.parametrize("G", [scanned, unrolled])
@pytest.mark.parametrize("loss", [in_a_loop, one_by_one, mapped])
def test_forward_passes_that_a_second_derivative_costs(G, loss):
    plain = flops(jax.grad(loss(G)), Y)
    ours = flops(jax.grad(loss(gt.frozen(G))), Y)
    assert plain == 3 * FORWARD * COUNT
    assert ours == 4 * FORWARD * COUNT
    assert ours / plain <= 1.34


def test_the_term_along_z_is_computed_only_when_asked():
    G = gt.frozen(unrolled)
    second = lambda wanted: jax.grad(lambda y, z: (by_z(G)(y, z) ** 2).sum(), wanted)
    assert flops(second(0), Y, Z) == 4 * FORWARD
    assert 6 * FORWARD < flops(second((0, 1)), Y, Z) < 7 * FORWARD
    assert flops(jax.grad(lambda z: gt.frozen(unrolled)(z).sum()), Z) == 2 * FORWARD


# --- bytes ------------------------------------------------------------------------------------


def graph_of(G, z):
    """Return the size in bytes of the residuals of the pushforward of G, without the weights."""
    leaves = jax.tree.leaves(jax.linearize(G, z)[1])
    arrays = {id(x): x for x in leaves if x.shape != network(DEPTH)[1].shape}
    return sum(x.nbytes for x in arrays.values())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lean", "plain"])
def test_bytes_that_the_compiled_program_keeps_for_a_further_z(way):
    size = graph_of(scanned, Z)
    G = gt.frozen(scanned) if way == "lean" else scanned
    step = lambda y, zs: jax.lax.map(lambda z: (by_z(G)(y, z) ** 2).sum(), zs).sum()

    def temp(count):
        zs = jnp.zeros((count, *Z.shape))
        compiled = jax.jit(jax.grad(step)).lower(Y, zs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    slope, own = (temp(48) - temp(16)) / 32, 8 * Z.nbytes
    assert 0 < slope <= own if way == "lean" else slope > 1.5 * size


# --- mixed_partial ----------------------------------------------------------------------------


def mixed(depth):
    f = lambda y, g: jnp.sum(jnp.tanh(y * g) * y)
    return lambda y, z, us: gt.mixed_partial(f, network(depth)[0], y, z, us)


@pytest.mark.sweep_at("3")
@pytest.mark.parametrize("directions", [1, 3])
def test_mixed_partial_takes_the_same_memory_at_every_depth(directions):
    def temp(depth):
        lowered = jax.jit(mixed(depth)).lower(Y, Z, [Z] * directions)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert len({temp(depth) for depth in (4, 16, 64, 256)}) == 1


def test_each_further_direction_costs_one_pass():
    us = [Z, 2 * Z, 3 * Z]
    costs = [flops(mixed(DEPTH), Y, Z, us[:count]) for count in (1, 2, 3)]
    assert costs == [2 * FORWARD, 3 * FORWARD, 4 * FORWARD]
