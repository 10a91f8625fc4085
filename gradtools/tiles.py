"""A program over all tiles of the matrix of pairs: what a wing is handed to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ROWS, COLUMNS, SHARED = "rows", "columns", "shared"
Arrays = list[Any]


@dataclass(frozen=True)
class TileGrid:
    """How the matrix of pairs is cut into tiles, as equal as can be."""

    rows: int
    columns: int
    most_rows: int
    most_columns: int

    def blocks(self, side: str) -> list[tuple[int, int, int]]:
        """Runs of blocks of one length: where each begins, the length, how many there are."""
        n, most = (self.rows, self.most_rows) if side == ROWS else (self.columns, self.most_columns)
        least = -(-n // most)  # blocks; some more, if they are then all alike, are one program
        count = next((k for k in range(least, 2 * least + 1) if n % k == 0), least)
        whole, rest = divmod(n, size := -(-n // count))
        result = [(0, size, whole), (whole * size, rest, 1)]
        return result if rest else result[:1]

    @property
    def tiles(self) -> int:
        rows, columns = (sum(n for *_, n in self.blocks(side)) for side in (ROWS, COLUMNS))
        return rows * columns


@dataclass(frozen=True)
class MergeGroup:
    """Arrays of a tile's result that are merged together."""

    side: str
    merge: Callable[[Arrays, Arrays], Arrays]
    identity: Callable[[int], Sequence[float]] = lambda n: [0.0] * n


@dataclass(frozen=True)
class Sweep:
    """A program over all tiles.

    Attributes:
        tile: A tile's arrays to the states of each group.
        roles: The side of each array that is cut, or SHARED.
        groups: How states of tiles are merged, asked once a tile has been seen.
        cut: Where the tiles are.
        call: Whose tiles these are.
        progress: Whether a bar is shown.
    """

    tile: Callable[[Arrays], list[Arrays]]
    roles: Sequence[str]
    groups: Callable[[], Sequence[MergeGroup]]
    cut: TileGrid
    call: Any
    progress: bool = False


def added(a: Arrays, b: Arrays) -> Arrays:
    """The sums of two tiles' arrays."""
    return [x + y for x, y in zip(a, b, strict=True)]
