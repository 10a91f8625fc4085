"""Which tests `make test` leaves to `make test-all`, and which this leaves to `pytest -m sweep`.

    make test-all PYTEST_ARGS=--times=out/times.json     # what each test takes
    python -m tests.support.tiers out/times.json         # writes slow.txt and rare.txt

Those that cost most, by a run's own times: the tests of `slow.txt` are marked ``slow``, those of
`rare.txt` ``sweep``; a new test is in the quick tier until the lists are made again. Of every test
function the cheapest case stays in a run of all, and in the quick tier if it takes less than two
seconds: so each is run, and what is left out is more of the same. The mutants (`mutants.py`) say
whether the quick tier is to be believed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

LIST = Path(__file__).parent / "slow.txt"
RARE = Path(__file__).parent / "rare.txt"
BUDGET = 800.0  # seconds of all quick tests together, one after the other, on a slow machine
WHOLE = 2100.0  # of all but the sweeps
# What a reader runs, and what holds every operator of the frameworks to account, is run each time.
_SHOWN = ("tests/examples/", "tests/sweeps/")
_LONG = 2.0  # seconds: what takes longer is not run for its function's sake


def in_turn(number: int, every: int) -> list[pytest.MarkDecorator]:
    """The marks of a case of a large table of which a test run takes one in so many.

    Each row and column has its turn where `number` counts along both. The others are a sweep.
    """
    return [] if number % every == 0 else [pytest.mark.sweep]


def slow_of(times: Mapping[str, float], budget: float = BUDGET, longest: float = _LONG) -> set[str]:
    """The tests to leave out, so that what is left takes no longer than the budget.

    longest: What the cheapest case of a function may take, in seconds, to be run for its sake.
    """
    cheapest: dict[str, str] = {}
    for name in sorted(times, key=times.__getitem__):
        cheapest.setdefault(function_of(name), name)
    kept = {name for name in cheapest.values() if times[name] < longest}
    left = budget - sum(times[name] for name in kept)
    slow = set()
    for name in sorted(times.keys() - kept, key=times.__getitem__):
        left -= times[name]
        if left < 0:
            slow.add(name)
    return slow


def function_of(name: str) -> str:
    """A test's name without its parameters."""
    return name.partition("[")[0]


def written(slow: Iterable[str], times: Iterable[str]) -> str:
    """The list: a function whose cases are all slow is one line."""
    slow = set(slow)
    cases: dict[str, set[str]] = {}
    for name in times:
        cases.setdefault(function_of(name), set()).add(name)
    whole = {function for function, names in cases.items() if names <= slow}
    lines = whole | {name for name in slow if function_of(name) not in whole}
    return "".join(f"{line}\n" for line in sorted(lines))


def read(path: Path = LIST) -> set[str]:
    """The lines of a list."""
    return set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()


def main(report: str) -> None:
    times: dict[str, float] = json.loads(Path(report).read_text(encoding="utf-8"))
    slow = slow_of(times)
    rare = {n for n in slow_of(times, WHOLE, math.inf) if not n.startswith(_SHOWN)}
    before = read(RARE)  # which did not run, so that nobody knows what they take now
    LIST.write_text(written(slow, times), encoding="utf-8")
    lines = {*written(rare, times).splitlines(), *before}
    RARE.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")
    quick = sum(seconds for name, seconds in times.items() if name not in slow)
    print(
        f"{len(times)} tests, {sum(times.values()):.0f} s; quick: {len(times) - len(slow)}, "
        f"{quick:.0f} s; slow: {len(slow)}, in {len(read())} lines; "
        f"rare: {len(rare)}, {sum(map(times.__getitem__, rare)):.0f} s"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
