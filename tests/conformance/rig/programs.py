"""What the matrix is tried on: the records of `gradtools.testing.scenarios`, and tests' own forms.

The forms are trees and functions that no user of the records needs: empty leaves beside full ones,
real leaves beside complex ones, a branch on values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tests.support.scenario_table import Scenario, scenarios

_RNG = np.random.default_rng(7)


def _branch(gt: Any, x: Any) -> Any:
    return x * x * x if x[0] > 0 else gt.xp.exp(x)


def _mixed(gt: Any, p: Any) -> Any:
    xp = gt.xp
    return {"power": xp.abs(p["z"]) ** 2 * p["x"], "phase": p["z"] * xp.exp(1j * p["x"])}


FORMS = (
    Scenario("linear", lambda gt, x: 2.0 * x, (_RNG.normal(size=3),), "vector"),
    Scenario(
        "complex from real",
        lambda gt, x: gt.xp.exp(1j * x) * x,
        (_RNG.normal(size=3),),
        "vector",
        "complex128",  # of its output
    ),
    Scenario("a branch on values", _branch, (np.array([0.7, -1.2, 0.4]),), "vector"),
    Scenario(
        "an empty leaf beside a full one",
        lambda gt, p: gt.xp.sum(p["e"]) + gt.xp.sin(p["x"]),
        ({"e": np.zeros((2, 0)), "x": _RNG.normal(size=2)},),
        "pytree",
    ),
    Scenario(
        "a number without axes in a list",
        lambda gt, p: [p[0] * p[1]],
        ([np.asarray(_RNG.normal()), _RNG.normal(size=2)],),
        "pytree",
    ),
    Scenario(
        "real and complex leaves",
        _mixed,
        ({"z": _RNG.normal(size=2) + 1j * _RNG.normal(size=2), "x": _RNG.normal(size=2)},),
        "pytree",
        "complex128",
    ),
)


@lru_cache
def smooth_programs() -> tuple[Scenario, ...]:
    """The records that are smooth and of ordinary size where they are tried, in 64 bits."""
    special = {"kink", "large", "tiny", "cancels"}
    return tuple(
        s
        for s in scenarios(order=2, dtype=("float64", "complex128"))
        if not special & s.tags and s.name != "an argument of which nothing is used"
    )


def program_of(name: str) -> Scenario:
    """The record or the form of that name."""
    return next(s for s in (*FORMS, *scenarios()) if s.name == name)
