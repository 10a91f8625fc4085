"""Pairs of programs: what `graph_diff` must name, and where it must be silent.

Each program is a function of (xp, x, y, w) in the words that NumPy, PyTorch and JAX share, or of
one backend's own. x and y are 3×4, w is 4×4 (so that a transpose fits). `DIFFERENT` has for each
pair the words that one of the differences must hold; `EQUAL` has pairs that compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Program = Callable[..., Any]


def shared() -> dict[str, tuple[Program, Program, str]]:
    """Pairs in the words of both: by name two programs, and what differs."""
    return {
        "scaled": (lambda p, x, y, w: x * 0.1, lambda p, x, y, w: x * 0.5, "constant: 0.1 ≠ 0.5"),
        "added": (lambda p, x, y, w: x + 1.0, lambda p, x, y, w: x + 2.0, "constant: 1 ≠ 2"),
        "from one": (lambda p, x, y, w: 1 - x, lambda p, x, y, w: x - 1, "another order"),
        "of two": (lambda p, x, y, w: x - y, lambda p, x, y, w: y - x, "another order"),
        "by two": (lambda p, x, y, w: x / y, lambda p, x, y, w: y / x, "another order"),
        "base": (lambda p, x, y, w: 2**x, lambda p, x, y, w: x**2, "another order"),
        "exponent": (lambda p, x, y, w: x**2, lambda p, x, y, w: x**3, "constant: 2 ≠ 3"),
        "sign": (lambda p, x, y, w: x + y, lambda p, x, y, w: x - y, "add ≠ subtract"),
        "factor": (lambda p, x, y, w: x * y, lambda p, x, y, w: x * x, "reads something else"),
        "sin": (lambda p, x, y, w: p.sin(x), lambda p, x, y, w: p.cos(x), "sin ≠ cos"),
        "exp": (lambda p, x, y, w: p.exp(x), lambda p, x, y, w: p.expm1(x), "exp ≠ expm1"),
        "log": (lambda p, x, y, w: p.log(x), lambda p, x, y, w: p.log1p(x), "log ≠ log1p"),
        "tanh": (lambda p, x, y, w: p.tanh(x @ w), lambda p, x, y, w: p.sin(x @ w), "tanh ≠ sin"),
        "sum": (lambda p, x, y, w: w.sum(0), lambda p, x, y, w: w.sum(1), "axis: 0 ≠ 1"),
        "sum of all": (lambda p, x, y, w: x.sum(), lambda p, x, y, w: x.sum(0).max(), "max"),
        "mean": (lambda p, x, y, w: w.mean(0), lambda p, x, y, w: w.mean(1), "≠ 1"),
        "greatest": (lambda p, x, y, w: p.sum(w), lambda p, x, y, w: p.max(w), "sum ≠ max"),
        "cumsum": (
            lambda p, x, y, w: p.cumsum(x, 0),
            lambda p, x, y, w: p.cumsum(x, 1),
            "axis: 0 ≠ 1",
        ),
        "matrix": (lambda p, x, y, w: x @ w, lambda p, x, y, w: x @ w.T, "axes of operand 2"),
        "matrices": (
            lambda p, x, y, w: w @ w.T,
            lambda p, x, y, w: w.T @ w,
            "axes of operand",
        ),
        "order of matrices": (
            lambda p, x, y, w: p.sin(w) @ w,
            lambda p, x, y, w: w @ p.sin(w),
            "another order",
        ),
        "transposed": (
            lambda p, x, y, w: p.sin(w),
            lambda p, x, y, w: p.sin(w).T,
            "axes of output",
        ),
        "row": (lambda p, x, y, w: p.exp(x[0]), lambda p, x, y, w: p.exp(x[1]), "start"),
        "column": (lambda p, x, y, w: p.exp(w[0]), lambda p, x, y, w: p.exp(w[:, 0]), "limit"),
        "slice": (lambda p, x, y, w: p.exp(x[:2]), lambda p, x, y, w: p.exp(x[1:]), "start"),
        "stride": (lambda p, x, y, w: x[:, ::2] * 1.5, lambda p, x, y, w: x[:, :2] * 1.5, "stride"),
        "compared": (
            lambda p, x, y, w: p.where(x > y, x, y),
            lambda p, x, y, w: p.where(x < y, x, y),
            "relation: > ≠ <",
        ),
        "where": (
            lambda p, x, y, w: p.where(x > 0, x, y),
            lambda p, x, y, w: p.where(x > 0, y, x),
            "another order",
        ),
        "limit": (
            lambda p, x, y, w: p.where(x > 0, x, y),
            lambda p, x, y, w: p.where(x > 1, x, y),
            "constant: 0 ≠ 1",
        ),
        "outputs": (
            lambda p, x, y, w: (p.sin(x), p.exp(x)),
            lambda p, x, y, w: (p.exp(x), p.sin(x)),
            "another value",
        ),
        "argument": (lambda p, x, y, w: p.sin(x), lambda p, x, y, w: p.sin(y), "something else"),
        "skip": (
            lambda p, x, y, w: p.sin(x) + x,
            lambda p, x, y, w: p.sin(x) + y,
            "something else",
        ),
        "more": (lambda p, x, y, w: p.exp(x), lambda p, x, y, w: p.exp(p.sin(x)), "sin"),
        "less": (lambda p, x, y, w: p.exp(x) * 2, lambda p, x, y, w: p.exp(x), "multiply"),
        "row sums": (
            lambda p, x, y, w: w / w.sum(0),
            lambda p, x, y, w: w / w.sum(1),
            "axis: 0 ≠ 1",
        ),
        "broadcast": (
            lambda p, x, y, w: w * w[0][None],
            lambda p, x, y, w: w * w[0][:, None],
            "axes of operand",
        ),
        "stacked": (
            lambda p, x, y, w: p.stack([x, y]),
            lambda p, x, y, w: p.stack([y, x]),
            "another order",
        ),
        "maximum": (
            lambda p, x, y, w: p.maximum(x, y),
            lambda p, x, y, w: p.minimum(x, y),
            "maximum ≠ minimum",
        ),
        "logaddexp": (
            lambda p, x, y, w: p.maximum(x, y * 0 + 1),
            lambda p, x, y, w: p.maximum(x, y * 0 + 2),
            "constant: 1 ≠ 2",
        ),
        "reshaped": (
            lambda p, x, y, w: p.sin(w).reshape(2, 8),
            lambda p, x, y, w: p.sin(w).T.reshape(2, 8),
            "another value",
        ),
    }


def shared_equal() -> dict[str, tuple[Program, Program]]:
    """Pairs in the words of both that compute the same."""

    def named(p: Any, x: Any, y: Any, w: Any) -> Any:
        hidden = p.tanh(x @ w)
        return hidden.sum()

    def late(p: Any, x: Any, y: Any, w: Any) -> Any:
        b = p.exp(y)
        a = p.sin(x)
        return a * b

    return {
        "itself": (lambda p, x, y, w: p.sin(x) * y, lambda p, x, y, w: p.sin(x) * y),
        "sum": (lambda p, x, y, w: x + y, lambda p, x, y, w: y + x),
        "product": (lambda p, x, y, w: p.sin(x) * p.exp(y), lambda p, x, y, w: p.exp(y) * p.sin(x)),
        "another order": (lambda p, x, y, w: p.sin(x) * p.exp(y), late),
        "names": (named, lambda p, x, y, w: p.tanh(p.matmul(x, w)).sum()),
        "negative axis": (lambda p, x, y, w: x.sum(-1), lambda p, x, y, w: x.sum(1)),
        "function": (lambda p, x, y, w: x.sum(0), lambda p, x, y, w: p.sum(x, 0)),
        "transposed twice": (lambda p, x, y, w: x @ w, lambda p, x, y, w: x @ w.T.T),
        "reshaped": (
            lambda p, x, y, w: p.sin(x),
            lambda p, x, y, w: p.sin(x.reshape(12)).reshape(3, 4),
        ),
        "sine of a transpose": (lambda p, x, y, w: p.sin(x).T, lambda p, x, y, w: p.sin(x.T)),
        "an axis more": (lambda p, x, y, w: p.exp(x), lambda p, x, y, w: p.exp(x[None])[0]),
        "product of transposes": (lambda p, x, y, w: (x @ w).T, lambda p, x, y, w: w.T @ x.T),
        "kept": (
            lambda p, x, y, w: x / x.sum(1)[:, None],
            lambda p, x, y, w: x / x.sum(1).reshape(3, 1),
        ),
        "greater": (
            lambda p, x, y, w: p.where(x > y, x, y),
            lambda p, x, y, w: p.where(y < x, x, y),
        ),
        "unused": (lambda p, x, y, w: p.sin(x), lambda p, x, y, w: (p.exp(x), p.sin(x))[1]),
        "negated": (lambda p, x, y, w: (-x) * y, lambda p, x, y, w: y * -x),
        "sum over both": (lambda p, x, y, w: x.sum(), lambda p, x, y, w: x.sum((0, 1))),
        "rows": (lambda p, x, y, w: p.exp(x[1]), lambda p, x, y, w: p.exp(x[1:2]).reshape(4)),
    }


def across() -> dict[str, tuple[Program, Program]]:
    """The same in PyTorch and in JAX: of (torch, x, y, w), and of (jax, x, y, w)."""
    F = lambda t: t.nn.functional
    J = lambda j: j.nn
    return {
        "relu": (lambda t, x, y, w: t.relu(x), lambda j, x, y, w: J(j).relu(x)),
        "softmax": (lambda t, x, y, w: t.softmax(x, 1), lambda j, x, y, w: J(j).softmax(x, 1)),
        "softmax of relu": (
            lambda t, x, y, w: t.softmax(t.relu(x), -1),
            lambda j, x, y, w: J(j).softmax(J(j).relu(x), -1),
        ),
        "log softmax": (
            lambda t, x, y, w: t.log_softmax(x, 1),
            lambda j, x, y, w: J(j).log_softmax(x, 1),
        ),
        "logsumexp": (
            lambda t, x, y, w: t.logsumexp(x, 1),
            lambda j, x, y, w: j.scipy.special.logsumexp(x, 1),
        ),
        "sigmoid": (lambda t, x, y, w: t.sigmoid(x), lambda j, x, y, w: J(j).sigmoid(x)),
        "silu": (lambda t, x, y, w: F(t).silu(x), lambda j, x, y, w: J(j).silu(x)),
        "linear": (
            lambda t, x, y, w: F(t).linear(x, w, y[0]),
            lambda j, x, y, w: x @ w.T + y[0],
        ),
        "mean": (lambda t, x, y, w: x.mean(), lambda j, x, y, w: x.mean()),
        "mean over an axis": (lambda t, x, y, w: x.mean(1), lambda j, x, y, w: x.mean(1)),
        "variance": (
            lambda t, x, y, w: x.var(1, correction=0),
            lambda j, x, y, w: x.var(1),
        ),
        "least squares": (
            lambda t, x, y, w: ((x @ w - y) ** 2).mean(),
            lambda j, x, y, w: ((x @ w - y) ** 2).mean(),
        ),
        "layer norm": (
            lambda t, x, y, w: F(t).layer_norm(x, (4,)),
            lambda j, x, y, w: (
                (x - x.mean(1, keepdims=True)) * j.lax.rsqrt(x.var(1, keepdims=True) + 1e-5)
            ),
        ),
        "two layers": (
            lambda t, x, y, w: t.tanh(t.tanh(x @ w) @ w).sum(),
            lambda j, x, y, w: j.numpy.tanh(j.numpy.tanh(x @ w) @ w).sum(),
        ),
        "attention": (
            lambda t, x, y, w: t.softmax((x @ w) @ x.T / 2.0, -1) @ x,
            lambda j, x, y, w: J(j).softmax((x @ w) @ x.T / 2.0, -1) @ x,
        ),
        "einsum": (
            lambda t, x, y, w: t.einsum("ij,kj->ik", x, w),
            lambda j, x, y, w: j.numpy.einsum("ij,kj->ik", x, w),
        ),
        "norm": (
            lambda t, x, y, w: t.sqrt((x**2).sum()),
            lambda j, x, y, w: j.numpy.sqrt((x**2).sum()),
        ),
        "from one": (lambda t, x, y, w: 1 - x, lambda j, x, y, w: 1 - x),
        "two over x": (lambda t, x, y, w: 2 / x, lambda j, x, y, w: 2 / x),
        "where": (
            lambda t, x, y, w: t.where(x > 0.5, x, y),
            lambda j, x, y, w: j.numpy.where(x > 0.5, x, y),
        ),
        "clip": (
            lambda t, x, y, w: t.clip(x, 0.2, 0.8),
            lambda j, x, y, w: j.numpy.clip(x, 0.2, 0.8),
        ),
        "slices": (
            lambda t, x, y, w: x[1:, :2] * x[:2, 2:],
            lambda j, x, y, w: x[1:, :2] * x[:2, 2:],
        ),
        "a row": (lambda t, x, y, w: t.exp(x[1]), lambda j, x, y, w: j.numpy.exp(x[1])),
        "heads": (
            lambda t, x, y, w: (w.reshape(4, 2, 2).transpose(0, 1) * 2).reshape(2, 8),
            lambda j, x, y, w: (w.reshape(4, 2, 2).transpose(1, 0, 2) * 2).reshape(2, 8),
        ),
    }


def of_torch(t: Any) -> dict[str, tuple[Program, Program, str]]:
    """Pairs in PyTorch's own words, and what differs."""
    F = t.nn.functional
    image = lambda x: x.reshape(1, 1, 3, 4)
    kernel = lambda w: w[:2, :2].reshape(1, 1, 2, 2)
    conv = lambda **k: lambda p, x, y, w: F.conv2d(image(x), kernel(w), **k)
    return {
        "softmax": (
            lambda p, x, y, w: t.softmax(w, 0),
            lambda p, x, y, w: t.softmax(w, 1),
            "axis: 0 ≠ 1",
        ),
        "softmax of relu": (
            lambda p, x, y, w: t.softmax(t.relu(w), 0),
            lambda p, x, y, w: t.softmax(t.relu(w), 1),
            "axis: 0 ≠ 1",
        ),
        "alpha": (
            lambda p, x, y, w: t.sub(x, y, alpha=2),
            lambda p, x, y, w: t.sub(x, y, alpha=3),
            "alpha: 2 ≠ 3",
        ),
        "no alpha": (
            lambda p, x, y, w: t.add(x, y),
            lambda p, x, y, w: t.add(x, y, alpha=3),
            "alpha: none ≠ 3",
        ),
        "stride": (conv(), conv(stride=(1, 2)), "stride: none ≠ (1, 2)"),
        "padding": (conv(), conv(padding=1), "padding"),
        "dilation": (conv(dilation=(1, 2)), conv(dilation=(1, 3)), "dilation: (1, 2) ≠ (1, 3)"),
        "gelu": (
            lambda p, x, y, w: F.gelu(x),
            lambda p, x, y, w: F.gelu(x, approximate="tanh"),
            "approximate: none ≠ tanh",
        ),
        "eps": (
            lambda p, x, y, w: F.layer_norm(x, (4,), eps=1e-5),
            lambda p, x, y, w: F.layer_norm(x, (4,), eps=1e-3),
            "eps: 1e-05 ≠ 0.001",
        ),
        "correction": (
            lambda p, x, y, w: x.var(1),
            lambda p, x, y, w: x.var(1, correction=0),
            "correction: 1 ≠ 0",
        ),
        "norm": (
            lambda p, x, y, w: t.linalg.vector_norm(x, 1),
            lambda p, x, y, w: t.linalg.vector_norm(x, 3),
            "ord: 1 ≠ 3",
        ),
        "kept": (
            lambda p, x, y, w: x - x.sum(1, keepdim=True),
            lambda p, x, y, w: x - x.sum(0, keepdim=True),
            "axis: 1 ≠ 0",
        ),
        "clamp": (
            lambda p, x, y, w: x.clamp(min=0.6),
            lambda p, x, y, w: x.clamp(min=0.7),
            "low: 0.6 ≠ 0.7",
        ),
        "rolled": (
            lambda p, x, y, w: x.roll(1, 0),
            lambda p, x, y, w: x.roll(2, 0),
            "shifts: 1 ≠ 2",
        ),
        "joined": (
            lambda p, x, y, w: t.cat([w, w * 2], 0).sum(0),
            lambda p, x, y, w: t.cat([w, w * 2], 1).sum(0),
            "axis: 0 ≠ 1",
        ),
        "triangle": (
            lambda p, x, y, w: t.tril(w),
            lambda p, x, y, w: t.triu(w),
            "upper: False ≠ True",
        ),
        "cast": (
            lambda p, x, y, w: x.double() * 2,
            lambda p, x, y, w: x.half() * 2,
            "float64 ≠ float16",
        ),
        "detached": (
            lambda p, x, y, w: x * y,
            lambda p, x, y, w: x * y.detach(),
            "stop",
        ),
        "slope": (
            lambda p, x, y, w: F.leaky_relu(x, 0.1),
            lambda p, x, y, w: F.leaky_relu(x, 0.2),
            "negative_slope: 0.1 ≠ 0.2",
        ),
        "no_grad": (lambda p, x, y, w: t.sin(x) * y, _without_gradient, "gradients switched off"),
        "swapped": (
            lambda p, x, y, w: F.linear(x, w, y[0]),
            lambda p, x, y, w: F.linear(x, w.T, y[0]),
            "axes of operand 3",
        ),
    }


