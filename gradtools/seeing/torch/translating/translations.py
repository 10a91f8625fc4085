"""Translations of aten operations whose neutral form differs by more than the name.

A translation receives the arguments by aten's names, with expressions in place of tensors. All
other operations keep the graph's name and attributes, are decomposed, or become opaque.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gradtools.seeing.formulas.algebra import apply, broadcast, mean, reshape, swap, total
from gradtools.seeing.formulas.expressions import BOOLEAN, Expr, array, constant_of, lifted
from gradtools.seeing.formulas.operations.arrays import arrange, meant, take_along, taken
from gradtools.seeing.formulas.operations.reductions import reduced, variance


def _attention(o: Any) -> list[Expr | None] | None:
    """softmax(scale q k^T + mask) v over the last two axes; a boolean mask keeps where true."""
    if o.dropout_p:
        return None
    mask = getattr(o, "attn_mask", getattr(o, "attn_bias", None))
    scale = 1 / math.sqrt(o.query.shape[-1]) if o.scale is None else o.scale
    scores = scale * (o.query @ swap(o.key))
    if o.is_causal:
        lower = array(np.tril(np.ones(scores.shape[-2:], bool)))
        scores = apply("where", lower, scores, -np.inf)
    if mask is not None and mask.kind == BOOLEAN:
        scores = apply("where", mask, scores, -np.inf)
    elif mask is not None:
        scores = scores + mask
    result = apply("softmax", scores, axis=scores.rank - 1) @ o.value
    return [result, *[None] * (len(o.outs) - 1)]


def _copied(o: Any) -> Expr:
    """The written value, broadcast to the array's shape."""
    x = lifted(getattr(o, "src", getattr(o, "value", 0.0)))
    return broadcast(x, o.likes[0][0])


def _index(o: Any) -> Expr | None:
    """Integers along one axis, or constant places: those of a mask, or of constant indices."""
    there = [(axis, i) for axis, i in enumerate(o.indices) if i is not None]
    if all(i.turn[0] or i.kind == BOOLEAN for _, i in there):
        return arrange(o.self, o.places())
    if len(there) > 1 or there[0][1].kind == BOOLEAN:
        return None
    ((axis, i),) = there
    return taken(o.self, i, axis)


def _remainder(o: Any) -> Expr | None:
    """The operand itself, if it is an index within bounds."""
    n = constant_of(lifted(o.other))
    if o.self.is_inexact or n is None:
        return None
    value = o.recorder.value_of(o.self)
    return meant(o.self, int(n)) if ((value >= 0) & (value < n)).all() else None


def _extreme(word: str, o: Any) -> Any:
    """max or min: of all entries, along an axis (with indices), or of two arrays."""
    if getattr(o, "other", None) is not None:
        return apply(f"{word}imum", o.self, o.other)
    if len(o.likes) == 1:
        return reduced(word, o.self, range(o.self.rank))
    if not o.self.rank:
        return [o.self, o.recorder.constant(o.outs[1])]
    result = reduced(word, o.self, [o.dim % o.self.rank])
    return [reshape(result, o.likes[0][0]), o.recorder.constant(o.outs[1])]


def _var_mean(o: Any) -> list[Expr]:
    keep, correction = getattr(o, "keepdim", False), getattr(o, "correction", None)
    axes = [a % o.self.rank for a in o.dim or range(o.self.rank)]
    correction = int(getattr(o, "unbiased", True)) if correction is None else correction
    squares = variance(o.self, axes=axes, correction=correction, keep=keep)
    return [squares, mean(o.self, axes, keep)]


def _nll(o: Any) -> Any:
    """-x[t] of each row; the class axis follows the batch axis."""
    axis = 0 if o.self.rank == 1 else 1
    if o.weight is not None or (o.recorder.value_of(o.target) == o.ignore_index).any():
        return None
    at = reshape(o.target, (*o.target.shape[:axis], 1, *o.target.shape[axis:]))
    losses = take_along(o.self, at, axis)
    if losses is None:
        return None
    losses = -reshape(losses, o.target.shape)
    axes = range(losses.rank)
    result = (losses, mean(losses, axes), total(losses, axes))[o.reduction]
    return [result, o.recorder.constant(o.outs[1])]


def _convolution(o: Any) -> Any:
    """The convolution without bias, plus the bias of each channel."""
    if o.bias is None:
        return None
    (result,) = o.by_name(bias=None)
    shape = (o.bias.shape[0], *[1] * (result.rank - 2))
    return result + reshape(o.bias, shape)


def _rrelu(o: Any) -> Any:
    """x times random slopes, which are 1 for positive entries."""
    if not o.training:
        return None
    slopes = (o.writes or o.outs)[-1]
    return [o.self * o.recorder.constant(slopes), None]


_ATTENTION = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    **{f"_scaled_dot_product_{name}": _attention for name in _ATTENTION},
    # It assumes that no row is fully masked.
    "_safe_softmax": lambda o: apply("softmax", o.self, axis=o.dim % o.self.rank),
    **dict.fromkeys(("copy", "fill", "zero"), _copied),
    "as_strided": lambda o: o.recorder.met(o.outs[0]),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    "index_select": lambda o: (
        taken(o.self, o.index, o.dim % o.self.rank) if o.self.rank else o.self
    ),
    "gather": lambda o: take_along(o.self, o.index, o.dim % o.self.rank) if o.self.rank else None,
    "remainder": _remainder,
    "max": partial(_extreme, "max"),
    "min": partial(_extreme, "min"),
    "var_mean": _var_mean,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    "convolution": _convolution,
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_functional"), _rrelu),
}

__all__ = ["OPERATIONS"]
