"""What JAX's own suite of custom_jvp and custom_vjp tries, topic by topic, of custom_rule.

`jax.custom_jvp` and `jax.custom_vjp` are the oracle where they take the same program.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError

X = jnp.array([0.5, 1.5, 2.0])
SymbolicZero = jax.custom_derivatives.SymbolicZero


def same(found, expected, rtol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, 1e-6), found, expected)


def test_a_recomputed_rule_has_every_order():
    g = gt.custom_rule(jnp.sin)
    g.defvjp(lambda x: (jnp.sin(x), jnp.cos(x) * 1), lambda c, ct: (c * ct,), optimize_remat=True)
    h = lambda x: (jax.checkpoint(g)(x) ** 2).sum()
    expected = 2 * np.cos(2 * np.asarray(X))
    same(jax.hessian(h)(X), np.diag(expected))
    same(jax.jit(jax.jacrev(jax.grad(h)))(X), np.diag(expected))
    same(jax.vmap(jax.grad(lambda x: jax.grad(h)(x).sum()))(X[None])[0], expected)


# --- zeros -------------------------------------------------------------------------------


def test_a_zero_of_jaxs_own_may_be_returned_and_is_held_to_its_argument():
    zero = lambda x: SymbolicZero(jax.typeof(x))
    g = gt.custom_rule(lambda x, y: x)
    g.defvjp(lambda x, y: (x, y), lambda y, ct: (2 * ct, zero(y)))
    same(jax.grad(lambda x, y: g(x, y).sum(), (0, 1))(X, X), (np.full(3, 2.0), np.zeros(3)))
    g.defvjp(lambda x, y: (x, y), lambda y, ct: (2 * ct, zero(y[:1])))
    with pytest.raises(GradtoolsError, match=r"array 1 has shape \(1,\)"):
        jax.grad(lambda x, y: g(x, y).sum(), (0, 1))(X, X)
    still = gt.custom_rule(lambda x: x)
    still.defjvp(lambda p, t: (p[0], zero(p[0])))
    same(jax.jvp(still, (X,), (X,))[1], np.zeros(3))


# --- arguments ---------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return [self.x], None

    @classmethod
    def tree_unflatten(cls, _, xs):
        return cls(*xs)


def test_an_array_may_stand_for_a_container_that_holds_one():
    def scale(make):
        g = make(lambda box, y: box["a"].x * y)
        g.defvjp(
            lambda box, y: (g(box, y), (box["a"].x, y)), lambda k, ct: ({"a": k[1] * ct}, k[0] * ct)
        )
        return g

    for make in (jax.custom_vjp, gt.custom_rule):
        slope = jax.grad(lambda box, y: scale(make)(box, y).sum())({"a": Box(X)}, 3 * X)
        same(slope["a"].x, 3 * X)
    pair = gt.custom_rule(lambda xy: xy[0] * xy[1])
    pair.defvjp(lambda xy: (xy[0] * xy[1], None), lambda _, ct: (ct,))
    with pytest.raises(GradtoolsError, match="bwd's entry 0 has the structure"):
        jax.grad(lambda xy: pair(xy).sum())((X, X))  # which of the two?


def test_a_call_that_does_not_fit_the_signature_names_the_function():
    @gt.custom_rule
    def scaled(x, y):
        return x * y

    scaled.defjvp(lambda p, t: (p[0] * p[1], t[0] * p[1] + p[0] * t[1]))
    with pytest.raises(GradtoolsError, match=r"custom_rule scaled\(x, y\): missing .*'y'") as error:
        scaled(X)
    assert isinstance(error.value, TypeError)
    with pytest.raises(GradtoolsError, match="unexpected keyword argument 'z'"):
        scaled(X, X, z=1.0)
