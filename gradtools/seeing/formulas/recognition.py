"""Pattern matching: a composition such as log(1 + exp(x)) is rewritten to softplus(x).

JAX's programs are compositions where PyTorch's are one call. Each pattern below matches one value
of the program and its operands::

    e / sum e,  e = exp(x - c)              softmax(x)         c being constant along the axis
    x - c - log sum exp(x - c)              log_softmax(x)
    c + log sum exp(x - c)                  logsumexp(x)
    1 / (1 + exp(-x))                       sigmoid(x)
    log(1 + exp(x)),  logaddexp forms       softplus(x)
    (1 + erf(x / sqrt 2)) / 2               the normal distribution function, of gelu
    mean |x - mean x|^2,  E x^2 - (E x)^2   variance(x)
    relu(x),  x never negative              x
    (x - mean x) / sqrt(variance + eps)     standardize(x)
    sqrt(sum |x|^2), and one over it        norm(x)
    logsumexp(x) - <one-hot, x>             -<one-hot, log_softmax(x)>
    |x|,  x a sum of exponentials           x
    max(-inf, x)                            x

Patterns ignore stop_gradient (JAX stops the maximum that it subtracts): these terms cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gradtools.seeing.formulas.algebra import (
    add,
    apply,
    constant_of,
    contracts,
    drop_axes,
    full,
    parts,
    plus,
    product,
    rebuild,
    spread,
    total,
)
from gradtools.seeing.formulas.expressions import Expr, substitute
from gradtools.seeing.formulas.operations.reductions import reduced, standardize, variance

Pattern = Callable[[Expr], Expr | None]


def recognise(roots: Sequence[Expr]) -> list[Expr]:
    """The roots with every matching subexpression rewritten."""
    return substitute(roots, rebuild, _rewritten)


def _rewritten(x: Expr) -> Expr:
    """The first pattern that fits, again until none does."""
    for pattern in _PATTERNS:
        result = pattern(x)
        if result is not None and result is not x and result.shape == x.shape:
            return result
    return x


# Queries.


def _terms(x: Expr) -> list[Expr]:
    """The terms of a sum, with nested sums flattened."""
    if x.op == "add":
        return [t for a in x.args for t in _terms(a)]
    c, factors, labels, out = parts(x)
    if len(factors) == 1 and factors[0].op == "add" and set(labels[0]) <= set(out):
        inner = _terms(factors[0])
        return [product([t], labels, out, x.shape, c) for t in inner]
    return [x]


def _broadcast_axes(x: Expr) -> set[int]:
    """The axes along which x is broadcast, hence constant."""
    if x.op == "stop":
        return _broadcast_axes(x.args[0])
    _, _, labels, out = parts(x)
    return set(out) - {l for names in labels for l in names}


def _shifted(x: Expr, axes: set[int]) -> tuple[Expr, list[Expr]]:
    """X without its terms that are constant along axes, and these terms."""
    return _parted(_terms(x), axes, x)


def _parted(terms: list[Expr], axes: set[int], x: Expr) -> tuple[Expr, list[Expr]]:
    constant = [t for t in terms if axes <= _broadcast_axes(t)]
    rest = [t for t in terms if t not in constant]
    return (add(rest) if rest else full(0.0, x.shape)), constant


def _exponent(x: Expr) -> Expr | None:
    """The argument, if x is an exponential."""
    return x.args[0] if x.op == "exp" else None


def _sum_over(x: Expr) -> tuple[Expr, set[int]] | None:
    """(z, axes), if x is the sum of z over axes."""
    if not contracts(x) or len(x.args) != 1 or x["coefficient"] != 1:
        return None
    names = x["labels"][0]
    if tuple(l for l in names if l < x.rank) != tuple(range(x.rank)):
        return None
    return x.args[0], {a for a, l in enumerate(names) if l >= x.rank}


# Patterns.


def _softmax(x: Expr) -> Expr | None:
    """An exponential over its own sum along one axis."""
    c, factors, labels, out = parts(x)
    entries = list(zip(factors, labels, strict=True))
    for e, names in entries:
        for axis in range(e.rank) if e.op == "exp" else ():
            below = total(e, [axis]) ** -1, (*names[:axis], *names[axis + 1 :])
            if below in entries:
                p = apply("softmax", _shifted(e.args[0], {axis})[0], axis=axis)
                left = [entry for entry in entries if entry not in ((e, names), below)]
                left.insert(0, (p, names))
                return product([f for f, _ in left], [n for _, n in left], out, x.shape, c)
    return None


def _log_softmax(x: Expr) -> Expr | None:
    """X - logsumexp(x), up to terms that are constant along the axis."""
    terms = _terms(x) if x.op == "add" else []
    for t in terms:
        normalizer = _minus_logsumexp(t)
        if normalizer is None:
            continue
        z, axis = normalizer
        rest = [r for r in terms if r is not t]
        y = add(rest) if rest else None
        if y is None or y.shape != z.shape:
            continue
        logits, shift = _shifted(y, {axis})
        normalized, other = _shifted(z, {axis})
        if logits is normalized and set(shift) == set(other):
            return apply("log_softmax", logits, axis=axis)
    return None


def _of_one_hot(x: Expr) -> Expr | None:
    """Logsumexp(z) - <one-hot, z> is -<one-hot, log_softmax(z)>."""
    terms = _terms(x) if x.op == "add" else []
    for t in terms:
        if t.op != "logsumexp" or t["axes"] != (t.args[0].rank - 1,):
            continue
        z, (axis,) = t.args[0], t["axes"]
        for s in terms:
            factors = [g for f in parts(s)[1] for g in (f, *f.args)]
            for h in (f for f in factors if f.op == "one_hot" and f.shape == z.shape):
                if s is -total(z * h, (axis,)):
                    log = apply("log_softmax", z, axis=axis)
                    rest = [r for r in terms if r is not t and r is not s]
                    return add([-total(log * h, (axis,)), *rest])
    return None


def _minus_logsumexp(t: Expr) -> tuple[Expr, int] | None:
    """(z, axis), if t is -logsumexp(z) broadcast along the axis."""
    c, factors, labels, out = parts(t)
    if c != -1 or len(factors) != 1 or len(out) - len(labels[0]) != 1:
        return None
    (axis,) = set(out) - set(labels[0])
    if labels[0] != tuple(a for a in out if a != axis):
        return None
    f = factors[0]
    if f.op == "logsumexp" and f["axes"] == (axis,):
        return f.args[0], axis
    z = _log_sum_exp(f)
    return (z[0], axis) if z is not None and z[1] == {axis} else None


def _log_sum_exp(f: Expr) -> tuple[Expr, set[int]] | None:
    """(z, axes), if f is the log of the sum of exp(z) over axes."""
    if f.op != "log":
        return None
    summed = _sum_over(f.args[0])
    if summed is None:
        return None
    z = _exponent(summed[0])
    return None if z is None else (z, summed[1])


def _logsumexp(x: Expr) -> Expr | None:
    """Log sum exp(z - c) + c, c being constant along the axes."""
    for t in _terms(x):
        normalizer = _log_sum_exp(t)
        if normalizer is None:
            continue
        z, axes = normalizer
        inner, shift = _shifted(z, axes)
        kept = [a for a in range(z.rank) if a not in axes]
        back = [drop_axes(-s, kept) for s in shift]
        left = _without([r for r in _terms(x) if r is not t], back)
        if left is None:
            continue
        named = reduced("logsumexp", inner, axes)
        return plus(named, *left) if left else named
    return None


def _without(terms: list[Expr], wanted: list[Expr]) -> list[Expr] | None:
    """The terms without those that are wanted; None if one is not there."""
    left = list(terms)
    for w in wanted:
        if w not in left:
            return None
        left.remove(w)
    return left


def _sigmoid(x: Expr) -> Expr | None:
    """1 / (1 + exp(-x))."""
    if x.op != "power" or x["exponent"] != -1:
        return None
    e = _added_to_one(x.args[0])
    return apply("sigmoid", -e.args[0]) if e is not None and e.op == "exp" else None


def _added_to_one(x: Expr) -> Expr | None:
    """The other term, if x is a sum of one and another."""
    terms = x.args if x.op == "add" else ()
    others = [t for t in terms if constant_of(t) is None]
    ones = [t for t in terms if constant_of(t) == 1]
    return others[0] if len(others) == len(ones) == 1 else None


def _softplus(x: Expr) -> Expr | None:
    """log(1 + exp(x)); max(x, 0) + softplus(-|x|)."""
    if x.op == "log" and not x.is_complex:
        e = _added_to_one(x.args[0])
        z = None if e is None else _exponent(e)
        return None if z is None else apply("softplus", z)
    terms = _terms(x) if x.op == "add" else []
    for r in (t for t in terms if t.op == "relu"):
        other = apply("softplus", -apply("abs", r.args[0]))
        if any(t is other for t in terms):
            rest = [t for t in terms if t is not r and t is not other]
            return add([apply("softplus", r.args[0]), *rest])
    return None


_HALF_ROOT = math.sqrt(0.5)


def _normal_cdf(x: Expr) -> Expr | None:
    """1 + erf(z / sqrt 2), twice the distribution function; 1 - erf(-z / sqrt 2) likewise."""
    other = _added_to_one(x)
    if other is None:
        return None
    sign, factors, labels, out = parts(other)
    if len(factors) != 1 or factors[0].op != "erf" or labels[0] != out or sign not in (1, -1):
        return None
    inner = factors[0].args[0]
    scale_ = parts(inner)[0]
    if abs(abs(scale_) - _HALF_ROOT) > 1e-6:  # a single-precision root has 7 digits
        return None
    z = sign * math.copysign(1.0, scale_) * (1 / scale_ * inner)
    return 2.0 * apply("normal_cdf", z)


def _mean_of(x: Expr) -> tuple[Expr, set[int]] | None:
    """(z, axes), if x is the mean of z over axes."""
    c, factors, labels, out = parts(x)
    if len(factors) != 1 or isinstance(c, complex):
        return None
    f = factors[0]
    if contracts(f) and labels[0] == out:
        summed = _sum_over(f)
    elif contracts(x):
        summed = _sum_over(product(x.args, x["labels"], out, x.shape))
    else:
        return None
    if summed is None:
        return None
    count = math.prod(summed[0].shape[a] for a in summed[1])
    return summed if abs(c * count - 1) < 1e-6 else None


def _variance(x: Expr) -> Expr | None:
    """The mean of (z - mean z)**2, or mean z**2 - (mean z)**2."""
    averaged = _mean_of(x)
    if averaged is not None:
        y, axes = averaged
        if y.op == "power" and y["exponent"] == 2 and not y.is_complex:
            z = _uncentred(_modulus_of(y.args[0]), axes)
            if z is not None:
                return variance(z, axes=axes)
    if x.op in ("add", "relu"):
        return _variance_of_moments(x)
    return None


def _modulus_of(x: Expr) -> Expr:
    return x.args[0] if x.op == "abs" and not x.args[0].is_complex else x


def _uncentred(y: Expr, axes: set[int]) -> Expr | None:
    """Z, if y is z - mean z."""
    whole = list(y.args) if y.op == "add" else [y]
    return _centred_at(y, *_parted(whole, axes, y), axes) or _centred_at(
        y, *_shifted(y, axes), axes
    )


def _centred_at(y: Expr, rest: Expr, constant: list[Expr], axes: set[int]) -> Expr | None:
    """The rest, if the terms that are constant along the axes are its negative mean."""
    if not constant:
        return None
    m = spread(1 / _count(rest, axes) * total(rest, axes), axes, y.shape)
    close = rest - m
    return rest if close is y or add([close, -y]) is full(0.0, y.shape) else None


def _count(x: Expr, axes: set[int]) -> int:
    return math.prod(x.shape[a] for a in axes)


def _rectified(x: Expr) -> Expr | None:
    """relu(x) of an x that is never negative: JAX clips the rounding errors of a variance."""
    redundant = x.op == "relu" and x.args[0].op in ("variance", "deviation", "abs", "exp", "norm")
    return x.args[0] if redundant else None


def _variance_of_moments(x: Expr) -> Expr | None:
    terms = _terms(x.args[0] if x.op == "relu" else x)
    if len(terms) != 2:
        return None
    for first, second in (terms, terms[::-1]):
        averaged = _mean_of(first)
        if averaged is None or averaged[0].op != "power" or averaged[0]["exponent"] != 2:
            continue
        z, axes = averaged[0].args[0], averaged[1]
        z = _modulus_of(z)
        m = 1 / _count(z, axes) * total(z, axes)
        if second is -(m * m) and not z.is_complex:
            return variance(z, axes=axes)
    return None


def _standardize(x: Expr) -> Expr | None:
    """(z - mean z) times (variance z + eps)**-1/2."""
    if x.op != "einsum" or contracts(x):
        return None
    c, factors, labels, out = parts(x)
    entries = list(zip(factors, labels, strict=True))
    for f, names in entries:
        width = _width(f) if f.op == "power" and f["exponent"] in (-0.5, -1.0) else None
        if width is None or width[0].is_complex:
            continue
        z, axes, eps = width
        for g, n in entries:
            kept = tuple(l for a, l in enumerate(n) if a not in axes)
            if g.shape == z.shape and kept == names and _uncentred(g, axes) is z:
                left = [entry for entry in entries if entry not in ((f, names), (g, n))]
                left.insert(0, (standardize(z, axes=axes, eps=eps), n))
                return product([h for h, _ in left], [m for _, m in left], out, x.shape, c)
    return None


def _width(f: Expr) -> tuple[Expr, set[int], float] | None:
    """(z, axes, eps), if f is 1 / sqrt(variance z + eps)."""
    inner = f.args[0]
    if f["exponent"] == -1.0:
        if inner.op == "deviation" and not inner["correction"]:
            return inner.args[0], set(inner["axes"]), inner["eps"]
        if inner.op != "power" or inner["exponent"] != 0.5:
            return None
        inner = inner.args[0]
    eps = [constant_of(t) for t in _terms(inner) if constant_of(t) is not None]
    others = [t for t in _terms(inner) if constant_of(t) is None]
    if len(others) != 1 or others[0].op != "variance" or others[0]["correction"]:
        return None
    v = others[0]
    return v.args[0], set(v["axes"]), float(eps[0]) if eps else 0.0


def _norm(x: Expr) -> Expr | None:
    """sqrt(sum |z|**2), or its reciprocal."""
    if x.op != "power" or x["exponent"] not in (0.5, -0.5):
        return None
    summed = _sum_over(x.args[0])
    if summed is None or summed[0].op != "power" or summed[0]["exponent"] != 2:
        return None
    z, axes = summed[0].args[0], summed[1]
    if z.op == "abs":
        z = z.args[0]
    elif z.is_complex:
        return None
    return reduced("norm", z, axes) ** (2 * x["exponent"])


def _modulus_of_positive(x: Expr) -> Expr | None:
    """|x|, if x is positive by its form."""
    return x.args[0] if x.op == "abs" and _is_positive(x.args[0]) else None


def _is_positive(x: Expr) -> bool:
    """Whether x is real and consists of sums and products of exponentials."""
    if x.is_complex:
        return False
    if x.op in ("exp", "softmax"):
        return True
    if x.op == "add":
        return all(map(_is_positive, x.args))
    return x.op == "einsum" and x["coefficient"] > 0 and all(map(_is_positive, x.args))


def _maximum_of_minus_infinity(x: Expr) -> Expr | None:
    """Max(-inf, x)."""
    if x.op != "maximum":
        return None
    for one, other in (x.args, x.args[::-1]):
        if constant_of(one) == -math.inf and other.shape == x.shape:
            return other
    return None


_PATTERNS: tuple[Pattern, ...] = (
    _modulus_of_positive,
    _maximum_of_minus_infinity,
    _softmax,
    _log_softmax,
    _logsumexp,
    _of_one_hot,
    _sigmoid,
    _softplus,
    _normal_cdf,
    _variance,
    _rectified,
    _standardize,
    _norm,
)
