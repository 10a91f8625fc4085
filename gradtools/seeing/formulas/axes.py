"""Letters for axes, by union-find: axes that correspond get the same letter.

Every operation labels the axes of its arguments: those of a sum one by one, those of a product by
their labels (`Operation.labels`). A class of axes that correspond is one dimension of
the problem, such as the batch or the classes, and gets one letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

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

    def learn(self, values: Iterable[Expr]) -> None:
        """Unites axes of equal length to which the values' operations give one label."""
        for y in values:
            first: dict[Any, Axis] = {l: (y, l) for l in range(y.rank)}
            for x, labels in zip(y.args, OPERATIONS[y.op].labels(y) if y.args else (), strict=True):
                for k, label in enumerate(labels):
                    z, i = (x, k) if label is None else first.setdefault(label, (x, k))
                    if z.shape[i] == x.shape[k] != 1:
                        one, other = self._root((z, i)), self._root((x, k))
                        if one != other:
                            self._parent[other] = one

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
        """The letters of all axes; axes of one array that correspond share a letter."""
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
