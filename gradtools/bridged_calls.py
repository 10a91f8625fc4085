"""Calls of a function of another framework, reported so that graphs can look into them.

To the framework around it such a call is one opaque operation, and what is lost inside is lost at a
line that only the other framework knows. While `noting`, each call says how to ask there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from gradtools.seeing.graphs.nodes import PlainGraph


class ForeignProgram(Protocol):
    """What looks into a function of the other framework, by what its arguments look like."""

    @property
    def name(self) -> str:
        """The function's name, and whose it is."""
        ...

    @property
    def fun(self) -> Any:
        """What its author wrote, or of what this is a derivative."""
        ...

    def graph(self) -> PlainGraph | None:
        """Its operations, as the other framework records them; None where it cannot."""
        ...

    def cost(self) -> Cost | None:
        """What a call costs, as the other framework counts it; None where it cannot."""
        ...


@dataclass(frozen=True)
class Crossed:
    """A call in a program.

    Attributes:
        inside: What looks into the function.
        inputs: Which of the operation's inputs the function is given.
        batch: The sizes of the axes of batches.
    """

    inside: ForeignProgram
    inputs: tuple[int, ...]
    batch: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """What one call costs.

    Attributes:
        flops: How many operations it makes.
        peak_bytes: The most bytes alive at once of what it makes, its results too.
        unknown: The names of operations that no rule counts.
        notes: What else there is to say.
    """

    flops: int
    peak_bytes: int
    unknown: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False, repr=False)
class Crossing:
    """One call.

    Attributes:
        name: The function's, which is the operation's name in a graph.
        xs: Its arrays.
        why_zero: `why_zero(i)` gives the other framework's findings for the array at i.
    """

    name: str
    xs: Sequence[np.ndarray]
    why_zero: Callable[[int], Sequence[Any]]


_NOTED: ContextVar[list[Crossing] | None] = ContextVar("crossings", default=None)


@contextmanager
def noting() -> Iterator[list[Crossing]]:
    """The calls that are made at once inside of the block, in this thread."""
    result: list[Crossing] = []
    token = _NOTED.set(result)
    try:
        yield result
    finally:
        _NOTED.reset(token)


def noted() -> list[Crossing] | None:
    """The list to which this thread's calls are added; None: they are not recorded."""
    return _NOTED.get()
