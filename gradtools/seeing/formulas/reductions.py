"""The table of operations, continued: reductions, softmax and standardization along axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    apply,
    conj,
    mean,
    plus,
    real,
    reshape,
    spread,
    total,
    unsqueeze,
)
from gradtools.seeing.formulas.expressions import REAL, Expr, expr, operation
from gradtools.seeing.formulas.operations import indicator
from gradtools.seeing.formulas.typesetting import Written

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import Writer


def _letters_below(w: Writer, y: Expr) -> str:
    """The letters of the axes along which y is computed; empty where these are all."""
    x, axis = y.args[0], y.get("axis")
    axes, letters = y["axes"] if axis is None else (axis,), w.axes.unique(x)
    return "".join(letters[a] for a in axes) if len(axes) < x.rank else ""


def _along(name: str) -> Callable[[Writer, Expr], Written]:
    """Writes a function with the letters of its axes below."""
    return lambda w, x: ts.function(name, [w.operand(x.args[0])], _letters_below(w, x))


def _reduction(
    name: str,
    evaluate: Callable[..., Any],
    pullback: Callable[..., Expr],
    form: Callable[[Writer, Expr], Written],
    definition: str = "",
) -> None:
    """Registers a reduction that NumPy computes from the argument and the axes.

    pullback: Takes the value and the cotangent, both broadcast to the argument, the argument and
    the axes.
    """

    def pulled(y: Expr, g: Expr, x: Expr) -> list[Expr]:
        axes = y["axes"]
        return [pullback(spread(y, axes, x.shape), spread(g, axes, x.shape), x, axes)]

    def labels(y: Expr) -> list[list[int | None]]:
        kept = iter(range(y.rank))
        return [[None if a in y["axes"] else next(kept) for a in range(y.args[0].rank)]]

    value = lambda y, x: evaluate(x, y["axes"])
    operation(name, value, pulled, form=form, labels=labels, definition=definition)


def reduced(name: str, x: Expr, axes: Iterable[int] | None = None, keep: bool = False) -> Expr:
    """A reduction over axes, by default all; x itself if there are none."""
    axes = tuple(range(x.rank) if axes is None else sorted(axes))
    if not axes:
        return x
    kind = REAL if name in ("norm", "variance") else x.kind
    shape = [n for a, n in enumerate(x.shape) if a not in axes]
    result = expr(name, (x,), shape, kind, axes=axes)
    return unsqueeze(result, axes) if keep else result


def _finite_top(x: np.ndarray, axes: Any) -> np.ndarray:
    """The maximum along the axes, 0 where it is infinite: e^(x - top) does not overflow."""
    top = np.max(x.real, axes, keepdims=True)
    return np.where(np.isfinite(top), top, 0)


def _logsumexp(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    top = _finite_top(x, axes)
    return np.log(np.exp(x - top).sum(axes)) + top.squeeze(axes)


def _pull_logsumexp(y: Expr, g: Expr, x: Expr, axes: tuple[int, ...]) -> Expr:
    return conj(softmax(x, axis=axes[0]) if len(axes) == 1 else apply("exp", x - y)) * g


def _write_norm(w: Writer, x: Expr) -> Written:
    below = _letters_below(w, x)
    return Written(f"‖{w.operand(x.args[0]).text}‖" + (ts.below(below) if below else ""))


# The cotangent of a maximum or minimum is that of all entries which equal it.
for _name, _evaluate in (("max", np.max), ("min", np.min)):
    _reduction(_name, _evaluate, lambda y, g, x, axes: indicator(x, y, "==") * g, _along(_name))
_reduction(
    "norm",
    lambda x, axes: np.sqrt((np.abs(x) ** 2).sum(axes)),
    lambda y, g, x, axes: x * (real(g) / y),
    _write_norm,
)
_reduction(
    "logsumexp",
    _logsumexp,
    _pull_logsumexp,
    _along("logsumexp"),
    "logsumexpᵢ(x) := log Σᵢ e^x",
)
_reduction(
    "variance",
    np.var,
    lambda y, g, x, axes: 2 / _count(x, axes) * (centred(x, axes) * real(g)),
    _along("var"),
    "varᵢ(x) := meanᵢ |x - meanᵢ x|²",
)


def norm(x: Expr, *, axes: Any = None, ord: Any = 2, keep: bool = False) -> Expr | None:
    """The Euclidean norm; None for any other."""
    return reduced("norm", x, axes or None, keep) if x.rank and ord == 2 else None


def variance(x: Expr, *, axes: Any = None, correction: float = 0, keep: bool = False) -> Expr:
    """sum(abs(x - mean)**2) / (n - correction)."""
    n, result = _count(x, axes), reduced("variance", x, axes, keep)
    return n / (n - correction) * result if n > correction else result * np.nan


def centred(x: Expr, axes: Iterable[int]) -> Expr:
    """x - mean x."""
    return x - mean(x, axes, keep=True)


def _count(x: Expr, axes: Iterable[int] | None) -> int:
    return prod(x.shape if axes is None else (x.shape[a] for a in axes))


# --- softmax, and standardization


def _softmax(y: Expr, x: np.ndarray) -> np.ndarray:
    e = np.exp(x - _finite_top(x, y["axis"]))
    return e / e.sum(y["axis"], keepdims=True)


def softmax(x: Expr, *, axis: int) -> Expr:
    """exp(x) over its sum along an axis; a scalar is an axis of length 1."""
    if x.rank:
        return expr("softmax", (x,), x.shape, x.kind, axis=axis)
    return reshape(softmax(reshape(x, (1,)), axis=0), ())


def log_softmax(x: Expr, *, axis: int) -> Expr:
    """x - logsumexp(x) along an axis."""
    return x - reduced("logsumexp", x, [axis] if x.rank else [], keep=True)


def _standardize(y: Expr, x: np.ndarray) -> np.ndarray:
    axes = y["axes"]
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + y["eps"])


def _pull_standardize(y: Expr, g: Expr, x: Expr) -> list[Expr]:
    """(g - mean g - y mean(y g)) / deviation."""
    axes = y["axes"]
    inner = plus(g, -mean(g, axes, keep=True), -(y * mean(y * g, axes, keep=True)))
    return [inner / spread((variance(x, axes=axes) + y["eps"]) ** 0.5, axes, x.shape)]


def _write_standardize(w: Writer, x: Expr) -> Written:
    if x["eps"]:
        w.note(
            "standardize(x) = (x - mean(x)) / √(var(x) + ε), "
            f"ε = {ts.number(x['eps']).text}, over the axes below"
        )
    return _along("standardize")(w, x)


def standardize(x: Expr, *, axes: Iterable[int], eps: float = 0.0) -> Expr:
    """(x - mean) / sqrt(variance + eps)."""
    attributes = {"axes": tuple(sorted(axes)), "eps": float(eps)}
    return expr("standardize", (x,), x.shape, x.kind, **attributes)


operation(
    "softmax",
    _softmax,
    lambda y, g, x: [conj(y) * (g - total(conj(y) * g, [y["axis"]], keep=True))],
    form=_along("softmax"),
    definition="softmaxᵢ(x) := e^x / Σᵢ e^x",
)
operation("standardize", _standardize, _pull_standardize, form=_write_standardize)
