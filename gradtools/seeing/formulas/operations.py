"""Defines the table of operations, each with its NumPy value, pullback and notation.

For a holomorphic function y = f(x), the table contains the derivative f' as an expression in y and
x; the cotangent of x is conj(f') g, where g is the cotangent of y. For other functions, the table
contains the pullback. An operation that selects one entry of each row is represented as a product
with a one-hot array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.seeing.formulas import algebra, expressions
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import apply, conj, mean, real, reshape, spread, total
from gradtools.seeing.formulas.expressions import REAL, Expr, constant_of, expr, lifted, operation
from gradtools.seeing.formulas.typesetting import Written

if TYPE_CHECKING:
    from gradtools.seeing.formulas.writing import Writer


def _entrywise(name: str, evaluate: Callable[..., Any], pullback: Any = None, **more: Any) -> None:
    """Registers an operation whose NumPy function is called with arguments and attributes."""
    operation(name, lambda y, *xs: evaluate(*xs, **dict(y.attributes)), pullback, **more)


# --- functions of one argument

# Definitions of function names, printed below the formulas that use them.
DEFINITIONS = {
    "softplus": "softplus(x) := log(1 + e^x)",
    "sigmoid": "sigmoid(x) := 1 / (1 + e^(-x))",
    "relu": "relu(x) := max(x, 0)",
    "logsumexp": "logsumexpᵢ(x) := log Σᵢ e^x",
    "softmax": "softmaxᵢ(x) := e^x / Σᵢ e^x",
    "var": "varᵢ(x) := meanᵢ |x - meanᵢ x|²",
}
# Maps each elementwise function y = f(x) to its NumPy function and to its derivative, which is a
# function of y and x.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[Expr, Expr], Expr]]] = {
    "exp": (np.exp, lambda y, x: y),
    "log": (np.log, lambda y, x: x**-1),
    "sin": (np.sin, lambda y, x: apply("cos", x)),
    "cos": (np.cos, lambda y, x: -apply("sin", x)),
    "sinh": (np.sinh, lambda y, x: apply("cosh", x)),
    "cosh": (np.cosh, lambda y, x: apply("sinh", x)),
    "tanh": (np.tanh, lambda y, x: 1 - y**2),
    "softplus": (lambda x: np.logaddexp(x, 0), lambda y, x: apply("sigmoid", x)),
    "sigmoid": (lambda x: np.exp(-np.logaddexp(-x, 0)), lambda y, x: y * (1 - y)),
    "relu": (lambda x: np.maximum(x, 0), lambda y, x: indicator(x, 0, ">")),
}
for _name, (_value, _slope) in FUNCTIONS.items():
    _entrywise(_name, _value, lambda y, g, x, slope=_slope: [conj(slope(y, x)) * g])


# --- sums, powers, parts of complex numbers


def _write_sum(w: Writer, x: Expr) -> Written:
    """Writes a sum, with unnamed expressions first, then named values, then numbers."""
    w.axes.letters(x)  # the axes of the sum get letters before other axes
    rank = lambda a: 2 if constant_of(a) is not None else int(w.is_named(a))
    return ts.summed([w.write(a) for a in sorted(x.args, key=rank)])


def _write_power(w: Writer, x: Expr) -> Written:
    base, exponent = w.write(x.args[0]), x["exponent"]
    size, raised = abs(exponent), base
    if size != 1:  # ∘ marks an elementwise power of an array
        raised = ts.power(base, size, "∘" if x.rank > 1 and size != 0.5 else "")
    return ts.over(ts.number(1.0), raised) if exponent < 0 else raised


def _write_cast(w: Writer, x: Expr) -> Written:
    """Writes x + 0i for a cast to complex, because √x and √(x + 0i) differ for negative x."""
    inner = w.write(x.args[0])
    return Written(f"{inner.text} + 0i", ts.SUM) if x.is_complex else inner


operation(
    "add",
    lambda y, *xs: sum(xs[1:], xs[0] + 0.0),
    lambda y, g, *xs: [g] * len(xs),
    form=_write_sum,
)
_entrywise(
    "power",
    lambda x, exponent: np.power(x + 0.0, exponent),
    lambda y, g, x: [conj(y["exponent"] * x ** (y["exponent"] - 1)) * g],
    form=_write_power,
)
_entrywise(
    "abs",
    np.abs,
    lambda y, g, x: [real(g) * (x * y**-1 if x.is_complex else apply("sgn", x))],
    form=lambda w, x: Written(f"|{w.write(x.args[0]).text}|"),
)
_entrywise("sgn", np.sign)
_entrywise("Re", np.real, lambda y, g, x: [real(g)])
_entrywise("Im", np.imag, lambda y, g, x: [1j * real(g)])
_entrywise(
    "conj",
    np.conj,
    lambda y, g, x: [conj(g)],
    form=lambda w, x: ts.superscript(w.write(x.args[0]), "*"),
)
_entrywise("stop", lambda x: x)
_entrywise(
    "cast", lambda x, to: x.astype(expressions.DTYPES[to]), lambda y, g, x: [g], form=_write_cast
)


def stop(x: Expr) -> Expr:
    """Returns the value of x with a zero derivative, like stop_gradient."""
    return x if x.op == "stop" or constant_of(x) is not None else apply("stop", x, kind=x.kind)


# --- comparison and choice

# Maps each relation to NumPy's function, the negated relation, and the printed sign.
_RELATIONS = {
    "<": (np.less, ">=", "<"),
    "<=": (np.less_equal, ">", "≤"),
    ">": (np.greater, "<=", ">"),
    ">=": (np.greater_equal, "<", "≥"),
    "==": (np.equal, "!=", "="),
    "!=": (np.not_equal, "==", "≠"),
}


def indicator(a: Any, b: Any, relation: str) -> Expr:
    """Returns an indicator: 1 where a and b satisfy the relation, and 0 elsewhere."""
    return apply("compare", a, b, kind=expressions.BOOLEAN, relation=relation)


def _pull_where(y: Expr, g: Expr, c: Expr, a: Expr, b: Expr) -> list[Expr | None]:
    otherwise = 1 - c
    if c.op == "compare":
        left, right = c.args
        otherwise = indicator(left, right, _RELATIONS[c["relation"]][1])
    return [None, c * g, otherwise * g]


def _write_compare(w: Writer, x: Expr) -> Written:
    a, b = (w.write(arg).at(ts.PRODUCT).text for arg in x.args)
    return Written(f"1[{a} {_RELATIONS[x['relation']][2]} {b}]")


def _write_where(w: Writer, x: Expr) -> Written:
    c, a, b = (w.write(arg).text for arg in x.args)
    condition = c[2:-1] if x.args[0].op == "compare" and c.startswith("1[") else c
    return Written(f"{{{a} if {condition}; {b} otherwise}}")


_entrywise("compare", lambda a, b, relation: _RELATIONS[relation][0](a, b), form=_write_compare)
_entrywise("where", np.where, _pull_where, form=_write_where)


def where(c: Expr, a: Any, b: Any) -> Expr:
    """Implements numpy.where(c, a, b); returns a or b if c is constant."""
    c, a, b = c if c.kind == expressions.BOOLEAN else indicator(c, 0, "!="), lifted(a), lifted(b)
    mask = c["value"].array if c.op == "array" else None
    if mask is not None and mask.all() == mask.any():
        shape = np.broadcast_shapes(c.shape, a.shape, b.shape)
        return algebra.broadcast(a if mask.all() else b, shape)
    return apply("where", c, a, b, kind=expressions.widest(a.kind, b.kind))


# --- constants, contractions, reshapes


def _einsum(y: Expr, *arrays: np.ndarray) -> np.ndarray:
    """Evaluates an einsum: the coefficient times numpy.einsum, broadcast to the shape."""
    einsum: Any = np.einsum  # NumPy's type stubs lack this form of einsum
    kept = [l for l in range(y.rank) if any(l in names for names in y["labels"])]
    numbers = [a + 0.0 if a.dtype.kind in "bui" else a for a in arrays]
    pairs = zip(numbers, y["labels"], strict=True)
    operands = [part for pair in pairs for part in pair]
    value = einsum(*operands, kept, optimize=len(arrays) > 2) if arrays else np.ones(())
    wide = tuple(slice(None) if l in kept else None for l in range(y.rank))
    return np.broadcast_to(y["coefficient"] * np.asarray(value)[wide], y.shape)


def _pull_einsum(y: Expr, g: Expr, *factors: Expr) -> list[Expr]:
    """Returns, for each factor, g multiplied by the conjugates of the other factors."""
    entries = [(conj(f), names) for f, names in zip(factors, y["labels"], strict=True)]
    result = []
    for k, (factor, labels) in enumerate(zip(factors, y["labels"], strict=True)):
        others = [(g, range(y.rank)), *entries[:k], *entries[k + 1 :]]
        result.append(algebra.product(others, labels, factor.shape, np.conj(y["coefficient"])))
    return result


def _write_reshape(w: Writer, x: Expr) -> Written:
    if x.shape == tuple(n for n in x.args[0].shape if n != 1):
        return w.operand(x.args[0])
    w.note("reshape: row-major")
    return ts.function("reshape", [w.operand(x.args[0])], "x".join(map(str, x.shape)))


operation("array", lambda y: y["value"].array, form=lambda w, x: Written("c"))
operation("einsum", _einsum, _pull_einsum)
operation(
    "reshape",
    lambda y, x: np.reshape(x, y.shape),
    lambda y, g, x: [reshape(g, x.shape)],
    form=_write_reshape,
)


# --- slices and their adjoints


def sliced(x: Expr, *, start: Any, limit: Any, stride: Any = None, drop: Any = ()) -> Expr:
    """Slices each axis as start:limit:stride (stride > 0); removes the length-1 axes in drop."""
    triples = zip(start, limit, stride or (1,) * x.rank, strict=True)
    bounds = tuple((int(a), int(max(a, b)), int(s)) for a, b, s in triples)
    shape = tuple(len(range(*bound)) for bound in bounds)
    part = x if shape == x.shape else expr("slice", (x,), shape, x.kind, bounds=bounds)
    return reshape(part, [n for a, n in enumerate(shape) if a not in drop])


def split(x: Expr, *, sizes: Sequence[int], axis: int) -> list[Expr]:
    """Splits x along an axis into consecutive slices of the given sizes."""
    at = lambda n, others: [n if a == axis else other for a, other in enumerate(others)]
    pairs = zip(accumulate(sizes), sizes, strict=True)
    return [sliced(x, start=at(e - n, (0,) * x.rank), limit=at(e, x.shape)) for e, n in pairs]


def _selected(y: Expr) -> tuple[slice, ...]:
    return tuple(slice(*bound) for bound in y["bounds"])


def _embedded(y: Expr, g: np.ndarray) -> np.ndarray:
    out = np.zeros(y.shape, g.dtype)
    out[_selected(y)] = g
    return out


def _write_part(w: Writer, y: Expr) -> Written:
    """Writes a slice in NumPy's notation, or its adjoint, which pads with zeros."""
    (x,) = y.args
    pieces = []
    for (first, last, step), n in zip(y["bounds"], map(max, x.shape, y.shape), strict=True):
        along = f"{first or ''}:{'' if last >= n else last}" + f":{step}" * (step > 1)
        pieces.append(str(first) if last - first == 1 < n else along)
    at = ", ".join(pieces)
    if y.op == "slice":
        return Written(f"{w.operand(x).at(ts.ATOM).text}[{at}]")
    w.note("into[...](x): an array of zeros with x at these indices")
    return Written(f"into[{at}]({w.operand(x).text})")


