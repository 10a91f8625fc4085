"""Tests requirements on custom rules in JAX, and features shared with JAX's own rules.

`jax.custom_jvp` and `jax.custom_vjp` compute the expected values if they support the program;
otherwise a closed form computes the expected values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError

X = jnp.array([0.5, 1.5, 2.0])


def total(g):
    return lambda *xs: g(*xs).sum()


def same(found, expected, rtol=1e-6):
    def one(a, b):
        return np.testing.assert_allclose(a, b, rtol, 1e-6)

    jax.tree.map(one, found, expected)


def test_a_tangent_that_passes_through_an_integer_is_not_transposed():
    g = gt.custom_rule(lambda x: x * 2)
    g.defjvp(lambda p, t: (p[0] * 2, t[0].astype(int).astype(t[0].dtype)))
    same(jax.jvp(g, (X,), (jnp.ones(3),))[1], np.ones(3))
    with pytest.raises(GradtoolsError, match="drops tangent 0, which passes through"):
        jax.grad(total(g))(X)


# --- pullbacks are pytrees ---------------------------------------------------------------


def swish(x):
    return x * jnp.sin(x)


SWISH = np.sin(np.asarray(X)) + np.asarray(X) * np.cos(np.asarray(X))


def test_a_pullback_passes_through_jit_and_scan():
    _, pull = jax.jit(lambda x: gt.vjp(swish, x))(X)
    ones = jnp.ones(3)
    same(pull(ones)[0], SWISH)
    same(jax.jit(lambda pull, ct: pull(ct))(pull, ones)[0], SWISH)
    same(jax.lax.scan(lambda c, _: (c, c(ones)[0]), pull, None, length=2)[1], [SWISH, SWISH])
    _, push = jax.jit(lambda x: gt.linearize(swish, x))(X)
    same(jax.vmap(push)(jnp.eye(3)), np.diag(SWISH))
    with pytest.raises(GradtoolsError, match="cotangent has shape"):
        pull(jnp.ones(2))


def test_a_pullback_may_be_what_a_rule_saves():
    g = gt.custom_rule(swish)
    g.defvjp(lambda x: gt.vjp(swish, x), lambda pull, ct: pull(ct))
    for run in (jax.grad(total(g)), gt.grad(total(g)), jax.jit(jax.grad(total(g)))):
        same(run(X), SWISH)
    same(jax.hessian(total(g))(X), jax.hessian(total(swish))(X))
    same(jax.vmap(jax.grad(g))(X), SWISH)
    same(jax.jvp(g, (X,), (X,))[1], SWISH * X)


# --- symbolic zeros and nondifferentiable arguments --------------------------------------


def test_bwd_gets_none_for_a_cotangent_that_is_zero_and_the_rule_for_a_tangent():
    seen = []

    def bwd(x, cts):
        seen.append(tuple(ct is None for ct in cts))
        first, second = cts
        return (2 * first if second is None else 2 * first + 3 * second,)

    g = gt.custom_rule(lambda x: (2 * x, 3 * x))
    g.defvjp(lambda x: ((2 * x.value, 3 * x.value), None), bwd, symbolic_zeros=True)
    same(jax.grad(lambda x: g(x)[0].sum())(X), np.full(3, 2.0))
    same(jax.grad(lambda x: sum(g(x)).sum())(X), np.full(3, 5.0))
    assert (False, True) in seen

    tangents = []
    h = gt.custom_rule(lambda x, y: x * y)

    def sparse(p, t):
        tangents.append(tuple(dx is None for dx in t))
        parts = [dx * o for dx, o in zip(t, p[::-1], strict=True) if dx is not None]
        return p[0] * p[1], sum(parts)

    h.defjvp(sparse, symbolic_zeros=True)
    same(jax.jvp(lambda x: h(x, 2 * X), (X,), (X,))[1], 2 * X * X)
    same(jax.grad(lambda y: jax.grad(total(h))(X, y).sum())(X), np.ones(3))
    assert (False, True) in tangents


# --- iterative solvers, and subtrees with zero tangents --------------------------------------


@pytest.mark.parametrize("aux", [{"n": 3}, (1, np.arange(2)), {"a": [1], "b": {"c": 2.0}}], ids=str)
def test_none_is_the_tangent_of_a_whole_subtree(aux):
    f = gt.custom_rule(lambda x: (x**2, jax.tree.map(jnp.asarray, aux)))
    f.defjvp(lambda xs, dxs: (f(*xs), (2 * xs[0] * dxs[0], None)))
    out, tangent = gt.jvp(f, (3.0,), (1.0,))
    assert float(tangent[0]) == 6
    assert jax.tree.structure(out[1]) == jax.tree.structure(aux)
    assert all(not np.any(x) for x in jax.tree.leaves(tangent[1]))
    assert float(gt.grad(lambda x: f(x)[0])(3.0)) == 6


@pytest.mark.parametrize("given", ["jvp", "vjp", "vjp without f"])
def test_a_rule_whose_functions_branch_on_values_runs_where_these_are_known(given):
    f = gt.custom_rule(lambda x: jnp.sin(x) if x > 0 else jnp.cos(x))
    if given == "jvp":
        f.defjvp(lambda p, t: (f(p[0]), 2 * t[0] if p[0] > 0 else 3 * t[0]))
    else:
        value = f if given == "vjp" else (lambda x: jnp.sin(x) if x > 0 else jnp.cos(x))
        f.defvjp(lambda x: (value(x), x), lambda x, c: (2 * c if x > 0 else 3 * c,))
    for grad in (jax.grad, gt.grad):
        assert (float(grad(f)(2.0)), float(grad(f)(-2.0))) == (2.0, 3.0)
