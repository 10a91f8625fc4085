"""Compares the memory and time of `mixed_partial` and double backward for several depths of G.

In PyTorch, memory is the size of the tensors that autograd saves. In JAX, memory is the size of the
temporaries of the compiled program, with the layers of G in a scan.
"""

from __future__ import annotations

import datetime
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import torch

import gradtools.jax as gj
import gradtools.torch as gt

ROUNDS, CALLS, BATCH, WIDTH = 9, 5, 256, 128
DEPTHS = (4, 16, 64)


def in_torch(depth: int) -> dict[str, Callable[[], Any]]:
    weights = torch.randn(depth, WIDTH, WIDTH) / WIDTH**0.5
    y, z, u = torch.randn(3, BATCH, WIDTH)

    def G(z: torch.Tensor) -> torch.Tensor:
        for w in weights:
            z = torch.tanh(z @ w)
        return z

    f = lambda y, g: ((y * g) ** 2).sum()

    def double_backward() -> Any:
        a, b = y.clone().requires_grad_(), z.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(a, G(b)), b, create_graph=True)
        return torch.autograd.grad((first * u).sum(), a)[0]

    return {
        "double backward": double_backward,
        "mixed_partial": lambda: gt.mixed_partial(f, G, y, z, u),
    }


def in_jax(depth: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    weights = jax.random.normal(keys[0], (depth, WIDTH, WIDTH)) / WIDTH**0.5
    y, z, u = (jax.random.normal(k, (BATCH, WIDTH)) for k in keys[1:])

    def G(z: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda z, w: (jnp.tanh(z @ w), None), z, weights)[0]

    f = lambda y, g: ((y * g) ** 2).sum()

    def double_backward(y: jax.Array, z: jax.Array, u: jax.Array) -> Any:
        first = lambda y: jax.grad(lambda z: f(y, G(z)))(z)
        return jax.grad(lambda y: (first(y) * u).sum())(y)

    ours = lambda y, z, u: gj.mixed_partial(f, G, y, z, u)
    return {
        name: jax.jit(fun).lower(y, z, u).compile()
        for name, fun in {"double backward": double_backward, "mixed_partial": ours}.items()
    } | {"arguments": (y, z, u)}


def saved_bytes(run: Callable[[], Any]) -> int:
    held: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(held.values())


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return (time.perf_counter() - start) / CALLS


def rows(name: str, depth: int, runs: dict[str, Callable[[], Any]], memory: dict[str, int]) -> Any:
    for run in runs.values():
        seconds(run)
    rounds = [{key: seconds(run) for key, run in runs.items()} for _ in range(ROUNDS)]
    for key in runs:
        median = 1e3 * statistics.median(r[key] for r in rounds)
        ratio = statistics.median(r[key] / r["double backward"] for r in rounds)
        yield f"| {name} | {depth} | {key} | {memory[key] / 1e6:.2f} | {median:.2f} | {ratio:.2f} |"


def measured(depth: int) -> Any:
    runs = in_torch(depth)
    yield from rows("PyTorch", depth, runs, {k: saved_bytes(r) for k, r in runs.items()})
    programs = in_jax(depth)
    arguments = programs.pop("arguments")
    memory = {k: p.memory_analysis().temp_size_in_bytes for k, p in programs.items()}
    calls = {k: (lambda p=p: jax.block_until_ready(p(*arguments))) for k, p in programs.items()}
    yield from rows("JAX, jit and scan", depth, calls, memory)


def main() -> None:
    lines = [
        f"# The mixed partial, {datetime.date.today()}, Python {sys.version.split()[0]}, "
        f"torch {version('torch')}, jax {version('jax')}",
        "",
        f"G has layers of width {WIDTH}; the batch size is {BATCH}; arrays are float32. "
        f"Times are medians over {ROUNDS} interleaved rounds of {CALLS} calls.",
        "",
        "| framework | depth of G | method | memory, MB | ms | relative to double backward |",
        "|---|---|---|---|---|---|",
        *(line for depth in DEPTHS for line in measured(depth)),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    target = pathlib.Path(__file__).parent / "results" / "mixed_partial.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
