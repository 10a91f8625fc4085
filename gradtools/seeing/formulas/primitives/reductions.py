"""Primitives along axes: reductions, cumulative ones, softmax, normalisation, sorting."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    conj,
    divide,
    mean,
    negate,
    plus,
    real,
    scale,
    spread,
    subtract,
    times,
    total,
)
from gradtools.seeing.formulas.constructors import along, deviation, softmax, standardize
from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.primitives.elementwise import apply, indicator
from gradtools.seeing.formulas.primitives.record import Form, Primitive, tie_same
from gradtools.seeing.formulas.typesetting import ATOM, POWER, Written, function, number, summed

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter

# --- values, in NumPy


def _argsort(y, x):
    """The stable order."""
    if y["descending"]:
        x = np.negative(x)
    return np.argsort(x, y["axis"], kind="stable")


def _running(run: Callable[..., Any]) -> Callable[..., Any]:
    """What a running function gives along an axis, from either end."""

    def value(y, x):
        axis = y["axis"]
        flip = (lambda v: np.flip(v, axis)) if y["reverse"] else lambda v: v
        return flip(run(flip(x), axis))

    return value


def _cumargmax(y, x):
    """Where the running maximum stands."""
    axis, n = y["axis"], x.shape[y["axis"]]
    x = np.moveaxis(x, axis, 0)
    steps = range(n - 1, -1, -1) if y["reverse"] else range(n)
    out = np.zeros(x.shape, np.int64)
    best, at = None, None
    for t in steps:
        if best is None:
            best, at = x[t].copy(), np.full(x[t].shape, t)
        else:
            better = x[t] >= best
            best, at = np.where(better, x[t], best), np.where(better, t, at)
        out[t] = at
    return np.moveaxis(out, 0, axis)


def _logsumexp(y, x):
    """Log of the sum of exponentials."""
    axes = y["axes"]
    top = np.max(x.real, axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    return np.log(np.exp(x - top).sum(axes)) + top.reshape(y.shape)


def _softmax(x, axis):
    """Exponentials over their sum."""
    top = np.max(x.real, axis, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0))
    return e / e.sum(axis, keepdims=True)


def _log_softmax(y, x):
    """The logarithm of _softmax."""
    axis = y["axis"]
    x = x - np.max(x.real, axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def _standardize(y, x):
    """Mean 0 and variance 1."""
    axes = y["axes"]
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + y["eps"])


def _variance(y, x):
    """The mean squared modulus of the distance from the mean."""
    return np.var(x, y["axes"], ddof=y["correction"])


# --- cotangents of the arguments


def _extreme_pullback(y, g, x):
    """The cotangent where x is the extreme: 1[x = y] g."""
    at = indicator(x, "==", spread(y, y["axes"], x.shape))
    return [times(at, spread(g, y["axes"], x.shape))]


def _conj_divide(a: Expr, b: Expr) -> Expr:
    """A over the conjugate of b."""
    return divide(a, conj(b))


def _logsumexp_pullback(y, g, x):
    """softmax(x) g."""
    axes = y["axes"]
    p = (
        softmax(x, axes[0])
        if len(axes) == 1
        else apply("exp", subtract(x, spread(y, axes, x.shape)))
    )
    return [times(conj(p), spread(g, axes, x.shape))]


def _softmax_pullback(y, g, x):
    """y (g - sum y g)."""
    axis = y["axis"]
    return [times(conj(y), subtract(g, total(times(conj(y), g), [axis], keep=True)))]


def _log_softmax_pullback(y, g, x):
    """g - softmax(x) sum g."""
    axis = y["axis"]
    return [subtract(g, times(conj(softmax(x, axis)), total(g, [axis], keep=True)))]


def _standardize_pullback(y, g, x):
    """(g - mean g - y mean(y g)) / deviation."""
    axes = y["axes"]
    inner = plus(
        g, negate(mean(g, axes, keep=True)), negate(times(y, mean(times(y, g), axes, keep=True)))
    )
    return [divide(inner, spread(deviation(x, axes, y["eps"]), axes, x.shape))]


def _centred(x, axes):
    return subtract(x, mean(x, axes, keep=True))


def _count(x, axes):
    return prod(x.shape[a] for a in axes)


def _deviation_pullback(y, g, x):
    """standardize(x) g / n."""
    axes, correction = y["axes"], y["correction"]
    n = _count(x, axes)
    if not correction and not x.is_complex:
        return [scale(1 / n, times(standardize(x, axes, y["eps"]), spread(g, axes, x.shape)))]
    weight = spread(divide(real(g), y), axes, x.shape)
    return [scale(1 / (n - correction), times(_centred(x, axes), weight))]


def _variance_pullback(y, g, x):
    """2 (x - mean x) g / n."""
    axes = y["axes"]
    weight = spread(real(g), axes, x.shape)
    return [scale(2 / (_count(x, axes) - y["correction"]), times(_centred(x, axes), weight))]


def _running_sum(x, axis, reverse):
    """A running sum."""
    return along("cumsum", x, axis, reverse=reverse)


def _logcumsumexp_pullback(y, g, x):
    """e**x times the running sum of g e**-y from behind."""
    weights = conj(apply("exp", negate(y)))
    weighted = _running_sum(times(g, weights), y["axis"], not y["reverse"])
    return [times(conj(apply("exp", x)), weighted)]


# --- notation


def _along_form(name: str, latex: str = "") -> Form:
    """A function along one axis."""

    def form(w: ExpressionWriter, x: Expr) -> Written:
        below = w.axis_names(x.args[0], [x["axis"]]) if x.args[0].rank > 1 else ""
        shown = name + ("←" if x.get("reverse") else "")
        return function(shown, [w.whole(a) for a in x.args], below, latex)

    return form


def _reduction_form(name: str) -> Form:
    """A function over axes."""

    def form(w: ExpressionWriter, x: Expr) -> Written:
        return function(name, [w.whole(x.args[0])], _below(w, x))

    return form


def _norm_form(w: ExpressionWriter, x: Expr) -> Written:
    inner = w.whole(x.args[0])
    below = _below(w, x)
    low = f"_{{{below}}}" if below else ""
    return Written(
        f"‖{inner.text}‖" + (ts.below(below) if below else ""),
        rf"\left\|{inner.latex}\right\|{low}",
    )


def _deviation_form(w: ExpressionWriter, x: Expr) -> Written:
    inner = function("var", [w.whole(x.args[0])], _below(w, x))
    inner = summed([inner, number(x["eps"])]) if x["eps"] else inner
    text = inner.text if inner.level == ATOM else f"({inner.text})"
    return Written(f"√{text}", rf"\sqrt{{{inner.latex}}}", POWER)


def _standardize_form(w: ExpressionWriter, x: Expr) -> Written:
    if x["eps"]:
        w.note(
            "standardize(x) = (x - mean(x)) / √(var(x) + ε), "
            f"ε = {number(x['eps']).text}, over the axes below"
        )
    return function("standardize", [w.whole(x.args[0])], _below(w, x))


# --- axes that are the same


def _tie_reduced(axes: Axes, y: Expr) -> None:
    (x,) = y.args
    for k, a in enumerate(a for a in range(x.rank) if a not in _gone(y)):
        axes.tie((y, k), (x, a))


def _gone(y: Expr) -> tuple[int, ...]:
    """The axes over which it goes."""
    return (y["axis"],) if y.op == "argmax" else y["axes"]


def _below(w: ExpressionWriter, y: Expr) -> str:
    """The letters of these axes; none where they are all."""
    a = y.args[0]
    return w.axis_names(a, _gone(y)) if len(_gone(y)) < a.rank else ""


def _reduction(name: str, evaluate: Callable[..., Any], pullback: Any = None) -> Primitive:
    """Something over axes that are gone in the result."""
    return Primitive(evaluate, pullback, _reduction_form(name), _tie_reduced)


def _over_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda y, x: function(x, y["axes"])


def _along(name: str, evaluate: Callable[..., Any], pullback: Any = None) -> Primitive:
    """Something along one axis that stays."""
    return Primitive(evaluate, pullback, _along_form(name), tie_same)


REDUCTIONS: dict[str, Primitive] = {
    "argsort": _along("argsort", _argsort),
    "argmax": _reduction("argmax", lambda y, x: np.argmax(x, y["axis"])),
    "cumargmax": _along("cumargmax", _cumargmax),
    "any": _reduction("any", _over_axes(np.any)),
    "all": _reduction("all", _over_axes(np.all)),
    "max": _reduction("max", _over_axes(np.max), _extreme_pullback),
    "min": _reduction("min", _over_axes(np.min), _extreme_pullback),
    "prod": _reduction(
        "prod",
        _over_axes(np.prod),
        lambda y, g, x: [_conj_divide(spread(times(conj(y), g), y["axes"], x.shape), x)],
    ),
    "logsumexp": _reduction("logsumexp", _logsumexp, _logsumexp_pullback),
    "variance": _reduction("var", _variance, _variance_pullback),
    "softmax": _along("softmax", lambda y, x: _softmax(x, y["axis"]), _softmax_pullback),
    "log_softmax": Primitive(
        _log_softmax,
        _log_softmax_pullback,
        form=_along_form("log softmax", r"\log\operatorname{softmax}"),
        ties=tie_same,
    ),
    "standardize": Primitive(
        _standardize, _standardize_pullback, form=_standardize_form, ties=tie_same
    ),
    "deviation": Primitive(
        lambda y, x: np.sqrt(_variance(y, x) + y["eps"]),
        _deviation_pullback,
        form=_deviation_form,
        ties=_tie_reduced,
    ),
    "norm": Primitive(
        lambda y, x: np.sqrt((np.abs(x) ** 2).sum(y["axes"])),
        lambda y, g, x: [times(x, spread(divide(real(g), y), y["axes"], x.shape))],
        form=_norm_form,
        ties=_tie_reduced,
    ),
    "cumsum": _along(
        "cumsum",
        _running(np.cumsum),
        lambda y, g, x: [_running_sum(g, y["axis"], not y["reverse"])],
    ),
    "cumprod": _along(
        "cumprod",
        _running(np.cumprod),
        lambda y, g, x: [
            _conj_divide(_running_sum(times(conj(y), g), y["axis"], not y["reverse"]), x)
        ],
    ),
    "logcumsumexp": _along(
        "logcumsumexp", _running(np.logaddexp.accumulate), _logcumsumexp_pullback
    ),
}
