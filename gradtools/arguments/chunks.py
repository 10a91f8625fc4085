"""`Chunks` represents one call of a chunked function, with its arguments split into chunks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Literal, NamedTuple

import numpy as np

from gradtools.arguments.batches import Batch
from gradtools.arguments.checks import check_function, whole_number
from gradtools.arguments.chunk_outputs import SUMMED, Outputs, other_structure
from gradtools.arguments.marks import ChunkedCall
from gradtools.arguments.wording import NO_RETURN, describe, shown
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError, warn_once
from gradtools.integrations.containers import is_same

Verify = Literal["first"] | bool
_CONTAINERS = (list, dict, tuple)


@dataclass(frozen=True)
class ChunkOptions:
    """The options of `chunked`, `checkpoint` and `frozen`."""

    verify: bool | None = None  # whether backward passes compare outputs; None: only the first
    progress: bool = False
    # State that all calls of a function share; has the key "verified" after the first comparison.
    latest: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "latest": {}}


def checked_size(caller: str, f: Any, chunk_size: Any) -> int:
    """Returns the chunk size as an integer; raises an error if chunk_size or f is invalid."""
    order = f"f comes first: {caller}(f, chunk_size)." if callable(chunk_size) else ""
    check_function(caller, f, curried=False, order=order)
    return whole_number(caller, "chunk_size", chunk_size, 1, "examples")


def checked_verify(caller: str, verify: Any) -> bool | None:
    """Converts verify to a boolean, or to None if it is "first"; otherwise raises an error."""
    if verify is None or (isinstance(verify, str) and verify == "first"):
        return None
    if isinstance(verify, (bool, np.bool_)):
        return bool(verify)
    fix = ""
    if hasattr(verify, "shape") and caller != "chunked":
        f = "G" if caller == "frozen" else "f"
        fix = f" {caller} returns a function, which takes {f}'s arguments: {caller}({f})(x)."
    raise GradtoolsError(
        f"{caller}: verify is {shown(verify)}; expected 'first' (compare in the first backward "
        f"pass), True (in every pass) or False (never).{fix}"
    )


@dataclass(frozen=True)
class Partition:
    """The rows of each chunk of a batch.

    The size may be symbolic, as in `jax.export`. All chunks then have equal sizes, and only the
    rows of the first chunk are listed.
    """

    size: int
    chunk_size: int
    interleaved: bool = False
    count: int = field(init=False, compare=False)
    rows: list[range] = field(init=False, compare=False)
    sizes: list[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        size, step = self.size, self.chunk_size
        count = -(-size // step) if self.is_symbolic or size else 1  # an empty batch has one chunk
        if self.is_symbolic:
            rows = [range(step)]
        elif self.interleaved:
            rows = [range(i, size, count) for i in range(count)]
        else:
            rows = [range(s, min(s + step, size)) for s in range(0, size or 1, step)]
        vars(self).update(count=count, rows=rows, sizes=[*map(len, rows)])

    @property
    def is_symbolic(self) -> bool:
        """Whether the batch size is symbolic."""
        return not hasattr(self.size, "__index__")

    def with_chunks_of(self, chunk_size: int) -> Partition:
        """Returns a partition of the batch into chunks of at most `chunk_size` rows."""
        most = max(self.chunk_size - 1, 1) if self.is_symbolic else self.size
        return Partition(self.size, min(chunk_size, most))

    def checked(self, caller: str) -> Partition:
        """Returns self; raises an error if a symbolic size cannot be split into equal chunks."""
        if self.is_symbolic and (self.interleaved or self.size % self.chunk_size != 0):
            raise GradtoolsError(
                f"{caller}: the batch has the symbolic size {self.size}, which cannot be cut into "
                f"{'interleaved' if self.interleaved else 'equal'} chunks of {self.chunk_size}. "
                f"Make it a multiple, such as '{self.chunk_size}*n' in jax.export.symbolic_shape"
                f"{', without interleaved=True' if self.interleaved else ''}."
            )
        return self


@dataclass(frozen=True, eq=False)
class Chunks:
    """The data of one call of a chunked function; a backend evaluates the call."""

    caller: str
    call: ChunkFunction  # Calls f on one chunk.
    outputs: Outputs  # Structure, axes and constants of f's output, set by `call`.
    cut: Partition  # The rows of each chunk.
    options: ChunkOptions
    splits: list[tuple[Any, int]]  # The pair `(leaf, axis)` of every array that is split.
    lists: list[list[Any]]  # For each chunk, the leaves of its slices of lists.
    shared: list[Any]  # The leaves that all chunks share, both arrays and non-arrays.
    carry: list[Any]  # The leaves of the initial carry.
    carry_names: list[str]  # The names of the carry leaves, for messages.
    arguments: tuple[list[Any], dict[str, Any]]  # The values of f's arguments.
    recut: Callable[[Partition], Chunks]  # Returns the same call with a different partition.

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
        """Creates the `Chunks` for the call `f(batch)`.

        keys, carried: The indices of the random keys and of the carries among the arguments.
        """
        backend, every = batch.backend, batch.arguments
        leaves: tuple[list[Any], ...] = ([], [], [])  # leaves by kind: _PIECES, _SHARED, _CARRY
        plan, containers = list[ArgumentPlan](), list[int]()
        for i, flat in enumerate(every):
            places = []
            for leaf in () if flat.is_list else flat.leaves:
                kind = _CARRY if i in carried else _SHARED if leaf.axis is None else _PIECES
                places.append((kind, len(leaves[kind])))
                leaves[kind].append((leaf.value, leaf.axis) if kind == _PIECES else leaf.value)
            plan.append(ArgumentPlan(flat.treedef, places))
            holds = type(x := flat.argument.value) in _CONTAINERS and x and not flat.is_list
            if holds and all(kind == _SHARED for kind, _ in places):
                containers.append(i)
        plans, lists = list[list[ArgumentPlan]](), list[list[Any]]()
        for rows in cut.rows:  # slices of lists have the positions after the arrays
            own, of_lists = list(plan), list[Any]()
            for i, flat in enumerate(every):
                if flat.is_list:
                    more, treedef = backend.flatten([flat.argument.value[k] for k in rows])
                    first = len(leaves[_PIECES]) + len(of_lists)
                    own[i] = ArgumentPlan(treedef, [(_PIECES, first + k) for k in range(len(more))])
                    of_lists += more
            plans.append(own)
            lists.append(of_lists)
        carries = [every[i].argument for i in carried]
        trees = [carry.value for carry in carries]
        carry_def = backend.flatten(trees[0] if len(trees) == 1 else tuple(trees))[1]
        outputs = Outputs(backend, batch.caller, out_axes, cut, any(flat.is_list for flat in every))
        call = ChunkFunction(
            backend, f, batch.keywords, plans, keys, containers, carry_def if trees else None,
            outputs, ChunkedCall(batch.caller),
        )  # fmt: skip
        names = [f"{carry.name}{p}" for carry in carries for p in backend.leaf_paths(carry.value)]
        return cls(
            batch.caller, call, outputs, cut, options, leaves[_PIECES], lists, leaves[_SHARED],
            leaves[_CARRY], names, batch.args,
            lambda cut: cls.of(f, batch, cut, options, out_axes, keys, carried),
        )  # fmt: skip

    def result(self, outs: list[Array], carry: list[Array]) -> Any:
        """Builds the result from the output leaves `outs` of the whole batch and the last carry."""
        out, carry_def = self.outputs.tree(outs), self.call.carry_def
        return out if carry_def is None else (out, self.call.backend.unflatten(carry_def, carry))


_PIECES, _SHARED, _CARRY = range(3)


class ArgumentPlan(NamedTuple):
    """The information that is needed to rebuild an argument from a chunk's leaves."""

    treedef: Any  # The argument's structure; None if it is a single array.
    places: list[tuple[int, int]]  # The kind (_PIECES, _SHARED, _CARRY) and index of each leaf.


