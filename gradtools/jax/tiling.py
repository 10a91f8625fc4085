"""Tiles in JAX: a scan over blocks of rows, inside it one over blocks of columns.

Where a side is no multiple of the tile's, the remaining blocks are programs of their own, so that
nothing is padded. The states of columns are the carry of the loop over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradtools.errors import GradtoolsError
from gradtools.jax import shardings
from gradtools.jax.chunking import promoted
from gradtools.jax.compiled_once import run_compiled
from gradtools.jax.jaxprs import DRAWS, bound, equations, interpreted
from gradtools.jax.reachability import reached, within_a_trace
from gradtools.jax.shardings import varying, varying_alike
from gradtools.pairwise.tile_rules import COLUMNS, ROWS, SHARED, MergeGroup, Sweep, added
from gradtools.rules import captured_objects

Arrays = list[Any]
States = list[Arrays]  # one list for each group; empty for groups of other sides


def sweep(program: Sweep, xs: Sequence[Any]) -> States:
    """The merged states of all tiles."""
    return run_compiled(program.call.f, lambda *xs: _run(program, xs), *xs)


def _run(program: Sweep, xs: Sequence[Any]) -> States:
    """The merged states. A side that is sharded over Explicit axes is swept under shard_map.

    Each device has its shard of that side and all of the other side; the states of the other side,
    and the shared ones, are merged over the devices at the end. If both sides are sharded, the rows
    are split.
    """
    whole = _SweepRun(program, xs)
    side = next((side for side in (ROWS, COLUMNS) if whole.divides(side)), None)
    if side is None:
        return whole.run()
    entry, mesh = whole.entries[side], whole.mesh(side)
    count = getattr(program.cut, side) // shardings.device_count(mesh, entry)
    part = replace(program, cut=replace(program.cut, **{side: count}))
    whole.avals(whole.rows[0][1], whole.columns[0][1])  # traces the program, which knows its groups
    groups = program.groups()

    def run(*xs: Any) -> States:
        states = _SweepRun(part, xs).run()
        for k, group in enumerate(groups):  # merges the states of all devices
            if group.side == side:
                continue
            if group.merge is added:
                states[k] = [jax.lax.psum(x, entry) for x in states[k]]
                continue
            parts = [jax.lax.all_gather(x, entry) for x in states[k]]
            states[k] = reduce(group.merge, [[x[i] for x in parts] for i in range(len(parts[0]))])
        return states

    split = lambda other: (entry,) * (other == side)
    states = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple([PartitionSpec(*split(role)) for role in program.roles]),
        out_specs=[PartitionSpec(*split(group.side)) for group in groups],
        axis_names=set(shardings.names(entry)),
        check_vma=False,
    )(*[shardings.on_mesh(x, mesh, split(r)) for x, r in zip(xs, program.roles, strict=True)])
    return [whole.placed(state, group) for state, group in zip(states, groups, strict=True)]


class _SweepRun:
    """One sweep of a program over all tiles."""

    def __init__(self, program: Sweep, xs: Sequence[Any]) -> None:
        self.program, self.roles, self.given = program, program.roles, xs
        self.xs = [
            x if role == SHARED else shardings.whole(x, 0)
            for x, role in zip(xs, self.roles, strict=True)
        ]
        # The mesh axes (Explicit ones) over which each side is sharded, or None.
        self.entries: dict[str, Any] = {ROWS: None, COLUMNS: None}
        for role, x in zip(self.roles, xs, strict=True):
            if role != SHARED and self.entries[role] is None:
                self.entries[role] = shardings.entries(x)[0]
        self.rows, self.columns = (program.cut.blocks(side) for side in (ROWS, COLUMNS))

    def run(self) -> States:
        first, bands = (self.rows[0][1], self.columns[0][1]), []
        avals = self.avals(*first)
        self.groups = self.program.groups()
        of_columns = []
        for _, size, count in self.columns:
            like = avals if size == first[1] else self.avals(first[0], size)
            repeated = lambda x, count=count: jnp.repeat(x[None], count, axis=0)
            of_columns.append(jax.tree.map(repeated, self._empty(like, COLUMNS)))
        carry = self._empty(avals, SHARED), of_columns
        for start, size, count in self.rows:
            like = avals if size == first[0] else self.avals(size, first[1])
            none = self._empty(like, ROWS)

            def band(carry: Any, rows: Arrays, none: States = none) -> tuple[Any, States]:
                shared, of_columns = carry
                result, inner = [], (none, shared)
                for (start, size, count), states in zip(self.columns, of_columns, strict=True):
                    blocks = self._blocks(COLUMNS, start, size, count), states
                    step = lambda inner, block: self._tile(rows, inner, *block)
                    inner, new = _loop(step, inner, blocks, count)
                    result.append(new)
                of_rows, shared = inner
                return (shared, result), of_rows

            carry, states = _loop(band, carry, self._blocks(ROWS, start, size, count), count)
            bands.append(states)
        shared, of_columns = carry
        runs = {ROWS: bands, COLUMNS: of_columns}
        merged = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
        result = []
        for k, group in enumerate(self.groups):
            if group.side == SHARED:
                result.append(shared[k])
                continue
            columns = zip(*[map(merged, run[k]) for run in runs[group.side]], strict=True)
            joined = [jnp.concatenate(xs) if len(xs) > 1 else xs[0] for xs in columns]
            result.append(self.placed(joined, group))
        return result

    def placed(self, state: Arrays, group: MergeGroup) -> Arrays:
        """A group's states, sharded as the arrays of its side are."""
        if group.side == SHARED:
            return state
        return [shardings.placed(x, 0, self.entries[group.side]) for x in state]

    def divides(self, side: str) -> bool:
        """Whether a side is sharded evenly over its devices, and no other axis is sharded."""
        entry = self.entries[side]
        if entry is None or any(name for x in self.xs for name in shardings.entries(x)):
            return False
        count = shardings.device_count(self.mesh(side), entry)
        return bool(getattr(self.program.cut, side) % count == 0)

    def mesh(self, side: str) -> Any:
        mine = (x for x, role in zip(self.given, self.roles, strict=True) if role == side)
        return next(jax.typeof(x).sharding.mesh for x in mine if shardings.entries(x)[0])

    def _tile(self, rows: Arrays, carry: Any, columns: Arrays, of_columns: States) -> Any:
        blocks = {ROWS: iter(rows), COLUMNS: iter(columns)}
        tile = [
            x if role == SHARED else next(blocks[role])
            for x, role in zip(self.xs, self.roles, strict=True)
        ]
        before = {ROWS: carry[0], SHARED: carry[1], COLUMNS: of_columns}
        after: dict[str, States] = {ROWS: [], SHARED: [], COLUMNS: []}
        for k, (group, new) in enumerate(zip(self.groups, self.program.tile(tile), strict=True)):
            for side, states in after.items():
                states.append(group.merge(before[side][k], new) if side == group.side else [])
        return (after[ROWS], after[SHARED]), after[COLUMNS]

    def _blocks(self, side: str, start: int, size: int, count: int) -> Arrays:
        """The arrays of one side, cut into `count` blocks along a new first axis."""
        mine = [x for x, role in zip(self.xs, self.roles, strict=True) if role == side]
        return [_cut(x[start : start + size * count], count) for x in mine]

    def avals(self, rows: int, columns: int) -> States:
        """The avals of the states of a tile of this size."""
        sizes, counts = {ROWS: rows, COLUMNS: columns}, list[int]()

        def states(*xs: Any) -> Arrays:
            pairs = zip(xs, self.roles, strict=True)
            tile = [x if role == SHARED else x[: sizes[role]] for x, role in pairs]
            result = self.program.tile(tile)
            counts[:] = [len(group) for group in result]
            return [x for group in result for x in group]

        closed = jax.make_jaxpr(states)(*map(jax.typeof, self.xs))
        call = self.program.call

        def drawn(rows: int, columns: int) -> Any:
            """f's draws for a tile of this size: each tile repeats them, so none may be its own."""
            sizes = {ROWS: rows, COLUMNS: columns, SHARED: None}
            pairs = zip(self.xs, call.roles[:-2], strict=False)
            tile = [_with_length(x, sizes[role]) for x, role in pairs]
            return _draws(jax.make_jaxpr(call.call)(tile))

        if _draws(closed) and drawn(rows, columns) != drawn(rows + 1, columns + 1):
            raise GradtoolsError(
                f"{call.caller}: f draws random numbers for a whole tile by one key, so that each "
                "tile would get the same. Draw outside, and pass what was drawn, or draw by a key "
                "for each pair: fold the indices of its row and column in, which are arguments."
            )
        avals = iter(closed.out_avals)
        return [[next(avals) for _ in range(n)] for n in counts]

    def _empty(self, avals: States, side: str) -> States:
        """The identity elements of the merges, for the groups of one side."""
        full = lambda x, fill: promoted(jnp.full(x.shape, fill, x.dtype), x)
        return [
            list(map(full, aval, group.identity(len(aval)))) if group.side == side else []
            for aval, group in zip(avals, self.groups, strict=True)
        ]


