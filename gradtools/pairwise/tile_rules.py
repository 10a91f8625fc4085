"""`Sweep`, one pass over the tiles of a matrix of pairs, and the rules that are made of sweeps.

A backend runs a `Sweep`. `SumOverTiles` and `Reduced` are rules whose derivatives are sweeps; see
`pairwise_reduction.py` for the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gradtools.arguments.checks import as_array
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError
from gradtools.pairwise.tile_reductions import Reduction, wide
from gradtools.rules import Linearized, Rule, closed_over_error, replaced_at

if TYPE_CHECKING:
    from gradtools.pairwise.pairwise_reduction import TiledCall


ROWS, COLUMNS, SHARED = "rows", "columns", "shared"
Arrays = list[Any]


@dataclass(frozen=True)
class TileGrid:
    """The partition of the matrix of pairs into tiles that are as equal as possible."""

    rows: int
    columns: int
    most_rows: int
    most_columns: int

    def blocks(self, side: str) -> list[tuple[int, int, int]]:
        """Runs of blocks of equal length: (start, length, count)."""
        n, most = (self.rows, self.most_rows) if side == ROWS else (self.columns, self.most_columns)
        if _is_symbolic(n):
            return [(0, most, n // most)]
        least = -(-n // most)  # blocks; up to twice as many if they are then of equal length
        count = next((k for k in range(least, 2 * least + 1) if n % k == 0), least)
        whole, rest = divmod(n, size := -(-n // count))
        result = [(0, size, whole), (whole * size, rest, 1)]
        return result if rest else result[:1]

    def check(self, caller: str) -> None:
        """Raises if a symbolic size, as in `jax.export`, cannot be cut into equal tiles."""
        sides = (self.rows, self.most_rows, "rows"), (self.columns, self.most_columns, "columns")
        for n, most, side in sides:
            if _is_symbolic(n) and n % most != 0:
                raise GradtoolsError(
                    f"{caller}: there are {n} {side}, a symbolic number that cannot be cut into "
                    f"equal tiles of {most}. Give a tile_size and export a multiple of it, such "
                    "as tile_size=64 and '64*n' in jax.export.symbolic_shape."
                )

    @property
    def tiles(self) -> int:
        rows, columns = (sum(n for *_, n in self.blocks(side)) for side in (ROWS, COLUMNS))
        return rows * columns


def _is_symbolic(size: Any) -> bool:
    return not hasattr(size, "__index__")


@dataclass(frozen=True)
class MergeGroup:
    """Arrays of a tile's result that form one state."""

    side: str
    merge: Callable[[Arrays, Arrays], Arrays]
    identity: Callable[[int], Sequence[float]] = lambda n: [0.0] * n


@dataclass(frozen=True)
class Sweep:
    """A program over all tiles."""

    # A function from a tile's arrays to the state of each group.
    tile: Callable[[Arrays], list[Arrays]]
    roles: Sequence[str]  # the role of each array: ROWS, COLUMNS or SHARED
    # Returns the groups, with their merge functions; called after a tile is computed.
    groups: Callable[[], Sequence[MergeGroup]]
    cut: TileGrid  # the partition into tiles
    call: Any  # a `TiledCall`


def added(a: Arrays, b: Arrays) -> Arrays:
    """The sums of two tiles' arrays."""
    return [x + y for x, y in zip(a, b, strict=True)]


def parted(flat: Sequence[Any], counts: Sequence[int]) -> list[Arrays]:
    left = iter(flat)
    return [[next(left) for _ in range(n)] for n in counts]


def reduced_second(backend: Backend, x: Array, side: str) -> Array:
    """A tile with the reduced axis second; for results of columns the first two are exchanged."""
    if side == ROWS or len(getattr(x, "shape", ())) < 2:
        return x
    return backend.xp.permute_dims(x, (1, 0, *range(2, len(x.shape))))


