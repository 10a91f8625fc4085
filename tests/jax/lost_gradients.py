"""Defines JAX functions that lose a gradient, and functions that lose none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import gradtools.jax as gt
from tests.support.lost_gradients import LostGradients

X = jnp.asarray([0.3, -0.7, 1.1], jnp.float32)
POSITIVE = jnp.asarray([1.0, 2.0, 3.0], jnp.float32)
ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
WEIGHTS = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), jnp.float32)
SHAPE = jax.ShapeDtypeStruct((3,), np.float32)
KEY = jax.random.key(0)
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
SPEC = jax.sharding.PartitionSpec("i")
stop = lax.stop_gradient
sharded = lambda f: jax.shard_map(f, mesh=MESH, in_specs=SPEC, out_specs=SPEC)


CASES = LostGradients(gt, X)
cause, healthy = CASES.cause, CASES.healthy


# --- functions of one line --------------------------------------------------------------------

ONE_LINE: dict[str, dict[str, Callable[[Any], Any]]] = {  # grouped by kind of finding
    "detached": {
        "stopped_in_a_carry": lambda x: lax.scan(lambda c, a: (stop(c) + a, None), x[0], X)[0],
        "stopped_in_shard_map": lambda x: sharded(lambda y: stop(y) + 1)(x).sum(),
        "stopped_in_a_frozen_function": lambda x: gt.frozen(lambda y: stop(y) * 2)(x).sum(),
    },
    "left_framework": {
        "through_numpy": lambda x: jnp.sum(np.asarray(x) ** 2),
        "through_tolist": lambda x: jnp.asarray(x.tolist()).sum(),
        "through_int": lambda x: jnp.arange(3.0)[int(x[2])],
        "through_the_math_module": lambda x: jnp.float32(math.exp(x[0])),
        "through_a_callback": lambda x: jax.pure_callback(np.sin, SHAPE, x).sum(),
    },
    "integer_cast": {
        "cast_to_bool": lambda x: x.astype(bool).mean(),
    },
    "unused": {
        "reads_a_global": lambda x: (X**2).sum(),
        "a_number_of_numpy": lambda x: np.float32(3.0),
    },
    "discrete": {
        "counted_by_a_loop": lambda x: lax.while_loop(lambda c: c < x[2], lambda c: c + 1, 0.0),
        "comparison_in_a_gradient": lambda x: jax.grad(lambda y: (y * (y > 0)).sum())(x).sum(),
        "branch_by_comparison": lambda x: lax.cond(x[0] > 0, lambda: 1.0, lambda: -1.0),
        "order_of_keys": lambda x: lax.sort((x, POSITIVE), num_keys=1)[1][0],
        "a_bin_of_a_histogram": lambda x: jnp.searchsorted(POSITIVE, x).sum() * 1.0,
    },
    "zero_derivative": {
        "the_power_zero": lambda x: (x**0).sum(),
    },
    "rule": {
        "a_rule_of_jax_that_gives_zero": lambda x: forgetful(x).sum(),
    },
    "edit": {
        "the_scale_of_an_edit": lambda scale: gt.scale_gradient(POSITIVE, scale[0]).sum(),
    },
    "zero": {
        "dead_in_a_scan": lambda x: lax.scan(lambda c, a: (c + jax.nn.relu(a - 9), None), 0.0, x)[
            0
        ],
        "chosen_away": lambda x: jnp.where(POSITIVE > 0, POSITIVE, x).sum(),
        "all_of_it_is_set": lambda x: (x * 2).at[:].set(1.0).sum(),
    },
}
CASES.in_one_line(ONE_LINE)


# --- detached ----------------------------------------------------------------------------


@cause()
def stopped_in_jit(x):
    @jax.jit
    def inner(y):
        z = y * 2
        return stop(z)  # <- detached

    return inner(x).sum()


# --- values that leave JAX ---------------------------------------------------------------


@cause()
def through_numpy_under_a_python_if(x):
    if x.sum() > 0:
        y = np.asarray(x)  # <- left_framework
        return jnp.sum(y)
    return x.sum()


# --- rules -------------------------------------------------------------------------------


@jax.custom_vjp
def forgetful(x):
    return jnp.sin(x)


forgetful.defvjp(lambda x: (forgetful(x), None), lambda _, ct: (jnp.zeros_like(ct),))


# --- arguments without a path to the output ----------------------------------------------


@cause(X, POSITIVE)  # <- unused
def overwritten(x, y):
    x = y * 2
    return x.sum()


class Model:
    """A model whose method `loss` reads an attribute instead of the argument."""

    def __init__(self) -> None:
        self.weight = X

    def loss(self, weight):  # <- unused
        return (self.weight**2).sum()


cause(written=Model.loss)(Model().loss)


# --- gradients that are zero at these values ---------------------------------------------


@cause(WEIGHTS)
def a_last_layer_of_zeros(w):
    hidden = jnp.tanh(ROWS @ w)
    return (hidden @ jnp.zeros((3, 2))).sum()  # <- zero


# --- modules -----------------------------------------------------------------------------


class StoppedBlock(flax.linen.Module):
    """A flax.linen block whose output is detached."""

    @flax.linen.compact
    def __call__(self, x):
        y = flax.linen.Dense(3, name="inner")(x)
        return stop(y)  # <- detached


class Outer(flax.linen.Module):
    """A model that contains a `StoppedBlock`."""

    @flax.linen.compact
    def __call__(self, x):
        return StoppedBlock(name="block")(x).sum()


_outer = Outer()
_params = _outer.init(KEY, ROWS)
cause(_params, name="a block of linen", scope=("Outer", "block"), written=StoppedBlock.__call__)(
    lambda params: _outer.apply(params, ROWS)
)


class NnxBlock(nnx.Module):
    """A flax.nnx block with a rounded output."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.round(self.linear(x)).sum()  # <- zero_derivative


