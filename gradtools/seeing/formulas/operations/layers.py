"""Softmax, normalisation, losses and attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    apply,
    array,
    broadcast,
    conj,
    mean,
    number,
    plus,
    product,
    real,
    reshape,
    spread,
    swap,
    total,
    transpose,
    unsqueeze,
)
from gradtools.seeing.formulas.expressions import BOOLEAN, INTEGER, REAL, Expr
from gradtools.seeing.formulas.operation_record import Cotangents
from gradtools.seeing.formulas.operations.elementwise import indicator
from gradtools.seeing.formulas.operations.entering import lowers, operation, tie_same, word
from gradtools.seeing.formulas.operations.reductions import (
    all_axes,
    along_form,
    below_of,
    kept,
    left_over,
    reduced,
    reduction,
    reduction_form,
    tie_reduced,
)

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import ExpressionWriter


# Softmax.


def _softmax_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """Exponentials over their sum."""
    axis = y["axis"]
    top = np.max(x.real, axis, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0))
    return e / e.sum(axis, keepdims=True)


def _softmax_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """y (g - sum y g)."""
    axis = y["axis"]
    return [conj(y) * (g - total(conj(y) * g, [axis], keep=True))]


operation(
    "softmax(x; axis)",
    _softmax_value,
    _softmax_pullback,
    form=along_form("softmax"),
    ties=tie_same,
    definition=ts.Written(
        "softmaxᵢ(x) := e^x / Σᵢ e^x", r"\operatorname{softmax}_{i}(x) := e^{x} / \sum_{i} e^{x}"
    ),
)


def _log_softmax_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """The logarithm of _softmax_value."""
    axis = y["axis"]
    x = x - np.max(x.real, axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def _log_softmax_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """g - softmax(x) sum g."""
    axis = y["axis"]
    return [g - conj(apply("softmax", x, axis=axis)) * total(g, [axis], keep=True)]


operation(
    "log_softmax(x; axis)",
    _log_softmax_value,
    _log_softmax_pullback,
    form=along_form("log softmax", r"\log\operatorname{softmax}"),
    ties=tie_same,
    definition=ts.Written(
        "log softmaxᵢ(x) := x - log Σᵢ e^x",
        r"\log\operatorname{softmax}_{i}(x) := x - \log \sum_{i} e^{x}",
    ),
)


def _logsumexp_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """Log of the sum of exponentials."""
    axes = y["axes"]
    top = np.max(x.real, axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    return np.log(np.exp(x - top).sum(axes)) + top.reshape(y.shape)


def _logsumexp_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """softmax(x) g."""
    axes = y["axes"]
    one = len(axes) == 1
    p = apply("softmax", x, axis=axes[0]) if one else apply("exp", x - spread(y, axes, x.shape))
    return [conj(p) * spread(g, axes, x.shape)]


reduction(
    "logsumexp",
    _logsumexp_value,
    _logsumexp_pullback,
    definition=ts.Written(
        "logsumexpᵢ(x) := log Σᵢ e^x", r"\operatorname{logsumexp}_{i}(x) := \log \sum_{i} e^{x}"
    ),
)


@lowers("safe_softmax")
def _safe_softmax(x: Expr, *, axis: int) -> Expr:
    """Softmax, 0 where all of x is -inf."""
    if not x.rank:
        return apply("softmax", x, axis=axis)
    masked = indicator(reduced("max", x, (axis,)), "==", -math.inf)
    masked = broadcast(unsqueeze(masked, [axis]), x.shape)
    safe = apply("where", masked, 0, x)
    return apply("where", masked, 0, apply("softmax", safe, axis=axis))


def _along(x: Expr, axis: int) -> Expr:
    return total(x, [axis] if x.rank else [], True)


word("softmax_backward_data", lambda g, y, *, axis: g * y - y * _along(g * y, axis))
word("log_softmax_backward_data", lambda g, y, *, axis: g - apply("exp", y) * _along(g, axis))

# Variance, and what has mean 0 and variance 1.


def _variance_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """The mean squared modulus of the distance from the mean."""
    return np.var(x, y["axes"], ddof=y["correction"])


def _variance_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """2 (x - mean x) g / n."""
    axes = y["axes"]
    weight = spread(real(g), axes, x.shape)
    return [2 / (_count(x, axes) - y["correction"]) * (_centred(x, axes) * weight)]


def _centred(x: Expr, axes: Iterable[int]) -> Expr:
    return x - mean(x, axes, keep=True)


def _count(x: Expr, axes: Iterable[int]) -> int:
    return prod(x.shape[a] for a in axes)


@lowers(
    "variance",
    operation,
    _variance_value,
    _variance_pullback,
    result=left_over(REAL),
    form=reduction_form("var"),
    ties=tie_reduced,
    definition=ts.Written(
        "varᵢ(x) := meanᵢ |x - meanᵢ x|²",
        r"\operatorname{var}_{i}(x) := \operatorname{mean}_{i} |x - \operatorname{mean}_{i} x|^{2}",
    ),
)
def variance(x: Expr, *, axes: Any = None, correction: float = 0, keep: bool = False) -> Expr:
    """Sum abs(x - mean)**2 / (n - correction); 0."""
    axes = all_axes(x, axes)
    return kept(reduced("variance", x, axes, correction=float(correction)), axes, keep)


def _deviation_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """standardize(x) g / n."""
    axes, correction = y["axes"], y["correction"]
    n = _count(x, axes)
    if not correction and not x.is_complex:
        return [1 / n * (standardize(x, axes=axes, eps=y["eps"]) * spread(g, axes, x.shape))]
    weight = spread(real(g) / y, axes, x.shape)
    return [1 / (n - correction) * (_centred(x, axes) * weight)]


def _deviation_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    inner = ts.function("var", [w.whole(x.args[0])], below_of(w, x))
    inner = ts.summed([inner, ts.number(x["eps"])]) if x["eps"] else inner
    text = inner.text if inner.level == ts.ATOM else f"({inner.text})"
    return ts.Written(f"√{text}", rf"\sqrt{{{inner.latex}}}", ts.POWER)


@lowers(
    "deviation",
    operation,
    lambda y, x: np.sqrt(_variance_value(y, x) + y["eps"]),
    _deviation_pullback,
    result=left_over(REAL),
    form=_deviation_form,
    ties=tie_reduced,
)
def deviation(
    x: Expr, *, axes: Any = None, correction: float = 0, keep: bool = False, eps: float = 0.0
) -> Expr:
    """sqrt(variance + eps)."""
    axes = all_axes(x, axes)
    given = {"eps": float(eps), "correction": float(correction)}
    return kept(reduced("deviation", x, axes, **given), axes, keep)


def _standardize_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """Mean 0 and variance 1."""
    axes = y["axes"]
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + y["eps"])


def _standardize_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """(g - mean g - y mean(y g)) / deviation."""
    axes = y["axes"]
    inner = plus(g, -mean(g, axes, keep=True), -(y * mean(y * g, axes, keep=True)))
    return [inner / spread(deviation(x, axes=axes, eps=y["eps"]), axes, x.shape)]


def _standardize_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    if x["eps"]:
        w.note(
            "standardize(x) = (x - mean(x)) / √(var(x) + ε), "
            f"ε = {ts.number(x['eps']).text}, over the axes below"
        )
    return ts.function("standardize", [w.whole(x.args[0])], below_of(w, x))


@lowers(
    "standardize",
    operation,
    _standardize_value,
    _standardize_pullback,
    form=_standardize_form,
    ties=tie_same,
)
def standardize(x: Expr, *, axes: Iterable[int], eps: float = 0.0) -> Expr:
    """(x - mean) / sqrt(variance + eps); eps = 0."""
    if x.is_complex:
        return _centred(x, axes) / spread(deviation(x, axes=axes, eps=eps), axes, x.shape)
    return reduced("standardize", x, axes, eps=float(eps))


def _lie(v: Expr, y: Expr, axes: Sequence[int]) -> Expr:
    """What has the axes ``axes`` of y, over all of y."""
    return product([v], [axes], range(y.rank), y.shape)


def _affine(y: Expr, scale_: Expr | None, shift: Expr | None, axes: Sequence[int]) -> Expr:
    """Times scale plus shift, which have y's axes ``axes``."""
    y = y if scale_ is None else y * _lie(scale_, y, axes)
    return y if shift is None else y + _lie(shift, y, axes)