_adjoint_part = lambda y, g, x: [
    expr("into" if y.op == "slice" else "slice", (g,), x.shape, g.kind, bounds=y["bounds"])
]
operation("slice", lambda y, x: x[_selected(y)], _adjoint_part, form=_write_part)
operation("into", _embedded, _adjoint_part, form=_write_part)


# --- one entry of each row

operation(
    "one_hot",  # appends an axis with 1 at i; a negative i counts from the end
    lambda y, i: (np.asarray(i)[..., None] % y["size"] == np.arange(y["size"])) * 1.0,
    form=lambda w, x: ts.function("onehot", [w.write(x.args[0])]),
)


def one_hot(i: Expr, *, size: int) -> Expr:
    """Appends an axis of length `size` with 1 at index i and 0 elsewhere."""
    return expr("one_hot", (i,), (*i.shape, size), REAL, size=size)


def picked(x: Expr, i: Expr) -> Expr:
    """Returns entry i of each row of x, as a sum over the product of x and a one-hot array."""
    return total(x * one_hot(i, size=x.shape[-1]), [x.rank - 1])


def take_along(x: Expr, i: Expr, *, axis: int) -> Expr | None:
    """Implements numpy.take_along_axis for one entry per row; returns None for other shapes."""
    rest = lambda of: (*of.shape[:axis], *of.shape[axis + 1 :])
    if not (x.rank and i.rank) or i.shape[axis] != 1 or rest(x) != rest(i):
        return None
    last = algebra.transpose(x, [*(a for a in range(x.rank) if a != axis), axis])
    return reshape(picked(last, reshape(i, rest(i))), i.shape)


