"""cross_check names the cause of a bug that is planted in the PyTorch or the JAX program."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("equinox")

from gradtools.testing import cross_check
from tests.support import ports
from tests.support.planted_mistakes import MISTAKES, UNKNOWN, both


@pytest.mark.sampled(8, 72)
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_the_cause_of_a_mistake_is_named(mistake, tmp_path):
    torch, jax = both(mistake.port, tmp_path, mistake.side, mistake.old, mistake.new)
    report = cross_check(
        torch=torch,
        jax=jax,
        args=ports.ARGUMENTS[mistake.port],
        order=1,
        dtype="float64",
        raises=False,
    )
    assert not report and mistake.cause in report.cause, str(report)


def test_most_of_the_mistakes_are_named():
    named = [m for m in MISTAKES if m.cause != UNKNOWN]
    assert len(MISTAKES) >= 60 and len(named) >= 60 and len({m.port for m in named}) >= 12
    assert {m.side for m in named} == {"torch", "jax"}
