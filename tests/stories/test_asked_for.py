"""Tests programs from public feature requests, each with its source and expected numbers.

A program is written once for both frameworks unless the request concerns only one of them.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.scenarios import Table

STORIES = Table()


def draw(gt, *shape):
    return gt.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


# --- gradients at intermediate values


@STORIES.add(source="jax-ml/jax#6668")
def the_gradient_at_each_layers_output(gt):
    """`retained_gradients` returns the gradients with respect to the outputs of all layers."""
    ws, x = [draw(gt, 3, 3) + k for k in range(3)], draw(gt, 3)
    parts = [lambda h, w=w: gt.xp.tanh(h @ w / 3) for w in ws]

    def chain(h, parts):
        for k, part in enumerate(parts):
            h = gt.retain_gradient(part(h), f"layer {k}")
        return (h**2).sum()

    _, _, retained = gt.retained_gradients(lambda x: chain(x, parts))(x)
    h = x
    for k, part in enumerate(parts):
        h = part(h)
        yield retained[f"layer {k}"], gt.grad(lambda h, k=k: chain(h, parts[k + 1 :]))(h)


# --- solutions of equations


@STORIES.add(source="pytorch/pytorch#100626")
def a_fixed_point_layer_without_its_iterations(gt):
    w, x = draw(gt, 4, 4) / 6, draw(gt, 4)
    step = lambda z, w, x: gt.xp.tanh(w @ z + x)

    def iterate(w, x):
        z = 0 * x
        for _ in range(80):
            z = step(z, w, x)
        return z

    fast = gt.compile if gt.__name__.endswith("jax") else lambda f: f
    layer = gt.implicit_solution(lambda z, w, x: step(z, w, x) - z, iterate)
    of = lambda f: fast(gt.grad(lambda w, x: (f(w, x) ** 2).sum(), (0, 1)))
    yield from zip(of(layer)(w, x), of(iterate)(w, x), strict=True)


# --- gradients per example through checkpoints


@STORIES.add(source="pytorch/pytorch#165880, #122729, #146036, #141845, #42368")
def gradients_per_example_through_checkpointed_blocks(gt):
    """The blocks take their weights as arguments or close over the weights."""
    ws, x = [draw(gt, 3, 3) / (2 + k) for k in range(3)], draw(gt, 5, 3)

    def loss(wrap, closed=False):
        def of_example(ws, x):
            for w in ws:
                if closed:
                    x = x + wrap(lambda x, w=w: gt.xp.tanh(x @ w))(x)
                else:
                    x = x + wrap(lambda x, w: gt.xp.tanh(x @ w))(x, w)
            return (x**2).sum()

        return of_example

    plain = gt.per_example_grad(loss(lambda f: f))(ws, x)
    for closed in (False, True):
        yield from zip(gt.per_example_grad(loss(gt.checkpoint, closed))(ws, x), plain, strict=True)
    total = lambda wrap: gt.jacobian(lambda x: gt.vmap(lambda x: loss(wrap)(ws, x))(x))(x)
    yield total(gt.checkpoint), total(lambda f: f)


@pytest.mark.slow_at(("jax", "a fixed point layer without its iterations"))
@pytest.mark.parametrize("story", STORIES.cases())
def test_it_gives_its_numbers(story, gt):
    pairs = list(story.program(gt))
    assert pairs
    for found, expected in pairs:
        np.testing.assert_allclose(gt.to_numpy(found), gt.to_numpy(expected), 1e-8, 1e-10)