# --- reductions, softmax and standardization along axes


def _write_along(w: Writer, y: Expr) -> Written:
    """Writes a reduction or softmax, with its axes as a subscript unless all axes are reduced."""
    x, axes = y.args[0], y["axes"]
    letters = w.axes.unique(x)
    below = "".join(letters[a] for a in axes) if len(axes) < x.rank else ""
    if y.op == "norm":
        return Written(f"‖{w.operand(x).text}‖" + (ts.below(below) if below else ""))
    if y.op == "standardize" and y["eps"]:
        eps = f"ε = {ts.number(y['eps']).text}"
        w.note(f"standardize(x) = (x - mean(x)) / √(var(x) + ε), {eps}, over the indexed axes")
    return ts.function(y.op, [w.operand(x)], below)


def _logsumexp(x: np.ndarray, axes: tuple[int, ...], keepdims: bool = False) -> np.ndarray:
    top = np.max(x.real, axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)  # e^(x - top) does not overflow
    result = np.log(np.exp(x - top).sum(axes, keepdims=True)) + top
    return result if keepdims else result.squeeze(axes)


def _standardize(x: np.ndarray, axes: tuple[int, ...], eps: float) -> np.ndarray:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def _pull_logsumexp(y: Expr, g: Expr, x: Expr, axes: tuple[int, ...]) -> Expr:
    return conj(softmax(x, axis=axes[0]) if len(axes) == 1 else apply("exp", x - y)) * g


