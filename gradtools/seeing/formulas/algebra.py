"""Defines constructors that simplify expressions and return a canonical form.

Transposes, broadcasts and sums over axes are represented as products of arrays, as in einsum.
Coefficients are collected, nested products are flattened if the result is easier to read, equal
factors become powers, one-hot factors under a sum are eliminated, and broadcasts are moved out of
products. A contraction (a product with a sum) is never flattened into another contraction, so each
matrix product of the program remains a single expression.

A sum collects like terms and factors out common factors. Elementwise functions are applied before
broadcasts. The conjugate or real part of a product is computed from its factors if possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from gradtools.seeing.formulas import expressions
from gradtools.seeing.formulas.expressions import REAL, Expr, expr, full, lifted, tidy, widest

# --- products


Labels = tuple[Any, ...]
Entry = tuple[Expr, Labels]  # a factor, with the labels of its axes


def parts(x: Expr) -> tuple[Any, list[Entry], Labels]:
    """Returns x as a product: coefficient, factors with axis labels, and axis labels of x."""
    out = tuple(range(x.rank))
    if x.op != "einsum":
        return 1.0, [(x, out)], out
    return x["coefficient"], list(zip(x.args, x["labels"], strict=True)), out


def varying(x: Expr) -> set[int]:
    """Returns the axes along which x is not broadcast."""
    _, entries, out = parts(x)
    return {l for _, names in entries for l in names}.intersection(out)


def contracts(x: Expr) -> bool:
    """Returns whether x is a product that is summed over some of its axis labels."""
    return x.op == "einsum" and any(l >= x.rank for labels in x["labels"] for l in labels)


def is_wrapper(x: Expr) -> bool:
    """Returns whether x is a transpose, a broadcast or a scalar multiple of another array."""
    return x.op == "einsum" and len(x.args) == 1 and not contracts(x)


def opened(x: Expr, names: Labels, mark: int) -> list[Entry]:
    """Returns the factors of the einsum x, each with its axis labels.

    names: The axis labels of x.
    mark: A number that makes the labels of the summed axes unique.
    """
    known: dict[Any, Any] = dict(enumerate(names))
    name = lambda l: known.setdefault(l, ("summed", mark, l))
    return [(f, tuple(map(name, own))) for f, own in zip(x.args, x["labels"], strict=True)]


def product(
    entries: Iterable[tuple[Expr, Iterable[Any]]],
    out: Iterable[Any],
    shape: Iterable[int] | None = None,
    coefficient: Any = 1.0,
) -> Expr:
    """Returns the canonical einsum of factors; the axis labels of each factor must be distinct.

    out: The distinct axis labels of the result.
    shape: The axis lengths of the result. By default, the factors determine the axis lengths.
    """
    out = tuple(out)
    size: dict[Any, int] = {} if shape is None else dict(zip(out, shape, strict=True))
    factors: list[Entry] = []
    for factor, labels in entries:
        names = tuple(labels)
        for name, n in zip(names, factor.shape, strict=True):
            if size.setdefault(name, n) == 1:
                size[name] = n
        ones = tuple(a for a, n in enumerate(factor.shape) if n == 1)
        if ones:
            factor = squeeze(factor, ones)
            names = tuple(name for a, name in enumerate(names) if a not in ones)
        factors.append((factor, names))
    coefficient, factors = _flattened(coefficient, factors, out, size)
    factors = _with_powers(factors)
    for entry in [e for e in factors if e[0].op == "one_hot"]:
        axis = entry[1][-1]
        if axis not in out and [n for _, names in factors for n in names].count(axis) == 1:
            factors.remove(entry)  # a one-hot vector sums to 1
            del size[axis]
    used = {name for _, names in factors for name in names}
    for name in size.keys() - used - set(out):
        coefficient *= size[name]  # sums over an axis that no factor has
    coefficient = tidy(coefficient)
    if not factors or coefficient == 0:
        return full(coefficient, [size[n] for n in out])
    if len(factors) == 1 and coefficient == 1 and factors[0][1] == out:
        return factors[0][0]
    factors.sort(key=lambda f: (f[0].turn, [str(n) for n in f[1]]))
    if not used <= set(out):  # separate the contraction from the coefficient
        kept = tuple(n for n in out if n in used)
        core = _einsum(factors, kept, size)
        same = coefficient == 1 and kept == out
        return core if same else _einsum([(core, kept)], out, size, coefficient)
    by_rank = sorted(factors, key=lambda f: -len(f[1]))  # factors of high rank set the axis order
    kept = tuple(dict.fromkeys(n for _, names in by_rank for n in names))
    if len(factors) > 1 and set(kept) == set(out) and kept != out:
        factors = [(_einsum(factors, kept, size), kept)]
    return _einsum(factors, out, size, coefficient)


def _flattened(
    coefficient: Any, entries: list[Entry], out: Labels, size: dict[Any, int]
) -> tuple[Any, list[Entry]]:
    """Returns the coefficient and the factors; flattens nested products for readability."""
    flat: list[Entry] = []
    axes = [set(names) for _, names in entries if names]
    sums = any(not names <= set(out) for names in axes)
    sums = sums or any(a.isdisjoint(b) for a, b in itertools.combinations(axes, 2))
    queue, marks = list(entries), itertools.count()
    while queue:
        factor, names = queue.pop(0)
        alone = not flat and not queue and len(factor.args) == 1
        opens = factor.op == "einsum" and (alone or not contracts(factor))
        if not opens or (sums and _stays_whole(factor)):
            flat.append((factor, names))
            continue
        sums = sums or contracts(factor)
        coefficient *= factor["coefficient"]
        queue = (inner := opened(factor, names, next(marks))) + queue
        size.update((l, n) for f, own in inner for l, n in zip(own, f.shape, strict=True))
    return coefficient, flat


def _stays_whole(x: Expr) -> bool:
    """Returns whether x is an elementwise product that a contraction does not split into factors.

    The product is split if it is broadcast, or if the sum can eliminate some of its factors.
    """
    if x.op != "einsum" or len(x.args) < 2 or contracts(x):
        return False
    labels = [l for names in x["labels"] for l in names]
    if len(set(labels)) < x.rank or any(f.op == "one_hot" for f in x.args):
        return False
    arrays = [f for f in x.args if f.rank]
    if len(arrays) == 1 and arrays[0].op == "placeholder":
        return False
    return len(labels) > len(set(labels)) or any(not f.rank for f in x.args)


def _with_powers(entries: list[Entry]) -> list[Entry]:
    """Combines equal factors with equal axis labels into powers."""
    powers: dict[Entry, Any] = {}
    for factor, names in entries:
        is_power = factor.op == "power"
        base, exponent = (factor.args[0], factor["exponent"]) if is_power else (factor, 1)
        powers[base, names] = powers.get((base, names), 0) + exponent
    return [(base**n, names) for (base, names), n in powers.items() if n != 0]


def _einsum(
    entries: list[Entry], out: Labels, size: dict[Any, int], coefficient: Any = 1.0
) -> Expr:
    number = {name: i for i, name in enumerate(out)}
    for _, names in entries:
        for name in names:
            number.setdefault(name, len(number))
    labels = tuple(tuple(number[n] for n in names) for _, names in entries)
    own = expressions.COMPLEX if isinstance(coefficient, complex) else REAL
    kind = widest(*(f.kind for f, _ in entries), own)
    if len(entries) == 1 and coefficient == 1 and set(entries[0][1]) <= set(out):
        kind = entries[0][0].kind  # transposed or broadcast integers remain integers
    args, shape = (f for f, _ in entries), (size[n] for n in out)
    return expr("einsum", args, shape, kind, labels=labels, coefficient=coefficient)


# --- broadcasts, transposes, sums and reshapes


def scale(coefficient: Any, x: Expr) -> Expr:
    """Multiplies x by a number."""
    return product([(x, range(x.rank))], range(x.rank), x.shape, coefficient)


def times(*factors: Expr) -> Expr:
    """Returns the elementwise product of arrays, with NumPy broadcasting."""
    rank = max(f.rank for f in factors)
    return product([(f, range(rank - f.rank, rank)) for f in factors], range(rank))


def broadcast(x: Expr, shape: Sequence[int], axes: Iterable[int] | None = None) -> Expr:
    """Broadcasts x to the given shape.

    axes: The axis of the result for each axis of x. By default, the axes of x are the last axes of
        the result.
    """
    rank = len(shape)
    return product([(x, axes or range(rank - x.rank, rank))], range(rank), shape)


def drop_axes(x: Expr, kept: Sequence[int]) -> Expr:
    """Removes all axes of x except `kept`; x must be broadcast along the removed axes."""
    coefficient, entries, _ = parts(x)
    return product(entries, kept, [x.shape[a] for a in kept], coefficient)


def with_factors(x: Expr, factors: Iterable[Expr], coefficient: Any) -> Expr:
    """Replaces the coefficient and the factors of the product x; preserves the axis labels."""
    return product(zip(factors, x["labels"], strict=True), range(x.rank), x.shape, coefficient)


def transpose(x: Expr, permutation: Iterable[int]) -> Expr:
    """Implements numpy.transpose; returns x for the identity permutation."""
    permutation, axes = tuple(permutation), tuple(range(x.rank))
    if permutation == axes:
        return x
    return product([(x, axes)], permutation)


def swap(x: Expr) -> Expr:
    """Exchanges the last two axes of x."""
    return transpose(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


def total(x: Expr, axes: Iterable[int] | None = None, keep: bool = False) -> Expr:
    """Sums x over the given axes, by default over all axes."""
    axes = set(range(x.rank) if axes is None else axes)
    left = [a for a in range(x.rank) if a not in axes]
    result = product([(x, range(x.rank))], left)
    return unsqueeze(result, axes) if keep else result


def mean(x: Expr, axes: Iterable[int] | None = None, keep: bool = False) -> Expr:
    """Averages x over the given axes, by default over all axes."""
    axes = tuple(range(x.rank) if axes is None else axes)
    return scale(1.0 / prod(x.shape[a] for a in axes), total(x, axes, keep))


def centred(x: Expr, axes: Iterable[int]) -> Expr:
    """Returns x minus the mean of x over the axes."""
    return x - mean(x, axes, keep=True)


def unsqueeze(x: Expr, axes: Iterable[int]) -> Expr:
    """Inserts axes of length 1 at positions `axes` of the result."""
    axes, lengths = set(axes), iter(x.shape)
    shape = [1 if a in axes else next(lengths) for a in range(x.rank + len(axes))]
    return spread(x, axes, shape)


def spread(x: Expr, axes: Iterable[int], shape: Sequence[int]) -> Expr:
    """Broadcasts x along new axes, which is the adjoint of `total` without `keep`."""
    axes = set(axes)
    return broadcast(x, shape, [a for a in range(len(shape)) if a not in axes])


def einsum(subscripts: str, *xs: Expr) -> Expr:
    """Implements numpy.einsum with explicit output labels."""
    left, out = subscripts.replace(" ", "").split("->")
    return product(zip(xs, left.split(","), strict=True), out)


def matmul(a: Expr, b: Expr) -> Expr:
    """Implements numpy.matmul."""
    batch = max(a.rank - 2, b.rank - 2, 0)
    lead = lambda x: range(batch - max(x.rank - 2, 0), batch)
    left, right = (*lead(a), *"ik"[-a.rank :]), (*lead(b), *"kj"[: b.rank])
    out = (*range(batch), *"i"[: a.rank - 1], *"j"[: b.rank - 1])
    return product([(a, left), (b, right)], out)


def reshape(x: Expr, shape: Iterable[int]) -> Expr:
    """Reshapes x in row-major order; `squeeze` removes and `broadcast` inserts axes of length 1."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if x.op == "reshape":
        return reshape(x.args[0], shape)
    if x.op == "array":
        return expressions.array(x["value"].array.reshape(shape))
    ones = tuple(a for a, n in enumerate(x.shape) if n == 1)
    inner = squeeze(x, ones) if ones else x
    long = tuple(n for n in shape if n != 1)
    if inner.shape != long:
        inner = expr("reshape", (inner,), long, inner.kind)
    return broadcast(inner, shape, [a for a, n in enumerate(shape) if n != 1])


