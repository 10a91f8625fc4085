"""Along axes: sums and other reductions, norms, and what runs along an axis."""

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
    real,
    reshape,
    spread,
    total,
    unsqueeze,
)
from gradtools.seeing.formulas.expressions import BOOLEAN, INTEGER, REAL, Expr
from gradtools.seeing.formulas.operation_record import Cotangents, Form
from gradtools.seeing.formulas.operations.elementwise import indicator
from gradtools.seeing.formulas.operations.entering import (
    Lowering,
    lowers,
    operation,
    tie_same,
    word,
)

if TYPE_CHECKING:
    from gradtools.seeing.formulas.axes import Axes
    from gradtools.seeing.formulas.writing import ExpressionWriter


def all_axes(x: Expr, axes: Iterable[int] | None) -> tuple[int, ...]:
    """The axes; all where none are named."""
    return tuple(range(x.rank)) if axes is None else tuple(axes)


def kept(result: Expr, axes: Sequence[int], keep: bool) -> Expr:
    """With axes of length 1 where it was reduced, if they are kept."""
    return unsqueeze(result, axes) if keep else result


def reduced(name: str, x: Expr, axes: Iterable[int], **attributes: Any) -> Expr:
    """A reduction over axes, without keeping them."""
    return apply(name, x, axes=tuple(sorted(axes)), **attributes)


@lowers("sum")
def _sum(x: Expr, *, axes: Any = None, keep: bool = False) -> Expr:
    """Sum over axes."""
    result = total(x, all_axes(x, axes), keep)
    return apply("cast", result, to=INTEGER) if x.kind in (INTEGER, BOOLEAN) else result


word("mean", lambda x, *, axes=None, keep=False: mean(x, all_axes(x, axes), keep))

# What is gone over axes.


def reduction_form(name: str) -> Form:
    """A function over axes."""

    def form(w: ExpressionWriter, x: Expr) -> ts.Written:
        return ts.function(name, [w.whole(x.args[0])], below_of(w, x))

    return form


def tie_reduced(axes: Axes, y: Expr) -> None:
    """The axes that are left."""
    (x,) = y.args
    for k, a in enumerate(a for a in range(x.rank) if a not in _gone(y)):
        axes.tie((y, k), (x, a))


def _gone(y: Expr) -> tuple[int, ...]:
    """The axes over which it goes."""
    return (y["axis"],) if y.op == "argmax" else y["axes"]


def below_of(w: ExpressionWriter, y: Expr) -> str:
    """The letters of these axes; none where they are all."""
    a = y.args[0]
    return w.axis_names(a, _gone(y)) if len(_gone(y)) < a.rank else ""


def left_over(kind: str = "") -> Callable[..., Any]:
    """The shape without the axes, and the kind, by default that of the argument."""

    def shape(x: Expr, axes: Sequence[int], **attributes: Any) -> tuple[Any, str]:
        return [n for a, n in enumerate(x.shape) if a not in axes], kind or x.kind

    return shape


def reduction(name: str, evaluate: Any, pullback: Any = None, kind: str = "", **known: Any) -> None:
    """Something over axes that are gone in the result; over none, nothing."""

    def lowered(x: Expr, *, axes: Any = None, keep: bool = False) -> Expr:
        axes = all_axes(x, axes)
        return kept(reduced(name, x, axes), axes, keep) if axes else x

    operation(
        name,
        evaluate,
        pullback,
        result=left_over(kind),
        form=reduction_form(name),
        ties=tie_reduced,
        lower=lowered,
        **known,
    )


def _over_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda y, x: function(x, y["axes"])


def _extreme_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """The cotangent where x is the extreme: 1[x = y] g."""
    at = indicator(x, "==", spread(y, y["axes"], x.shape))
    return [at * spread(g, y["axes"], x.shape)]


reduction("max", _over_axes(np.max), _extreme_pullback)
reduction("min", _over_axes(np.min), _extreme_pullback)
reduction(
    "prod",
    _over_axes(np.prod),
    lambda y, g, x: [spread(conj(y) * g, y["axes"], x.shape) / conj(x)],
)
reduction("any", _over_axes(np.any), kind=BOOLEAN)
reduction("all", _over_axes(np.all), kind=BOOLEAN)


@lowers(
    "argmax",
    operation,
    lambda y, x: np.argmax(x, y["axis"]),
    result=lambda x, axis: left_over(INTEGER)(x, (axis,)),
    form=reduction_form("argmax"),
    ties=tie_reduced,
)
def _argmax(x: Expr, *, axis: int | None = None, keep: bool = False) -> Expr:
    """Integer; without axis of all in their order."""
    if axis is None or not x.rank:
        shape = (1,) * (x.rank if keep else 0)
        return reshape(_argmax(reshape(x, (prod(x.shape),)), axis=0), shape)
    return kept(apply("argmax", x, axis=axis), [axis], keep)


word("argmin", lambda x, *, axis=None, keep=False: _argmax(-x, axis=axis, keep=keep))


def _not_zero(x: Expr) -> Expr:
    return apply("cast", indicator(x, "!=", 0), to=INTEGER)


word(
    "count_nonzero",
    lambda x, *, axis=None, axes=None: _sum(_not_zero(x), axes=axes if axis is None else (axis,)),
)

