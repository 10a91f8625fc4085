"""Pairs of programs that compute the same, in one framework and in both: `graph_diff` is silent.

Written as those of `graph_pairs.py`.
"""

from __future__ import annotations

import functools
from typing import Any

from tests.support.graph_pairs import Program


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
        "array": (
            lambda p, x, y, w: x * p.asarray([1, 2, 3, 4], dtype=x.dtype),
            lambda p, x, y, w: p.asarray([1, 2, 3, 4], dtype=x.dtype) * x,
        ),
        "rows of a list": (
            lambda p, x, y, w: x[p.asarray([0, 2])],
            lambda p, x, y, w: p.asarray(x)[p.asarray([0, 2])],
        ),
        "loop": (
            lambda p, x, y, w: p.sin(p.sin(p.sin(x))),
            lambda p, x, y, w: functools.reduce(lambda a, _: p.sin(a), range(3), x),
        ),
        "terms of a sum": (lambda p, x, y, w: x + y + w[:3], lambda p, x, y, w: w[:3] + (x + y)),
        "slice of a slice": (lambda p, x, y, w: p.exp(w[1:][1:]), lambda p, x, y, w: p.exp(w[2:])),
        "flattened": (
            lambda p, x, y, w: p.exp(x).reshape(-1),
            lambda p, x, y, w: p.exp(x.reshape(12)),
        ),
        "whole slice": (lambda p, x, y, w: p.exp(x[:]), lambda p, x, y, w: p.exp(x)),
        "swapped compare": (
            lambda p, x, y, w: p.where(x <= y, x, y),
            lambda p, x, y, w: p.where(y >= x, x, y),
        ),
        "vectors": (lambda p, x, y, w: w @ y[0], lambda p, x, y, w: p.matmul(w, y[0])),
        "outer product": (
            lambda p, x, y, w: x[0][:, None] * y[0][None],
            lambda p, x, y, w: y[0][None] * x[0][:, None],
        ),
        "lists": (lambda p, x, y, w: [p.sin(x), p.cos(y)], lambda p, x, y, w: (p.sin(x), p.cos(y))),
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
        "an array": (
            lambda t, x, y, w: x * t.tensor([1.0, 2.0, 3.0, 4.0]),
            lambda j, x, y, w: x * j.numpy.asarray([1, 2, 3, 4], dtype=x.dtype),
        ),
        "maximum": (lambda t, x, y, w: t.clamp(x, min=y), lambda j, x, y, w: j.numpy.maximum(x, y)),
        "joined": (
            lambda t, x, y, w: t.cat([x, y], 1),
            lambda j, x, y, w: j.numpy.concatenate([x, y], 1),
        ),
        "standardised": (
            lambda t, x, y, w: (x - x.mean(0)) / t.sqrt(x.var(0, correction=0) + 1e-5),
            lambda j, x, y, w: (x - x.mean(0)) / j.numpy.sqrt(x.var(0) + 1e-5),
        ),
        "greatest": (lambda t, x, y, w: x.amax(1), lambda j, x, y, w: x.max(1)),
        "running sum": (lambda t, x, y, w: t.cumsum(x, 1), lambda j, x, y, w: j.numpy.cumsum(x, 1)),
    }
