"""`cross_check` reports no difference for pairs of programs that agree."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

from functools import partial

import jax
import jax.numpy as jnp
import torch

import gradtools.jax
import gradtools.torch
from gradtools.testing import cross_check
from tests.support.scenario_table import scenarios

functional = torch.nn.functional
X = np.array([0.3, -0.7, 1.2])
PAIRS = {
    "softplus": (functional.softplus, jax.nn.softplus, X),
    "exact gelu": (functional.gelu, lambda x: jax.nn.gelu(x, approximate=False), X),
    "relu of zeros": (functional.relu, jax.nn.relu, np.zeros(3)),
    "hardswish at its edge": (functional.hardswish, jax.nn.hard_swish, np.array([3.0, 0.5])),
    "biased variance": (lambda x: x.var(correction=0), jnp.var, X),
    "erf": (torch.erf, jax.scipy.special.erf, X),
    "logit": (torch.logit, jax.scipy.special.logit, X / 4 + 0.5),
    "a branch on values": (
        lambda x: x**2 if x.sum() > 0 else x,
        lambda x: x**2 if x.sum() > 0 else x,
        X,
    ),
}


def centred(x, root):
    away = x - x.mean(-1, keepdims=True)
    return (away / root((away**2).mean(-1, keepdims=True))).sum()


@pytest.mark.slow_at("float32")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_zero_but_for_rounding_agrees_in_its_value_too(dtype):
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(dtype)
    by_torch, by_jax = (partial(centred, root=root) for root in (torch.sqrt, jnp.sqrt))
    assert cross_check(torch=by_torch, jax=by_jax, args=(x,))


@pytest.mark.quick_at("erf", "logit")
@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_of_native_programs_agrees(name):
    by_torch, by_jax, x = PAIRS[name]
    report = cross_check(torch=by_torch, jax=by_jax, args=(x,))
    assert report and not report.conventions and not report.left_out
    assert len(report) == 5


@pytest.mark.sampled(3, 24)
@pytest.mark.parametrize(
    "scenario",
    # this scenario has no finite value
    [s for s in scenarios() if s.name != "a sum that overflows"],
    ids=lambda scenario: scenario.name,
)
def test_a_scenario_agrees_in_both_frameworks(scenario):
    pair = {gt.__name__.split(".")[1]: scenario.bind(gt) for gt in (gradtools.torch, gradtools.jax)}
    report = cross_check(**pair, args=scenario.args, order=scenario.order)
    assert report and not report.conventions and not report.left_out
    assert all(c.error <= 1 for c in report)
    expected = {0: {"value"}, 1: {"value", "gradient"}, 2: {"gradient", "jvp"}}[scenario.order]
    assert expected <= {c.quantity for c in report}
