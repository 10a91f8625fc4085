"""The table of docs/chunked-reference.md: what state is restored, only verified, or out of reach.

Each entry is a program of `replay_programs` that keeps state in one place, run with verification
and without it. `python -m tests.support.replay_table` writes it anew; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import replay_programs  # noqa: F401 - fills the table of programs
from tests.support.replay_worlds import CHUNKED, PROGRAMS, REFUSED, RIGHT, Program, Way
from tests.torch.test_replay_programs import judge

PAGE = Path(__file__).parents[2] / "docs" / "chunked-reference.md"
START, END = "<!-- what is put back: written by tests/support/replay_table.py -->\n", "<!-- end -->"
PLACES = re.compile(r"f counts in |f draws (?:by|from) |a module counts in |f switches ")
SILENT = Way("never", CHUNKED, (("verify", False),))
DEFAULT = Way("by default", CHUNKED)
PUT_BACK = "restored"
VERIFIED = "not restored; refused when it changes a result"
KINDS = (PUT_BACK, "refused at once", VERIFIED, "out of reach")


def kind_of(program: Program) -> str:
    """What becomes of the place where a program keeps its state."""
    silent = judge(program, SILENT).kind
    if silent == RIGHT:
        return PUT_BACK
    if silent == REFUSED:
        return "refused at once"
    return VERIFIED if judge(program, DEFAULT).kind == REFUSED else "out of reach"


def table() -> str:
    """The lines of the page."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for program in PROGRAMS:
        # How many threads there are is the machine's.
        if PLACES.match(program.name) and "number of threads" not in program.name:
            found[kind_of(program)].append(_place(program.name))
    rows = [
        f"| {kind} | {len(names)} | {'' if kind == PUT_BACK else '; '.join(names)} |"
        for kind, names in found.items()
        if names
    ]
    return "\n".join(["| behavior | places | where the state is |", "|---|---|---|", *rows, ""])


def _place(name: str) -> str:
    place = PLACES.sub("", name).removesuffix(", and computes by it")
    if name.startswith("f switches gradients"):
        return "gradients that f leaves off"
    return f"the switch for {place}" if name.startswith("f switches ") else place


def written(page: str) -> str:
    """The page with the table as it is now."""
    head, rest = page.split(START)
    return head + START + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
