"""Faults injected into single calls of the user's function must not change any state.

Each operator is applied to a function that raises an error, is interrupted or runs out of memory in
one of its calls. The fault must reach the user, unless the operator tries another method and
returns the expected result. The process state, the arguments and their `.grad` must be bitwise
unchanged. Afterwards, the same program without a fault must return the earlier result, which shows
that no cache is corrupted.
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
MOST = 6  # Faults are injected into the first `MOST` calls of f and into the last call.


class Planted(Exception):
    """An exception, unknown to the frameworks, that the user's function raises."""


@dataclass(frozen=True)
class Fault:
    """A planted fault with its name and the exception that is raised in each backend."""

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
    """Return a `part` that raises in call `at`, and a function that returns the number of calls.

    The counter is an iterator, because operators restore other closed-over state.
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
        pytest.skip(f"{use.name} runs only in {' and '.join(use.backends) or 'no backend'}")


def cause_of(error: BaseException) -> list[BaseException]:
    """Return the error and all errors in its chain of causes."""
    found: list[BaseException] = []
    nexts: BaseException | None = error
    while nexts is not None and nexts not in found:
        found.append(nexts)
        nexts = nexts.__cause__ or nexts.__context__
    return found


# --- the table of uses --------------------------------------------------------------------


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
    """Return whether a result equals the expected arrays bit by bit."""
    return [x.tobytes() for x in leaves(gt, found)] == [e.tobytes() for e in expected]


def chosen(count: int) -> list[int]:
    assert count, "the function was never called"
    return sorted({*range(min(count, MOST)), count - 1})


def outcome(use: Use, w: World) -> Any:
    """Return the result of a `Use`, or the exception that the `Use` raises."""
    try:
        return use.run(w)
    except BaseException as error:  # the planted faults include KeyboardInterrupt
        return error


def reaches(found: Any, planted: BaseException) -> bool:
    """Return whether the user sees the fault: as the same error, or in the text of another error.

    The text of a result that is not an error, such as a report, may also contain the fault.
    """
    if isinstance(planted, KeyboardInterrupt):
        return isinstance(found, KeyboardInterrupt)
    if isinstance(found, BaseException):
        return planted in cause_of(found) or TEXT in str(found)
    return TEXT in str(found)
