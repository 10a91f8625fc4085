"""Operations along axes: reductions, norms, the softmax family, and standardization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from gradtools.seeing.formulas.expressions import REAL, Expr
from gradtools.seeing.formulas.operation_record import Cotangents, Form
from gradtools.seeing.formulas.operations.elementwise import indicator
from gradtools.seeing.formulas.operations.entering import makes, operation, tie_same, word

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter


def all_axes(x: Expr, axes: Iterable[int] | None) -> tuple[int, ...]:
    """The axes; all axes for None."""
    return tuple(range(x.rank)) if axes is None else tuple(axes)


def kept(result: Expr, axes: Sequence[int], keep: bool) -> Expr:
    """The result with its reduced axes as axes of length 1, if keep is set."""
    return unsqueeze(result, axes) if keep else result


def reduced(name: str, x: Expr, axes: Iterable[int], **attributes: Any) -> Expr:
    """Apply a registered reduction over axes, which are removed."""
    return apply(name, x, axes=tuple(sorted(axes)), **attributes)


@makes("sum")
def _sum(x: Expr, *, axes: Any = None, keep: bool = False) -> Expr:
    """The sum over axes."""
    return total(x, all_axes(x, axes), keep)


word("mean", lambda x, *, axes=None, keep=False: mean(x, all_axes(x, axes), keep))


def reduction_form(name: str) -> Form:
    """A form that writes a function with the letters of the reduced axes below."""

    def form(w: ExpressionWriter, x: Expr) -> ts.Written:
        return ts.function(name, [w.operand(x.args[0])], below_of(w, x))

    return form


def tie_reduced(axes: Axes, y: Expr) -> None:
    """Tie the axes that are not reduced."""
    (x,) = y.args
    for k, a in enumerate(a for a in range(x.rank) if a not in y["axes"]):
        axes.tie((y, k), (x, a))


def below_of(w: ExpressionWriter, y: Expr) -> str:
    """The letters of the reduced axes; empty where all axes are reduced."""
    a = y.args[0]
    return w.axis_names(a, y["axes"]) if len(y["axes"]) < a.rank else ""


def _left_over(kind: str = "") -> Callable[..., Any]:
    """The shape without the axes, and the kind, by default that of the argument."""

    def shape(x: Expr, axes: Sequence[int], **attributes: Any) -> tuple[Any, str]:
        return [n for a, n in enumerate(x.shape) if a not in axes], kind or x.kind

    return shape


def _reduction(
    name: str, evaluate: Any, pullback: Any = None, kind: str = "", **known: Any
) -> None:
    """Register a reduction; its kind is by default that of the argument."""

    def make(x: Expr, *, axes: Any = None, keep: bool = False) -> Expr:
        axes = all_axes(x, axes)
        return kept(reduced(name, x, axes), axes, keep) if axes else x

    given = {"make": make, "form": reduction_form(name), "result": _left_over(kind), **known}
    operation(name, evaluate, pullback, ties=tie_reduced, **given)


def _over_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda y, x: function(x, y["axes"])


def _extreme_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """The cotangent of the entries that are the maximum or minimum: 1[x = y] g."""
    at = indicator(x, "==", spread(y, y["axes"], x.shape))
    return [at * spread(g, y["axes"], x.shape)]


_reduction("max", _over_axes(np.max), _extreme_pullback)
_reduction("min", _over_axes(np.min), _extreme_pullback)
_reduction(
    "prod",
    _over_axes(np.prod),
    lambda y, g, x: [spread(conj(y) * g, y["axes"], x.shape) / conj(x)],
)
# Norms.


def _norm_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    inner = w.operand(x.args[0])
    below = below_of(w, x)
    return ts.Written(f"‖{inner.text}‖" + (ts.below(below) if below else ""))


def norm(x: Expr, *, axes: Any = None, ord: Any = 2, keep: bool = False) -> Expr | None:
    """(sum |x|**ord)**(1/ord) of a positive finite ord; None for any other."""
    axes = all_axes(x, axes)
    if ord == 2:
        return kept(reduced("norm", x, axes), axes, keep)
    size = apply("abs", x)
    return total(size**ord, axes, keep) ** (1 / ord) if 0 < ord < np.inf else None


_reduction(
    "norm",
    lambda y, x: np.sqrt((np.abs(x) ** 2).sum(y["axes"])),
    lambda y, g, x: [x * spread(real(g) / y, y["axes"], x.shape)],
    REAL,
    form=_norm_form,
    make=norm,
)

# The softmax family.


def along_form(name: str) -> Form:
    """A form that writes a function with the letter of its axis below."""

    def form(w: ExpressionWriter, x: Expr) -> ts.Written:
        below = w.axis_names(x.args[0], [x["axis"]]) if x.args[0].rank > 1 else ""
        return ts.function(name, [w.operand(a) for a in x.args], below)

    return form


def _along(name: str, evaluate: Any, pullback: Any, **known: Any) -> None:
    def make(x: Expr, *, axis: int) -> Expr:
        if x.rank:
            return apply(name, x, axis=axis)  # type: ignore[no-any-return]
        return reshape(apply(name, reshape(x, (1,)), axis=0), ())

    operation(name, evaluate, pullback, make=make, ties=tie_same, **known)


def _softmax_value(y: Expr, x: np.ndarray) -> np.ndarray:
    axis = y["axis"]
    top = np.max(x.real, axis, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0))
    return e / e.sum(axis, keepdims=True)


def _log_softmax_value(y: Expr, x: np.ndarray) -> np.ndarray:
    axis = y["axis"]
    x = x - np.max(x.real, axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def _log_softmax_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    axis = y["axis"]
    return [g - conj(apply("softmax", x, axis=axis)) * total(g, [axis], keep=True)]


_along(
    "softmax",
    _softmax_value,
    lambda y, g, x: [conj(y) * (g - total(conj(y) * g, [y["axis"]], keep=True))],
    form=along_form("softmax"),
    definition="softmaxᵢ(x) := e^x / Σᵢ e^x",
)
_along(
    "log_softmax",
    _log_softmax_value,
    _log_softmax_pullback,
    form=along_form("log softmax"),
    definition="log softmaxᵢ(x) := x - log Σᵢ e^x",
)


def _logsumexp_value(y: Expr, x: np.ndarray) -> np.ndarray:
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


_reduction(
    "logsumexp",
    _logsumexp_value,
    _logsumexp_pullback,
    definition="logsumexpᵢ(x) := log Σᵢ e^x",
)

# Variance and standardization.


def _variance_value(y: Expr, x: np.ndarray) -> np.ndarray:
    """The mean squared modulus of the distance from the mean."""
    return np.var(x, y["axes"])


def _variance_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """2 (x - mean x) g / n."""
    axes = y["axes"]
    weight = spread(real(g), axes, x.shape)
    return [2 / _count(x, axes) * (_centred(x, axes) * weight)]


def _centred(x: Expr, axes: Iterable[int]) -> Expr:
    return x - mean(x, axes, keep=True)


def _count(x: Expr, axes: Iterable[int]) -> int:
    return prod(x.shape[a] for a in axes)


def variance(x: Expr, *, axes: Any = None, correction: float = 0, keep: bool = False) -> Expr:
    """sum(abs(x - mean)**2) / (n - correction)."""
    axes = all_axes(x, axes)
    n = _count(x, axes)
    result = kept(reduced("variance", x, axes), axes, keep)
    return n / (n - correction) * result if n > correction else result * np.nan


_reduction(
    "variance",
    _variance_value,
    _variance_pullback,
    REAL,
    make=variance,
    form=reduction_form("var"),
    definition="varᵢ(x) := meanᵢ |x - meanᵢ x|²",
)


word(
    "deviation",
    lambda x, *, axes=None, correction=0, keep=False: (
        variance(x, axes=axes, correction=correction, keep=keep) ** 0.5
    ),
)


def _standardize_value(y: Expr, x: np.ndarray) -> np.ndarray:
    axes = y["axes"]
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + y["eps"])


def _standardize_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """(g - mean g - y mean(y g)) / deviation."""
    axes = y["axes"]
    inner = plus(g, -mean(g, axes, keep=True), -(y * mean(y * g, axes, keep=True)))
    return [inner / _deviation(x, axes, y["eps"])]


def _deviation(x: Expr, axes: Iterable[int], eps: float) -> Expr:
    """sqrt(variance + eps), broadcast to x."""
    return spread((variance(x, axes=axes) + eps) ** 0.5, axes, x.shape)


def _standardize_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    if x["eps"]:
        w.note(
            "standardize(x) = (x - mean(x)) / √(var(x) + ε), "
            f"ε = {ts.number(x['eps']).text}, over the axes below"
        )
    return ts.function("standardize", [w.operand(x.args[0])], below_of(w, x))


@makes(
    "standardize",
    operation,
    _standardize_value,
    _standardize_pullback,
    form=_standardize_form,
    ties=tie_same,
)
def standardize(x: Expr, *, axes: Iterable[int], eps: float = 0.0) -> Expr:
    """(x - mean) / sqrt(variance + eps)."""
    if x.is_complex:
        return _centred(x, axes) / _deviation(x, axes, eps)
    return reduced("standardize", x, axes, eps=float(eps))
