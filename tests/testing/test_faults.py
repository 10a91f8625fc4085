"""Faults planted in the user's function, at every call in turn: what is left afterwards?

Each operator is used on a function of which one call raises, is interrupted or runs out of memory.
The fault reaches the user, and the process, the arguments and their `.grad` are bit for bit as
they were; and the same use, healthy, then gives what it gave before, so nothing kept is poisoned.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.every_operator import POINT, USES, Use, World, healthy, leaves
from tests.support.state_of_process import bits, changes, everything

TEXT = "planted by the test"
MOST = 6  # a function that is called more often is broken at its first calls and at its last


class Planted(Exception):
    """What the user's function raises; no framework knows it."""


@dataclass(frozen=True)
class Fault:
    """What a call raises, by backend, and what may reach the user in its place."""

    name: str
    make: Callable[[str], BaseException]

    def __str__(self) -> str:
        return self.name


def out_of_memory(backend: str) -> BaseException:
    if backend == "torch":
        import torch

        return torch.OutOfMemoryError(f"CUDA out of memory, {TEXT}")
    import jax

    return jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory, {TEXT}")


FAULTS = (
    Fault("an exception", lambda backend: Planted(TEXT)),
    Fault("an interrupt", lambda backend: KeyboardInterrupt(TEXT)),
    Fault("out of memory", out_of_memory),
)


def counted(gt: Any, at: int = -1, error: BaseException | None = None) -> tuple[Any, Any]:
    """A part that raises at its call number `at`, and what tells how often it was called.

    The counter is one that nobody can put back, as operators do with what f closes over.
    """
    calls, plain = itertools.count(), healthy(gt)

    def part(x: Any) -> Any:
        if next(calls) == at:
            assert error is not None
            raise error
        return plain(x)

    return part, lambda: next(calls)


def array(backend: str, x: np.ndarray = POINT, **options: Any) -> Any:
    gt = importlib.import_module(f"gradtools.{backend}")
    x = gt.asarray(x)
    if backend == "torch":
        x = x.requires_grad_() if options.get("tracked") else x
        x.grad = x.detach() + 1 if options.get("tracked") else None
    return x


def cases() -> list[Any]:
    return [pytest.param(use, id=use.name) for use in USES if use.planted]


def here(use: Use, backend: str) -> None:
    if backend not in use.backends:
        pytest.skip(f"{use.name} runs in {' and '.join(use.backends) or 'no backend yet'} only")


def cause_of(error: BaseException) -> list[BaseException]:
    """The error, what it was raised from, and so on."""
    found: list[BaseException] = []
    nexts: BaseException | None = error
    while nexts is not None and nexts not in found:
        found.append(nexts)
        nexts = nexts.__cause__ or nexts.__context__
    return found


# --- the table ----------------------------------------------------------------------------


def test_every_public_name_has_a_use(gt):
    assert set(gt.__all__) == {use.public for use in USES}


@pytest.mark.sampled(torch=(70, 160), jax=(32, 120))
@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("use", cases())
def test_a_fault_at_any_call_reaches_the_user_and_leaves_nothing_behind(
    use, fault, gt, backend_name
):
    here(use, backend_name)
    x = array(backend_name, tracked=True)
    part, calls = counted(gt)
    expected = leaves(gt, use.run(World(gt, part, x)))
    count = calls()
    for at in chosen(count):
        error = fault.make(backend_name)
        before, memory = everything(), bits(x)
        found = outcome(use, World(gt, counted(gt, at, error)[0], x))
        told = reaches(found, error) or (use.retries and same(gt, found, expected))
        assert told, f"call {at} of {count}: {found!r}"
        assert changes(before, everything()) == [], f"call {at} of {count}"
        assert bits(x) == memory
    assert same(gt, use.run(World(gt, healthy(gt), x)), expected)


def same(gt: Any, found: Any, expected: list[np.ndarray]) -> bool:
    """Whether a use returned these very bits."""
    return [x.tobytes() for x in leaves(gt, found)] == [e.tobytes() for e in expected]


def chosen(count: int) -> list[int]:
    assert count, "the function was never called"
    return sorted({*range(min(count, MOST)), count - 1})


def outcome(use: Use, w: World) -> Any:
    """What a use raises, or returns."""
    try:
        return use.run(w)
    except BaseException as error:  # an interrupt is among what is planted
        return error


def reaches(found: Any, planted: BaseException) -> bool:
    """Whether the user is told: by the very error, or by one that carries its text.

    `measure` tells by a note why f has no derivative.
    """
    if isinstance(planted, KeyboardInterrupt):
        return isinstance(found, KeyboardInterrupt)
    if isinstance(found, BaseException):
        return planted in cause_of(found) or TEXT in str(found)
    return TEXT in str(found)
