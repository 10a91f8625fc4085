"""Programs as those of `replay_programs_jax`, of models: adapters, averages, rules, meshes."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tests.support.replay_programs_jax import W, X, _plainly, both, encode, program

key = jax.random.key(7)


# --- what f is made of ------------------------------------------------------------------------


def _named(w: Any, x: Any) -> Any:
    keep = jax.checkpoint_policies.save_only_these_names("h")
    inner = lambda w, x: jnp.sin(checkpoint_name(encode(w, x), "h")) @ w
    return jax.checkpoint(inner, policy=keep)(w, x)


def _offloaded_rule(w: Any, x: Any) -> Any:
    """A rule with an argument that is no array, and residuals of several shapes."""

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def power(n: int, x: Any) -> Any:
        return x**n

    power.defvjp(lambda n, x: (x**n, (x, jnp.sum(x))), lambda n, r, c: (n * r[0] ** (n - 1) * c,))
    return power(3, encode(w, x))


def _straight(w: Any, x: Any) -> Any:
    y = encode(w, x)
    return y + jax.lax.stop_gradient(jnp.round(y * 4) / 4 - y)


def _looked_up(w: Any, x: Any) -> Any:
    return w[jnp.argsort(x, axis=1)[:, 0]] * jnp.sort(x, axis=1)


for _name, _f in {
    "a checkpoint with names inside": _named,
    "a rule with an argument that is no array": _offloaded_rule,
    "a straight-through rounding": _straight,
    "a lookup by a sorted order": _looked_up,
}.items():
    _plainly(_name, _f)


# --- models -----------------------------------------------------------------------------------


class Averaged(nnx.Module):
    """An average of its weight, a cache by shape, and a counter."""

    def __init__(self) -> None:
        self.w = nnx.Param(W)
        self.average = nnx.BatchStat(W * 0)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        w = self.w[...]
        self.average[...] = 0.7 * self.average[...] + 0.3 * jax.lax.stop_gradient(w)
        self.calls[...] += 1
        return encode(w, x) + x @ self.average[...] * self.calls[...]


@program()
def a_module_of_nnx_in_compiled_steps(chunked: Any) -> Any:
    net = Averaged()

    @nnx.jit
    def step(net: Any, x: Any) -> Any:
        return jax.tree.leaves(nnx.grad(lambda net: jnp.sum(chunked(net, 3)(x) ** 2))(net))

    found = [step(net, X), step(net, 2 * X)]
    return found, net.average[...], net.calls[...]


class Adapted(eqx.Module):
    """A frozen layer, an adapter of low rank and dropout between."""

    base: Any
    down: Any
    up: Any
    drop: eqx.nn.Dropout

    def __call__(self, x: Any, key: Any) -> Any:
        hidden = self.drop(x @ self.down, key=key)
        return x @ jax.lax.stop_gradient(self.base) + hidden @ self.up


@program()
def an_adapter_of_equinox_with_dropout(chunked: Any) -> Any:
    net = Adapted(W, W[:, :2], W[:2], eqx.nn.Dropout(0.5))
    f = lambda net, x, key: net(x, key)
    g = lambda net: chunked(f, 3, (None, 0, None), key_argnums=2)(net, X, key)
    return jax.tree.leaves(eqx.filter_grad(lambda net: jnp.sum(g(net) ** 2) ** 2)(net))


# --- what f stands in -------------------------------------------------------------------------


@program()
def chunks_inside_of_a_shard_map(chunked: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    inner = lambda w, x: chunked(lambda w, x: encode(w, x), 3, (None, 0))(w, x)
    f = jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    return both(f, W, X)


@program()
def a_shard_map_inside_of_f(chunked: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(encode, mesh=mesh, in_specs=(P(), P(None)), out_specs=P(None))
    return jax.jit(lambda w, x: both(chunked(f, 3, (None, 0)), w, x))(W, X)


@program(operator="checkpoint")
def a_checkpoint_whose_closure_is_changed_between_steps(checkpoint: Any) -> Any:
    scale = {"s": 1.0}
    f = checkpoint(lambda w: jnp.sum(encode(w, X) * scale["s"]) ** 2)
    found = [jax.value_and_grad(f)(W)]
    scale["s"] = 3.0
    return [*found, jax.value_and_grad(f)(W), jax.jit(jax.grad(f))(W)]


@program(operator="checkpoint")
def a_checkpoint_of_a_function_that_closes_over_another_s_value(checkpoint: Any) -> Any:
    def loss(w: Any) -> Any:
        inner = w * 2
        return jnp.sum(checkpoint(lambda x: encode(inner, x))(X) ** 2)

    return jax.value_and_grad(loss)(W), jax.hessian(lambda s: loss(s * W))(jnp.float64(1.0))


@program(operator="checkpoint")
def a_checkpoint_under_vmap_with_keys(checkpoint: Any) -> Any:
    f = checkpoint(lambda k, x: x * jax.random.bernoulli(k, 0.5, x.shape))
    loss = lambda x: jnp.sum(jax.vmap(f)(jax.random.split(key, len(x)), x) ** 2)
    return jax.value_and_grad(loss)(X)


@program(operator="frozen")
def a_frozen_module_of_equinox_with_dropout(frozen: Any) -> Any:
    net = Adapted(W, W[:, :2], W[:2], eqx.nn.Dropout(0.5))
    G = frozen(lambda z: jnp.sin(net(z, key)))
    slope = lambda y: jax.grad(lambda z: jnp.sum(y * G(z) ** 2))(X)
    return both(slope, jnp.float64(1.5))


@program(operator="frozen")
def a_frozen_function_of_a_callback(frozen: Any) -> Any:
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    look = lambda z: jax.pure_callback(np.cos, shape, jax.lax.stop_gradient(z))
    G = frozen(lambda z: jnp.sin(z) * look(z))
    slope = lambda y: jax.grad(lambda z: jnp.sum((y * G(z)) ** 2))(X)
    return both(slope, jnp.float64(1.5))
