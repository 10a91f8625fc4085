"""why_zero reports nothing for correct programs with masks, constants or target networks."""

from __future__ import annotations

import pytest

from tests.support.healthy_programs import HEALTHY, SPELLINGS, parameters, straight_through


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("f", HEALTHY, ids=lambda f: f.__name__)
@pytest.mark.sampled(torch=(35, 70), jax=(16, 70))
def test_a_healthy_loss_has_no_finding(gt, f, compiled):
    loss = lambda p: f(gt, p)
    report = gt.why_zero(gt.compile(loss) if compiled else loss, parameters(gt, HEALTHY[f]))
    assert not report, str(report)


@pytest.mark.parametrize("is_computed_once", [False, True], ids=["twice", "once"])
@pytest.mark.parametrize("is_scalar", [False, True], ids=["vector", "scalar"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_straight_through_estimator_in_any_spelling_has_no_finding(
    gt, spelling, is_scalar, is_computed_once
):
    loss = straight_through(spelling, is_scalar, is_computed_once)
    report = gt.why_zero(lambda p: loss(gt, p), parameters(gt, {"x": (4,)}))
    assert not report and not report.notes, str(report)
