"""Rooms of what compares two models layer by layer, each by itself."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from gradtools.testing.cross_checking.causes import Causes
from gradtools.testing.diverging.divergence import _TraceComparison


def test_integers_have_no_gradient_to_compare():
    one = SimpleNamespace(gradients=[np.zeros(3)], outputs=[np.arange(3)])
    assert _TraceComparison._gradients(None, SimpleNamespace(torch=one, jax=one), 0.0, True) == []


def test_what_is_no_derivative_is_not_compared_with_finite_differences():
    causes = SimpleNamespace(
        values_agree=True, names=["torch", "jax"], contradicts=lambda name, k: k == 0
    )
    assert Causes.wrong_side(causes, "gradient") == "torch"
    assert Causes.wrong_side(causes, "value") is Causes.wrong_side(causes, "parameter") is None
