"""Compares Keras 3 models in make_functional with Keras' own calls, with both backends."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        find_spec("keras") is None, reason="needs keras: pip install --group integration"
    ),
]
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "support" / "keras_programs.py"
(LISTED,) = [
    node.value.elts
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PROGRAMS"
]
NAMES = [name.id for name in LISTED]


@functools.cache
def outcomes(backend):
    """Run keras_programs.py once per backend, because Keras loads only one backend per process."""
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, str(SOURCE)], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=getattr(pytest.mark, b)) for b in ("torch", "jax")]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_keras_model_works_as_in_keras(backend, name):
    assert outcomes(backend)[name] == ""
