"""Measures the overhead of the bridge over DLPack conversion and over `jax.pure_callback`.

The variants of a row run in turn. The table contains the minimum CPU time of each variant,
and the ratio to the first variant. CPU time includes the threads that run callbacks. Other
processes affect a minimum less than a median.
"""

from __future__ import annotations

import datetime
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradtools import bridge

SIZES, ROUNDS, CALLS = (8, 64, 256), 9, 60
Variants = dict[str, Callable[[], Any]]


def network(size: int) -> torch.nn.Module:
    layers = [m for _ in range(3) for m in (torch.nn.Linear(size, size), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers).requires_grad_(False)


def rows_of(size: int) -> dict[str, Variants]:
    net = network(size)
    call = lambda t: net(t)
    x, t = jnp.ones((size, size)), torch.ones(size, size)
    compiled = jax.jit(lambda x: jnp.tanh(jnp.tanh(jnp.tanh(x @ x) @ x) @ x))
    to_jax, to_torch = bridge.to_jax(call), bridge.to_torch(compiled)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def on_host(a: Any) -> np.ndarray:
        return net(torch.from_numpy(np.array(a))).numpy()

    def pulled(a: Any, ct: Any) -> np.ndarray:
        a = torch.from_numpy(np.array(a)).requires_grad_()
        return torch.autograd.grad(net(a), a, torch.from_numpy(np.array(ct)))[0].numpy()

    hand = jax.custom_vjp(lambda x: jax.pure_callback(on_host, shape, x))
    hand.defvjp(lambda x: (hand(x), x), lambda x, ct: (jax.pure_callback(pulled, shape, x, ct),))

    def in_graph(f: Callable[..., Any]) -> Callable[[], Any]:
        slope = jax.jit(jax.value_and_grad(lambda x: f(x).sum()))
        return lambda: jax.block_until_ready(slope(x))

    jitted, bare = jax.jit(lambda x: to_jax(x)), jax.jit(lambda x: hand(x))
    vjp = jax.jit(lambda x, ct: jax.vjp(compiled, x)[1](ct)[0])
    tracked = t.clone().requires_grad_()

    def step_by_hand() -> Any:
        y = torch.from_dlpack(jax.block_until_ready(compiled(jnp.from_dlpack(t))))
        ct = jnp.from_dlpack(torch.ones_like(y))
        return torch.from_dlpack(jax.block_until_ready(vjp(jnp.from_dlpack(t), ct)))

    return {
        "PyTorch in JAX, eager": {
            "DLPack and the call": lambda: jnp.from_dlpack(call(torch.from_dlpack(x))),
            "to_jax": lambda: to_jax(x),
        },
        "JAX in PyTorch, eager": {
            "DLPack and the call": lambda: torch.from_dlpack(
                jax.block_until_ready(compiled(jnp.from_dlpack(t)))
            ),
            "to_torch": lambda: to_torch(t),
        },
        "JAX in PyTorch, value and gradient": {
            "DLPack and two calls": step_by_hand,
            "to_torch": lambda: torch.autograd.grad(to_torch(tracked).sum(), tracked),
        },
        "PyTorch in JAX, jit": {
            "pure_callback": lambda: jax.block_until_ready(bare(x)),
            "to_jax": lambda: jax.block_until_ready(jitted(x)),
        },
        "PyTorch in JAX, jit, value and gradient": {
            "pure_callbacks": in_graph(hand),
            "to_jax": in_graph(to_jax),
        },
    }


def row(what: str, variants: Variants) -> list[str]:
    """Returns a row of the table for each variant."""
    least = dict.fromkeys(variants, float("inf"))
    for run in variants.values():
        run()
        run()
    for _ in range(ROUNDS):
        for name, run in variants.items():
            start = time.process_time()
            for _ in range(CALLS):
                run()
            least[name] = min(least[name], (time.process_time() - start) / CALLS * 1e6)
    first = next(iter(least.values()))
    return [f"| {what} | {name} | {t:.0f} | {t / first:.2f} |" for name, t in least.items()]


def threads() -> list[str]:
    """Measures calls per second of a compiled gradient, from 1, 4 and 16 threads."""
    f = bridge.to_jax(lambda t: torch.tanh(t).sum())
    slope, x = jax.jit(jax.grad(f)), jnp.ones((64, 64))
    slope(x)
    lines = ["| threads | calls per second |", "|---|---|"]
    for count in (1, 4, 16):
        each = 2000 // count

        def work(each: int = each) -> None:
            for _ in range(each):
                jax.block_until_ready(slope(x))

        started = [threading.Thread(target=work) for _ in range(count)]
        start = time.perf_counter()
        for t in started:
            t.start()
        for t in started:
            t.join()
        lines.append(f"| {count} | {each * count / (time.perf_counter() - start):.0f} |")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        f"# The bridge, {datetime.date.today()}, Python {sys.version.split()[0]}, "
        f"torch {version('torch')}, jax {version('jax')}, one CPU thread in PyTorch",
        "",
        "The function is a network of three layers in float32. Times are minimum CPU times "
        f"over {ROUNDS} interleaved rounds.",
        "",
        "| measurement | variant | microseconds | ratio |",
        "|---|---|---|---|",
    ]
    for size in SIZES:
        for what, variants in rows_of(size).items():
            lines += row(f"{what}, {size} x {size}", variants)
    lines += ["", "The next table counts calls of a compiled gradient from several threads.", ""]
    text = "\n".join([*lines, *threads()]) + "\n"
    print(text)
    (pathlib.Path(__file__).parent / "results" / "bridge.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
