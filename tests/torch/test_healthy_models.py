"""why_zero reports nothing for healthy losses of modules and reports each planted bug."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from tests.torch.healthy_models import HEALTHY, PLANTED, X, mlp

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("healthy", HEALTHY.cases())
def test_a_healthy_training_loss_has_no_finding(healthy):
    torch.manual_seed(0)
    loss, model = healthy.program()
    for _ in range(2):  # the first call of the loop and a later call
        report = gt.why_zero(loss, model=model)
        assert not report, str(report)
        loss()


@pytest.mark.parametrize("planted", PLANTED.cases())
def test_a_planted_loss_or_term_is_found(planted):
    torch.manual_seed(0)
    model, (kinds, whole) = mlp(4, 8, 3), planted.expected
    report = gt.why_zero(lambda: planted.program(model(X)), model=model)
    assert {(f.kind, f.whole) for f in report} == {(kind, whole) for kind in kinds.split()}
    assert {f.argument for f in report} == {name for name, _ in model.named_parameters()}
    assert all(f.source.file.endswith("torch/healthy_models.py") for f in report)