# --- one chunk -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ChunkFunction:
    """Calls f on the flat leaves of one chunk; does not store arrays."""

    backend: Backend
    f: Callable[..., Any]
    keywords: list[str]  # The names of the keyword arguments, which come last.
    plans: list[list[ArgumentPlan]]  # For each chunk, the plan to rebuild its arguments.
    keys: tuple[int, ...]  # The indices of the arguments that are random keys.
    containers: list[int]  # The indices of shared arguments that are containers.
    carry_def: Any  # The structure of the carry; None if there is no carry.
    outputs: Outputs
    place: ChunkedCall  # the call's position among `retain_gradient` marks

    def __call__(
        self, number: int, index: Any, pieces: list[Any], shared: list[Any], carry: list[Any]
    ) -> tuple[list[Array], list[Array]]:
        """Returns the leaves of f's output, and of the new carry.

        Args:
            number: The index of this chunk, or of another chunk with the same structure, as an int.
            index: The index of this chunk, which may be a traced array.
            pieces: The chunk's slices of `splits`, then of `lists`.
            shared: The leaves that all chunks share.
            carry: The carry from the previous chunk.
        """
        backend, values, leaves = self.backend, list[Any](), (pieces, shared, carry)
        for treedef, places in self.plans[number]:
            own = [leaves[kind][k] for kind, k in places]
            values.append(own[0] if treedef is None else backend.unflatten(treedef, own))
        for i in self.keys:
            if values[i] is not None:
                fold_in = backend.submodule("arrays", "key_argnums").fold_in
                values[i] = fold_in(f"{self.outputs.caller}: argument {i}", values[i], index)
        containers = [(values[i], *backend.flatten(values[i])) for i in self.containers]
        count = len(values) - len(self.keywords)
        keywords = dict(zip(self.keywords, values[count:], strict=True))
        with self.place.at(number):
            try:
                out = self.f(*values[:count], **keywords)
            except (TypeError, ValueError, IndexError, RuntimeError) as error:
                if self.outputs.caller in ("chunked", "microbatched_value_and_grad"):
                    called = ", ".join([describe(backend, x) for x in values])
                    note = backend.hint_at_traced_value(error) or (
                        f"f was called with one chunk, ({called}).{self._hints(values)}"
                        f"{self._shared_in_words(number, count)}"
                    )
                    error.add_note(f"{self.outputs.caller}: {note}")
                raise
        new_carry: list[Any] = []
        if self.carry_def is not None:
            if not isinstance(out, tuple) or len(out) != 2:
                raise GradtoolsError(
                    "chunked: with carry_argnums f must return a pair (output, new_carry); got "
                    f"{describe(backend, out)}."
                )
            new_carry, treedef = backend.flatten_like(self.carry_def, out[1])
            if not is_same(treedef, self.carry_def):
                raise other_structure("carry", treedef, self.carry_def, number)
            out = out[0]
        elif out is None and self.outputs.caller == "chunked":
            raise GradtoolsError(
                f"chunked: f returned None; expected one entry for each example. {NO_RETURN}"
            )
        for x, before, treedef in containers:
            now, of_now = backend.flatten(x)
            if not is_same(of_now, treedef) or not all(map(is_, now, before)):
                # The container that f changed is a copy that no other code can access.
                raise GradtoolsError(
                    f"{self.outputs.caller}: f changes a list or dictionary that is an argument, "
                    "but f receives a copy. Return the new contents, or store them in an "
                    "attribute or a variable outside of f."
                )
        return self.outputs.arrays_in(number, out), new_carry

    def _hints(self, values: list[Any]) -> str:
        """Returns notes about the chunk's lists, and about random keys that were split, or ""."""
        hints = ""
        if list in map(type, values):
            hints = " A list is treated as a list of examples; a tuple contains arrays."
        if any(self.backend.dtype_name(x) == "uint32" for x in values if hasattr(x, "dtype")):
            hints += " If an argument is a random key, name it in key_argnums."
        return hints

    def _shared_in_words(self, number: int, count: int) -> str:
        """Returns a note that names the positional arguments that all chunks share, or ""."""
        shared = [
            f"argument {i}"
            for i, plan in enumerate(self.plans[number][:count])
            if plan.places and all(kind == _SHARED for kind, _ in plan.places)
        ]
        if self.outputs.caller == "chunked" or not shared:
            return ""
        return (
            f" All chunks share {', '.join(shared)} (in_axes=None) and every argument in argnums. "
            "argnums selects the parameters or the module, not the batch."
        )


def warn_of_batch_norm(f: Hashable, what: str) -> None:
    """Warns once per function that batch normalization uses the statistics of a chunk.

    what: The beginning of the warning, before "a batch normalization".
    """
    warn_once(
        ("batch norm", f),
        f"{what} a batch normalization in training mode. Each chunk is normalized by the chunk's "
        "own statistics, as in the plain loop over chunks, so the result differs from the result "
        "on the full batch. Use evaluation mode, or a normalization that does not mix examples.",
    )


def progress_bar(count: int, unit: str = "chunk") -> Any:
    """Makes a tqdm progress bar for a terminal or notebook; raises an error if tqdm is missing."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise GradtoolsError("progress=True needs tqdm. Fix: pip install tqdm.") from error
    is_seen = "ipykernel" in sys.modules or sys.stderr.isatty()
    return tqdm(total=count, unit=unit, leave=False, disable=not is_seen)
