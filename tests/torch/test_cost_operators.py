"""Compares the costs of every public operator and of handwritten code in the benchmark programs.

These costs are counts, so they are equal on every machine; `make bench` also measures seconds.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from torch.utils._pytree import tree_leaves

import gradtools.torch as gt
from benchmarks import cost_torch
from benchmarks.cost_torch import HAND, OURS
from tests.support.cost_elsewhere import without_case
from tests.support.costs import cost

CASES = cost_torch.cases(64, 64)
COPYING = "reverse", "scale", "clip", "transform", "replace"
MORE = {
    # `frozen` evaluates G once more and saves no graph of G.
    "frozen": (1.19, 1.75),
    "hvp, forward over reverse": (1.01, 1.26),
    # The result of an edit is a copy, so that the next operation may write into it in place.
    **dict.fromkeys((f"{name}_gradient" for name in COPYING), (1.01, 1.26)),
    # The peak includes the outputs, the chunks that are concatenated, and a copy of the state.
    "chunked": (1.01, 1.5),
    # The graph of the first pass is searched for the leaves of f before the graph is freed.
    "checkpoint": (1.01, 2.0),
}


def test_every_public_operator_has_a_case():
    assert without_case(gt, CASES) == set()


# The memory that forward mode uses in this program depends on earlier runs in the process.
IN_A_PROCESS_OF_ITS_OWN = "hvp, forward over reverse"
_MEASURED = """
import gradtools.torch as gt
from benchmarks import cost_torch
from tests.support.costs import cost

for way in (cost_torch.OURS, cost_torch.HAND):
    found = cost(gt, cost_torch.cases(64, 64)[{name!r}][way])
    print("measured", found.flops, found.peak_bytes)
"""


def costs(name):
    """Return FLOPs and peak bytes of gradtools and of the handwritten code."""
    if name == IN_A_PROCESS_OF_ITS_OWN:
        command = [sys.executable, "-c", _MEASURED.format(name=name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        lines = [line.split()[1:] for line in done.stdout.splitlines() if "measured" in line]
        return [tuple(map(int, line)) for line in lines]
    return [cost(gt, CASES[name][way]) for way in (OURS, HAND)]


@pytest.mark.whole_at("minimax_value_and_grad")
@pytest.mark.parametrize("name", CASES)
def test_an_operator_costs_what_it_costs_by_hand(name):
    (flops, peak), (flops_by_hand, peak_by_hand) = costs(name)
    more_flops, more_peak = MORE.get(name, (1.01, 1.01))
    assert 0 < flops <= more_flops * flops_by_hand
    assert 0 < peak <= more_peak * peak_by_hand


@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_the_numbers_that_it_gives_by_hand(name):
    ways = (CASES[name][OURS], CASES[name][HAND])
    found, expected = ([x.detach().numpy() for x in tree_leaves(run())] for run in ways)
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())
