"""Replay in JAX besides the programs: loops, modules, weights."""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gradtools.jax as gt
from gradtools import GradtoolsError


def test_a_frozen_while_loop_has_forward_mode_alone() -> None:
    G = gt.frozen(lambda z: jax.lax.while_loop(lambda z: jnp.sum(z) < 10, lambda z: 2 * z, z))
    z = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(gt.jvp(G, (z,), (z,))[1], 4 * z)
    with pytest.raises(GradtoolsError, match="number of trips is known only when it runs"):
        gt.grad(lambda z: G(z).sum())(z)


def test_a_state_that_changes_its_dtype_is_refused() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: Any) -> Any:
            self.calls.set_value(self.calls.get_value() + 0.5)
            return x

    with pytest.raises(GradtoolsError, match=r"f's new state of a flax\.nnx module is float"):
        gt.chunked(Net(), 2)(jnp.ones(4))


class Counting(nnx.Module):
    def __init__(self) -> None:
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return x**2 * self.calls[...]


def test_modules_stand_as_before_after_an_exception() -> None:
    net = Counting()

    def fails(x: Any) -> Any:
        net(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gt.chunked(fails, 2)(jnp.ones(4))
    assert net.calls[...] == 0
    np.testing.assert_allclose(gt.chunked(net, 2)(jnp.ones(4)), [1, 1, 2, 2])


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_module_that_changes_in_per_example_grad_is_refused_by_flax(chunk_size: Any) -> None:
    net = Counting()
    run = gt.per_example_grad(lambda w, x: net(x * w).sum(), chunk_size=chunk_size)
    with pytest.raises(flax.errors.TraceContextError, match="different trace level"):
        run(jnp.float64(2), jnp.ones((4, 3)))


def test_a_chunk_of_weight_zero_adds_nothing_to_a_traced_mean() -> None:
    mean = lambda w, x, m: (w * x * m).sum() / m.sum()
    x, m = jnp.arange(1.0, 7.0), jnp.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    for weights in (np.asarray(m), lambda w, x, m: m.sum()):
        run = gt.microbatched_value_and_grad(mean, 2, in_axes=(None, 0, 0), weights=weights)
        for way in (lambda f: f, jax.jit):
            value, slope = way(run)(jnp.float64(2), x, m)
            np.testing.assert_allclose((value, slope), (16 / 3, 8 / 3))


def _first_slope_and_second(remade: Any, x: Any, write: bool) -> Any:
    """Of a function over NumPy's arrays, which are written to before each backward pass."""
    a, b = (np.linspace(start, 3.0, 6).astype(x.dtype) for start in (1.0, 2.0))
    run = remade(lambda x, b: jnp.sin(x * a) * b)
    slope = lambda x: jax.vjp(lambda x: run(x, b), x)[1](jnp.ones_like(x))[0]
    pulls = jax.vjp(lambda x: run(x, b), x)[1], jax.vjp(slope, x)[1]
    if write:
        a[:], b[:] = 100.0, 100.0
    return [pull(jnp.cos(x))[0] for pull in pulls]


@pytest.mark.slow_at("checkpoint")
@pytest.mark.whole_at("checkpoint", "frozen")
@pytest.mark.parametrize(
    "remade", [gt.checkpoint, gt.frozen, lambda f: gt.chunked(f, 2, (0, None))]
)
def test_what_is_written_to_numpys_arrays_later_changes_no_derivative(remade: Any) -> None:
    x = jnp.linspace(0.0, 1.0, 24).reshape(4, 6)
    expected = _first_slope_and_second(lambda f: f, x, False)
    for found, right in zip(_first_slope_and_second(remade, x, True), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize("remade", [gt.checkpoint, gt.frozen, lambda f: gt.chunked(f, 2)])
def test_what_f_closes_over_is_read_anew_at_each_call(remade: Any) -> None:
    factor = [1.0]

    def f(x: Any) -> Any:
        return factor[0] * jnp.sin(x)

    run, x = remade(f), jnp.array([0.5, 2.0])
    for c in (1.0, 2.0):
        factor[0] = c
        np.testing.assert_allclose(run(x), c * np.sin(x), rtol=1e-6)
        slope = gt.grad(lambda x: run(x).sum())(x)
        np.testing.assert_allclose(slope, c * np.cos(x), rtol=1e-6)


def _remade_eagerly(made):
    """Values and gradients at 2, of f(x) = made()(x) checkpointed, one after the other."""
    f = gt.checkpoint(lambda x: made()(x))
    return [float(x) for _ in range(4) for x in jax.value_and_grad(f)(2.0)]


@jax.custom_jvp
def scaled(x):
    return 3 * x


slopes = [3.0, 5.0, 7.0, 9.0]
scaled.defjvp(lambda primals, tangents: (scaled(*primals), slopes[0] * tangents[0]))

CHANGED = {
    "a number": (lambda s: lambda x: s * x, [1.0, 2.0, 2.0, 3.0], [2, 1, 4, 2, 4, 2, 6, 3]),
    "the sign of a zero": (
        lambda s: lambda x: x * jnp.copysign(1.0, jnp.float32(s) * jnp.sign(x)),
        [0.0, -0.0, 0.0, -0.0],
        [2, 1, -2, -1] * 2,
    ),
    "an array": (
        lambda s: lambda x: (x * np.asarray([s, 1.0])).sum(),
        [1.0, 2.0, 2.0, 3.0],
        [4, 2, 6, 3, 6, 3, 8, 4],
    ),
    "an operation": (
        lambda s: jnp.square if s else lambda x: x + 1,
        [0, 1, 0, 1],
        [3, 1, 4, 4] * 2,
    ),
    "the length of a loop": (
        lambda s: lambda x: jax.lax.fori_loop(0, s, lambda i, x: 2 * x, x),
        [1, 2, 2, 3],
        [4, 2, 8, 4, 8, 4, 16, 8],
    ),
}


@pytest.mark.slow_at("the sign of a zero", "the length of a loop")
@pytest.mark.parametrize("name", CHANGED)
def test_what_python_reads_anew_is_seen_at_each_eager_call_of_checkpoint(name):
    made, reads, expected = CHANGED[name]
    left = iter(reads)
    assert _remade_eagerly(lambda: made(next(left))) == expected


NUMBERS = {
    "a branch": (lambda x, train: 2 * x if train else x, True),
    "a loop": (lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x), x), 3),
    "a shape": (lambda x, n: x.reshape(n, -1) * 2, 2),
    "a scalar of NumPy": (lambda x, n: x.reshape(n, -1) * 2, np.int64(2)),
    "a rate": (lambda x, rate: x * 3 if rate > 0 else x, 0.5),
    "a rate of NumPy": (lambda x, rate: x * 3 if rate > 0 else x, np.float32(0.5)),
    "a factor": (lambda x, factor: x * factor, 0.5),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_checkpoint_leaves_numbers_among_the_arguments_to_python(name):
    f, number = NUMBERS[name]
    x = jnp.arange(4.0)
    loss = lambda f: lambda x: (f(x, number) ** 2).sum()
    expected = jax.grad(loss(f))(x)
    for take in (jax.grad, lambda loss: jax.jit(jax.grad(loss))):
        np.testing.assert_allclose(take(loss(gt.checkpoint(f)))(x), expected, rtol=1e-6)


def test_checkpoint_outside_of_any_derivative_is_a_plain_call():
    seen = []
    gt.checkpoint(lambda x: seen.append(isinstance(x, jax.core.Tracer)) or 2 * x)(jnp.ones(2))
    assert seen == [False]
