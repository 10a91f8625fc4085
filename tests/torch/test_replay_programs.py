"""In each program, recomputed values equal the values of the first run, for each operator.

Two equal worlds are created. gradtools runs in the first world, and the plain program runs in the
second world. Values, state, random states and flags must be equal, or gradtools must raise its own
error.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from gradtools import GradtoolsError
from tests.support.scenarios import Scenario
from tests.torch.replay_programs import CHUNKED, EITHER, PROGRAMS, REFUSED, RIGHT, Run

seed_numpy, numpy_state, put_numpy_state = np.random.seed, np.random.get_state, np.random.set_state


@cache
def _warmed() -> None:
    """Trigger changes that PyTorch makes once per process, such as dynamo's warning filters."""
    torch.compile(lambda x: torch.distributions.Normal(x, 1.0).mean, backend="eager")(torch.ones(1))
    torch.compile(nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1)).sum().backward()


@pytest.fixture(autouse=True)
def _streams_kept() -> Iterator[None]:
    _warmed()
    before = torch.get_rng_state(), random.getstate(), numpy_state()
    yield
    torch.set_rng_state(before[0]), random.setstate(before[1]), put_numpy_state(before[2])


def _seed() -> None:
    torch.manual_seed(0), random.seed(0), seed_numpy(0)


def outcome(program: Scenario, run: Run) -> dict[str, Any]:
    """Return the values of a run, and the state of the world and of the process after the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _seed()
        world = program.program()
        _seed()
        numbers = world.step(run)
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        streams = torch.get_rng_state(), random.getstate(), list(numpy_state())
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
        process = [streams, modes, torch.get_default_dtype(), len(warnings.filters)]
        state = copy.deepcopy(tree_map(_plain, world.state()))
    found = {"numbers": numbers, "state": state, "process": process}
    return {**tree_map(_plain, found), "tolerance": world.tolerance}


def _plain(x: Any) -> Any:
    """Return a tensor as a dense copy without a graph; return other objects unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach()
    x = x.to_dense() if x.layout is not torch.strided else x.as_subclass(torch.Tensor)
    return x.resolve_conj().resolve_neg().clone()


def differs(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Return a description of the first difference between two outcomes, or an empty string."""
    for part, tolerance in (("numbers", expected["tolerance"]), ("state", 0.0), ("process", 0.0)):
        (xs, tree), (ys, other) = tree_flatten(found[part]), tree_flatten(expected[part])
        if tree != other:
            return f"{part}: got the structure {tree}, expected {other}"
        for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if not _close(x, y, tolerance):
                return f"{part}, leaf {k}: got {x}, expected {y}"
    return ""


def _close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if not isinstance(a, torch.Tensor):
        return bool(a == b or (a != a and b != b))
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = (a == b) | (a.isnan() & b.isnan())
    if tolerance == 0.0 or not (a.is_floating_point() or a.is_complex()):
        return bool(same.all())
    a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
    known = b[b.isfinite()].abs()
    size = known.max().clamp(min=1e-3) if known.numel() else 1.0
    return bool((same | ((a - b).abs() <= tolerance * size)).all())


def cases() -> Iterator[Any]:
    """Yield each program with each of its operators, with varying chunk sizes and verify modes."""
    for number, program in enumerate(PROGRAMS.values()):
        for kind in program.known["kinds"]:
            size, verify = ((2, "first"), (4, "first"), (2, True))[number % 3]
            run = Run(kind, False, size, verify) if kind == CHUNKED else Run(kind, False)
            yield pytest.param(program, run, id=f"{program}, {kind}")


@pytest.mark.parametrize(("program", "run"), [*cases()])
def test_what_is_computed_again_is_what_was_computed(program: Scenario, run: Run) -> None:
    plain, error = Run(run.kind, True, run.size), None
    try:
        found = outcome(program, run)
    except Exception as raised:
        error = raised
    if error is None:
        assert program.expected != REFUSED
        assert not differs(found, outcome(program, plain))
    elif isinstance(error, GradtoolsError):
        assert program.expected != RIGHT and run.kind in str(error), error
        assert program.expected == EITHER or "returns other values" in str(error)
    else:
        with pytest.raises(type(error)):  # the plain program must raise the same type of error
            outcome(program, plain)


def test_a_wrong_number_and_a_state_that_moved_are_seen() -> None:
    """`differs` must report a difference in a single leaf."""
    program = PROGRAMS["batch norm in training"]
    right = outcome(program, Run(CHUNKED, True))
    for name in ("numbers", "state", "process"):
        other = copy.deepcopy(right)
        next(x for x in tree_leaves(other[name]) if isinstance(x, torch.Tensor)).add_(1)
        assert differs(other, right), name
