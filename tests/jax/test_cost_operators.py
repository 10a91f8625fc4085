"""Every public operator costs as much as handwritten code in the programs of the benchmark.

These costs are counts, so they are equal on every machine; `make bench` also measures seconds.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import gradtools.jax as gt
from benchmarks import cost_jax
from benchmarks.cost_jax import HAND, OURS
from tests.support.cost_elsewhere import without_case
from tests.support.costs import cost

CASES = cost_jax.cases()
ARGS = cost_jax.arrays(64, 64)
MORE = {
    # the input is divided by its largest entry, so that the norm cannot overflow
    "clip_gradient": (1.03, 1.02),
    # The gradients of the chunks are multiplied by weights before they are added.
    "microbatched_value_and_grad": (1.02, 1.01),
}


def test_every_public_operator_has_a_case():
    assert without_case(gt, CASES) == set()


@pytest.mark.quick_at("assign_gradients")
@pytest.mark.sampled(slow=10)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_costs_what_it_costs_by_hand(name):
    ours, hand = (cost(gt, run, *ARGS) for run in (CASES[name][OURS], CASES[name][HAND]))
    flops, peak = MORE.get(name, (1.01, 1.01))
    assert 0 < ours.flops <= flops * hand.flops
    assert 0 < ours.peak_bytes <= peak * hand.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_the_numbers_that_it_gives_by_hand(name):
    ways = (CASES[name][OURS], CASES[name][HAND])
    found, expected = (jax.tree.leaves(jax.jit(run)(*ARGS)) for run in ways)
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())
