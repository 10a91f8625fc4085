"""Losses over all pairs: their dtype under low precision, and inputs that do not reach them."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools.errors import DisconnectedInputError


def _numbers(gt, *shape, seed=0):
    return gt.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_losses_of_features_in_16_bits_are_float32(gt, backend_name, dtype):
    def low(x):
        return getattr(x, "bfloat16" if dtype == "bfloat16" else "half")()

    if backend_name == "jax":

        def low(x):
            return x.astype(dtype)

    x, y, w = low(_numbers(gt, 8, 4)), low(_numbers(gt, 8, 4, seed=1)), low(_numbers(gt, 5, 4))
    t = gt.asarray(np.arange(8) % 5)
    for loss in (
        gt.contrastive_loss(x, y, logit_scale=3.0),
        gt.contrastive_loss(x, y, sigmoid=True),
        gt.linear_cross_entropy(x, w, t),
        gt.linear_cross_entropy(x, w, t, reduction="none"),
    ):
        assert str(loss.dtype).endswith("float32")
    gradient = gt.grad(lambda x: gt.contrastive_loss(x, y))(x)
    assert str(gradient.dtype).endswith(dtype)


def _stopped(gt):
    return lambda a, b: gt.stop_gradient(a)[:, None] * b


def _compared(gt):
    return lambda a, b: gt.xp.where(a[:, None] > 0, b, 2 * b)


@pytest.mark.parametrize("cut", [_stopped, _compared])
@pytest.mark.parametrize("reduce", ["sum", "logsumexp", "own"])
def test_an_argument_that_f_stops_or_compares_is_disconnected(gt, cut, reduce):
    own = (
        lambda tile: gt.xp.sum(tile, axis=1),
        lambda a, b: a + b,
        lambda state: state,
    )
    run = gt.pairwise_reduce(cut(gt), own if reduce == "own" else reduce, 2)
    x, y = _numbers(gt, 5), _numbers(gt, 3, seed=1)

    def loss(x, y):
        return gt.xp.sum(run(x, y))

    with pytest.raises(DisconnectedInputError):
        gt.grad(loss)(x, y)
    zeros = gt.grad(loss, disconnected_inputs="zeros")(x, y)
    assert not gt.to_numpy(zeros).any()
    assert gt.to_numpy(gt.grad(loss, argnums=1)(x, y)).all()  # the other side is connected
    assert gt.hessian(loss, argnums=1)(x, y).shape == (3, 3)
