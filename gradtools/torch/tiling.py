"""Tiles in PyTorch: a loop over blocks of rows, inside it one over blocks of columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from gradtools.chunks import progress_bar
from gradtools.errors import GradtoolsError
from gradtools.tiles import COLUMNS, ROWS, SHARED, MergeGroup, Sweep
from gradtools.torch.measures import LiveBytes
from gradtools.torch.randomness import Randomness

Tensor = torch.Tensor
State = list[Tensor]


def sweep(program: Sweep, xs: Sequence[Tensor]) -> list[State]:
    """The merged states of all tiles."""
    if not torch.is_grad_enabled():  # a shared tensor is handed on as it is
        xs = [x.detach() for x in xs]
    rows, columns = ([*_blocks(program, side)] for side in (ROWS, COLUMNS))
    of_rows: list[list[State | None]] = []
    of_columns: list[list[State | None]] = []
    shared: list[State | None] = []
    groups: Sequence[MergeGroup] = ()
    before = Randomness.now(xs)
    with progress_bar(program.cut.tiles) if program.progress else nullcontext() as bar:
        for row in rows:
            band = [_at(x, r, ROWS, row) for x, r in zip(xs, program.roles, strict=True)]
            found: list[State | None] = []
            for j, column in enumerate(columns):
                tile = [
                    _at(x, r, COLUMNS, column) for x, r in zip(band, program.roles, strict=True)
                ]
                with torch.enable_grad():
                    states = program.tile(tile)
                if not groups:
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


def _refuse_randomness(program: Sweep, before: Randomness | None) -> None:
    if before is not None and not before.stands():
        raise GradtoolsError(
            f"{program.asked}: f draws random numbers, which would be others when a tile is "
            "computed again. Draw them outside, and pass them as arguments."
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