def _draws(closed: Any) -> set[Any]:
    """The draws of a program: primitive and shape of each."""
    drawn = [eqn for eqn in equations(closed) if eqn.primitive.name in DRAWS]
    return {(eqn.primitive.name, eqn.params["shape"]) for eqn in drawn}


def _cut(x: Any, count: int) -> Any:
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def _loop(body: Callable[..., Any], carry: Any, xs: Any, count: int) -> Any:
    """`jax.lax.scan`, unrolled if there is a single step."""
    if count != 1:  # which may be symbolic
        return jax.lax.scan(body, carry, xs)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


def fold(step: Any, state: Arrays, xs: Sequence[Any], count: int) -> Arrays:
    """`state = step(state, block)` over `count` blocks of the arrays' first axis."""
    body = lambda state, block: (step(state, block), None)
    return _loop(body, state, [_cut(x, count) for x in xs], count)[0]


def as_now(fun: Callable[..., Any], xs: Sequence[Any]) -> Callable[..., Any]:
    """fun itself: JAX has no modes to restore when it runs later."""
    return fun


def of_own(name: str, x: Any, *others: Any) -> Any:
    """`name(x, *others)`; XLA reuses x's memory by itself."""
    return getattr(jnp, name)(x, *others)


def indices(n: Any, device_of: Any) -> Any:
    """0 to n - 1; n may be symbolic."""
    return jnp.arange(n, dtype=jnp.int32)


