"""Training through `gt.jvp` in JAX: attention, checkpoints, precisions, libraries, devices.

The truth is MeanFlow's loss with attention by plain operations in float64, its JVP by finite
differences. `jax.nn.dot_product_attention` takes its softmax in float32 whatever comes in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import gradtools.jax as gt

ROWS, LENGTH, WIDTH, SIZE, CHANNELS = 4, 5, 8, 4, 3
_i = np.arange(LENGTH)
ALLOWED = {
    "mask": _i[:, None] >= _i - 1,
    "causal": _i[:, None] >= _i,
    "grouped": _i[:, None] >= _i,
}
BIAS = -0.125 * (_i[:, None] - _i) ** 2.0
KINDS = ("plain", "mask", "causal", "grouped")
CHECKPOINTS = {"whole": lambda f: f, "native": jax.checkpoint, "gt": gt.checkpoint}
RUNS = {"eager": 1e-6, "float64": 1e-6, "float32": 1e-5, "bf16": 0.05}  # and tolerances


def attend(kind: str, q: Any, k: Any, v: Any) -> Any:
    options: dict[str, Any] = {"is_causal": kind in ("causal", "grouped")}
    if kind == "mask":
        options |= {
            "mask": ALLOWED[kind][None, None],
            "bias": jnp.asarray(BIAS, q.dtype)[None, None],
        }
    return jax.nn.dot_product_attention(q, k, v, **options)


def plain_operations(kind: str, q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    scores = jnp.einsum("...inc,...jnc->...nij", q, k) / SIZE**0.5
    scores = jnp.where(ALLOWED.get(kind, True), scores + BIAS * (kind == "mask"), -jnp.inf)
    return jnp.einsum("...nij,...jnc->...inc", jax.nn.softmax(scores), v)


def velocity(layers: Any, attend: Any, checkpoint: Any, x: Any, t: Any) -> Any:
    """u(x, t), by layers from a name to a function of arrays."""

    def block(h: Any, c: Any) -> Any:
        heads = lambda name: layers(name)(h * c).reshape(*h.shape[:-1], -1, SIZE)
        y = attend(heads("query"), heads("key"), heads("value"))
        return h + jnp.tanh(layers("mix")(y.reshape(*h.shape[:-1], -1)))

    c = jnp.sin(layers("time")(t))[..., None, :]
    return layers("out")(checkpoint(block)(layers("into")(x), c))


@cache
def weights(kind: str) -> dict[str, Any]:
    keys = WIDTH if kind == "grouped" else 2 * WIDTH  # two heads or four
    sizes = {"into": (CHANNELS, WIDTH), "time": (1, WIDTH), "query": (WIDTH, 2 * WIDTH)}
    sizes |= {"key": (WIDTH, keys), "value": (WIDTH, keys), "mix": (2 * WIDTH, WIDTH)}
    rng = np.random.default_rng(0)
    sizes |= {"out": (WIDTH, CHANNELS)}
    return {name: rng.normal(size=s) / s[0] ** 0.5 for name, s in sizes.items()}


class OfNNX(nnx.Module):
    def __init__(self, kind: str, way: str) -> None:
        self.kind, self.way, self.layers = kind, way, nnx.Dict()
        for name, w in weights(kind).items():
            self.layers[name] = nnx.Linear(*w.shape, use_bias=False, rngs=nnx.Rngs(0))
            self.layers[name].kernel.set_value(jnp.asarray(w))

    def __call__(self, x: Any, t: Any) -> Any:
        attention = lambda *xs: attend(self.kind, *xs)
        return velocity(self.layers.__getitem__, attention, CHECKPOINTS[self.way], x, t)


class OfEquinox(eqx.Module):
    layers: dict[str, eqx.nn.Linear]
    kind: str = eqx.field(static=True)
    way: str = eqx.field(static=True)

    def __init__(self, kind: str, way: str) -> None:
        self.kind, self.way, self.layers = kind, way, {}
        for name, w in weights(kind).items():
            layer = eqx.nn.Linear(*w.shape, use_bias=False, key=jax.random.key(0))
            self.layers[name] = eqx.tree_at(lambda x: x.weight, layer, jnp.asarray(w.T))

    def __call__(self, x: Any, t: Any) -> Any:
        layers = lambda name: jnp.vectorize(self.layers[name], signature="(n)->(m)")
        attention = lambda *xs: attend(self.kind, *xs)
        return velocity(layers, attention, CHECKPOINTS[self.way], x, t)


LIBRARIES = {"nnx": (OfNNX, nnx.jit), "equinox": (OfEquinox, eqx.filter_jit)}


def batch() -> list[Any]:
    rng, rows = np.random.default_rng(1), (ROWS, LENGTH, CHANNELS)
    return [jnp.asarray(rng.normal(size=s)) for s in (rows, (ROWS, 1), rows, rows)]


def loss(jvp: Any, u: Any, x: Any, t: Any, v: Any, w: Any) -> Any:
    """MeanFlow's, and a term in which the tangent itself is trained."""
    y, dy = jvp(u, (x, t), (v, jnp.ones_like(t)))
    target = gt.stop_gradient(v - t[:, None] * dy)
    return ((y - target) ** 2).mean() + 0.1 * (dy * w).mean()


