"""Tests memory layouts of arrays in host functions, and rules that are made of kernels."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools.errors import MissingRuleError
from tests.support.numpy_trees import lower

X = np.float32([1.0, 2.0])


@pytest.fixture
def x(gt):
    return gt.asarray(X)


def host_sin(gt, back):
    """Return sin as a host function whose backward pass is a host kernel."""
    sin, back = gt.host_function(np.sin), gt.host_function(back)
    sin.defvjp(lambda x: (sin(x), x), lambda x, c: (back(x, c),))
    return sin


# --- plain calls ---------------------------------------------------------------------------


ORDERS = {
    "big endian": lambda x: np.sin(x).astype(">f4"),
    "Fortran": lambda x: np.asfortranarray(np.sin(x)),
    "negative strides": lambda x: np.sin(x)[::-1][::-1],
    "a subclass": lambda x: np.sin(x).view(np.matrix).view(type("Own", (np.ndarray,), {})),
    "read-only": lambda x: np.broadcast_to(np.sin(x), x.shape),
}


@pytest.mark.parametrize("which", ORDERS)
def test_whatever_lies_in_memory_is_read_right(gt, which):
    matrix = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    f, back = gt.host_function(ORDERS[which]), gt.host_function(np.sin)
    for x in (gt.asarray(matrix), gt.xp.permute_dims(gt.asarray(matrix), (1, 0))):
        assert np.array_equal(lower(f(x)), lower(back(x)))


# --- requirements on rules made of kernels --------------------------------------------------


def test_a_kernel_of_bwd_that_reads_residuals_alone_needs_no_rule_in_either_mode(gt, x):
    slope, cube = gt.host_function(lambda x: 3 * x**2), gt.host_function(lambda x: x**3)
    cube.defvjp(lambda x: (cube(x), x), lambda x, c: (slope(x) * c,))
    expected = 3 * np.asarray(x) ** 2
    (pulled,) = gt.vjp(cube, x)[1](x)
    assert np.array_equal(pulled, expected * np.asarray(x))
    for pushed in (gt.jvp(cube, (x,), (x,))[1], gt.linearize(cube, x)[1](x)):
        assert np.array_equal(pushed, pulled)
    assert np.array_equal(gt.jacobian(cube, mode="forward")(x), np.diag(expected))
    with pytest.raises(MissingRuleError, match="has no rule"):
        gt.hvp(lambda x: gt.xp.sum(cube(x)), (x,), (x,))


@pytest.mark.slow_at("jax")
def test_a_backward_kernel_is_asked_once_whether_it_is_linear_whatever_fwd_saves(gt, x):
    calls = []
    cube, twice = gt.host_function(lambda x: x**3), lambda x, c: (calls.append(1), 3 * x**2 * c)[1]
    back = gt.host_function(twice)
    further = gt.host_function(
        lambda x, c, v: (6 * x * c * v, 3 * x**2 * v), out=lambda x, c, v: (x, c)
    )
    cube.defvjp(lambda x: (cube(x), (x, np.ones(2))), lambda r, c: (back(r[0], c),))
    back.defvjp(lambda x, c: (back(x, c), (x, c)), lambda r, v: further(*r, v))
    counts = []
    for _ in range(3):
        calls.clear()
        gt.jvp(cube, (x,), (x,))
        counts.append(len(calls))
    assert counts[0] > counts[1] == counts[2] == 2


def test_a_backward_kernel_that_clips_serves_reverse_mode(gt, x):
    f = host_sin(gt, lambda x, c: np.clip(c, -0.5, 0.5))
    assert lower(gt.grad(lambda x: f(x).sum())(x)).tolist() == [0.5, 0.5]


@pytest.mark.slow_at("jax")
def test_with_both_rules_what_fwd_saves_of_the_output_stands_for_every_derivative(gt):
    exp = gt.host_function(np.exp)
    exp.defvjp(lambda x: (exp(x), (x, exp(x))), lambda saved, c: (c * saved[1],))
    exp.defjvp(lambda p, t: (exp(*p), exp(*p) * t[0]))
    kept = gt.host_function(lambda x: 2 * x)
    fwd = lambda x: (lambda y: (y, (x, y)))(kept(x))
    kept.defvjp(fwd, lambda saved, c: (kept(c),))
    kept.defjvp(lambda p, t: (kept(*p), kept(*t)))
    at, t = (gt.asarray(np.array(v)) for v in ([0.5, -1.0], [1.0, 2.0]))
    wanted = np.exp([0.5, -1.0])
    for _ in range(3):
        f = lambda x: gt.xp.sum(exp(x))
        np.testing.assert_allclose(gt.to_numpy(gt.grad(f)(at)), wanted, rtol=1e-12)
        np.testing.assert_allclose(gt.to_numpy(gt.jvp(exp, (at,), (t,))[1]), wanted * [1, 2])
        second = gt.grad(lambda x: gt.xp.sum(gt.grad(f)(x) * t))(at)
        np.testing.assert_allclose(gt.to_numpy(second), wanted * [1, 2], rtol=1e-12)
        twice = gt.grad(lambda x: gt.xp.sum(kept(x) ** 2))(at)
        np.testing.assert_allclose(gt.to_numpy(twice), 8 * np.array([0.5, -1.0]), rtol=1e-12)


def test_the_maps_of_a_run_of_fwd_are_not_those_of_another_that_saved_another_number(gt, x):
    factor = [2.0]
    sin = gt.host_function(np.sin)
    sin.defvjp(lambda x: (sin(x), (x, factor[0])), lambda res, c: (res[1] * gt.xp.cos(res[0]) * c,))
    for factor[0] in (2.0, 3.0):
        found = gt.grad(lambda x: gt.xp.sum(sin(x)))(x)
        np.testing.assert_allclose(lower(found), factor[0] * np.cos(X), rtol=1e-6)
