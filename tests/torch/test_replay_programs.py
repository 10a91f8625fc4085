"""What is computed again is what was computed: each program of the table, by each operator.

The judge makes two equal worlds, runs gradtools in one and the plain program in the other, and
compares numbers, what stands afterwards, and the process. A program is right, or refused in
gradtools' words; anything else fails.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gradtools import GradtoolsError
from tests.support import replay_programs  # noqa: F401 - fills the table
from tests.support.replay_worlds import (
    CHUNKED,
    EITHER,
    PROGRAMS,
    REFUSED,
    RIGHT,
    Run,
    Way,
    World,
    ways,
)
from tests.support.scenarios import Scenario
from tests.support.tiers import in_turn

seed_numpy, numpy_state, put_numpy_state = np.random.seed, np.random.get_state, np.random.set_state


@dataclass(frozen=True)
class Verdict:
    """What came of a program.

    Attributes:
        kind: "right", "refused" or "wrong".
        text: The refusal, or what differs: what gradtools gave, what the plain program gave.
    """

    kind: str
    text: str = ""


def judge(program: Scenario, way: Way) -> Verdict:
    """Runs a program both ways."""
    _warmed()
    try:
        found = _run(program, Run(way, False))
    except GradtoolsError as error:
        said = str(error)
        if way.kind not in said:
            return Verdict("wrong", f"a refusal that does not name {way.kind}: {said}")
        return Verdict(REFUSED, said)
    except Exception as error:
        raised = f"raises {type(error).__name__}: {str(error)[:200]}"
        with contextlib.suppress(type(error)):
            _run(program, Run(way, True))
            return Verdict("wrong", raised)
        return Verdict(RIGHT, f"{raised}, as the plain program does")
    try:
        expected = _run(program, Run(way, True))
    except RuntimeError as error:
        return Verdict("wrong", f"gives numbers where the plain program raises {str(error)[:200]}")
    difference = differs(found, expected)
    return Verdict("wrong", difference) if difference else Verdict(RIGHT)


@cache
def _warmed() -> None:
    """What PyTorch changes in the process once: with dynamo come filters of warnings and others."""
    torch.compile(lambda x: torch.distributions.Normal(x, 1.0).mean, backend="eager")(torch.ones(1))
    torch.compile(nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1)).sum().backward()


def _run(program: Scenario, run: Run) -> dict[str, Any]:
    with streams_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _seed()
        world: World = program.program()
        _seed()
        numbers = world.step(run)
        process = _process()
        state = world.state()
    state = copy.deepcopy(_plain(state))
    numbers = _plain(numbers)
    return {
        "numbers": numbers,
        "state": state,
        "process": process,
        "tolerance": world.tolerance,
    }


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    seed_numpy(0)


def _plain(x: Any) -> Any:
    """Numbers without a graph, in containers."""
    if isinstance(x, torch.Tensor):
        x = x.detach()
        x = x.to_dense() if x.layout is not torch.strided else x.as_subclass(torch.Tensor)
        return x.resolve_conj().resolve_neg().clone()
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return x


# --- the process ----------------------------------------------------------------------------


def _process() -> dict[str, Any]:
    """Random streams and flags."""
    return {
        "PyTorch's random stream": torch.get_rng_state(),
        "Python's random stream": random.getstate(),
        "NumPy's random stream": list(numpy_state()),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast's dtype": torch.get_autocast_dtype("cpu"),
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "warnings": len(warnings.filters),
    }


@contextlib.contextmanager
def streams_kept() -> Iterator[None]:
    """Puts back the random streams."""
    before = torch.get_rng_state(), random.getstate(), numpy_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        put_numpy_state(before[2])


# --- comparing ------------------------------------------------------------------------------


def differs(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The first difference in words: what gradtools gave, against what the plain program gave."""
    tolerance = expected["tolerance"]
    return (
        _differs(found["numbers"], expected["numbers"], tolerance, "")
        or _differs(found["state"], expected["state"], 0.0, "state")
        or _differs(found["process"], expected["process"], 0.0, "process")
    )


def _differs(a: Any, b: Any, tolerance: float, where: str) -> str:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if _close(a, b, tolerance):
            return ""
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{where}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}"
        at = int((a - b).abs().argmax()) if a.dtype is not torch.bool else 0
        return f"{where}: {_short(a, at)} for {_short(b, at)}"
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return "" if np.array_equal(a, b) else f"{where}: {_short(a)} for {_short(b)}"
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            return f"{where}: {list(a)} for {list(b)}"
        pairs = [(f"{where} {k}".strip(), a[k], b[k]) for k in a]
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return f"{where}: {len(a)} entries for {len(b)}"
        pairs = [(f"{where}[{k}]", x, y) for k, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        same = a == b or (a != a and b != b)
        return "" if same else f"{where}: {_short(a)} for {_short(b)}"
    return next((d for name, x, y in pairs if (d := _differs(x, y, tolerance, name))), "")


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = (a == b) | (a.isnan() & b.isnan())
    if tolerance == 0.0 or not (a.is_floating_point() or a.is_complex()):
        return bool(same.all())
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    known = b[b.isfinite()].abs()
    size = known.max().clamp(min=1e-3) if known.numel() else 1.0
    return bool((same | ((a - b).abs() <= tolerance * size)).all())


def _short(x: Any, at: int = 0) -> str:
    if isinstance(x, torch.Tensor) and x.numel() > 1:
        return f"{x.flatten()[at].item():.5g} at {at}"
    return f"{x.item():.5g}" if isinstance(x, torch.Tensor) and x.numel() else repr(x)[:60]


# --- the table ------------------------------------------------------------------------------


def cases() -> Iterator[Any]:
    """Each program by each of its ways; of those through `chunked` one in turn is quick.

    One more is run by `make test-all`, the rest are a sweep.
    """
    for number, program in enumerate(PROGRAMS.values()):
        chunked = [way for way in ways(program) if way.kind == CHUNKED]
        for way in ways(program):
            turn = (chunked.index(way) - number) % len(chunked) if way in chunked else 0
            marks = [pytest.mark.slow, *in_turn(turn - 1, len(chunked))] if turn else []
            yield pytest.param(program, way, id=f"{program}, {way.name}", marks=marks)


@pytest.mark.parametrize(("program", "way"), [*cases()])
def test_what_is_computed_again_is_what_was_computed(program: Scenario, way: Way) -> None:
    """A program is right, or refused in our words, as the table says."""
    verdict = judge(program, way)
    allowed = (RIGHT, REFUSED) if program.expected == EITHER else (program.expected,)
    assert verdict.kind in allowed, verdict.text or verdict.kind
    assert verdict.kind != REFUSED or program.known["says"] in verdict.text


def test_a_wrong_number_and_a_state_that_moved_are_seen() -> None:
    """The control: any one leaf that differs is told."""
    program = PROGRAMS["batch norm in training"]
    right = _run(program, Run(ways(program)[0], True))
    for name in ("numbers", "state", "process"):
        other = copy.deepcopy(right)
        next(x for x in tree_leaves(other[name]) if isinstance(x, torch.Tensor)).add_(1)
        assert differs(other, right), name