# --- sums


def add(terms: Sequence[Expr]) -> Expr:
    """Adds terms of equal shape; collects like terms and factors out common factors."""
    if len(terms) == 1:
        return terms[0]
    shape = terms[0].shape
    gathered = _gather(terms)
    opened = _gather([t for term in terms for t in summands(term)])
    if len(opened) < len(gathered) or len(opened) < sum(len(summands(t)) for t in terms):
        gathered = opened
    if not gathered:
        return full(0.0, shape)
    cores = [scale(c, core) for core, c in gathered.items()]
    return cores[0] if len(cores) == 1 else _without_common(cores, shape)


def summands(x: Expr) -> list[Expr]:
    """Returns the terms of x if x is a (scaled, transposed or broadcast) sum, otherwise [x]."""
    if x.op == "add":
        return list(x.args)
    if is_wrapper(x) and x.args[0].op == "add":
        (names,), out = x["labels"], range(x.rank)
        return [product([(t, names)], out, x.shape, x["coefficient"]) for t in x.args[0].args]
    return [x]


def _gather(terms: Sequence[Expr]) -> dict[Expr, Any]:
    """Maps each distinct term to the sum of its coefficients; omits terms that are zero."""
    result: dict[Expr, Any] = {}
    for x in terms:
        coefficient, core = expressions.constant_of(x), x
        if coefficient is not None:
            core = full(1.0, x.shape)
        elif x.op == "einsum" and x["coefficient"] != 1:
            coefficient = x["coefficient"]
            core = with_factors(x, x.args, 1.0)
        result[core] = result.get(core, 0) + (1.0 if coefficient is None else coefficient)
    return {core: c for core, c in result.items() if c != 0 and not expressions.is_zero(core)}