def by_differences(u: Any, primals: Any, tangents: Any) -> Any:
    """Central differences of eighth order."""
    coefficients = np.array([1 / 280, -4 / 105, 1 / 5, -4 / 5, 0, 4 / 5, -1 / 5, 4 / 105, -1 / 280])
    at = lambda e: u(*[x + e * dx for x, dx in zip(primals, tangents, strict=True)])
    ys = jax.vmap(at)(1e-3 * np.arange(-4.0, 5.0))
    return ys[4], jnp.tensordot(coefficients * 1e3, ys, 1)


@cache
def truth(kind: str) -> dict[str, Any]:
    def of(weights: dict[str, Any]) -> Any:
        layers = lambda name: lambda x: x @ weights[name]
        attention = lambda *xs: plain_operations(kind, *xs)
        u = lambda x, t: velocity(layers, attention, CHECKPOINTS["whole"], x, t)
        return loss(by_differences, u, *batch())

    return jax.jit(jax.grad(of))(weights(kind))


def error(library: str, kind: str, way: str, run: str, devices: int = 0) -> float:
    """How far the gradient is from the truth, over its norm."""
    of, jit = LIBRARIES[library]
    dtype = {"float32": jnp.float32, "bf16": jnp.bfloat16}.get(run, jnp.float64)
    model, data = jax.tree.map(lambda x: jnp.asarray(x, dtype), (of(kind, way), batch()))
    gradient = gt.grad(lambda u, *data: loss(gt.jvp, u, *data))
    gradient = over_devices(gradient, devices) if devices else gradient
    found = jax.tree.leaves((gradient if run == "eager" else jit(gradient))(model, *data))
    found = [np.asarray(x, float) for x in found]
    found = [x.T for x in found] if library == "equinox" else found
    expected = jax.tree.leaves(truth(kind))
    off = sum(((a - b) ** 2).sum() for a, b in zip(found, expected, strict=True))
    return float(off / sum((b**2).sum() for b in expected)) ** 0.5


def over_devices(gradient: Any, devices: int) -> Any:
    """The mean of the devices' gradients, each of its rows."""

    def step(model: Any, *data: Any) -> Any:
        own = jax.lax.pcast(model, "i", to="varying")
        return jax.lax.pmean(gradient(own, *data), "i")

    mesh = jax.make_mesh((devices,), ("i",), (jax.sharding.AxisType.Auto,))
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), *[P("i")] * 4), out_specs=P())


@pytest.mark.slow
@pytest.mark.sampled(slow=12)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_gradient_through_a_jvp_is_that_of_plain_operations(library, way, kind, run):
    assert error(library, kind, way, run) < RUNS[run]


SHARDED = [
    ("nnx", "plain", "native"),
    ("equinox", "mask", "gt"),
    ("nnx", "causal", "gt"),
    ("equinox", "grouped", "native"),
    ("nnx", "plain", "whole"),
]


def test_a_gradient_through_a_jvp_under_shard_map():
    assert error("equinox", "causal", "gt", "float64", devices=1) < 1e-6


@pytest.mark.slow
def test_a_gradient_through_a_jvp_on_four_devices():
    program = (
        "import jax, json; jax.config.update('jax_enable_x64', True);"
        "from tests.jax.test_jvp_in_training import *;"
        "print(json.dumps([error(*cell, 'float64', 4) for cell in SHARDED]))"
    )
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(json.loads(done.stdout)) < 1e-6