def apply_over_tiles(backend: Backend, of: SumOverTiles | Reduced, xs: Sequence[Array]) -> Arrays:
    """The rule's outputs at xs."""

    def linearized(*xs: Array, perturbed: tuple[bool, ...] | None = None) -> Linearized:
        """The outputs, with their tangent and cotangent maps, which are sums over tiles."""
        moving, ys = moving_inputs(of.call, of.name, xs, perturbed), of.primal(*xs)
        if of.is_call:
            moving = [i for i in moving if i not in of.call.unreached]
        saves = tuple(range(len(xs) + (len(ys) if of.reads_results else 0)))
        return Linearized(ys, [], saves, of._tangent, partial(of._cotangent, moving))

    rule = Rule(
        of.name,
        primal=of.primal,
        linearize=linearized,
        user_functions=of.call.user_functions,
        nondifferentiable=of.call.unreached if of.is_call else (),
        symbolic_zeros=frozenset({"cotangent"}),
    )
    return backend.apply_rule(rule, *xs)


@dataclass(frozen=True, eq=False)
class SumOverTiles:
    """T[h], a sum over tiles."""

    call: TiledCall
    h: Callable[[Arrays], Arrays]  # a function from a tile's arrays to arrays
    roles: tuple[str, ...]  # the role of each argument
    sides: Sequence[str] | str  # the side of each result, or one side for all
    cut: TileGrid  # the partition into tiles
    name: str = "pairwise_reduce"  # the name in messages
    # The dtypes of h's results, set when h is evaluated on a tile.
    dtypes: list[str] = field(default_factory=list)
    is_call: bool = False  # whether it is the call itself, not one of its derivatives
    reads_results = False  # whether the derivatives read the outputs

    def apply(self, xs: Sequence[Array]) -> Arrays:
        return apply_over_tiles(self.call.backend, self, xs)

    def primal(self, *xs: Array) -> Arrays:
        backend = self.call.backend
        program = Sweep(self._tile, self.roles, self._groups, self.cut, self.call)
        result = backend.tiles.sweep(program, xs)
        return [backend.cast(x, dtype) for (x,), dtype in zip(result, self.dtypes, strict=True)]

    def _tile(self, xs: Arrays) -> list[Arrays]:
        result, backend = self.h(xs), self.call.backend
        self.dtypes[:] = [backend.dtype_name(x) for x in result]
        return [[wide(backend, x)] for x in result]

    def _groups(self) -> list[MergeGroup]:
        return [MergeGroup(self._side(i), added) for i in range(len(self.dtypes))]

    def _side(self, i: int) -> str:
        return self.sides if isinstance(self.sides, str) else self.sides[i]

    def _tangent(self, xs: Sequence[Array], dxs: Sequence[Any]) -> Arrays:
        present, n = _present(dxs), len(xs)

        def pushed(tile: Arrays) -> Arrays:
            xs = tile[:n]
            at = _at(self.h, xs, present)
            return self.call.backend.push(at, [xs[i] for i in present], tile[n:])

        roles = (*self.roles, *(self.roles[i] for i in present))
        push = replace(
            self, h=pushed, roles=roles, name="pairwise_reduce (tangent)", dtypes=[], is_call=False
        )
        return push.apply([*xs, *(dxs[i] for i in present)])

    def _cotangent(self, moving: list[int], xs: Sequence[Array], cts: Sequence[Any]) -> Arrays:
        present, n, reached = _present(cts), len(xs), list[bool]()

        def pulled(tile: Arrays) -> Arrays:
            cts = dict(zip(present, tile[n:], strict=True))
            full = lambda outs: [cts.get(i) for i in range(len(outs))]
            xs, at = tile[:n], _at(self.h, tile[:n], moving)
            return self.call.backend.pull(at, [xs[i] for i in moving], full, reached)

        pull = replace(
            self,
            h=pulled,
            roles=(*self.roles, *map(self._side, present)),
            sides=[self.roles[i] for i in moving],
            name="pairwise_reduce (cotangent)",
            dtypes=[],
            is_call=False,
        )
        result = pull.apply([*xs, *(cts[i] for i in present)])
        return replaced_at([None] * n, moving, _reaching(result, reached))


