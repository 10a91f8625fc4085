"""Implements the marks that `retain_gradient` sets in a program.

While `retained_gradients` evaluates f, a mark computes y = x + d with an array d of negative zeros,
so that y is bitwise equal to x, and the cotangent of y is the gradient with respect to d.
`MarkedValues` creates these arrays in the first evaluation, and returns the same arrays in later
evaluations, so that a recomputed chunk adds the same d.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gradtools.backend_arrays import Array
from gradtools.errors import GradtoolsError


@dataclass(frozen=True)
class Mark:
    """An occurrence of a mark, or all occurrences of the mark in the steps of a traced loop.

    Attributes:
        name: The name that was passed to `retain_gradient`.
        treedef: The structure of the marked value.
        places: The indices of the floating and complex leaves of the value.
        size: The number of leaves of the value.
        loops: The number of leading axes of the mark's arrays, one for each enclosing traced loop.
    """

    name: str
    treedef: Any
    places: tuple[int, ...]
    size: int
    loops: int = 0


class MarkedValues:
    """The marks of one evaluation of f and their arrays, in order of evaluation.

    within: The operator that is being evaluated and in which marks raise errors, or "".
    """

    def __init__(self, within: str = "") -> None:
        self.within = within
        self._found: dict[Any, tuple[Mark, list[Array]]] = {}  # by position in f

    @property
    def marks(self) -> list[Mark]:
        """All marks, in order of evaluation."""
        return [mark for mark, _ in self._found.values()]

    @property
    def arrays(self) -> list[Array]:
        """The arrays of all marks, in order."""
        return [x for _, xs in self._found.values() for x in xs]

    def replace(self, arrays: Sequence[Array]) -> None:
        """Replaces the arrays of all marks, in order."""
        left = iter(arrays)
        pairs = self._found.items()
        self._found = {place: (m, [*islice(left, len(xs))]) for place, (m, xs) in pairs}

    def arrays_of(self, mark: Mark, make: Callable[[], list[Array]]) -> list[Array]:
        """Returns the arrays of the mark that is being evaluated."""
        place = *here.place, here.next_index()
        if place not in self._found:
            self._found[place] = mark, make()
        return self._found[place][1]


class _Marking(threading.local):
    """The current thread's position among the marks of f; class attributes are the defaults."""

    tape: MarkedValues | None = None  # The marks of the current `retained_gradients` call.
    place: tuple[int, ...] = ()  # The indices of the enclosing chunked calls and chunks.
    count = 0  # The number of marks and chunked calls so far in the same chunk.

    def next_index(self) -> int:
        self.count += 1
        return self.count - 1

    @contextmanager
    def moved(self, tape: MarkedValues | None, place: tuple[int, ...]) -> Iterator[None]:
        before = self.tape, self.place, self.count
        self.tape, self.place, self.count = tape, place, 0
        try:
            yield
        finally:
            self.tape, self.place, self.count = before

    def refusing(self, within: str) -> Any:
        """Returns a context manager in which marks raise errors that name the operator."""
        return _NOTHING if self.tape is None else self.moved(MarkedValues(within), ())


here = _Marking()
_NOTHING = nullcontext()


def not_retained(name: str, within: str) -> GradtoolsError:
    """Returns the error for a mark in code whose cotangents are not those of the outer program."""
    loop = "In a loop use jax.lax.scan, or jax.lax.fori_loop with constant bounds; otherwise return"
    return GradtoolsError(
        f"retained_gradients: the value {name!r} is marked inside of {within}, where its gradient "
        f"cannot be retained. {loop if within == 'while' else 'Return'} the value, and mark it "
        "outside."
    )


_RETAINING = ("mixed_partial", "chunked", "checkpoint", "microbatched_value_and_grad")


class ChunkedCall:
    """The position of a chunked call among the marks; see `at` for the position of a chunk."""

    def __init__(self, caller: str) -> None:
        self._tape = here.tape
        # A custom rule differentiates a frozen function, so marks in the function have no gradient.
        if here.tape is not None and caller not in _RETAINING:
            self._tape = MarkedValues(caller)
        self._place = *here.place, here.next_index()

    def at(self, number: int) -> Any:
        """Returns a context manager for the evaluation of f on chunk `number`."""
        if self._tape is here.tape is None:
            return _NOTHING
        return here.moved(self._tape, (*self._place, number))
