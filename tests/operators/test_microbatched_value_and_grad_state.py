"""Tests aux, state and keys in microbatched_value_and_grad, and aux in minimax_value_and_grad."""

from __future__ import annotations

import numpy as np
import pytest

X = np.arange(10.0, dtype=np.float32)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_aux_is_reduced_as_the_loss_is(gt, reduction):
    reduced = lambda x: getattr(gt.xp, reduction)(x)
    f = lambda w, x: (reduced(w * x), {"square": reduced(x**2)})
    step = gt.microbatched_value_and_grad(f, 4, reduction=reduction, has_aux=True)
    (value, aux), g = step(gt.asarray(np.float32(2)), gt.asarray(X))
    whole = getattr(np, reduction)
    assert float(value) == 2 * whole(X) and float(g) == whole(X)
    assert float(aux["square"]) == whole(X**2)


def test_a_carry_is_handed_from_chunk_to_chunk(gt):
    def f(w, x, total, count):
        loss = gt.xp.mean(w * x)
        return (loss, gt.xp.mean(x)), (total + gt.xp.sum(w * x), count + 1)

    step = gt.microbatched_value_and_grad(f, 4, has_aux=True, carry_argnums=(2, 3))
    w, zero, none = gt.asarray(np.float32(2)), gt.asarray(np.float32(0)), gt.asarray(np.int32(0))
    ((value, mean), g), (total, count) = step(w, gt.asarray(X), zero, none)
    assert (float(value), float(mean), float(g)) == (9, 4.5, 4.5)
    assert (float(total), int(count)) == (90, 3)


def test_each_chunk_gets_its_own_key(gt):
    f = lambda w, x, key: w * gt.xp.astype(gt.xp.sum(key), x.dtype) * 0 + gt.xp.mean(w * x)
    step = gt.microbatched_value_and_grad(f, 4, key_argnums=2)
    if gt.__name__.endswith("jax"):
        import jax

        f = lambda w, x, key: (w * jax.random.normal(key, x.shape)).mean()
        key, w, x = gt.random_key(0), gt.asarray(np.float32(1)), gt.asarray(X)
        _, g = gt.microbatched_value_and_grad(f, 5, key_argnums=2)(w, x, key)
        keys = [jax.random.fold_in(key, i) for i in range(2)]
        want = np.mean([jax.random.normal(k, (5,)) for k in keys])
        np.testing.assert_allclose(g, want, rtol=1e-5)
        return
    _, g = step(gt.asarray(np.float32(2)), gt.asarray(X), gt.random_key(0))
    assert float(g) == 4.5


def test_minimax_hands_aux_out(gt):
    f = lambda x, y: (x**2 - y**2, {"x": 2 * x})
    two = gt.asarray(np.float32(2))
    (value, aux), grads = gt.minimax_value_and_grad(f, 0, 1, has_aux=True)(two, two)
    assert float(value) == 0 and float(aux["x"]) == 4 and [*map(float, grads)] == [4, 4]
