"""Both frameworks run tests on the device that the option --gradtools-device selects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gradtools import GradtoolsError
from tests.support.devices import placed
from tests.support.every_operator import POINT


@pytest.mark.slow_at("jax")
def test_arrays_are_made_where_the_run_is_placed(gt, backend_name):
    with placed(backend_name, "cpu:0"):
        x = gt.asarray(np.ones(3))
        assert "cpu" in str(x.device).lower()
        assert gt.to_numpy(gt.grad(lambda x: gt.xp.sum(x * x))(x)).tolist() == [2.0, 2.0, 2.0]


def test_an_absent_device_is_refused_and_those_that_are_there_are_named(backend_name):
    words = "^device tpu:7: .+ has no such device here; it has "
    with pytest.raises(GradtoolsError, match=words), placed(backend_name, "tpu:7"):
        pass


@pytest.mark.sweep_at("jax")
def test_every_operator_stays_on_the_device_of_its_arrays(gt, backend_name):
    """On PyTorch's meta device, a computation with an array on another device raises an error."""
    if backend_name == "jax":
        return on_the_second_of_two_devices()
    import torch

    with torch.device("meta"):
        made = gt.asarray(POINT), gt.asarray([1.0]), gt.asarray(np.float32(2))
    assert {x.device.type for x in made} == {"meta"}


def on_the_second_of_two_devices() -> None:
    """Run operators on the second of two CPU devices that JAX simulates in a new process."""
    found = subprocess.run(
        [sys.executable, "-c", SECOND], capture_output=True, text=True, timeout=300, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert found.stdout.split() == ["held"], found.stderr


SECOND = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
jax.config.update("jax_enable_x64", True)
import gradtools.jax as gt
from tests.support.every_operator import POINT, USES, World, healthy
from tests.support.devices import placed
second = jax.devices("cpu")[1]
with placed("jax", "cpu:1"):
    for name in ("grad", "jvp", "hvp", "clip_gradient", "custom_rule: bwd", "asarray"):
        use = next(use for use in USES if use.name == name)
        found = use.run(World(gt, healthy(gt), gt.asarray(POINT)))
        assert found.devices() == {second}, name
assert gt.asarray(POINT).devices() == {jax.devices("cpu")[0]}
print("held")
"""


def test_the_tests_are_run_where_the_option_says(pytestconfig, gt, backend_name):
    asked = pytestconfig.getoption("--gradtools-device")
    kind = {"auto": "", "gpu": "cuda"}.get(asked.partition(":")[0], asked.partition(":")[0])
    assert kind in str(gt.asarray(POINT).device).lower()
