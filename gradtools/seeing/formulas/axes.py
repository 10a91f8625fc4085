"""Letters for axes, by union-find: axes that correspond get the same letter.

Every operation ties axes of its arguments to axes of its result: those of a sum one by one, those
of a product by their labels. A class of tied axes is one dimension of the problem, such as the
batch or the classes, and gets one letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.operation_record import OPERATIONS

Axis = tuple[Expr, int]
_LETTERS = "ijklmnprsuvaeh"  # letters that have subscripts in Unicode


class Axes:
    """A union-find structure of axes, with letters."""

    def __init__(self) -> None:
        self._parent: dict[Axis, Axis] = {}
        self._letters: dict[Axis, str] = {}
        self._taken: set[str] = set()

    def _root(self, axis: Axis) -> Axis:
        path = []
        while (up := self._parent.get(axis, axis)) != axis:
            path.append(axis)
            axis = up
        for below in path:
            self._parent[below] = axis
        return axis

    def tie(self, a: Axis, b: Axis) -> None:
        """Unites two axes if they have the same length."""
        (x, i), (y, j) = a, b
        if i < x.rank and j < y.rank and x.shape[i] == y.shape[j] != 1:
            first, second = self._root(a), self._root(b)
            if first != second:
                self._parent[second] = first

    def tie_all(self, a: Expr, b: Expr) -> None:
        """Unites the axes of two arrays of equal rank, one by one."""
        if a.rank == b.rank:
            for k in range(a.rank):
                self.tie((a, k), (b, k))

    def learn(self, values: Iterable[Expr]) -> None:
        """Applies the ties of these values' operations."""
        for y in values:
            operation = OPERATIONS.get(y.op)
            if operation and operation.ties:
                operation.ties(self, y)

    def forbid(self, letters: Iterable[str]) -> None:
        """Reserves letters that have another meaning."""
        self._taken.update(letters)

    def letter(self, x: Expr, axis: int) -> str:
        """The letter of an axis."""
        root = self._root((x, axis))
        if root not in self._letters:
            free = (c for c in _endless() if c not in self._taken)
            self._letters[root] = next(free)
            self._taken.add(self._letters[root])
        return self._letters[root]

    def letters(self, x: Expr) -> tuple[str, ...]:
        """The letters of all axes; tied axes of one array share a letter."""
        return tuple(self.letter(x, a) for a in range(x.rank))

    def unique(self, x: Expr) -> tuple[str, ...]:
        """The letters of all axes, with primes for repeated ones."""
        return primed(self.letters(x))


def _endless() -> Iterable[str]:
    yield from _LETTERS
    n = 1
    while True:
        yield from (f"{c}{n}" for c in "ijklmn")
        n += 1


def primed(letters: Sequence[str], taken: Iterable[str] = ()) -> tuple[str, ...]:
    """The letters, with primes to distinguish them from each other and from those taken."""
    seen, result = set(taken), []
    for letter in letters:
        while letter in seen:
            letter += "'"
        seen.add(letter)
        result.append(letter)
    return tuple(result)