def _without_common(terms: list[Expr], shape: tuple[int, ...]) -> Expr:
    """Moves common factors, coefficients and broadcasts out of a sum."""
    kept = sorted(set().union(*map(varying, terms)))
    if len(kept) < len(shape):
        return broadcast(add([drop_axes(t, kept) for t in terms]), shape, kept)
    split = [parts(t) for t in terms]
    out = range(len(shape))
    shared = set(split[0][1]).intersection(*(entries for _, entries, _ in split[1:]))
    common = [e for e in sorted(shared, key=lambda e: e[0].turn) if set(e[1]) <= set(out)]
    coefficients = [c for c, _, _ in split]
    size, coefficient = abs(coefficients[0]), 1.0
    are_real = not any(isinstance(c, complex) for c in coefficients)
    if are_real and all(abs(abs(c) - size) <= 1e-15 * size for c in coefficients):
        coefficient = -size if sum(c < 0 for c in coefficients) * 2 > len(terms) else size
    if not common and coefficient == 1:
        terms = sorted(terms, key=lambda t: t.turn)
        return expr("add", terms, shape, widest(*(t.kind for t in terms)))
    left = []
    for c, entries, _ in split:
        for entry in common:
            entries.remove(entry)
        ratio = c if coefficient == 1 else np.sign(c / coefficient)
        left.append(product(entries, out, shape, ratio))
    return product([*common, (add(left), out)], out, shape, coefficient)


