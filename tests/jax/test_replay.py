"""Replay in JAX besides the programs: loops, modules, weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gradtools.jax as gt
from gradtools import GradtoolsError


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
