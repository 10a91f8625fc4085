"""`Sweep`, one pass over the tiles of a matrix of pairs, and the rules that are made of sweeps.

A backend runs a `Sweep`. `SumOverTiles` and `Reduced` are rules whose derivatives are sweeps; see
`pairwise_reduction.py` for the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from gradtools.backend import Array
from gradtools.errors import GradtoolsError
from gradtools.pairwise.tile_reductions import COLUMNS, ROWS, Arrays, Reduction, wide
from gradtools.rules import Linearized, Rule, closed_over_error, replaced_at

if TYPE_CHECKING:
    from gradtools.pairwise.pairwise_reduction import TiledCall


TANGENT, COTANGENT = "pairwise_reduce (tangent)", "pairwise_reduce (cotangent)"


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
    """A program over all tiles.

    Attributes:
        tile: A function from a tile's arrays to the state of each group.
        roles: The role of each array: ROWS, COLUMNS or SHARED.
        groups: Returns the groups, with their merge functions; called after a tile is computed.
        cut: The partition into tiles.
        call: The `TiledCall`.
    """

    tile: Callable[[Arrays], list[Arrays]]
    roles: Sequence[str]
    groups: Callable[[], Sequence[MergeGroup]]
    cut: TileGrid
    call: Any


def added(a: Arrays, b: Arrays) -> Arrays:
    """The sums of two tiles' arrays."""
    return [x + y for x, y in zip(a, b, strict=True)]


def parted(flat: Sequence[Any], counts: Sequence[int]) -> list[Arrays]:
    left = iter(flat)
    return [[next(left) for _ in range(n)] for n in counts]


def apply_over_tiles(of: SumOverTiles | Reduced, xs: Sequence[Array]) -> Arrays:
    """The rule's outputs at xs."""
    rule = Rule(
        of.name,
        primal=of.primal,
        linearize=partial(_linearized, of),
        user_functions=of.call.user_functions,
        nondifferentiable=of.call.unreached if of.is_call else (),
        symbolic_zeros=frozenset({"cotangent"}),
    )
    return of.call.backend.apply_rule(rule, *xs)


def _linearized(
    of: SumOverTiles | Reduced, *xs: Array, perturbed: tuple[bool, ...] | None = None
) -> Linearized:
    """The outputs, with their tangent and cotangent maps, which are sums over tiles."""
    moving, ys = moving_inputs(of.call, of.name, xs, perturbed), of.primal(*xs)
    if of.is_call:
        moving = [i for i in moving if i not in of.call.unreached]
    saves = tuple(range(len(xs) + (len(ys) if of.is_call else 0)))
    return Linearized(ys, [], saves, of._tangent, partial(of._cotangent, moving))


@dataclass(frozen=True, eq=False)
class SumOverTiles:
    """T[h], a sum over tiles.

    Attributes:
        call: The `TiledCall`.
        h: A function from a tile's arrays to arrays.
        roles: The role of each argument.
        sides: The side of each result.
        name: The name in messages.
        dtypes: The dtypes of h's results, set when h is evaluated on a tile.
    """

    call: TiledCall
    h: Callable[[Arrays], Arrays]
    roles: tuple[str, ...]
    sides: Sequence[str]
    name: str
    dtypes: list[str] = field(default_factory=list)
    is_call = False  # whether it is the call itself, whose derivatives read its outputs

    def primal(self, *xs: Array) -> Arrays:
        backend = self.call.backend
        program = Sweep(self._tile, self.roles, self._groups, self.call.cut, self.call)
        result = backend.tiles.sweep(program, xs)
        return [backend.cast(x, dtype) for (x,), dtype in zip(result, self.dtypes, strict=True)]

    def _tile(self, xs: Arrays) -> list[Arrays]:
        result, backend = self.h(xs), self.call.backend
        self.dtypes[:] = [backend.dtype_name(x) for x in result]
        return [[wide(backend, x)] for x in result]

    def _groups(self) -> list[MergeGroup]:
        return [MergeGroup(side, added) for side in self.sides]

    def _tangent(self, xs: Sequence[Array], dxs: Sequence[Any]) -> Arrays:
        given, n = _given(dxs), len(xs)

        def pushed(tile: Arrays) -> Arrays:
            xs = tile[:n]
            at = _at(self.h, xs, given)
            return self.call.backend.push(at, [xs[i] for i in given], tile[n:])

        roles = (*self.roles, *(self.roles[i] for i in given))
        push = SumOverTiles(self.call, pushed, roles, self.sides, TANGENT)
        return apply_over_tiles(push, [*xs, *(dxs[i] for i in given)])

    def _cotangent(self, moving: list[int], xs: Sequence[Array], cts: Sequence[Any]) -> Arrays:
        given, n, reached = _given(cts), len(xs), list[bool]()

        def pulled(tile: Arrays) -> Arrays:
            cts = dict(zip(given, tile[n:], strict=True))
            full = lambda outs: [cts.get(i) for i in range(len(outs))]
            xs, at = tile[:n], _at(self.h, tile[:n], moving)
            return self.call.backend.pull(at, [xs[i] for i in moving], full, reached)

        roles = (*self.roles, *(self.sides[i] for i in given))
        pull = SumOverTiles(self.call, pulled, roles, [self.roles[i] for i in moving], COTANGENT)
        result = apply_over_tiles(pull, [*xs, *(cts[i] for i in given)])
        return replaced_at([None] * n, moving, _reaching(result, reached))


