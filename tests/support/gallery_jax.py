"""Defines JAX programs of the gallery, for comparison with the graphs of PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import gradtools.jax as gt
from tests.support.gallery import Picture


@jax.custom_vjp
def sinh(x: Any) -> Any:
    """Return the hyperbolic sine with a custom rule that saves an intermediate value."""
    return (jnp.exp(x) - jnp.exp(-x)) / 2


def _forward(x: Any) -> Any:
    up, down = jnp.exp(x), jnp.exp(-x)
    return (up - down) / 2, (up, down)


def _backward(saved: Any, g: Any) -> Any:
    up, down = saved
    return (g * (up + down) / 2,)


sinh.defvjp(_forward, _backward)


def penalty(params: Any, x: Any) -> Any:
    """Return the gradient penalty of a critic: the mean of (gradient norm - 1)^2."""
    critic = lambda x: (jnp.tanh(x @ params["w"]) @ params["v"]).sum()
    slope = jax.grad(critic)(x)
    return ((jnp.sqrt((slope**2).sum(1)) - 1) ** 2).mean()


_even = partial(jnp.linspace, dtype=jnp.float32)
_X = _even(-1.0, 1.0, 6).reshape(3, 2)
_PARAMS = {"w": _even(-0.5, 0.9, 8).reshape(2, 4), "v": _even(0.2, 1.0, 4)}

PICTURES = (
    Picture(
        "jax_sinh",
        "In JAX: sinh with its intermediates saved",
        "With `jax.custom_vjp` the second gradient exists, because JAX also differentiates the "
        "forward function of the rule, and the saved exponentials depend on x.",
        sinh,
        (jnp.asarray([0.5, -1.0, 2.0], jnp.float32),),
        2,
        gt=gt,
    ),
    Picture(
        "jax_wgan_gp",
        "In JAX: the gradient penalty",
        "The inner `jax.grad` is traced into the forward pass, so the graph has {operations} "
        "operations in total. The program saves {kept} bytes in addition to its arguments.",
        penalty,
        (_PARAMS, _X),
        gt=gt,
    ),
)
