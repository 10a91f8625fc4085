"""Tiles in PyTorch: a loop over blocks of rows, inside it one over blocks of columns.

Each derivative recomputes the tiles. `Watch` verifies that f is deterministic and pure: by its
values once for each run key of f, as in `chunked`; by version counters and random states, which
need no copy and no synchronization, in each sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from gradtools.arguments.chunks import progress_bar
from gradtools.errors import GradtoolsError
from gradtools.pairwise.tile_rules import COLUMNS, ROWS, SHARED, MergeGroup, Sweep
from gradtools.rules import captured_objects, replaced_at
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import batches_first, is_inexact, levels
from gradtools.torch.live_bytes import peak_bytes
from gradtools.torch.modes import as_cast_now, casts_now, unpacked, without_casts
from gradtools.torch.randomness import Randomness
from gradtools.torch.replaying.consistency import Figures, RunKey, differ, figures, part_of
from gradtools.torch.rules.transposing import pull
from gradtools.torch.state import read_together

Tensor = torch.Tensor
State = list[Tensor]
Block = tuple[int, int]  # start and length
_SAMPLE = 1 << 12  # entries of a tile that are compared


def sweep(program: Sweep, xs: Sequence[Tensor]) -> list[State]:
    call = program.call
    if call.sweeping:  # a nested sweep
        return _swept(program, xs, None)
    with without_casts(x.device.type for x in xs), unpacked():
        call.watched = call.watched or Watch(call, xs)
        call.sweeping = True
        try:
            result = _swept(program, xs, call.watched.begun(xs))
            call.watched.ended()
            return result
        finally:
            call.sweeping, call.watch = False, None


def _swept(program: Sweep, xs: Sequence[Tensor], watch: Watch | None) -> list[State]:
    if not torch.is_grad_enabled():  # f gets shared tensors themselves, which must not record
        xs = [x if upstream.is_legacy_batched(x) else x.detach() for x in xs]
    rows, columns = (
        [
            (start + i * size, size)
            for start, size, count in program.cut.blocks(side)
            for i in range(count)
        ]
        for side in (ROWS, COLUMNS)
    )
    groups: Sequence[MergeGroup] = ()
    merged: list[dict[Block | None, State]] = []  # one entry for each group, by block
    shows = program.call.options.progress
    with progress_bar(program.cut.tiles, "tile") if shows else nullcontext() as bar:
        for row in rows:
            band = [_at(x, r, ROWS, row) for x, r in zip(xs, program.roles, strict=True)]
            for column in columns:
                pairs = zip(band, program.roles, strict=True)
                tile = [_at(x, r, COLUMNS, column) for x, r in pairs]
                if watch is not None:
                    tile = watch.before(program.call, tile, (row, column))
                with torch.enable_grad():
                    states = program.tile(tile)
                if watch is not None:
                    watch.after(tile)
                if not groups:
                    groups = program.groups()
                    merged = [{} for _ in groups]
                at = {ROWS: row, COLUMNS: column, SHARED: None}
                for group, parts, new in zip(groups, merged, states, strict=True):
                    old = parts.get(at[group.side])
                    parts[at[group.side]] = new if old is None else group.merge(old, new)
                if bar is not None:
                    bar.update()
    return [_joined([*parts.values()]) for parts in merged]


def _at(x: Tensor, role: str, side: str, block: Block) -> Tensor:
    return x.narrow(0, *block) if role == side else x


def _joined(states: list[State]) -> State:
    """Concatenates the states of all blocks; frees each tensor's parts before the next is made."""
    if len(states) == 1:
        return states[0]
    return [torch.cat([state.pop(0) for state in states]) for _ in range(len(states[0]))]


def as_now(fun: Callable[..., Any], xs: Sequence[Tensor]) -> Callable[..., Any]:
    """fun under the current autocast settings."""
    return as_cast_now(fun, (x.device.type for x in xs))


# --- verification of f -------------------------------------------------------------------


