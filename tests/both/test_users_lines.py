"""Warnings point at the line of the user's that they are about."""

from __future__ import annotations

import sys
import warnings

import numpy as np

from gradtools import GradtoolsWarning


def line() -> int:
    """The line of the call."""
    return sys._getframe(1).f_lineno


def said(call):
    """The one warning of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", GradtoolsWarning)
        call()
    (one,) = [w for w in found if issubclass(w.category, GradtoolsWarning)]
    return one


def test_a_disconnected_argument_is_warned_of_at_the_call(gt):
    x = gt.asarray(np.ones(2))
    taken = gt.grad(lambda x, y: (x * x).sum(), (0, 1), disconnected_inputs="warn")
    lines = []

    def one():
        lines.append(line() + 1)
        taken(x, x)

    def many():
        lines.append(line() + 1)
        gt.grad(lambda x, y: x.sum(), (0, 1), disconnected_inputs="warn")(x, x)

    for call in (one, many):
        found = said(call)
        assert (found.filename, found.lineno) == (__file__, lines.pop())
