"""Primitives along axes: reductions, cumulative ones, softmax, normalisation, sorting."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from gradtools.seeing.formula import typesetting as ts
from gradtools.seeing.formula.algebra import (
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
from gradtools.seeing.formula.constructors import along, deviation, softmax, standardize
from gradtools.seeing.formula.expressions import Expr
from gradtools.seeing.formula.primitives.elementwise import apply, indicator
from gradtools.seeing.formula.primitives.record import Primitive, tie_same
from gradtools.seeing.formula.typesetting import POWER, Written, function, number, summed

if TYPE_CHECKING:
    from gradtools.seeing.formula.axes import Axes
    from gradtools.seeing.formula.writing import ExpressionWriter

# --- values, in NumPy


def _argsort(y, x):
    """The stable order."""
    if y["descending"]:
        x = np.negative(x)
    return np.argsort(x, y["axis"], kind="stable")


def _run_along(axis, reverse, run, x):
    flipped = np.flip(x, axis) if reverse else x
    result = run(flipped)
    return np.flip(result, axis) if reverse else result


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


def _cumsum(y, x):
    """Running sum."""
    return _run_along(y["axis"], y["reverse"], lambda v: np.cumsum(v, y["axis"]), x)


def _cumprod(y, x):
    """Running product."""
    return _run_along(y["axis"], y["reverse"], lambda v: np.cumprod(v, y["axis"]), x)


def _logcumsumexp(y, x):
    """Running _logsumexp."""
    run = lambda v: np.logaddexp.accumulate(v, y["axis"])
    return _run_along(y["axis"], y["reverse"], run, x)


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


def _deviation(y, x):
    """The square root of variance plus eps."""
    return np.sqrt(np.var(x, y["axes"], ddof=y["correction"]) + y["eps"])


# --- cotangents of the arguments


def _extreme_pullback(y, g, x):
    """The cotangent where x is the extreme: 1[x = y] g."""
    at = indicator(x, "==", spread(y, y["axes"], x.shape))
    return [times(at, spread(g, y["axes"], x.shape))]


def _prod_pullback(y, g, x):
    """The product over each entry: y g / x."""
    return (
        [divide(spread(times(y, g), y["axes"], x.shape), x)]
        if not x.is_complex
        else [_conj_divide(spread(times(conj(y), g), y["axes"], x.shape), x)]
    )


def _conj_divide(a: Expr, b: Expr) -> Expr:
    """A over the conjugate of b."""
    return divide(a, conj(b))


def _logsumexp_pullback(y, g, x):
    """softmax(x) g."""
    axes = y["axes"]
    p = softmax(x, axes[0]) if len(axes) == 1 else _softmax_over(x, y, axes)
    return [times(conj(p), spread(g, axes, x.shape))]


def _softmax_over(x, y, axes):
    return apply("exp", subtract(x, spread(y, axes, x.shape)))


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
        g,
        negate(mean(g, axes, keep=True)),
        negate(times(y, mean(times(y, g), axes, keep=True))),
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


def _norm_pullback(y, g, x):
    """x g / |x|."""
    return [times(x, spread(divide(real(g), y), y["axes"], x.shape))]


def _running_sum(x, axis, reverse):
    """A running sum."""
    return along("cumsum", x, axis, reverse=reverse)


def _cumprod_pullback(y, g, x):
    """The running sum of y g from behind, over x."""
    return [_conj_divide(_running_sum(times(conj(y), g), y["axis"], not y["reverse"]), x)]


def _logcumsumexp_pullback(y, g, x):
    """e**x times the running sum of g e**-y from behind."""
    weights = conj(apply("exp", negate(y)))
    weighted = _running_sum(times(g, weights), y["axis"], not y["reverse"])
    return [times(conj(apply("exp", x)), weighted)]


# --- notation


def _along_form(name: str, latex: str = "") -> Callable[[ExpressionWriter, Expr], Written]:
    """A function along one axis."""

    def form(w: ExpressionWriter, x: Expr) -> Written:
        below = w.axis_names(x.args[0], [x["axis"]]) if x.args[0].rank > 1 else ""
        shown = name + ("←" if x.get("reverse") else "")
        return function(shown, [w.whole(a) for a in x.args], below, latex)

    return form


def _reduction_form(name: str) -> Callable[[ExpressionWriter, Expr], Written]:
    """A function over axes."""

    def form(w: ExpressionWriter, x: Expr) -> Written:
        a = x.args[0]
        axes = x["axes"] if "axes" in dict(x.attributes) else (x["axis"],)
        below = w.axis_names(a, axes) if len(axes) < a.rank else ""
        return function(name, [w.whole(a)], below)

    return form


def _norm_form(w: ExpressionWriter, x: Expr) -> Written:
    inner = w.whole(x.args[0])
    below = w.axis_names(x.args[0], x["axes"]) if len(x["axes"]) < x.args[0].rank else ""
    low = f"_{{{below}}}" if below else ""
    return Written(
        f"‖{inner.text}‖" + (ts.below(below) if below else ""),
        rf"\left\|{inner.latex}\right\|{low}",
    )


def _deviation_form(w: ExpressionWriter, x: Expr) -> Written:
    a, eps = x.args[0], x["eps"]
    axes = x["axes"]
    below = w.axis_names(a, axes) if len(axes) < a.rank else ""
    inner = function("var", [w.whole(a)], below)
    if eps:
        inner = summed([inner, number(eps)])
        return Written(f"√({inner.text})", rf"\sqrt{{{inner.latex}}}", POWER)
    return Written(f"√{inner.text}", rf"\sqrt{{{inner.latex}}}", POWER)


def _standardize_form(w: ExpressionWriter, x: Expr) -> Written:
    a = x.args[0]
    below = w.axis_names(a, x["axes"]) if len(x["axes"]) < a.rank else ""
    if x["eps"]:
        w.note(
            "standardize(x) = (x - mean(x)) / √(var(x) + ε), "
            f"ε = {number(x['eps']).text}, over the axes below"
        )
    return function("standardize", [w.whole(a)], below)


# --- axes that are the same


def _tie_argmax(axes: Axes, y: Expr) -> None:
    (x,) = y.args
    for k, a in enumerate(a for a in range(x.rank) if a != y["axis"]):
        axes.tie((y, k), (x, a))


def _tie_reduced(axes: Axes, y: Expr) -> None:
    (x,) = y.args
    left = [a for a in range(x.rank) if a not in y["axes"]]
    for k, a in enumerate(left):
        axes.tie((y, k), (x, a))


REDUCTIONS: dict[str, Primitive] = {
    "argsort": Primitive(_argsort, form=_along_form("argsort"), ties=tie_same),
    "argmax": Primitive(
        lambda y, x: np.argmax(x, y["axis"]), form=_reduction_form("argmax"), ties=_tie_argmax
    ),
    "cumargmax": Primitive(_cumargmax, form=_along_form("cumargmax"), ties=tie_same),
    "any": Primitive(
        lambda y, x: np.any(x, y["axes"]), form=_reduction_form("any"), ties=_tie_reduced
    ),
    "all": Primitive(
        lambda y, x: np.all(x, y["axes"]), form=_reduction_form("all"), ties=_tie_reduced
    ),
    "max": Primitive(
        lambda y, x: np.max(x, y["axes"]),
        _extreme_pullback,
        form=_reduction_form("max"),
        ties=_tie_reduced,
    ),
    "min": Primitive(
        lambda y, x: np.min(x, y["axes"]),
        _extreme_pullback,
        form=_reduction_form("min"),
        ties=_tie_reduced,
    ),
    "prod": Primitive(
        lambda y, x: np.prod(x, y["axes"]),
        _prod_pullback,
        form=_reduction_form("prod"),
        ties=_tie_reduced,
    ),
    "logsumexp": Primitive(
        _logsumexp, _logsumexp_pullback, form=_reduction_form("logsumexp"), ties=_tie_reduced
    ),
    "softmax": Primitive(
        lambda y, x: _softmax(x, y["axis"]),
        _softmax_pullback,
        form=_along_form("softmax"),
        ties=tie_same,
    ),
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
        _deviation, _deviation_pullback, form=_deviation_form, ties=_tie_reduced
    ),
    "variance": Primitive(
        lambda y, x: np.var(x, y["axes"], ddof=y["correction"]),
        _variance_pullback,
        form=_reduction_form("var"),
        ties=_tie_reduced,
    ),
    "norm": Primitive(
        lambda y, x: np.sqrt((np.abs(x) ** 2).sum(y["axes"])),
        _norm_pullback,
        form=_norm_form,
        ties=_tie_reduced,
    ),
    "cumsum": Primitive(
        _cumsum,
        lambda y, g, x: [_running_sum(g, y["axis"], not y["reverse"])],
        form=_along_form("cumsum"),
        ties=tie_same,
    ),
    "cumprod": Primitive(_cumprod, _cumprod_pullback, form=_along_form("cumprod"), ties=tie_same),
    "logcumsumexp": Primitive(
        _logcumsumexp, _logcumsumexp_pullback, form=_along_form("logcumsumexp"), ties=tie_same
    ),
}
