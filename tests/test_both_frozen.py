"""The benchmark of frozen functions runs, and its table says what docs/frozen.md says."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
LARGEST = 1.34  # of frozen's work over double backward's


def rows(text, title):
    """The cells of each way under a title: {(framework, G, way): numbers}."""
    section = text.split(f"## {title}")[1].split("##")[0]
    lines = re.findall(r"^\| (\w+) \| (\w+) \| ([^|]+) \| (.*) \|$", section, re.M)
    found = {tuple(names): values.split(" | ") for *names, values in lines}
    return {k: [float(x) for x in v] for k, v in found.items() if k[0] != "framework"}


def check(text, models):
    work = rows(text, "Work")
    assert {(framework, model) for framework, model, _ in work} == {
        (framework, model) for framework in ("PyTorch", "JAX") for model in models
    }
    for framework, model, way in work:
        plain = work[framework, model, "double backward"][0]
        if way == "gt.frozen":
            assert 1 < work[framework, model, way][0] / plain <= LARGEST
        if way.startswith("gt.frozen, memory_budget"):
            assert work[framework, model, way][0] == plain


@pytest.mark.slow
def test_the_benchmark_runs():
    command = [sys.executable, str(ROOT / "benchmarks" / "frozen.py"), "--quick"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    check(done.stdout, ["dense"])
