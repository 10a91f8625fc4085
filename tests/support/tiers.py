"""Defines test tiers: quick (`make test`), slow (`make test-all`) and sweep (`pytest -m sweep`).

A test is quick unless a mark on its file (``pytestmark``) or function defines another tier:

    @pytest.mark.slow_at("compiled", ("jax", "hessian"))   # one value, or all values of a tuple
    @pytest.mark.sweep_at("third order")                   # these cases run only in the sweep
    @pytest.mark.quick_at("sin")                           # all other cases are slow
    @pytest.mark.whole_at("sin", "cos")                    # all other cases run only in the sweep
    @pytest.mark.sampled(4, 12)                            # 4 cases are quick and 12 cases run
    @pytest.mark.sampled(torch=(9, 20), jax=(2, 6))        # the same numbers for each backend
    @pytest.mark.sampled(slow=12)                          # 12 of the cases that are not quick run

A value is a part of the test's id between hyphens, so cases need explicit ids. A sample is a
covering array instead of the full product of the axes: cases are added greedily by the number of
pairs of values that no earlier case has (Cohen et al., The AETG System, 1997). The mutation tests
(`mutants.py`) measure how many mutants the quick tests detect. If GRADTOOLS_TEST_SECONDS is set,
for example to 2, a quick test that takes more seconds fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations

import pytest

_BACKENDS = ("torch", "jax")
_AT = (  # name of the mark, mark of the selected cases, whether the values are excluded
    ("slow_at", pytest.mark.slow, False),
    ("quick_at", pytest.mark.slow, True),
    ("sweep_at", pytest.mark.sweep, False),
    ("whole_at", pytest.mark.sweep, True),
)
_GOLDEN = 0.6180339887498949
_LOOP = 0.020  # seconds that `_calibration` takes on the machine for which limits are defined


def in_turn(number: int, every: int) -> list[pytest.MarkDecorator]:
    """Return the marks of case `number` in a table, where one in `every` cases is not a sweep test.

    If `number` is the sum of a row index and a column index, every row and every column has cases
    that are not sweep tests.
    """
    return [] if number % every == 0 else [pytest.mark.sweep]


def function_of(name: str) -> str:
    """Return a test's name without its parameters."""
    return name.partition("[")[0]


def mark_tiers(items: Sequence[pytest.Item]) -> None:
    """Mark cases as slow or sweep according to the marks on their functions."""
    samples: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        for kind, mark, others in _AT:
            if any(named(_case(item), at.args) != others for at in item.iter_markers(kind)):
                item.add_marker(mark)
        sampled = item.get_closest_marker("sampled")
        if sampled and is_quick(item) != ("slow" in sampled.kwargs):
            samples.setdefault((function_of(item.nodeid), _backend(item)), []).append(item)
    for (_, backend), cases in samples.items():
        sampled = next(cases[0].iter_markers("sampled"))
        quick, whole = sampled.kwargs.get(backend) or sampled.args or (0, sampled.kwargs["slow"])
        order = covering([_case(item).split("-") for item in cases], whole)
        for k, item in enumerate(cases):
            if k not in order:
                item.add_marker(pytest.mark.sweep)
            elif k not in order[:quick]:
                item.add_marker(pytest.mark.slow)


def _case(item: pytest.Item) -> str:
    return item.name.partition("[")[2].removesuffix("]")


def _backend(item: pytest.Item) -> str:
    return next((part for part in _case(item).split("-") if part in _BACKENDS), "")


def named(case: str, values: Iterable[str | tuple[str, ...]]) -> bool:
    """Return whether the id of a case contains one of the values, or all values of one tuple."""
    every = [(value,) if isinstance(value, str) else value for value in values]
    return any(all(f"-{part}-" in f"-{case}-" for part in parts) for parts in every)


def covering(rows: Sequence[Sequence[str]], count: int) -> list[int]:
    """Select `count` rows greedily by their numbers of new pairs of values; return the indices.

    If several rows have equally many new pairs, rows that are far apart are preferred. The order is
    deterministic, and the first k indices do not depend on `count`.
    """
    pairs = [
        {*combinations(enumerate(row), 2), *((cell,) for cell in enumerate(row))} for row in rows
    ]
    spread = sorted(range(len(rows)), key=lambda k: k * _GOLDEN % 1)
    chosen: list[int] = []
    met: set[object] = set()
    # These are upper bounds, because the number of new pairs of a row only decreases.
    adds: dict[int, int] = {}
    while spread and len(chosen) < count:
        best, most = spread[0], -1
        for k in spread:
            if adds.get(k, most + 1) > most:
                adds[k] = len(pairs[k] - met)
                if adds[k] > most:
                    best, most = k, adds[k]
        if most == 0 and met:
            met, adds = set(), {}  # all pairs are covered, so start again
            continue
        spread.remove(best)
        chosen.append(best)
        met |= pairs[best]
    return chosen


def stale_values(items: Iterable[pytest.Item]) -> list[str]:
    """Return values that a mark of a test function names but that no case of the function has."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(function_of(item.nodeid), []).append(item)
    return [
        f"{function}: {kind}({value!r})"
        for function, some in cases.items()
        for kind, _, _ in _AT
        for at in some[0].iter_markers(kind)
        for value in at.args
        if not any(named(_case(item), [value]) for item in some)
    ]


def is_quick(item: pytest.Item) -> bool:
    """Return whether `make test` runs a test."""
    others = ("slow", "sweep", "ahead", "integration")
    return not any(item.get_closest_marker(name) for name in others)


def seconds_here(seconds: float) -> float:
    """Convert seconds on the reference machine to seconds on this machine."""
    return seconds * max(1.0, _calibration() / _LOOP)


@lru_cache
def _calibration() -> float:
    """Return the fastest of several runs of a Python loop in seconds of CPU time."""
    times = []
    for _ in range(5):
        start = time.process_time()
        total = 0
        for k in range(400_000):
            total += k & 7
        times.append(time.process_time() - start)
    return min(times)
