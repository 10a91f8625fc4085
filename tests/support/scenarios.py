"""`Scenario` is a named program, and `Table` provides scenarios as parameters of tests.

    PROGRAMS = Table()

    @PROGRAMS.add(expected="is not a scalar")
    def the_gradient_of_a_vector(gt): ...

    @pytest.mark.parametrize("scenario", PROGRAMS.cases())
    def test_it_is_refused(scenario, gt): ...

The test of a table defines the meaning of `expected` and of additional entries. `scenario_table.py`
defines another class of scenarios, which are tested by finite differences in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Scenario:
    """A program and its expected result.

    Attributes:
        name: A description of the program, which is also the id of its test.
        program: A function that runs the test, or that returns the function to be tested.
        expected: The expected numbers, findings or error message, or None if the program itself
            asserts.
        only: The only framework that supports the program, or an empty string if both support it.
        known: A dict of additional entries for the test that runs the table.
    """

    name: str
    program: Callable[..., Any]
    expected: Any = None
    only: str = ""
    known: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def get(self, name: str, default: Any = None) -> Any:
        """Return the additional entry of the given name."""
        return self.known.get(name, default)


class Table(dict[str, Scenario]):
    """Scenarios by their unique names, in the order of insertion."""

    def add(self, name: str = "", expected: Any = None, only: str = "", **known: Any) -> Any:
        """Register the decorated program; its default name is the name of its function."""

        def register(program: Any) -> Any:
            title = name or getattr(program, "__name__", type(program).__name__)
            title = title.replace("_", " ").strip()
            assert title not in self, f"two scenarios are named {title!r}"
            self[title] = Scenario(title, program, expected, only, known)
            return program

        return register

    def cases(self, marks: Callable[[Scenario], Any] = lambda _: ()) -> list[Any]:
        """Return one pytest parameter for each scenario."""
        return [pytest.param(s, id=s.name, marks=marks(s)) for s in self.values()]
