"""Compares the bridge with jax2torch and torch2jax on one function, under many transforms.

The program needs jax2torch and torch2jax (pip install jax2torch torch2jax); a missing package is
left out. A cell is "yes" if the result is correct to 1e-10, "wrong" if it is not, and the type of
the error if an error was raised. torch2jax translates PyTorch's operations to JAX; gradtools and
jax2torch call the other framework.
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradtools import bridge

X = np.linspace(-1.0, 1.0, 12).reshape(3, 4)
func = torch.func


def in_torch(x: Any) -> Any:
    return (torch.tanh(x) * torch.exp(x)).sum()


def in_jax(x: Any) -> Any:
    return (jnp.tanh(x) * jnp.exp(x)).sum()


def reverse_twice(f: Any) -> Any:
    def run(x: Any) -> Any:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.autograd.grad((g**2).sum(), x)[0]

    return run


def backward(f: Any) -> Any:
    return lambda x: torch.autograd.grad(f(a := x.clone().requires_grad_()), a)[0]


JAX_IN_TORCH: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "value": lambda f: f,
    "backward": backward,
    "double backward": reverse_twice,
    "torch.func.grad": func.grad,
    "forward mode": lambda f: lambda x: func.jvp(f, (x,), (2 * x,))[1],
    "forward over reverse": lambda f: lambda x: func.jvp(func.grad(f), (x,), (x,))[1],
    "third order": lambda f: (
        lambda x: func.grad(lambda x: (func.jvp(func.grad(f), (x,), (x,))[1] ** 2).sum())(x)
    ),
    "vmap of grad": lambda f: func.vmap(func.grad(f)),
    "vmap of hessian": lambda f: func.vmap(func.hessian(f)),
    "compile": lambda f: torch.compile(f, backend="eager", fullgraph=True),
    "keyword arguments": lambda f: lambda x: f(x=x),
}
TORCH_IN_JAX: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "forward mode": lambda f: lambda x: jax.jvp(f, (x,), (2 * x,))[1],
    "reverse over reverse": lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum()),
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1],
    "third order": lambda f: jax.grad(lambda x: (jax.jvp(jax.grad(f), (x,), (x,))[1] ** 2).sum()),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(f)),
    "scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c - 0.1 * f(c), None), x, None, 3)[0].sum()
    ),
}


def verdict(run: Callable[..., Any], native: Callable[..., Any], x: Any) -> str:
    """Tests one package under one transform and returns the text of the table cell."""
    expected = np.asarray(native(x))
    try:
        found = np.asarray(run(x))
    except Exception as error:
        return type(error).__name__
    return (
        "yes"
        if found.shape == expected.shape and np.allclose(found, expected, 0, 1e-10)
        else "wrong"
    )


def table(ways: dict[str, Any], native: Any, crossed: dict[str, Any], x: Any) -> list[str]:
    """Returns the table of one direction: a row per transform, a column per package."""
    lines = [f"| | {' | '.join(crossed)} |", "|---" * (len(crossed) + 1) + "|"]
    for way, of in ways.items():
        cells = [verdict(lambda x, f=f, of=of: of(f)(x), of(native), x) for f in crossed.values()]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return lines


def named(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    torch.set_default_dtype(torch.float64)
    here, there = {"gradtools": bridge.to_torch(in_jax)}, {"gradtools": bridge.to_jax(in_torch)}
    if find_spec("jax2torch"):
        from jax2torch import jax2torch

        here[named("jax2torch")] = jax2torch(in_jax)
    if find_spec("torch2jax"):
        import torch2jax

        there[named("torch2jax")] = torch2jax.t2j(in_torch)
    lines = [
        f"# The bridge and its peers, {datetime.date.today()}, torch {version('torch')}, "
        f"jax {version('jax')}",
        "",
        "The function is the sum of tanh(x) exp(x). A cell is *yes* if the result is correct to "
        "1e-10, *wrong* if it is not, and the type of the error if an error was raised. jax2torch "
        "0.0.7 passes DLPack capsules to JAX, which no longer accepts them. torch2jax supports "
        "only the operations that it translates.",
        "",
        "## A JAX function in PyTorch",
        "",
        *table(JAX_IN_TORCH, in_torch, here, torch.from_numpy(X)),
        "",
        "## A PyTorch function in JAX",
        "",
        *table(TORCH_IN_JAX, in_jax, there, jnp.asarray(X)),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (pathlib.Path(__file__).parent / "results" / "bridge_peers.md").write_text(
        text, encoding="utf-8"
    )


if __name__ == "__main__":
    main()
