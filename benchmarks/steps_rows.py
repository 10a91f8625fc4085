"""A row of steps.py: some work, beside a peer or as a figure of its own."""

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
    """One piece of work.

    Attributes:
        work: What is done.
        peer: What it is held against.
        before: The figure before the work on speed began.
        goal: What it shall be at most.
        ours: Runs it; gives the figure itself where there is no peer's.
        theirs: Runs the peer's.
        count: How many times each is run.
        counted: Ours and the peer's work, of which operations and calls are counted, if `ours`
            gives a figure.
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
        """Processor time over the peer's, or what `ours` gives."""
        if self.theirs is None:
            return float(self.ours())
        ours, theirs = seconds(self.ours, self.theirs, count=self.count)
        return ours / theirs


def seconds(*runs: Run, count: int = RUNS) -> list[float]:
    """The median processor time of each, run in turn."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(count):
        for run, own in zip(runs, times, strict=True):
            start = time.process_time()
            run()
            own.append(time.process_time() - start)
    return [statistics.median(own) for own in times]
