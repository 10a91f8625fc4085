"""Measures the overhead of gradtools over plain framework code.

The variants of a row are timed in turn. The table contains the median of each variant, and the
median of the paired ratios to the first variant.
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

ROUNDS, CALLS = 11, 40
Variants = dict[str, Callable[[], Any]]


class _Reverse(torch.autograd.Function):
    """A hand-written gradient reversal that supports both modes, vmap and torch.func."""

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        return -ctx.saved_tensors[0] * ct, None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, _: Any) -> torch.Tensor:
        return (-ctx.saved_tensors[0] * dx).view_as(dx)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, scale: torch.Tensor) -> Any:
        return _Reverse.apply(x, scale), in_dims[0]


def reversal(size: int) -> Variants:
    """Returns variants of a forward and backward pass, with and without gradient reversal."""
    x = torch.randn(size, size, requires_grad=True)

    def step(edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(edit(x * 2).sum(), x)

    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = x.view_as(x)
        y.register_hook(lambda ct: -1.0 * ct)  # type: ignore[no-untyped-call]
        return y

    return {
        "by hand": step(lambda x: _Reverse.apply(x, torch.tensor(1.0))),
        "gradtools": step(gt.reverse_gradient),
        "a hook": step(hooked),
        "no reversal": step(lambda x: x),
    }


def gradient(size: int) -> Variants:
    """Returns variants of the gradient of a small function in eager PyTorch."""
    x = torch.randn(size, size)
    f = lambda x: (torch.tanh(x @ x) ** 2).sum()

    def by_hand() -> Any:
        alias = x.detach().requires_grad_()
        return torch.autograd.grad(f(alias), alias)

    return {
        "by hand": by_hand,
        "gradtools": lambda: gt.grad(f)(x),
        "torch.func": lambda: torch.func.grad(f)(x),
    }


def jitted(size: int) -> Variants:
    """Returns variants of the gradient of a function with a reversal, under jit in JAX."""
    x = jax.random.normal(jax.random.key(0), (size, size))

    @jax.custom_vjp
    def reverse(x: jax.Array) -> jax.Array:
        return x

    reverse.defvjp(lambda x: (x, None), lambda _, ct: (-ct,))
    f = lambda edit: lambda x: (jnp.tanh(edit(x) @ x) ** 2).sum()
    by_hand = jax.jit(jax.grad(f(reverse)))
    ours = jax.jit(gj.grad(f(gj.reverse_gradient)))
    return {
        "by hand": lambda: jax.block_until_ready(by_hand(x)),
        "gradtools": lambda: jax.block_until_ready(ours(x)),
    }


def eager(size: int) -> Variants:
    """Returns variants of the gradient of a small function in eager JAX, which traces each call."""
    x = jax.random.normal(jax.random.key(0), (size, size))
    f = lambda x: (jnp.tanh(x @ x) ** 2).sum()
    return {
        "by hand": lambda: jax.block_until_ready(jax.grad(f)(x)),
        "gradtools": lambda: jax.block_until_ready(gj.grad(f)(x)),
    }


def seconds(run: Callable[[], Any]) -> float:
    """Returns the CPU seconds of a call."""
    start = time.process_time()
    for _ in range(CALLS):
        run()
    return (time.process_time() - start) / CALLS


def row(name: str, variants: Variants) -> list[str]:
    for run in variants.values():
        seconds(run)
    rounds = [{key: seconds(run) for key, run in variants.items()} for _ in range(ROUNDS)]
    lines = []
    for key in variants:
        median = 1e6 * statistics.median(r[key] for r in rounds)
        ratio = statistics.median(r[key] / r["by hand"] for r in rounds)
        lines.append(f"| {name} | {key} | {median:.0f} | {ratio:.2f} |")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        f"# Overhead, {datetime.date.today()}, Python {sys.version.split()[0]}, "
        f"torch {version('torch')}, jax {version('jax')}, one CPU thread in PyTorch",
        "",
        f"Times are CPU microseconds: medians over {ROUNDS} interleaved rounds of {CALLS} calls.",
        "",
        "| measurement | variant | microseconds | relative to hand-written |",
        "|---|---|---|---|",
    ]
    for size in (8, 64, 512):
        lines += row(f"reversal, {size} x {size}, PyTorch", reversal(size))
        lines += row(f"gradient, {size} x {size}, PyTorch", gradient(size))
        lines += row(f"gradient with a reversal, {size} x {size}, JAX jit", jitted(size))
        lines += row(f"gradient, {size} x {size}, JAX eager", eager(size))
    text = "\n".join(lines) + "\n"
    print(text)
    target = pathlib.Path(__file__).parent / "results" / "overhead.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