def taken(x: Any, at: Any, index: Any) -> Any:
    """The entry of each row of x in the column whose index equals `at`; 0 if there is none."""
    return jnp.sum(jnp.where(_is_at(at, index), x, jnp.zeros_like(x)), axis=1)


def put(v: Any, at: Any, index: Any) -> Any:
    """The transpose of `taken`: a matrix with v at these places and zeros elsewhere."""
    v = jnp.expand_dims(v, axis=1)
    return jnp.where(_is_at(at, index), v, jnp.zeros_like(v))


def _is_at(at: Any, index: Any) -> Any:
    wider = at.dtype if at.dtype.itemsize > index.dtype.itemsize else index.dtype
    return jnp.asarray(index, wider)[None] == jnp.asarray(at, wider)[:, None]


def sharded_like(x: Any, other: Any) -> Any:
    """x, sharded like another array of its shape, if that is sharded."""
    return shardings.like(x, other) if any(shardings.entries(other)) else x


# --- what f closes over ------------------------------------------------------------------


def explicit(
    caller: str,
    fun: Callable[[Arrays], Any],
    own: Sequence[Any],
    xs: Sequence[Any],
    sides: Sequence[Sequence[int | None]],
) -> tuple[Callable[[Arrays], Any], Arrays]:
    """Closure conversion: a function of a tile and of the tracers that it closes over, and these.

    The maps of a sweep run when that trace may have ended; they are sweeps themselves, so lifting
    their closures would recurse without end. f is traced once for each tile size.
    """
    if not within_a_trace():
        return fun, []
    if any(True for _ in captured_objects(own, _is_tracer, jax.Array)):
        raise GradtoolsError(
            f"{caller}: a function of reduce closes over an array of the function that is being "
            "transformed by JAX. Return the array from f, as a part of its output."
        )
    captured, programs, complete = list[Any](), dict[Any, Any](), False

    def program_of(avals: Sequence[Any]) -> Any:
        """The jaxpr for a tile size, its constants and the structure of its output."""
        key = tuple([(aval.shape, aval.dtype) for aval in avals])
        if key in programs:
            return programs[key]
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(list(avals))
        constants: list[Any] = []  # `(position in captured, None)`, or `(None, constant)`
        for x in closed.consts:
            if not _is_tracer(x):
                constants.append((None, x))
                continue
            at = next((k for k, y in enumerate(captured) if y is x), len(captured))
            constants.append((at, None))
            if at == len(captured):
                if complete:
                    raise GradtoolsError(
                        f"{caller}: f closes over another array in a tile of another size. Pass it "
                        "as an argument."
                    )
                captured.append(x)
        programs[key] = closed.jaxpr, constants, jax.tree.structure(shapes)
        return programs[key]

    def step(_: int, eqn: Any, xs: Arrays) -> Arrays:
        # Under shard_map more values may vary than when it was traced.
        if eqn.primitive.name == "pvary":
            return [varying(xs[0], frozenset(eqn.params["axes"]))]
        return bound(eqn, varying_alike(xs))

    def converted(xs: Arrays) -> Any:
        if not captured:
            return fun(xs)
        n = len(xs) - len(captured)
        jaxpr, constants, treedef = program_of([jax.typeof(x) for x in xs[:n]])
        consts = [x if k is None else xs[n + k] for k, x in constants]
        return jax.tree.unflatten(treedef, interpreted(jaxpr, [*consts, *xs[:n]], step))

    for lengths in sides:
        program_of([_with_length(x, n) for x, n in zip(xs, lengths, strict=True)])
    complete = True  # the captured arrays are arguments by now
    return converted, captured


