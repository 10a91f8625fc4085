"""Convolutions and pooling.

A convolution and its two adjoints are the partial derivatives of one trilinear form
``<g, x * w>``, and closed under derivatives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from math import prod
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import apply, array, conj, reshape, transpose
from gradtools.seeing.formulas.expressions import Expr, Shape, expr, widest
from gradtools.seeing.formulas.operation_record import Cotangents
from gradtools.seeing.formulas.operations.entering import (
    called,
    listed,
    lowers,
    operation,
    tie_first,
    word,
)
from gradtools.seeing.formulas.operations.slicing import cut, pad, pad_with

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

Index = tuple[int | slice | EllipsisType, ...]
Read = tuple[Index, np.ndarray]  # what stands there

# Windows: strides, padding and dilation of each spatial axis.


def _each(value: Any, count: int, default: int) -> tuple[Any, ...]:
    """One number, or pair, for each spatial axis."""
    if value is None:
        return (default,) * count
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _pairs(padding: Any, count: int) -> tuple[tuple[int, int], ...]:
    if padding is None:
        return ((0, 0),) * count
    return tuple((p, p) if isinstance(p, int) else tuple(p) for p in _each(padding, count, 0))


def _space(
    sizes: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """How many windows fit along each axis."""
    return tuple(
        (n + a + b - d * (k - 1) - 1) // s + 1
        for n, k, s, (a, b), d in zip(sizes, window, stride, padding, dilation, strict=True)
    )


def _taps(y: Expr, w_space: Shape, out_space: Shape) -> Iterator[tuple[Index, Index]]:
    """For each tap: the window of the padded input that meets the output."""
    for tap in itertools.product(*map(range, w_space)):
        each = zip(tap, y["dilation"], y["stride"], out_space, strict=True)
        yield (..., *tap), (..., *(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, s, n in each))


def _spatial(y: Expr, shape: Shape) -> Shape:
    """The axes over which the windows go: the last ones."""
    return tuple(shape[len(shape) - len(y["stride"]) :])


def _padded_space(y: Expr, shape: Shape) -> list[int]:
    return [n + a + b for n, (a, b) in zip(_spatial(y, shape), y["padding"], strict=True)]


def _unpad(y: Expr, out: np.ndarray, shape: Shape) -> np.ndarray:
    each = zip(_spatial(y, shape), y["padding"], strict=True)
    inside: Index = (..., *(slice(a, a + n) for n, (a, _) in each))
    return out[inside]


def _cut_negative(
    x: Expr, pairs: Sequence[tuple[int, int]]
) -> tuple[Expr, tuple[tuple[int, int], ...]]:
    """Negative padding takes away from x."""
    start = [0, 0, *(max(-a, 0) for a, _ in pairs)]
    away = [0, 0, *(max(-b, 0) for _, b in pairs)]
    x = cut(x, start, [n - b for n, b in zip(x.shape, away, strict=True)])
    return x, tuple((max(a, 0), max(b, 0)) for a, b in pairs)


def _geometry_in_words(x: Expr) -> str:
    said = []
    if any(s != 1 for s in x["stride"]):
        said.append(f"stride {listed(x['stride'])}")
    if any(p != (0, 0) for p in x["padding"]):
        same = all(a == b for a, b in x["padding"])
        said.append(f"padding {listed([a for a, _ in x['padding']] if same else x['padding'])}")
    if any(d != 1 for d in x["dilation"]):
        said.append(f"dilation {listed(x['dilation'])}")
    if x.get("groups", 1) != 1:
        said.append(f"groups {x['groups']}")
    return ", ".join(said)


# Convolutions.


def _shifted(y: Expr, b: Expr | None) -> Expr:
    """Plus one number for each channel."""
    return y if b is None else y + reshape(b, (*b.shape, *(1,) * (y.rank - 2)))


def _padded(y: Expr, x: np.ndarray, fill: float = 0) -> np.ndarray:
    lead = x.ndim - len(y["padding"])
    return np.pad(x, [(0, 0)] * lead + list(y["padding"]), constant_values=fill)


def _grouped(y: Expr, x: np.ndarray, axis: int = 1) -> np.ndarray:
    """The channel axis as groups and channels of a group."""
    groups = y["groups"]
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


def _convolution_value(y: Expr, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Sum over taps."""
    space = y.shape[2:]
    xs, ws = _grouped(y, _padded(y, x)), _grouped(y, w, 0)
    groups = y["groups"]
    out = np.zeros((x.shape[0], groups, w.shape[0] // groups, *space), np.result_type(x, w))
    for tap, window in _taps(y, w.shape[2:], space):
        part = xs[window]
        out += np.einsum("ngc...,goc->ngo...", part, ws[tap])
    return out.reshape(y.shape)


def _convolution_shape(x: Expr, w: Expr, groups: int, **windows: Any) -> tuple[Any, str]:
    space = _space(x.shape[2:], w.shape[2:], **windows)
    return (x.shape[0], w.shape[0], *space), widest(x.kind, w.kind)


def _adjoint(name: str, a: Expr, b: Expr, shape: Sequence[int], windows: dict[str, Any]) -> Expr:
    """The adjoint of a convolution, to its input or its weight of this shape."""
    return expr(name, (a, b), shape, widest(a.kind, b.kind), **windows)


def _convolution_pullback(y: Expr, g: Expr, x: Expr, w: Expr) -> Cotangents:
    """The two adjoints of the convolution."""
    of_input = _adjoint("convolution_input", g, conj(w), x.shape, dict(y.attributes))
    return [of_input, _adjoint("convolution_weight", conj(x), g, w.shape, dict(y.attributes))]


def _convolution_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    said = _geometry_in_words(x)
    w.note("conv(X, W): convolution (cross-correlation)" + (f" with {said}" if said else ""))
    return ts.function("conv", [w.whole(a) for a in x.args])


def _tie_convolution(axes: Axes, y: Expr) -> None:
    """By (array, axis, array, axis), array -1 being the result."""
    pairs = {
        "convolution": ((-1, 0, 0, 0), (-1, 1, 1, 0), (0, 1, 1, 1)),
        "convolution_input": ((-1, 0, 0, 0), (0, 1, 1, 0), (-1, 1, 1, 1)),
        "convolution_weight": ((-1, 0, 1, 1), (0, 0, 1, 0), (-1, 1, 0, 1)),
    }[y.op]
    at = lambda k: y if k < 0 else y.args[k]
    for a, i, b, j in pairs:
        axes.tie((at(a), i), (at(b), j))


@lowers(
    "convolution",
    operation,
    _convolution_value,
    _convolution_pullback,
    result=_convolution_shape,
    form=_convolution_form,
    ties=_tie_convolution,
)
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
    """Correlation; x: N, C, spatial; w: O, C/groups, spatial; b: O; padding ((low, high), ...).

    layout: where x, w and the result have these axes.
    """
    if layout is not None:
        x, w = transpose(x, layout[0]), transpose(w, layout[1])
    n = x.rank - 2
    interior = [d - 1 for d in _each(input_dilation, n, 1)]
    x = pad(x, (0,) * x.rank, (0,) * x.rank, (0, 0, *interior))
    x, pairs = _cut_negative(x, _pairs(padding, n))
    stride, dilation = _each(stride, n, 1), _each(dilation, n, 1)
    windows = {"stride": stride, "padding": pairs, "dilation": dilation, "groups": groups}
    result = _shifted(apply("convolution", x, w, **windows), b)
    return result if layout is None else transpose(result, tuple(map(int, np.argsort(layout[2]))))


def _convolution_input_value(y: Expr, g: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Every tap sends the cotangent back to where it read."""
    groups = y["groups"]
    padded = _padded_space(y, y.shape)
    out = np.zeros((y.shape[0], groups, y.shape[1] // groups, *padded), np.result_type(g, w))
    gs, ws = _grouped(y, g), _grouped(y, w, 0)
    for tap, window in _taps(y, w.shape[2:], g.shape[2:]):
        out[window] += np.einsum("ngo...,goc->ngc...", gs, ws[tap])
    return _unpad(y, out.reshape(*y.shape[:2], *padded), y.shape)


def _convolution_input_pullback(y: Expr, u: Expr, g: Expr, w: Expr) -> Cotangents:
    """A convolution, and the correlation with what came in."""
    of_cotangent = apply("convolution", u, conj(w), **dict(y.attributes))
    return [of_cotangent, _adjoint("convolution_weight", u, conj(g), w.shape, dict(y.attributes))]


operation(
    "convolution_input",
    _convolution_input_value,
    _convolution_input_pullback,
    form=called(
        "convᵀ",
        "convᵀ(Ȳ, W): its adjoint in the input X, the transposed convolution",
        r"\operatorname{conv}^{\top}",
    ),
    ties=_tie_convolution,
)


@lowers("convolution_transposed")
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
    """Torch's conv_transpose; w: C, O/groups, spatial."""
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
    windows = {"stride": stride, "padding": pairs, "dilation": dilation, "groups": groups}
    return _shifted(_adjoint("convolution_input", x, w, shape, windows), b)


def _convolution_weight_value(y: Expr, x: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Every tap meets the cotangent with what it read."""
    groups = y["groups"]
    shape = (groups, y.shape[0] // groups, *y.shape[1:])
    out = np.zeros(shape, np.result_type(x, g))
    xs, gs = _grouped(y, _padded(y, x)), _grouped(y, g)
    for tap, window in _taps(y, y.shape[2:], g.shape[2:]):
        part = xs[window]
        flat = (*part.shape[:3], -1)
        out[tap] = np.einsum("ngcs,ngos->goc", part.reshape(flat), gs.reshape(*gs.shape[:3], -1))
    return out.reshape(y.shape)


def _convolution_weight_pullback(y: Expr, u: Expr, x: Expr, g: Expr) -> Cotangents:
    """A transposed convolution, and a convolution."""
    of_input = _adjoint("convolution_input", conj(g), u, x.shape, dict(y.attributes))
    return [of_input, apply("convolution", conj(x), u, **dict(y.attributes))]


operation(
    "convolution_weight",
    _convolution_weight_value,
    _convolution_weight_pullback,
    form=called(
        "corr",
        "corr(X, Ȳ): its adjoint in the weight W, the correlation of input and cotangent",
    ),
    ties=_tie_convolution,
)

# Pooling.


def _pooling(window: Any, stride: Any, padding: Any, dilation: Any = None) -> dict[str, Any]:
    """The attributes of a pooling operation."""
    n = len(window)
    return {
        "window": tuple(window),
        "stride": _each(stride, n, 1) if stride else tuple(window),
        "padding": _pairs(padding, n),
        "dilation": _each(dilation, n, 1),
    }


def _pool_shape(x: Expr, window: Sequence[int], **windows: Any) -> tuple[Any, str]:
    lead = x.rank - len(window)
    return (*x.shape[:lead], *_space(x.shape[lead:], window, **windows)), x.kind


def _spread_out(x: Expr, dilation: Any, value: float) -> Expr:
    """With numbers between the entries of the last axes."""
    if dilation is None:
        return x
    none = (0,) * x.rank
    interior = (*none[len(dilation) :], *(d - 1 for d in dilation))
    return pad_with(x, low=none, high=none, interior=interior, value=value)


def _pool_windows(y: Expr, x: np.ndarray, fill: float, space: Shape) -> list[Read]:
    """The values that meet each place of the output: one array for each tap, stacked."""
    padded = _padded(y, x, fill)
    return [(at, padded[at]) for _, at in _taps(y, y["window"], space)]


def _arg_of_windows(y: Expr, x: np.ndarray, space: Shape) -> tuple[np.ndarray, list[Index]]:
    parts = _pool_windows(y, x, -np.inf, space)
    return np.argmax(np.stack([p for _, p in parts]), 0), [at for at, _ in parts]


def _scatter_windows(
    y: Expr, shape: Shape, places: list[Index], values: list[np.ndarray], dtype: np.dtype
) -> np.ndarray:
    padded = _padded_space(y, shape)
    out = np.zeros((*shape[: len(shape) - len(padded)], *padded), dtype)
    for at, value in zip(places, values, strict=True):
        out[at] += value
    return _unpad(y, out, shape)


def _repooled(name: str, args: Sequence[Expr], shape: Shape, y: Expr) -> Expr:
    """Another pooling over the windows of y."""
    return expr(name, args, shape, args[0].kind, **dict(y.attributes))


def _pool(said: str, evaluate: Any, pullback: Any, name: str, note: str, **known: Any) -> None:
    """Something over windows; of two arrays it is picked by the second."""

    def form(w: ExpressionWriter, x: Expr) -> ts.Written:
        w.note(f"{note}; windows {listed(x['window'])}, stride {listed(x['stride'])}")
        args = [w.whole(a) for a in x.args]
        return ts.function(name, [ts.join(args, "; ", r";\, ", ts.SUM)])

    operation(said, evaluate, pullback, result=_pool_shape, form=form, ties=tie_first, **known)


def _to_the_end(n: int, k: int, s: int, pad: tuple[int, int], d: int) -> tuple[int, int]:
    """Padding behind, so that the last window that starts within the array fits."""
    low, high = pad
    count = -(-(n + low + high - d * (k - 1) - 1) // s) + 1
    count -= (count - 1) * s >= n + low
    return low, max(high, (count - 1) * s + d * (k - 1) + 1 - n - low)


def _max_pool_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """The greatest of each window."""
    parts = _pool_windows(y, x, -np.inf, _spatial(y, y.shape))
    return np.max(np.stack([p for _, p in parts]), 0)


@lowers(
    "max_pool",
    _pool,
    _max_pool_value,
    lambda y, g, x: [_repooled("max_unpool", (g, x), x.shape, y)],
    "maxpool",
    "maxpool: the greatest of each window",
)
def _max_pool(
    x: Expr,
    *,
    window: Any,
    stride: Any = None,
    padding: Any = None,
    dilation: Any = None,
    ceil_mode: bool = False,
    input_dilation: Any = None,
) -> Expr:
    """Over the last len(window) axes; padding ((low, high), ...) of -inf; stride = window."""
    x = _spread_out(x, input_dilation, -math.inf)
    pooling = _pooling(window, stride, padding, dilation)
    if ceil_mode:
        longer = map(_to_the_end, x.shape[x.rank - len(window) :], *pooling.values())
        pooling["padding"] = tuple(longer)
    return apply("max_pool", x, **pooling)


def _max_unpool(y: Expr, g: np.ndarray, x: np.ndarray) -> np.ndarray:
    """G added where x is greatest in each window."""
    best, places = _arg_of_windows(y, x, _spatial(y, g.shape))
    values = [np.where(best == k, g, 0) for k in range(len(places))]
    return _scatter_windows(y, y.shape, places, values, g.dtype)


_pool(
    "max_unpool",
    _max_unpool,
    lambda y, u, g, x: [_repooled("max_pick", (u, x), g.shape, y), None],
    "unpool",
    "unpool(g; x): g put back to where x is greatest",
)


def _max_pick(y: Expr, u: np.ndarray, x: np.ndarray) -> np.ndarray:
    """U where x is greatest in each window."""
    space = _spatial(y, y.shape)
    best, _ = _arg_of_windows(y, x, space)
    parts = np.stack([p for _, p in _pool_windows(y, u, 0, space)])
    return np.take_along_axis(parts, best[None], 0)[0]


_pool(
    "max_pick",
    _max_pick,
    lambda y, g, u, x: [_repooled("max_unpool", (g, x), x.shape, y), None],
    "pick",
    "pick(u; x): u where x is greatest in each window",
)
word(
    "min_pool(x; window, stride?, padding?, dilation?, input_dilation?)",
    lambda x, **windows: -_max_pool(-x, **windows),
)


def _sum_unpool(y: Expr, g: np.ndarray) -> np.ndarray:
    """G added all over each window."""
    space = _spatial(y, g.shape)
    places = [at for _, at in _taps(y, y["window"], space)]
    return _scatter_windows(y, y.shape, places, [g] * len(places), g.dtype)


@lowers(
    "sum_pool",
    _pool,
    lambda y, x: sum(p for _, p in _pool_windows(y, x, 0, _spatial(y, y.shape))),
    lambda y, g, x: [_repooled("sum_unpool", (g,), x.shape, y)],
    "sumpool",
    "sumpool: the sum of each window",
)
def _sum_pool(
    x: Expr, *, window: Any, stride: Any = None, padding: Any = None, input_dilation: Any = None
) -> Expr:
    """Sum over windows."""
    x = _spread_out(x, input_dilation, 0.0)
    return apply("sum_pool", x, **_pooling(window, stride, padding))


_pool(
    "sum_unpool",
    _sum_unpool,
    lambda y, u, g: [_repooled("sum_pool", (u,), g.shape, y)],
    "sumpoolᵀ",
    "sumpoolᵀ: its adjoint",
)


@lowers("avg_pool")
def _avg_pool(
    x: Expr,
    *,
    window: Any,
    stride: Any = None,
    padding: Any = None,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Expr:
    """Mean over windows; count_include_pad = True."""
    windows = {"window": window, "stride": stride, "padding": padding}
    summed = _sum_pool(x, **windows)
    if count_include_pad or divisor_override:
        return 1 / (divisor_override or prod(window)) * summed
    return summed / _sum_pool(array(np.ones(x.shape)), **windows)
