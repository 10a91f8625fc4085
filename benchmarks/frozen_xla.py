"""What XLA makes of second derivatives through a frozen network in JAX: the table of the docs.

Four uses of 24 dense layers, 64 wide, 64 rows, float64. The layers are unrolled or in a scan, the
z_i are taken in a Python loop or in `jax.lax.map`. For each: the bytes that the compiled program of
dg/dy needs beside its inputs and outputs, and XLA's own count of its operations, where it counts
loops right. Below the table: what a further z_i takes if the derivative to them is asked for, too.
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
    """Megabytes for each further z_i, differentiated to y and to the z_i, all in loops."""
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
        f"\nto y and the z_i, layers in `scan`, z_i in `jax.lax.map`: a further z_i takes {frozen}"
    )
    print(f"with `frozen`, {plain} with double backward")


if __name__ == "__main__":
    main()
