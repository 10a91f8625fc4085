"""Edited gradients agree between the frameworks, at first and second order."""

from __future__ import annotations

import numpy as np
import pytest

import gradtools.jax
import gradtools.torch

BOTH = (gradtools.torch, gradtools.jax)

EDITS = {
    "reverse": lambda gt, x: gt.reverse_gradient(x, 0.3),
    "scale": lambda gt, x: gt.scale_gradient(x, gt.asarray(np.array([1.0, -2.0, 0.5, 3.0]))),
    "stop": lambda gt, x: x * gt.stop_gradient(x),
    "clip_norm": lambda gt, x: gt.clip_gradient(x, max_norm=0.2),
    "clip_value": lambda gt, x: gt.clip_gradient(x, max_value=0.2),
    "clip_both": lambda gt, x: gt.clip_gradient(x, max_norm=0.3, max_value=0.2),
    "transform": lambda gt, x: gt.transform_gradient(x, lambda c: c**3 + c),
    "known": lambda gt, x: gt.replace_gradient(x, gt.asarray(np.arange(4.0))),
    "straight_through": lambda gt, x: gt.straight_through(lambda x: gt.xp.round(x))(x),
    "surrogate": lambda gt, x: gt.straight_through(lambda x: x > 0.5, lambda x: gt.xp.tanh(3 * x))(
        x
    ),
}


def loss(gt, edit, a):
    def f(x):
        y = gt.xp.tanh(gt.asarray(a) @ EDITS[edit](gt, gt.xp.sin(x)))
        return (y**3).sum()

    return f


def agree(found):
    one, other = (np.asarray(gt.to_numpy(x)) for gt, x in zip(BOTH, found, strict=True))
    assert one.dtype == other.dtype and np.abs(one).max() > 0
    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("edit", EDITS)
def test_values_and_gradients_agree(edit, rng):
    a, x = rng.normal(size=(3, 4)), rng.normal(size=4)
    both = [gt.value_and_grad(loss(gt, edit, a))(gt.asarray(x)) for gt in BOTH]
    agree([value for value, _ in both])
    agree([gradient for _, gradient in both])


@pytest.mark.slow_at("reverse", "clip_norm", "clip_value", "surrogate")
@pytest.mark.parametrize("edit", list(EDITS))
def test_products_with_the_hessian_agree_reverse_over_reverse(edit, rng):
    a, x, v = rng.normal(size=(3, 4)), rng.normal(size=4), rng.normal(size=4)
    both = [
        gt.hvp(loss(gt, edit, a), (gt.asarray(x),), (gt.asarray(v),), mode="reverse_over_reverse")
        for gt in BOTH
    ]
    agree([products[0] for _, products in both])


@pytest.mark.slow_at("False", "clip_both")
@pytest.mark.sweep_at(("False", "clip_norm"))
@pytest.mark.parametrize("edit", ["clip_norm", "clip_value", "clip_both", "transform", "reverse"])
@pytest.mark.parametrize("real", [False, True])
def test_complex_gradients_agree(edit, real, rng):
    a = rng.normal(size=(3, 4)) + (0 if real else 1j * rng.normal(size=(3, 4)))
    x = rng.normal(size=4) + 1j * rng.normal(size=4)

    def f(gt):
        return lambda x: (abs(gt.asarray(a + 0j) @ EDITS[edit](gt, x * x)) ** 2).sum()

    agree([gt.grad(f(gt))(gt.asarray(x)) for gt in BOTH])
    v = rng.normal(size=4) + 1j * rng.normal(size=4)
    mode = "reverse_over_reverse"
    both = [gt.hvp(f(gt), (gt.asarray(x),), (gt.asarray(v),), mode=mode) for gt in BOTH]
    agree([products[0] for _, products in both])
