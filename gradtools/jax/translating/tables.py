"""JAX's primitives in the vocabulary of formulas: one line for each.

A translation takes the writer, the parameters of an equation and the numbers of its operands; it
writes nodes, and returns the number of the result or a list of them. ``None`` says that there is
no word for it: the equation then keeps its name and is marked. What holds programs inside stands
in `translating/calls.py`, what gathers and scatters in `translating/indexing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Params = Mapping[str, Any]
Translation = Callable[..., Any]

SAME = {
    native: line.split()[0]
    for line in """
        identity    copy copy_p reduce_precision pvary pbroadcast device_put
        identity    gradtools_reverse_only
        stop        stop_gradient
        negate      neg
        exp         exp
        exp2        exp2
        expm1       expm1
        log         log
        log1p       log1p
        log2        log2
        sqrt        sqrt
        rsqrt       rsqrt
        cbrt        cbrt
        square      square
        sin         sin
        cos         cos
        tan         tan
        sinh        sinh
        cosh        cosh
        tanh        tanh
        arcsin      asin
        arccos      acos
        arctan      atan
        arcsinh     asinh
        arccosh     acosh
        arctanh     atanh
        sigmoid     logistic
        erf         erf
        erfc        erfc
        erfinv      erf_inv
        lgamma      lgamma
        digamma     digamma
        abs         abs
        sign        sign
        floor       floor
        ceil        ceil
        real        real
        imag        imag
        conj        conj
        is_finite   is_finite
        add         add add_any
        subtract    sub
        multiply    mul
        power       pow
        maximum     max
        minimum     min
        arctan2     atan2
        complex     complex
    """.strip().splitlines()
    for native in line.split()[1:]
}
RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
RELATIONS |= {"eq_to": "==", "lt_to": "<", "le_to": "<="}  # the total order of a sort
LOGIC = {"and": "logical_and", "or": "logical_or", "xor": "logical_xor", "not": "logical_not"}


def axes_of(p: Params, name: str = "axes") -> tuple[int, ...]:
    """A parameter that lists axes."""
    return tuple(int(a) for a in p[name])


def _reduced(operation: str) -> Translation:
    def translation(w: Any, p: Params, x: int) -> int:
        return w(operation, x, axes=axes_of(p)) if axes_of(p) else x

    return translation


def _cumulative(operation: str) -> Translation:
    return lambda w, p, x: w(operation, x, axis=int(p["axis"]), reverse=bool(p["reverse"]))


def _along(operation: str) -> Translation:
    return lambda w, p, x: w(operation, x, axis=axes_of(p)[0]) if len(p["axes"]) == 1 else None


def _compared(relation: str) -> Translation:
    return lambda w, p, a, b: w("compare", a, b, relation=relation)


def _logical(operation: str) -> Translation:
    """Of booleans; the same primitives work on bits."""
    return lambda w, p, *xs: w(operation, *xs) if all(map(w.is_boolean, xs)) else None


def _cast(w: Any, p: Params, x: int) -> int:
    """To another kind, or to less precision than was given; otherwise nothing is said."""
    dtype = np.dtype(p["new_dtype"])
    narrower = w.is_inexact(x) and dtype.itemsize < w.itemsize(x)
    return x if w.kind_is(x, str(dtype)) and not narrower else w("cast", x, dtype=str(dtype))


def _divided(w: Any, p: Params, a: int, b: int) -> int:
    """A quotient of integers is rounded towards zero."""
    result = w("divide", a, b)
    return result if w.is_inexact(a) else w("cast", result, dtype="int64")


def _remainder(w: Any, p: Params, a: int, b: int) -> int:
    """With the sign of a, as in C."""
    return w("subtract", a, w("multiply", b, w("trunc", w("divide", a, b))))


def _rounded(w: Any, p: Params, x: int) -> Any:
    if int(p["rounding_method"]) == 1:
        return w("round", x)
    half = w.constant(0.5)
    return w("multiply", w("sign", x), w("floor", w("add", w("abs", x), half)))


def _integer_power(w: Any, p: Params, x: int) -> int:
    return w("square", x) if p["y"] == 2 else w("power", x, w.constant(float(p["y"])))


def _polynomial(w: Any, p: Params, x: int, *coefficients: int) -> int:
    """The lowest coefficient comes first; by Horner's rule."""
    result = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        result = w("add", c, w("multiply", x, result))
    return result if w.shape(result) == w.shape(x) else w("broadcast", result, shape=w.shape(x))


