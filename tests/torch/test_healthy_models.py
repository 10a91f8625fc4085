"""In healthy training losses of modules why_zero finds nothing."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from tests.support.healthy_models_torch import HEALTHY

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("healthy", HEALTHY.cases())
def test_a_healthy_training_loss_has_no_finding(healthy):
    torch.manual_seed(0)
    loss, model = healthy.program()
    for _ in range(2):  # the first call of the loop, and a later one
        report = gt.why_zero(loss, model=model)
        assert not report, str(report)
        loss()
