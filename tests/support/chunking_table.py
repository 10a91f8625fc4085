"""Defines functions of a batch that treat each example separately, for both backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

N, D = 10, 3


@dataclass(frozen=True)
class Case:
    """A function of a batch, functions that create its arguments, and options for `chunked`.

    f takes the namespace, a shared weight and the batch.
    """

    name: str
    f: Callable[..., Any]
    batch: Callable[[np.random.Generator], Any] = lambda rng: rng.normal(size=(N, D))
    weight: Callable[[np.random.Generator], Any] = lambda rng: rng.normal(size=(D, D))
    options: dict[str, Any] = field(default_factory=dict)
    in_axes: Any = (None, 0)

    def __str__(self) -> str:
        return self.name


def tanh(gt, w, x):
    return gt.xp.tanh(x @ w)


def columns(gt, w, x):
    return gt.xp.tanh(w.T @ x)


def trees(gt, w, x):
    y = gt.xp.sin(x["a"] @ w["m"]) * w["s"]
    return {"out": (y, y * x["b"][:, None]), "row": gt.xp.arange(x["a"].shape[0])}


def products(gt, w, x):
    z = x @ w
    return z * z * gt.xp.conj(z)


def transposed(gt, w, x):
    return gt.xp.tanh(x @ w).T


def pairs(gt, w, x):
    return (gt.xp.tanh(x @ w), gt.xp.sin(x @ w).T)


def of_lists(gt, w, xs):
    return gt.xp.stack([gt.xp.tanh(x @ w).sum(0) for x in xs])


def to_lists(gt, w, xs):
    return [gt.xp.tanh(x @ w) for x in xs]


def normal(*shape):
    return lambda rng: rng.normal(size=shape)


def complex_normal(*shape):
    return lambda rng: rng.normal(size=shape) + 1j * rng.normal(size=shape)


def ragged(rng):
    return [rng.normal(size=(1 + k % 3, D)) for k in range(N)]


def even(rng):
    return [rng.normal(size=(2, D)) for _ in range(N)]


CASES = [
    Case("matrix", tanh),
    Case("one example at a time", tanh, options={"chunk_size": 1}),
    Case("one chunk", tanh, options={"chunk_size": 10}),
    Case("larger than the batch", tanh, options={"chunk_size": 99}),
    Case("even chunks", tanh, options={"chunk_size": 5}),
    Case("interleaved", tanh, options={"interleaved": True}),
    Case("interleaved evenly", tanh, options={"interleaved": True, "chunk_size": 5}),
    Case("the last axis", columns, batch=normal(D, N), options={"out_axes": -1}, in_axes=(None, 1)),
    Case(
        "a negative axis", columns, batch=normal(D, N), options={"out_axes": 1}, in_axes=(None, -1)
    ),
    Case("another output axis", transposed, options={"out_axes": 1}),
    Case("a tree of axes", pairs, options={"out_axes": (0, -1)}),
    Case(
        "trees",
        trees,
        batch=lambda rng: {"a": rng.normal(size=(N, D)), "b": rng.normal(size=N)},
        weight=lambda rng: {"m": rng.normal(size=(D, D)), "s": rng.normal()},
    ),
    Case("complex", products, batch=complex_normal(N, D), weight=complex_normal(D, D)),
    Case("a list of unequal examples", of_lists, batch=ragged),
    Case("a list of equal examples", of_lists, batch=even),
    Case("a list to a list", to_lists, batch=ragged),
    Case("a list to a list, interleaved", to_lists, batch=ragged, options={"interleaved": True}),
]


def chunked(gt, case):
    """Apply `gt.chunked` to the function of a case; return a function of w and x."""
    options = {"chunk_size": 4, **case.options}
    return gt.chunked(lambda w, x: case.f(gt, w, x), in_axes=case.in_axes, **options)


def loss(gt, out):
    """Return a loss that couples all pairs of entries."""
    total = 0.0
    if isinstance(out, dict):
        return loss(gt, out["out"])
    for k, y in enumerate(out if isinstance(out, tuple | list) else (out,)):
        flat = y.reshape(-1)
        total = total + gt.xp.abs((flat**2).sum() + (1 + k) * flat.sum()) ** 2
    return total / 50
