"""Lowering of convolutions, pooling, normalisation, losses and attention to primitives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas import constructors
from gradtools.seeing.formulas.algebra import (
    array,
    broadcast,
    divide,
    full,
    matmul,
    mean,
    negate,
    number,
    plus,
    power,
    product,
    reshape,
    scale,
    spread,
    subtract,
    swap,
    times,
    total,
    transpose,
    unsqueeze,
)
from gradtools.seeing.formulas.expressions import BOOLEAN, INTEGER, Expr
from gradtools.seeing.formulas.primitives.elementwise import apply, indicator
from gradtools.seeing.formulas.vocabulary.arrays import ARRAYS
from gradtools.seeing.formulas.vocabulary.record import words

Lowering = Callable[..., Any]


def _each(value: Any, count: int, default: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    if value is None:
        return (default,) * count
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _pairs(padding: Any, count: int) -> tuple[tuple[int, int], ...]:
    if padding is None:
        return ((0, 0),) * count
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in _each(padding, count, 0))


def _convolution(
    x: Expr,
    w: Expr,
    b: Expr | None = None,
    *,
    stride: Any = None,
    padding: Any = None,
    dilation: Any = None,
    input_dilation: Any = None,
    groups: int = 1,
    layout: Sequence[Sequence[int]] | None = None,
) -> Expr:
    if layout is not None:
        x, w = transpose(x, layout[0]), transpose(w, layout[1])
    n = x.rank - 2
    interior = [d - 1 for d in _each(input_dilation, n, 1)]
    x = constructors.pad(x, (0,) * x.rank, (0,) * x.rank, (0, 0, *interior))
    x, pairs = _cut_negative(x, _pairs(padding, n))
    stride, dilation = _each(stride, n, 1), _each(dilation, n, 1)
    result = _shifted(constructors.convolution(x, w, stride, pairs, dilation, groups), b)
    return result if layout is None else transpose(result, tuple(map(int, np.argsort(layout[2]))))


def _shifted(y: Expr, b: Expr | None) -> Expr:
    """Plus one number for each channel."""
    return y if b is None else plus(y, reshape(b, (*b.shape, *(1,) * (y.rank - 2))))


def _cut_negative(x: Expr, pairs: Sequence[tuple[int, int]]) -> tuple[Expr, list]:
    """Negative padding takes away from x."""
    start = [0, 0, *(max(-a, 0) for a, _ in pairs)]
    away = [0, 0, *(max(-b, 0) for _, b in pairs)]
    x = constructors.cut(x, start, [n - b for n, b in zip(x.shape, away, strict=True)])
    return x, [(max(a, 0), max(b, 0)) for a, b in pairs]


def _convolution_transposed(
    x: Expr,
    w: Expr,
    b: Expr | None = None,
    *,
    stride: Any = None,
    padding: Any = None,
    output_padding: Any = None,
    dilation: Any = None,
    groups: int = 1,
) -> Expr:
    """The adjoint of the convolution with the same weight."""
    n = x.rank - 2
    stride, dilation = _each(stride, n, 1), _each(dilation, n, 1)
    pairs, more = _pairs(padding, n), _each(output_padding, n, 0)
    space = [
        (size - 1) * s - sum(p) + d * (k - 1) + o + 1
        for size, s, p, d, k, o in zip(
            x.shape[2:], stride, pairs, dilation, w.shape[2:], more, strict=True
        )
    ]
    shape = (x.shape[0], w.shape[1] * groups, *space)
    return _shifted(
        constructors.convolve("convolution_input", x, w, shape, stride, pairs, dilation, groups), b
    )


def _pooling(x: Expr, window: Any, stride: Any, padding: Any, dilation: Any = None) -> tuple:
    n = len(window)
    pooling = {
        "window": tuple(window),
        "stride": _each(stride, n, 1) if stride else tuple(window),
        "padding": _pairs(padding, n),
        "dilation": _each(dilation, n, 1),
    }
    lead = x.rank - n
    space = [
        (size + a + b - d * (k - 1) - 1) // s + 1
        for size, k, s, (a, b), d in zip(x.shape[lead:], *pooling.values(), strict=True)
    ]
    return (*x.shape[:lead], *space), pooling


def _max_pool(
    x: Expr,
    window: Any,
    stride: Any = None,
    padding: Any = None,
    dilation: Any = None,
    ceil_mode: bool = False,
    input_dilation: Any = None,
) -> Expr:
    x = _spread_out(x, input_dilation, -math.inf)
    shape, pooling = _pooling(x, window, stride, padding, dilation)
    if ceil_mode:
        padding = [*map(_to_the_end, x.shape[x.rank - len(window) :], *pooling.values())]
        shape, pooling = _pooling(x, window, stride, padding, dilation)
    return constructors.pooled("max_pool", (x,), shape, pooling)


def _to_the_end(n: int, k: int, s: int, pad: tuple[int, int], d: int) -> tuple[int, int]:
    """Padding behind, so that the last window that starts within the array fits."""
    low, high = pad
    count = -(-(n + low + high - d * (k - 1) - 1) // s) + 1
    count -= (count - 1) * s >= n + low
    return low, max(high, (count - 1) * s + d * (k - 1) + 1 - n - low)


def _spread_out(x: Expr, dilation: Any, value: float) -> Expr:
    """With numbers between the entries of the last axes."""
    if dilation is None:
        return x
    none = (0,) * x.rank
    interior = (*none[len(dilation) :], *(d - 1 for d in dilation))
    return ARRAYS["pad"].lower(x, low=none, high=none, interior=interior, value=value)  # type: ignore[misc]


def _sum_pool(
    x: Expr, window: Any, stride: Any = None, padding: Any = None, input_dilation: Any = None
) -> Expr:
    x = _spread_out(x, input_dilation, 0.0)
    shape, pooling = _pooling(x, window, stride, padding)
    return constructors.pooled("sum_pool", (x,), shape, pooling)


def _avg_pool(
    x: Expr,
    window: Any,
    stride: Any = None,
    padding: Any = None,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Expr:
    summed = _sum_pool(x, window, stride, padding)
    if count_include_pad or divisor_override:
        return scale(1 / (divisor_override or prod(window)), summed)
    counts = _sum_pool(
        array(np.ones((*x.shape[: x.rank - len(window)], *x.shape[-len(window) :]))),
        window,
        stride,
        padding,
    )
    return divide(summed, counts)


def _log_softmax(x: Expr, axis: int) -> Expr:
    return constructors.along("log_softmax", x, axis)


def _safe_softmax(x: Expr, axis: int) -> Expr:
    if not x.rank:
        return constructors.softmax(x, axis)
    masked = indicator(constructors.reduced("max", x, (axis,)), "==", number(-math.inf))
    masked = broadcast(unsqueeze(masked, [axis]), x.shape)
    safe = apply("where", masked, full(0.0, x.shape), x)
    return apply("where", masked, full(0.0, x.shape), constructors.softmax(safe, axis))


def _along(x: Expr, axis: int) -> Expr:
    return total(x, [axis] if x.rank else [], True)


def _reduced(losses: Expr, reduction: int) -> Expr:
    axes = range(losses.rank)
    return (losses, mean(losses, axes), total(losses, axes))[reduction] if reduction else losses


def _binary_cross_entropy(p: Expr, t: Expr, weight: Expr | None = None, reduction: int = 1) -> Expr:
    floor = lambda x: apply("maximum", apply("log", x), number(-100.0))
    one = number(1.0)
    gain = plus(times(t, floor(p)), times(subtract(one, t), floor(subtract(one, p))))
    losses = negate(gain)
    return _reduced(losses if weight is None else times(losses, weight), reduction)


def _cross_entropy(z: Expr, t: Expr, axis: int, reduction: str = "mean") -> Expr:
    if t.kind in (INTEGER, BOOLEAN) and t.rank == z.rank - 1:
        t = _moved(constructors.one_hot(t, z.shape[axis]), axis)
    losses = negate(total(times(t, _log_softmax(z, axis)), [axis]))
    known = ("none", "mean", "sum")
    if reduction not in known:
        raise GradtoolsError(f"formula: cross_entropy knows no reduction {reduction!r}")
    return _reduced(losses, known.index(reduction))


def _moved(x: Expr, axis: int) -> Expr:
    """The last axis moved to this place."""
    order = list(range(x.rank - 1))
    order.insert(axis, x.rank - 1)
    return transpose(x, order)


def _lie(v: Expr, y: Expr, axes: Sequence[int]) -> Expr:
    """What has the axes ``axes`` of y, over all of y."""
    return product([v], [axes], range(y.rank), y.shape)


def _affine(y: Expr, scale_: Expr | None, shift: Expr | None, axes: Sequence[int]) -> Expr:
    """Times scale plus shift, which have y's axes ``axes``."""
    y = y if scale_ is None else times(y, _lie(scale_, y, axes))
    return y if shift is None else plus(y, _lie(shift, y, axes))