@lowers("layer_norm")
def _layer_norm(
    x: Expr, scale: Expr | None = None, shift: Expr | None = None, *, axes: Any, eps: float
) -> Expr:
    """standardize(x) * scale + shift; both of x's shape at axes."""
    return _affine(standardize(x, axes=axes, eps=eps), scale, shift, tuple(axes))


@lowers("batch_norm(x, scale?, shift?, mean?, variance?; training, eps, axis?)")
def _batch_norm(x: Expr, *rest: Expr, training: bool, eps: float, axis: int = 1) -> Expr:
    """Over all axes but axis = 1; in training without mean and variance."""
    if training:
        gamma, beta = (*rest, None, None)[:2]
        others = [a for a in range(x.rank) if a != axis]
        return _affine(standardize(x, axes=others, eps=eps), gamma, beta, (axis,))
    given = [r for r in rest if r is not None]
    if len(given) < 2:
        raise GradtoolsError("formula: batch_norm without training needs its mean and variance")
    running_mean, running_variance = given[-2:]
    gamma, beta = (*given[:-2], None, None)[:2]
    width = (running_variance + eps) ** -0.5
    centred = x - _lie(running_mean, x, (axis,))
    return _affine(centred * _lie(width, x, (axis,)), gamma, beta, (axis,))


