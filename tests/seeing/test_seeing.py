"""Tests why_zero in both backends."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gradtools import DisconnectedInputError, GradtoolsError

X = np.array([0.3, -0.8, 1.4], np.float32)


@pytest.fixture
def x(gt):
    return gt.asarray(X)


def kinds(report):
    return [finding.kind for finding in report]


def lines(report):
    return [finding.source.text for finding in report]


# --- why_zero ----------------------------------------------------------------------------


def test_each_leaf_has_its_own_findings(gt, x):
    def f(p):
        return (p["good"] * gt.xp.round(p["bad"])).sum() + 0 * gt.stop_gradient(p["worse"]).sum()

    p = {"good": x, "bad": x, "worse": x}
    report = gt.why_zero(f, p)
    found = {(finding.argument, finding.kind) for finding in report}
    assert found == {
        ("argument 0['bad']", "zero_derivative"),
        ("argument 0['worse']", "detached"),
    }


def test_several_arguments_may_be_asked_about(gt, x):
    report = gt.why_zero(lambda x, y, z: (x * gt.stop_gradient(y)).sum(), x, x, x, argnums=(1, 2))
    assert [(f.argument, f.kind) for f in report] == [
        ("argument 1", "detached"),
        ("argument 2", "unused"),
    ]


def overwritten(gt, x):
    y = gt.xp.sin(x)
    if hasattr(y, "at"):
        return y.at[:].set(1.0)  # here
    y[:] = 1.0  # here
    return y


def test_what_is_overwritten_is_named_with_its_line_and_is_no_lost_term(gt, x):
    report = gt.why_zero(lambda x: overwritten(gt, x).sum(), x)
    assert kinds(report) == ["zero"] and lines(report)[0].endswith("# here")
    assert not gt.why_zero(lambda x: (overwritten(gt, x) + x).sum(), x)


def test_an_error_of_fs_own_is_told_with_its_line(gt, x):
    line = _raises.__code__.co_firstlineno + 1
    with pytest.raises(GradtoolsError, match=rf"my own.* \(test_seeing.py:{line}\)"):
        gt.why_zero(_raises, x)


def test_nothing_lost_is_false_and_says_so(gt, x):
    report = gt.why_zero(lambda x: (x**2).sum(), x)
    assert not report
    assert len(report) == 0
    assert str(report).startswith("Nothing is lost")


def test_the_report_is_json(gt, x):
    # no other test calls trunc, because JAX 0.7 caches the source line of the first call
    report = gt.why_zero(lambda x: gt.xp.trunc(x).sum(), x)
    found = json.loads(report.to_json())
    assert found["findings"][0]["kind"] == "zero_derivative"
    assert found["findings"][0]["source"]["file"].endswith("test_seeing.py")
    assert "straight_through" in found["findings"][0]["fix"]


def _raises(x):
    raise ValueError("my own")


# --- errors that refer to why_zero -------------------------------------------------------


def test_a_disconnected_input_names_the_tool_that_finds_it(gt, x):
    def f(x):
        return (gt.stop_gradient(x) ** 2).sum()

    with pytest.raises(DisconnectedInputError, match="why_zero names the operation"):
        gt.grad(f)(x)
