"""why_zero reports the line and the kind of each cause of a lost gradient, and no other causes."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from tests.support.lost_gradients import losses
from tests.torch.lost_gradients import CASES

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("cause", CASES.causes.cases())
def test_a_cause_is_found_at_its_line(cause):
    torch.manual_seed(0)
    report = gt.why_zero(cause.program, *cause.known["args"])
    # ignore findings for captured parameters
    own = [f for f in report.findings if f.argument.startswith("argument")]
    found = [(f.kind, f.source and f.source.line, f.whole) for f in own]
    assert found == losses(cause)


@pytest.mark.parametrize("case", CASES.healthy_ones.cases())
def test_nothing_healthy_is_reported(case):
    torch.manual_seed(0)
    report = gt.why_zero(case.program, *case.known["args"])
    assert not report.findings
