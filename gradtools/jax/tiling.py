"""Tiles in JAX: a scan over blocks of rows, inside it one over blocks of columns.

The blocks that remain where a side is no multiple of a tile are programs of their own, so that
nothing is padded. The states of columns are carried from one block of rows to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.jax import shardings
from gradtools.jax.alike import compiled
from gradtools.jax.chunking import promoted
from gradtools.jax.tracing import within_a_trace
from gradtools.tiled import COLUMNS, ROWS, SHARED, Sweep

Arrays = list[Any]
States = list[Arrays]  # one list for each group, empty where a group has another side


def sweep(program: Sweep, xs: Sequence[Any]) -> States:
    """The merged states of all tiles; outside of a trace by a program that is compiled once."""
    run = lambda *xs: _Sweep(program, xs).run()
    if within_a_trace():
        return run(*xs)
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(*xs)
    return jax.tree.unflatten(jax.tree.structure(shapes), compiled(closed)(closed.consts, xs))


class _Sweep:
    """One run of a program over tiles."""

    def __init__(self, program: Sweep, xs: Sequence[Any]) -> None:
        self.program, self.roles = program, program.roles
        self.xs = [_whole(x, role) for x, role in zip(xs, self.roles, strict=True)]
        self.rows, self.columns = (program.cut.blocks(side) for side in (ROWS, COLUMNS))

    def run(self) -> States:
        """The states of each group, joined."""
        first, bands = (self.rows[0][1], self.columns[0][1]), []
        looks = self._looks(*first)
        self.groups = self.program.groups()
        of_columns = []
        for _, size, count in self.columns:
            like = looks if size == first[1] else self._looks(first[0], size)
            of_columns.append(_repeated(self._empty(like, COLUMNS), count))
        carry = self._empty(looks, SHARED), of_columns
        for start, size, count in self.rows:
            like = looks if size == first[0] else self._looks(size, first[1])
            band = partial(self._band, self._empty(like, ROWS))
            carry, states = _loop(band, carry, self._blocks(ROWS, start, size, count), count)
            bands.append(states)
        shared, of_columns = carry
        return [
            shared[k] if g.side == SHARED else _joined(bands if g.side == ROWS else of_columns, k)
            for k, g in enumerate(self.groups)
        ]

    def _band(self, none: States, carry: Any, rows: Arrays) -> tuple[Any, States]:
        """One block of rows with all columns."""
        shared, of_columns = carry
        found, inner = [], (none, shared)
        for (start, size, count), held in zip(self.columns, of_columns, strict=True):
            blocks = self._blocks(COLUMNS, start, size, count), held
            inner, new = _loop(
                lambda inner, block: self._tile(rows, inner, *block), inner, blocks, count
            )
            found.append(new)
        of_rows, shared = inner
        return (shared, found), of_rows

    def _tile(self, rows: Arrays, held: Any, columns: Arrays, of_columns: States) -> Any:
        """The states after one more tile."""
        blocks = {ROWS: iter(rows), COLUMNS: iter(columns)}
        tile = [
            x if role == SHARED else next(blocks[role])
            for x, role in zip(self.xs, self.roles, strict=True)
        ]
        before = {ROWS: held[0], SHARED: held[1], COLUMNS: of_columns}
        after: dict[str, States] = {ROWS: [], SHARED: [], COLUMNS: []}
        for k, (group, new) in enumerate(zip(self.groups, self.program.tile(tile), strict=True)):
            for side, states in after.items():
                states.append(group.merge(before[side][k], new) if side == group.side else [])
        return (after[ROWS], after[SHARED]), after[COLUMNS]

    def _blocks(self, side: str, start: int, size: int, count: int) -> Arrays:
        """The blocks of a run, along a new first axis, of the arrays of one side."""
        mine = [x for x, role in zip(self.xs, self.roles, strict=True) if role == side]
        return [_cut(x[start : start + size * count], count) for x in mine]

    def _looks(self, rows: int, columns: int) -> States:
        """What the states of a tile of this size look like."""
        sizes, looks = {ROWS: rows, COLUMNS: columns}, list[int]()

        def states(*xs: Any) -> Arrays:
            pairs = zip(xs, self.roles, strict=True)
            tile = [x if role == SHARED else x[: sizes[role]] for x, role in pairs]
            found = self.program.tile(tile)
            looks[:] = [len(group) for group in found]
            return [x for group in found for x in group]

        avals = iter(jax.make_jaxpr(states)(*map(jax.typeof, self.xs)).out_avals)
        return [[next(avals) for _ in range(n)] for n in looks]

    def _empty(self, looks: States, side: str) -> States:
        """The states of no tile, for the groups of one side."""
        return [
            [_full(x, fill) for x, fill in zip(look, group.identity(len(look)), strict=True)]
            if group.side == side
            else []
            for look, group in zip(looks, self.groups, strict=True)
        ]


def _whole(x: Any, role: str) -> Any:
    return x if role == SHARED else shardings.whole(x, 0)


def _full(look: Any, fill: float) -> Any:
    return promoted(jnp.full(look.shape, fill, look.dtype), look)


def _repeated(states: States, count: int) -> States:
    return jax.tree.map(lambda x: jnp.repeat(x[None], count, axis=0), states)


def _cut(x: Any, count: int) -> Any:
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def _loop(body: Callable[..., Any], carry: Any, xs: Any, count: int) -> Any:
    """`jax.lax.scan`; of a single step the step itself."""
    if count > 1:
        return jax.lax.scan(body, carry, xs)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


def _joined(runs: Sequence[States], k: int) -> Arrays:
    """The states of a group, block after block."""
    merge = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    flat = [[merge(x) for x in run[k]] for run in runs]
    return [
        jnp.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*flat, strict=True)
    ]


def fold(step: Any, state: Arrays, xs: Sequence[Any], count: int) -> Arrays:
    """`state = step(state, block)` over so many blocks of the arrays' first axis."""
    body = lambda state, block: (step(state, block), None)
    return _loop(body, state, [_cut(x, count) for x in xs], count)[0]


def tile_bytes(fun: Any, xs: Sequence[Any], sides: Sequence[int | None]) -> int:
    """The most bytes that XLA gives to `fun` at arrays like xs."""
    looks = [
        jax.ShapeDtypeStruct(x.shape if n is None else (n, *x.shape[1:]), x.dtype)
        for x, n in zip(xs, sides, strict=True)
    ]
    found = jax.jit(fun).lower(*looks).compile().memory_analysis()
    return 0 if found is None else int(found.temp_size_in_bytes)
