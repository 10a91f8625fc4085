"""Replaces compositions of operations with named operations, such as softmax in a JAX program.

`named` replaces an expression that matches a composition in the left column with the expression in
the right column::

    log sum exp(x - c)                      logsumexp(x) - c       if c is constant along the axis
    e / sum e,  e = exp(x - c)              softmax(x)
    1 / (1 + exp(-x)),  log(1 + exp(x))     sigmoid(x),  softplus(x)
    mean |x - mean x|^2,  E x^2 - (E x)^2   variance(x)
    (x - mean x) / sqrt(variance + eps)     standardize(x)
    sqrt(sum |x|^2), and its reciprocal     norm(x)
    relu(variance(x)), |sum exp(x)|         the argument, which is not negative
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradtools.seeing.formulas import algebra
from gradtools.seeing.formulas.algebra import Entry, add, apply, mean, parts, product, varying
from gradtools.seeing.formulas.expressions import Expr, constant_of
from gradtools.seeing.formulas.operations import along, softmax


def named(x: Expr) -> Expr:
    """Returns the replacement of x if x matches a composition in the table, otherwise x."""
    kept = sorted(varying(x))
    if len(kept) < x.rank and constant_of(x) is None:  # broadcast along the other axes
        inner = algebra.drop_axes(x, kept)
        other = named(inner)
        return x if other is inner else algebra.broadcast(other, x.shape, kept)
    results = (pattern(x) for op, pattern in _PATTERNS if op == x.op)
    return next((y for y in results if y is not None and y.shape == x.shape), x)


# --- parts of sums and products


def _terms(x: Expr) -> list[Expr]:
    """Returns the terms of a sum, with nested sums flattened."""
    terms = algebra.summands(x)
    return terms if terms == [x] else [t for term in terms for t in _terms(term)]


def _without_shift(x: Expr, axes: Iterable[int]) -> tuple[Expr, list[Expr]]:
    """Splits x into the sum of the terms that vary along the axes, and the other terms."""
    terms, axes = _terms(x), set(axes)
    constant = [t for t in terms if axes.isdisjoint(varying(t))]
    rest = [t for t in terms if t not in constant]
    return (add(rest), constant) if rest else (x, [])


def _summed(x: Expr) -> tuple[Any, Expr, tuple[int, ...]] | None:
    """Returns (c, z, axes) if x is c times the sum of z over axes, otherwise None."""
    c, entries, out = parts(x)
    core = product(entries, out, x.shape)
    if not algebra.contracts(core) or len(core.args) != 1 or core["coefficient"] != 1:
        return None
    (names,) = core["labels"]
    if tuple(l for l in names if l < x.rank) != out:
        return None
    return c, core.args[0], tuple(a for a, l in enumerate(names) if l >= x.rank)


def _squares(x: Expr, of_mean: bool) -> tuple[Expr, tuple[int, ...]] | None:
    """Returns (z, axes) if x is the sum or mean of |z|**2 over axes, otherwise None."""
    c, power, axes = _summed(x) or (1, x, ())
    length = math.prod(power.shape[a] for a in axes) if of_mean else 1
    if not axes or isinstance(c, complex) or abs(c * length - 1) > 1e-6:
        return None
    if power.op != "power" or power["exponent"] != 2:
        return None
    z = power.args[0].args[0] if power.args[0].op == "abs" else power.args[0]
    return None if power.args[0].is_complex else (z, axes)


def _centre(y: Expr, axes: tuple[int, ...]) -> Expr | None:
    """Returns z if y is z minus its mean over the axes, otherwise None."""
    rests = (add([z for z in y.args if z is not t]) for t in y.args if y.op == "add")
    return next((z for z in rests if algebra.centred(z, axes) is y), None)


def _replaced(x: Expr, gone: Sequence[Entry], new: Entry) -> Expr:
    """Returns the product x with the factors `gone` replaced by the factor `new`."""
    c, entries, out = parts(x)
    return product([new, *(e for e in entries if e not in gone)], out, x.shape, c)


# --- the patterns


def _logsumexp(x: Expr) -> Expr | None:
    """Returns logsumexp(z) if x is log sum exp(z), otherwise None."""
    c, e, axes = _summed(x.args[0]) or (0, x, ())
    if c != 1 or e.op != "exp":
        return None
    z, shift = _without_shift(e.args[0], axes)
    kept = [a for a in range(z.rank) if a not in axes]
    return algebra.plus(along("logsumexp", z, axes), *(algebra.drop_axes(s, kept) for s in shift))


def _softmax(x: Expr) -> Expr | None:
    """Replaces exp(z) / sum exp(z) in a product with softmax(z); returns None if absent."""
    _, entries, _ = parts(x)
    for e, names in entries:
        for axis in range(e.rank) if e.op == "exp" else ():
            below = algebra.total(e, [axis]) ** -1, (*names[:axis], *names[axis + 1 :])
            if below in entries:
                p = softmax(_without_shift(e.args[0], [axis])[0], axis=axis)
                return _replaced(x, [(e, names), below], (p, names))
    return None


def _of_exponential(x: Expr) -> Expr | None:
    """Returns sigmoid(z) for 1 / (1 + exp(-z)), softplus(z) for log(1 + exp(z)), else None."""
    for e in (t for t in x.args[0].args if t.op == "exp" and not x.is_complex):
        if x is (1 + e) ** -1:
            return apply("sigmoid", -e.args[0])
        if x is apply("log", 1 + e):
            return apply("softplus", e.args[0])
    return None


def _variance(x: Expr) -> Expr | None:
    """Returns the variance of z if x is the mean of |z - mean z|**2, otherwise None."""
    squares = _squares(x, of_mean=True)
    z = _centre(*squares) if squares else None
    return along("var", z, squares[1]) if squares and z is not None else None


def _variance_of_moments(x: Expr) -> Expr | None:
    """Returns the variance of z if x is mean z**2 - (mean z)**2, otherwise None."""
    for first in x.args:
        squares = _squares(first, of_mean=True)
        if squares and not squares[0].is_complex and x is first - mean(*squares) ** 2:
            return along("var", *squares)
    return None


def _standardize(x: Expr) -> Expr | None:
    """Replaces (z - mean z) * (var z + eps)**-1/2 in a product; returns None if absent."""
    _, entries, _ = parts(x)
    for f, names in entries:
        terms = _terms(f.args[0]) if f.op == "power" and f["exponent"] == -0.5 else []
        eps = [constant_of(t) for t in terms if constant_of(t) is not None]
        v, *more = [t for t in terms if constant_of(t) is None] or [x]
        if more or v.op != "var" or v.args[0].is_complex:
            continue
        (z,), axes = v.args, v["axes"]
        for g, own in entries:
            kept = tuple(l for a, l in enumerate(own) if a not in axes)
            if g.shape == z.shape and kept == names and _centre(g, axes) is z:
                y = along("standardize", z, axes, eps=float(sum(eps)))
                return _replaced(x, [(f, names), (g, own)], (y, own))
    return None


def _norm(x: Expr) -> Expr | None:
    """Replaces sqrt(sum |z|**2) or its reciprocal with a power of norm(z), else returns None."""
    squares = _squares(x.args[0], of_mean=False) if x["exponent"] in (0.5, -0.5) else None
    return along("norm", *squares) ** (2 * x["exponent"]) if squares else None


def _modulus(x: Expr) -> Expr | None:
    """Removes abs from |sum exp(z)|, as in JAX's logsumexp, and relu from relu(variance)."""
    c, z, _ = _summed(x.args[0]) or (1, x.args[0], ())
    return x.args[0] if c == 1 and not z.is_complex and z.op in ("exp", "var") else None


_PATTERNS: Sequence[tuple[str, Callable[[Expr], Expr | None]]] = [
    *(("abs", _modulus), ("relu", _modulus), ("log", _logsumexp), ("log", _of_exponential)),
    *(("einsum", _softmax), ("einsum", _variance), ("einsum", _standardize)),
    *(("add", _variance_of_moments), ("power", _of_exponential), ("power", _norm)),
]