def plus(*terms: Expr) -> Expr:
    """Returns the elementwise sum of arrays, with NumPy broadcasting."""
    shape = np.broadcast_shapes(*(t.shape for t in terms))
    return add([broadcast(t, shape) for t in terms])


# --- elementwise functions


def apply(name: str, /, *of: Any, kind: str = "", **attributes: Any) -> Expr:
    """Applies an elementwise operation; broadcasts shared by all arguments are applied afterwards.

    kind: The kind of the result. By default, the kind is the promoted kind of the arguments, and at
        least "real".
    """
    args = [*map(lifted, of)]
    kind = kind or widest(REAL, *(a.kind for a in args))
    shape = np.broadcast_shapes(*(a.shape for a in args))
    args = [broadcast(a, shape) for a in args]
    kept = sorted(set().union(*map(varying, args)))
    if len(kept) == len(shape):
        return expr(name, args, shape, kind, **attributes)
    inner = apply(name, *(drop_axes(a, kept) for a in args), kind=kind, **attributes)
    return broadcast(inner, shape, kept)


def power(x: Expr, exponent: float) -> Expr:
    """Raises x to a constant real power, elementwise."""
    exponent = float(exponent)
    if exponent == 1:
        return x
    if exponent == 0:
        return full(1.0, x.shape)
    constant = expressions.constant_of(x)
    if constant is not None and (constant != 0 or exponent > 0):
        return full(constant**exponent, x.shape)
    whole = exponent.is_integer()
    if x.op == "power" and whole:
        return power(x.args[0], x["exponent"] * exponent)
    if x.op == "einsum" and x.args and not contracts(x):
        c = x["coefficient"]
        if whole or (not isinstance(c, complex) and c > 0 and len(x.args) == 1):
            return with_factors(x, [power(f, exponent) for f in x.args], c**exponent)
    return apply("power", x, exponent=exponent)


