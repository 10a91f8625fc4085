"""Tests comparisons, reports and tolerances, and the imports of gradtools.testing."""

from __future__ import annotations

import doctest
import importlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

from gradtools import GradtoolsError
from gradtools.testing import AgreementError, Report, tolerance
from gradtools.testing.report import CONVENTION, compare_arrays

MODULES = (
    "testing.cross_checking.tolerances",
    "testing.cross_checking.compare",
    "testing.relations",
    "testing.report",
)


def compared(first, second, **options):
    return compare_arrays("value", "output", np.asarray(first), np.asarray(second), **options)


# --- one comparison


def test_an_error_is_relative_to_the_arrays_own_largest_entry():
    found = compared([100.0, 1.0], [100.0, 1.0 + 1e-10])
    assert found.error == pytest.approx(1.0, rel=1e-3)
    assert compared([1e-200, 0.0], [1.1e-200, 0.0]).error == pytest.approx(0.1 / 1.1 / 1e-12)


def test_the_worst_place_both_values_and_their_ratio_are_kept():
    found = compared([[1.0, 2.0], [3.0, 8.0]], [[1.0, 2.0], [3.0, 4.0]])
    assert (found.place, found.first, found.second, found.ratio) == ((1, 1), 8.0, 4.0, 2.0)
    assert compared([1.0], [0.0]).ratio is compared([np.nan], [1.0]).ratio is None
    found = compared([1.0], [[1.0]])
    assert (found.error, found.first, found.second) == (np.inf, "shape (1,)", "shape (1, 1)")


@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [
        ([np.nan, 1.0], [np.nan, 1.0], True),
        ([np.nan, 1.0], [1.0, np.nan], False),
        ([np.inf, 1.0], [np.inf, 1.0], True),
        ([np.inf], [np.inf], False),
        ([np.inf], [-np.inf], False),
        ([np.inf], [1e308], False),
        ([complex(np.nan, 1), 1], [complex(2, np.nan), 1], True),
        ([], [], True),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
        ([True], [False], False),
        ([0.0], [-0.0], True),
    ],
)
def test_nan_infinity_and_integers_agree_only_with_the_same(first, second, agree):
    assert compared(first, second).agrees is agree


# --- the report


def report() -> Report:
    rows = [
        compared([1.0], [1.0]),
        compared([2.0], [1.0]).because("constant factor 2", "Halve it."),
        compared([0.0], [1.0], order=1).because("convention: |x| at 0", status=CONVENTION),
    ]
    return Report("a check", comparisons=rows, left_out=["jvp: torch: none"], notes=["a note"])


def test_a_report_is_true_if_nothing_but_conventions_differs():
    found = report()
    assert not found and len(found) == 3
    assert [c.cause for c in found.disagreements] == ["constant factor 2"]
    assert found.cause == "constant factor 2" and found.worst.error == 1e12
    found.comparisons.pop(1)
    assert found and found.first is None and found.cause is None


def test_the_table_says_everything_in_plain_text():
    text = str(report())
    assert "3 arrays compared, 1 disagree, 1 by a known convention" in text
    assert "value of output at [0]: torch 2, jax 1, ratio 2" in text
    assert "Likely cause: constant factor 2. Halve it." in text
    assert "Left out: jvp: torch: none" in text and "Note: a note" in text
    assert "\x1b[" not in text and "\x1b[31m" in report().table(colour=True)


def test_the_error_carries_the_report_also_between_processes():
    with pytest.raises(AgreementError) as caught:
        report().require()
    assert isinstance(caught.value, GradtoolsError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.report == caught.value.report and str(again) == str(report())


# --- the tolerances


def test_the_table_holds_what_the_design_promises():
    assert tolerance("float64", 1) == 1e-12 and tolerance(np.float32, 1) == 1e-5
    assert tolerance("complex128", 2) == tolerance("float64", 2)
    assert tolerance(np.int64) == tolerance("bool") == 0.0


def test_a_dtype_of_pytorch_has_the_tolerance_of_its_name():
    torch = pytest.importorskip("torch")
    for name in ("float64", "float32", "bfloat16", "complex64", "int32", "bool"):
        assert tolerance(getattr(torch, name), 1) == tolerance(name, 1)


@pytest.mark.parametrize(
    ("dtype", "order", "says"),
    [("float64", 3, "expected 0, 1 or 2"), ("float8_e4m3", 0, "no row for the dtype float8_e4m3")],
)
def test_what_the_table_does_not_have_is_refused(dtype, order, says):
    with pytest.raises(GradtoolsError, match=says):
        tolerance(dtype, order)


# --- imports of the package


def fresh(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


def test_looking_at_the_names_imports_no_framework():
    program = """
import sys
from gradtools.testing import *
import gradtools.testing as t
t.tolerance("float64")
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "jax", "flax"}))
"""
    assert fresh(program) == "[]"


@pytest.mark.slow_at("testing.cross_checking.compare")
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name):
    if name == "testing.cross_checking.compare":
        pytest.importorskip("torch")
        pytest.importorskip("jax")
    found = doctest.testmod(importlib.import_module(f"gradtools.{name}"))
    assert found.attempted > 0 and found.failed == 0


def test_entries_that_are_not_finite_on_both_sides_are_counted():
    found = compared([np.nan, np.inf, 1.0], [np.nan, np.inf, 1.0])
    assert (found.agrees, found.uncompared) == (True, 2)
    report = Report("x", comparisons=[found])
    assert "2 entries are NaN or infinite on both sides" in report.summary()
    assert "2 entries not compared" in str(report)
    assert report[0] is found


@pytest.mark.parametrize("x", [[np.nan], [np.inf, np.nan], [-np.inf, -np.inf]])
def test_an_array_without_a_finite_entry_is_a_failure(x):
    found = compared(x, x)
    assert (found.agrees, found.cause) == (False, "NaN or infinite on both sides")
    assert "why_zero" in found.detail
