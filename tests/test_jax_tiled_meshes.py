"""`tiled` on eight devices that the host plays: under shard_map, over Auto and Explicit axes."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import gradtools.jax as gt
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
w, x, y = (jnp.asarray(rng.normal(size=s)) for s in ((3, 4), (16, 3), (16, 3)))


def loss(w, x, y, **options):
    encode = gt.chunked(lambda w, x: jnp.tanh(x @ w), 2, (None, 0))
    return gt.contrastive_loss(encode(w, x), encode(w, y), 2.0, tile_size=(2, 3), **options)


def dense(w, x, y):
    s = 2.0 * jnp.tanh(x @ w) @ jnp.tanh(y @ w).T
    lse = jax.nn.logsumexp
    return ((lse(s, 1) + lse(s, 0)) / 2 - jnp.diag(s)).mean()


value, slope = jax.value_and_grad(dense)(w, x, y)
product = jax.jvp(jax.grad(dense), (w, x, y), (w, 0 * x, 0 * y))[1]
for check in (True, False):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def each(w, x, y):
        varying = jax.lax.pcast(w, "d", to="varying") if check else w
        one = lambda w: loss(w, x, y, axis_name="d")
        (v, g), (_, p) = jax.jvp(jax.value_and_grad(one), (varying,), (varying,))
        return jax.lax.pmean((v, g, p), "d")

    run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P(),
                                check_vma=check))
    for a, b in zip(run(w, x, y), (value, slope, product)):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    print("shard_map", check)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        xs, ys = (jax.device_put(z, NamedSharding(mesh, P("d", None))) for z in (x, y))
        ws = jax.device_put(w, NamedSharding(mesh, P(None, None)))
        tile = gt.tiled(lambda x, y: x @ y.T, "logsumexp", (4, 3))
        f = lambda w, x, y: (tile(jnp.tanh(x @ w), jnp.tanh(y @ w)) ** 2).sum()
        g = lambda w, x, y: (jax.nn.logsumexp(jnp.tanh(x @ w) @ jnp.tanh(y @ w).T, 1) ** 2).sum()
        found = jax.jit(jax.value_and_grad(f))(ws, xs, ys)
    for a, b in zip(found, jax.value_and_grad(g)(w, x, y)):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-12, atol=1e-13)
    print(kind)
print("done")
"""


def test_a_loss_of_all_pairs_on_eight_devices_is_that_of_one():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr[-3000:]