def _selected(w: Any, p: Params, which: int, *cases: int) -> int:
    """The case that `which` says; a condition that is known everywhere takes one case whole."""
    known = w.value(which)
    if known is not None and known.size and np.all(known == known.flat[0]):
        return cases[int(known.flat[0])]
    if not w.is_boolean(which):
        return _case(w, which, cases)
    if w.is_wrapped_index(which, *cases):
        return cases[0]
    return _triangle(w, known, *cases) or w("where", which, cases[1], cases[0])


def _case(w: Any, which: int, cases: Sequence[int]) -> int:
    result = cases[-1]
    for k in reversed(range(len(cases) - 1)):
        result = w("where", w("compare", which, w.constant(k), relation="=="), cases[k], result)
    return result


def _triangle(w: Any, mask: Any, no: int, yes: int) -> int | None:
    """Zero outside of a triangle of the last two axes."""
    for outside, inside, part in ((no, yes, mask), (yes, no, None if mask is None else ~mask)):
        if part is None or part.ndim < 2 or part.shape != w.shape(inside) or not w.is_zero(outside):
            continue
        if w.made_by(inside) == "cholesky" and np.array_equal(part, np.tril(np.ones_like(part))):
            return inside
        for upper, cut in ((False, np.tril), (True, np.triu)):
            n, m = part.shape[-2:]
            for k in range(-n, m + 1):
                if np.array_equal(part, cut(np.ones_like(part), k)):
                    return w("triangle", inside, upper=upper, offset=k)
    return None


def _clamped(w: Any, p: Params, low: int, x: int, high: int) -> int:
    a, b = w.scalar(low), w.scalar(high)
    if a is not None and b is not None:
        return w("clip", x, low=a, high=b)
    return w("minimum", w("maximum", x, low), high)


def _broadcast(w: Any, p: Params, x: int, *_: int) -> int:
    axes = axes_of(p, "broadcast_dimensions")
    return w("broadcast", x, shape=axes_of(p, "shape"), axes=axes)


def _squeezed(w: Any, p: Params, x: int) -> int:
    gone = axes_of(p, "dimensions")
    shape = tuple(n for a, n in enumerate(w.shape(x)) if a not in gone)
    return w("reshape", x, shape=shape)


def _reshaped(w: Any, p: Params, x: int, *_: int) -> Any:
    if p.get("dimensions") is not None:
        return None
    return w("reshape", x, shape=axes_of(p, "new_sizes"))


def _tiled(w: Any, p: Params, x: int) -> int:
    """Each axis n repeated r times: a new axis r before it, merged with it."""
    shape, reps = w.shape(x), axes_of(p, "reps")
    wide = tuple(k for r, n in zip(reps, shape, strict=True) for k in (r, n))
    at = tuple(2 * a + 1 for a in range(len(shape)))
    merged = tuple(r * n for r, n in zip(reps, shape, strict=True))
    return w("reshape", w("broadcast", x, shape=wide, axes=at), shape=merged)


def _unstacked(w: Any, p: Params, x: int) -> list[int]:
    axis, shape = int(p["axis"]), w.shape(x)
    left = tuple(n for a, n in enumerate(shape) if a != axis)
    parts = w("split", x, sizes=(1,) * shape[axis], axis=axis)
    return [w("reshape", part, shape=left) for part in parts]


def _padded(w: Any, p: Params, x: int, value: int) -> Any:
    low, high, interior = (
        tuple(int(n) for n in ns) for ns in zip(*p["padding_config"], strict=True)
    )
    number = w.scalar(value)
    if number is None:
        return None
    return w("pad", x, low=low, high=high, interior=interior, value=number)


def _sliced(w: Any, p: Params, x: int) -> int:
    stride = p["strides"] or (1,) * len(w.shape(x))
    start, limit = axes_of(p, "start_indices"), axes_of(p, "limit_indices")
    return w("slice", x, start=start, limit=limit, stride=tuple(int(s) for s in stride))


def window(w: Any, p: Params, x: int, *starts: int) -> int:
    """The translation of ``dynamic_slice``; a ``slice`` where it is known where it starts."""
    sizes = axes_of(p, "slice_sizes")
    known = [w.value(s) for s in starts]
    if any(s is None for s in known):
        starts = [w.within(s, n - m) for s, n, m in zip(starts, w.shape(x), sizes, strict=True)]
        return w("dynamic_slice", x, *starts, sizes=sizes)
    start = [min(max(int(s), 0), n - m) for s, n, m in zip(known, w.shape(x), sizes, strict=True)]
    limit = tuple(a + m for a, m in zip(start, sizes, strict=True))
    return w("slice", x, start=tuple(start), limit=limit)


