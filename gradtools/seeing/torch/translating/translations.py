"""Readings of aten operations whose meaning differs by more than the name.

A reading receives a `BoundCall`, whose `own` arguments have aten's names. All other operations are
read by the graph's name and attributes, are decomposed, or become opaque.
"""

from __future__ import annotations

from typing import Any

from gradtools.seeing.formulas.algebra import broadcast, mean, reshape, total
from gradtools.seeing.formulas.arrays import from_the_end, take_along
from gradtools.seeing.formulas.calls import Reading
from gradtools.seeing.formulas.expressions import BOOLEAN, Expr, constant_of, lifted
from gradtools.seeing.formulas.reductions import softmax, variance


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


def _rrelu(call: Any) -> Any:
    """x times random slopes, which are 1 for positive entries."""
    slopes = call.call.given.get("noise") if len(call.outs) == 1 else call.outs[1]
    return [call.own.self * call.recorder.constant(slopes), None] if call.own.training else None


READINGS: dict[str, Reading] = {
    # It assumes that no row is fully masked.
    "_safe_softmax": lambda call: softmax(call.own.self, axis=call.attributes["axis"]),
    **dict.fromkeys(("copy", "fill", "zero"), _copied),
    "as_strided": lambda call: call.recorder.met(call.outs[0]),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    "remainder": _remainder,
    "var_mean": _var_mean,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_functional"), _rrelu),
}

__all__ = ["READINGS"]
