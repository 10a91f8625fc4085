"""Translations of aten's linear algebra, normalisation and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradtools.seeing.torch.translating.writer import Ref, Translation, Writer, as_said, enters

LAYERS: dict[str, Translation] = {}
operation = enters(LAYERS)


# --- linear algebra ----------------------------------------------------------------------


@operation("_linalg_svd")
def _svd(w: Writer, o: Any) -> Any:
    rows, columns = o.A.shape[-2:]
    k = min(rows, columns)
    if o.full_matrices and rows != columns and o.compute_uv:
        return None
    lead, real = o.A.shape[:-2], o.likes[1][1]
    outs = [((*lead, rows, k), o.A.dtype), ((*lead, k), real), ((*lead, k, columns), o.A.dtype)]
    u, s, vh = w.node("svd", [o.A], outs)
    return [u, s, vh] if o.compute_uv else [None, s, None]


@operation("_linalg_eigh")
def _eigh(w: Writer, o: Any) -> Any:
    values = o.likes[0]
    result = w.node("eigh", [o.A], [values, (o.A.shape, o.A.dtype)])
    return result if o.compute_v else [result[0], None]


@operation("linalg_pinv")
def _pinv(w: Writer, o: Any) -> Ref:
    return w("pinv", o.self, shape=o.likes[0][0])


@operation("linalg_lstsq")
def _lstsq(w: Writer, o: Any) -> Any:
    """The pseudo-inverse times b, where that is all that is asked for."""
    if o.self.ndim != 2 or o.b.ndim != 2:
        return None
    inverse = w("pinv", o.self, shape=(o.self.shape[1], o.self.shape[0]))
    return [w.matmul(inverse, o.b), *[None] * (len(o.outs) - 1)]


@operation("triangular_solve")
def _triangular_solve(w: Writer, o: Any) -> Any:
    """The solution, and the matrix as it came."""
    return [*(as_said(w, o) or [None])[:1], o.A]


# --- normalisation -----------------------------------------------------------------------


@operation("native_layer_norm")
def _layer_norm(w: Writer, o: Any) -> Any:
    axes = tuple(range(o.input.ndim - len(o.normalized_shape), o.input.ndim))
    given = _affine(w, o, o.normalized_shape)
    result = w("layer_norm", o.input, *given, shape=o.input.shape, axes=axes, eps=o.eps)
    return [result, *_statistics(w, o.input, axes, o.eps, o.likes)]


def _statistics(w: Writer, x: Ref, axes: Any, eps: float, likes: Any) -> list[Ref]:
    """The mean and 1 / sqrt(variance + eps), which a backward pass inside of f reads."""
    width = w("rsqrt", w.add(w.reduce("variance", x, axes, True), eps))
    both = w.mean(x, axes, True), width
    return [w.reshape(y, shape) for y, (shape, _) in zip(both, likes[1:], strict=True)]


def _affine(w: Writer, o: Any, shape: Sequence[int]) -> list[Ref]:
    """Scale and shift; a shift alone has a scale of one."""
    if o.weight is None and o.bias is None:
        return []
    scale = w.constant(np.ones(tuple(shape))) if o.weight is None else o.weight
    return [scale] if o.bias is None else [scale, o.bias]


@operation("native_group_norm")
def _group_norm(w: Writer, o: Any) -> Any:
    given = _affine(w, o, [o.input.shape[1]])
    result = w("group_norm", o.input, *given, shape=o.input.shape, groups=o.group, eps=o.eps)
    lead = o.input.shape[0], o.group
    parts = w.reshape(o.input, (*lead, o.input.size // max(1, lead[0] * lead[1])))
    return [result, *_statistics(w, parts, [2], o.eps, o.likes)]


@operation("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
@operation("_batch_norm_with_update", "_native_batch_norm_legit_no_training")
def _batch_norm(w: Writer, o: Any) -> Any:
    training = getattr(o, "training", None)
    training = w.native == "aten._batch_norm_with_update" if training is None else bool(training)
    given = _affine(w, o, [o.input.shape[1]])
    if not training:
        given += [o.running_mean, o.running_var]
    eps = float(getattr(o, "eps", getattr(o, "epsilon", 0.0)))
    result = w("batch_norm", o.input, *given, shape=o.input.shape, training=training, eps=eps)
    if not training or len(o.outs) < 3:
        return [result, *[None] * (len(o.outs) - 1)]
    others = [a for a in range(o.input.ndim) if a != 1]
    more = _statistics(w, o.input, others, eps, o.likes[:3])
    return [result, *more, *[None] * (len(o.outs) - 3)]


@operation("_fused_rms_norm")
def _rms_norm(w: Writer, o: Any) -> Any:
    axes = tuple(range(o.input.ndim - len(o.normalized_shape), o.input.ndim))
    given = [] if o.weight is None else [o.weight]
    result = w("rms_norm", o.input, *given, shape=o.input.shape, axes=axes, eps=o.eps)
    squares = w.mean(w("square", o.input), axes, True)
    return [result, w("rsqrt", w.add(squares, o.eps))]


# --- softmax, losses, attention ----------------------------------------------------------


def _reduced(w: Writer, losses: Ref, reduction: int) -> Ref:
    """By aten's number: 0 none, 1 mean, 2 sum."""
    return (losses, w.mean(losses), w.total(losses))[reduction] if reduction else losses


@operation("nll_loss_forward", "nll_loss2d_forward")
def _nll(w: Writer, o: Any) -> Any:
    """-x[t] of each row; the class axis follows that of the batch."""
    axis = 0 if o.self.ndim == 1 else 1
    target = o.recorder.value_of(o.target)
    kept = target != o.ignore_index
    safe = w.constant(np.where(kept, target, 0))
    at = w.reshape(safe, (*o.target.shape[:axis], 1, *o.target.shape[axis:]))
    taken = w("take_along", o.self, at, shape=at.shape, dtype=o.self.dtype, axis=axis)
    losses = w("negate", w.reshape(taken, o.target.shape))
    weights = None if o.weight is None else w.take(o.weight, safe, axes=(0,))
    if not kept.all():
        there = w.constant(kept.astype(float))
        weights = there if weights is None else w.mul(weights, there)
    if weights is None:
        return [_reduced(w, losses, o.reduction), o.recorder.constant(o.outs[1])]
    losses = w.mul(losses, weights)
    if o.reduction == 1:
        return [w.div(w.total(losses), w.total(weights)), None]
    return [_reduced(w, losses, o.reduction), None]
