"""Many calls of each operator leak no storage, objects or compiled functions.

After warm-up calls, three series of calls run. The test fails if a count increases in all three
series. Each call uses the operator twice: with a function created before the loop, as in training,
and with a new function, for which caches have no entry. Cheap operators are called two thousand
times; `benchmarks/leaks.py` calls every operator ten thousand times.
"""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.support.every_operator import POINT, USES, Use, World, healthy
from tests.testing.test_faults import here

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from leaks import alive, calls_of, grown, measured

CALLS, MANY = {"torch": 8, "jax": 4}, 2_000
CHEAP = {  # operators that take less than a millisecond per call
    "torch": (
        "vmap",
        "vjp",
        "grad",
        "custom_rule: value",
        "random_key",
        "split_key",
        "asarray",
        "to_numpy",
    ),
    "jax": (
        "custom_rule: value",
        "compile",
        "random_key",
        "split_key",
        "asarray",
        "to_numpy",
        "xp",
    ),
}


@pytest.mark.sampled(slow=32)
@pytest.mark.slow
@pytest.mark.parametrize("use", USES, ids=str)
def test_many_calls_leave_nothing_alive(use: Use, gt, backend_name):
    here(use, backend_name)
    x = gt.asarray(POINT)
    once, anew = (calls_of(use, gt, x, made_once) for made_once in (True, False))
    found = grown(lambda: [once(), anew()], backend_name, CALLS[backend_name])
    allowed = KEPT_BY_JAX.get(use.name, set()) if backend_name == "jax" else set()
    assert set(found) <= allowed, found


# Even without gradtools, JAX keeps a dead weak reference for each trace that passes constants to a
# jitted function. For a linear solve, JAX also keeps the compiled programs.
_REFERENCES, _SOLVES = {"objects"}, {"objects", "compiled programs", "entries of caches"}
KEPT_BY_JAX = {
    **dict.fromkeys(("implicit_solution: F", "implicit_solution: solve"), _SOLVES),
    **dict.fromkeys(("mixed_partial", "mixed_partial: G", "custom_rule: jvp"), _REFERENCES),
    **dict.fromkeys(("straight_through", "straight_through: the surrogate"), _REFERENCES),
    "frozen: second order": _REFERENCES,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for names in CHEAP.values() for name in names}))
def test_many_more_calls_leave_nothing_alive(name: str, gt, backend_name):
    if name not in CHEAP[backend_name]:
        pytest.skip(f"{name} takes too long in {backend_name}: see benchmarks/results/leaks.md")
    use = next(u for u in USES if u.name == name)
    run = measured(use, backend_name, gt, MANY, float("inf"))
    assert run.calls == MANY
    assert run.grown == {}


@pytest.mark.sweep_at("jax")
def test_what_a_call_leaves_alive_is_found(gt, backend_name):
    kept: list[Any] = []
    found = grown(lambda: kept.append([gt.asarray(POINT)]), backend_name, 10)
    assert found["objects"] >= 1
    assert found["bytes of arrays"] >= POINT.nbytes
    assert set(alive(backend_name)) >= {"objects", "bytes of arrays", "entries of caches"}


class Captured:
    """An object that the user's function closes over, and that must be deleted after the call."""

    def __init__(self, gt: Any, x: Any) -> None:
        self.x, self.plain = x, healthy(gt)

    def world(self, gt: Any) -> World:
        return World(gt, lambda x: self.plain(x), self.x)


HOLDERS = ("custom_rule: fwd", "custom_rule: bwd", "custom_rule: jvp", "host_function: kernel")


@pytest.mark.slow_at(("jax", "custom_rule: jvp"), ("jax", "frozen: second order"))
@pytest.mark.parametrize(
    "name", [*HOLDERS, "frozen", "frozen: second order", "straight_through", "jacobian: a loop"]
)
def test_what_a_function_closes_over_dies_with_it(name: str, gt):
    use = next(u for u in USES if u.name == name)
    captured = Captured(gt, gt.asarray(POINT))
    use.run(captured.world(gt))
    gone = weakref.ref(captured)
    del captured
    while gc.collect():
        pass
    assert gone() is None
