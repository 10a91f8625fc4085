"""Combines separate real and imaginary parts into complex arrays.

If a program represents a complex array X as two real arrays X_re and X_im, the adjoint has one line
for each of them. With X = X_re + i X_im, the gradient is X_bar = X_bar_re + i X_bar_im (gradtools'
convention), so the two lines can be written as a single line, such as I_bar = W^H O_bar. This
module substitutes::

    X_re = (X + X*) / 2        X_im = (X - X*) / 2i

Products are expanded and like terms are collected. The result is used only if it agrees with the
gradients of the parts at a random point.
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
    """The real and imaginary parts of an array, and a placeholder `whole` for the complex array."""

    name: str
    real: Expr
    imaginary: Expr
    whole: Expr


def in_complex_numbers(
    inputs: Sequence[Expr], gradients: Mapping[Expr, Expr], cotangents: Sequence[Expr]
) -> list[tuple[ComplexPair, Expr | None]]:
    """Pairs real and imaginary parts, and returns each pair with its gradient in complex form.

    Inputs are paired if their names are equal except for the endings re and im, real and imag, or r
    and i. The last pair contains the cotangents of the outputs. The gradient of a pair that is not
    differentiated is None. The list is empty if the gradient of any pair has no complex form.
    """
    by_name, pairs = {p["name"]: p for p in inputs if p.kind == "real"}, list[ComplexPair]()
    for name, p in by_name.items():
        split = re.fullmatch(r"((.*?[^_.])[_.])(re|real|r)", name)
        q = split and by_name.get(split[1] + {"re": "im", "real": "imag", "r": "i"}[split[3]])
        if split and q and q.shape == p.shape:
            pairs.append(ComplexPair(split[2], p, q, placeholder(split[2], p.shape, COMPLEX)))
    if not pairs or len({c.shape for c in cotangents}) != 1 or len(cotangents) != 2:
        return []
    base = "out" if "O" in {p.name for p in pairs} else "O"
    whole = placeholder(base, cotangents[0].shape, COMPLEX)
    pairs.append(ComplexPair(base, cotangents[0], cotangents[1], whole))
    parts = {p.real: [0.5 * p.whole, 0.5 * conj(p.whole)] for p in pairs}
    parts |= {p.imaginary: [-0.5j * p.whole, 0.5j * conj(p.whole)] for p in pairs}
    rng, result = np.random.default_rng(0), list[tuple[ComplexPair, Expr | None]]()
    for p in pairs:
        one, other = gradients.get(p.real), gradients.get(p.imaginary)
        apart = one + 1j * other if one is not None and other is not None else None
        terms = [] if apart is None else _expanded(apart, parts)
        if terms is None:
            return []
        together = add(terms) if terms else None
        if apart is not None and together is not None:
            leaves = [x for x in order([apart, together]) if x.op == "placeholder"]
            values = {x: rng.normal(size=x.shape) for x in (*leaves, *parts)}
            values |= {q.whole: values[q.real] + 1j * values[q.imaginary] for q in pairs}
            here, there = evaluate([apart, together], values)
            if not np.allclose(here, there, rtol=1e-12, atol=1e-12):
                return []
        result.append((p, together))
    return result if any(x is not None for _, x in result) else []


def _expanded(x: Expr, known: Mapping[Expr, list[Expr]]) -> list[Expr] | None:
    """Expands x to a list of terms; returns None if x is not a short polynomial in `known`."""
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