def _standardize(x: Expr, axes: Sequence[int], eps: float = 0.0) -> Expr:
    if x.is_complex:
        width = spread(constructors.deviation(x, axes, eps), axes, x.shape)
        return divide(subtract(x, mean(x, axes, keep=True)), width)
    return constructors.standardize(x, axes, float(eps))


def _layer_norm(
    x: Expr, scale: Expr | None = None, shift: Expr | None = None, *, axes: Any, eps: float
) -> Expr:
    return _affine(_standardize(x, axes, eps), scale, shift, tuple(axes))


def _batch_norm(x: Expr, *rest: Expr, training: bool, eps: float, axis: int = 1) -> Expr:
    if training:
        gamma, beta = (*rest, None, None)[:2]
        others = [a for a in range(x.rank) if a != axis]
        return _affine(_standardize(x, others, eps), gamma, beta, (axis,))
    given = [r for r in rest if r is not None]
    if len(given) < 2:
        raise GradtoolsError("formula: batch_norm without training needs its mean and variance")
    running_mean, running_variance = given[-2:]
    gamma, beta = (*given[:-2], None, None)[:2]
    width = power(plus(running_variance, full(eps, running_variance.shape)), -0.5)
    centred = subtract(x, _lie(running_mean, x, (axis,)))
    return _affine(times(centred, _lie(width, x, (axis,))), gamma, beta, (axis,))