def _present(entries: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(entries) if x is not None]


def moving_inputs(
    call: TiledCall, name: str, xs: Sequence[Array], perturbed: tuple[bool, ...] | None = None
) -> list[int]:
    """The differentiated inputs; raises if one is an array that f closes over."""
    if perturbed is not None and any(perturbed[i] for i in call.captured):
        raise closed_over_error(name)
    inexact = [i for i, x in enumerate(xs) if call.backend.is_inexact(x) and i not in call.captured]
    return [i for i in inexact if perturbed is None or perturbed[i]]


def _at(h: Callable[[Arrays], Arrays], xs: Arrays, places: Sequence[int]) -> Any:
    """h as a function of the arguments at `places`."""
    return lambda *changed: h(replaced_at(xs, places, changed))


@dataclass(frozen=True, eq=False)
class Reduced:
    """The reductions of a call in one sweep."""

    call: TiledCall
    name: str = "pairwise_reduce"
    is_call = reads_results = True  # as in `SumOverTiles`

    def primal(self, *xs: Array) -> Arrays:
        call = self.call
        program = Sweep(self._tile, call.roles, self._groups, call.cut, call)
        states = call.backend.tiles.sweep(program, xs)
        pairs = zip(call.kinds, states, strict=True)
        return [y for kind, state in pairs for y in kind.finish(state)]

    def _tile(self, xs: Arrays) -> list[Arrays]:
        return [kind.lift(part) for kind, part in self._parts(self.call.of_tile(xs), xs)]

    def _groups(self) -> list[MergeGroup]:
        return [MergeGroup(kind.side, kind.merge, kind.states) for kind in self.call.kinds]

    def _parts(self, out: Arrays, xs: Sequence[Array]) -> list[tuple[Reduction, Arrays]]:
        """Each reduction with its arrays of f's output at a tile."""
        index, parts = {COLUMNS: xs[-2], ROWS: xs[-1]}, []
        for kind in self.call.kinds:
            arrays = [reduced_second(kind.backend, out[i], kind.side) for i in kind.places]
            parts.append((kind, arrays + [index[kind.side]] * kind.indexed))
        return parts

    def _read(self, saved: Sequence[Array]) -> tuple[Arrays, list[Arrays], list[Arrays]]:
        """The saved arguments, results, and the results that are read at each tile."""
        call, n = self.call, len(self.call.roles)
        ys = parted(saved[n:], [len(kind.dtypes) for kind in call.kinds])
        stats = [kind.stats(group) for kind, group in zip(call.kinds, ys, strict=True)]
        return list(saved[:n]), ys, stats

    def _tangent(self, saved: Sequence[Array], dxs: Sequence[Any]) -> Arrays:
        call = self.call
        xs, ys, stats = self._read(saved)
        present, n, counts = _present(dxs), len(xs), [len(group) for group in stats]

        def pushed(tile: Arrays) -> Arrays:
            *known, moved = parted(tile[n:], [*counts, len(present)])
            xs, at = tile[:n], _at(call.of_tile, tile[:n], present)
            out, moved = call.backend.value_and_push(at, [xs[i] for i in present], moved)
            triples = zip(self._parts(out, xs), self._parts(moved, xs), known, strict=True)
            return [x for (kind, o), (_, do), s in triples for x in kind.push(o, do, s)]

        roles = (*call.roles, *self._spread(counts), *(call.roles[i] for i in present))
        sizes = [len(kind.dtypes) - kind.more for kind in call.kinds]
        total = SumOverTiles(
            call, pushed, roles, self._spread(sizes), call.cut, "pairwise_reduce (tangent)"
        )
        sums = total.apply([*xs, *(s for g in stats for s in g), *(dxs[i] for i in present)])
        triples = zip(call.kinds, parted(sums, sizes), ys, strict=True)
        return [dy for kind, group, of in triples for dy in kind.pushed(group, of)]

    def _spread(self, counts: Sequence[int]) -> list[str]:
        """The side of each reduction, repeated `counts` times."""
        return [
            kind.side for kind, n in zip(self.call.kinds, counts, strict=True) for _ in range(n)
        ]

    def _cotangent(self, moving: list[int], saved: Sequence[Array], cts: Sequence[Any]) -> Arrays:
        call = self.call
        xs, ys, stats = self._read(saved)
        n, groups = len(xs), parted(cts, [len(kind.dtypes) for kind in call.kinds])
        known = [
            [*s, *kind.pulling(y, g)] if _present(g) else []
            for kind, s, y, g in zip(call.kinds, stats, ys, groups, strict=True)
        ]
        counts, firsts = [len(group) for group in known], [len(group) for group in stats]
        if not any(counts):
            return [None] * n

        reached = list[bool]()

        def pulled(tile: Arrays) -> Arrays:
            xs, at_tile = tile[:n], parted(tile[n:], counts)

            def of_scores(out: Arrays) -> Arrays:
                full: Arrays = [None] * len(out)
                for k, (kind, part) in enumerate(self._parts(out, xs)):
                    if at_tile[k]:
                        result = kind.pull(part, at_tile[k][: firsts[k]], at_tile[k][firsts[k] :])
                        turned = [reduced_second(call.backend, ct, kind.side) for ct in result]
                        full = replaced_at(full, kind.places, turned)
                return full

            at = _at(call.of_tile, xs, moving)
            return call.backend.pull(at, [xs[i] for i in moving], of_scores, reached)

        roles, out = (*call.roles, *self._spread(counts)), [call.roles[i] for i in moving]
        total = SumOverTiles(call, pulled, roles, out, call.cut, "pairwise_reduce (cotangent)")
        result = total.apply([*xs, *(x for g in known for x in g)])
        return replaced_at([None] * n, moving, _reaching(result, reached))


