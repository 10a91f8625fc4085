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


def find_pairs(leaves: Sequence[Expr]) -> list[ComplexPair]:
    """Pairs of inputs whose names differ only by re and im, real and imag, or r and i."""
    by_name = {p["name"]: p for p in leaves if p.kind == "real"}
    result = []
    for name, p in by_name.items():
        split = re.fullmatch(r"((.*?[^_.])[_.])(re|real|r)", name)
        q = split and by_name.get(split[1] + {"re": "im", "real": "imag", "r": "i"}[split[3]])
        if split and q and q.shape == p.shape:
            result.append(ComplexPair(split[2], p, q, placeholder(split[2], p.shape, COMPLEX)))
    return result


def together(
    gradients: Mapping[Expr, Expr | None], pairs: Sequence[ComplexPair]
) -> list[tuple[ComplexPair, Expr]]:
    """The gradients of the pairs in terms of the pairs' complex arrays, without those not taken.

    Nothing if one of them has no complex form.
    """
    parts = {p.real: [0.5 * p.whole, 0.5 * conj(p.whole)] for p in pairs}
    parts |= {p.imaginary: [-0.5j * p.whole, 0.5j * conj(p.whole)] for p in pairs}
    rng = np.random.default_rng(0)
    result = []
    for p in pairs:
        re, im = gradients.get(p.real), gradients.get(p.imaginary)
        if re is None or im is None:
            continue
        terms = _expanded(re + 1j * im, parts)
        if terms is None:
            return []
        apart, whole = re + 1j * im, add(terms)
        leaves = [x for x in order([apart, whole]) if x.op == "placeholder"]
        values = {x: rng.normal(size=x.shape) for x in (*leaves, *parts)}
        values |= {q.whole: values[q.real] + 1j * values[q.imaginary] for q in pairs}
        one, other = evaluate([apart, whole], values)
        if not np.allclose(one, other, rtol=1e-12, atol=1e-12):
            return []
        result.append((p, whole))
    return result


def _expanded(x: Expr, known: Mapping[Expr, list[Expr]]) -> list[Expr] | None:
    """The terms of a polynomial in the parts; None if it is not a polynomial, or too long."""
    terms = dict(known)
    for y in order([x]):
        if y in terms:
            continue
        if y.op == "add":
            terms[y] = [t for a in y.args for t in terms[a]]
        elif y.op == "einsum":
            labels, out, c = y["labels"], range(y.rank), y["coefficient"]
            some = itertools.islice(itertools.product(*(terms[a] for a in y.args)), _MOST_TERMS + 1)
            terms[y] = [product(zip(t, labels, strict=True), out, y.shape, c) for t in some]
        elif known.keys() & set(order([y])):
            return None
        else:
            terms[y] = [y]
        if len(terms[y]) > _MOST_TERMS:
            return None
    return terms[x]
