"""Identifies which function each side of a differing layer computes, from common alternatives.

A cause is reported only if one candidate reproduces one side's output and another candidate of the
same kind the other's: GELU and its tanh approximation, layer normalisation with two values of
epsilon, attention whose mask is added, negated or left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

_NEAR = 1e-9
_erf = np.vectorize(math.erf, otypes=[float])
_sigmoid = lambda x: 1 / (1 + np.exp(-x))

ELEMENTWISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "nothing (the identity)": lambda x: x,
    "GELU (exact, with erf)": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "GELU (approximated by tanh)": lambda x: (
        x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    ),
    "GELU (approximated by a sigmoid)": lambda x: x * _sigmoid(1.702 * x),
    "ReLU": lambda x: np.maximum(x, 0),
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "leaky ReLU (slope 0.01)": lambda x: np.where(x > 0, x, 0.01 * x),
    "leaky ReLU (slope 0.2)": lambda x: np.where(x > 0, x, 0.2 * x),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "SiLU": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(x, 0),
    "softmax over the last axis": lambda x: _softmax(x),
}


def told_apart(
    inputs: Sequence[np.ndarray],
    parts: dict[str, np.ndarray],
    first: np.ndarray,
    second: np.ndarray,
    weights: Sequence[np.ndarray],
) -> str | None:
    """Which two computations the sides did, in words; None if no guess fits.

    Args:
        inputs: What the layer was given: on both sides the same.
        parts: Outputs of the modules inside, by their last name; the same on both sides.
        first: PyTorch's output.
        second: JAX's, in the same layout.
        weights: The layer's own weight and bias, where it has them.
    """
    sources = [*inputs[:1], *list(parts.values())[-1:]]
    for x in sources:
        if x.shape == first.shape and x.dtype.kind == "f":
            with np.errstate(all="ignore"):
                guesses = ((name, f(x)) for name, f in ELEMENTWISE.items())
                result = _two(guesses, first, second)
            if result := result or _normalised(x, first, second, weights):
                return result
    return _attention(inputs, parts, first, second)


def _two(guesses: Any, first: np.ndarray, second: np.ndarray) -> str | None:
    """A text with the names of the candidates that reproduce each side, if both exist."""
    mine = theirs = None
    for name, y in guesses:
        mine = name if mine is None and _same(y, first) else mine
        theirs = name if theirs is None and _same(y, second) else theirs
        if mine is not None and theirs is not None:
            return f"PyTorch computes {mine}, JAX {theirs}"
    return None


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    size = np.max(np.abs(b), initial=1e-300)
    return a.shape == b.shape and bool(np.max(np.abs(a - b), initial=0) <= _NEAR * size)


# --- layer normalisation


def _normalised(
    x: np.ndarray, first: np.ndarray, second: np.ndarray, weights: Sequence[np.ndarray]
) -> str | None:
    mine, theirs = (_epsilon(x, y, weights) for y in (first, second))
    if mine is None or theirs is None or math.isclose(mine, theirs, rel_tol=1e-3):
        return None
    return (
        f"the epsilon of the normalization is about {mine:.2g} in PyTorch and {theirs:.2g} in JAX"
    )


def _epsilon(x: np.ndarray, y: np.ndarray, weights: Sequence[np.ndarray]) -> float | None:
    """The epsilon in y = (x - mean) / sqrt(var + epsilon) * weight + bias over the last axis."""
    weight, bias = (*weights, None, None)[:2]
    if bias is not None and bias.shape == y.shape[-1:]:
        y = y - bias
    if weight is not None and weight.shape == y.shape[-1:]:
        if np.min(np.abs(weight)) == 0:
            return None
        y = y / weight
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1)
    scale = (y * centred).sum(-1) / (centred**2).sum(-1)
    if not _same(y, scale[..., None] * centred) or np.any(scale <= 0):
        return None
    each = 1 / scale**2 - variance
    epsilon = float(np.median(each))
    noise = 1e-14 * float(np.max(variance))
    spread = float(np.max(np.abs(each - epsilon)))
    fits = spread <= 1e-3 * abs(epsilon) + 100 * noise and epsilon > -100 * noise
    return max(epsilon, 0.0) if fits else None


# --- attention

_PROJECTIONS = (("query", "q", "q_proj"), ("key", "k", "k_proj"), ("value", "v", "v_proj"))


def _attention(
    inputs: Sequence[np.ndarray],
    parts: dict[str, np.ndarray],
    first: np.ndarray,
    second: np.ndarray,
) -> str | None:
    """Attention over query, key and value, with each mask among the inputs."""
    q, k, v = (next((parts[s] for s in names if s in parts), None) for names in _PROJECTIONS)
    if q is None or k is None or v is None or q.ndim != 3 or not q.shape == k.shape == v.shape:
        return None
    if first.shape != q.shape:
        return None
    masks = [m for m in inputs if m.shape[-1] == k.shape[1] and m.ndim in (2, 4)]
    for heads in (h for h in range(1, 65) if q.shape[-1] % h == 0):
        result = _two(_variants(q, k, v, masks, heads), first, second)
        if result:
            return result
    return None


def _variants(
    q: Any, k: Any, v: Any, masks: Sequence[np.ndarray], heads: int
) -> Iterator[tuple[str, np.ndarray]]:
    split = lambda x: x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
    q, k, v = split(q), split(k), split(v)
    scores = q @ k.swapaxes(-1, -2)
    root = math.sqrt(q.shape[-1])
    for scale, (name, bias) in product((root, 1.0, q.shape[-1]), _biases(masks)):
        how = "" if scale == root else f", scores divided by {scale:g}"
        with np.errstate(all="ignore"):
            out = _softmax(scores / scale + bias) @ v
        yield f"attention {name}{how}", out.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def _biases(masks: Sequence[np.ndarray]) -> Iterator[tuple[str, Any]]:
    yield "without the mask", 0.0
    for m in masks:
        wide = m[:, None, None, :] if m.ndim == 2 else m
        wide = wide.astype(float)
        if set(np.unique(m)) <= {0, 1}:
            for far in (-np.inf, -1e9, np.finfo(np.float32).min, -1e4):
                yield "to where the mask is 1", np.where(wide != 0, 0.0, far)
                yield "to where the mask is 0 (the mask's sign)", np.where(wide != 0, far, 0.0)
        else:
            yield "with the mask added", wide
            yield "with the mask subtracted (its sign)", -wide


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
