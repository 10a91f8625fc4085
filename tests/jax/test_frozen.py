"""Tests frozen functions in JAX: traces, closed-over parameters and missing forward mode."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradtools.jax as gt
from gradtools import GradtoolsError, GradtoolsWarning

RNG = np.random.default_rng(20261121)
Y = jnp.asarray(RNG.normal(size=4))
ZS = jnp.asarray(RNG.normal(size=(5, 3, 4)))
A = jnp.asarray(RNG.normal(size=(4, 4)) / 2)


def net(z):
    return jnp.sin(jnp.tanh(z @ A) @ A.T)


def by_z(G):
    return lambda y, z: jax.grad(lambda z: jnp.sum(jnp.tanh(y * G(z)) * y))(z)


def same(found, expected, tolerance=1e-12):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for a, b in zip(found, expected, strict=True):
        assert float(jnp.abs(b).max()) > 1e-6, "the expected derivative is zero"
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(jnp.abs(b).max()))


def second(G):
    return jax.grad(lambda y: (by_z(G)(y, ZS[0]) ** 2).sum())


def along_z(G):
    return lambda y: gt.hvp(lambda z: jnp.sum(jnp.tanh(y * G(z))), (ZS[0],), (ZS[1],))


@pytest.mark.slow_at("by_z", "along_z")
@pytest.mark.parametrize("derivative", [by_z, second, along_z])
def test_a_use_is_traced_once_for_all_its_derivatives(derivative):
    traced = []

    def G(z):
        traced.append(None)
        return net(z)

    args = (Y, ZS[0])[: 2 if derivative is by_z else 1]
    within = gt.frozen(lambda z: gt.frozen(G)(z))
    same(derivative(within)(*args), derivative(net)(*args))
    assert len(traced) == 1


def test_what_it_closes_over_may_be_of_a_trace_that_has_ended():
    """The pullback runs after the trace of the scan's body, to which `a` belongs, has ended."""

    def total(G_of):
        def run(y):
            def body(carry, a):
                G = G_of(lambda z: jnp.sin(jnp.tanh(z @ a) * a[0]))
                return carry + (by_z(G)(y, ZS[0]) ** 2).sum(), None

            return jax.lax.scan(body, 0.0, jnp.stack([A, A.T]))[0]

        return jax.grad(run)

    both = total(lambda G: gt.frozen(G)), total(lambda G: G)
    same(*jax.jit(lambda y: [one(y) for one in both])(Y))


def test_it_closes_over_an_array_that_all_devices_of_a_shard_map_share():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def penalty(G, y, z):
        return jax.lax.psum((by_z(G)(y, z) ** 2).sum(), "d")

    def total(G):
        specs = P(), P("d")
        run = jax.shard_map(partial(penalty, G), mesh=mesh, in_specs=specs, out_specs=P())
        found = jax.value_and_grad(run)(Y, ZS[0])
        same(jax.jit(gt.value_and_grad(run))(Y, ZS[0]), found)  # traces the data flow of the rules
        return found

    G = lambda z: jnp.sin(jnp.tanh(z @ A))
    same(total(gt.frozen(G)), total(G))


def test_a_closed_over_parameter_that_is_differentiated_raises():
    def loss(a):
        return gt.frozen(lambda z: jnp.sin(z @ a))(ZS[0]).sum()

    with pytest.raises(
        GradtoolsError, match=r"to an array of shape \(\d, \d\) and dtype float64 that G reads"
    ):
        jax.grad(loss)(A)
    inner = lambda a: (by_z(gt.frozen(lambda z: jnp.sin(z @ a)))(Y, ZS[0]) ** 2).sum()
    with pytest.raises(
        GradtoolsError, match=r"to an array of shape \(\d, \d\) and dtype float64 that G reads"
    ):
        jax.grad(inner)(A)


# --- functions without forward mode ------------------------------------------------------------


@jax.custom_vjp
def _by_hand(x):
    return jnp.sin(x)


_by_hand.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, ct: (ct * cos,))


def _solved(x):
    matrix = jnp.array([[4.0, 1.0], [1.0, 3.0]])
    solve = lambda b: jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, b, tol=1e-14)[0]
    return jax.vmap(solve)(jnp.sin(x))


WITHOUT_FORWARD_MODE = {
    "custom_vjp": lambda z: _by_hand(z) ** 3,
    "in a scan": lambda z: jax.lax.scan(lambda c, _: (_by_hand(c * z), None), z, None, 2)[0],
    "in a checkpoint": jax.checkpoint(lambda z: _by_hand(jnp.exp(z))),
    "a solver": _solved,
}


def _second(G, y, z):
    slope = jax.grad(lambda z: jnp.sum(jnp.sin(G(z) * y)))
    return jax.grad(lambda y, z: jnp.sum(jnp.exp(slope(z * y))), argnums=(0, 1))(y, z)


@pytest.mark.slow_at("custom_vjp")
@pytest.mark.sweep_at("in a scan", "a solver")
@pytest.mark.parametrize("name", WITHOUT_FORWARD_MODE)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_where_forward_mode_fails_reverse_mode_twice_is_taken_and_said(name, wrap):
    G, y = WITHOUT_FORWARD_MODE[name], jnp.array(0.7)
    z = jnp.array([[0.3, -0.2], [0.5, 0.9]])
    expected = _second(G, y, z)
    with pytest.warns(
        GradtoolsWarning, match=r"frozen: .* in G does not support forward over reverse, .* twice"
    ):
        found = wrap(lambda y, z: _second(gt.frozen(G), y, z))(y, z)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)


@pytest.mark.parametrize("name", ["custom_vjp", "in a scan", "in a checkpoint"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_over_reverse_transposes_the_pullback(name, wrap):
    G, z = WITHOUT_FORWARD_MODE[name], jnp.array([[0.3, -0.2], [0.5, 0.9]])

    def second(G):
        slope = jax.grad(lambda z: jnp.sum(jnp.sin(G(z))))
        return wrap(lambda z: jax.jvp(slope, (z,), (z * z,))[1])(z)

    np.testing.assert_allclose(second(gt.frozen(G)), second(G), rtol=1e-10)


def test_the_transpose_of_a_pullback_has_no_tangent_of_an_integer():
    G = gt.frozen(lambda z: (jnp.argmax(z), _by_hand((1 + 2j) * z)))
    _, tangents = jax.jvp(G, (A,), (A + 1,))
    assert tangents[0].dtype == jax.dtypes.float0
    np.testing.assert_allclose(tangents[1], jnp.cos((1 + 2j) * A) * (1 + 2j) * (A + 1), rtol=1e-10)


@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_captured_weights_are_in_the_compiled_program_once(kind):
    """The value, the pullback and the pushforward share one copy of the weights."""
    weights = [kind(np.full((64, 64), 0.1)) for _ in range(2)]

    def net(z):
        for w in weights:
            z = jnp.tanh(w @ z)
        return z

    def second(G):
        slope = lambda y: (jax.grad(lambda z: (G(z) * y).sum())(jnp.ones(64)) ** 2).sum()
        return jax.grad(slope)

    texts = [jax.jit(second(G)).lower(jnp.ones(64)).as_text() for G in (net, gt.frozen(net))]
    counts = [len(re.findall(r"stablehlo.constant dense.*64x64", text)) for text in texts]
    assert counts == [2, 2]
    values = [second(G)(jnp.linspace(0.0, 1.0, 64)) for G in (net, gt.frozen(net))]
    np.testing.assert_allclose(*values, rtol=1e-12)
