"""Separate real and imaginary parts, combined to complex arrays.

A program with separate X_re and X_im has an adjoint with twice as many lines. With
X = X_re + i X_im the gradient of a real function is X_bar = X_bar_re + i X_bar_im (gradtools'
convention), and the two lines become one, such as I_bar = W^H O_bar::

    X_re = (X + X*) / 2        X_im = (X - X*) / 2i

are substituted, products are expanded, and like terms collected. The result is used only if it
agrees with the parts at a random point.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.seeing.formulas.algebra import add, conj, product
from gradtools.seeing.formulas.expressions import COMPLEX, Expr, evaluate, order, placeholder

_MOST_TERMS = 64


@dataclass(frozen=True)
class ComplexPair:
    """Two arrays that are the parts of one complex array, and that array with its name."""

    name: str
    real: Expr
    imaginary: Expr
    whole: Expr

    @classmethod
    def of(cls, name: str, real: Expr, imaginary: Expr) -> ComplexPair:
        """The pair, with a new complex array."""
        return cls(name, real, imaginary, placeholder(name, real.shape, COMPLEX))


def find_pairs(leaves: Sequence[Expr]) -> list[ComplexPair]:
    """Pairs of inputs whose names differ only by re and im, real and imag, or r and i."""
    by_name = {p["name"]: p for p in leaves if p.kind == "real"}
    result = []
    for name, p in by_name.items():
        split = re.fullmatch(r"((.*?[^_.])[_.])(re|real|r)", name)
        q = split and by_name.get(split[1] + {"re": "im", "real": "imag", "r": "i"}[split[3]])
        if split and q and q.shape == p.shape:
            result.append(ComplexPair.of(split[2], p, q))
    return result


def together(
    gradients: Mapping[Expr, Expr | None], pairs: Sequence[ComplexPair]
) -> list[tuple[ComplexPair, Expr]]:
    """The gradients of the pairs in terms of the pairs' complex arrays, without those not taken.

    Nothing if one of them has no complex form.
    """
    known: dict[Expr, list[Expr]] = {}
    for p in pairs:
        known[p.real] = [0.5 * p.whole, 0.5 * conj(p.whole)]
        known[p.imaginary] = [-0.5j * p.whole, 0.5j * conj(p.whole)]
    result = []
    for p in pairs:
        a, b = gradients.get(p.real), gradients.get(p.imaginary)
        if a is None or b is None:
            continue
        terms = _expanded(a + 1j * b, known)
        if terms is None or not _equal(a + 1j * b, add(terms), pairs):
            return []
        result.append((p, add(terms)))
    return result


def _equal(apart: Expr, whole: Expr, pairs: Sequence[ComplexPair]) -> bool:
    """Whether both are equal at a random point, and depend on the pairs and on real arrays only."""
    rng = np.random.default_rng(0)
    leaves = [p for p in order([apart, whole]) if p.op == "placeholder"]
    values: dict[Expr, Any] = {p: rng.normal(size=p.shape) for p in leaves if p.kind == "real"}
    for p in pairs:
        a, b = (values.setdefault(x, rng.normal(size=x.shape)) for x in (p.real, p.imaginary))
        values[p.whole] = a + 1j * b
    if any(p not in values for p in leaves):
        return False
    first, second = evaluate([apart, whole], values)
    return bool(np.allclose(first, second, rtol=1e-12, atol=1e-12))


def _expanded(x: Expr, known: dict[Expr, list[Expr]]) -> list[Expr] | None:
    """The terms of a polynomial in the parts; None if it is no polynomial, or too long."""
    terms = dict(known)
    for y in order([x]):
        if y in terms:
            continue
        if y.op == "add":
            terms[y] = [t for a in y.args for t in terms[a]]
        elif y.op == "einsum":
            combined = itertools.product(*(terms[a] for a in y.args))
            terms[y] = [
                product(
                    zip(chosen, y["labels"], strict=True), range(y.rank), y.shape, y["coefficient"]
                )
                for chosen in itertools.islice(combined, _MOST_TERMS + 1)
            ]
        elif not set(order([y])) & set(known):
            terms[y] = [y]
        else:
            return None
        if len(terms[y]) > _MOST_TERMS:
            return None
    return terms[x]
