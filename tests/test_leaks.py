"""Hundreds of calls of each operator leave storage, objects and compiled functions flat.

After a few calls that fill what is filled once, one of three more series of calls must end where
the one before did: what leaks grows in each. `benchmarks/leaks.py` does the same with ten thousand
calls.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
from every_operator import POINT, USES, Use, World, healthy
from test_faults import here

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from leaks import alive, grown

CALLS = {"torch": 25, "jax": 6}
# JAX compiles these anew in each eager call, for functions that are new in each, and keeps the last
# 2048 in its own cache: one rule, called 3600 times, grew to 234 thousand objects in the first 2000
# calls and by none in the others. Under jit nothing is kept.
CACHED_BY_JAX = {
    "jacobian: a loop", "per_example_grad: a loop", "mixed_partial", "mixed_partial: G",
    "custom_rule: fwd", "custom_rule: bwd", "custom_rule: jvp", "host_function: kernel",
    "host_function: bwd", "frozen", "frozen: second order", "functionalize",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("use", [u for u in USES if u.name != "measure"], ids=str)
def test_many_calls_leave_nothing_alive(use: Use, gt, backend_name):
    here(use, backend_name)
    if backend_name == "jax" and use.name in CACHED_BY_JAX:
        pytest.skip("JAX's own cache keeps what it compiled in eager code")
    x = gt.asarray(POINT)
    run = lambda: use.run(World(gt, healthy(gt), x))
    assert grown(run, backend_name, CALLS[backend_name]) == {}


def test_what_a_call_leaves_alive_is_found(gt, backend_name):
    kept: list[Any] = []
    found = grown(lambda: kept.append([gt.asarray(POINT)]), backend_name, 10)
    assert found["objects"] >= 10
    assert found["bytes of arrays"] >= 10 * POINT.nbytes
    gc.collect()
    assert set(alive(backend_name)) >= {"objects", "bytes of arrays"}
