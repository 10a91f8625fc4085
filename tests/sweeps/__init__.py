"""Sweeps differentiate every function of a framework with every operator of gradtools.

A sweep takes its programs from external tables (PyTorch's own operator databases, all of `jax.lax`
and `jax.numpy`), differentiates each program with every operator, and compares the results with the
framework's own derivatives. If the framework raises an error, gradtools must also raise an error.
Programs for which the results differ are listed with a reason; a reason that matches no program is
an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

AGREES, DIFFERS, RAISED, LEFT_OUT = "agrees", "differs", "raised", "left out"


@dataclass(frozen=True)
class Outcome:
    """The outcome of the comparison for one program and one gradtools operator.

    Attributes:
        program: The program's name in its table, such as "linalg.det" or "Conv2d, training".
        way: The name of the gradtools operator and of its mode.
        sample: The index of the program's sample inputs.
        dtype: The dtype of the differentiated inputs.
        result: "agrees" (or both raise errors), "differs", "raised" (only gradtools raised), or
            "left out" (there is nothing to compare).
        detail: The numerical error, the error message, or the reason why the comparison was left
            out.
    """

    program: str
    way: str
    sample: int
    dtype: str
    result: str
    detail: str = ""


Known = dict[tuple[str, str], str]
"""Maps patterns of program names and operator names to reasons; `;` separates patterns."""


def faults(outcomes: Iterable[Outcome], known: Known, whole: bool = True) -> list[str]:
    """Return outcomes that fail without a listed reason, and reasons that match no outcome."""
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
    return found + [f"no failure matches {key}" for key in known if whole and key not in used]


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split("; "))
