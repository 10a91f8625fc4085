"""Rooms of what compares two models layer by layer, each by itself."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from gradtools.testing.cross_checking.causes import Causes
from gradtools.testing.diverging.divergence import _TraceComparison
from gradtools.testing.diverging.traces import Layer, Trace


def test_integers_have_no_gradient_to_compare():
    layer = Layer(("a",), 0, [], [np.arange(3)], [np.zeros(3)])
    trace, mapping = Trace([layer], {}, {}), SimpleNamespace(entries=[], left_out=[])
    compared = _TraceComparison(trace, trace, mapping, {("a",): ("a",)}, "float64", None).report()
    assert [c.quantity for c in compared.comparisons] == ["value"]


def test_what_is_no_derivative_is_not_compared_with_finite_differences():
    causes = SimpleNamespace(
        values_agree=True, names=["torch", "jax"], contradicts=lambda name, k: k == 0
    )
    assert Causes.wrong_side(causes, "gradient") == "torch"
    assert Causes.wrong_side(causes, "value") is Causes.wrong_side(causes, "parameter") is None
