"""Names for compositions: JAX composes operations for which PyTorch has a single call.

`named` looks at the result of each operation, and gives compositions a name by which they are
written and differentiated::

    log sum exp(x - c)                      logsumexp(x) - c       c being constant along the axis
    e / sum e,  e = exp(x - c)              softmax(x)
    1 / (1 + exp(-x)),  log(1 + exp(x))     sigmoid(x),  softplus(x)
    mean |x - mean x|^2,  E x^2 - (E x)^2   variance(x)
    (x - mean x) / sqrt(variance + eps)     standardize(x)
    sqrt(sum |x|^2), and one over it        norm(x)
    relu(variance(x)), |sum exp(x)|         the argument, which is not negative
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradtools.seeing.formulas.algebra import (
    Entry,
    add,
    apply,
    broadcast,
    centred,
    contracts,
    drop_axes,
    mean,
    parts,
    plus,
    product,
    summands,
    total,
    varying,
)
from gradtools.seeing.formulas.expressions import Expr, constant_of
from gradtools.seeing.formulas.operations import reduced, softmax, standardize


def named(x: Expr) -> Expr:
    """The result of an operation, by its name where it is one of the compositions above."""
    kept = sorted(varying(x))
    if len(kept) < x.rank and constant_of(x) is None:  # broadcast along the other axes
        inner = drop_axes(x, kept)
        other = named(inner)
        return x if other is inner else broadcast(other, x.shape, kept)
    for pattern in _PATTERNS.get(x.op, ()):
        result = pattern(x)
        if result is not None and result.shape == x.shape:
            return result
    return x


# --- parts of sums and products


def _terms(x: Expr) -> list[Expr]:
    """The terms of a sum, with nested sums flattened."""
    terms = summands(x)
    return terms if terms == [x] else [t for term in terms for t in _terms(term)]


def _without_shift(x: Expr, axes: Iterable[int]) -> tuple[Expr, list[Expr]]:
    """X without its terms that are constant along the axes, and these terms."""
    terms, axes = _terms(x), set(axes)
    constant = [t for t in terms if axes.isdisjoint(varying(t))]
    rest = [t for t in terms if t not in constant]
    return (add(rest), constant) if rest else (x, [])


def _summed(x: Expr) -> tuple[Any, Expr, tuple[int, ...]] | None:
    """(c, z, axes), if x is c times the sum of z over axes."""
    c, entries, out = parts(x)
    core = product(entries, out, x.shape)
    if not contracts(core) or len(core.args) != 1 or core["coefficient"] != 1:
        return None
    (names,) = core["labels"]
    if tuple(l for l in names if l < x.rank) != out:
        return None
    return c, core.args[0], tuple(a for a, l in enumerate(names) if l >= x.rank)


def _squares(x: Expr, of_mean: bool) -> tuple[Expr, tuple[int, ...]] | None:
    """(z, axes), if x is the sum, or the mean, of |z|**2 over axes."""
    c, power, axes = _summed(x) or (1, x, ())
    length = math.prod(power.shape[a] for a in axes) if of_mean else 1
    if not axes or isinstance(c, complex) or abs(c * length - 1) > 1e-6:
        return None
    if power.op != "power" or power["exponent"] != 2:
        return None
    (z,) = power.args
    if z.op == "abs":
        return z.args[0], axes
    return None if z.is_complex else (z, axes)


def _centre(y: Expr, axes: tuple[int, ...]) -> Expr | None:
    """Z, if y is z - mean z."""
    for t in y.args if y.op == "add" else ():
        z = add([other for other in y.args if other is not t])
        if centred(z, axes) is y:
            return z
    return None


def _replaced(x: Expr, gone: Sequence[Entry], new: Entry) -> Expr:
    """The product x with a new factor in place of others."""
    c, entries, out = parts(x)
    return product([new, *(e for e in entries if e not in gone)], out, x.shape, c)


# --- the patterns


def _logsumexp(x: Expr) -> Expr | None:
    """log sum exp(z)."""
    c, e, axes = _summed(x.args[0]) or (0, x, ())
    if c != 1 or e.op != "exp":
        return None
    z, shift = _without_shift(e.args[0], axes)
    kept = [a for a in range(z.rank) if a not in axes]
    return plus(reduced("logsumexp", z, axes), *(drop_axes(s, kept) for s in shift))


def _softmax(x: Expr) -> Expr | None:
    """An exponential over its own sum along one axis."""
    _, entries, _ = parts(x)
    for e, names in entries:
        for axis in range(e.rank) if e.op == "exp" else ():
            below = total(e, [axis]) ** -1, (*names[:axis], *names[axis + 1 :])
            if below in entries:
                p = softmax(_without_shift(e.args[0], [axis])[0], axis=axis)
                return _replaced(x, [(e, names), below], (p, names))
    return None


def _of_exponential(x: Expr) -> Expr | None:
    """1 / (1 + exp(-z)), and log(1 + exp(z))."""
    for e in (t for t in x.args[0].args if t.op == "exp"):
        if x is (1 + e) ** -1:
            return apply("sigmoid", -e.args[0])
        if x is apply("log", 1 + e) and not x.is_complex:
            return apply("softplus", e.args[0])
    return None


def _variance(x: Expr) -> Expr | None:
    """The mean of |z - mean z|**2."""
    squares = _squares(x, of_mean=True)
    z = _centre(*squares) if squares else None
    return reduced("var", z, squares[1]) if squares and z is not None else None


def _variance_of_moments(x: Expr) -> Expr | None:
    """mean z**2 - (mean z)**2."""
    for first in x.args:
        squares = _squares(first, of_mean=True)
        if squares and not squares[0].is_complex:
            m = mean(*squares)
            if [t for t in x.args if t is not first] == [-(m * m)]:
                return reduced("var", *squares)
    return None


def _standardize(x: Expr) -> Expr | None:
    """(z - mean z) times (variance z + eps)**-1/2."""
    _, entries, _ = parts(x)
    for f, names in entries:
        if f.op != "power" or f["exponent"] != -0.5:
            continue
        terms = _terms(f.args[0])
        eps = [constant_of(t) for t in terms if constant_of(t) is not None]
        rest = [t for t in terms if constant_of(t) is None]
        v = rest[0] if len(rest) == 1 and rest[0].op == "var" else None
        if v is None or v.args[0].is_complex:
            continue
        (z,), axes = v.args, v["axes"]
        for g, own in entries:
            kept = tuple(l for a, l in enumerate(own) if a not in axes)
            if g.shape == z.shape and kept == names and _centre(g, axes) is z:
                y = standardize(z, axes=axes, eps=float(eps[0]) if eps else 0.0)
                return _replaced(x, [(f, names), (g, own)], (y, own))
    return None


def _norm(x: Expr) -> Expr | None:
    """sqrt(sum |z|**2), or its reciprocal."""
    squares = _squares(x.args[0], of_mean=False) if x["exponent"] in (0.5, -0.5) else None
    return reduced("norm", *squares) ** (2 * x["exponent"]) if squares else None


def _modulus(x: Expr) -> Expr | None:
    """|z| of sums and products of exponentials, which JAX's logsumexp computes."""
    return x.args[0] if _is_positive(x.args[0]) else None


def _is_positive(x: Expr) -> bool:
    """Whether x is real and consists of sums and products of exponentials."""
    if x.is_complex or x.op == "exp":
        return not x.is_complex
    scaled = x.op == "add" or (x.op == "einsum" and bool(x.args) and x["coefficient"] > 0)
    return scaled and all(map(_is_positive, x.args))


_PATTERNS: dict[str, tuple[Callable[[Expr], Expr | None], ...]] = {
    "abs": (_modulus,),
    "relu": (lambda x: x.args[0] if x.args[0].op == "var" else None,),
    "log": (_logsumexp, _of_exponential),
    "einsum": (_softmax, _variance, _standardize),
    "add": (_variance_of_moments,),
    "power": (_of_exponential, _norm),
}
