"""What why_zero says of gradients that are NaN or vanish, of what selects nothing, of a softmax."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

MARK = "# <- here"


def masked_root(gt, x):
    return gt.xp.sum(gt.xp.where(x > 0, gt.xp.sqrt(x), gt.xp.zeros_like(x)))  # <- here


def norm_at_zero(gt, x):
    return gt.xp.sqrt(gt.xp.sum((x * 0) ** 2))  # <- here


def overflowing(gt, x):
    return gt.xp.sum(gt.xp.log(1 + gt.xp.exp(400 * x)))  # <- here


def forty_sigmoids(gt, x):
    for _ in range(40):
        x = 1 / (1 + gt.xp.exp(-x))  # <- here
    return gt.xp.sum(x)


def nothing_selected(gt, x):
    return gt.xp.sum(x[2:2] ** 2)  # <- here


PLANTED = [
    (masked_root, "not_finite"),
    (norm_at_zero, "not_finite"),
    (overflowing, "not_finite"),
    (forty_sigmoids, "faint"),
    (nothing_selected, "empty"),
]
X = np.array([0.0, 2.0], np.float32)


@pytest.mark.parametrize(("f", "kind"), PLANTED, ids=[f.__name__ for f, _ in PLANTED])
def test_a_gradient_of_no_use_is_told_with_its_line(gt, f, kind):
    report = gt.why_zero(lambda x: f(gt, x), gt.asarray(X))
    lines, first = inspect.getsourcelines(f)
    at = next(first + k for k, line in enumerate(lines) if MARK in line)
    assert {(found.kind, found.source.line) for found in report} == {(kind, at)}
    assert all(found.numerical and found.mend in str(report) for found in report)
    if kind != "empty":
        assert "a gradient is missing" not in str(report)


HEALTHY = {
    "small because the output is small": lambda gt, x: gt.xp.sum(1e-30 * x),
    "a root behind where, inside and outside": lambda gt, x: gt.xp.sum(
        gt.xp.where(x > 0, gt.xp.sqrt(gt.xp.where(x > 0, x, gt.xp.ones_like(x))), 0 * x)
    ),
    "three sigmoids": lambda gt, x: gt.xp.sum(1 / (1 + gt.xp.exp(-1 / (1 + gt.xp.exp(-x))))),
    "a shift of a softmax": lambda gt, x: gt.xp.sum(
        x * gt.xp.exp(x + x[1]) / gt.xp.sum(gt.xp.exp(x + x[1]))
    ),
    "a mean of many": lambda gt, x: gt.xp.mean(gt.xp.stack([x**2] * 500)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_an_ordinary_gradient_is_no_finding(gt, name):
    report = gt.why_zero(lambda x: HEALTHY[name](gt, x), gt.asarray(X))
    assert not report, str(report)


def values(gt, w, s):
    return gt.xp.tanh(s @ w)


def of_states(gt):
    rng = np.random.default_rng(0)
    return [gt.asarray(rng.normal(size=n).astype(np.float32)) for n in (3, (4, 3), (4, 3))]


def test_a_stopped_target_is_no_finding(gt):
    def learning(w, s, t):
        target = 1 + 0.9 * gt.stop_gradient(values(gt, w, t))
        return gt.xp.mean((values(gt, w, s) - target) ** 2)

    assert not gt.why_zero(learning, *of_states(gt))


LOST = {
    "a term that is taken off": lambda gt, w, s, t: (
        gt.xp.mean(values(gt, w, s)) - 0.1 * gt.stop_gradient(gt.xp.mean(values(gt, w, t)))
    ),
    "a discrete step behind the stop": lambda gt, w, s, t: gt.xp.mean(
        (values(gt, w, s) - gt.xp.round(gt.stop_gradient(values(gt, w, t)))) ** 2
    ),
    "a sum": lambda gt, w, s, t: gt.xp.mean(
        (values(gt, w, s) + gt.stop_gradient(values(gt, w, t))) ** 2
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_no_target_is_still_told(gt, name):
    report = gt.why_zero(lambda w, s, t: LOST[name](gt, w, s, t), *of_states(gt))
    assert [finding.kind for finding in report] == ["detached"]
    assert not report.findings[0].whole


def test_a_report_on_no_leaf_does_not_say_that_nothing_is_lost(gt):
    report = gt.why_zero(lambda x: gt.xp.round(x), gt.asarray(X), wrt=())
    assert "Nothing was looked at" in str(report) and "Nothing is lost" not in str(report)
