"""Tests formulas at ties and at arguments that overflow, and cotangents of several outputs."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools.errors import GradtoolsError


def array(gt, *numbers):
    return gt.asarray(np.array(numbers, np.float32))


def test_a_tie_at_the_arguments_is_told_with_both_values(gt):
    f = lambda x: gt.xp.max(x)
    said = str(gt.formula(f, array(gt, 1.0, 1.0, 0.0)).check)
    assert "at 3 random points" in said and "does not agree at the given arguments" in said
    apart = str(gt.formula(f, array(gt, 0.9, 0.7, 0.3)).check)
    assert "at the arguments and 3 random points" in apart and "but not" not in apart


def test_what_overflows_in_the_framework_is_refused(gt):
    f = lambda x: gt.xp.sum(gt.xp.log(1 + gt.xp.exp(x)))
    with pytest.raises(GradtoolsError, match="no value of f is finite at the arguments or near"):
        gt.formula(f, array(gt, 800.0, 1.0))
    found = gt.formula(f, array(gt, 8.0, 1.0))
    assert found.lines(0) == ["L = Σᵢ softplus(x)"] and "at the arguments and" in str(found)


def test_a_derivation_of_several_outputs_is_called_with_a_cotangent_for_each(gt):
    x = array(gt, 0.5, 1.5)
    found = gt.formula(lambda x: (x * x, gt.xp.exp(x), gt.xp.sum(x)), x)
    right = lambda x, a, b, c: 2 * x * a + gt.xp.exp(x) * b + c
    said = found.agrees_with(right)
    assert said and "called with 1 input, 3 cotangents" in str(said)
    assert not found.agrees_with(lambda x, a, b, c: 2 * x * a + gt.xp.exp(x) * b)
    with pytest.raises(
        GradtoolsError, match="called with 1 input, 3 cotangents, returned 2 values"
    ):
        found.agrees_with(lambda x, a, b, c: (x, x))


def test_a_derivation_is_compared_with_the_vjp_of_what_has_no_algebra(gt):
    A = gt.asarray(np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32))
    found = gt.formula(lambda A: gt.xp.linalg.inv(A), A)
    assert found.marked == ("inv",) and found.lines(1) == ["Ā = vjp[inv](A; Ȳ)"]
    inverse = lambda A: gt.xp.linalg.inv(A).T
    assert found.agrees_with(lambda A, ct: -inverse(A) @ ct @ inverse(A))
    wrong = found.agrees_with(lambda A, ct: inverse(A) @ ct @ inverse(A))
    assert not wrong and wrong.where.startswith("Ā[") and wrong.framework is not None


def test_a_derivation_returns_the_cotangents_of_the_differentiated_inputs(gt):
    A, x = gt.asarray(np.diag([1.0, 2.0]).astype(np.float32)), array(gt, 1.0, 3.0)
    found = gt.formula(lambda A, x: x @ (A @ x), A, x, argnums=1)
    assert found.inputs == ("A", "x") and found.gradients == ("x̄",)
    right = lambda A, x, ct: ct * (A @ x + A.T @ x)
    assert found.agrees_with(right)
    with pytest.raises(GradtoolsError, match="returned 2 values; expected a value for each of x̄"):
        found.agrees_with(lambda A, x, ct: (None, right(A, x, ct)))


def test_a_derivation_of_order_two_returns_the_derivatives_of_s(gt):
    x = array(gt, 0.5, 1.5)
    found = gt.formula(lambda x: x**3, x, order=2)
    assert found.agrees_with(lambda x, ct, u: (6 * ct * x * u, 3 * u * x**2))
    assert not found.agrees_with(lambda x, ct, u: (3 * ct * x**2, 3 * u * x**2))