class Watch:
    """Verifies that f is pure, in one call of a tiled function and in its derivatives."""

    def __init__(self, call: Any, xs: Sequence[Tensor]) -> None:
        self.caller, self.each = call.caller, call.options.verify is True
        self._captured: list[tuple[Tensor, int]] = []  # what f closes over, with its versions
        # The run keys under which f's values are verified, and that f does not write to arguments.
        self._numbers: RunKey | None = None
        self._reads: RunKey | None = None
        self._seen = dict[Any, list[Figures]]()
        self._first = True
        self._stream: Randomness | None = None
        self._versions: list[int] = []
        self._differences: list[Tensor] = []  # whether tiles differ, on an accelerator
        if call.options.verify is False or is_compiling() or upstream.TracingContext.try_get():
            return
        is_read = lambda x: isinstance(x, torch.nn.Module | Tensor)
        captured = [*captured_objects(call.user_functions, is_read, Tensor, False)]
        modules = [m for x in captured if isinstance(x, torch.nn.Module) for m in x.modules()]
        tensors = [x for x in captured if isinstance(x, Tensor)]
        tensors += [x for m in modules for x in (*m.parameters(False), *m.buffers(False))]
        self._captured = [(x, _version(x)) for x in tensors]
        specs = tuple([(x.shape, x.dtype, x.device) for x in xs])
        training = tuple([m.training for m in modules])
        casts = casts_now(x.device.type for x in xs)
        others = [*map(part_of, call.user_functions[1:])]
        key = RunKey.of(call.f, call.caller, specs, call.cut, training, casts, *others)
        reads = key.for_aspect("arguments")
        self._reads = None if reads.is_verified() else reads
        if self.each or not key.is_verified():
            self._numbers = key
            if not self.each:
                key.mark_pending(self)

    def begun(self, xs: Sequence[Tensor]) -> Watch:
        self._refuse_changed()
        self._first, self._stream, self._differences = True, Randomness.now(xs), []
        return self

    def before(self, call: Any, tile: State, place: tuple[Block, Block]) -> State:
        """The tensors of a tile for f: clones in the first tile, where writes are detected."""
        if self._first:
            tile = tile if self._reads is None else [x.clone() for x in tile]
            self._versions = [*map(_version, tile)]
        if self._numbers is not None and (self._first or self.each):
            call.watch = partial(self._look, place)
        return tile

    def after(self, tile: State) -> None:
        if not self._first:
            return
        self._first = False
        if self._versions != [*map(_version, tile)]:
            raise GradtoolsError(
                f"{self.caller}: f changes an argument in place, which other tiles read, too. "
                "Clone it in f first."
            )
        if self._reads is not None:
            self._reads.mark_verified()
            self._reads = None
        self._refuse_changed()
        if self._stream is not None and not self._stream.is_unchanged():
            raise GradtoolsError(
                f"{self.caller}: f draws random numbers, which would be others when a tile is "
                "computed again. Draw them outside, and pass them as arguments."
            )

    def _refuse_changed(self) -> None:
        if any(_version(x) != version for x, version in self._captured):
            raise GradtoolsError(
                f"{self.caller}: a tensor that f closes over was changed in place, by f or after "
                "the forward pass, so a tile that is computed again would be another. Pass it as "
                "an argument."
            )

    def _look(self, place: tuple[Block, Block], out: list[Any]) -> None:
        """Records f's output at a tile, or compares it with the recorded one."""
        leaves = [x for x in out if isinstance(x, Tensor)]
        if any(x.is_meta for x in leaves):  # there are no numbers to compare
            return
        with upstream.outermost(), torch.no_grad():
            result = [figures(batches_first(x).detach(), _SAMPLE) for x in leaves]
            old = self._seen.setdefault(place, result)
            if old is result or _specs(old) != _specs(result):  # computed under another vmap
                return
            differences = [differ(a, b) for a, b in zip(old, result, strict=True)]
        self._differences += [x for x in differences if isinstance(x, Tensor)]
        if any(x is True for x in differences):
            raise self._not_reproduced()
        if not self._differences:
            self._mark_verified()

    def ended(self) -> None:
        """Ends a sweep: reads all comparisons, with one synchronization of an accelerator."""
        if not self._differences:
            return
        differences, self._differences = self._differences, []
        with upstream.outermost(), torch.no_grad():
            if any(read_together(differences)):
                raise self._not_reproduced()
        self._mark_verified()

    def _mark_verified(self) -> None:
        if self._numbers is not None and not self.each:
            self._numbers.mark_verified()
            self._numbers = None

    def _not_reproduced(self) -> GradtoolsError:
        if self._numbers is not None:
            self._numbers.discard()
        return GradtoolsError(
            f"{self.caller}: f gives other numbers when a tile is computed again, so its "
            "derivative would be wrong: it draws from a random stream, counts its calls, or "
            "holds what was changed after the forward pass. Pass it as an argument."
        )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else upstream.version_of(x)


