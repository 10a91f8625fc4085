"""Plants bugs in ports one at a time, with the expected reports of the comparison tools.

A mistake replaces a text in one side of a port in `ports.py`. `cause` is a part of the cause's text
in the report of `cross_check`, or UNKNOWN if no cause is found. `lines` are the source lines in
PyTorch and JAX that `first_divergence` names; the default is the changed line and its counterpart.
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
    """A bug, made by replacing a text in the PyTorch or the JAX side of a port."""

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
    """Replace the text in one side and compile it; return the function and the original lines."""
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
    """Return both sides of a port, with the text replaced in one side."""
    torch.manual_seed(0)
    first, _ = built(name, "torch", folder, *(changed == "torch") * (old, new))
    second, _ = built(name, "jax", folder, *(changed == "jax") * (old, new))
    if name not in ports.MODELS:
        return first, second
    original = first()
    with torch.no_grad():
        for p in original.parameters():
            p.add_(0.3 * torch.rand_like(p))
    return original, second(original)


_ORDER = "another order: reshaped where the other side transposes"
_IN_TORCH, _IN_JAX = "stopped gradient in torch", "stopped gradient in jax"
_GATES = "permuted blocks of axes of length"
_CHANNELS = "y.transpose(0, 3, 1, 2).reshape"
_NORMALIZED = "F.normalize(torch.tanh(b @ w), dim=-1)"
_MEAN, _ITS = "0.9 * mean + 0.1 * m", "0.1 * mean + 0.9 * m"
_TORCH_OUTSIDE = "sqrt(x) + 1e-05 in torch, sqrt(x + 1e-05) in jax"
_JAX_OUTSIDE = "sqrt(x + 1e-05) in torch, sqrt(x) + 1e-05 in jax"
_TRIL = "jnp.tril(jnp.ones((t, t), bool))"
_GELU, _TANH = "gelu(x) in torch, tanh gelu(x) in jax", "tanh gelu(x) in torch, gelu(x) in jax"

_TABLE = {  # for each port: side, old text, new text, cause, lines
    "mlp": [
        ("jax", "x @ w + b", "x @ w - b", "x + y in torch, y - x in jax"),
        ("jax", "approximate=True", "approximate=False", _TANH),
        ("torch", "* 0.5", "* 0.25", "0.25 x in torch, 0.5 x in jax"),
        ("jax", "axis=-1", "axis=0", "over (1,) in torch, log_softmax(x) over (0,)"),
        ("jax", "-y[:, 0].mean()", "-y[:, 0].sum()", "constant factor 0.25, the batch"),
    ],
    "attention": [
        ("jax", "s / 3**0.5", "s / 6**0.5", "0.5774 x in torch, 0.4082 x in jax"),
        ("jax", "jnp.tril", "jnp.triu", "mask: transposed layout"),
        ("torch", ".tril()", ".triu()", "mask: transposed layout"),
        ("jax", _TRIL, f"{_TRIL[:-1]}, -1)", "mask: shifted by one"),
        ("torch", "torch.softmax(s, -1)", "torch.softmax(s, -2)", "softmax(x) over (2,)"),
        ("jax", '"bhqk,bkhd->bqhd"', '"bhkq,bkhd->bqhd"', UNKNOWN),
        ("torch", "(p @ v).transpose(1, 2)", "(p @ v)", _ORDER, ("y.reshape",) * 2),
        ("jax", "x + y @ out", "y @ out", "x + y in torch, x in jax"),
    ],
    "convolution": [
        ("jax", "[(1, 1)] * 2", '"SAME"', UNKNOWN),
        ("jax", "y + b", "y * b", "x + y in torch, x * y in jax"),
        ("torch", "unbiased=False", "unbiased=True", "var(x, ddof=1) over (0, 2, 3)"),
        ("jax", "1e-5", "1e-3", "x + 1e-05 in torch, x + 0.001 in jax"),
        ("jax", _CHANNELS, "y.reshape", _ORDER),
        ("torch", "F.relu(y)", "y", "x in torch, relu(x) in jax", ("y @ head", "y = jax.nn.relu")),
    ],
    "lstm": [
        ("jax", "i, g, f, o", "i, f, g, o", _GATES, ("c = torch.sig", "c = jax")),
        ("torch", "i, g, f, o", "i, f, g, o", _GATES, ("c = torch.sig", "c = jax")),
        ("torch", "f + 1.0", "f", "sigmoid(x) in torch, x + 1 in jax"),
        ("jax", "jnp.tanh(c)", "c", "tanh(x) in torch, x * y in jax"),
    ],
    "vae": [
        ("jax", "jnp.exp(0.5 * v)", "jnp.exp(v)", "z ** 0.5 in torch, y * z in jax"),
        ("jax", "[z, m]", "[m, z]", "permuted blocks of axis 1"),
        ("torch", "kl.sum(-1).mean()", "kl.mean()", "constant factor 0.5"),
        ("jax", "0.1 * kl", "0.2 * kl", "constant factor 0.5"),
    ],
    "q_learning": [
        ("jax", "jax.lax.stop_gradient(target)", "target", _IN_TORCH, ("target.detach", "loss =")),
        ("torch", "target.detach()", "target * 1", _IN_JAX, ("loss =", "stop_gradient(target)")),
        ("jax", "jax.lax.stop_gradient(gate)", "gate", _IN_TORCH),
        ("jax", "0.9 * best", "0.99 * best", "0.9 x in torch, 0.99 x in jax"),
    ],
    "fourier": [
        ("jax", "a * w", "a * w.conj()", "x * y in torch, y * conj(x) in jax"),
        ("torch", "z.conj()", "z", "x * y in torch, y * conj(x) in jax"),
        ("jax", "2 * c.imag", "c.imag", "2 x in torch, x + y in jax"),
    ],
    "contrastive": [
        (
            "jax",
            "s * jnp.exp(temperature)",
            "s / jnp.exp(temperature)",
            "1.35 x in torch, 0.7408 x in jax",
        ),
        ("jax", "log_softmax(s.T, -1)", "log_softmax(s, -1)", UNKNOWN, ("columns =", "(rows")),
        ("torch", _NORMALIZED, "torch.tanh(b @ w)", UNKNOWN, ("s = a", "b = ")),
    ],
    "linen": [
        ("jax", "nn.gelu(y, approximate=False)", "nn.gelu(y)", _GELU),
        ("jax", "x + y", "y", "x + y in torch", ("x + y", "x.mean(1)")),
        (
            "jax",
            "epsilon=1e-5",
            "epsilon=1e-6",
            "sqrt(x + 1e-05) in torch",
            ("y = self.norm(x)",) * 2,
        ),
    ],
    "nnx": [
        ("jax", "nnx.silu(y)", "nnx.gelu(y)", "silu(x) in torch, tanh gelu(x) in jax"),
        ("jax", "nnx.max_pool", "nnx.avg_pool", UNKNOWN),
        ("torch", ".permute(0, 2, 3, 1)", "", _ORDER),
    ],
    "equinox": [
        ("jax", "jax.nn.elu(h)", "jax.nn.celu(h, 0.5)", "elu(x) in torch, relu(x) in jax"),
        ("jax", "jnp.tanh(y) * y", "jnp.tanh(y)", "x * y in torch, y in jax"),
    ],
    "norm": [
        ("jax", _MEAN, _ITS, "0.9 x in torch, 0.1 x in jax: the factors add up"),
        ("torch", _MEAN, _ITS, "0.1 x in torch, 0.9 x in jax: the factors add up"),
        ("jax", "jnp.sqrt(v + 1e-5)", "(jnp.sqrt(v) + 1e-5)", _JAX_OUTSIDE),
        ("torch", "torch.sqrt(v + 1e-5)", "(torch.sqrt(v) + 1e-5)", _TORCH_OUTSIDE),
        ("jax", "ddof=0", "ddof=1", "var(x) over (0,) in torch, var(x, ddof=1) over"),
        ("torch", "correction=0", "correction=1", "var(x, ddof=1) over (0,) in torch"),
        ("jax", "+ 1e-6", "+ 1e-4", "x + 1e-06 in torch, x + 0.0001 in jax"),
        ("jax", "* scale", "* (1 + scale)", "x * y in torch, x + 1 in jax"),
        ("torch", "* scale", "/ scale", "y / x in torch, x * y in jax"),
        ("jax", "mean(-1, k", "mean(0, k", "(1,) in torch, mean(x) over (0,)"),
        ("torch", "mean(-1, k", "sum(-1, k", "0.2 x in jax"),
    ],
    "masked": [
        ("jax", "where(mask, s", "where(~mask, s", "mask: inverted"),
        ("torch", "where(mask, s", "where(~mask, s", "mask: inverted"),
        ("jax", "where(mask, s", "where(mask.T, s", "mask: transposed layout"),
        ("torch", "where(mask, s", "where(mask.T, s", "mask: transposed layout"),
        (
            "jax",
            "s / 3**0.5",
            "s",
            "0.5774 x in torch, x in jax: the square root",
            ("s = s / 3", "jnp.where"),
        ),
        (
            "torch",
            "s / 3**0.5",
            "s * 1",
            "x in torch, 0.5774 x in jax",
            ("s = torch.where", "s = s / 3"),
        ),
        ("jax", "approximate=False", "approximate=True", _GELU),
        ("torch", "F.gelu(y)", 'F.gelu(y, approximate="tanh")', _TANH),
        ("jax", "softmax(s, -1)", "softmax(s, -2)", "softmax(x) over (2,) in torch"),
        ("jax", "y + q", "y - q", "x + y in torch, y - x in jax"),
        ("torch", "F.gelu(y)", "F.silu(y)", "silu(x) in torch, gelu(x) in jax"),
    ],
}

MISTAKES = [Mistake(port, *row) for port, rows in _TABLE.items() for row in rows]
