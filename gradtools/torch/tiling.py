"""Tiles in PyTorch: a loop over blocks of rows, inside it one over blocks of columns.

A tile is computed again for each derivative, so the first one of each sweep is compared with what
it was before, as in `chunked`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from gradtools.chunks import progress_bar
from gradtools.errors import GradtoolsError
from gradtools.tiles import COLUMNS, ROWS, SHARED, MergeGroup, Sweep
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling
from gradtools.torch.measures import LiveBytes
from gradtools.torch.randomness import Randomness
from gradtools.torch.verifying import Figures, figures, is_near
from gradtools.torch.wrappers import is_mapped, unwrapped

Tensor = torch.Tensor
State = list[Tensor]
_SAMPLE = 1 << 12  # entries of a tile that are compared


def sweep(program: Sweep, xs: Sequence[Tensor]) -> list[State]:
    """The merged states of all tiles."""
    call = program.call
    if call.sweeping:  # a sweep within a tile
        return _swept(program, xs, False)
    call.sweeping, call.watch = True, Watch.of(call)
    try:
        return _swept(program, xs, True)
    finally:
        call.sweeping = False


def _swept(program: Sweep, xs: Sequence[Tensor], first: bool) -> list[State]:
    """first: Whether what f does besides computing is looked at."""
    if not torch.is_grad_enabled():  # a shared tensor is handed on as it is
        xs = [x.detach() for x in xs]
    rows, columns = ([*_blocks(program, side)] for side in (ROWS, COLUMNS))
    of_rows: list[list[State | None]] = []
    of_columns: list[list[State | None]] = []
    shared: list[State | None] = []
    groups: Sequence[MergeGroup] = ()
    before = Randomness.now(xs) if first else None
    with progress_bar(program.cut.tiles) if program.progress else nullcontext() as bar:
        for row in rows:
            band = [_at(x, r, ROWS, row) for x, r in zip(xs, program.roles, strict=True)]
            found: list[State | None] = []
            for j, column in enumerate(columns):
                tile = [
                    _at(x, r, COLUMNS, column) for x, r in zip(band, program.roles, strict=True)
                ]
                if first and not groups:  # what f writes is its own, until it is refused
                    tile = [x.clone() for x in tile]
                versions = [] if groups else _versions(tile)
                with torch.enable_grad():
                    states = program.tile(tile)
                if not groups:
                    _refuse_writing(program, versions != _versions(tile))
                    groups = program.groups()
                    _refuse_randomness(program, before)
                    of_columns = [[None] * len(groups) for _ in columns]
                    shared = [None] * len(groups)
                if not found:
                    found = [None] * len(groups)
                for k, (group, new) in enumerate(zip(groups, states, strict=True)):
                    held, at = {
                        ROWS: (found, k),
                        COLUMNS: (of_columns[j], k),
                        SHARED: (shared, k),
                    }[group.side]
                    old = held[at]
                    held[at] = new if old is None else group.merge(old, new)
                if bar is not None:
                    bar.update()
            of_rows.append(found)
    parts = {ROWS: of_rows, COLUMNS: of_columns, SHARED: [shared]}
    return [_joined(parts[group.side], k) for k, group in enumerate(groups)]


def _blocks(program: Sweep, side: str) -> Any:
    for start, size, count in program.cut.blocks(side):
        for i in range(count):
            yield start + i * size, size


def _at(x: Tensor, role: str, side: str, block: tuple[int, int]) -> Tensor:
    return x.narrow(0, *block) if role == side else x


def _joined(blocks: Sequence[list[State | None]], k: int) -> State:
    """One group's states of all blocks; each tensor's parts are let go before the next is made."""
    there = [state for block in blocks if (state := block[k]) is not None]
    for block in blocks:
        block[k] = None
    if len(there) == 1:
        return there[0]
    return [torch.cat([state.pop(0) for state in there]) for _ in range(len(there[0]))]


def _versions(xs: State) -> list[int]:
    return [0 if x.is_inference() else upstream.version_of(x) for x in xs]


def _refuse_writing(program: Sweep, has_written: bool) -> None:
    if has_written:
        raise GradtoolsError(
            f"{program.call.asked}: f changes an argument in place, which other tiles read, too. "
            "Clone it in f first."
        )


def _refuse_randomness(program: Sweep, before: Randomness | None) -> None:
    if before is not None and not before.stands():
        raise GradtoolsError(
            f"{program.call.asked}: f draws random numbers, which would be others when a tile is "
            "computed again. Draw them outside, and pass them as arguments."
        )


class Watch:
    """Compares f at a tile that it saw before with what it gave then."""

    def __init__(self, asked: str) -> None:
        self.asked, self.seen = asked, dict[Any, list[Figures]]()

    @classmethod
    def of(cls, call: Any) -> Callable[[State, State], None] | None:
        """The watch of a call, or none where numbers cannot be read."""
        if is_compiling() or upstream.TracingContext.try_get() is not None:
            return None
        call.watched = call.watched or cls(call.asked)
        watched: Watch = call.watched
        return watched.look

    def look(self, indices: State, out: list[Any]) -> None:
        """Notes what f gave at the tile of these rows and columns, or compares it."""
        arrays = [*indices, *(x for x in out if isinstance(x, Tensor))]
        if any(is_mapped(x) or x.is_meta for x in arrays):  # there are no numbers to compare
            return
        with upstream.outermost(), torch.no_grad():
            rows, columns, *leaves = [unwrapped(x).detach() for x in arrays]
            tile = len(rows), int(rows[0]), len(columns), int(columns[0])
            found = [figures(x, _SAMPLE) for x in leaves]
        if not all(map(is_near, self.seen.setdefault(tile, found), found)):
            raise GradtoolsError(
                f"{self.asked}: f gives other numbers when a tile is computed again, so its "
                "derivative would be wrong: it draws from a random stream or counts its calls, or "
                "an array that it closes over was changed after the forward pass. Pass it as an "
                "argument."
            )


def fold(
    step: Callable[[State, State], State], state: State, xs: Sequence[Tensor], count: int
) -> State:
    """`state = step(state, block)` over so many blocks of the tensors' first axis."""
    for block in zip(*[x.chunk(count) for x in xs], strict=True):
        state = step(state, list(block))
    return state


def tile_bytes(fun: Any, xs: Sequence[Tensor], sides: Sequence[int | None]) -> int:
    """The most bytes that live while `fun` runs at tensors like xs."""
    like = [
        torch.zeros(x.shape if n is None else (n, *x.shape[1:]), dtype=x.dtype, device=x.device)
        for x, n in zip(xs, sides, strict=True)
    ]
    with LiveBytes() as live:
        fun(*like)
    return int(live.peak)
