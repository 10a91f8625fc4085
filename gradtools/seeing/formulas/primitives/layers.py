"""Convolutions and pooling.

A convolution and its two adjoints are the partial derivatives of one trilinear form
``<g, x * w>``, and closed under derivatives.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas.algebra import conj
from gradtools.seeing.formulas.constructors import (
    convolution,
    convolve,
    pooled,
)
from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.primitives.record import Primitive, listed, tie_first
from gradtools.seeing.formulas.typesetting import SUM, Written, function, join

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

# --- values, in NumPy


def _taps(y, w_space, out_space):
    """For each tap: the window of the padded input that meets the output."""
    stride, dilation = y["stride"], y["dilation"]
    for tap in itertools.product(*map(range, w_space)):
        yield (
            tap,
            tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, s, n in zip(tap, dilation, stride, out_space, strict=True)
            ),
        )


def _padded(y, x):
    return np.pad(x, [(0, 0), (0, 0), *y["padding"]])


def _grouped(y, x, axis=1):
    """The channel axis as groups and channels of a group."""
    groups = y["groups"]
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


def _convolution(y, x, w):
    """Sum over taps."""
    space = y.shape[2:]
    xs, ws = _grouped(y, _padded(y, x)), _grouped(y, w, 0)
    groups = y["groups"]
    out = np.zeros((x.shape[0], groups, w.shape[0] // groups, *space), np.result_type(x, w))
    for tap, window in _taps(y, w.shape[2:], space):
        part = xs[(slice(None),) * 3 + window]
        out += np.einsum("ngc...,goc->ngo...", part, ws[(slice(None),) * 3 + tap])
    return out.reshape(y.shape)


def _convolution_input(y, g, w):
    """Every tap sends the cotangent back to where it read."""
    groups = y["groups"]
    padded = [n + a + b for n, (a, b) in zip(y.shape[2:], y["padding"], strict=True)]
    out = np.zeros((y.shape[0], groups, y.shape[1] // groups, *padded), np.result_type(g, w))
    gs, ws = _grouped(y, g), _grouped(y, w, 0)
    for tap, window in _taps(y, w.shape[2:], g.shape[2:]):
        out[(slice(None),) * 3 + window] += np.einsum(
            "ngo...,goc->ngc...", gs, ws[(slice(None),) * 3 + tap]
        )
    return _unpad(y, out.reshape(*y.shape[:2], *padded), 2, y.shape)


def _convolution_weight(y, x, g):
    """Every tap meets the cotangent with what it read."""
    groups = y["groups"]
    shape = (groups, y.shape[0] // groups, *y.shape[1:])
    out = np.zeros(shape, np.result_type(x, g))
    xs, gs = _grouped(y, _padded(y, x)), _grouped(y, g)
    for tap, window in _taps(y, y.shape[2:], g.shape[2:]):
        part = xs[(slice(None),) * 3 + window]
        flat = (*part.shape[:3], -1)
        out[(slice(None),) * 3 + tap] = np.einsum(
            "ngcs,ngos->goc", part.reshape(flat), gs.reshape(*gs.shape[:3], -1)
        )
    return out.reshape(y.shape)


def _pool_windows(y, x, fill, space):
    """The values that meet each place of the output: one array for each tap, stacked."""
    window, lead = y["window"], x.ndim - len(y["window"])
    padded = np.pad(x, [(0, 0)] * lead + list(y["padding"]), constant_values=fill)
    return [(at, padded[(slice(None),) * lead + at]) for _, at in _taps(y, window, space)]


def _unpad(y, out, lead, shape):
    """Without the padding of the axes after the leading ones."""
    inner = tuple(slice(a, a + n) for n, (a, _) in zip(shape[lead:], y["padding"], strict=True))
    return out[(slice(None),) * lead + inner]


def _pool_space(y, shape):
    return shape[len(shape) - len(y["window"]) :]


def _arg_of_windows(y, x, space):
    parts = _pool_windows(y, x, -np.inf, space)
    return np.argmax(np.stack([p for _, p in parts]), 0), [at for at, _ in parts]


def _max_pool(y, x):
    """The greatest of each window."""
    parts = _pool_windows(y, x, -np.inf, _pool_space(y, y.shape))
    return np.max(np.stack([p for _, p in parts]), 0)


def _max_pick(y, u, x):
    """U where x is greatest in each window."""
    space = _pool_space(y, y.shape)
    best, _ = _arg_of_windows(y, x, space)
    parts = np.stack([p for _, p in _pool_windows(y, u, 0, space)])
    return np.take_along_axis(parts, best[None], 0)[0]


def _scatter_windows(y, shape, places, values, dtype):
    lead = len(shape) - len(y["window"])
    padded = [n + a + b for n, (a, b) in zip(shape[lead:], y["padding"], strict=True)]
    out = np.zeros((*shape[:lead], *padded), dtype)
    for at, value in zip(places, values, strict=True):
        out[(slice(None),) * lead + at] += value
    return _unpad(y, out, lead, shape)


def _max_unpool(y, g, x):
    """G added where x is greatest in each window."""
    best, places = _arg_of_windows(y, x, _pool_space(y, g.shape))
    values = [np.where(best == k, g, 0) for k in range(len(places))]
    return _scatter_windows(y, y.shape, places, values, g.dtype)


def _sum_unpool(y, g):
    """G added all over each window."""
    space = _pool_space(y, g.shape)
    places = [at for _, at in _taps(y, y["window"], space)]
    return _scatter_windows(y, y.shape, places, [g] * len(places), g.dtype)


# --- cotangents of the arguments


def _geometry(y):
    return {name: y[name] for name in ("stride", "padding", "dilation", "groups")}


def _convolution_pullback(y, g, x, w):
    """The two adjoints of the convolution."""
    of_input = convolve("convolution_input", g, conj(w), x.shape, **_geometry(y))
    return [of_input, convolve("convolution_weight", conj(x), g, w.shape, **_geometry(y))]


def _convolution_input_pullback(y, u, g, w):
    """A convolution, and the correlation with what came in."""
    of_cotangent = convolution(u, conj(w), **_geometry(y))
    return [of_cotangent, convolve("convolution_weight", u, conj(g), w.shape, **_geometry(y))]


def _convolution_weight_pullback(y, u, x, g):
    """A transposed convolution, and a convolution."""
    of_input = convolve("convolution_input", conj(g), u, x.shape, **_geometry(y))
    return [of_input, convolution(conj(x), u, **_geometry(y))]


def _pooled(name, args, shape, y):
    """Another pooling over the windows of y."""
    windows = {name: y[name] for name in ("window", "stride", "padding", "dilation")}
    return pooled(name, args, shape, windows)


# --- notation


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


def _convolution_form(w: ExpressionWriter, x: Expr) -> Written:
    said = _geometry_in_words(x)
    w.note("conv(X, W): convolution (cross-correlation)" + (f" with {said}" if said else ""))
    return function("conv", [w.whole(a) for a in x.args])


def _convolution_input_form(w: ExpressionWriter, x: Expr) -> Written:
    w.note("convᵀ(Ȳ, W): its adjoint in the input X, the transposed convolution")
    return function("convᵀ", [w.whole(a) for a in x.args], latex=r"\operatorname{conv}^{\top}")


def _convolution_weight_form(w: ExpressionWriter, x: Expr) -> Written:
    w.note("corr(X, Ȳ): its adjoint in the weight W, the correlation of input and cotangent")
    return function("corr", [w.whole(a) for a in x.args])


def _pooling(name: str, note: str, evaluate: Any, pullback: Any) -> Primitive:
    """Something over windows; of two arrays it is picked by the second."""

    def form(w: ExpressionWriter, x: Expr) -> Written:
        w.note(f"{note}; windows {listed(x['window'])}, stride {listed(x['stride'])}")
        args = [w.whole(a) for a in x.args]
        return function(name, [join(args, "; ", r";\, ", SUM)])

    return Primitive(evaluate, pullback, form, tie_first)


# --- axes that are the same


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


LAYERS: dict[str, Primitive] = {
    "convolution": Primitive(
        _convolution, _convolution_pullback, _convolution_form, _tie_convolution
    ),
    "convolution_input": Primitive(
        _convolution_input, _convolution_input_pullback, _convolution_input_form, _tie_convolution
    ),
    "convolution_weight": Primitive(
        _convolution_weight,
        _convolution_weight_pullback,
        _convolution_weight_form,
        _tie_convolution,
    ),
    "max_pool": _pooling(
        "maxpool",
        "maxpool: the greatest of each window",
        _max_pool,
        lambda y, g, x: [_pooled("max_unpool", (g, x), x.shape, y)],
    ),
    "max_unpool": _pooling(
        "unpool",
        "unpool(g; x): g put back to where x is greatest",
        _max_unpool,
        lambda y, u, g, x: [_pooled("max_pick", (u, x), g.shape, y), None],
    ),
    "max_pick": _pooling(
        "pick",
        "pick(u; x): u where x is greatest in each window",
        _max_pick,
        lambda y, g, u, x: [_pooled("max_unpool", (g, x), x.shape, y), None],
    ),
    "sum_pool": _pooling(
        "sumpool",
        "sumpool: the sum of each window",
        lambda y, x: sum(p for _, p in _pool_windows(y, x, 0, _pool_space(y, y.shape))),
        lambda y, g, x: [_pooled("sum_unpool", (g,), x.shape, y)],
    ),
    "sum_unpool": _pooling(
        "sumpoolᵀ",
        "sumpoolᵀ: its adjoint",
        _sum_unpool,
        lambda y, u, g: [_pooled("sum_pool", (u,), g.shape, y)],
    ),
}