# --- parts of complex numbers


def conj(x: Expr) -> Expr:
    """Returns the complex conjugate of x; conjugates the operands of products and sums."""
    if not x.is_complex:
        return x
    if x.op == "conj":
        return x.args[0]
    if x.op == "einsum":
        return with_factors(x, map(conj, x.args), tidy(np.conj(x["coefficient"])))
    if x.op == "add":
        return add([conj(t) for t in x.args])
    return apply("conj", x)


def real(x: Expr) -> Expr:
    """Returns the real part of x."""
    return _part(x, 0)


def imag(x: Expr) -> Expr:
    """Returns the imaginary part of x."""
    return _part(x, 1)


def _part(x: Expr, which: int) -> Expr:
    """Returns the real part (0) or the imaginary part (1) of x."""
    if not x.is_complex:
        return (x, full(0.0, x.shape))[which]
    c = x.get("coefficient", 1j)  # the coefficient of a product
    if not isinstance(c, complex) and sum(f.is_complex for f in x.args) == 1:
        return with_factors(x, [_part(f, which) if f.is_complex else f for f in x.args], c)
    return apply(("Re", "Im")[which], x, kind=REAL)


def squeeze(x: Expr, axes: tuple[int, ...]) -> Expr:
    """Removes length-1 axes from x."""
    kept = [a for a in range(x.rank) if a not in axes]
    if x.op == "einsum":
        return drop_axes(x, kept)
    shape = [x.shape[a] for a in kept]
    return reshape(x.args[0], shape) if x.op == "reshape" else expr("reshape", (x,), shape, x.kind)


# --- Python's operators


_times = lambda a, b: times(a, b) if isinstance(b, Expr) else scale(b, a)
_OPERATORS = {
    "__add__": lambda a, b: plus(a, lifted(b)),
    "__radd__": lambda a, b: plus(lifted(b), a),
    "__sub__": lambda a, b: plus(a, scale(-1.0, lifted(b))),
    "__rsub__": lambda a, b: plus(lifted(b), scale(-1.0, a)),
    "__mul__": _times,
    "__rmul__": _times,
    "__truediv__": lambda a, b: times(a, power(lifted(b), -1)),
    "__pow__": power,
    "__neg__": lambda a: scale(-1.0, a),
    "__matmul__": matmul,
    "__array_ufunc__": None,  # NumPy scalars defer to Expr's operators
}
for _name, _operator in _OPERATORS.items():
    setattr(Expr, _name, _operator)
