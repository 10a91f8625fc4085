"""What a type checker must know of gradtools' functions, and the mistakes that it must find.

It is read by mypy and pyright, and never run. A line that ends with "wrong" is one on which both
must report an error; on all others neither may.
"""

from __future__ import annotations

from typing import Any, assert_type

import jax
import jax.numpy as jnp
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


# Edits give back what they took.
assert_type(gt.reverse_gradient(x), torch.Tensor)
assert_type(gt.stop_gradient({"a": x}), dict[str, torch.Tensor])
assert_type(gj.clip_gradient(z, max_norm=1.0), jax.Array)

# A derivative has f's parameters.
assert_type(gt.value_and_grad(loss)(x, x), tuple[torch.Tensor, Any])
assert_type(gt.value_and_grad(with_aux, has_aux=True)(x), tuple[tuple[torch.Tensor, int], Any])
gt.grad(loss)(x, x, scaled=True)
gj.grad(of_dict)({"w": z}, z)["w"]
gt.value_and_grad(of_net)(net, x)[1]["weight"]
gt.grad(lambda net: net(x).sum())(net)["weight"]
gt.grad(gt.grad(lambda x: (x**3).sum()))(x)
a, b = gt.grad(loss, argnums=(0, 1))(x, x)
out, pullback = gt.vjp(loss, x, x)
gt.per_example_grad(loss, (0, 1))(x, x)[1]
value, grads = gt.microbatched_value_and_grad(loss, 2)(x, x)
assert_type(gt.retained_gradients(loss)(x, x), tuple[torch.Tensor, Any, dict[str, Any]])
gt.grad(of_net)(x, x)  # wrong
gt.per_example_grad(loss)(x)  # wrong
gt.grad(loss)(x)  # wrong
gt.grad(loss)(x, x, scale=True)  # wrong
gt.grad(loss, argnum=1)  # wrong

# What is computed otherwise has the signature that it had.
assert_type(gt.frozen(loss)(x, x), torch.Tensor)
assert_type(gt.checkpoint(loss)(x, x, scaled=True), torch.Tensor)
assert_type(gj.compile(of_dict)({"w": z}, z), jax.Array)
assert_type(gt.chunked(loss, 2)(x, x), torch.Tensor)
assert_type(gt.straight_through(torch.round)(x), torch.Tensor)
gt.frozen(loss)(x)  # wrong
gt.checkpoint(loss)(x, x, 3)  # wrong

# Names.
gt.xp.exp(x)
gj.xp.linalg.norm(z)
gt.gradd(loss)  # wrong
gj.xp.expp(z)  # wrong