def _given(entries: Sequence[Any]) -> list[int]:
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
    name = "pairwise_reduce"
    is_call = True  # as in `SumOverTiles`

    def primal(self, *xs: Array) -> Arrays:
        call = self.call
        program = Sweep(self._tile, call.roles, self._groups, call.cut, call)
        states = call.backend.tiles.sweep(program, xs)
        pairs = zip(call.reductions, states, strict=True)
        return [y for reduction, state in pairs for y in reduction.finish(state)]

    def _tile(self, xs: Arrays) -> list[Arrays]:
        return [r.lift(part) for r, part in self._parts(self.call.of_tile(xs), xs)]

    def _groups(self) -> list[MergeGroup]:
        return [MergeGroup(r.side, r.merge, r.states) for r in self.call.reductions]

    def _parts(self, out: Arrays, xs: Sequence[Array]) -> list[tuple[Reduction, Arrays]]:
        """Each reduction with its arrays of f's output at a tile."""
        index = {COLUMNS: xs[-2], ROWS: xs[-1]}
        return [
            (r, [r.turned(out[i]) for i in r.places] + [index[r.side]] * r.indexed)
            for r in self.call.reductions
        ]

    def _read(self, saved: Sequence[Array]) -> tuple[Arrays, list[Arrays], list[Arrays]]:
        """The saved arguments, results, and the results that are read at each tile."""
        call, n = self.call, len(self.call.roles)
        ys = parted(saved[n:], [len(r.dtypes) for r in call.reductions])
        stats = [r.stats(group) for r, group in zip(call.reductions, ys, strict=True)]
        return list(saved[:n]), ys, stats

    def _tangent(self, saved: Sequence[Array], dxs: Sequence[Any]) -> Arrays:
        call = self.call
        xs, ys, stats = self._read(saved)
        given, n, counts = _given(dxs), len(xs), [len(group) for group in stats]

        def pushed(tile: Arrays) -> Arrays:
            *known, moved = parted(tile[n:], [*counts, len(given)])
            xs, at = tile[:n], _at(call.of_tile, tile[:n], given)
            out, moved = call.backend.value_and_push(at, [xs[i] for i in given], moved)
            triples = zip(self._parts(out, xs), self._parts(moved, xs), known, strict=True)
            return [x for (r, o), (_, do), s in triples for x in r.push(o, do, s)]

        roles = (*call.roles, *self._spread(counts), *(call.roles[i] for i in given))
        sizes = [len(r.dtypes) - r.more for r in call.reductions]
        total = SumOverTiles(call, pushed, roles, self._spread(sizes), TANGENT)
        known = [s for group in stats for s in group]
        sums = apply_over_tiles(total, [*xs, *known, *(dxs[i] for i in given)])
        triples = zip(call.reductions, parted(sums, sizes), ys, strict=True)
        return [dy for r, group, of in triples for dy in r.pushed(group, of)]

    def _spread(self, counts: Sequence[int]) -> list[str]:
        """The side of each reduction, repeated `counts` times."""
        pairs = zip(self.call.reductions, counts, strict=True)
        return [r.side for r, n in pairs for _ in range(n)]

    def _cotangent(self, moving: list[int], saved: Sequence[Array], cts: Sequence[Any]) -> Arrays:
        call = self.call
        xs, ys, stats = self._read(saved)
        n, groups = len(xs), parted(cts, [len(r.dtypes) for r in call.reductions])
        known = [
            [*s, *r.pulling(y, g)] if _given(g) else []
            for r, s, y, g in zip(call.reductions, stats, ys, groups, strict=True)
        ]
        counts, firsts = [len(group) for group in known], [len(group) for group in stats]
        if not any(counts):
            return [None] * n

        reached = list[bool]()

        def pulled(tile: Arrays) -> Arrays:
            xs, at = tile[:n], _at(call.of_tile, tile[:n], moving)
            cts = partial(of_scores, xs, parted(tile[n:], counts))
            return call.backend.pull(at, [xs[i] for i in moving], cts, reached)

        def of_scores(xs: Arrays, at_tile: list[Arrays], out: Arrays) -> Arrays:
            full: Arrays = [None] * len(out)
            for k, (r, part) in enumerate(self._parts(out, xs)):
                if at_tile[k]:
                    result = r.pull(part, at_tile[k][: firsts[k]], at_tile[k][firsts[k] :])
                    full = replaced_at(full, r.places, [r.turned(ct) for ct in result])
            return full

        roles, out = (*call.roles, *self._spread(counts)), [call.roles[i] for i in moving]
        total = SumOverTiles(call, pulled, roles, out, COTANGENT)
        result = apply_over_tiles(total, [*xs, *(x for g in known for x in g)])
        return replaced_at([None] * n, moving, _reaching(result, reached))


def _reaching(grads: Arrays, reached: Sequence[bool]) -> Arrays:
    """The gradients; None for inputs that do not reach a tile's results."""
    return [g if there else None for g, there in zip(grads, reached, strict=True)]
