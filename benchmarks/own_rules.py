"""Compares custom rules with equivalent rules that are written for one framework.

The variants of a row are timed in turn. The table contains the minimum time of each variant, and
the ratio to the first variant. The rule defines exp and its derivative, and saves the output. At
small sizes, the time is mostly overhead.
"""

from __future__ import annotations

import datetime
import pathlib
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import torch
from overhead import Variants

import gradtools.jax as gj
import gradtools.torch as gt

SIZES, ROUNDS, CALLS = (8, 64, 256, 1024), 30, 10


class _Exp(torch.autograd.Function):
    """Implements exp in the most common form, which supports reverse mode only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct * ctx.saved_tensors[0]


class _ExpInTwoSteps(torch.autograd.Function):
    """Implements exp with `setup_context`, as PyTorch's documentation recommends."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct * ctx.saved_tensors[0]


class _ExpBothModes(torch.autograd.Function):
    """Implements exp with the features of a custom rule: both modes, vmap and torch.func."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        return dx * ctx.saved_tensors[0]


def _rule(gt: Any, value: Callable[..., Any]) -> Any:
    """Returns exp as a custom rule whose values are computed by `value`."""
    exp = gt.custom_rule(value)

    def fwd(x: Any) -> Any:
        y = value(x)
        return y, y

    exp.defvjp(fwd, lambda y, ct: (ct * y,))
    return exp


def _forward_rule(gt: Any, value: Callable[..., Any]) -> Any:
    exp = gt.custom_rule(value)

    @exp.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        y = value(*primals)
        return y, tangents[0] * y

    return exp


def _both_rules(gt: Any, value: Callable[..., Any]) -> Any:
    exp = _rule(gt, value)
    exp.defjvp(_forward_rule(gt, value).jvp)
    return exp


def _custom_vjp(value: Callable[..., Any]) -> Any:
    exp = jax.custom_vjp(value)

    def fwd(x: jax.Array) -> Any:
        y = value(x)
        return y, y

    exp.defvjp(fwd, lambda y, ct: (ct * y,))
    return exp


# --- PyTorch -----------------------------------------------------------------------------


def torch_functions() -> dict[str, Callable[..., Any]]:
    return {
        "by hand": _Exp.apply,
        "by hand, setup_context": _ExpInTwoSteps.apply,
        "by hand, both modes and vmap": _ExpBothModes.apply,
        "custom_rule, vjp": _rule(gt, torch.exp),
        "custom_rule, jvp": _forward_rule(gt, torch.exp),
        "custom_rule, both": _both_rules(gt, torch.exp),
        "torch.exp": torch.exp,
    }


def torch_value(size: int) -> Variants:
    x = torch.randn(size, size)
    return {name: (lambda f=f: f(x)) for name, f in torch_functions().items()}


def torch_gradient(size: int) -> Variants:
    x, ct = torch.randn(size, size, requires_grad=True), torch.ones(size, size)
    return {
        name: (lambda f=f: torch.autograd.grad(f(x), x, ct))
        for name, f in torch_functions().items()
    }


# --- JAX ---------------------------------------------------------------------------------


def _ready(run: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(run(*args))


def _array(size: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (size, size))


def jax_value(size: int) -> Variants:
    x = _array(size)
    return {
        "by hand": _ready(_custom_vjp(jnp.exp), x),
        "custom_rule, vjp": _ready(_rule(gj, jnp.exp), x),
        "custom_rule, jvp": _ready(_forward_rule(gj, jnp.exp), x),
    }


def _of_sum(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda x: f(x).sum())


def jax_gradient(size: int) -> Variants:
    x = _array(size)
    return {
        "by hand": _ready(_of_sum(_custom_vjp(jnp.exp)), x),
        "custom_rule, vjp": _ready(_of_sum(_rule(gj, jnp.exp)), x),
        "custom_rule, jvp": _ready(_of_sum(_forward_rule(gj, jnp.exp)), x),
    }


def jax_gradient_jitted(size: int) -> Variants:
    x = _array(size)
    return {
        "by hand": _ready(jax.jit(_of_sum(_custom_vjp(jnp.exp))), x),
        "custom_rule, vjp": _ready(jax.jit(_of_sum(_rule(gj, jnp.exp))), x),
        "custom_rule, jvp": _ready(jax.jit(_of_sum(_forward_rule(gj, jnp.exp))), x),
    }


WHAT = {
    "value, PyTorch": torch_value,
    "value and gradient, PyTorch": torch_gradient,
    "value, JAX eager": jax_value,
    "gradient, JAX eager": jax_gradient,
    "gradient, JAX jit": jax_gradient_jitted,
}


def row(what: str, variants: Variants) -> list[str]:
    """Returns a row of the table for each variant, with the minimum time."""
    least = dict.fromkeys(variants, float("inf"))
    for run in variants.values():
        run()
    for _ in range(ROUNDS):
        for name, run in variants.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            least[name] = min(least[name], (time.perf_counter() - start) / CALLS * 1e6)
    hand = least["by hand"]
    return [f"| {what} | {name} | {t:.0f} | {t / hand:.2f} |" for name, t in least.items()]


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        f"# Custom rules, {datetime.date.today()}, Python {sys.version.split()[0]}, "
        f"torch {version('torch')}, jax {version('jax')}, one CPU thread in PyTorch",
        "",
        f"The rule defines exp and its derivative in float32. Times are minima over {ROUNDS} "
        f"interleaved rounds of {CALLS} calls. The hand-written code is a torch.autograd.Function "
        "and a jax.custom_vjp. For host functions, see host_functions.md.",
        "",
        "| measurement | variant | microseconds | relative to hand-written |",
        "|---|---|---|---|",
    ]
    for name, variants in WHAT.items():
        for size in SIZES:
            lines += row(f"{name}, {size} x {size}", variants(size))
    text = "\n".join(lines) + "\n"
    print(text)
    target = pathlib.Path(__file__).parent / "results" / "own_rules.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
