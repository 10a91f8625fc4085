"""Tests the cells of the support matrix of custom rules, including cells that raise errors.

The cells of the rules in PLAIN_WAYS and of the transforms in PLAIN_TRANSFORMS are plain. One in
three plain cells is a quick test and the others are slow tests; if the transform compiles slowly,
one in four is a slow test and none is quick. One in sixteen of all other cells is a slow test. All
remaining cells run only in the sweep (`pytest -m sweep`).
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

import gradtools
from gradtools.errors import DisconnectedInputWarning
from tests.conformance import support_matrix
from tests.conformance.support_matrix import PLAIN_WAYS, refusal_of, wanted_of
from tests.conformance.support_transforms import BOTH, POINT, Case, Transform
from tests.conformance.support_ways import WAYS, Way
from tests.support.tiers import in_turn

pytest_plugins = ["tests.support.compiled_programs"]
pytestmark = pytest.mark.usefixtures("compiled_programs_kept")

# In all other transforms, rules outside of PLAIN_WAYS run only in slow tests and in the sweep.
PLAIN_TRANSFORMS = (
    "value",
    "gt.grad",
    "gt.jvp",
    "gt second order rr",
    "gt second order fr",
    "native grad",
    "vmap(grad)",
    "grad of a loop",
)
# This variable is set in the subprocess that runs shard_map for the plain rules on four devices.
DEVICES = os.environ.get("GRADTOOLS_TEST_DEVICES")
# Words in the names of transforms that compile slowly; their cells are never quick tests.
SLOW_WORDS = {
    "torch": ("compiled",),
    "jax": (
        *("compiled", "loop", "scan", "condition", "shard_map", "custom_", "check_grads"),
        *("third order", "hessian", "jacobian forward", "hvp fr", "order ff"),
    ),
}


def pytest_generate_tests(metafunc):
    asked = metafunc.config.getoption("--gradtools-backend")
    backends = [b for b in gradtools.available_backends() if asked in (b, "both")]
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", list(_cells(backends)))


def _cells(backends):
    for backend in backends:
        rows, columns = ([*names] for names in (support_matrix.transforms(backend), WAYS.values()))
        for transform, way in support_matrix.cells(backend):
            turn = rows.index(transform) + columns.index(way)
            plain = way.name in PLAIN_WAYS or transform.name in PLAIN_TRANSFORMS
            refusal = refusal_of(backend, transform, way)
            slow = not DEVICES and any(word in transform.name for word in SLOW_WORDS[backend])
            every = 4 if slow else 1
            marks = [pytest.mark.slow, *in_turn(turn, every if plain else 16)]
            marks = [] if plain and not slow and (DEVICES or turn % 3 == 0) else marks
            if refusal is not None and refusal.bug:
                reason = f"library bug: {refusal.reason}"
                marks.append(pytest.mark.xfail(strict=True, reason=reason))
            name = f"{backend}-{transform.name}-{way.name}"
            yield pytest.param((backend, transform, way), id=name, marks=marks)


def run(backend: str, transform: Transform, way: Way) -> None:
    case = Case(importlib.import_module(f"gradtools.{backend}"), backend, way)
    eager = backend == "torch" and "compiled" not in transform.name
    try:
        # later calls of the rule use the cached signature
        for _ in range(3 if eager else 1):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", DisconnectedInputWarning)
                found = [*transform.run(case)]
            assert found
            # grad warns if it differentiates a derivative that is constant.
            warned = any(issubclass(w.category, DisconnectedInputWarning) for w in caught)
            assert not warned or any(not np.any(expected) for _, expected in found)
            for y, expected in found:
                y = y.detach().numpy(force=True) if hasattr(y, "detach") else np.asarray(y)
                assert y.shape == np.shape(expected)
                np.testing.assert_allclose(y, expected, rtol=1e-8, atol=1e-10)
    finally:
        if backend == "torch":
            _leave_levels()


def _leave_levels() -> None:
    """Exit the forward-mode level that PyTorch does not exit if a compilation fails."""
    import torch
    from torch._functorch import eager_transforms
    from torch.autograd import forward_ad

    try:
        torch._C._exit_dual_level(level=torch._C._enter_dual_level())
    except RuntimeError:
        torch._C._exit_dual_level(level=0)
        forward_ad._current_level = -1
        eager_transforms.JVP_NESTING = 0


def test_a_cell_gives_the_closed_forms_numbers_or_raises_what_is_said(cell):
    refusal = wanted_of(*cell)
    if refusal is None:
        run(*cell)
        return
    with pytest.raises(Exception, match=refusal.words) as raised:
        run(*cell)
    assert type(raised.value).__name__ in refusal.error.split(" or ")


def test_the_closed_forms_are_each_others_differences():
    step = 1e-5
    for way in WAYS.values():
        x = POINT[: way.size]
        found = way.at(x)
        for i, e in enumerate(np.eye(way.size) * step):
            above, below = way.at(x + e), way.at(x - e)
            for k in range(3):
                slope = (above[k] - below[k]) / (2 * step)
                np.testing.assert_allclose(found[k + 1][..., i], slope, rtol=1e-6, atol=1e-6)


def test_a_cell_that_gives_another_number_fails():
    """A wrong rule, a dropped rule and a wrong shape must fail the comparison of a cell."""
    backend = gradtools.available_backends()[0]
    transform = next(t for t in BOTH if t.name == "gt.grad")
    cube = WAYS["defvjp"]
    dropped = lambda gt: lambda x: gt.stop_gradient(x) ** 3 + 0 * x
    doubled = lambda gt: lambda x: 2 * cube.make(gt)(x)
    for make in (dropped, doubled, lambda gt: lambda x: x[:2]):
        with pytest.raises((AssertionError, ValueError, RuntimeError, TypeError)):
            run(backend, transform, Way("wrong", make, cube.at))


@pytest.mark.jax
@pytest.mark.slow
def test_the_cells_of_shard_map_on_four_devices():
    """Run the cells of shard_map in a subprocess with four devices.

    Sums over devices need several devices, whose number is fixed at the start of a process. Only
    the plain rules run, because all other rules use the same code between devices.
    """
    if "jax" not in gradtools.available_backends():
        pytest.skip("needs JAX")
    sharded = [way for t, way in support_matrix.cells("jax") if t.name.startswith("shard_map")]
    assert sum(way.name not in PLAIN_WAYS for way in sharded) == 160
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    command += ["--gradtools-backend", "jax", "-m", "not slow"]
    command += ["-k", "shard_map and not four_devices"]
    done = subprocess.run(
        command,
        env={**os.environ, "XLA_FLAGS": flags, "GRADTOOLS_TEST_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:]