def _reaching(grads: Arrays, reached: Sequence[bool]) -> Arrays:
    """The gradients; None for inputs that do not reach a tile's results."""
    return [g if there else None for g, there in zip(grads, reached, strict=True)]


def fold_columns(call: TiledCall, xs: Arrays) -> Any:
    """The result of a custom reduction (init, combine, finish): a sum over tiles of whole rows."""
    backend, cut, out, state_def = call.backend, call.cut, list[Any](), list[Any]()
    init, combine, finish = (backend.tiles.as_now(g, xs) for g in call.options.reduce)

    def first(tile: Arrays) -> Arrays:
        leaves, treedef = backend.flatten(init(call.evaluated(tile)))
        state_def[:] = [treedef]
        return [as_array(backend, call.caller, x, "init's state") for x in leaves]

    def of_tile(tile: Arrays) -> Arrays:
        rows, columns = call.shape_of(tile)
        one = TileGrid(rows, columns, rows, columns)
        return SumOverTiles(call, first, tuple(call.roles), ROWS, one).apply(tile)

    def step(xs: Arrays, state: Arrays, columns: Arrays) -> Arrays:
        one = of_tile(replaced_at(xs, at, columns))
        a, b = (backend.unflatten(state_def[0], x) for x in (state, one))
        return backend.flatten(combine(a, b))[0]

    def of_rows(xs: Arrays) -> Arrays:
        state: Arrays = []
        for start, size, count in cut.blocks(COLUMNS):
            if not state:
                state = of_tile(replaced_at(xs, at, [xs[i][:size] for i in at]))
                start, count = start + size, count - 1
            if count:
                stop = start + size * count
                columns = [xs[i][start:stop] for i in at]
                state = backend.tiles.fold(partial(step, xs), state, columns, count)
        leaves, treedef = backend.flatten(finish(backend.unflatten(state_def[0], state)))
        out[:] = [treedef]
        return leaves

    at = [i for i, role in enumerate(call.roles) if role == COLUMNS]
    roles = tuple(SHARED if role == COLUMNS else role for role in call.roles)
    rows = TileGrid(cut.rows, 1, cut.most_rows, 1)
    leaves = SumOverTiles(call, of_rows, roles, ROWS, rows, is_call=True).apply(xs)
    return backend.unflatten(out[0], leaves)
