"""Translations of JAX primitives that take more than another name, as tables.

All others are said as the graph says them (`as_said`). A translation takes the writer, the
parameters of an equation and the numbers of its operands; it writes nodes, and returns the number
of the result or a list of them. ``None`` says that there is no word for it: the equation then keeps
its name and is marked. What holds programs inside stands in `translating/calls.py`, what gathers
and scatters in `translating/indexing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gradtools.seeing.formulas.operation_record import of_vocabulary
from gradtools.seeing.jax import operands

Params = Mapping[str, Any]
Translation = Callable[..., Any]


def axes_of(p: Params, name: str = "axes") -> tuple[int, ...]:
    """A parameter that lists axes."""
    return tuple(int(a) for a in p[name])


def _cast(w: Any, p: Params, x: int) -> int:
    """To another kind, or to less precision than was given; otherwise nothing is said."""
    dtype = np.dtype(p["new_dtype"])
    narrower = w.is_inexact(x) and dtype.itemsize < w.itemsize(x)
    return x if w.kind_is(x, str(dtype)) and not narrower else w("cast", x, dtype=str(dtype))


def _divided(w: Any, p: Params, a: int, b: int) -> int:
    """A quotient of integers is rounded towards zero."""
    result = w("divide", a, b)
    return result if w.is_inexact(a) else w("cast", result, dtype="int64")


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


# --- linear algebra ----------------------------------------------------------------------


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


def as_said(w: Any, eqn: Any, xs: Sequence[int]) -> Any:
    """As the graph says it (`../operands.py`), where that is a word of the vocabulary."""
    name, attributes = operands.name_of(eqn), operands.attributes_of(eqn)
    told = [xs[i] for i in operands.order_of(eqn)]
    exponent = operands.exponent_of(eqn)
    if exponent is not None:
        told.append(w.constant(float(exponent)))
    word = of_vocabulary(name)
    if word is None or word.lower is None or not word.takes(len(told), attributes):
        return None
    return w(name, *told, **attributes)


# What is no word in the vocabulary's sense, or says more than its word.
TABLE: dict[str, Translation] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), lambda *_: None),
    "optimization_barrier": lambda w, p, *xs: list(xs),
    "reduce_precision": lambda w, p, x: w("identity", x),
    "convert_element_type": _cast,
    "div": _divided,
    "polygamma": _polygamma,
    "select_n": _selected,
    "dynamic_slice": window,
    "dynamic_update_slice": updated,
    "sort": _sorted,
    "eigh": _eigh,
    "svd": _svd,
    "qr": _qr,
}
