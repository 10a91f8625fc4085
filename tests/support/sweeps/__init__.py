"""Sweeps: everything that a framework can differentiate, through every operator of gradtools.

A sweep takes its programs from a table that it did not choose (PyTorch's own databases of
operators, all of `jax.lax` and `jax.numpy`), sends each through every way of differentiating that
it has, and holds what comes out against an oracle. What does not agree must be told by a line of
a ledger, with its reason; a line that nothing needs any more fails the sweep as well.

The programs and ways stand in `in_torch.py` and `in_jax.py`; here is what a result is, and how a
ledger judges results. `run_sweeps.py` beside this folder runs them from the command line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

AGREES, DIFFERS, REFUSED, RAISED, LEFT_OUT = "agrees", "differs", "refused", "raised", "left out"


@dataclass(frozen=True)
class SweepOutcome:
    """What came of one program in one way.

    Attributes:
        program: The program's name in the framework's table, such as "linalg.det" or
            "Conv2d, training".
        way: The operator of gradtools, with its mode in words: "jvp", "hvp, forward over reverse".
        sample: Which of the program's sample inputs.
        dtype: Of the differentiated inputs.
        result: "agrees", "differs", "refused" (a GradtoolsError), "raised" (any other exception),
            or "left out" (there is nothing to compare).
        oracle: What it was held against.
        detail: The error in units of the tolerance, the message, or why it was left out.
    """

    program: str
    way: str
    sample: int
    dtype: str
    result: str
    oracle: str = ""
    detail: str = ""


@dataclass(frozen=True)
class LedgerLine:
    """A line of a ledger: what is known not to agree, and why.

    Attributes:
        program: The program's name; `*` and `?` stand for anything, as in file names.
        way: The same for the way.
        result: What comes out: "differs", "refused", "raised" or "left out".
        reason: Why, in words: a kink, a branch, a limit of the framework, a defect.
        upstream: The framework's issue, such as "torch#196702"; empty where it is no defect.
        dtype: Which dtypes, as a pattern.
        whole: Whether the quick tier, which sees one sample of each program, need not meet it.
    """

    program: str
    way: str
    result: str
    reason: str
    upstream: str = ""
    dtype: str = "*"
    whole: bool = False

    def covers(self, outcome: SweepOutcome) -> bool:
        """Whether this line tells that outcome."""
        return outcome.result == self.result and all(
            fnmatchcase(result, pattern)
            for result, pattern in (
                (outcome.program, self.program),
                (outcome.way, self.way),
                (outcome.dtype, self.dtype),
            )
        )


def ledger_lines(table: str) -> tuple[LedgerLine, ...]:
    """The lines of a table, one for each pair of its programs and ways.

    An entry is ``programs | ways | result, ...`` and, indented below it, the reason. Programs and
    ways are parted by semicolons; after the result may stand "whole", a dtype and an issue.
    """
    lines: list[LedgerLine] = []
    text = re.sub(r"^#.*\n", "", table, flags=re.MULTILINE)
    if left := _ENTRY.sub("", text).strip():
        raise ValueError(f"not an entry of a ledger: {left}")
    for entry in _ENTRY.finditer(text):
        programs, ways, told = " ".join(entry["head"].split()).split(" | ")
        result, *more = told.split(", ")
        reason, whole = " ".join(entry["reason"].split()), "whole" in more
        upstream = "".join(word for word in more if "#" in word)
        dtype = "".join(word for word in more if word not in ("whole", upstream)) or "*"
        pairs = product(programs.split("; "), ways.split("; "))
        lines += [LedgerLine(p, w, result, reason, upstream, dtype, whole) for p, w in pairs]
    return tuple(lines)


_ENTRY = re.compile(r"(?P<head>(?:^\S.*\n)+)(?P<reason>(?:^ +\S.*\n?)+)", re.MULTILINE)


@dataclass(frozen=True)
class LedgerVerdict:
    """What a ledger says of the outcomes of a sweep.

    Attributes:
        unexplained: Outcomes that do not agree, and that no line tells.
        outdated: Lines that told nothing, though the programs that they name were tried.
        counts: How many outcomes there were of each result.
    """

    unexplained: tuple[SweepOutcome, ...]
    outdated: tuple[LedgerLine, ...]
    counts: dict[str, int]

    def __bool__(self) -> bool:
        return not self.unexplained and not self.outdated

    def __str__(self) -> str:
        rows = [", ".join(f"{n} {result}" for result, n in sorted(self.counts.items()))]
        rows += [
            f"unexplained: {o.program} | {o.way} | {o.dtype} | sample {o.sample}: {o.result} "
            f"{o.oracle} {o.detail}".rstrip()
            for o in self.unexplained
        ]
        rows += [
            f"outdated: {k.program} | {k.way} | {k.result}: {k.reason} {k.upstream}".rstrip()
            for k in self.outdated
        ]
        return "\n".join(rows)


def judged(
    outcomes: Iterable[SweepOutcome], ledger: Sequence[LedgerLine], whole: bool = True
) -> LedgerVerdict:
    """The outcomes held against a ledger.

    Args:
        outcomes: Of one sweep.
        ledger: Its lines. The first that covers an outcome tells it.
        whole: Whether every sample was tried; if not, lines marked so may tell nothing.
    """
    outcomes = list(outcomes)
    used: set[LedgerLine] = set()
    unexplained = []
    for outcome in outcomes:
        if outcome.result == AGREES:
            continue
        lines = [k for k in ledger if k.covers(outcome)]
        used.update(lines)
        if not lines:
            unexplained.append(outcome)
    tried = {(o.program, o.way) for o in outcomes}
    outdated = [
        k
        for k in ledger
        if k not in used
        and (whole or not k.whole)
        and any(fnmatchcase(p, k.program) and fnmatchcase(w, k.way) for p, w in tried)
    ]
    return LedgerVerdict(
        tuple(unexplained), tuple(outdated), dict(Counter(o.result for o in outcomes))
    )
