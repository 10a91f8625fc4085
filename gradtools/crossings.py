"""Calls of functions of another framework, noted for whoever looks into them.

To the framework around it such a call is one opaque operation, and what is lost inside is lost at a
line that only the other framework knows. While `noting`, each call says how to ask there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Crossing:
    """One call.

    Attributes:
        name: The function's, which is the operation's name in a graph.
        xs: Its arrays, of the framework around it.
        why_zero: `why_zero(i)` gives the other framework's findings for the array at i.
    """

    name: str
    xs: Sequence[Any]
    why_zero: Callable[[int], Sequence[Any]]


_NOTED: ContextVar[list[Crossing] | None] = ContextVar("crossings", default=None)


@contextmanager
def noting() -> Iterator[list[Crossing]]:
    """The calls that are made at once inside of the block, in this thread."""
    found: list[Crossing] = []
    token = _NOTED.set(found)
    try:
        yield found
    finally:
        _NOTED.reset(token)


def noted() -> list[Crossing] | None:
    """Where calls are to be noted; None: nobody asks."""
    return _NOTED.get()
