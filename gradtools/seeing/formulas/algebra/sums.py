"""Sums, simplified: like terms are gathered, and common factors taken out."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from gradtools.seeing.formulas.algebra.arrays import broadcast, broadcast_shape, negate, scale
from gradtools.seeing.formulas.algebra.constants import constant_of, full, is_zero, zeros
from gradtools.seeing.formulas.algebra.products import Labels, contracts, parts, product
from gradtools.seeing.formulas.algebra.reshapes import is_reshape, reshape
from gradtools.seeing.formulas.expressions import Expr, expr, widest


def add(terms: Sequence[Expr]) -> Expr:
    """The sum of terms of one shape: like terms gathered, common factors taken out."""
    if len(terms) == 1:
        return terms[0]
    shape = terms[0].shape
    gathered = _gather(terms)
    opened = _gather([t for term in terms for t in _terms(term)])
    if len(opened) < len(gathered) or len(opened) < sum(len(_terms(t)) for t in terms):
        gathered = opened
    if not gathered:
        return zeros(shape)
    cores = [scale(c, core) for core, c in gathered.items()]
    if len(cores) == 1:
        return cores[0]
    return _without_common(cores, shape)


def _terms(x: Expr) -> tuple[Expr, ...]:
    if x.op == "add":
        return x.args
    if x.op == "einsum" and len(x.args) == 1 and x.args[0].op == "add" and not contracts(x):
        c, (inner,), (names,) = x["coefficient"], x.args, x["labels"]
        return tuple(product([t], [names], range(x.rank), x.shape, c) for t in inner.args)
    return (x,)


def _gather(terms: Sequence[Expr]) -> dict[Expr, Any]:
    result: dict[Expr, Any] = {}
    for term in terms:
        coefficient, core = _coefficient(term)
        result[core] = result.get(core, 0) + coefficient
    return {core: c for core, c in result.items() if c != 0 and not is_zero(core)}


def _coefficient(x: Expr) -> tuple[Any, Expr]:
    constant = constant_of(x)
    if constant is not None:
        return constant, full(1.0, x.shape)
    if x.op == "einsum" and x["coefficient"] != 1:
        c = x["coefficient"]
        return c, product(x.args, x["labels"], range(x.rank), x.shape)
    return 1.0, x


def _without_common(terms: list[Expr], shape: tuple[int, ...]) -> Expr:
    """The sum, with what all terms share in front: axes that all lack, factors, a number."""
    split = [parts(t) for t in terms]
    used = {l for _, _, labels, _ in split for names in labels for l in names}
    kept = [a for a in range(len(shape)) if a in used]
    if len(kept) < len(shape):
        inner = [
            product(
                [t],
                [range(len(shape))],
                kept,
                [shape[a] for a in kept],
                1.0 / prod(n for a, n in enumerate(shape) if a not in kept),
            )
            for t in terms
        ]
        return product([add(inner)], [kept], range(len(shape)), shape)
    common = _common_factors(split)
    coefficient = _common_coefficient([s[0] for s in split])
    if not common and coefficient == 1:
        return _plain_sum(terms, shape)
    left = [_remove(s, common, coefficient, shape) for s in split]
    factors, labels = [f for f, _ in common], [n for _, n in common]
    rest = add(left)
    out = range(len(shape))
    return product([*factors, rest], [*labels, out], out, shape, coefficient)


def _common_factors(split: list) -> list:
    """The factors with the same labels in each term; none with labels that are summed over."""
    terms = [list(zip(factors, labels, strict=True)) for _, factors, labels, _ in split]
    out = split[0][3]
    shared = set(terms[0]).intersection(*terms[1:])
    chosen: list = []
    for entry in sorted(shared, key=lambda f: f[0].turn):
        inside = all(l in out for l in entry[1]) and _is_worth_it(entry, terms, len(out))
        if inside and all(_can_leave([*chosen, entry], term) for term in terms):
            chosen.append(entry)
    return chosen


def _can_leave(entries: list, term: list) -> bool:
    """Whether what is left of a product has all axes of what is taken out, or is a number."""
    rest = [e for e in term if e not in entries]
    axes = {l for _, names in rest for l in names}
    return not rest or {l for _, names in entries for l in names} <= axes


def _is_worth_it(entry: tuple[Expr, Labels], terms: list, rank: int) -> bool:
    """Whether it is a number, has all axes, or divides something that has more axes."""
    own = set(entry[1])
    if not own or len(own) == rank:
        return True
    return any(own < set(names) for term in terms for _, names in term)


def _common_coefficient(coefficients: list) -> Any:
    """The modulus that all share, negative if most terms are."""
    sizes = [abs(c) for c in coefficients]
    if any(isinstance(c, complex) for c in coefficients):
        return 1.0
    if any(abs(s - sizes[0]) > 1e-15 * sizes[0] for s in sizes):
        return 1.0
    negative = sum(c < 0 for c in coefficients) * 2 > len(coefficients)
    return -sizes[0] if negative else sizes[0]


def _remove(s: tuple, common: list, coefficient: Any, shape: tuple[int, ...]) -> Expr:
    c, factors, labels, out = s
    left = list(zip(factors, labels, strict=True))
    for entry in common:
        left.remove(entry)
    rest = c / coefficient
    if abs(abs(rest) - 1) < 1e-14 and not isinstance(rest, complex):
        rest = 1.0 if rest > 0 else -1.0
    return product([f for f, _ in left], [n for _, n in left], out, shape, rest)


def _plain_sum(terms: list[Expr], shape: tuple[int, ...]) -> Expr:
    moved = _sum_of_reshapes(terms, shape)
    if moved is not None:
        return moved
    terms = sorted(terms, key=lambda t: t.turn)
    return expr("add", terms, shape, widest(*(t.kind for t in terms)))


def _sum_of_reshapes(terms: list[Expr], shape: tuple[int, ...]) -> Expr | None:
    """Terms that are all reshaped from one shape are added before."""
    shapes = {s for s in map(_inner_shape, terms) if s is not None}
    if len(shapes) != 1:
        return None
    (inner,) = shapes
    before = [_reshape_if_plain(t, inner) for t in terms]
    plain = [b for b in before if b is not None]
    return reshape(add(plain), shape) if len(plain) == len(terms) else None


def _inner_shape(x: Expr) -> tuple[int, ...] | None:
    _, factors, labels, out = parts(x)
    if len(factors) == 1 and is_reshape(factors[0]) and labels[0] == out:
        return factors[0].args[0].shape
    return None


def _reshape_if_plain(x: Expr, shape: tuple[int, ...]) -> Expr | None:
    result = reshape(x, shape)
    _, factors, _, _ = parts(result)
    stuck = any(f.op == "reshape" and f.args[0].shape == x.shape for f in factors)
    return None if stuck else result


def subtract(a: Expr, b: Expr) -> Expr:
    """A minus b, broadcast as in NumPy."""
    return plus(a, negate(b))


def plus(*terms: Expr) -> Expr:
    """The sum, broadcast as in NumPy."""
    shape = broadcast_shape(*(t.shape for t in terms))
    return add([broadcast(t, shape) for t in terms])
