"""Negative controls: what the scenario matrix must catch.

Of every operator, an answer that is off in one leaf. `mutants.py` plants defects.
"""

from __future__ import annotations

import numpy as np
import pytest

from gradtools.testing.cross_checking import tolerances
from tests.conformance.rig import trial
from tests.conformance.rig.checking import judged
from tests.conformance.rig.matrix import cells
from tests.conformance.rig.reference import each_leaf
from tests.conformance.rig.trial import ASKS

pytest_plugins = ["tests.support.compiled_programs"]
pytestmark = pytest.mark.usefixtures("compiled_programs_kept")

ALL = ("torch", "jax")


FLAT = {"mean of squares", "sum of an empty array", "empty output"}


@pytest.mark.slow_at("jax")
@pytest.mark.parametrize("name", ASKS)
def test_an_answer_that_is_off_in_one_leaf_is_caught(name, backend_name, monkeypatch):
    """Whatever an operator gets wrong shows in its answer; a thousandth in any leaf is seen."""
    cell = next(
        cell
        for cell in cells(backend_name)
        if cell.operator.name == name
        and not cell.reason
        and (cell.dtype, cell.transform) == ("float64", "eager")
        and cell.program.name not in FLAT
    )
    right = trial.answers(cell, backend_name)
    assert not judged(cell, backend_name).failure
    for k, leaf in enumerate(right):
        off = leaf + 1e-3 * (1 + np.abs(leaf))
        answer = [*right[:k], off, *right[k + 1 :]], []
        monkeypatch.setattr(trial, "_transformed", lambda *_, answer=answer: answer)
        verdict = judged(cell, backend_name)
        assert verdict.failure and verdict.oracle, f"leaf {k} of {cell}"


def test_a_small_error_is_caught_by_the_table_of_tolerances_alone(gt, backend_name, monkeypatch):
    """A relative error of 1e-6 in a gradient fails in 64 bits, unless the table is widened."""
    cell = next(
        c for c in cells(backend_name) if c.operator.name == "grad" and c.dtype == "float64"
    )
    whole = gt.grad
    off = lambda f, *a, **k: (
        lambda *x, **m: each_leaf(lambda g: g * (1 + 1e-6), whole(f, *a, **k)(*x, **m))
    )
    monkeypatch.setattr(gt, "grad", off)
    assert judged(cell, backend_name).failure
    monkeypatch.setitem(tolerances.FINITE_DIFFERENCES, "float64", 1e-3)
    assert not judged(cell, backend_name).failure