def _is_tracer(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def unreached(
    fun: Callable[[Arrays], Any],
    xs: Sequence[Any],
    lengths: Sequence[int | None],
    in_backward: bool,
) -> tuple[int, ...]:
    """The positions of the arrays that do not reach a tile's scores, by the tile's jaxpr.

    lengths: The tile's size along the side of each array that has one.
    """
    lengths = [*lengths, *[None] * (len(xs) - len(lengths))]
    avals = [_with_length(x, n) for x, n in zip(xs, lengths, strict=True)]
    closed = jax.make_jaxpr(fun)(avals)
    return tuple([i for i, there in enumerate(reached(closed)) if not there])


def _with_length(x: Any, n: int | None) -> Any:
    aval = jax.typeof(x)
    return aval if n is None else shardings.with_leading(shardings.without_axis(aval, 0), n)


def tile_bytes(fun: Any, xs: Sequence[Any], sides: Sequence[int | None]) -> int:
    """The bytes of temporary buffers that XLA allocates for `fun` at arrays like xs."""
    avals = [
        jax.ShapeDtypeStruct(x.shape if n is None else (n, *x.shape[1:]), x.dtype)
        for x, n in zip(xs, sides, strict=True)
    ]
    result = jax.jit(fun).lower(*avals).compile().memory_analysis()
    return 0 if result is None else int(result.temp_size_in_bytes)
