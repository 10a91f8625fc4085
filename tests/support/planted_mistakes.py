"""Mistakes planted in ports, one at a time: what `cross_check` and `first_divergence` say of each.

A mistake changes one text in one side of a port of `ports.py`. `cause` is a part of the cause that
`cross_check` gives, UNKNOWN where it gives none. `lines` are texts of the named lines in PyTorch
and JAX, where they are not the changed line and the line of the same number.
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support import ports

UNKNOWN = "no known pattern"


@dataclass(frozen=True)
class Mistake:
    """One changed text of one side of a port."""

    port: str
    side: str
    old: str
    new: str
    cause: str
    lines: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.port}: {self.new}"


def built(
    name: str, side: str, folder: Path, old: str = "", new: str = ""
) -> tuple[Any, list[str]]:
    """The function that builds one side, from its own file with one text replaced."""
    lines, _ = inspect.getsourcelines(getattr(ports, f"{name}_{side}"))
    source = textwrap.dedent("".join(lines))
    assert source.count(old), old
    file = folder / f"{name}_{side}.py"
    file.write_text(source.replace(old, new, 1) if old else source)
    linecache.checkcache(str(file))
    space = dict(vars(ports))
    exec(compile(file.read_text(), str(file), "exec"), space)
    return space[f"{name}_{side}"], source.split("\n")


def both(name: str, folder: Path, changed: str = "", old: str = "", new: str = "") -> Any:
    """Both sides of a port, one of them with a changed text."""
    torch.manual_seed(0)
    with torch.no_grad():
        make, _ = built(name, "torch", folder, *(changed == "torch") * (old, new))
        original = make()
        for p in getattr(original, "parameters", list)():
            p.add_(0.3 * torch.rand_like(p))
    return original, built(name, "jax", folder, *(changed == "jax") * (old, new))[0](original)


_ORDER = "another order: reshaped where the other side transposes"
_GATES = "exchanged operands"
_CHANNELS = "y.transpose(0, 3, 1, 2).reshape"
_NORMALIZED = "F.normalize(torch.tanh(b @ w), dim=-1)"
_COS = "torch.cos(angle), torch.sin(angle)"
_SIN = "torch.sin(angle), torch.cos(angle)"
_MEAN, _ITS = "0.9 * mean + 0.1 * m", "0.1 * mean + 0.9 * m"
_TORCH_OUTSIDE = "an epsilon outside of the root in torch, inside in jax"
_JAX_OUTSIDE = "an epsilon inside of the root in torch, outside in jax"
_TRIL = "jnp.tril(jnp.ones((t, t), bool))"
_GELU, _TANH = "gelu(x) in torch, tanh gelu(x) in jax", "tanh gelu(x) in torch, gelu(x) in jax"

MISTAKES = [
    Mistake("mlp", "jax", "x @ w + b", "x @ w - b", "x + y in torch, y - x in jax"),
    Mistake("mlp", "jax", "approximate=True", "approximate=False", _TANH),
    Mistake("mlp", "torch", "* 0.5", "* 0.25", "constant factor 0.5"),
    Mistake("mlp", "jax", "axis=-1", "axis=0", "over (1,) in torch, log_softmax(x) over (0,)"),
    Mistake("mlp", "jax", "-y[:, 0].mean()", "-y[:, 0].sum()", "constant factor 0.25, the batch"),
    Mistake("attention", "jax", "s / 3**0.5", "s / 6**0.5", "constant factor 1.41421"),
    Mistake("attention", "jax", "jnp.tril", "jnp.triu", "transposed mask"),
    Mistake("attention", "torch", ".tril()", ".triu()", "transposed mask"),
    Mistake("attention", "jax", _TRIL, f"{_TRIL[:-1]}, -1)", "mask shifted by one"),
    Mistake(
        "attention", "torch", "torch.softmax(s, -1)", "torch.softmax(s, -2)", "softmax(x) over (2,)"
    ),
    Mistake("attention", "jax", '"bhqk,bkhd->bqhd"', '"bhkq,bkhd->bqhd"', UNKNOWN),
    Mistake("attention", "torch", "(p @ v).transpose(1, 2)", "(p @ v)", _ORDER, ("y.reshape",) * 2),
    Mistake("attention", "jax", "x + y @ out", "y @ out", "x + y in torch, x in jax"),
    Mistake("convolution", "jax", "[(1, 1)] * 2", '"SAME"', UNKNOWN),
    Mistake("convolution", "jax", "y + b", "y * b", "x + y in torch, x * y in jax"),
    Mistake(
        "convolution", "torch", "unbiased=False", "unbiased=True", "var(x, ddof=1) over (0, 2, 3)"
    ),
    Mistake("convolution", "jax", "1e-5", "1e-3", "x + 1e-05 in torch, x + 0.001 in jax"),
    Mistake("convolution", "jax", _CHANNELS, "y.reshape", _ORDER),
    Mistake(
        "convolution",
        "torch",
        "F.relu(y)",
        "y",
        "x in torch, relu(x) in jax",
        ("y @ head", "y = jax.nn.relu"),
    ),
    Mistake("lstm", "jax", "i, g, f, o", "i, f, g, o", _GATES, ("c = torch.sig", "c = jax")),
    Mistake("lstm", "torch", "i, g, f, o", "i, f, g, o", _GATES, ("c = torch.sig", "c = jax")),
    Mistake("lstm", "torch", "f + 1.0", "f", "sigmoid(x) in torch, x + 1 in jax"),
    Mistake(
        "lstm",
        "jax",
        "jax.nn.sigmoid(o) * jnp.tanh(c)",
        "jax.nn.sigmoid(o) * c",
        "tanh(x) in torch, x * y in jax",
    ),
    Mistake("vae", "jax", "jnp.exp(0.5 * v)", "jnp.exp(v)", "0.5 x in torch, y * z in jax"),
    Mistake("vae", "jax", "[z, m]", "[m, z]", "permuted blocks of axis 1"),
    Mistake("vae", "torch", "kl.sum(-1).mean()", "kl.mean()", "constant factor 0.5"),
    Mistake("vae", "jax", "0.1 * kl", "0.2 * kl", "constant factor 0.5"),
    Mistake(
        "q_learning",
        "jax",
        "jax.lax.stop_gradient(target)",
        "target",
        "stopped gradient in torch",
        ("target.detach", "loss ="),
    ),
    Mistake(
        "q_learning",
        "torch",
        "target.detach()",
        "target * 1",
        "stopped gradient in jax",
        ("loss =", "stop_gradient(target)"),
    ),
    Mistake(
        "q_learning", "jax", "jax.lax.stop_gradient(gate)", "gate", "stopped gradient in torch"
    ),
    Mistake("q_learning", "jax", "0.9 * best", "0.99 * best", "constant factor 0.909091"),
    Mistake("fourier", "jax", "a * w", "a * w.conj()", "x * y in torch, y * conj(x) in jax"),
    Mistake("fourier", "torch", "z.conj()", "z", "x * y in torch, y * conj(x) in jax"),
    Mistake("fourier", "jax", "2 * c.imag", "c.imag", "2 x in torch, x + y in jax"),
    Mistake(
        "contrastive",
        "jax",
        "s * jnp.exp(temperature)",
        "s / jnp.exp(temperature)",
        "constant factor 1.82212",
    ),
    Mistake(
        "contrastive",
        "jax",
        "log_softmax(s.T, -1)",
        "log_softmax(s, -1)",
        UNKNOWN,
        ("columns =", "(rows"),
    ),
    Mistake(
        "contrastive",
        "torch",
        _NORMALIZED,
        "torch.tanh(b @ w)",
        UNKNOWN,
        ("s = a", "b = "),
    ),
    Mistake("newton", "jax", "(3 * x**2 + 1)", "(3 * x**2)", "x + 1 in torch, y / x in jax"),
    Mistake("newton", "torch", "torch.sin(b)", "torch.cos(b)", "cos(x) in torch, sin(x) in jax"),
    Mistake("linen", "jax", "nn.gelu(y, approximate=False)", "nn.gelu(y)", _GELU),
    Mistake("linen", "jax", "x + y", "y", "x + y in torch", ("x + y", "x.mean(1)")),
    Mistake(
        "linen",
        "jax",
        "epsilon=1e-5",
        "epsilon=1e-6",
        "1 / sqrt(x + 1e-05) in torch, 1 / sqrt(x + 1e-06) in jax",
        ("y = self.norm(x)", "y = self.norm(x)"),
    ),
    Mistake("nnx", "jax", "nnx.silu(y)", "nnx.gelu(y)", "silu(x) in torch, tanh gelu(x) in jax"),
    Mistake("nnx", "jax", "nnx.max_pool", "nnx.avg_pool", UNKNOWN),
    Mistake("nnx", "torch", ".permute(0, 2, 3, 1)", "", _ORDER),
    Mistake(
        "equinox", "jax", "jax.nn.elu(h)", "jax.nn.celu(h, 0.5)", "elu(x) in torch, relu(x) in jax"
    ),
    Mistake("equinox", "jax", "jnp.tanh(y) * y", "jnp.tanh(y)", "x * y in torch, y in jax"),
    Mistake("rotary", "jax", "k1 * c - k2 * s", "k1 * c + k2 * s", "y - x in torch, x + y in jax"),
    Mistake("rotary", "torch", _COS, _SIN, _GATES, ("q = ", "q = ")),
    Mistake("rotary", "torch", "0.01]", "0.1]", UNKNOWN),
    Mistake("norm", "jax", _MEAN, _ITS, "0.9 x in torch, 0.1 x in jax: a weight and its compl"),
    Mistake("norm", "torch", _MEAN, _ITS, "0.1 x in torch, 0.9 x in jax: a weight and its compl"),
    Mistake("norm", "jax", "jnp.sqrt(v + 1e-5)", "(jnp.sqrt(v) + 1e-5)", _JAX_OUTSIDE),
    Mistake("norm", "torch", "torch.sqrt(v + 1e-5)", "(torch.sqrt(v) + 1e-5)", _TORCH_OUTSIDE),
    Mistake("norm", "jax", "ddof=0", "ddof=1", "var(x) over (0,) in torch, var(x, ddof=1) over"),
    Mistake("norm", "torch", "correction=0", "correction=1", "var(x, ddof=1) over (0,) in torch"),
    Mistake("norm", "jax", "+ 1e-6", "+ 1e-4", "x + 1e-06 in torch, x + 0.0001 in jax"),
    Mistake("norm", "jax", "* scale", "* (1 + scale)", "x * y in torch, x + 1 in jax"),
    Mistake("norm", "torch", "* scale", "/ scale", "y / x in torch, x * y in jax"),
    Mistake("norm", "jax", "mean(-1, k", "mean(0, k", "(1,) in torch, mean(x) over (0,)"),
    Mistake("norm", "torch", "mean(-1, k", "sum(-1, k", "0.2 x in jax"),
    Mistake("masked", "jax", "where(mask, s", "where(~mask, s", "inverted mask"),
    Mistake("masked", "torch", "where(mask, s", "where(~mask, s", "inverted mask"),
    Mistake("masked", "jax", "where(mask, s", "where(mask.T, s", "transposed mask"),
    Mistake("masked", "torch", "where(mask, s", "where(mask.T, s", "transposed mask"),
    Mistake(
        "masked",
        "jax",
        "s / 3**0.5",
        "s",
        "0.5774 x in torch, x in jax: the root of axis",
        ("s = s / 3", "jnp.where"),
    ),
    Mistake(
        "masked",
        "torch",
        "s / 3**0.5",
        "s * 1",
        "x in torch, 0.5774 x in jax",
        ("s = torch.where", "s = s / 3"),
    ),
    Mistake("masked", "jax", "approximate=False", "approximate=True", _GELU),
    Mistake("masked", "torch", "F.gelu(y)", 'F.gelu(y, approximate="tanh")', _TANH),
    Mistake("masked", "jax", "softmax(s, -1)", "softmax(s, -2)", "softmax(x) over (2,) in torch"),
    Mistake("masked", "jax", "y + q", "y - q", "x + y in torch, y - x in jax"),
    Mistake("masked", "torch", "F.gelu(y)", "F.silu(y)", "silu(x) in torch, gelu(x) in jax"),
]
