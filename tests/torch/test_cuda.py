"""Runs scenarios that need a GPU (tests/support/gpu.py) if PyTorch supports CUDA here.

    python -m pytest tests/torch/test_cuda.py -rs

test_other_device.py contains tests on a simulated device, which need no GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.support import gpu
from tests.support.gpu import SCENARIOS, Absent


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA device here")
    return torch.device(request.param)


SLOW = ("two processes",)


@pytest.mark.sweep_at(("cpu", "the bridge"))
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SCENARIOS]
)
def test_what_a_gpu_shows_holds_there_and_on_a_cpu_that_can_run_it(device, name):
    if device.type == "cpu" and not SCENARIOS[name].anywhere:
        pytest.skip("the scenario needs CUDA")
    try:
        SCENARIOS[name].run(device)
    except Absent as absent:
        pytest.skip(str(absent))


def gradient_of_another_draw(f):
    def drawing(x):
        torch.rand(())
        return f(x)

    return drawing


@pytest.mark.parametrize(
    "wrong",
    [
        gpu._drawn_again(gradient_of_another_draw),
        gpu._scaled(lambda net: lambda x: 2 * net(x)),
    ],
)
def test_a_scenario_fails_where_something_is_wrong(wrong):
    with pytest.raises(AssertionError):
        wrong(torch.device("cpu"))