def _pull_variance(y: Expr, g: Expr, x: Expr, axes: tuple[int, ...]) -> Expr:
    return 2 / prod(x.shape[a] for a in axes) * (algebra.centred(x, axes) * real(g))


def _pull_standardize(y: Expr, g: Expr, x: Expr, axes: tuple[int, ...]) -> Expr:
    """Returns the cotangent of x: (g - mean(g) - y mean(y g)) / sqrt(var(x) + eps)."""
    inner = algebra.plus(g, -mean(g, axes, keep=True), -(y * mean(y * g, axes, keep=True)))
    return inner / (along("var", x, axes, keep=True) + y["eps"]) ** 0.5


# Every entry that equals the maximum or minimum receives the full cotangent.
_pull_extreme = lambda y, g, x, axes: indicator(x, y, "==") * g
_euclidean = lambda x, axes: np.sqrt((np.abs(x) ** 2).sum(axes))
_softmax = lambda x, axes: np.exp(x - _logsumexp(x, axes, keepdims=True))
_pull_softmax = lambda y, g, x, axes: conj(y) * (g - total(conj(y) * g, axes, keep=True))
# Maps each function y = f(x) to its NumPy function of x and axes, and to its pullback. The
# arguments of the pullback are y, the cotangent g, x and axes; y and g are broadcast to the shape
# of x.
_ALONG: dict[str, tuple[Callable[..., Any], Callable[..., Expr]]] = {
    "max": (np.max, _pull_extreme),
    "min": (np.min, _pull_extreme),
    "norm": (_euclidean, lambda y, g, x, axes: x * (real(g) / y)),
    "logsumexp": (_logsumexp, _pull_logsumexp),
    "var": (np.var, _pull_variance),
    "softmax": (_softmax, _pull_softmax),
    "standardize": (_standardize, _pull_standardize),
}


def _pull_along(y: Expr, g: Expr, x: Expr) -> list[Expr]:
    wide = lambda z: z if z.rank == x.rank else spread(z, y["axes"], x.shape)
    return [_ALONG[y.op][1](wide(y), wide(g), x, y["axes"])]


for _name, (_value, _) in _ALONG.items():
    _of_axes = lambda y, x, value=_value: value(x, *(v for _, v in y.attributes))
    operation(_name, _of_axes, _pull_along, form=_write_along)


def along(
    name: str, x: Expr, axes: Iterable[int] | None = None, keep: bool = False, **more: Any
) -> Expr:
    """Applies a reduction or a function along axes (default: all); returns x if axes is empty."""
    axes = tuple(range(x.rank) if axes is None else sorted(axes))
    if not axes:
        return x
    if name in ("softmax", "standardize"):
        return expr(name, (x,), x.shape, x.kind, axes=axes, **more)
    kind = REAL if name in ("norm", "var") else x.kind
    shape = [n for a, n in enumerate(x.shape) if a not in axes]
    result = expr(name, (x,), shape, kind, axes=axes)
    return algebra.unsqueeze(result, axes) if keep else result


def softmax(x: Expr, *, axis: int) -> Expr:
    """Divides exp(x) by its sum along an axis; treats a scalar as an array of length 1."""
    return along("softmax", x, [axis]) if x.rank else expressions.full(1.0, ())
