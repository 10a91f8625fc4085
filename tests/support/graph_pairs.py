"""Pairs of programs that differ in one thing, which `graph_diff` must name.

Each program is a function of (xp, x, y, w) in the words that NumPy, PyTorch and JAX share, or of
one backend's own. x and y are 3×4, w is 4×4 (so that a transpose fits). With each pair stand the
words that one of the differences must hold.
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
        "minimum": (
            lambda p, x, y, w: p.minimum(x, y),
            lambda p, x, y, w: p.minimum(x, y * 2),
            "multiply",
        ),
        "constants of arrays": (
            lambda p, x, y, w: x * p.asarray([1, 2, 3, 4], dtype=x.dtype),
            lambda p, x, y, w: x * p.asarray([1, 2, 3, 5], dtype=x.dtype),
            "constant: [1, 2, 3, 4] ≠ [1, 2, 3, 5]",
        ),
        "in the exponent": (lambda p, x, y, w: p.exp(-x), lambda p, x, y, w: p.exp(x), "negate"),
        "outside of the root": (
            lambda p, x, y, w: p.sqrt(x + 1),
            lambda p, x, y, w: p.sqrt(x) + 1,
            "sqrt",
        ),
        "which factor twice": (
            lambda p, x, y, w: x * x * y,
            lambda p, x, y, w: x * y * y,
            "something else",
        ),
        "tail": (lambda p, x, y, w: (x @ w)[:, :2], lambda p, x, y, w: (x @ w)[:, 2:], "start"),
        "joined order": (
            lambda p, x, y, w: p.concatenate([x, p.sin(y)], 0),
            lambda p, x, y, w: p.concatenate([p.sin(y), x], 0),
            "another order",
        ),
        "double": (lambda p, x, y, w: x + x, lambda p, x, y, w: x * 2, "add ≠ multiply"),
        "sign of the sum": (lambda p, x, y, w: -(x + y), lambda p, x, y, w: -x + y, "negate"),
        "inner transpose": (
            lambda p, x, y, w: p.tanh(w) @ w,
            lambda p, x, y, w: p.tanh(w).T @ w,
            "axes of operand 1",
        ),
        "equal or not": (
            lambda p, x, y, w: p.where(x == y, x, w[:3]),
            lambda p, x, y, w: p.where(x != y, x, w[:3]),
            "relation: == ≠ !=",
        ),
        "dimension of a mean": (
            lambda p, x, y, w: (w - w.mean(0)) ** 2,
            lambda p, x, y, w: (w - w.mean(1)) ** 2,
            "1",
        ),
        "angle": (
            lambda p, x, y, w: p.arctan2(x, y),
            lambda p, x, y, w: p.arctan2(y, x),
            "another order",
        ),
        "power of two": (lambda p, x, y, w: x**y, lambda p, x, y, w: y**x, "another order"),
        "same shape": (
            lambda p, x, y, w: w.reshape(2, 8),
            lambda p, x, y, w: w.reshape(8, 2),
            "another value",
        ),
        "of rows": (
            lambda p, x, y, w: w[0] * w[:, 0],
            lambda p, x, y, w: w[0] * w[0],
            "limit: (4, 1) ≠ (1, 4)",
        ),
        "cosine of": (
            lambda p, x, y, w: p.sin(p.cos(x)),
            lambda p, x, y, w: p.cos(p.sin(x)),
            "sin",
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
        "variance of one number": (
            lambda p, x, y, w: x[:1].var(0),
            lambda p, x, y, w: x[:1].var(1),
            "axis: 0 ≠ 1",
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
        "product": (
            lambda p, x, y, w: t.prod(w, 0),
            lambda p, x, y, w: t.prod(w, 1),
            "axis: 0 ≠ 1",
        ),
        "limit of a clamp": (
            lambda p, x, y, w: t.clamp(x, min=y),
            lambda p, x, y, w: t.clamp(x, max=y),
            "maximum ≠ minimum",
        ),
        "strided": (
            lambda p, x, y, w: t.as_strided(w, (2, 2), (1, 2)),
            lambda p, x, y, w: t.as_strided(w, (2, 2), (2, 1)),
            "stride: (1, 2) ≠ (2, 1)",
        ),
        "offset": (
            lambda p, x, y, w: t.as_strided(w, (2, 2), (1, 2), 1),
            lambda p, x, y, w: t.as_strided(w, (2, 2), (1, 2), 2),
            "storage_offset: 1 ≠ 2",
        ),
        "filled": (
            lambda p, x, y, w: x * t.full_like(x, 2.0),
            lambda p, x, y, w: x * t.full_like(x, 3.0),
            "constant: 2 ≠ 3",
        ),
        "newly filled": (
            lambda p, x, y, w: x * x.new_full((4,), 2.0),
            lambda p, x, y, w: x * x.new_full((4,), 3.0),
            "constant: 2 ≠ 3",
        ),
        "zeros": (
            lambda p, x, y, w: (x.new_zeros(2), x * 2),
            lambda p, x, y, w: (x.new_zeros(3), x * 2),
            "shape of output[0]: (2,) ≠ (3,)",
        ),
        "added product": (
            lambda p, x, y, w: t.addbmm(w, w[None], w.T[None]),
            lambda p, x, y, w: t.addbmm(w.T, w[None], w.T[None]),
            "axes of operand 1",
        ),
        "on the diagonal": (
            lambda p, x, y, w: t.block_diag(x, y),
            lambda p, x, y, w: t.block_diag(y, x),
            "another order",
        ),
        "threshold": (
            lambda p, x, y, w: F.softplus(x, beta=1.0),
            lambda p, x, y, w: F.softplus(x, beta=2.0),
            "beta",
        ),
        "dropout": (
            lambda p, x, y, w: F.dropout(x, 0.1),
            lambda p, x, y, w: F.dropout(x, 0.2),
            "p: 0.9 ≠ 0.8",
        ),
        "pooled": (
            lambda p, x, y, w: F.max_pool1d(x[None], 2),
            lambda p, x, y, w: F.avg_pool1d(x[None], 2),
            "max_pool ≠ avg_pool",
        ),
        "conjugated": (
            lambda p, x, y, w: t.vdot(x[0] * 1j, y[0] * 1j).real,
            lambda p, x, y, w: t.dot(x[0] * 1j, y[0] * 1j).real,
            "conj",
        ),
        "bits": (
            lambda p, x, y, w: x * (x.long() & y.long()),
            lambda p, x, y, w: x * t.logical_and(x.long(), y.long()),
            "bitwise_and",
        ),
        "along": (
            lambda p, x, y, w: t.gather(w, 0, w.long()),
            lambda p, x, y, w: t.gather(w, 1, w.long()),
            "axis: 0 ≠ 1",
        ),
        "scattered": (
            lambda p, x, y, w: w.scatter(0, w.long(), w),
            lambda p, x, y, w: w.scatter(1, w.long(), w),
            "axis: 0 ≠ 1",
        ),
        "added or set": (
            lambda p, x, y, w: w.index_put((t.tensor([0]),), x[0], accumulate=True),
            lambda p, x, y, w: w.index_put((t.tensor([0]),), x[0]),
            "mode: add ≠ none",
        ),
        "groups": (
            lambda p, x, y, w: F.group_norm(w[None], 1),
            lambda p, x, y, w: F.group_norm(w[None], 2),
            "group",
        ),
        "spaced": (
            lambda p, x, y, w: x * t.linspace(0, 1, 4),
            lambda p, x, y, w: x * t.linspace(0, 2, 4),
            "constant: 1 ≠ 2",
        ),
        "diagonal": (
            lambda p, x, y, w: t.diagonal(w, 1),
            lambda p, x, y, w: t.diagonal(w, -1),
            "offset: 1 ≠ -1",
        ),
        "causal": (
            lambda p, x, y, w: F.scaled_dot_product_attention(
                w[None, None], w[None, None], w[None, None]
            ),
            lambda p, x, y, w: F.scaled_dot_product_attention(
                w[None, None], w[None, None], w[None, None], is_causal=True
            ),
            "is_causal: none ≠ True",
        ),
        "rounded": (
            lambda p, x, y, w: t.div(x, y, rounding_mode="floor"),
            lambda p, x, y, w: t.div(x, y, rounding_mode="trunc"),
            "rounding_mode: floor ≠ trunc",
        ),
        "order of an array": (
            lambda p, x, y, w: x[t.tensor([0, 1])],
            lambda p, x, y, w: x[t.tensor([1, 0])],
            "[0, 1] ≠ [1, 0]",
        ),
        "which rows": (
            lambda p, x, y, w: w[t.tensor([0, 2])] * 1.5,
            lambda p, x, y, w: w[t.tensor([0, 3])] * 1.5,
            "[0, 2] ≠ [0, 3]",
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
        "dilated": (
            *(
                lambda _, x, y, w, d=d: lax.reduce_window(
                    x.reshape(12)[:5], 0.0, lax.add, (2,), (2,), "VALID", window_dilation=(d,)
                )
                for d in (1, 2)
            ),
            "dilation",
        ),
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
        "where it starts": (
            lambda _, x, y, w: lax.dynamic_slice(w, (0, 1), (2, 2)),
            lambda _, x, y, w: lax.dynamic_slice(w, (1, 0), (2, 2)),
            "another order",
        ),
        "set or added": (
            lambda _, x, y, w: x.at[0].set(2.0),
            lambda _, x, y, w: x.at[0].add(2.0),
            "scatter ≠ scatter_add",
        ),
        "place": (
            lambda _, x, y, w: x.at[0].set(2.0),
            lambda _, x, y, w: x.at[1].set(2.0),
            "constant: 0 ≠ 1",
        ),
        "one hot": (
            lambda _, x, y, w: n.one_hot(p.asarray([0, 1, 2]), 4) * x,
            lambda _, x, y, w: n.one_hot(p.asarray([0, 1, 3]), 4) * x,
            "[0, 1, 2] ≠ [0, 1, 3]",
        ),
        "branch": (
            lambda _, x, y, w: lax.cond(x[0, 0] > 0, p.sin, p.cos, x),
            lambda _, x, y, w: lax.cond(x[0, 0] > 0, p.cos, p.sin, x),
            "another value",
        ),
        "trips": (
            lambda _, x, y, w: lax.fori_loop(0, 3, lambda i, c: c * y, x),
            lambda _, x, y, w: lax.fori_loop(0, 4, lambda i, c: c * y, x),
            "3 ≠ 4",
        ),
        "spaced": (
            lambda _, x, y, w: x * p.linspace(0, 1, 4),
            lambda _, x, y, w: x * p.linspace(0, 2, 4),
            "constant: 1 ≠ 2",
        ),
        "diagonal": (
            lambda _, x, y, w: p.diagonal(w, 1),
            lambda _, x, y, w: p.diagonal(w, -1),
            "axis: 1 ≠ 0",
        ),
        "order of an array": (
            lambda _, x, y, w: x[p.asarray([0, 1])],
            lambda _, x, y, w: x[p.asarray([1, 0])],
            "[0, 1] ≠ [1, 0]",
        ),
        "which rows": (
            lambda _, x, y, w: w[p.asarray([0, 2])] * 1.5,
            lambda _, x, y, w: w[p.asarray([0, 3])] * 1.5,
            "[0, 2] ≠ [0, 3]",
        ),
    }
