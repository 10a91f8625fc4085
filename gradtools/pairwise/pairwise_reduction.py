"""`pairwise_reduce`: reduces a function of all pairs of rows and columns, without their matrix.

A function f maps a tile of rows and a tile of columns to a tile of scores. The building block is
the *sum over tiles* of a function h whose results belong to rows, to columns or to neither:

    T[h](R, C, w) = (A, B, D)    A_i = sum_j a(R_i, C_j, w)    B_j = sum_i b    D = sum_ij d

It needs memory for its arguments, its results and one tile. Its derivatives are sums over tiles,

    tangent       T[push h](R, C, w; dR, dC, dw)
    cotangent     T[pull h](R, C, w; A', B', D') = (R', C', w')

since the cotangent of a row is a sum over columns, that of a column a sum over rows, and that of a
shared argument a sum over both. So the sum over tiles is a custom rule whose derivatives are such
rules again: every order, in both modes and all mixes, takes the memory of one tile.

A reduction (`tile_reductions.py`) is a rule on top of it. Its value is one sweep that merges the
states of tiles (as in the online softmax). Its tangent and cotangent are one T each, with weights
computed from the results. With F the work of f on all pairs, a value takes F and a gradient F + 2F
more. The derivatives read the results, such as a logsumexp, so second order differentiates the rule
again. A custom reduction (init, combine, finish) has no such weights: it is a T over tiles of rows
whose h folds the columns tile by tile, each a T of one tile.

The backends' `tiling.py` run a sweep.

Source: Rabe and Staats, Self-attention does not need O(n^2) memory, 2021; Dao et al.,
FlashAttention, 2022; Cheng et al., Breaking the memory barrier: near infinite batch size scaling
for contrastive loss (Inf-CL), 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import isqrt
from typing import Any

from gradtools.arguments.checks import as_array, check_function, whole_number, whole_or_none
from gradtools.arguments.chunks import Verify, checked_verify
from gradtools.arguments.in_axes import argument_keys
from gradtools.arguments.wording import describe, in_words, is_numeric
from gradtools.backend import Array, Backend, Operators
from gradtools.boundary import like_function
from gradtools.errors import GradtoolsError
from gradtools.pairwise.tile_reductions import KINDS, Reduction, wide
from gradtools.pairwise.tile_rules import (
    COLUMNS,
    ROWS,
    SHARED,
    Arrays,
    Reduced,
    TileGrid,
    apply_over_tiles,
    fold_columns,
    moving_inputs,
    parted,
    reduced_second,
)
from gradtools.rules import replaced_at

TileSize = int | tuple[int, int] | None
Names = int | str | Sequence[int | str]
_TILE = (512, 512)  # default rows and columns of a tile


class Tiling(Operators):
    """The operator `pairwise_reduce`, bound to one backend."""

    def pairwise_reduce(
        self,
        f: Callable[..., Any],
        reduce: Any = "sum",
        tile_size: TileSize = None,
        rows: Names = 0,
        columns: Names = 1,
        over: Any = "columns",
        memory_budget: int | None = None,
        verify: Verify = "first",
        progress: bool = False,
    ) -> Callable[..., Any]:
        """Reduces a function of all pairs of rows and columns at the memory of one tile.

        The values and all derivatives are those of `reduce(f(rows, columns))` over the matrix of
        pairs, which is never built. With F the work of f on all pairs, the value takes F and a
        gradient 3F more, because tiles are computed again.

        Masks and biases by index are arguments: pass `arange(n)` as a row and `arange(m)` as a
        column, and return `where(i[:, None] >= j, scores, -inf)`. For batches and heads use `vmap`;
        then one tile exists for each element.

        Args:
            f: Takes a tile of each argument in `rows` (a block of its first axis), the same of
                those in `columns`, and all other arguments whole. Returns scores of shape
                [tile rows, tile columns, ...], or a tree of them; with "softmax" a pair (scores,
                values), values being [tile rows or 1, tile columns, ...], with "take" a pair
                (scores, index), an integer for each row. It must be deterministic and treat pairs
                alone. What it closes over is constant: arrays that are differentiated (a
                temperature, weights) are arguments.
            reduce: "sum", "mean", "max", "logsumexp", "softmax" (the mean of values weighted by
                the softmax of the scores) or "take" (a row's score at the column of its index, 0
                if there is none), or a tree of these like the outermost part of f's output, for
                several from one sweep. Or three functions of your own: init(tile) gives from f's
                output the state of a tile, with rows first; combine(a, b) merges the states of
                neighbouring tiles and is associative; finish(state) gives the result. All maxima
                of a row share its derivative; a row of -inf alone has the logsumexp -inf, the
                softmax 0, and derivative 0.
            tile_size: Rows and columns of a tile, one number or two.
            rows: Which arguments have rows, by position or name; trees of arrays, sharing the
                length of their first axis.
            columns: The same for columns.
            over: Which side is reduced, "columns" (a result for each row) or "rows", or a tree of
                these like `reduce`.
            memory_budget: Bytes for one tile's derivative, from which tile_size follows.
            verify: PyTorch: whether a tile that is computed again is compared, up to rounding, with
                what it was first, as in `chunked`. "first": the first tile, in the first derivative
                of each f and of new shapes, dtypes, training modes or autocast. True: each tile,
                in each derivative. False: none; changes of what f closes over are not detected.
            progress: Whether to show a progress bar (of the package tqdm) over the tiles of each
                sweep. JAX programs have none.

        Returns:
            A function of f's arguments. Scores of 16 bits are reduced in float32 and rounded once.

        Raises:
            GradtoolsError: A tile below 1; a budget that no tile fits; (on call) no rows or
                columns, lengths that differ, an unknown reduction, scores of another shape, an
                array that f closes over and that is differentiated; f draws random numbers (in
                JAX as many as a tile has rows or columns, by one key). PyTorch: f changes an
                argument or what it closes over, or gives other numbers for a derivative.

        Example:
            >>> score = lambda x, y: x[:, None] * y
            >>> lse = gt.pairwise_reduce(score, reduce="logsumexp", tile_size=2)
            >>> x, y = gt.asarray(np.float32([0.0, 1.0, 2.0])), gt.asarray(np.float32([0.0, 0.0]))
            >>> gt.to_numpy(gt.grad(lambda y: lse(x, y).sum())(y)).tolist()
            [1.5, 1.5]

        Source: Rabe and Staats, Self-attention does not need O(n^2) memory, 2021; Milakov and
        Gimelshein, Online normalizer calculation for softmax, 2018.
        """
        check_function("pairwise_reduce", f, curried=False)
        budget = whole_or_none("pairwise_reduce", "memory_budget", memory_budget, 1, "bytes")
        verify = checked_verify("pairwise_reduce", verify)
        sizes: tuple[int, ...] | None = None
        if tile_size is not None:
            pair = tile_size if isinstance(tile_size, tuple | list) else (tile_size, tile_size)
            if len(pair) != 2:
                raise GradtoolsError(
                    f"pairwise_reduce: tile_size is {tile_size!r}; expected one number, or one of "
                    "rows and one of columns."
                )
            sides = "rows and columns"
            sizes = tuple([whole_number("pairwise_reduce", "tile_size", n, 1, sides) for n in pair])
        options = TileOptions("pairwise_reduce", reduce, over, sizes, budget, verify, progress)
        options.check()
        roles = _names("rows", rows), _names("columns", columns)
        return like_function("tiled_", f, partial(self._tiled, f, options, roles))

    def _tiled(self, f: Any, options: TileOptions, sides: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._backend.compiler.uncompiled(self._run_tiled, f, options, sides, args, kwargs)

    def _run_tiled(self, f: Any, options: TileOptions, sides: Any, args: Any, kwargs: Any) -> Any:
        call, xs = TiledCall.of(self._backend, options, f, sides, args, kwargs)
        return fold_columns(call, xs) if options.own else call.reduced(xs)


@dataclass(frozen=True)
class TileOptions:
    """The options of `pairwise_reduce`."""

    caller: str
    reduce: Any = "sum"
    over: Any = COLUMNS
    sizes: tuple[int, ...] | None = None
    budget: int | None = None
    verify: bool | None = None
    progress: bool = False

    @property
    def own(self) -> bool:
        """Whether the reduction is a custom one."""
        return isinstance(self.reduce, tuple | list) and any(callable(g) for g in self.reduce)

    def check(self) -> None:
        """Raises for invalid combinations of options."""
        if self.own and not (len(self.reduce) == 3 and all(callable(g) for g in self.reduce)):
            raise GradtoolsError(
                f"{self.caller}: reduce is {self.reduce!r}; a custom reduction is a tuple of "
                "three functions (init, combine, finish)."
            )
        if self.own and self.over != COLUMNS:
            raise GradtoolsError(
                f"{self.caller}: a custom reduction is over columns; exchange rows and columns."
            )
        if self.budget is not None and self.sizes is not None:
            raise GradtoolsError(
                f"{self.caller}: tile_size and memory_budget were both given; the second chooses "
                "the first."
            )


def _names(what: str, names: Any) -> tuple[int | str, ...]:
    result = (names,) if isinstance(names, int | str) else tuple(names)
    if not result or not all(isinstance(x, int | str) for x in result):
        raise GradtoolsError(
            f"pairwise_reduce: {what} is {names!r}; expected the position or name of an argument, "
            "or several."
        )
    return result


# --- one call ----------------------------------------------------------------------------


class TiledCall:
    """One call as a function of flat arrays, each with its role: rows, columns or shared.

    The reductions of f's output are determined when f has been evaluated on a tile.
    """

    def __init__(self, backend: Backend, options: TileOptions, f: Any) -> None:
        self.backend, self.options, self.caller, self.f = backend, options, options.caller, f
        self.roles: list[str] = []
        self.kinds: list[Reduction] = []
        self._template: Any = None
        self.cut = TileGrid(1, 1, 1, 1)
        self.call: Callable[[Arrays], Any] = f  # f at one tile, once its arguments are known
        self.captured: tuple[int, ...] = ()  # arrays that f closes over
        self.unreached: tuple[int, ...] = ()  # arrays that do not reach the scores
        self.watch: Callable[[Arrays], None] | None = None  # the backend's check of f's output
        self.sweeping = False  # whether a sweep over its tiles is running
        self.watched: Any = None  # the backend's data on tiles that f was evaluated on
        self.user_functions: tuple[Any, ...] = (f, *(options.reduce if options.own else ()))

    @classmethod
    def of(
        cls, backend: Backend, options: TileOptions, f: Any, sides: Any, args: Any, kwargs: Any
    ) -> tuple[TiledCall, Arrays]:
        call, xs, caller = cls(backend, options, f), list[Any](), options.caller
        values = [*args, *kwargs.values()]  # a list, because JAX sorts dicts
        statics: list[Any] = []
        lengths: dict[str, dict[int, str]] = {ROWS: {}, COLUMNS: {}}
        keys, roles = [*range(len(args)), *kwargs], _roles(caller, f, sides, args, kwargs)
        for key, value, role in zip(keys, values, roles, strict=True):
            leaves = zip(backend.flatten(value)[0], backend.leaf_paths(value), strict=True)
            for leaf, path in leaves:
                number = isinstance(leaf, bool | int | float | complex)
                if role == SHARED and (number or not is_numeric(backend, leaf)):
                    statics.append(leaf)
                    continue
                path = f"argument {key!r}{path}"
                x = as_array(backend, caller, leaf, path)
                if role != SHARED and len(x.shape) == 0:
                    raise GradtoolsError(
                        f"{caller}: {path} has no axes, but it is named among the {role}; leave "
                        "it out of them to share it."
                    )
                if role != SHARED:
                    lengths[role].setdefault(x.shape[0], path)
                statics.append(_ARRAY)
                xs.append(x)
                call.roles.append(role)
        for side, of_side in lengths.items():
            if len(of_side) > 1:
                listed = ", ".join(f"{n} in {path}" for n, path in of_side.items())
                raise GradtoolsError(
                    f"{caller}: the {side} differ in number: {listed}. Their first axes must have "
                    "the same length."
                )
            if not of_side or 0 in of_side:
                where = f" ({of_side[0]} has length 0 on axis 0)" if of_side else ""
                raise GradtoolsError(
                    f"{caller}: there are no {side}{where}. Pass an array whose axis 0 has length "
                    "1 or more."
                )
        (rows,), (columns,) = lengths.values()
        treedef, count, keywords = backend.flatten(values)[1], len(args), [*kwargs]

        def flat(xs: Sequence[Array]) -> Any:
            """f at one tile's arrays; it does not refer to the call."""
            left = iter(xs)
            full = [next(left) if s is _ARRAY else s for s in statics]
            values = backend.unflatten(treedef, full)
            return f(*values[:count], **dict(zip(keywords, values[count:], strict=True)))

        call.call = backend.tiles.as_now(flat, xs)
        call.cut = TileGrid(rows, columns, *(options.sizes or _TILE))
        if options.budget is not None:
            call.cut = call._within(xs, options.budget)
        call.cut.check(caller)
        fun = call.call
        call.call, captured = backend.tiles.explicit(
            caller, fun, call.user_functions[1:], xs, call._tiles()
        )
        if call.call is not fun:  # captured arrays are explicit arguments now
            call.user_functions = ()
        call.captured = tuple(range(len(xs), len(xs) + len(captured)))
        call.unreached = backend.tiles.unreached(
            call.call, [*xs, *captured], call._tiles()[0], not options.own
        )
        xs += captured
        call.roles += [SHARED] * len(captured)
        for side, n in ((ROWS, rows), (COLUMNS, columns)):  # indices, which f does not receive
            xs.append(backend.tiles.indices(n, xs[0]))
            call.roles.append(side)
        return call, xs

    def of_tile(self, xs: Sequence[Array]) -> Arrays:
        """f's flat output at one tile, validated."""
        out, treedef = self.backend.flatten(self.evaluated(xs))
        if self._template is None:  # determines the reduction of each array of f's output
            for x in out:
                if not self.backend.is_array(x):
                    came = describe(self.backend, x)
                    raise GradtoolsError(
                        f"{self.caller}: f's output contains {came}; return arrays."
                    )
            tree = self.backend.unflatten(treedef, list(range(len(out))))
            names = [self.backend.dtype_name(x) for x in out]
            reduce, over = self.options.reduce, self.options.over
            self._template = self._pair(tree, names, reduce, over, "")
        shape = self.shape_of(xs)
        for kind in self.kinds:
            tile = [reduced_second(self.backend, out[i], kind.side) for i in kind.places]
            kind.check(tile, shape if kind.side == ROWS else shape[::-1])
        return out

    def evaluated(self, xs: Sequence[Array]) -> Any:
        out = self.call(list(xs[:-2]))
        if self.watch is not None:
            watch, self.watch = self.watch, None
            watch(self.backend.flatten(out)[0])
        return out

    def _tiles(self) -> list[list[int | None]]:
        """The lengths of the arrays, for each size of tile."""
        lengths = ([n for _, n, _ in self.cut.blocks(side)] for side in (ROWS, COLUMNS))
        return [
            [{ROWS: n, COLUMNS: m}.get(role) for role in self.roles] for n, m in product(*lengths)
        ]

    def shape_of(self, xs: Sequence[Array]) -> tuple[int, int]:
        rows, columns = (xs[self.roles.index(side)].shape[0] for side in (ROWS, COLUMNS))
        return rows, columns

    def _pair(self, tree: Any, names: list[str], reduce: Any, over: Any, path: str) -> Any:
        """A pytree like f's output, with a `_Result` at each leaf. names: The arrays' dtypes."""
        if isinstance(reduce, str):
            return self._leaf(tree, names, reduce, over, path)
        if isinstance(reduce, dict | list | tuple):
            same = isinstance(tree, dict | list | tuple) and len(tree) == len(reduce)
            if not same or isinstance(tree, dict) != isinstance(reduce, dict):
                raise GradtoolsError(
                    f"{self.caller}: reduce{path} is {reduce!r}, which is no beginning of f's "
                    "output; give one reduction, or a tree like the outermost part of the output."
                )
            keys = list(reduce) if isinstance(reduce, dict) else range(len(reduce))
            parts = {}
            for k in keys:
                try:
                    side = over if isinstance(over, str) else over[k]
                except (KeyError, IndexError, TypeError):
                    raise GradtoolsError(
                        f"{self.caller}: over is {over!r}; expected 'columns', 'rows', or a tree "
                        f"of these like reduce, {reduce!r}."
                    ) from None
                parts[k] = self._pair(tree[k], names, reduce[k], side, f"{path}[{k!r}]")
            return parts if isinstance(reduce, dict) else type(reduce)(parts.values())
        raise _unknown(self.caller, f"reduce{path}", reduce)

    def _leaf(self, tree: Any, names: list[str], name: str, over: Any, path: str) -> Any:
        if name not in KINDS:
            raise _unknown(self.caller, f"reduce{path}", name)
        if over not in (ROWS, COLUMNS):
            raise GradtoolsError(f"{self.caller}: over is {over!r}; expected 'columns' or 'rows'.")
        side, count = (ROWS, self.cut.columns) if over == COLUMNS else (COLUMNS, self.cut.rows)
        places, treedef = self.backend.flatten(tree)
        if not places:
            raise GradtoolsError(
                f"{self.caller}: f returned {tree!r} for reduce={name!r}; expected the scores of a "
                "tile, an array of shape (rows, columns)."
            )
        is_pair = name in ("softmax", "take")
        groups = [tuple(places)] if is_pair else [(i,) for i in places]
        first = len(self.kinds)
        owned = self.options.reduce == name and getattr(self.f, "gives_new_scores", False)
        for group in groups:
            of_group = [names[i] for i in group]
            kind = KINDS[name](self.backend, self.caller, count, side, group, of_group, owned)
            self.kinds.append(kind)
        if not is_pair:
            results = [_Result(first + k, 0) for k in range(len(groups))]
            return self.backend.unflatten(treedef, results)
        paired = isinstance(tree, tuple | list) and len(tree) == 2
        parts = [self.backend.flatten(part)[0] for part in tree] if paired else []
        if [len(part) for part in parts[:1]] != [1] or (name == "take" and len(places) != 2):
            second = "values" if name == "softmax" else "index"
            raise GradtoolsError(
                f"{self.caller}: for reduce={name!r} f must return a pair (scores, {second}); got "
                f"{in_words(treedef)}."
            )
        if name == "take":
            return _Result(first, 0)
        values, value_def = self.backend.flatten(tree[1])
        results = [_Result(first, k + 1) for k in range(len(values))]
        return self.backend.unflatten(value_def, results)

    def reduced(self, xs: Arrays) -> Any:
        """f's output with reduced results in place of scores."""
        flat = apply_over_tiles(self.backend, Reduced(self), xs)
        ys = parted(flat, [len(kind.dtypes) for kind in self.kinds])
        at, treedef = self.backend.flatten(self._template)
        pairs, cast = [x.at for x in at], self.backend.cast
        result = [cast(ys[k][i], self.kinds[k].dtypes[i]) for k, i in pairs]
        return self.backend.unflatten(treedef, result)

    def _within(self, xs: Arrays, budget: int) -> TileGrid:
        """The largest square tile whose gradient fits the budget, estimated from a measured one."""
        backend, moving = self.backend, moving_inputs(self, self.caller, xs)

        def gradient(*tile: Array) -> Arrays:
            def scores(*changed: Array) -> tuple[Arrays, Arrays]:
                outs, _ = backend.flatten(self.call(replaced_at(tile, moving, changed)))
                return [backend.xp.exp(wide(backend, x)) for x in outs], []

            result = backend.vjp(scores, [tile[i] for i in moving], groups=None, once=True)
            return [x for x in result.pullback(result.outs) if x is not None]

        sides = [None if role == SHARED else _PROBE for role in self.roles]
        per_pair = backend.tiles.tile_bytes(gradient, xs, sides) / _PROBE**2
        side = isqrt(int(budget / max(per_pair, 1)))
        if side < 1:
            raise GradtoolsError(
                f"{self.caller}: memory_budget is {budget} bytes, but the derivative of a single "
                f"pair takes about {int(per_pair)}. Give more, or make f leaner."
            )
        return TileGrid(self.cut.rows, self.cut.columns, side, side)


