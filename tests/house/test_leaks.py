"""Many calls of each operator leave storage, objects and compiled functions flat.

After a few calls that fill what is filled once, one of three more series of calls must end where
the one before did: what leaks grows in each. Each call is two: of an operator that was made once,
as in a training loop, and of one made anew of new functions, which is the hardest for caches.
Two thousand calls are made of what is cheap; `benchmarks/leaks.py` makes ten thousand of all.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.every_operator import POINT, USES, Use, World, healthy
from tests.testing.test_faults import here

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from leaks import alive, calls_of, grown, measured

CALLS, MANY = {"torch": 8, "jax": 4}, 2_000
CHEAP = {  # less than a millisecond a call
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
    if backend_name == "jax" and use.name in BY_HAND:
        assert_as_by_hand(found, BY_HAND[use.name])
    else:
        assert found == {}


def assert_as_by_hand(found: dict[str, float], program: Callable[[Any], Any]) -> None:
    """JAX keeps a dead weak reference for each trace within which numbers enter a jitted function.

    So it does where a gradient is written by hand like this. Clearing its caches gives them back.
    """
    import jax

    x = jax.numpy.asarray(POINT)
    by_hand = grown(lambda: [program(x), program(x)], "jax", CALLS["jax"])
    assert all(n <= by_hand.get(what, 0) for what, n in found.items()), (found, by_hand)
    # What the compiler's caches keep, up to their size.
    if "compiled programs" in by_hand or program is _by_conjugate_gradients:
        return
    assert set(found) <= {"objects"}
    dead = dead_references()
    jax.clear_caches()
    assert dead - dead_references() >= found.get("objects", 0) * CALLS["jax"]


def _in_forward_mode(x: Any) -> Any:
    """Forward mode over a gradient that is written inline."""
    import jax

    f = lambda g: jax.numpy.sum(_smooth(x) * g * g)
    return jax.jvp(jax.grad(f), (x,), (x,))


def _transposed(x: Any) -> Any:
    """The transpose of a map that is written with its point."""
    import jax

    return jax.linear_transpose(lambda t: _smooth(x) * t, x)(x)


def _at_stopped(x: Any) -> Any:
    """A gradient of a function that evaluates something at a stopped argument."""
    import jax

    return jax.grad(lambda x: jax.numpy.sum(x * _smooth(jax.lax.stop_gradient(x))))(x)


def _by_a_rule(x: Any) -> Any:
    """A gradient through a rule that is evaluated where it is differentiated."""
    import jax

    run = jax.custom_jvp(_smooth)
    run.defjvp(lambda xs, dxs: (_smooth(*xs), dxs[0]))
    return jax.grad(lambda x: jax.numpy.sum(run(x)))(x)


def _by_conjugate_gradients(x: Any) -> Any:
    """Linear solves by a product that is written inline, one for each of two operators."""
    import jax
    from jax.scipy.sparse.linalg import cg

    solve = lambda b: cg(lambda v: v + jax.numpy.sum(_smooth(x)) * v, b)[0]
    return jax.grad(lambda b: jax.numpy.sum(solve(b)))(x), jax.linearize(solve, x)[1](x)


def _smooth(x: Any) -> Any:
    import jax

    return jax.numpy.sin(x) + x * x


BY_HAND = {
    "implicit_solution: F": _by_conjugate_gradients,
    "implicit_solution: solve": _by_conjugate_gradients,
    "mixed_partial": _in_forward_mode,
    "mixed_partial: G": _in_forward_mode,
    "custom_rule: jvp": _transposed,
    "straight_through": _at_stopped,
    "straight_through: the surrogate": _at_stopped,
    "frozen: second order": _by_a_rule,
}


def dead_references() -> int:
    return sum(type(x) is weakref.ref and x() is None for x in gc.get_objects())


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
    """Something that a user's function closes over, and that can be seen to die."""

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