def _group_norm(
    x: Expr, gamma: Expr | None = None, beta: Expr | None = None, *, groups: int, eps: float
) -> Expr:
    split = reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    done = _standardize(split, range(2, split.rank), eps)
    return _affine(reshape(done, x.shape), gamma, beta, (1,))


def _rms_norm(x: Expr, gamma: Expr | None = None, *, axes: Any, eps: float) -> Expr:
    squares = mean(power(apply("abs", x) if x.is_complex else x, 2), axes)
    width = power(plus(squares, full(eps, squares.shape)), -0.5)
    return _affine(times(x, spread(width, axes, x.shape)), gamma, None, tuple(axes))


def _attention(
    q: Expr,
    k: Expr,
    v: Expr,
    mask: Expr | None = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
) -> Expr:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = times(full(factor, ()), matmul(q, swap(k)))
    if is_causal:
        lower = array(np.tril(np.ones(scores.shape[-2:], bool)))
        scores = apply("where", lower, scores, full(-np.inf, scores.shape))
    if mask is not None and mask.kind == BOOLEAN:
        scores = apply("where", mask, scores, full(-np.inf, scores.shape))
    elif mask is not None:
        scores = plus(scores, mask)
    return matmul(constructors.softmax(scores, scores.rank - 1), v)


_WORDS = """
convolution | x w b? | stride? padding? dilation? input_dilation? groups? layout? |
    correlation; x: N, C, spatial; w: O, C/groups, spatial; b: O; padding ((low, high), ...);
    layout: where x, w and the result have these axes
convolution_transposed | x w b? | stride? padding? output_padding? dilation? groups? |
    torch's conv_transpose; w: C, O/groups, spatial
max_pool | x | window stride? padding? dilation? ceil_mode? input_dilation? |
    over the last len(window) axes; padding ((low, high), ...) of -inf; stride = window
min_pool      | x       | window stride? padding? dilation? input_dilation? | least over windows
avg_pool | x | window stride? padding? count_include_pad? divisor_override? |
    mean over windows; count_include_pad = True
sum_pool      | x       | window stride? padding? input_dilation? | sum over windows
softmax       | x       | axis           | e**x / sum e**x
log_softmax   | x       | axis           | x - logsumexp(x)
safe_softmax  | x       | axis           | softmax, 0 where all of x is -inf
softmax_backward_data | g y | axis |
    y (g - sum y g)
log_softmax_backward_data | g y | axis |
    g - e**y sum g
mse_loss | x t | reduction? |
    (x - t)**2; reduction in 0 (none), 1 (mean, the default), 2 (sum)
binary_cross_entropy | p t weight? | reduction? |
    -weight (t log p + (1 - t) log(1 - p)), of logarithms not below -100
cross_entropy | z t | axis reduction? |
    -sum t log_softmax(z) over axis; integer t are labels; reduction in "mean" (over what is
    left), "sum", "none"
standardize   | x       | axes eps?      | (x - mean) / sqrt(variance + eps); eps = 0
layer_norm | x scale? shift? | axes eps |
    standardize(x) * scale + shift; both of x's shape at axes
batch_norm | x scale? shift? mean? variance? | training eps axis? |
    over all axes but axis = 1; in training without mean and variance
group_norm    | x scale? shift?  | groups eps | x: N, C, ...; scale and shift: C
rms_norm      | x scale? | axes eps      | x / sqrt(mean x**2 + eps) * scale
attention | q k v mask? | scale? is_causal? |
    softmax(scale q k^T + mask) v over the last two axes; a boolean mask keeps where true
dropout       | x mask  | rate           | x * mask / (1 - rate)
"""

LAYERS = words(
    _WORDS,
    {
        "convolution": _convolution,
        "convolution_transposed": _convolution_transposed,
        "max_pool": _max_pool,
        "min_pool": lambda x, window, **more: negate(_max_pool(negate(x), window, **more)),
        "avg_pool": _avg_pool,
        "sum_pool": _sum_pool,
        "softmax": constructors.softmax,
        "log_softmax": _log_softmax,
        "safe_softmax": _safe_softmax,
        "softmax_backward_data": lambda g, y, axis: subtract(
            times(g, y), times(y, _along(times(g, y), axis))
        ),
        "log_softmax_backward_data": lambda g, y, axis: subtract(
            g, times(apply("exp", y), _along(g, axis))
        ),
        "mse_loss": lambda x, t, reduction=1: _reduced(power(subtract(x, t), 2), reduction),
        "binary_cross_entropy": _binary_cross_entropy,
        "cross_entropy": _cross_entropy,
        "standardize": _standardize,
        "layer_norm": _layer_norm,
        "batch_norm": _batch_norm,
        "group_norm": _group_norm,
        "rms_norm": _rms_norm,
        "attention": _attention,
        "dropout": lambda x, mask, rate: scale(1 / (1 - rate), times(x, mask)),
    },
)
