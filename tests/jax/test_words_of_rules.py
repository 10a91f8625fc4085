"""What JAX says of rules and of second derivatives, in words that name the operator and the fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError

X = jnp.array([3.0, 4.0])
NONLINEAR = {
    "its norm": lambda c: c / jnp.linalg.norm(c),
    "clipped by its norm": lambda c: c / jnp.maximum(1.0, jnp.linalg.norm(c)),
    "a quotient": lambda c: c / (1 + c),
    "a square": lambda c: c * c,
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_a_map_that_divides_by_what_it_is_linear_in_is_refused_in_words(name):
    change = NONLINEAR[name]
    f = gt.custom_rule(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, c: (change(c),))
    g = gt.custom_rule(lambda x: x)
    g.defjvp(lambda p, t: (p[0], change(t[0])))
    for take in (
        lambda: gt.jvp(f, (X,), (X,)),
        lambda: gt.hessian(lambda x: (f(x) ** 2).sum())(X),
        lambda: gt.grad(lambda x: g(x).sum())(X),
        lambda: jax.jit(gt.grad(lambda x: g(x).sum()))(X),
    ):
        with pytest.raises(GradtoolsError, match="must be linear in its"):
            take()
    np.testing.assert_allclose(gt.grad(lambda x: f(x).sum())(X), change(jnp.ones(2)))


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
@pytest.mark.parametrize("is_summed", [True, False])
def test_a_backward_pass_under_shard_map_may_sum_a_shared_cotangent_itself(is_summed):
    """As jax.custom_vjp demands it with check_vma."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    f = lambda w, x: jnp.sin(w * x)

    def bwd(res, c):
        slope = c * jnp.cos(res[0] * res[1])
        total = (slope * res[1]).sum()
        return jax.lax.psum(total, "d") if is_summed else total, slope * res[0]

    rule = gt.custom_rule(f)
    rule.defvjp(lambda w, x: (f(w, x), (w, x)), bwd)
    loss = jax.shard_map(
        lambda w, x: jax.lax.psum(rule(w, x).sum(), "d"),
        mesh=mesh,
        in_specs=(spec(), spec("d")),
        out_specs=spec(),
    )
    w, x = jnp.asarray(1.5), jnp.arange(2.0 * count)
    plain = lambda w: f(w, x).sum()
    np.testing.assert_allclose(jax.grad(loss)(w, x), jax.grad(plain)(w), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(jax.grad(loss))(w, x), jax.hessian(plain)(w), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(loss, 1)(w, x), w * jnp.cos(w * x), rtol=1e-5)
