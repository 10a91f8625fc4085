"""Operations along axes: reductions, norms, the softmax family, and standardization."""

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
from gradtools.seeing.formulas.expressions import REAL, Expr
from gradtools.seeing.formulas.operation_record import Form, Make, operation, word
from gradtools.seeing.formulas.operations.elementwise import indicator

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import ExpressionWriter


def letters_below(w: ExpressionWriter, y: Expr) -> str:
    """The letters of the axes along which y is computed; empty where these are all."""
    x, axis = y.args[0], y.get("axis")
    axes = y["axes"] if axis is None else (axis,)
    letters = w.axes.unique(x)
    return "".join(letters[a] for a in axes) if len(axes) < x.rank else ""


def _form_along(name: str) -> Form:
    """A form that writes a function with the letters of its axes below."""
    return lambda w, x: ts.function(name, [w.operand(x.args[0])], letters_below(w, x))


def reduced(name: str, x: Expr, axes: Iterable[int] | None = None, keep: bool = False) -> Expr:
    """A registered reduction over axes, by default all; they are removed, or kept with length 1."""
    axes = tuple(range(x.rank) if axes is None else sorted(axes))
    result = apply(name, x, axes=axes)
    return unsqueeze(result, axes) if keep else result


def _reduction(
    name: str,
    evaluate: Callable[..., Any],
    pullback: Callable[..., Expr],
    *,
    kind: str = "",
    **known: Any,
) -> Callable[..., Any]:
    """Register a reduction, whose kind is by default that of its argument.

    It is computed in NumPy from the argument and the axes; its pullback is a function of the value
    and the cotangent, both broadcast to the argument, the argument and the axes.
    """

    def pulled(y: Expr, g: Expr, x: Expr) -> list[Expr]:
        axes = y["axes"]
        return [pullback(spread(y, axes, x.shape), spread(g, axes, x.shape), x, axes)]

    def make(x: Expr, *, axes: Any = None, keep: bool = False) -> Expr:
        return reduced(name, x, axes, keep) if x.rank and axes not in ((), []) else x

    def result(x: Expr, axes: tuple[int, ...]) -> tuple[Any, str]:
        return [n for a, n in enumerate(x.shape) if a not in axes], kind or x.kind

    def labels(y: Expr) -> list[list[int | None]]:
        kept = iter(range(y.rank))
        return [[None if a in y["axes"] else next(kept) for a in range(y.args[0].rank)]]

    given = {"make": make, "form": _form_along(name), "result": result, "labels": labels, **known}
    return operation(name, lambda y, x: evaluate(x, y["axes"]), pulled, **given)


word("sum", lambda x, *, axes=None, keep=False: total(x, axes, keep))
word("mean", lambda x, *, axes=None, keep=False: mean(x, axes, keep))
# The cotangent of a maximum or minimum is that of all entries which equal it.
_extreme_pullback = lambda y, g, x, axes: indicator(x, "==", y) * g
_reduction("max", np.max, _extreme_pullback)
_reduction("min", np.min, _extreme_pullback)
_reduction("prod", np.prod, lambda y, g, x, axes: conj(y) * g / conj(x))


def _norm_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    below = letters_below(w, x)
    return ts.Written(f"‖{w.operand(x.args[0]).text}‖" + (ts.below(below) if below else ""))


@_reduction(
    "norm",
    lambda x, axes: np.sqrt((np.abs(x) ** 2).sum(axes)),
    lambda y, g, x, axes: x * (real(g) / y),
    kind=REAL,
    form=_norm_form,
)
def norm(x: Expr, *, axes: Any = None, ord: Any = 2, keep: bool = False) -> Expr | None:
    """(sum |x|**ord)**(1/ord) of a positive finite ord; None for any other."""
    if ord == 2:
        return reduced("norm", x, axes, keep)
    size = apply("abs", x)
    return total(size**ord, axes, keep) ** (1 / ord) if 0 < ord < np.inf else None


# The softmax family.