def _without_gradient(t: Any, x: Any, y: Any, w: Any) -> Any:
    with t.no_grad():
        s = t.sin(x)
    return s * y


def of_jax(j: Any) -> dict[str, tuple[Program, Program, str]]:
    """Pairs in JAX's own words, and what differs."""
    p, n, lax = j.numpy, j.nn, j.lax
    einsum = lambda words: lambda _, x, y, w: p.einsum(words, w, p.sin(w))
    conv = lambda stride, padding: (
        lambda _, x, y, w: lax.conv(
            x.reshape(1, 1, 3, 4), w[:2, :2].reshape(1, 1, 2, 2), stride, padding
        )
    )
    return {
        "softmax": (
            lambda _, x, y, w: n.softmax(w, 0),
            lambda _, x, y, w: n.softmax(w, 1),
            "axis: 0 ≠ 1",
        ),
        "softmax of relu": (
            lambda _, x, y, w: n.softmax(n.relu(w), 0),
            lambda _, x, y, w: n.softmax(n.relu(w), 1),
            "axis: 0 ≠ 1",
        ),
        "einsum": (einsum("ij,jk->ik"), einsum("ij,kj->ik"), "axes of operand"),
        "stride": (conv((1, 1), "VALID"), conv((1, 2), "VALID"), "stride: none ≠ (1, 2)"),
        "padding": (conv((1, 1), "VALID"), conv((1, 1), "SAME"), "padding"),
        "kept": (
            lambda _, x, y, w: x - x.sum(1, keepdims=True),
            lambda _, x, y, w: x - x.sum(0, keepdims=True),
            "axis: 1 ≠ 0",
        ),
        "reversed": (
            lambda _, x, y, w: lax.cumsum(x, 0),
            lambda _, x, y, w: lax.cumsum(x, 0, reverse=True),
            "reverse: none ≠ True",
        ),
        "joined": (
            lambda _, x, y, w: p.concatenate([w, w * 2], 0).sum(0),
            lambda _, x, y, w: p.concatenate([w, w * 2], 1).sum(0),
            "axis: 0 ≠ 1",
        ),
        "padded": (lambda _, x, y, w: p.pad(x, 1), lambda _, x, y, w: p.pad(x, 2), "low"),
        "cast": (
            lambda _, x, y, w: x.astype("float16") * 2,
            lambda _, x, y, w: x.astype("bfloat16") * 2,
            "float16 ≠ bfloat16",
        ),
        "stopped": (lambda _, x, y, w: x * y, lambda _, x, y, w: x * lax.stop_gradient(y), "stop"),
        "flipped": (
            lambda _, x, y, w: p.flip(w, 0),
            lambda _, x, y, w: p.flip(w, 1),
            "axis: 0 ≠ 1",
        ),
        "integer power": (lambda _, x, y, w: x**-2, lambda _, x, y, w: x**-3, "-2 ≠ -3"),
        "clipped": (
            lambda _, x, y, w: p.clip(x, 0.6, 0.9),
            lambda _, x, y, w: p.clip(x, 0.6, 0.8),
            "constant: 0.9 ≠ 0.8",
        ),
        "slope": (
            lambda _, x, y, w: n.leaky_relu(x, 0.1),
            lambda _, x, y, w: n.leaky_relu(x, 0.2),
            "constant: 0.1 ≠ 0.2",
        ),
        "rounds": (
            lambda _, x, y, w: lax.scan(lambda c, r: (c * r, c), x[0], y)[0],
            lambda _, x, y, w: lax.scan(lambda c, r: (c + r, c), x[0], y)[0],
            "multiply ≠ add",
        ),
        "backwards": (
            lambda _, x, y, w: lax.scan(lambda c, r: (c * r, c), x[0], y)[1],
            lambda _, x, y, w: lax.scan(lambda c, r: (c * r, c), x[0], y, reverse=True)[1],
            "reverse",
        ),
    }