def _specs(all_figures: Sequence[Figures]) -> list[Any]:
    return [x[:2] for x in all_figures]


def explicit(caller: str, fun: Any, own: Any, xs: Any, sides: Any) -> tuple[Any, State]:
    """fun itself: PyTorch needs no closure conversion, for graphs reference captured tensors."""
    return fun, []


def unreached(
    fun: Callable[[State], Any],
    xs: Sequence[Tensor],
    lengths: Sequence[int | None],
    in_backward: bool,
) -> tuple[int, ...]:
    """The positions of the arrays that do not reach a tile's scores, by evaluating one tile.

    lengths: The tile's size along the side of each array that has one.
    in_backward: Whether the backward pass finds them by itself.
    """
    if in_backward:
        return ()
    tile = [x if n is None else x[:n] for x, n in zip(xs, lengths, strict=True)]
    moving, reached = [i for i, x in enumerate(tile) if is_inexact(x)], list[bool]()

    def scores(*changed: Tensor) -> list[Tensor]:
        return trees.flatten(fun(replaced_at(tile, moving, changed)))[0]

    pull(scores, [tile[i] for i in moving], lambda outs: [None] * len(outs), reached)
    return tuple([i for i, there in zip(moving, reached, strict=True) if not there])


def sharded_like(x: Tensor, other: Tensor) -> Tensor:
    return x


_OVER_LEVELS = {"subtract": "sub"}  # aliases for which vmap has no batching rule


def of_own(name: str, x: Tensor, *others: Tensor) -> Tensor:
    """`name(x, *others)`, in x's memory if possible: allocating a tile is slow."""
    if all(_is_within(y, x) for y in others):
        return getattr(x, f"{_OVER_LEVELS.get(name, name)}_")(*others)
    return getattr(torch, name)(x, *others)


def _is_within(y: Tensor, x: Tensor) -> bool:
    """Whether an operation of x and y may write to x: y broadcasts to x's shape, dtype, levels."""
    if upstream.forward_level() >= 0 or upstream.is_legacy_batched(y):
        return False  # a tangent of y may have further levels
    if len(y.shape) != len(x.shape) or y.dtype != x.dtype:
        return False
    whole = all(n in (1, m) for n, m in zip(y.shape, x.shape, strict=True))
    return whole and {*levels(y)} <= {*levels(x)}


def indices(n: int, device_of: Tensor) -> Tensor:
    """0 to n - 1."""
    return torch.arange(n, dtype=torch.int32, device=device_of.device)


def taken(x: Tensor, at: Tensor, index: Tensor) -> Tensor:
    """The entry of each row of x in the column whose index equals `at`, without a pass over x."""
    column, is_in_tile = _column_of(at, index)
    result = x.gather(1, column)[:, 0]
    return torch.where(is_in_tile, result, torch.zeros_like(result))


def put(v: Tensor, at: Tensor, index: Tensor) -> Tensor:
    column, is_in_tile = _column_of(at, index)
    v = torch.where(is_in_tile, v, torch.zeros_like(v))
    return v.new_zeros(len(v), len(index)).scatter(1, column, v[:, None])


def _column_of(at: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The tile's column with the index `at`, and whether it exists; indices have no gaps."""
    place = at.long() - index[0]
    last = len(index) - 1
    return place.clamp(0, last)[:, None], (place >= 0) & (place <= last)


def fold(
    step: Callable[[State, State], State], state: State, xs: Sequence[Tensor], count: int
) -> State:
    """`state = step(state, block)` over `count` blocks of the tensors' first axis."""
    for block in zip(*[x.chunk(count) for x in xs], strict=True):
        state = step(state, list(block))
    return state


def tile_bytes(fun: Any, xs: Sequence[Tensor], sides: Sequence[int | None]) -> int:
    """The peak of live bytes while `fun` runs at tensors like xs."""
    like = [
        torch.zeros(x.shape if n is None else (n, *x.shape[1:]), dtype=x.dtype, device=x.device)
        for x, n in zip(xs, sides, strict=True)
    ]
    return peak_bytes(lambda: fun(*like))[0]
