"""why_zero reports nothing for healthy losses of modules and reports each planted bug."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
pytest.importorskip("equinox")
pytest.importorskip("flax")
pytest.importorskip("optax")

import gradtools.jax as gt
from tests.jax.healthy_models import HEALTHY, PARAMS, PLANTED

pytestmark = [pytest.mark.jax, pytest.mark.filterwarnings("ignore")]


@pytest.mark.slow_at("nnx with batch norm and dropout", "a recurrent cell in a scan")
@pytest.mark.parametrize("healthy", HEALTHY.cases())
def test_a_healthy_training_loss_has_no_finding(healthy):
    report = healthy.program()
    assert not report, str(report)


@pytest.mark.parametrize("planted", PLANTED.cases())
def test_a_planted_term_of_a_loss_is_found(planted):
    report = gt.why_zero(planted.program, PARAMS)
    assert {(f.kind, f.whole) for f in report} == {planted.expected}
    assert all(f.source.file.endswith("jax/healthy_models.py") for f in report)
