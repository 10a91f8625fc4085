"""haiku through make_functional, against haiku's own apply and plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError

hk = pytest.importorskip("haiku", reason="needs dm-haiku: pip install --group integration")
pytestmark = [pytest.mark.integration, pytest.mark.jax]

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def network(x, is_training=False):
    h = hk.BatchNorm(True, True, 0.9)(hk.Linear(4)(x), is_training)
    h = jax.nn.gelu(h)
    if is_training:
        h = hk.dropout(hk.next_rng_key(), 0.5, h)
    return hk.Linear(2)(h)


def plain(x):
    return hk.nets.MLP([4, 2], activation=jnp.tanh)(x)


def same(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def stateful():
    net = hk.transform_with_state(network)
    return net, net.init(jax.random.key(0), X, is_training=True)


def test_gradients_and_state_are_those_of_haiku():
    net, (params, state) = stateful()
    apply, p, s = gt.make_functional(net, variables=(params, state), train=True)
    key = gt.random_key(1)

    def loss(p):
        out, after = apply(p, s, X, key=key)
        return (out**2).mean(), after

    def theirs(p):
        out, after = net.apply(p, state, key, X, is_training=True)
        return (out**2).mean(), after

    found, wanted = gt.grad(loss, has_aux=True)(p), jax.grad(theirs, has_aux=True)(params)
    same(found, wanted)


def test_a_transform_without_state_has_an_empty_one():
    net = hk.without_apply_rng(hk.transform(plain))
    params = net.init(jax.random.key(0), X)
    apply, p, s = gt.make_functional(net, variables=params)
    found = gt.hvp(lambda p: (apply(p, s, X)[0] ** 2).mean(), (p,), (p,))
    loss = lambda p: (net.apply(p, X) ** 2).mean()
    wanted = jax.grad(loss)(params), jax.jvp(jax.grad(loss), (params,), (params,))[1]
    same(found, wanted)
    assert s == {}


@pytest.mark.parametrize(
    "operator", ["chunked", "microbatched_value_and_grad", "per_example_grad", "why_zero"]
)
def test_operators_take_what_functionalize_gives(operator):
    net = hk.transform(plain)
    params = net.init(jax.random.key(0), X)
    apply, p, s = gt.make_functional(net, variables=params)
    loss = lambda p, x: (apply(p, s, x)[0] ** 2).mean()
    wanted = jax.grad(lambda p: (net.apply(p, None, X) ** 2).mean())(params)
    if operator == "chunked":
        run = gt.chunked(lambda p, x: apply(p, s, x)[0], 2, in_axes=(None, 0))
        same(gt.grad(lambda p: (run(p, X) ** 2).mean())(p), wanted)
    elif operator == "microbatched_value_and_grad":
        same(gt.microbatched_value_and_grad(loss, 2)(p, X)[1], wanted)
    elif operator == "per_example_grad":
        each = gt.per_example_grad(lambda p, x: loss(p, x[None]))(p, X)
        same(jax.tree.map(lambda g: g.mean(0), each), wanted)
    else:
        assert not gt.why_zero(lambda: loss(p, X), model=p)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda net, v: gt.make_functional(net), "variables=.params, state."),
        (lambda net, v: _run(net, v, train=True)(), "the module needs randomness; pass key="),
        (lambda net, v: gt.make_functional(hk.multi_transform(_several)), "multi_transform"),
        (
            lambda net, v: gt.make_functional(hk.transform(plain), variables={}, train=True),
            "train=",
        ),
    ],
)
def test_what_is_missing_is_said(ask, said):
    with pytest.raises(GradtoolsError, match=said):
        ask(*stateful())


def _run(net, variables, **options):
    apply, p, s = gt.make_functional(net, variables=variables, **options)
    return lambda: apply(p, s, X)


def _several():
    layer = hk.Linear(2)
    return layer, (layer, layer)
