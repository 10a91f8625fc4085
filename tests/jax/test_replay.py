"""Tests recomputation in JAX with modules, exceptions and arrays that change between passes."""

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
    """Return derivatives; if `write` is set, overwrite NumPy arrays before the pullbacks run."""
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


NUMBERS = {
    "a branch": (lambda x, train: 2 * x if train else x, True),
    "a loop": (lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x), x), 3),
    "a shape": (lambda x, n: x.reshape(n, -1) * 2, 2),
    "a NumPy integer as shape": (lambda x, n: x.reshape(n, -1) * 2, np.int64(2)),
    "a rate": (lambda x, rate: x * 3 if rate > 0 else x, 0.5),
    "a NumPy float in a branch": (lambda x, rate: x * 3 if rate > 0 else x, np.float32(0.5)),
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