def updated(w: Any, p: Params, x: int, u: int, *starts: int) -> int:
    """The translation of ``dynamic_update_slice``."""
    sizes = zip(starts, w.shape(x), w.shape(u), strict=True)
    return w("dynamic_update", x, u, *[w.within(s, n - m) for s, n, m in sizes])


def _sorted(w: Any, p: Params, *xs: int) -> Any:
    """Of several operands the first is the key, and the others follow it."""
    axis = int(p["dimension"])
    if int(p["num_keys"]) > 1:
        return None
    values, places = w("sort", xs[0], axis=axis)
    follow = lambda x: places if w.counts_along(x, axis) else w("take_along", x, places, axis=axis)
    return [values, *map(follow, xs[1:])]


def _top(w: Any, p: Params, x: int) -> list[int]:
    axis = int(p.get("axis", -1)) % len(w.shape(x))
    return list(w("topk", x, k=int(p["k"]), axis=axis))


# --- products and layers -----------------------------------------------------------------

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _dot(w: Any, p: Params, a: int, b: int) -> int:
    """Batch axes lead, then what is left of a, then of b."""
    (sum_a, sum_b), (batch_a, batch_b) = p["dimension_numbers"]
    letters = iter(_LETTERS)
    left = [next(letters) for _ in w.shape(a)]
    right = [""] * len(w.shape(b))
    for i, j in (*zip(batch_a, batch_b, strict=True), *zip(sum_a, sum_b, strict=True)):
        right[j] = left[i]
    right = [name or next(letters) for name in right]
    gone_a, gone_b = {*batch_a, *sum_a}, {*batch_b, *sum_b}
    out = [left[i] for i in batch_a]
    out += [n for i, n in enumerate(left) if i not in gone_a]
    out += [n for j, n in enumerate(right) if j not in gone_b]
    return w("einsum", a, b, subscripts=f"{''.join(left)},{''.join(right)}->{''.join(out)}")


def _convolved(w: Any, p: Params, x: int, k: int) -> Any:
    if p["batch_group_count"] != 1:
        return None
    lhs, rhs, out = p["dimension_numbers"]
    result = w(
        "convolution",
        _turned(w, x, lhs),
        _turned(w, k, rhs),
        stride=axes_of(p, "window_strides"),
        padding=_pairs(p["padding"]),
        dilation=axes_of(p, "rhs_dilation"),
        input_dilation=axes_of(p, "lhs_dilation"),
        groups=int(p["feature_group_count"]),
    )
    return _turned(w, result, np.argsort(out))


def _turned(w: Any, x: int, permutation: Any) -> int:
    """x with its axes in this order."""
    order = tuple(int(a) for a in permutation)
    return x if order == tuple(range(len(order))) else w("transpose", x, permutation=order)


def _pairs(padding: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(a), int(b)) for a, b in padding)


def _pooled(operation: str, fill: float = 0.0) -> Translation:
    """Leading axes with a window of one are left out, so that it reads as elsewhere."""

    def translation(w: Any, p: Params, x: int) -> Any:
        window, stride = axes_of(p, "window_dimensions"), axes_of(p, "window_strides")
        padding, dilation = _pairs(p["padding"]), axes_of(p, "window_dilation")
        base = axes_of(p, "base_dilation")
        if any(d != 1 for d in dilation) and operation == "sum_pool":
            return None
        if any(d != 1 for d in base):
            none = (0,) * len(base)
            x = w("pad", x, low=none, high=none, interior=tuple(d - 1 for d in base), value=fill)
        trivial = [t == (1, 1, (0, 0)) for t in zip(window, stride, padding, strict=True)]
        first = next((a for a, t in enumerate(trivial) if not t), None)
        if first is None:
            return x
        given = {"window": window[first:], "stride": stride[first:], "padding": padding[first:]}
        if operation == "max_pool":
            given["dilation"] = dilation[first:]
        return w(operation, x, **given)

    return translation


def _min_pooled(w: Any, p: Params, x: int) -> Any:
    result = _pooled("max_pool", -math.inf)(w, p, w("negate", x))
    return None if result is None else w("negate", result)


def _transformed(w: Any, p: Params, x: int) -> int:
    kind = getattr(p["fft_type"], "name", str(p["fft_type"])).lower()
    lengths = axes_of(p, "fft_lengths")
    rank = len(w.shape(x))
    axes = tuple(range(rank - len(lengths), rank))
    if kind == "irfft":
        return w("irfft", x, axes=axes, length=lengths[-1])
    return w(kind, x, axes=axes)


