"""`Chunks`: one call of a chunked function as data, its arguments cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import is_, itemgetter
from typing import Any

from gradtools.arguments.batches import Batch
from gradtools.arguments.checks import whole_number, whole_or_none
from gradtools.arguments.wording import describe, in_words, is_numeric, with_article
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError, warn_once

SUMMED = object()  # in place of the axes of outputs that are added up and not joined
_CONTAINERS = (list, dict, tuple)
_BY_IDENTITY: tuple[Any, ...] = (None, object.__hash__)
_UNKNOWN = object()  # before the first output


@dataclass(frozen=True)
class ChunkOptions:
    """How the chunks are to run.

    latest: What a wing remembers of the previous call of the same function.
    """

    never_changes = True  # for a walk over what f holds: it is no state of the user's

    retain: int = 1
    memory_budget: int | None = None
    verify: bool | None = None
    progress: bool = False
    latest: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "latest": {}}

    def checked(
        self, f: Any, chunk_size: Any, caller: str = "chunked", name: str = "f"
    ) -> tuple[ChunkOptions, int]:
        """The same with whole numbers, and the size of a chunk; raises where it makes no sense."""
        if not callable(f):
            raise GradtoolsError(
                f"{caller}: {name} is {with_article(type(f).__name__)}; expected a function."
            )
        check_verify(caller, self.verify)
        size = whole_number(caller, "chunk_size", chunk_size, 1, "examples")
        retain = whole_number(caller, "retain", self.retain, 0, "chunks")
        budget = whole_or_none(caller, "memory_budget", self.memory_budget, 0, "bytes")
        return replace(self, retain=retain, memory_budget=budget), size


def check_verify(caller: str, verify: Any) -> None:
    """Raises unless it says when what is computed again is compared."""
    if verify not in (None, True, False):
        raise GradtoolsError(
            f"{caller}: verify is {verify!r}; expected True (each backward pass), False (none) or "
            "None (the first one of each kind)."
        )


@dataclass(frozen=True)
class Partition:
    """The cut of a batch into chunks: which rows each chunk holds."""

    size: int
    chunk_size: int
    interleaved: bool = False
    count: int = field(init=False, compare=False)
    rows: list[range] = field(init=False, compare=False)
    sizes: list[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        size, step, count = self.size, self.chunk_size, -(-self.size // self.chunk_size)
        if self.interleaved:
            rows = [range(i, size, count) for i in range(count)]
        else:
            rows = [range(s, min(s + step, size)) for s in range(0, size, step)]
        vars(self).update(count=count, rows=rows, sizes=[*map(len, rows)])


@dataclass(frozen=True, eq=False)
class Chunks:
    """One call of a chunked function as plain data: what a wing runs.

    Attributes:
        call: f on one chunk.
        outputs: The structure, axes and constants of f's output, filled in as `call` runs.
        cut: Where the batch is cut.
        splits: `(leaf, axis)` of every array that is split.
        lists: For each chunk the leaves of its slices of lists.
        shared: The leaves that all chunks share, arrays or not.
        carry: The leaves of what is handed from chunk to chunk.
        carry_names: Their names, for messages.
        arguments: What f was called with.
    """

    caller: str
    call: ChunkFunction
    outputs: Outputs
    cut: Partition
    options: ChunkOptions
    splits: list[tuple[Any, int]]
    lists: list[list[Any]]
    shared: list[Any]
    carry: list[Any]
    carry_names: list[str]
    arguments: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        f: Callable[..., Any],
        batch: Batch,
        cut: Partition,
        options: ChunkOptions,
        out_axes: Any = SUMMED,
        keys: tuple[int, ...] = (),
        carried: tuple[int, ...] = (),
    ) -> Chunks:
        """The call `f(batch)`; keys, carried: Which arguments are random keys and carries."""
        backend, args = batch.backend, batch.args
        leaves, plan = _sorted(batch, carried)
        plans, lists = _with_lists(batch, cut, plan, len(leaves[_PIECES]))
        given = [args[i] for i in carried]
        containers = [
            i
            for i, (_, places) in enumerate(plan)
            if type(args[i]) in _CONTAINERS and args[i] and i not in batch.lists
            if all(kind == _SHARED for kind, _ in places)
        ]
        outputs = Outputs(backend, batch.caller, out_axes, cut, bool(batch.lists))
        call = ChunkFunction(
            backend, f, batch.keywords, plans, keys, containers,
            backend.flatten(given[0] if len(given) == 1 else tuple(given))[1] if given else None,
            outputs,
        )  # fmt: skip
        pairs = [(batch.arguments[i].name, backend.leaf_paths(args[i])) for i in carried]
        names = [f"{name}{path}" for name, paths in pairs for path in paths]
        return cls(
            batch.caller, call, outputs, cut, options, leaves[_PIECES], lists, leaves[_SHARED],
            leaves[_CARRY], names, args,
        )  # fmt: skip

    def structure_of(self, number: int) -> tuple[Any, ...]:
        """Equal for chunks of the same size and structure; shapes inside `lists` may differ."""
        return self.cut.sizes[number], *[treedef for treedef, _ in self.call.plans[number]]

    def result(self, outs: list[Array], carry: list[Array]) -> Any:
        """What the chunked function returns, of joined leaves (or all chunks' leaves of lists)."""
        out, carry_def = self.outputs.joined(outs), self.call.carry_def
        return out if carry_def is None else (out, self.call.backend.unflatten(carry_def, carry))


_PIECES, _SHARED, _CARRY = range(3)
Plan = list[tuple[Any, list[tuple[int, int]]]]
"""For each argument its structure (None: one array), and for each of its leaves the pair
(`_PIECES`, `_SHARED` or `_CARRY`, position in that list of the chunk's leaves)."""


def _sorted(batch: Batch, carried: tuple[int, ...]) -> tuple[tuple[list[Any], ...], Plan]:
    """The leaves that are split, with their axes, those that are shared and the carries."""
    result: tuple[list[Any], ...] = ([], [], [])
    plan: Plan = []
    for i, (leaves, axes) in enumerate(zip(batch.leaves, batch.axes, strict=True)):
        places = []
        for leaf, axis in () if i in batch.lists else zip(leaves, axes, strict=True):
            kind = _CARRY if i in carried else _SHARED if axis is None else _PIECES
            places.append((kind, len(result[kind])))
            result[kind].append((leaf, axis) if kind == _PIECES else leaf)
        plan.append((batch.treedefs[i], places))
    return result, plan


def _with_lists(
    batch: Batch, cut: Partition, plan: Plan, start: int
) -> tuple[list[Plan], list[list[Any]]]:
    """The plan of each chunk, whose slices of lists follow its other pieces, and their leaves."""
    plans, lists = [], []
    for rows in cut.rows:
        own, leaves = list(plan), list[Any]()
        for i in batch.lists:
            more, treedef = batch.backend.flatten([batch.args[i][k] for k in rows])
            first = start + len(leaves)
            own[i] = treedef, [(_PIECES, first + k) for k in range(len(more))]
            leaves += more
        plans.append(own)
        lists.append(leaves)
    return plans, lists


# --- one chunk -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ChunkFunction:
    """f as a function of the flat leaves of one chunk; it holds no array.

    Attributes:
        keywords: The names of the last arguments.
        plans: How the arguments of each chunk are made of leaves.
        keys: Which of them are random keys.
        containers: Which are lists and dictionaries that all chunks share.
        carry_def: The structure of the carry; None if there is none.
    """

    backend: Backend
    f: Callable[..., Any]
    keywords: list[str]
    plans: list[Plan]
    keys: tuple[int, ...]
    containers: list[int]
    carry_def: Any
    outputs: Outputs

    def __call__(
        self, number: int, index: Any, pieces: list[Any], shared: list[Any], carry: list[Any]
    ) -> tuple[list[Array], list[Array]]:
        """The leaves of f's output, and of the new carry.

        Args:
            number: Which chunk it is, or one that looks like it.
            index: Which chunk it is, as a number that may be traced.
            pieces: The chunk's part of `splits`, then its `lists`.
            shared: The leaves that all chunks share.
            carry: As the chunks before left it.
        """
        values = self._values(self.plans[number], (pieces, shared, carry))
        for i in self.keys:
            if values[i] is not None:
                fold_in = self.backend.room("arrays", "key_argnums").fold_in
                values[i] = fold_in(values[i], index)
        held = [*map(values.__getitem__, self.containers)]
        before = [*map(self.backend.flatten, held)]
        count = len(values) - len(self.keywords)
        named = dict(zip(self.keywords, values[count:], strict=True))
        out, new_carry = self.f(*values[:count], **named), list[Any]()
        if self.carry_def is not None:
            out, new_carry = self._parted(out, number)
        for x, (leaves, treedef) in zip(held, before, strict=True):
            self._check_unchanged(x, leaves, treedef)
        return self.outputs.noted(number, out), new_carry

    def _values(self, plan: Plan, leaves: tuple[list[Any], ...]) -> list[Any]:
        values = []
        for treedef, places in plan:
            if treedef is None:
                kind, k = places[0]
                values.append(leaves[kind][k])
            else:
                own = [leaves[kind][k] for kind, k in places]
                values.append(self.backend.unflatten(treedef, own))
        return values

    def _check_unchanged(self, x: Any, leaves: list[Any], treedef: Any) -> None:
        """A list that f adds to is a copy: neither the next chunk nor the caller would see it."""
        now, of_now = self.backend.flatten(x)
        if of_now != treedef or not all(map(is_, now, leaves)):
            raise GradtoolsError(
                f"{self.outputs.caller}: f changes a list or dictionary that is an argument, and "
                "what it gets is a copy. Return what is new, or keep it in an attribute or a "
                "variable outside of f."
            )

    def _parted(self, result: Any, number: int) -> tuple[Any, list[Any]]:
        """f's output, and the leaves of the new carry."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise GradtoolsError(
                "chunked: with carry_argnums f returns a pair (output, new_carry); got "
                f"{describe(self.backend, result)}."
            )
        leaves, treedef = self.backend.flatten(result[1])
        if treedef != self.carry_def:
            raise _other_structure("carry", treedef, self.carry_def, number)
        return result[0], leaves


def _other_structure(what: str, treedef: Any, known: Any, number: int) -> GradtoolsError:
    return GradtoolsError(
        f"chunked: f's {what} at chunk {number} has the structure {in_words(treedef)}; expected "
        f"{in_words(known)}, as before. It must be the same for all chunks."
    )


class Outputs:
    """What is known of f's output: its structure and constants are the same at all chunks.

    Attributes:
        axes: The axis on which each array is joined. None before f was called, where outputs are
            added up, and if f makes lists of lists, of which each chunk has leaves of its own.
    """

    def __init__(
        self, backend: Backend, caller: str, out_axes: Any, cut: Partition, of_lists: bool
    ) -> None:
        self.backend, self.caller, self.cut = backend, caller, cut
        self.axes: list[int] | None = None
        self._out_axes, self._of_lists = out_axes, of_lists
        self._treedef: Any = _UNKNOWN  # None if the output is one array
        self._constants: dict[int, Any] = {}  # leaves that are no arrays
        self._lists: list[list[Any]] = [[] for _ in cut.rows]  # each chunk's parts of a list

    def same_as(self, number: int, others: range) -> None:
        """Chunk `number` was called for all of these: their parts of lists are as its own."""
        for other in others:
            self._lists[other] = self._lists[number]

    def noted(self, number: int, out: Any) -> list[Array]:
        """The arrays in a chunk's output, checked against the structure of the chunks before."""
        if self._of_lists and type(out) is list and len(out) == self.cut.sizes[number]:
            flat = [self.backend.flatten(x) for x in out]
            self._lists[number] = [(treedef, len(leaves)) for leaves, treedef in flat]
            return [leaf for leaves, _ in flat for leaf in leaves]
        leaves, kinds = self._flattened(number, out)
        if self._out_axes is SUMMED:
            self._check_numeric(leaves, out)
            return leaves
        if self.axes is None:
            self.axes = self._axes_of(leaves, kinds, out)
        arrays: list[Array] = []
        size = self.cut.sizes[number] if self.cut.interleaved else None
        for k, leaf in enumerate(leaves):
            if kinds[k] is None:
                self._note_constant(leaf, out, k, number)
                continue
            axis, shape = self.axes[len(arrays)], leaf.shape
            if not -len(shape) <= axis < len(shape) or size not in (None, shape[axis]):
                raise self._unjoinable(tuple(shape), axis, out, k, size)
            arrays.append(leaf)
        return arrays

    def _flattened(self, number: int, out: Any) -> tuple[list[Any], list[Any]]:
        """The leaves of an output, and of which kind each is."""
        leaves, treedef, kinds = [out], None, ["array"]  # mostly
        if type(out) is not self.backend.array_type and not self.backend.is_array(out):
            leaves, treedef, kinds = self.backend.flatten_arrays(out)
        if self._treedef is _UNKNOWN:
            self._treedef = treedef
        elif treedef != self._treedef:
            array = self.backend.flatten(self.backend.asarray(0.0))[1]
            now, known = (array if t is None else t for t in (treedef, self._treedef))
            raise _other_structure("output", now, known, number)
        return leaves, kinds

    def _axes_of(self, leaves: list[Any], kinds: list[Any], out: Any) -> list[int]:
        if leaves and kinds.count(None) == len(kinds):
            path = self.backend.leaf_paths(out)[0]
            mend = f" To take what the loss needs of it: outputs=lambda out: out{path}.<name>"
            raise GradtoolsError(
                f"chunked: f's output{path} is {describe(self.backend, leaves[0])}; expected an "
                "array with an entry for each example."
                + (mend if type(leaves[0]).__hash__ in _BY_IDENTITY else "")
            )
        axes = [self._out_axes] * len(leaves)
        if type(self._out_axes) is not int:
            axes = _axes_of(self.backend, self._out_axes, out)
        return [*compress(axes, kinds)]  # of arrays

    def _check_numeric(self, leaves: list[Any], out: Any) -> None:
        if self.caller == "checkpoint":
            return  # what is no array passes, as in a plain call
        for k, leaf in enumerate(leaves):
            if not is_numeric(self.backend, leaf):
                raise GradtoolsError(
                    f"{self.caller}: the function returned {describe(self.backend, leaf)} at "
                    f"output{self.backend.leaf_paths(out)[k]}, expected an array. Return arrays."
                )

    def _unjoinable(
        self, shape: tuple[int, ...], axis: int, out: Any, k: int, size: int | None
    ) -> GradtoolsError:
        """An array without the axis, or with too few or many entries for so many examples."""
        name = f"chunked: f's output{self.backend.leaf_paths(out)[k]} has"
        if -len(shape) <= axis < len(shape):
            return GradtoolsError(
                f"{name} {shape[axis]} entries on axis {axis} for {size} examples; with "
                "interleaved=True the order is restored, which needs one for each."
            )
        several = len(self.backend.flatten(out)[0]) > 1
        more = f" {self._how_to_leave_out(out)}." if several else ""
        return GradtoolsError(
            f"{name} shape {shape}, which has no axis {axis} to join chunks on. f returns one "
            "entry for each example; for a loss that is a mean or a sum over examples use "
            f"microbatched.{more}"
        )

    def _note_constant(self, leaf: Any, out: Any, k: int, number: int) -> None:
        """A leaf that is no array passes if it is a constant, the same for all chunks."""
        name = f"f's output{self.backend.leaf_paths(out)[k]}"
        if type(leaf).__hash__ in _BY_IDENTITY:  # only an object with an identity
            raise GradtoolsError(
                f"chunked: {name} is {describe(self.backend, leaf)}; expected an array with an "
                f"entry for each example, or a constant. {self._how_to_leave_out(out)}."
            )
        counts = isinstance(leaf, int) and not isinstance(leaf, bool)
        if counts and leaf == self.cut.sizes[number] and self.cut.count > 1:
            raise GradtoolsError(
                f"chunked: {name} is {leaf}, the number of examples in its chunk, and so not what "
                "the whole batch would give. Return an array with an entry for each example. "
                f"{self._how_to_leave_out(out)}."
            )
        known = self._constants.setdefault(k, leaf)
        same = known is leaf or known == leaf or (known != known and leaf != leaf)  # NaN is itself
        if not bool(same):
            raise GradtoolsError(
                f"chunked: {name} is {leaf!r} at chunk {number} and {known!r} before; what is no "
                "array must be the same for all chunks. Return an array with an entry for each "
                f"example. {self._how_to_leave_out(out)}."
            )

    def _how_to_leave_out(self, out: Any) -> str:
        leaves, paths = self.backend.flatten(out)[0], self.backend.leaf_paths(out)
        pairs = zip(leaves, paths, strict=True)
        path = next((p for x, p in pairs if len(getattr(x, "shape", ())) > 0), "[0]")
        return f"To leave it out: outputs=lambda out: out{path}"

    def joined(self, outs: list[Array]) -> Any:
        """The output for the whole batch, of joined leaves or of all chunks' leaves of lists."""
        left = iter(outs)
        if self.axes is None and any(self._lists):
            parts = [part for chunk in self._lists for part in chunk]
            out = [self.backend.unflatten(t, [next(left) for _ in range(n)]) for t, n in parts]
            rows = [row for rows in self.cut.rows for row in rows]
            return [x for _, x in sorted(zip(rows, out, strict=True), key=itemgetter(0))]
        if self._treedef is None:
            return outs[0]
        count, held = len(outs) + len(self._constants), self._constants
        leaves = [held[k] if k in held else next(left) for k in range(count)]
        return self.backend.unflatten(self._treedef, leaves)


def _axes_of(backend: Backend, axes: Any, out: Any) -> list[int]:
    if isinstance(axes, int) and not isinstance(axes, bool):
        return [axes] * len(backend.flatten(out)[0])
    if type(axes) is type(out) and type(out) in (tuple, list, dict) and len(axes) == len(out):
        if type(out) is dict:
            if axes.keys() == out.keys():  # leaves of a dict stand in the order of its tree
                keys = backend.flatten({key: key for key in out})[0]
                return [a for key in keys for a in _axes_of(backend, axes[key], out[key])]
        else:
            pairs = zip(axes, out, strict=True)
            return [a for one, part in pairs for a in _axes_of(backend, one, part)]
    if isinstance(out, Mapping) and type(axes) is dict and axes.keys() == out.keys():
        return [a for key in out for a in _axes_of(backend, axes[key], out[key])]
    raise GradtoolsError(
        f"chunked: out_axes holds {axes!r} for {describe(backend, out)}; expected an integer, or "
        "a tree of integers like f's output. An output that is the same for all chunks, or has no "
        "axis for examples, cannot be joined."
    )


def warn_of_batch_norm(f: Hashable, what: str) -> None:
    """Says once for each function that its batch normalisation sees chunks. what: Its beginning."""
    warn_once(
        ("batch norm", f),
        f"{what} a batch normalisation in training mode. It normalises each chunk by that chunk's "
        "own statistics, as the plain loop over chunks does, so the result is not the full "
        "batch's. For that use evaluation mode, or a normalisation of single examples.",
    )


def unlike_outputs(cut: Partition, axis: int, i: int, shape: Any, first: Any) -> GradtoolsError:
    """An output of chunk i cannot be joined with that of the first."""
    return GradtoolsError(
        f"chunked: an output of f has shape {tuple(shape)} for {cut.sizes[i]} examples and "
        f"{tuple(first)} for {cut.sizes[0]}; they cannot be joined on axis {axis}. Only that axis "
        "may depend on the size of a chunk; outputs=... leaves out what has another, such as a "
        "table of all pairs."
    )


def progress_bar(count: int, unit: str = "chunk") -> Any:
    """A bar of tqdm, or an error that says how to get it."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise GradtoolsError("progress=True needs the package tqdm; pip install tqdm.") from error
    return tqdm(total=count, unit=unit, leave=False)
