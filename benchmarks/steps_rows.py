"""Defines `Row`, a row of steps.py with a figure that is relative to a peer or absolute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Run = Callable[[], Any]
Figure = float
RUNS = 11


@dataclass(frozen=True)
class Row:
    """A row of the table in results/steps.md.

    Attributes:
        work: A description of the measured work.
        peer: A description of the code to which gradtools is compared.
        before: The figure at the time when the goal was set.
        goal: The largest acceptable figure, or None if there is no goal.
        ours: Runs the work with gradtools; without a peer, returns the figure.
        theirs: Runs the work of the peer.
        count: The number of timed runs.
        counted: If `ours` returns a figure, the functions of gradtools and of the peer whose
            operations and calls are counted.
    """

    work: str
    peer: str
    before: str
    goal: float | None
    ours: Run
    theirs: Run | None = None
    count: int = RUNS
    counted: tuple[Run, Run] | None = None

    def figure(self) -> Figure:
        """Returns the CPU time relative to the peer, or the figure that `ours` returns."""
        if self.theirs is None:
            return float(self.ours())
        ours, theirs = seconds(self.ours, self.theirs, count=self.count)
        return ours / theirs


def seconds(*runs: Run, count: int = RUNS) -> list[float]:
    """Returns the median CPU time of each function; the functions run in turn."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(count):
        for run, own in zip(runs, times, strict=True):
            start = time.process_time()
            run()
            own.append(time.process_time() - start)
    return [statistics.median(own) for own in times]
