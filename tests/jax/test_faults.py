"""What only JAX has: its own check for tracers that a function leaks."""

from __future__ import annotations

import jax
import pytest

import gradtools.jax as gt
from tests.support.every_operator import POINT, USES, World, healthy

NAMES = ("grad", "value_and_grad: aux", "hvp", "jacobian", "clip_gradient", "custom_rule: bwd")
CHECKED = [use for use in USES if use.name in NAMES]


@pytest.mark.slow_at("grad", "value_and_grad: aux", "jacobian", "clip_gradient")
@pytest.mark.sweep_at("hvp")
@pytest.mark.parametrize("use", CHECKED, ids=str)
def test_no_tracer_leaks_out_of_an_operator(use):
    with jax.checking_leaks():
        use.run(World(gt, healthy(gt), gt.asarray(POINT)))


def test_the_check_finds_a_tracer_that_f_leaks():
    kept = []

    def loss(x):
        kept.append(x * 2)
        return (x * x).sum()

    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked"):
        gt.grad(loss)(gt.asarray(POINT))
