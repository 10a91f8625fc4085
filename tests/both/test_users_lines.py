"""Warnings and tracebacks point at the user's line that caused them."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
import warnings

import numpy as np
import pytest

import gradtools
from gradtools import GradtoolsError, GradtoolsWarning
from tests.support.bad_inputs import BAD, NATIVE, ONLY
from tests.support.numpy_trees import lift

HERE = __file__
OWN = os.path.dirname(gradtools.__file__) + os.sep


def line() -> int:
    """Return the line number of the caller."""
    return sys._getframe(1).f_lineno


def said(call):
    """Run the call and return its only warning."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", GradtoolsWarning)
        call()
    (one,) = [w for w in found if issubclass(w.category, GradtoolsWarning)]
    return one


def shown(error):
    """Return the file names of an error's traceback and of the tracebacks of its causes."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return files + (shown(cause) if cause is not None else [])


@pytest.mark.sweep_at("jax")
def test_the_traceback_of_a_bad_call_has_no_frame_of_gradtools_and_fits_a_screen(gt, backend_name):
    """The test runs every call in the table of bad calls."""
    calls = {k: v for k, v in BAD.items() if ONLY.get(k, backend_name) == backend_name}
    for name, call in calls.items():
        with pytest.raises(Exception) as caught:
            call(gt, lambda x: lift(backend_name, x))
        files = shown(caught.value)
        own = [f for f in files if f.startswith(OWN)]
        assert files[0] == HERE and own == [], name
        if name not in NATIVE and caught.value.__cause__ is None:
            assert files[-1] == inspect.getfile(call), name
        text = "".join(traceback.format_exception(caught.value))
        assert text.count("\n") < 40 and len(str(caught.value)) < 900, name


def test_an_error_of_the_users_own_in_f_is_shown_without_ours(gt):
    def f(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        gt.hvp(f, (gt.asarray(np.ones(2)),), (gt.asarray(np.ones(2)),))
    files = shown(caught.value)
    assert files[0] == files[-1] == HERE and not any(f.startswith(OWN) for f in files)


def test_a_refusal_in_a_backward_pass_has_no_frame_of_gradtools():
    torch, gt = pytest.importorskip("torch"), pytest.importorskip("gradtools.torch")
    rule = gt.custom_rule(lambda x: x * x)
    rule.defvjp(lambda x: (x * x, x), lambda x, c: 2 * x * c)  # This bwd does not return a tuple.
    for out in (rule, gt.frozen(torch.nn.Linear(3, 3))):
        with pytest.raises(GradtoolsError, match=r"expected a tuple|is a constant") as caught:
            out(torch.ones(3, requires_grad=True)).sum().backward()
        assert not any(f.startswith(OWN) for f in shown(caught.value))


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
        assert (found.filename, found.lineno) == (HERE, lines.pop())
