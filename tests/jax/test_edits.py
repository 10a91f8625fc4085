"""Tests gradient edits in JAX: branches that do not run, second derivatives and scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools.errors import DisconnectedInputError

X = jnp.array([1.0, 2.0])


@pytest.mark.slow_at("True")
@pytest.mark.parametrize("taken", [True, False])
def test_a_known_gradient_arrives_through_a_branch_that_is_not_taken(taken):
    """Both branches of cond count as data flow, so the gradient of x is replaced in either case."""

    def f(p, x):
        y = gt.replace_gradient(x, jnp.array([5.0, 7.0]))
        return jax.lax.cond(p, lambda y: y.sum() ** 2, lambda y: 3.0, y)

    for transform in (lambda f: f, jax.jit):
        assert transform(gt.grad(f, 1))(taken, X).tolist() == [5.0, 7.0]


def test_hvp_in_mode_auto_sees_a_reverse_only_edit_inside_jit_scan_cond_and_vmap():
    def f(x):
        clip = jax.jit(lambda x: gt.clip_gradient(x, max_value=1e6))
        x, _ = jax.lax.scan(lambda x, _: (clip(x), None), x, None, length=2)
        x = jax.lax.cond(x[0] > 0, clip, lambda x: x, x)
        return (jax.vmap(clip)(x) ** 3).sum()

    (_,), (h,) = gt.hvp(f, (X,), (X,))
    assert h.tolist() == [6.0, 24.0]
    assert np.diag(gt.hessian(f)(X)).tolist() == [6.0, 12.0]


def scanned(x, s):
    turn = lambda x, _: (gt.reverse_gradient(x, s), None)
    return jax.lax.scan(turn, x, None, length=2)[0].sum()


@pytest.mark.quick_at("jit", "remat")
@pytest.mark.parametrize("wrap", [lambda g: g, jax.jit, jax.checkpoint], ids=["-", "jit", "remat"])
@pytest.mark.parametrize("f", [scanned, jax.jit(scanned)], ids=["-", "jit inside"])
def test_the_derivative_to_a_factor_is_refused_through_scan_jit_and_vmap(wrap, f):
    with pytest.raises(DisconnectedInputError, match="argument 1 does not reach"):
        wrap(gt.grad(f, 1))(X, jnp.array(2.0))
    with pytest.raises(DisconnectedInputError, match="argument 1 does not reach"):
        jax.vmap(wrap(gt.grad(f, 1)), (None, 0))(X, jnp.ones(3))
