"""Sweeps: everything that a framework can differentiate, through every operator of gradtools.

A sweep takes its programs from tables that it did not choose (PyTorch's own databases of operators,
all of `jax.lax` and `jax.numpy`), sends each through every way of differentiating that it has, and
compares with the framework's own derivative. Where the framework raises, gradtools must raise as
well. The few cells that part are named, with the reason; a reason that covers nothing fails, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

AGREES, DIFFERS, RAISED, LEFT_OUT = "agrees", "differs", "raised", "left out"


@dataclass(frozen=True)
class Outcome:
    """What came of one program in one way.

    Attributes:
        program: The program's name in its table, such as "linalg.det" or "Conv2d, training".
        way: The operator of gradtools, with its mode in words.
        sample: Which of the program's sample inputs.
        dtype: Of the differentiated inputs.
        result: "agrees" (also where both raise), "differs", "raised" (gradtools alone), or
            "left out" (there is nothing to compare).
        detail: The error, the message, or why it was left out.
    """

    program: str
    way: str
    sample: int
    dtype: str
    result: str
    detail: str = ""


Known = dict[tuple[str, str], str]
"""The reason, by the patterns of a program's and a way's name; words of each stand between `;`."""


def faults(outcomes: Iterable[Outcome], known: Known, whole: bool = True) -> list[str]:
    """What parts without a reason, and the reasons that cover nothing in a whole sweep."""
    used: set[tuple[str, str]] = set()
    found = []
    for o in outcomes:
        if o.result in (DIFFERS, RAISED):
            lines = [
                key for key in known if _matches(o.program, key[0]) and _matches(o.way, key[1])
            ]
            used.update(lines)
            if not lines:
                found.append(f"{o.program} | {o.way} | {o.dtype} {o.sample}: {o.result} {o.detail}")
    return found + [f"a reason for nothing: {key}" for key in known if whole and key not in used]


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split("; "))
