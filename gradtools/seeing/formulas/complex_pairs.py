"""Combines the adjoints of separate real and imaginary parts to one of complex arrays.

A program with separate X_re and X_im has an adjoint with twice as many lines. With
``X = X_re + i X_im`` the gradient of a real function is ``X_bar = X_bar_re + i X_bar_im``
(gradtools' convention), and the two lines become one::

    I_bar = W^H O_bar

The parts are substituted by ``(X + X^*) / 2`` and ``(X - X^*) / 2i``, products are expanded, and
like terms collected. The result is used only if it agrees with the parts at a random point.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradtools.seeing.formulas.algebra import add, conj, product, zeros
from gradtools.seeing.formulas.expressions import COMPLEX, Expr, order, placeholder
from gradtools.seeing.formulas.operation_record import evaluate

_MOST_TERMS = 64
_REAL_ENDS = ("re", "real", "r")
_IMAGINARY_ENDS = ("im", "imag", "i")


@dataclass(frozen=True)
class ComplexPair:
    """Two arrays that are the parts of one complex array.

    Attributes:
        name: The name of the complex array.
        real: The real part.
        imaginary: The imaginary part.
        whole: The complex array.
    """

    name: str
    real: Expr
    imaginary: Expr
    whole: Expr


def find_pairs(leaves: Sequence[Expr]) -> list[ComplexPair]:
    """Pairs of inputs whose names differ only by re and im, real and imag, or r and i."""
    by_name = {p["name"]: p for p in leaves if p.kind == "real"}
    result = []
    for name, p in by_name.items():
        split = re.fullmatch(r"(.*?[^_.])[_.]?(re|real|r)", name)
        if split is None:
            continue
        other = name[: split.start(2)] + _IMAGINARY_ENDS[_REAL_ENDS.index(split[2])]
        q = by_name.get(other)
        separate = name[split.start(2) - 1] in "_."
        if q is not None and q.shape == p.shape and separate:
            result.append(pair(split[1], p, q))
    return result


def pair(name: str, real: Expr, imaginary: Expr) -> ComplexPair:
    """The pair of these parts, with a new complex array."""
    return ComplexPair(name, real, imaginary, placeholder(name, real.shape, COMPLEX))


def together(real: Expr, imaginary: Expr, pairs: Sequence[ComplexPair]) -> Expr | None:
    """The complex array with these parts, in terms of the pairs' complex arrays; or None."""
    known: dict[Expr, list[Expr]] = {}
    for p in pairs:
        known[p.real] = [0.5 * p.whole, 0.5 * conj(p.whole)]
        known[p.imaginary] = [-0.5j * p.whole, 0.5j * conj(p.whole)]
    whole = real + 1j * imaginary
    terms = _expanded(whole, known)
    if terms is None:
        return None
    result = _gathered(terms, whole.shape)
    return result if _agrees(whole, result, pairs) else None


def _expanded(x: Expr, known: dict[Expr, list[Expr]]) -> list[Expr] | None:
    """The terms of a polynomial in the parts; None if it is no polynomial, or too long."""
    new = dict(known)
    for y in order([x]):
        if y in new:
            continue
        if y.op == "add":
            new[y] = [t for a in y.args for t in new[a]]
        elif y.op == "einsum":
            chosen = itertools.islice(itertools.product(*(new[a] for a in y.args)), _MOST_TERMS + 1)
            c, labels = y["coefficient"], y["labels"]
            new[y] = [product(args, labels, range(y.rank), y.shape, c) for args in chosen]
        elif not set(order([y])) & set(known):
            new[y] = [y]
        else:
            return None
        if len(new[y]) > _MOST_TERMS:
            return None
    return new[x]


def _gathered(terms: Sequence[Expr], shape: Sequence[int]) -> Expr:
    """The sum with like terms collected."""
    result: dict[Expr, complex] = {}
    for t in terms:
        c = t["coefficient"] if t.op == "einsum" else 1.0
        core = product(t.args, t["labels"], range(t.rank), t.shape) if c != 1 else t
        result[core] = result.get(core, 0) + c
    left = [c * core for core, c in result.items() if abs(c) > 1e-14]
    return add(left) if left else zeros(shape)


def _agrees(apart: Expr, whole: Expr, pairs: Sequence[ComplexPair]) -> bool:
    """Whether both have equal values at a random point."""
    rng = np.random.default_rng(0)
    leaves = [p for p in order([apart, whole]) if p.op == "placeholder"]
    known = {p: rng.normal(size=p.shape) for p in leaves if p.kind == "real"}
    for p in pairs:
        a, b = (known.setdefault(x, rng.normal(size=x.shape)) for x in (p.real, p.imaginary))
        known[p.whole] = a + 1j * b
    if any(p not in known for p in leaves):
        return False
    first, second = evaluate([apart, whole], known)
    return bool(np.allclose(first, second, rtol=1e-12, atol=1e-12))
