"""Tests optimistix solvers in custom rules, and custom rules in optimistix solvers."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
optimistix = pytest.importorskip("optimistix", reason="optimistix is not installed")
import jax.numpy as jnp

import gradtools.jax as gt

pytestmark = [pytest.mark.integration, pytest.mark.jax]
NEWTON = optimistix.Newton(rtol=1e-12, atol=1e-12)
A = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3))) / 4
B = jnp.asarray([0.3, -0.2, 0.7])
T = jnp.asarray([1.0, 2.0, -1.0])


def residual(z, args):
    """Return tanh(A z + b) - z, which is zero at the root z."""
    a, b = args
    return jnp.tanh(a @ z + b) - z


def root(a, b):
    """Find the root with optimistix, which differentiates the root implicitly."""
    return optimistix.root_find(residual, NEWTON, jnp.zeros(3), args=(a, b)).value


@gt.custom_rule
def ruled(a, b):
    """Find the root, with the implicit function theorem written as a custom rule."""
    return jax.lax.stop_gradient(root(a, b))


@ruled.defjvp
def _push(primals, tangents):
    a, b = primals
    z = ruled(a, b)
    da, db = tangents
    slope = 1 - z**2  # derivative of tanh at the root
    system = jnp.eye(3) - slope[:, None] * a
    return z, jnp.linalg.solve(system, slope * (da @ z + db))


def loss(find):
    return lambda a, b: (find(a, b) ** 2).sum() + find(a, b)[0]


@pytest.mark.parametrize("argnum", [0, 1])
def test_a_rule_around_a_root_gives_the_solvers_own_gradients(argnum):
    found = gt.grad(loss(ruled), argnum)(A, B)
    np.testing.assert_allclose(found, gt.grad(loss(root), argnum)(A, B), rtol=1e-9)
    np.testing.assert_allclose(found, jax.grad(loss(root), argnum)(A, B), rtol=1e-9)


def test_it_has_both_modes_at_second_order():
    f = lambda b: loss(ruled)(A, b)
    slope = lambda h: gt.grad(f)(B + h * T) @ T
    expected = (slope(1e-5) - slope(-1e-5)) / 2e-5
    for mode in ("forward_over_reverse", "reverse_over_reverse"):
        product = gt.hvp(f, (B,), (T,), mode=mode)[1][0]
        np.testing.assert_allclose(product @ T, expected, rtol=1e-6)
    np.testing.assert_allclose(gt.jvp(f, (B,), (T,))[1], gt.grad(f)(B) @ T, rtol=1e-10)


def test_a_fit_by_least_squares_is_differentiated_through():
    xs = jnp.linspace(0, 1, 9)

    def fitted(noise):
        of = lambda p, y: p[0] * jnp.exp(p[1] * xs) - y
        solver = optimistix.LevenbergMarquardt(rtol=1e-12, atol=1e-12)
        y = 2 * jnp.exp(-xs) + noise
        return optimistix.least_squares(of, solver, jnp.asarray([1.0, 0.0]), args=y).value[1]

    noise = 0.01 * jnp.sin(9 * xs)
    found = gt.grad(fitted)(noise)
    moved = lambda h: fitted(noise.at[3].add(h))
    np.testing.assert_allclose(found[3], (moved(1e-5) - moved(-1e-5)) / 2e-5, rtol=1e-4)
