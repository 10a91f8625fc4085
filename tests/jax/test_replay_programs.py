"""Recomputed values equal the values of the first run in all programs."""

from __future__ import annotations

import warnings

import flax
import jax
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError
from tests.jax.replay_programs import PLAIN, PROGRAMS, loop
from tests.support.scenarios import Scenario

_REFUSALS = GradtoolsError, NotImplementedError, flax.errors.TraceContextError
QUICK = ("callback that counts", "module of nnx in", "module of nnx that", "written", "while")


def _marks(scenario: Scenario) -> list[pytest.MarkDecorator]:
    return [] if any(part in scenario.name for part in QUICK) else [pytest.mark.slow]


@pytest.mark.slow_at("a module of nnx in a closure")
@pytest.mark.sampled(slow=16)
@pytest.mark.parametrize("program", PROGRAMS.cases(_marks))
@pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")
def test_a_program_gives_what_the_plain_loop_gives_or_is_refused(program: Scenario) -> None:
    name = program.known["operator"]
    if program.expected is not None:
        with pytest.raises(_REFUSALS, match=program.expected):
            program.program(getattr(gt, name))
        return
    found, expected = program.program(getattr(gt, name)), program.program(PLAIN[name])
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (jax.random.key_data(x) if _is_key(x) else x for x in (a, b))
        tolerance = 1e-4 if np.asarray(b).dtype == np.float32 else 1e-9
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def _is_key(x: object) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.dtype(float)), jax.dtypes.prng_key)


def test_the_plain_loop_is_told_from_a_loop_that_drops_a_chunk() -> None:
    dropped = lambda f, size, *axes, **options: loop(f, size + 1, *axes, **options)
    run = PROGRAMS["a module of nnx"].program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = run(loop), run(dropped)
    assert not np.allclose(a[0], b[0])
