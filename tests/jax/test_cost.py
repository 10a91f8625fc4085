"""Under jit every edit has exactly the cost of the hand-written rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt

KEYS = ("flops", "transcendentals", "bytes accessed")
A = jnp.asarray(np.random.default_rng(0).normal(size=(32, 16)))
X = jnp.asarray(np.random.default_rng(1).normal(size=16))
V = jnp.asarray(np.random.default_rng(2).normal(size=16))


def cost(f, *args):
    found = jax.jit(f).lower(*args).compile().cost_analysis()
    return {key: found.get(key, 0.0) for key in KEYS}


def hand_written(backward):
    @jax.custom_vjp
    def edit(x):
        return x

    edit.defvjp(lambda x: (edit(x), None), lambda _, ct: (backward(ct),))
    return edit


def clipped_by_norm(c):
    """The formula of clip_gradient, with what keeps it from overflowing."""
    largest = jnp.max(jnp.abs(c))
    unit = jnp.maximum(largest / 4, jnp.finfo(c.dtype).tiny)
    scaled = c / unit
    size = jnp.sqrt(jnp.maximum(jnp.sum(scaled * scaled), 0.5))
    return jnp.where(unit * size <= 0.1, c, scaled * (0.1 / size))


EDITS = {
    "transform": (
        lambda x: gt.transform_gradient(x, lambda c: 3.0 * c),
        hand_written(lambda c: 3.0 * c),
    ),
    "known": (lambda x: gt.replace_gradient(x, V), hand_written(lambda c: V)),
    "clip_norm": (
        lambda x: gt.clip_gradient(x, max_norm=0.1),
        hand_written(clipped_by_norm),
    ),
    "reverse": (lambda x: gt.reverse_gradient(x, 0.5), hand_written(lambda c: -0.5 * c)),
    "scale": (lambda x: gt.scale_gradient(x, 3.0), hand_written(lambda c: 3.0 * c)),
    "clip_value": (
        lambda x: gt.clip_gradient(x, max_value=0.1),
        hand_written(lambda c: jnp.minimum(jnp.maximum(c, -0.1), 0.1)),
    ),
}


@pytest.mark.slow_at("transform", "reverse", "scale", "clip_value", "True")
@pytest.mark.sweep_at(
    "clip_norm",
    ("True", "transform"),
    ("True", "reverse"),
    ("True", "scale"),
    ("True", "clip_value"),
)
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("scanned", [False, True])
def test_an_edit_costs_what_a_hand_written_rule_does(name, scanned):
    def f(edit):
        def once(x):
            return jnp.sin(edit(x) * 2.0)

        def many(x):
            return jax.lax.scan(lambda c, _: (once(c), None), x, None, length=5)[0]

        return lambda x: (many if scanned else once)(x).sum()

    ours, by_hand = EDITS[name]
    assert cost(jax.grad(f(ours)), X) == cost(jax.grad(f(by_hand)), X)
    assert cost(gt.grad(f(ours)), X) == cost(jax.grad(f(by_hand)), X)


def test_the_value_of_an_edit_costs_nothing():
    for ours, _ in EDITS.values():
        assert cost(lambda x, e=ours: e(x) * 2, X) == cost(lambda x: x * 2, X)


def test_straight_through_costs_the_value_and_the_surrogates_gradient():
    @jax.custom_vjp
    def by_hand(x):
        return (x > 0.5).astype(x.dtype)

    by_hand.defvjp(lambda x: (by_hand(x), x), lambda x, c: (jax.vjp(jnp.tanh, x)[1](c)[0],))
    ours = gt.straight_through(lambda x: x > 0.5, jnp.tanh)
    f = lambda edit: lambda x: (edit(x) * A[0]).sum()
    assert cost(jax.value_and_grad(f(ours)), X) == cost(jax.value_and_grad(f(by_hand)), X)
    assert cost(f(ours), X) == cost(f(by_hand), X)
