"""One record for the tables of programs, and one way to run over a table.

    PROGRAMS = Table()

    @PROGRAMS.add(expected="is not a scalar")
    def the_gradient_of_a_vector(gt): ...

    @pytest.mark.parametrize("scenario", PROGRAMS.cases())
    def test_it_is_refused(scenario, gt): ...

A table's runner is the test beside it; what `expected` holds, and what else a scenario knows, is
for that runner. Programs with a slope in closed form or in NumPy are another kind of scenario:
`scenario_table.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Scenario:
    """A program, and what must come of it.

    Attributes:
        name: What it does, in words; the id of its test.
        program: Runs it, or makes what is run.
        expected: Numbers, findings, or the words of an error; None if the program asserts.
        only: The framework in which it can be written; empty for both.
        known: What else the table's runner reads, by name.
    """

    name: str
    program: Callable[..., Any]
    expected: Any = None
    only: str = ""
    known: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def get(self, name: str, default: Any = None) -> Any:
        """What the scenario knows by this name."""
        return self.known.get(name, default)


class Table(dict[str, Scenario]):
    """Scenarios by their names, which are unique, in the order in which they were added."""

    def add(self, name: str = "", expected: Any = None, only: str = "", **known: Any) -> Any:
        """Adds the decorated program; without a name it is called as its function is."""

        def register(program: Any) -> Any:
            title = name or getattr(program, "__name__", type(program).__name__)
            title = title.replace("_", " ").strip()
            assert title not in self, f"two scenarios are named {title!r}"
            self[title] = Scenario(title, program, expected, only, known)
            return program

        return register

    def cases(self, marks: Callable[[Scenario], Any] = lambda _: ()) -> list[Any]:
        """A parameter of a test for each scenario."""
        return [pytest.param(s, id=s.name, marks=marks(s)) for s in self.values()]