@lowers("group_norm")
def _group_norm(
    x: Expr, gamma: Expr | None = None, beta: Expr | None = None, *, groups: int, eps: float
) -> Expr:
    """X: N, C, ...; scale and shift: C."""
    split = reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    done = standardize(split, axes=range(2, split.rank), eps=eps)
    return _affine(reshape(done, x.shape), gamma, beta, (1,))


@lowers("rms_norm")
def _rms_norm(x: Expr, gamma: Expr | None = None, *, axes: Any, eps: float) -> Expr:
    """X / sqrt(mean x**2 + eps) * scale."""
    squares = mean((apply("abs", x) if x.is_complex else x) ** 2, axes)
    width = (squares + eps) ** -0.5
    return _affine(x * spread(width, axes, x.shape), gamma, None, tuple(axes))


# Losses.


def _mean_or_sum(losses: Expr, reduction: int) -> Expr:
    axes = range(losses.rank)
    return (losses, mean(losses, axes), total(losses, axes))[reduction] if reduction else losses


# reduction in 0 (none), 1 (mean, the default), 2 (sum).
word("mse_loss", lambda x, t, *, reduction=1: _mean_or_sum((x - t) ** 2, reduction))


@lowers("binary_cross_entropy")
def _binary_cross_entropy(
    p: Expr, t: Expr, weight: Expr | None = None, *, reduction: int = 1
) -> Expr:
    """-weight (t log p + (1 - t) log(1 - p)), of logarithms not below -100."""
    floor = lambda x: apply("maximum", apply("log", x), -100.0)
    losses = -(t * floor(p) + (1 - t) * floor(1 - p))
    return _mean_or_sum(losses if weight is None else losses * weight, reduction)


def _moved(x: Expr, axis: int) -> Expr:
    """The last axis moved to this place."""
    order = list(range(x.rank - 1))
    order.insert(axis, x.rank - 1)
    return transpose(x, order)


@lowers("cross_entropy")
def _cross_entropy(z: Expr, t: Expr, *, axis: int, reduction: str = "mean") -> Expr:
    """-sum t log_softmax(z) over axis; integer t are labels; reduction: "mean", "sum", "none"."""
    if t.kind in (INTEGER, BOOLEAN) and t.rank == z.rank - 1:
        t = _moved(apply("one_hot", t, size=z.shape[axis]), axis)
    losses = -total(t * apply("log_softmax", z, axis=axis), [axis])
    known = ("none", "mean", "sum")
    if reduction not in known:
        raise GradtoolsError(f"formula: cross_entropy knows no reduction {reduction!r}")
    return _mean_or_sum(losses, known.index(reduction))


# Attention and dropout.


@lowers("attention")
def _attention(
    q: Expr,
    k: Expr,
    v: Expr,
    mask: Expr | None = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
) -> Expr:
    """softmax(scale q k^T + mask) v over the last two axes; a boolean mask keeps where true."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = number(factor) * (q @ swap(k))
    if is_causal:
        lower = array(np.tril(np.ones(scores.shape[-2:], bool)))
        scores = apply("where", lower, scores, -np.inf)
    if mask is not None and mask.kind == BOOLEAN:
        scores = apply("where", mask, scores, -np.inf)
    elif mask is not None:
        scores = scores + mask
    return apply("softmax", scores, axis=scores.rank - 1) @ v


word("dropout", lambda x, mask, *, rate: 1 / (1 - rate) * (x * mask))