def _roles(caller: str, f: Any, sides: Any, args: Any, kwargs: Any) -> list[str]:
    """The role of each argument."""
    keys = argument_keys(f, len(args), kwargs)
    roles = [SHARED] * len(keys)
    for side, wanted in zip((ROWS, COLUMNS), sides, strict=True):
        for name in wanted:
            at = next((i for i, key in enumerate(keys) if name in key), None)
            if at is None:
                known = ", ".join(str(key[-1]) for key in keys) or "none"
                raise GradtoolsError(
                    f"{caller}: {side} names argument {name!r}, which is no argument of this "
                    f"call; it has {known}."
                )
            if roles[at] not in (SHARED, side):
                raise GradtoolsError(
                    f"{caller}: argument {name!r} is in rows and in columns; pass it twice."
                )
            roles[at] = side
    return roles


_ARRAY = object()
_PROBE = 64


class _Result:
    """The origin of a leaf of the result: (reduction, index of its result)."""

    def __init__(self, *at: int) -> None:
        self.at = at


def tiled(backend: Backend, f: Any, reduce: Any, **options: Any) -> Callable[..., Any]:
    """`pairwise_reduce` without verification, for functions that are known to be deterministic."""
    return Tiling(backend).pairwise_reduce(f, reduce, verify=False, **options)


def _unknown(caller: str, what: str, came: Any) -> GradtoolsError:
    return GradtoolsError(
        f"{caller}: {what} is {came!r}; expected one of {', '.join(map(repr, KINDS))}, a tree of "
        "these, or three functions (init, combine, finish)."
    )