def _along(name: str, evaluate: Make, pullback: Callable[..., Expr], **known: Any) -> None:
    """Register a function along one axis; a scalar is an axis of length 1."""

    def make(x: Expr, *, axis: int) -> Expr:
        if x.rank:
            return apply(name, x, axis=axis)
        return reshape(apply(name, reshape(x, (1,)), axis=0), ())

    operation(
        name,
        lambda y, x: evaluate(x, y["axis"]),
        lambda y, g, x: [pullback(y, g, x, y["axis"])],
        make=make,
        form=_form_along(name.replace("_", " ")),
        **known,
    )


def _finite_top(x: np.ndarray, axes: Any) -> np.ndarray:
    """The maximum along the axes, 0 where it is infinite: e^(x - top) does not overflow."""
    top = np.max(x.real, axes, keepdims=True)
    return np.where(np.isfinite(top), top, 0)


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - _finite_top(x, axis))
    return e / e.sum(axis, keepdims=True)


def _log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    x = x - np.max(x.real, axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


_along(
    "softmax",
    _softmax,
    lambda y, g, x, axis: conj(y) * (g - total(conj(y) * g, [axis], keep=True)),
    definition="softmaxᵢ(x) := e^x / Σᵢ e^x",
)
_along(
    "log_softmax",
    _log_softmax,
    lambda y, g, x, axis: g - conj(apply("softmax", x, axis=axis)) * total(g, [axis], keep=True),
    definition="log softmaxᵢ(x) := x - log Σᵢ e^x",
)


def _logsumexp(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    top = _finite_top(x, axes)
    return np.log(np.exp(x - top).sum(axes)) + top.squeeze(axes)


_reduction(
    "logsumexp",
    _logsumexp,
    lambda y, g, x, axes: (
        conj(apply("softmax", x, axis=axes[0]) if len(axes) == 1 else apply("exp", x - y)) * g
    ),
    definition="logsumexpᵢ(x) := log Σᵢ e^x",
)

# Variance and standardization.


def _centred(x: Expr, axes: Iterable[int]) -> Expr:
    return x - mean(x, axes, keep=True)


def _count(x: Expr, axes: Iterable[int] | None) -> int:
    return prod(x.shape if axes is None else (x.shape[a] for a in axes))


@_reduction(
    "variance",
    np.var,
    lambda y, g, x, axes: 2 / _count(x, axes) * (_centred(x, axes) * real(g)),
    kind=REAL,
    form=_form_along("var"),
    definition="varᵢ(x) := meanᵢ |x - meanᵢ x|²",
)
def variance(x: Expr, *, axes: Any = None, correction: float = 0, keep: bool = False) -> Expr:
    """sum(abs(x - mean)**2) / (n - correction)."""
    n, result = _count(x, axes), reduced("variance", x, axes, keep)
    return n / (n - correction) * result if n > correction else result * np.nan


word(
    "deviation",
    lambda x, *, axes=None, correction=0, keep=False: (
        variance(x, axes=axes, correction=correction, keep=keep) ** 0.5
    ),
)


def _deviation(x: Expr, axes: Iterable[int], eps: float) -> Expr:
    """sqrt(variance + eps), broadcast to x."""
    return spread((variance(x, axes=axes) + eps) ** 0.5, axes, x.shape)


def _standardize(y: Expr, x: np.ndarray) -> np.ndarray:
    axes = y["axes"]
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + y["eps"])


def _standardize_pullback(y: Expr, g: Expr, x: Expr) -> list[Expr]:
    """(g - mean g - y mean(y g)) / deviation."""
    axes = y["axes"]
    inner = plus(g, -mean(g, axes, keep=True), -(y * mean(y * g, axes, keep=True)))
    return [inner / _deviation(x, axes, y["eps"])]


def _standardize_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    if x["eps"]:
        w.note(
            "standardize(x) = (x - mean(x)) / √(var(x) + ε), "
            f"ε = {ts.number(x['eps']).text}, over the axes below"
        )
    return _form_along("standardize")(w, x)


@operation("standardize", _standardize, _standardize_pullback, form=_standardize_form)
def standardize(x: Expr, *, axes: Iterable[int], eps: float = 0.0) -> Expr:
    """(x - mean) / sqrt(variance + eps)."""
    if x.is_complex:
        return _centred(x, axes) / _deviation(x, axes, eps)
    return apply("standardize", x, axes=tuple(sorted(axes)), eps=float(eps))