# --- linear algebra ----------------------------------------------------------------------


def _triangular_solve(w: Any, p: Params, a: int, b: int) -> int:
    return w(
        "triangular_solve",
        a,
        b,
        lower=bool(p["lower"]),
        unit=bool(p["unit_diagonal"]),
        transpose=bool(p["transpose_a"]),
        conjugate=bool(p["conjugate_a"]),
        left=bool(p["left_side"]),
    )


def _eigh(w: Any, p: Params, a: int) -> Any:
    if p.get("subset_by_index") is not None or not p.get("sort_eigenvalues", True):
        return None
    values, vectors = w("eigh", w.before_symmetrizing(a))
    return [vectors, values]


def _svd(w: Any, p: Params, a: int) -> Any:
    n, m = w.shape(a)[-2:]
    if p.get("subset_by_index") is not None or (p["full_matrices"] and n != m and p["compute_uv"]):
        return None
    u, s, vh = w("svd", a)
    return [s, u, vh] if p["compute_uv"] else [s]


def _qr(w: Any, p: Params, a: int) -> Any:
    n, m = w.shape(a)[-2:]
    if p.get("pivoting") or n < m or (p["full_matrices"] and n != m):
        return None
    return list(w("qr", a))


def _polygamma(w: Any, p: Params, order: int, x: int) -> Any:
    m = w.scalar(order)
    return None if m is None or m != int(m) else w("polygamma", x, order=int(m))


TABLE: dict[str, Translation] = {
    **{native: lambda w, p, *xs, op=op: w(op, *xs) for native, op in SAME.items()},
    **{native: _compared(relation) for native, relation in RELATIONS.items()},
    **{native: _logical(operation) for native, operation in LOGIC.items()},
    "optimization_barrier": lambda w, p, *xs: list(xs),
    "convert_element_type": _cast,
    "div": _divided,
    "rem": _remainder,
    "round": _rounded,
    "integer_pow": _integer_power,
    "polygamma": _polygamma,
    "polynomial": _polynomial,
    "one_minus_square": lambda w, p, x: w("subtract", w.constant(1.0), w("square", x)),
    "select_n": _selected,
    "clamp": _clamped,
    "iota": lambda w, p: w("iota", shape=axes_of(p, "shape"), axis=int(p["dimension"])),
    "transpose": lambda w, p, x: w("transpose", x, permutation=axes_of(p, "permutation")),
    "reshape": _reshaped,
    "squeeze": _squeezed,
    "expand_dims": lambda w, p, x: w(
        "reshape", x, shape=np.expand_dims(np.empty(w.shape(x)), axes_of(p, "dimensions")).shape
    ),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda w, p, *xs: w("concatenate", *xs, axis=int(p["dimension"])),
    "stack": lambda w, p, *xs: w("stack", *xs, axis=int(p["axis"])),
    "unstack": _unstacked,
    "tile": _tiled,
    "split": lambda w, p, x: list(w("split", x, sizes=axes_of(p, "sizes"), axis=int(p["axis"]))),
    "rev": lambda w, p, x: w("flip", x, axes=axes_of(p, "dimensions")),
    "pad": _padded,
    "slice": _sliced,
    "dynamic_slice": window,
    "dynamic_update_slice": updated,
    "sort": _sorted,
    "top_k": _top,
    "reduce_sum": _reduced("sum"),
    "reduce_prod": _reduced("prod"),
    "reduce_max": _reduced("max"),
    "reduce_min": _reduced("min"),
    "reduce_and": _reduced("all"),
    "reduce_or": _reduced("any"),
    "argmax": _along("argmax"),
    "argmin": _along("argmin"),
    "cumsum": _cumulative("cumsum"),
    "cumprod": _cumulative("cumprod"),
    "cummax": _cumulative("cummax"),
    "cummin": _cumulative("cummin"),
    "cumlogsumexp": _cumulative("logcumsumexp"),
    "dot_general": _dot,
    "conv_general_dilated": _convolved,
    "reduce_window_max": _pooled("max_pool", -math.inf),
    "reduce_window_min": _min_pooled,
    "reduce_window_sum": _pooled("sum_pool"),
    "fft": _transformed,
    "cholesky": lambda w, p, a: w("cholesky", a),
    "triangular_solve": _triangular_solve,
    "eigh": _eigh,
    "svd": _svd,
    "qr": _qr,
}
