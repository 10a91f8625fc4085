"""Tests internal rules with a pushforward, a pullback or both, for two inputs and two outputs.

The support matrix tests the derivatives of rules in every transform and at every order.
"""

from __future__ import annotations

import numpy as np
import pytest

from gradtools.rules import Rule
from tests.support.native import MIXES, NATIVE, second_order
from tests.support.numpy_trees import lower


@pytest.fixture
def native(backend_name):
    return NATIVE[backend_name]


def same(found, expected, rtol=1e-12):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=0)


def _zero_or(a, b):
    """Return a * b, or None if b is a symbolic zero."""
    return None if b is None else a * b


def _sum(*terms):
    terms = [t for t in terms if t is not None]
    return sum(terms[1:], terms[0]) if terms else None


GIVEN = {
    "both maps": ("tangent", "cotangent"),
    "only the tangent map": ("tangent",),
    "only the cotangent map": ("cotangent",),
}

# The linear maps of (x, y) -> (x sum(y), y sum(x^2)), where x and y have different shapes.
_MAPS = {
    "tangent": lambda xs, dxs: [
        _sum(
            _zero_or(xs[1].sum(), dxs[0]),
            None if dxs[1] is None else xs[0] * dxs[1].sum(),
        ),
        _sum(
            _zero_or((xs[0] ** 2).sum(), dxs[1]),
            None if dxs[0] is None else xs[1] * (2 * xs[0] * dxs[0]).sum(),
        ),
    ],
    "cotangent": lambda xs, cts: [
        _sum(
            _zero_or(xs[1].sum(), cts[0]),
            None if cts[1] is None else 2 * xs[0] * (xs[1] * cts[1]).sum(),
        ),
        _sum(
            _zero_or((xs[0] ** 2).sum(), cts[1]),
            None if cts[0] is None else 0 * xs[1] + (xs[0] * cts[0]).sum(),
        ),
    ],
}
PAIRS = {
    given: Rule("pair", lambda x, y: [x * y.sum(), y * (x**2).sum()], **{m: _MAPS[m] for m in maps})
    for given, maps in GIVEN.items()
}


def pair_by_hand(x, y):
    return x * y.sum(), y * (x**2).sum()


@pytest.fixture(params=GIVEN)
def given(request):
    return request.param


def applied(gt, rule):
    backend = gt.grad.__self__._backend
    return lambda *xs: backend.apply_rule(rule, *xs)


@pytest.fixture
def pair(gt, given):
    return applied(gt, PAIRS[given])


X = np.array([0.5, -1.5, 2.0])


@pytest.mark.quick_at("torch")
@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("argnum", [0, 1])
def test_one_input_and_one_output_of_two(pair, gt, native, argnum, output):
    """A linear map receives None if an input has no tangent or an output has no cotangent."""
    xs = [native.array(X), native.array(np.array([2.0, -1.0]))]

    def at(run):
        def f(z):
            args = [z if i == argnum else x for i, x in enumerate(xs)]
            return (run(*args)[output] ** 2).sum()

        return f

    z = xs[argnum]
    same(lower(gt.grad(at(pair))(z)), lower(gt.grad(at(pair_by_hand))(z)))
    for mix in MIXES:
        v, w = z * 0.3 + 1, z * z - 0.5
        one, other = (second_order(gt, mix, at(run), z, v, w) for run in (pair, pair_by_hand))
        same(lower(one), lower(other))
