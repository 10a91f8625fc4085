"""Prints the memory of second derivatives through a frozen network in JAX, for docs/frozen.md.

G has 24 dense layers of width 64 and is called four times, with 64 rows in float64. The layers are
unrolled or in a scan, and the z_i are processed in a Python loop or in `jax.lax.map`. The table
contains the bytes of temporaries of the compiled program for dg/dy, and XLA's operation count for
programs without loops. The last lines show the memory of each additional z_i if the derivatives
with respect to the z_i are also computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradtools.jax as gt

USES, DEPTH, ROWS, WIDTH = 4, 24, 64, 64


def unrolled(layers: jax.Array, z: jax.Array) -> jax.Array:
    for w in layers:
        z = jnp.tanh(z @ w)
    return z


def scanned(layers: jax.Array, z: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda z, w: (jnp.tanh(z @ w), None), z, layers)[0]


def python_loop(slope: Callable[..., Any], zs: jax.Array) -> jax.Array:
    return jnp.stack([slope(z) for z in zs])


def compiled(
    G: Any, freeze: Any, loop: Any, uses: int = USES, argnums: int | tuple[int, ...] = 0
) -> Any:
    rng = np.random.default_rng(0)
    layers = jnp.asarray(rng.normal(size=(DEPTH, WIDTH, WIDTH)) / WIDTH**0.5)
    y, zs = (jnp.asarray(rng.normal(size=s)) for s in ((WIDTH,), (uses, ROWS, WIDTH)))

    def step(y: jax.Array, zs: jax.Array, layers: jax.Array) -> jax.Array:
        use = freeze(lambda z: G(layers, z))
        slope = lambda y: lambda z: gt.grad(lambda z: jnp.sum(jnp.tanh(use(z) @ y)))(z)
        g = lambda y, zs: jnp.mean(loop(slope(y), zs) ** 2) ** 0.5
        return gt.grad(g, argnums)(y, zs)

    return jax.jit(step).lower(y, zs, layers).compile()


def along_z(freeze: Any) -> str:
    """Returns megabytes per additional z_i, with derivatives with respect to y and the z_i."""
    sizes = [
        compiled(scanned, freeze, jax.lax.map, uses, (0, 1)).memory_analysis().temp_size_in_bytes
        for uses in (USES, 2 * USES)
    ]
    return f"{(sizes[1] - sizes[0]) / USES / 1e6:.2f} MB"


def cell(G: Any, freeze: Any, loop: Any) -> str:
    program = compiled(G, freeze, loop)
    size = f"{program.memory_analysis().temp_size_in_bytes / 1e6:.2f} MB"
    if G is scanned or loop is not python_loop:
        return size
    return f"{size}, {program.cost_analysis()['flops'] / 1e6:.0f} Mflop"


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    print("| | `frozen` | double backward |\n|---|---|---|")
    for where, G in (("layers unrolled", unrolled), ("layers in `scan`", scanned)):
        loops = (("a Python loop", python_loop), ("`jax.lax.map`", jax.lax.map))
        for name, loop in loops:
            cells = [cell(G, freeze, loop) for freeze in (gt.frozen, lambda G: G)]
            print(f"| {where}, z_i in {name} | {' | '.join(cells)} |", flush=True)
    frozen, plain = along_z(gt.frozen), along_z(lambda G: G)
    print(
        "\nmemory per additional z_i with derivatives with respect to y and z_i, layers in `scan`, "
        f"z_i in `jax.lax.map`: {frozen}"
    )
    print(f"with `frozen`, {plain} with double backward")


if __name__ == "__main__":
    main()
