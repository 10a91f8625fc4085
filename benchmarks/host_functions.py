"""Measures the overhead of host functions over autograd.Function and jax.pure_callback.

The variants of a row run in turn. The table contains the minimum CPU time of each variant,
and the ratio to the first variant. CPU time includes the threads that run callbacks. Other
processes affect a minimum less than a median. PyTorch's rows run before JAX is imported.
"""

from __future__ import annotations

import datetime
import pathlib
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import gradtools.torch as gt

SIZES, ROUNDS = (8, 64, 256), 25
Variants = dict[str, Callable[[], Any]]


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(np.exp(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(ct.numpy() * ctx.saved_tensors[0].numpy())


def _host_exp(gt: Any) -> Any:
    exp, back = gt.host_function(np.exp), gt.host_function(np.multiply)

    def fwd(x: Any) -> Any:
        y = exp(x)
        return y, y

    exp.defvjp(fwd, lambda y, ct: (back(y, ct),))
    return exp


def _called_back(kernel: Any) -> Callable[..., Any]:
    import jax

    def call(x: Any, *more: Any) -> Any:
        return jax.pure_callback(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), x, *more)

    return call


def _bare_exp() -> Any:
    import jax

    exp = jax.custom_vjp(_called_back(np.exp))

    def fwd(x: Any) -> Any:
        y = exp(x)
        return y, y

    exp.defvjp(fwd, lambda y, ct: (_called_back(np.multiply)(y, ct),))
    return exp


def in_torch(size: int) -> dict[str, Variants]:
    x, ct = torch.randn(size, size), torch.ones(size, size)
    tracked, ours = x.clone().requires_grad_(), _host_exp(gt)
    both = {"by hand": _Exp.apply, "host_function": ours}
    return {
        "value, PyTorch": {name: (lambda f=f: f(x)) for name, f in both.items()},
        "value and gradient, PyTorch": {
            name: (lambda f=f: torch.autograd.grad(f(tracked), tracked, ct))
            for name, f in both.items()
        },
    }


def in_jax(size: int) -> dict[str, Variants]:
    import jax

    import gradtools.jax as gj

    x = jax.random.normal(jax.random.key(0), (size, size))
    both = {"by hand": _bare_exp(), "host_function": _host_exp(gj)}
    slope = lambda f: jax.grad(lambda x: f(x).sum())
    ways = {
        "value, JAX eager": lambda f: f,
        "gradient, JAX eager": slope,
        "value, JAX jit": jax.jit,
        "gradient, JAX jit": lambda f: jax.jit(slope(f)),
    }

    def ready(run: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(run(x))

    return {way: {name: ready(how(f)) for name, f in both.items()} for way, how in ways.items()}


def row(what: str, variants: Variants) -> list[str]:
    """Returns a row of the table for each variant."""
    calls = 10 if "gradient, JAX eager" in what else 50
    least = dict.fromkeys(variants, float("inf"))
    for run in variants.values():
        run()
    for _ in range(ROUNDS):
        for name, run in variants.items():
            start = time.process_time()
            for _ in range(calls):
                run()
            least[name] = min(least[name], (time.process_time() - start) / calls * 1e6)
    first = next(iter(least.values()))
    return [f"| {what} | {name} | {t:.0f} | {t / first:.2f} |" for name, t in least.items()]


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        f"# Host functions, {datetime.date.today()}, Python {sys.version.split()[0]}, "
        f"torch {version('torch')}, jax {version('jax')}, one CPU thread in PyTorch",
        "",
        f"The kernel is np.exp in float32. Times are minimum CPU times over {ROUNDS} "
        "interleaved rounds. In PyTorch, the hand-written code is a torch.autograd.Function that "
        "calls .numpy(), without vmap, forward mode, second derivatives or checks; in JAX, it is a "
        "jax.custom_vjp around jax.pure_callback.",
        "",
        "| measurement | variant | microseconds | relative to hand-written |",
        "|---|---|---|---|",
    ]
    for variants_of in (in_torch, in_jax):
        for size in SIZES:
            for what, variants in variants_of(size).items():
                lines += row(f"{what}, {size} x {size}", variants)
    text = "\n".join(lines) + "\n"
    print(text)
    (pathlib.Path(__file__).parent / "results" / "host_functions.md").write_text(
        text, encoding="utf-8"
    )


if __name__ == "__main__":
    main()
