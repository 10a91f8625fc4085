"""The marks of `retain_gradient` in a program, and where they are in the chunks of a batch.

While `retained_gradients` evaluates f, a mark computes y = x + d with an array d of negative zeros,
so that y has x's bits, and the cotangent at y is the gradient with respect to d. `MarkedValues`
makes these arrays in a first evaluation, and supplies them in every other: a chunk that is
recomputed adds the same d again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gradtools.backend_arrays import Array

Chunk = tuple[Any, int, int]  # the Partition of a chunked call, its index, the chunk's number


@dataclass(frozen=True)
class Mark:
    """One occurrence of a mark, or the occurrences in all steps of a traced loop.

    Attributes:
        name: Its name.
        treedef: The structure of the marked value.
        places: Which leaves of the value are floating or complex.
        size: How many leaves the value has.
        chunks: The `Partition` of each chunked call around it, outermost first.
        index: How many marks come before it in the same chunk.
        loops: The leading axes of its arrays: for each whether it is a loop over chunks.
    """

    name: str
    treedef: Any
    places: tuple[int, ...]
    size: int
    chunks: tuple[Any, ...] = ()
    index: int = 0
    loops: tuple[bool, ...] = ()


class MarkedValues:
    """The marks of one evaluation, in order, and their arrays."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self._arrays: dict[Any, list[Array]] = {}  # by the place of the mark

    @property
    def arrays(self) -> list[Array]:
        """The arrays of all marks, in order."""
        return [x for xs in self._arrays.values() for x in xs]

    def replace(self, arrays: Sequence[Array]) -> None:
        """Supplies other arrays, in the same order."""
        left = iter(arrays)
        self._arrays = {k: [*islice(left, len(xs))] for k, xs in self._arrays.items()}

    def arrays_of(self, mark: Mark, make: Callable[[], list[Array]]) -> list[Array]:
        """The arrays of the mark that is evaluated now."""
        place = tuple([chunk[1:] for chunk in here.chunks]), mark.index
        if place not in self._arrays:
            self._arrays[place] = make()
            self.marks.append(mark)
        return self._arrays[place]


class _Marking(threading.local):
    """Where this thread is. Class attributes are read fastest."""

    tape: MarkedValues | None = None  # of the `retained_gradients` that evaluates f
    chunks: tuple[Chunk, ...] = ()  # the chunks around, outermost first
    count = 0  # the marks and chunked calls before, in the same chunk

    def next_index(self) -> int:
        self.count += 1
        return self.count - 1

    @contextmanager
    def moved(self, tape: MarkedValues | None, chunks: tuple[Chunk, ...]) -> Iterator[None]:
        before = self.tape, self.chunks, self.count
        self.tape, self.chunks, self.count = tape, chunks, 0
        try:
            yield
        finally:
            self.tape, self.chunks, self.count = before


here = _Marking()


class ChunkedCall:
    """The place of one chunked call among the marks; `at(i)` is a context around its chunk i."""

    def __init__(self, caller: str, cut: Any) -> None:
        # A rule differentiates a frozen function, so its marks have no gradient.
        self._tape = None if caller == "frozen" else here.tape
        self._cut, self._around = cut, here.chunks
        self._index = here.next_index()

    def at(self, number: int) -> Any:
        """A context around f at this chunk."""
        return here.moved(self._tape, (*self._around, (self._cut, self._index, number)))