cause(ROWS, name="a block of nnx", scope=("NnxBlock",), written=NnxBlock.__call__)(
    lambda x: NnxBlock()(x)
)


class EquinoxBlock(equinox.Module):
    """An equinox block whose output is detached."""

    linear: equinox.nn.Linear

    def __call__(self, x):
        return stop(self.linear(x)).sum()  # <- detached


_block = EquinoxBlock(equinox.nn.Linear(3, 3, key=KEY))
cause(name="a block of equinox", scope=("EquinoxBlock",), written=EquinoxBlock.__call__)(
    lambda x: _block(x)
)


# --- healthy -----------------------------------------------------------------------------


ONE_LINERS = {
    "an_old_buffer_is_filled": lambda x: (x.at[:].set(jnp.sin(x)) + x.at[:].set(1.0)).sum(),
    "a_term_in_jit": lambda x: jax.jit(lambda y: (y**2).sum() + stop(y).sum())(x),
    "a_term_in_a_scan": lambda x: lax.scan(lambda c, a: (c + a + stop(a**2), None), 0.0, x)[0],
    "a_mean_by_numpy": lambda x: np.mean(x) * np.sum(x),  # NumPy calls methods of x
    "printing": lambda x: (jax.debug.print("{x}", x=x), jnp.sin(x).sum())[1],
    "shard_map": lambda x: sharded(lambda y: lax.psum(jnp.sin(y), "i") + y)(x).sum(),
    "a_part_that_is_set": lambda x: jnp.sin(x).at[0].set(x.astype(jnp.int32)[0] * 1.0).sum(),
    "set_where_the_greatest_is": lambda x: (x**2).at[jnp.argmax(x)].set(0.0).sum(),
    "a_cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x).sum(),
    "a_scan": lambda x: lax.scan(lambda c, a: (c * a + a, c), x[0], x)[0],
    "a_fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + x, x).sum(),
    "a_custom_jvp": lambda x: hard_step(x).sum(),
    "a_custom_vjp": lambda x: on_the_host(x).sum(),
    "the_best_values": lambda x: lax.top_k(x, 2)[0].sum(),
}
for _name, _f in ONE_LINERS.items():
    healthy(name=_name)(_f)


@healthy()
def a_python_if_in_gt_grad(x):
    inner = gt.grad(lambda y: (y**3).sum() if y.sum() > 0 else y.sum())
    return inner(x).sum()


@jax.custom_jvp
def hard_step(x):
    return (x > 0).astype(x.dtype)


hard_step.defjvp(lambda primals, tangents: (hard_step(*primals), tangents[0]))


@jax.custom_vjp
def on_the_host(x):
    return jax.pure_callback(np.sin, SHAPE, x)


on_the_host.defvjp(lambda x: (on_the_host(x), x), lambda x, ct: (ct * jnp.cos(x),))