# Norms.


def _norm_form(w: ExpressionWriter, x: Expr) -> ts.Written:
    inner = w.whole(x.args[0])
    below = below_of(w, x)
    low = f"_{{{below}}}" if below else ""
    return ts.Written(
        f"‖{inner.text}‖" + (ts.below(below) if below else ""),
        rf"\left\|{inner.latex}\right\|{low}",
    )


@lowers(
    "norm",
    operation,
    lambda y, x: np.sqrt((np.abs(x) ** 2).sum(y["axes"])),
    lambda y, g, x: [x * spread(real(g) / y, y["axes"], x.shape)],
    result=left_over(REAL),
    form=_norm_form,
    ties=tie_reduced,
)
def _norm(x: Expr, *, axes: Any = None, ord: Any = 2, keep: bool = False) -> Expr:
    """(sum |x|**ord)**(1/ord); ord: 2, 1, inf, any number; of 0 the count of what is not 0."""
    axes = all_axes(x, axes)
    size = apply("abs", x)
    if ord == 2:
        result = reduced("norm", x, axes)
    elif abs(ord) == np.inf:
        result = reduced("max" if ord > 0 else "min", size, axes) if axes else size
    elif ord == 1:
        result = total(size, axes)
    elif ord == 0:
        result = total(_not_zero(x), axes)
    else:
        result = total(size**ord, axes) ** (1 / ord)
    return kept(result, axes, keep)


@lowers("cdist")
def _cdist(a: Expr, b: Expr, *, p: float = 2.0) -> Expr:
    """Norms of a_i - b_j."""
    between = unsqueeze(a, [a.rank - 1]) - unsqueeze(b, [b.rank - 2])
    return _norm(between, axes=(between.rank - 1,), ord=float(p))


# Running ones, and others along one axis.


def along_form(name: str, latex: str = "") -> Form:
    """A function along one axis."""

    def form(w: ExpressionWriter, x: Expr) -> ts.Written:
        below = w.axis_names(x.args[0], [x["axis"]]) if x.args[0].rank > 1 else ""
        shown = name + ("←" if x.get("reverse") else "")
        return ts.function(shown, [w.whole(a) for a in x.args], below, latex)

    return form


def _running(run: Callable[..., Any]) -> Callable[..., Any]:
    """What a running function gives along an axis, from either end."""

    def value(y: Expr, x: np.ndarray) -> np.ndarray:
        axis = y["axis"]
        flip = (lambda v: np.flip(v, axis)) if y["reverse"] else lambda v: v
        return flip(run(flip(x), axis))

    return value


def _cumulative(name: str, evaluate: Any, pullback: Any = None) -> None:
    """Something that runs along an axis, from either end."""
    operation(
        name,
        _running(evaluate),
        pullback,
        form=along_form(name),
        ties=tie_same,
        lower=lambda x, *, axis, reverse=False: (
            apply(name, x, axis=axis, reverse=bool(reverse)) if x.rank else x
        ),
    )


def _running_sum(x: Expr, axis: int, reverse: bool) -> Expr:
    """A running sum."""
    return apply("cumsum", x, axis=axis, reverse=reverse)


def _logcumsumexp_pullback(y: Expr, g: Expr, x: Expr) -> Cotangents:
    """e**x times the running sum of g e**-y from behind."""
    weights = conj(apply("exp", -y))
    weighted = _running_sum(g * weights, y["axis"], not y["reverse"])
    return [conj(apply("exp", x)) * weighted]


_cumulative("cumsum", np.cumsum, lambda y, g, x: [_running_sum(g, y["axis"], not y["reverse"])])
_cumulative(
    "cumprod",
    np.cumprod,
    lambda y, g, x: [_running_sum(conj(y) * g, y["axis"], not y["reverse"]) / conj(x)],
)
_cumulative("logcumsumexp", np.logaddexp.accumulate, _logcumsumexp_pullback)


def _cumargmax(y: Expr, x: np.ndarray) -> np.ndarray:
    """Where the running maximum stands."""
    axis, n = y["axis"], x.shape[y["axis"]]
    x = np.moveaxis(x, axis, 0)
    out = np.zeros(x.shape, np.int64)
    at = np.full(x.shape[1:], n - 1 if y["reverse"] else 0)
    for t in range(n)[:: -1 if y["reverse"] else 1]:
        best = np.take_along_axis(x, at[None], 0)[0]
        out[t] = at = np.where(x[t] >= best, t, at)
    return np.moveaxis(out, 0, axis)


operation(
    "cumargmax",
    _cumargmax,
    result=lambda x, **_: (x.shape, INTEGER),
    form=along_form("cumargmax"),
    ties=tie_same,
)


def _cumulative_extreme(sign: float) -> Lowering:
    def lowered(x: Expr, *, axis: int, reverse: bool = False) -> Expr:
        if not x.rank:
            return x
        signed = x if sign > 0 else -x
        i = apply("cumargmax", signed, axis=axis, reverse=bool(reverse))
        return apply("take_along", x, i, axis=axis)

    return lowered


word("cummax", _cumulative_extreme(1.0))
word("cummin", _cumulative_extreme(-1.0))
