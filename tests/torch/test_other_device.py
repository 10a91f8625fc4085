"""Tests every operator on a simulated device, which `other_device.py` provides."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import other_device
from tests.support.every_operator import USES

ROOT = Path(__file__).parents[2]
NAMES = [use.name for use in (*USES, *other_device.MORE) if "torch" in use.backends]
# Functions that have no array arguments, so their results are not on the device.
OF_THE_HOST = {"asarray", "random_key", "split_key"}
WAITS = {  # The number of host synchronizations in a second call.
    "asarray": 1,  # This `Use` converts its argument with `to_numpy`.
    "to_numpy": 1,
    # The operands of the kernel and of its pullback are copied to the host.
    "host_function: kernel": 3,
    "host_function: bwd": 3,
    "chunked: compared at each pass": 2,  # Each chunk needs one synchronization.
    # Operators that read numbers on the host.
    "implicit_solution: F": 4,
    "implicit_solution: solve": 4,
    "why_zero": 25,
    "formula": 9,
}
DRAW = {use.name for use in other_device.MORE if use.name.startswith("noise in")}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("c++") and importlib.util.find_spec("ninja")),
        reason="needs a C++ compiler and ninja",
    ),
]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Run other_device.py in a subprocess, which registers the device, and return its report."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "other_device.py")], check=False,
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-5000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_runs_on_the_device_of_its_arrays(name, found):
    one = found[name]
    assert not one["error"], one["where"]
    assert one["agrees"], "with the CPU"
    assert set(one["devices"]) <= {"cpu" if name in OF_THE_HOST else "other"}


@pytest.mark.parametrize("name", NAMES)
def test_the_host_waits_for_the_device_only_where_it_must(name, found):
    assert found[name]["again"] == WAITS.get(name, 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_random_stream_of_the_device_moves_only_where_f_draws(name, found):
    assert found[name]["drew"] == (name in DRAW)


@pytest.mark.parametrize("name", NAMES)
def test_all_runs_on_the_stream_on_which_an_operator_is_called(name, found):
    """No kernel runs on another stream, even in backward passes, which have their own thread."""
    assert found[name]["strays"] == 0


def test_more_chunks_are_no_more_waits(found):
    """The number of synchronizations is the same for four chunks and for two chunks."""
    for call in ("first", "again"):
        assert found["chunked: one row per chunk"][call] == found["noise in chunked"][call]


def test_the_sweep_finds_what_is_planted(found):
    told = {name: found[name] for name in other_device.FAULTS}
    assert "same device" in told["an array on the CPU"]["error"]
    assert "numpy" in told["NumPy's array"]["error"]
    assert "generator" in told["a generator on the CPU"]["error"]
    assert "Unknown device type" in told["a device that JAX does not see"]["error"]
    assert told["a number read by the host"]["again"] == 1
    assert told["a result on the CPU"]["devices"] == ["cpu"]
    assert told["a random state that changes"]["drew"]
    assert not told["a different result"]["agrees"]
    assert told["an ignored stream"]["strays"] == 1
