"""Each relation in the table is found between two arrays, in both orders of the arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradtools.testing.relations import (
    expression_cause,
    expressions_of,
    factor_name,
    related,
    relation,
)

_RNG = np.random.default_rng(0)
A, V = _RNG.normal(size=(3, 12)), _RNG.normal(size=6)
Z = _RNG.normal(size=4) + 1j * _RNG.normal(size=4)
MASK = np.tril(np.ones((4, 4), bool))
ONCE = np.array([[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0]], bool)
GATES = [*range(3), *range(6, 9), *range(3, 6), *range(9, 12)]
PAIRS = [*range(0, 12, 2), *range(1, 12, 2)]
MASKED = np.where(MASK, _RNG.normal(size=(4, 4)), -1e9)


def masked(mask):
    return np.where(mask, np.where(MASK, MASKED, 0.3), -1e9)


RELATIONS = {  # maps the expected description to the second and the first array
    "constant factor 0.5, a missing factor 1/2, or a term counted twice": (2 * V, V),
    "constant factor 0-1j, the imaginary unit": (1j * Z, Z),
    "sign": (-V, V),
    "conjugate": (Z.conj(), Z),
    "reversed axis 1": (A[:, ::-1], A),
    "shifted by one along axis 1": (np.roll(A, 1, 1), A),
    "permuted blocks of axis 1": (A[:, GATES], A),
    "interleaved axis 1": (A[:, PAIRS], A),
    "transposed layout": (A.T, A),
    "reshaped layout": (V, V[None]),
    "zero in some entries in jax": (np.where(V > 0, V, 0), V),
    "zero in jax": (0 * V, V),
    "mask: inverted": (~ONCE, ONCE),
    "mask: transposed layout": (ONCE.T, ONCE),
    "mask: shifted by one along axis 0": (np.tril(MASK, -1), MASK),
    "another mask": (masked(np.roll(MASK, 2, 0)), masked(MASK)),
}


@pytest.mark.parametrize("name", RELATIONS)
def test_a_relation_is_named(name):
    second, first = RELATIONS[name]
    found = related(first, second)
    assert found is not None and found.name == name
    back = related(second, first)
    assert back is not None
    if not name.startswith(("constant", "zero", "transposed layout,")):
        assert back.name == name


def test_other_arrays_have_no_relation():
    other = _RNG.normal(size=A.shape)
    assert related(A, other) is None and related(A, A * np.arange(1, 13)) is None
    assert relation(np.array([1.0, np.nan]), np.array([2.0, 3.0])) == (
        "constant factor 0.5, a missing factor 1/2, or a term counted twice"
    )
    # two constant arrays always differ by a constant factor
    assert related(np.ones(3), np.full(3, 1.37)) is None
    assert related(MASK, np.tril(MASK, -2)) is related(MASK | True, MASK & False) is None
    assert related(V, np.zeros(6), order=1).name == "stopped gradient in jax"


@pytest.mark.parametrize("n", [3, 7])
def test_a_factor_is_named_by_the_sizes_of_the_program(n):
    sizes = {"the batch size": n}
    sample = f"n / (n - 1) for n = {n}, the batch size, as in unbiased variance"
    assert factor_name(n / (n - 1), sizes) == sample
    assert factor_name(math.sqrt(n / (n - 1)), sizes) == f"the square root of {sample}"
    assert factor_name(1 / n, sizes) == "the batch size"
    assert factor_name(math.sqrt(n), sizes) == "the square root of the batch size"
    assert factor_name(1.37, sizes) is None


X = np.abs(V) + 0.1
ERF = np.vectorize(math.erf)(V / math.sqrt(2))
TANH = V / (1 + np.exp(-math.sqrt(8 / math.pi) * (V + 0.044715 * V**3)))
EXPRESSIONS = {
    "gelu(x) in torch, tanh gelu(x) in jax": (V * 0.5 * (1 + ERF), TANH, V),
    "x + 1e-05 in torch, x + 0.001 in jax": (V + 1e-5, V + 1e-3, V),
    "sqrt(x + 0.001) in torch, sqrt(x) + 0.001 in jax": (
        *(np.sqrt(X + 1e-3), np.sqrt(X) + 1e-3, X),
    ),
    "0.9 x in torch, 0.1 x in jax: the factors add up to 1": (0.9 * V, 0.1 * V, V),
    "var(x) over (0,) in torch, var(x, ddof=1) over (0,) in jax": (A.var(0), A.var(0, ddof=1), A),
}


@pytest.mark.parametrize("words", EXPRESSIONS)
def test_two_expressions_in_a_common_value_are_named(words):
    *sides, x = EXPRESSIONS[words]
    first, second = ([expressions_of(side, {"x": x})] for side in sides)
    assert expression_cause(first, second) == words


def test_expressions_that_both_lines_have_are_not_named():
    values = {"x": X, "y": V}
    lines = [[expressions_of(X - V, values), expressions_of(X + c, values)] for c in (1e-5, 1e-3)]
    assert expression_cause(*lines) == "x + 1e-05 in torch, x + 0.001 in jax"
