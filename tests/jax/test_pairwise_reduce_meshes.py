"""`pairwise_reduce` and what stands on it over meshes, on eight devices that the host plays.

One process runs all of it; the same programs on one device, without a mesh, say what is right.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import re
from contextlib import nullcontext
from functools import cache
import jax, jax.numpy as jnp, numpy as np
import gradtools.jax as gt
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
W, V = rng.normal(size=(4, 4)), rng.normal(size=(24, 4))
X, Y = rng.normal(size=(2, 16, 4))
IDS, CLASSES = rng.integers(0, 9, 16), rng.integers(0, 24, 16)
CONTRASTIVE = {
    "plain": {}, "smoothed": {"label_smoothing": 0.1}, "one side": {"symmetric": False},
    "sigmoid": {"sigmoid": True},
}
PROGRAMS = {
    **{f"contrastive, {name}": lambda w, x, y, t, o=options: gt.contrastive_loss(
        jnp.tanh(x @ w), y, jnp.exp(w[0, 0]), tile_size=3, **o)
       for name, options in CONTRASTIVE.items()},
    "contrastive, ids": lambda w, x, y, t: gt.contrastive_loss(
        jnp.tanh(x @ w), y, ids=IDS, tile_size=3),
    "cross entropy": lambda w, x, y, t: gt.linear_cross_entropy(
        jnp.tanh(x @ w), V, t, tile_size=5),
    "pairwise_reduce": lambda w, x, y, t: jnp.sum(jnp.sin(gt.pairwise_reduce(
        lambda a, b: a @ b.T, ("logsumexp"), (3, 5))(x @ w, y))),
    "attention": lambda w, x, y, t: jnp.sum(jnp.sin(gt.attention(
        (x @ w)[None], y[None], y[None], layout="heads_first", tile_size=5))),
}
WAYS = {
    "value": lambda f: f,
    "gradient": lambda f: gt.grad(f, argnums=(0, 1)),
    "Hessian": lambda f: lambda w, *a: gt.hvp(lambda w: f(w, *a), (w,), (w,))[1],
}


def close(found, wanted, name):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13, err_msg=str(name))


@cache
def wanted(name, way):
    return jax.tree.map(np.asarray, jax.jit(WAYS[way](PROGRAMS[name]))(W, X, Y, CLASSES))


for kind in (AxisType.Explicit, AxisType.Auto):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else nullcontext():
        rows = [jax.device_put(z, NamedSharding(mesh, P("d"))) for z in (X, Y, CLASSES)]
        for k, (name, f) in enumerate(PROGRAMS.items()):  # each in one way, in turn
            way = [*WAYS][k % 3] if kind == AxisType.Explicit else "gradient"
            found = jax.tree.map(np.asarray, jax.jit(WAYS[way](f))(W, *rows))
            close(found, wanted(name, way), (kind, name, way))
        if kind == AxisType.Explicit:  # each device has two of the sixteen rows
            lse = gt.pairwise_reduce(lambda a, b: a @ b.T, "logsumexp", (1, 16))
            program = jax.jit(lambda w, x, y: lse(x @ w, y)).lower(W, *rows[:2]).compile()
            trips = re.findall(r'known_trip_count[^0-9]*(\\d+)', program.as_text())
            assert trips == ["2"], trips

both, rows, columns = P(("d", "m")), P("d"), P("m")
LAID_OUT = [
    (both, columns), (columns, rows), (rows, P()), (P(), rows), (P("d", "m"), P("d", "m")),
    (rows, P(None, "m")),
]
for kind, ways in ((AxisType.Explicit, ("gradient", "Hessian")), (AxisType.Auto, ("gradient",))):
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit, kind))
    with jax.set_mesh(mesh):
        for k, specs in enumerate(LAID_OUT):  # each with one way of each program
            x, y = (jax.device_put(z, NamedSharding(mesh, s)) for z, s in zip((X, Y), specs))
            for j, name in enumerate(("contrastive, plain", "pairwise_reduce")):
                way = ways[(k + j) % len(ways)]
                found = jax.jit(WAYS[way](PROGRAMS[name]))(W, x, y, CLASSES)
                close(found, wanted(name, way), (kind, name, way, specs))

mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def over_devices(f, checked, *args):
    '''The mean over devices of f, each of which has two rows of X and Y.'''

    def run(w, x, y):
        w = jax.lax.pcast(w, ("d",), to="varying") if checked else w
        return jax.lax.pmean(f(w, x, y), "d")

    specs = P(), P("d"), P("d")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)
    return jax.jit(mapped)(W, X, Y)


for checked in (True, False):
    for name, options in CONTRASTIVE.items():
        loss = lambda w, x, y, **more: gt.contrastive_loss(
            jnp.tanh(x @ w), y, 1.3, tile_size=3, **options, **more)
        found = over_devices(gt.grad(lambda w, x, y: loss(w, x, y, axis_name="d")), checked)
        close(found, jax.jit(gt.grad(loss))(W, X, Y), (checked, name))

    def product(reduced):
        def of(w, x, y):
            t = jnp.exp(0.3) * jnp.sum(w)  # of the running trace, closed over below
            pairs = lambda x, y: jnp.where(x[:, :1] > 0, t, 2 * t) * (x @ y.T)
            f = lambda v: jnp.sum(reduced(pairs)(jnp.tanh(x @ v), y))
            return jax.jvp(jax.grad(f), (w,), (w,))[1]
        return of

    tiled = lambda f: gt.pairwise_reduce(f, "logsumexp", (3, 5))
    dense = lambda f: lambda x, y: jax.nn.logsumexp(f(x, y), axis=1)
    close(*[over_devices(product(g), checked) for g in (tiled, dense)], (checked, "closed over"))
print("all hold")
"""


@pytest.mark.slow
def test_losses_of_all_pairs_over_meshes_are_those_of_one_device():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "all hold\n"
