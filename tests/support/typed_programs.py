"""Contains types that mypy and pyright must infer, and mistakes that they must report.

The file is never executed. Both type checkers must report an error on each line that ends with
"wrong" and on no other line.
"""

from __future__ import annotations

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import torch

import gradtools.jax as gj
import gradtools.torch as gt

x, z, net = torch.ones(3), jnp.ones(3), torch.nn.Linear(3, 1)


def loss(w: torch.Tensor, x: torch.Tensor, *, scaled: bool = False) -> torch.Tensor:
    return (w * x).sum()


def with_aux(w: torch.Tensor) -> tuple[torch.Tensor, int]:
    return w.sum(), 3


def of_net(net: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return net(x).sum()


def of_dict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.sum(params["w"] * x)


# Gradient edits return the type of their argument.
assert_type(gt.reverse_gradient(x), torch.Tensor)
assert_type(gt.stop_gradient({"a": x}), dict[str, torch.Tensor])
assert_type(gj.clip_gradient(z, max_norm=1.0), jax.Array)
assert_type(gt.scale_gradient(x, x.mean()), torch.Tensor)
assert_type(gj.reverse_gradient(z, np.float32(0.5)), jax.Array)
assert_type(gj.scale_gradient(z, jnp.mean(z)), jax.Array)
gt.scale_gradient(x, "0.5")  # wrong
gj.reverse_gradient(z, "0.5")  # wrong
gt.clip_gradient(x, max_norm="1")  # wrong

# A gradient has the type of its argument.
assert_type(gt.grad(loss)(x, x, scaled=True), torch.Tensor)
assert_type(gj.grad(of_dict)({"w": z}, z), dict[str, jax.Array])
assert_type(gt.value_and_grad(loss)(x, x), tuple[torch.Tensor, torch.Tensor])
assert_type(gt.grad(with_aux, has_aux=True)(x), tuple[torch.Tensor, int])
assert_type(
    gt.value_and_grad(with_aux, has_aux=True)(x), tuple[tuple[torch.Tensor, int], torch.Tensor]
)
assert_type(gt.grad(of_net)(net, x), dict[str, Any])
assert_type(gt.value_and_grad(of_net)(net, x), tuple[torch.Tensor, dict[str, Any]])
gt.grad(lambda net: net(x).sum())(net)["weight"]
gt.value_and_grad(lambda net: net(x).sum())(net)[1]["weight"]
gt.grad(of_net)(x, x)  # wrong
assert_type(gt.vmap(gt.grad(loss))(x, x), torch.Tensor)
assert_type(gt.jvp(loss, (x, x), (x, x)), tuple[torch.Tensor, torch.Tensor])
assert_type(gt.vjp(loss, x, x)[0], torch.Tensor)
gt.grad(gt.grad(lambda x: (x**3).sum()))(x)
gj.grad(lambda x: (x**3).sum())(z)
assert_type(gt.grad(loss, argnums=(0, 1))(x, x), tuple[Any, ...])
a, b = gt.grad(loss, argnums=(0, 1))(x, x)
assert_type(gt.value_and_grad(loss, argnums=(0, 1))(x, x), tuple[torch.Tensor, tuple[Any, ...]])
assert_type(gt.per_example_grad(loss)(x, x), torch.Tensor)
assert_type(gt.per_example_grad(of_net)(net, x), dict[str, Any])
gt.per_example_grad(loss, (0, 1))(x, x)[1]
assert_type(gt.microbatched_value_and_grad(loss, 2)(x, x), tuple[torch.Tensor, torch.Tensor])
assert_type(gt.microbatched_value_and_grad(of_net, 2)(net, x), tuple[torch.Tensor, dict[str, Any]])
assert_type(gt.retained_gradients(loss)(x, x), tuple[torch.Tensor, Any, dict[str, Any]])
gt.per_example_grad(loss)(x)  # wrong
gt.grad(loss)(x)  # wrong
gt.grad(loss)(x, x, scale=True)  # wrong
gt.grad(loss, argnum=1)  # wrong

# Wrapped functions keep their signatures.
assert_type(gt.frozen(loss)(x, x), torch.Tensor)
assert_type(gt.checkpoint(loss)(x, x, scaled=True), torch.Tensor)
assert_type(gj.compile(of_dict)({"w": z}, z), jax.Array)
assert_type(gt.chunked(loss, 2)(x, x), torch.Tensor)
assert_type(gt.straight_through(torch.round)(x), torch.Tensor)
gt.frozen(loss)(x)  # wrong
gt.checkpoint(loss)(x, x, 3)  # wrong

# Names in the namespaces of the backends; a name that does not exist is an error.
gt.xp.exp(x)
gj.xp.linalg.norm(z)
gt.gradd(loss)  # wrong
gj.xp.expp(z)  # wrong
