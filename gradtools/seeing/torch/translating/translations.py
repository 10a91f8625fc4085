"""Readings of aten operations whose meaning differs by more than the name.

A reading receives a `BoundCall`, whose `own` arguments have aten's names. All other operations are
read by the graph's name and attributes, are decomposed, or become opaque.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradtools.seeing.formulas.algebra import broadcast, mean, reshape, swap, total
from gradtools.seeing.formulas.arrays import from_the_end, take_along
from gradtools.seeing.formulas.calls import Reading
from gradtools.seeing.formulas.elementwise import where
from gradtools.seeing.formulas.expressions import BOOLEAN, Expr, array, constant_of, lifted
from gradtools.seeing.formulas.reductions import softmax, variance


def _attention(call: Any) -> list[Expr | None] | None:
    """softmax(scale q k^T + mask) v over the last two axes; a boolean mask keeps where true."""
    o = call.own
    if o.dropout_p:
        return None
    mask = getattr(o, "attn_mask", getattr(o, "attn_bias", None))
    scale = 1 / math.sqrt(o.query.shape[-1]) if o.scale is None else o.scale
    scores = scale * (o.query @ swap(o.key))
    if o.is_causal:
        scores = where(array(np.tril(np.ones(scores.shape[-2:], bool))), scores, -np.inf)
    if mask is not None:
        scores = where(mask, scores, -np.inf) if mask.kind == BOOLEAN else scores + mask
    result = softmax(scores, axis=scores.rank - 1) @ o.value
    return [result, *[None] * (len(call.outs) - 1)]


def _copied(call: Any) -> Expr:
    """The written value, broadcast to the array's shape."""
    x = lifted(getattr(call.own, "src", getattr(call.own, "value", 0.0)))
    return broadcast(x, call.likes[0][0])


def _index(call: Any) -> Expr | None:
    """Constant places: those of a mask, or of constant indices."""
    known = all(i.is_constant or i.kind == BOOLEAN for i in call.operands[1:])
    return call.arranged() if known else None


def _remainder(call: Any) -> Expr | None:
    """The operand itself, if it is an index within bounds."""
    x, n = call.operands[0], constant_of(call.operands[1])
    if x.is_inexact or n is None:
        return None
    value = call.value_of(x)
    return from_the_end(x, int(n)) if ((value >= 0) & (value < n)).all() else None


def _var_mean(call: Any) -> list[Expr]:
    o = call.own
    keep, correction = getattr(o, "keepdim", False), getattr(o, "correction", None)
    axes = [a % o.self.rank for a in o.dim or range(o.self.rank)]
    correction = int(getattr(o, "unbiased", True)) if correction is None else correction
    squares = variance(o.self, axes=axes, correction=correction, keep=keep)
    return [squares, mean(o.self, axes, keep)]


def _nll(call: Any) -> Any:
    """-x[t] of each row; the class axis follows the batch axis."""
    o = call.own
    axis = 0 if o.self.rank == 1 else 1
    if o.weight is not None or (call.value_of(o.target) == o.ignore_index).any():
        return None
    at = reshape(o.target, (*o.target.shape[:axis], 1, *o.target.shape[axis:]))
    losses = take_along(o.self, at, axis=axis)
    if losses is None:
        return None
    losses = -reshape(losses, o.target.shape)
    axes = range(losses.rank)
    return [(losses, mean(losses, axes), total(losses, axes))[o.reduction], None]


def _convolution(call: Any) -> Any:
    """The convolution without bias, plus the bias of each channel."""
    bias = call.own.bias
    if bias is None:
        return None
    (result,) = call.by_name(bias=None)
    return result + reshape(bias, (bias.shape[0], *[1] * (result.rank - 2)))


def _rrelu(call: Any) -> Any:
    """x times random slopes, which are 1 for positive entries."""
    slopes = call.call.given.get("noise") if len(call.outs) == 1 else call.outs[1]
    return [call.own.self * call.recorder.constant(slopes), None] if call.own.training else None


_ATTENTION = ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
_ATTENTION += ("cudnn_attention",)
READINGS: dict[str, Reading] = {
    **{f"_scaled_dot_product_{name}": _attention for name in _ATTENTION},
    # It assumes that no row is fully masked.
    "_safe_softmax": lambda call: softmax(call.own.self, axis=call.attributes["axis"]),
    **dict.fromkeys(("copy", "fill", "zero"), _copied),
    "as_strided": lambda call: call.recorder.met(call.outs[0]),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    "remainder": _remainder,
    "var_mean": _var_mean,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    "convolution": _convolution,
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_functional"), _rrelu),
}

__all__ = ["READINGS"]
