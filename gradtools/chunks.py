"""`Chunks`: one call of a chunked function as data, its arguments cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import is_
from typing import Any

from gradtools.backend import Array, Backend
from gradtools.batches import Batch
from gradtools.calls import describe, is_numeric, whole_number, whole_or_none, with_article
from gradtools.errors import GradtoolsError, warn_once

SUMMED = object()  # in place of the axes of outputs that are added up and not joined
_CONTAINERS = (list, dict, tuple)
_BY_IDENTITY: tuple[Any, ...] = (None, object.__hash__)


@dataclass(frozen=True)
class ChunkOptions:
    """How the chunks are to run.

    latest: What a wing knows of the latest call of the same function.
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
    """Where a batch is cut."""

    size: int
    chunk_size: int
    interleaved: bool = False
    count: int = field(init=False, compare=False)
    rows: list[range] = field(init=False, compare=False)
    sizes: list[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        count, size = -(-self.size // self.chunk_size), self.size
        rows = [range(i, size, count) for i in range(count)]
        if not self.interleaved:
            starts = range(0, size, self.chunk_size)
            rows = [range(s, min(s + self.chunk_size, size)) for s in starts]
        for name, value in (("count", count), ("rows", rows), ("sizes", [*map(len, rows)])):
            object.__setattr__(self, name, value)


@dataclass
class Chunks:
    """One call of a chunked function, as flat lists.

    Attributes:
        batch: The arguments, and how they are split.
        cut: Where.
        splits: `(leaf, axis)` of every array that is split.
        lists: For each chunk the leaves of its slices of lists.
        shared: The leaves that all chunks share, arrays or not.
        carry: The leaves of what is handed from chunk to chunk.
        axes: After a chunk was called: the axis on which each output leaf is joined; None if f
            makes lists of lists, of which each chunk has leaves of its own.
    """

    backend: Backend
    f: Callable[..., Any]
    batch: Batch
    out_axes: Any
    keys: tuple[int, ...]
    carried: tuple[int, ...]
    cut: Partition
    options: ChunkOptions
    axes: list[int] | None = field(default=None, init=False)
    size_now: int = field(default=0, init=False)  # of the chunk that is called

    def __post_init__(self) -> None:
        batch = self.batch
        self.splits: list[tuple[Any, int]] = []
        self.shared: list[Any] = []
        self.carry: list[Any] = []
        self._places: list[list[tuple[str, int]]] = []
        self._is_leaf: list[bool] = []  # whether an argument is its one leaf
        names = dict.fromkeys(self.carried, "carry")
        for i, (leaves, axes) in enumerate(zip(batch.leaves, batch.axes, strict=True)):
            self._places.append([])
            self._is_leaf.append(len(leaves) == 1 and leaves[0] is batch.args[i])
            if i in batch.lists:
                continue
            for leaf, axis in zip(leaves, axes, strict=True):
                name = names.get(i, "shared" if axis is None else "split")
                target: list[Any] = getattr(self, "splits" if name == "split" else name)
                self._places[i].append((name, len(target)))
                target.append((leaf, axis) if name == "split" else leaf)
        flat = [[self._slices(i, rows) for i in batch.lists] for rows in self.cut.rows]
        self.lists = [[leaf for leaves, _ in parts for leaf in leaves] for parts in flat]
        self._list_defs = [[(t, len(leaves)) for leaves, t in parts] for parts in flat]
        self._treedefs: dict[str, Any] = {}
        self._constants: dict[int, Any] = {}  # leaves of the output that are no arrays
        self._out_lists: list[list[Any]] = [[] for _ in self.cut.rows]

    def _slices(self, i: int, rows: range) -> Any:
        return self.backend.flatten([self.batch.args[i][k] for k in rows])

    def name_of(self, kind: str, k: int) -> str:
        """The name of leaf k among `splits`, `shared` or `carry`, for messages."""
        i, j = next(
            (i, j)
            for i, places in enumerate(self._places)
            for j, place in enumerate(places)
            if place == (kind, k)
        )
        return self.batch.name_of(i, j)

    def structure_of(self, number: int) -> tuple[Any, ...]:
        """Equal for chunks that look alike, but for the shapes of what `lists` holds."""
        return len(self.cut.rows[number]), *(t for t, _ in self._list_defs[number])

    def same_as(self, number: int, others: range) -> None:
        """Notes that the output of a chunk that was called looks like that of others."""
        for other in others:
            self._out_lists[other] = self._out_lists[number]

    def without_arrays(self) -> Chunks:
        """The same call but for the arrays that it was given: what `call` needs, and no more.

        What calls of either note of the output, both know.
        """
        empty = lambda x: None if self.backend.is_array(x) else x
        bare, batch = copy(self), copy(self.batch)
        batch.args, batch.leaves, batch.arguments = (), [], []
        bare.batch = batch
        bare.splits, bare.lists, bare.carry = [], [], []
        bare.shared = [empty(x) for x in self.shared]
        return bare

    # --- one chunk

    def call(
        self, number: int, index: Any, pieces: list[Any], shared: list[Any], carry: list[Any]
    ) -> tuple[list[Array], list[Array]]:
        """f on one chunk: the leaves of its output, and of the new carry.

        Args:
            number: Which chunk it is, or one that looks like it.
            index: Which chunk it is, as a number that may be traced.
            pieces: The chunk's part of `splits`, then its `lists`.
            shared: As the attribute.
            carry: As the attribute, after the chunks before.
        """
        self.size_now = len(self.cut.rows[number])
        values = self._values(number, index, pieces, shared, carry)
        containers = self._containers(values)
        args, kwargs = self.batch.parted(values) if self.batch.keywords else (values, {})
        out, new_carry = self._parted(self.f(*args, **kwargs))
        self._check_containers(containers)
        carry_leaves: list[Any] = []
        if self.carried:
            carry_leaves, carry_def = self.backend.flatten(new_carry)
            if carry_def != self._carry_def:
                raise self._other_structure("carry", carry_def, number)
        if self.batch.lists and type(out) is list and len(out) == len(self.cut.rows[number]):
            flat = [self.backend.flatten(x) for x in out]
            self._out_lists[number] = [(treedef, len(leaves)) for leaves, treedef in flat]
            return [leaf for leaves, _ in flat for leaf in leaves], carry_leaves
        leaves, treedef, kinds = self.backend.flatten_arrays(out)
        if treedef != self._treedefs.setdefault("output", treedef):
            raise self._other_structure("output", treedef, number)
        if self.out_axes is SUMMED:
            self._check_numeric(leaves, out)
            return leaves, carry_leaves
        if leaves and kinds.count(None) == len(kinds):
            path = self.backend.leaf_paths(out)[0]
            mend = f" To take what the loss needs of it: outputs=lambda out: out{path}.<name>"
            raise GradtoolsError(
                f"chunked: f's output{path} is {describe(self.backend, leaves[0])}; expected an "
                "array with an entry for each example."
                + (mend if type(leaves[0]).__hash__ in _BY_IDENTITY else "")
            )
        if self.axes is None:
            axes = [self.out_axes] * len(leaves)
            if type(self.out_axes) is not int:
                axes = _axes_of(self.backend, self.out_axes, out)
            self.axes = [*compress(axes, kinds)]  # of arrays
        arrays: list[Array] = []
        for k, leaf in enumerate(leaves):
            if kinds[k] is None:
                self._note_constant(leaf, out, k, number)
                continue
            axis, shape = self.axes[len(arrays)], leaf.shape
            arrays.append(leaf)
            if not -len(shape) <= axis < len(shape):
                raise self._no_axis(leaf, axis, out, k)
            if self.cut.interleaved and shape[axis] != self.size_now:
                raise self._no_order(leaf, axis, out, k)
        return arrays, carry_leaves

    def _containers(self, values: list[Any]) -> list[Any]:
        """The lists and dictionaries among shared arguments, with what they hold."""
        those = [(i, x) for i, x in enumerate(values) if type(x) in _CONTAINERS and x]
        return [(x, self.backend.flatten(x)) for i, x in those if self._is_shared(i)]

    def _check_containers(self, before: list[Any]) -> None:
        """A list that f adds to is a copy: neither the next chunk nor the caller would see it."""
        for x, (leaves, treedef) in before:
            now, of_now = self.backend.flatten(x)
            if of_now != treedef or not all(map(is_, now, leaves)):
                raise GradtoolsError(
                    f"{self.batch.caller}: f changes a list or dictionary that is an argument, and "
                    "what it gets is a copy. Return what is new, or keep it in an attribute or a "
                    "variable outside of f."
                )

    def _is_shared(self, i: int) -> bool:
        return i not in self.batch.lists and all(n == "shared" for n, _ in self._places[i])

    def _values(self, number: int, index: Any, pieces: Any, shared: Any, carry: Any) -> list:
        unflatten, sources = self.backend.unflatten, {"shared": shared, "carry": carry}
        of_lists = iter(pieces[len(self.splits) :])
        list_defs = iter(self._list_defs[number])
        values = []
        for i, places in enumerate(self._places):
            if i in self.batch.lists:
                treedef, count = next(list_defs)
                values.append(unflatten(treedef, [next(of_lists) for _ in range(count)]))
                continue
            leaves = [(pieces if n == "split" else sources[n])[k] for n, k in places]
            arg = leaves[0] if self._is_leaf[i] else unflatten(self.batch.treedefs[i], leaves)
            if i in self.keys and arg is not None:
                arg = self.backend.room("arrays", "key_argnums").fold_in(arg, index)
            values.append(arg)
        return values

    def _parted(self, result: Any) -> tuple[Any, Any]:
        if not self.carried:
            return result, None
        if not isinstance(result, tuple) or len(result) != 2:
            raise GradtoolsError(
                "chunked: with carry_argnums f returns a pair (output, new_carry); got "
                f"{describe(self.backend, result)}."
            )
        return result

    def _other_structure(self, what: str, treedef: Any, number: int) -> GradtoolsError:
        known = self._carry_def if what == "carry" else self._treedefs[what]
        return GradtoolsError(
            f"chunked: f's {what} at chunk {number} has the structure {treedef}; expected "
            f"{known}, as before. It must be the same for all chunks."
        )

    def _check_numeric(self, leaves: list[Any], out: Any) -> None:
        if self.batch.caller == "checkpoint":
            return  # what is no array passes, as in a plain call
        for k, leaf in enumerate(leaves):
            if not is_numeric(self.backend, leaf):
                raise GradtoolsError(
                    f"{self.batch.caller}: the function returned {describe(self.backend, leaf)} at "
                    f"output{self.backend.leaf_paths(out)[k]}, expected an array. Return arrays."
                )

    def _note_constant(self, leaf: Any, out: Any, k: int, number: int) -> None:
        """A leaf that is no array passes if it is a constant, the same for all chunks."""
        name = f"f's output{self.backend.leaf_paths(out)[k]}"
        if type(leaf).__hash__ in _BY_IDENTITY:  # only an object with an identity
            raise GradtoolsError(
                f"chunked: {name} is {describe(self.backend, leaf)}; expected an array with an "
                f"entry for each example, or a constant. {self._how_to_leave_out(out)}."
            )
        counts = isinstance(leaf, int) and not isinstance(leaf, bool) and leaf == self.size_now
        if counts and self.cut.count > 1:
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

    def _no_axis(self, leaf: Array, axis: int, out: Any, k: int) -> GradtoolsError:
        several = len(self.backend.flatten(out)[0]) > 1
        more = f" {self._how_to_leave_out(out)}." if several else ""
        return GradtoolsError(
            f"chunked: f's output{self.backend.leaf_paths(out)[k]} has shape "
            f"{tuple(leaf.shape)}, which has no axis {axis} to join chunks on. f returns one "
            "entry for each example; for a loss that is a mean or a sum over examples use "
            f"microbatched.{more}"
        )

    def _no_order(self, leaf: Array, axis: int, out: Any, k: int) -> GradtoolsError:
        return GradtoolsError(
            f"chunked: f's output{self.backend.leaf_paths(out)[k]} has {leaf.shape[axis]} "
            f"entries on axis {axis} for {self.size_now} examples; with interleaved=True the "
            "order is restored, which needs one for each."
        )

    # --- all of them

    def result(self, outs: list[Array], carry: list[Array]) -> Any:
        """What the chunked function returns, of joined leaves (or all chunks' leaves of lists)."""
        backend = self.backend
        if self.axes is None and any(self._out_lists):
            left = iter(outs)
            defs = [d for chunk in self._out_lists for d in chunk]
            out: Any = [backend.unflatten(t, [next(left) for _ in range(n)]) for t, n in defs]
            if self.cut.interleaved:
                order = [row for rows in self.cut.rows for row in rows]
                out = [x for _, x in sorted(zip(order, out, strict=True), key=lambda pair: pair[0])]
        else:
            out = backend.unflatten(self._treedefs["output"], self._with_constants(outs))
        if not self.carried:
            return out
        return out, backend.unflatten(self._carry_def, carry)

    @property
    def _carry_def(self) -> Any:
        given = tuple(self.batch.args[i] for i in self.carried)
        return self.backend.flatten(given if len(given) > 1 else given[0])[1]

    def _with_constants(self, outs: list[Array]) -> list[Any]:
        left = iter(outs)
        places = range(len(outs) + len(self._constants))
        return [self._constants[k] if k in self._constants else next(left) for k in places]


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
