"""What only a GPU shows (gradtools/testing/gpu.py): it runs wherever PyTorch has one.

    python -m pytest tests/torch/test_cuda.py -rs

What needs no GPU to be seen is in test_other_device.py.
"""

from __future__ import annotations

import json

import pytest
import torch

from gradtools.cli import main
from gradtools.testing import gpu
from gradtools.testing.gpu import SCENARIOS, Absent, GpuScenario


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
        pytest.skip("it is of CUDA alone")
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


def test_the_command_runs_the_scenarios_on_a_gpu_and_fails_with_them(monkeypatch, capsys):
    def falls(device):
        raise AssertionError("it differs")

    def lacks(device):
        raise Absent("it needs two GPUs")

    scenarios = {"one": GpuScenario(lambda device: None), "two": GpuScenario(falls)}
    monkeypatch.setattr(gpu, "SCENARIOS", {**scenarios, "three": GpuScenario(lacks)})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("gradtools.testing.check_command.placed", placed_anywhere)
    asked = ["check", "--backend", "torch", "--quick", "--filter", "stop_gradient"]
    assert main([*asked, "--device", "cuda"]) == 1
    said = capsys.readouterr().out
    assert "FAILED on the GPU: two: AssertionError: it differs" in said
    assert "on the GPU: 1 of 2 held" in said
    assert "three: left out: it needs two GPUs" in said
    assert main([*asked, "--device", "cuda", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["gpu"]["one"] == ""
    assert main([*asked, "--device", "cpu"]) == 0


def placed_anywhere(backend, device):
    from contextlib import nullcontext

    return nullcontext()
