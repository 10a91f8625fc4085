"""Losses over all pairs: their dtype under low precision, and inputs that do not reach them."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools.errors import DisconnectedInputError


def _numbers(gt, *shape, seed=0):
    return gt.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def _stopped(gt):
    return lambda a, b: gt.stop_gradient(a)[:, None] * b


def _compared(gt):
    return lambda a, b: gt.xp.where(a[:, None] > 0, b, 2 * b)


@pytest.mark.sampled(torch=(6, 6), jax=(3, 6))
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
