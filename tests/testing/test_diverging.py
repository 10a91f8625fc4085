"""Rooms of what compares two models layer by layer, each by itself."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from gradtools.testing.cross_checking.disagreement import Scope
from gradtools.testing.diverging.divergence import _TraceWalk
from gradtools.testing.diverging.layer_guesses import _epsilon


def test_one_epsilon_of_all_rows_is_read_and_none_where_each_has_its_own():
    x = np.random.default_rng(0).normal(size=(5, 8))
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    read = lambda epsilon: _epsilon(x, centred / np.sqrt(variance + epsilon), ())
    np.testing.assert_allclose(read(1e-3), 1e-3, rtol=1e-6)
    assert read(np.linspace(1e-3, 1e-1, 5)[:, None]) is None


def test_integers_have_no_gradient_to_compare():
    one = SimpleNamespace(gradients=[np.zeros(3)], outputs=[np.arange(3)])
    assert _TraceWalk._gradients(None, SimpleNamespace(mine=one, theirs=one), 0.0, True) == []


def test_what_is_no_derivative_is_not_asked_of_finite_differences():
    sides = [SimpleNamespace(name="torch"), SimpleNamespace(name="jax")]
    found = SimpleNamespace(
        values_agree=True,
        check=SimpleNamespace(sides=sides),
        _contradicts=lambda k, quantity: k == 0,
    )
    assert "torch is wrong" in Scope.culprit(found, "gradient")
    assert Scope.culprit(found, "value") == Scope.culprit(found, "parameter") == ""
