"""The outputs of chunks: their structure and constants, joining them, and whether that is valid.

Only rows of examples can be joined, so an output's length must be proportional to its chunk's. If
chunks differ in size, their outputs show it; if not, f is evaluated at another number of examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtools.arguments.batches import may_be_of_shapes
from gradtools.arguments.wording import describe, in_words, is_numeric
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError

if TYPE_CHECKING:
    from gradtools.arguments.chunks import Chunks, Partition

SUMMED = object()  # out_axes of outputs that are summed instead of joined
_BY_IDENTITY: tuple[Any, ...] = (None, object.__hash__)
_UNKNOWN = object()  # the structure before the first output
_STEP = re.compile(r"\[[^\[\]]*\]|\.\w+")  # an index, key or attribute in a leaf path


class OutputShapes(NamedTuple):
    """The shapes of a chunk's output arrays, and for how many examples."""

    size: int
    shapes: Sequence[Sequence[int]]


class Outputs:
    """The structure and constants of f's output, which must be the same for all chunks."""

    def __init__(
        self, backend: Backend, caller: str, out_axes: Any, cut: Partition, of_lists: bool
    ) -> None:
        self.backend, self.caller, self.cut = backend, caller, cut
        # The axis on which each array is joined. None before f was called, if outputs are summed,
        # and if f maps a list of examples to a list.
        self.axes: list[int] | None = None
        self._out_axes, self._of_lists = out_axes, of_lists
        self._treedef: Any = _UNKNOWN  # None if the output is one array
        self._constants: dict[int, Any] = {}  # leaves that are no arrays
        self._lists: list[list[Any]] = [[] for _ in cut.rows]  # each chunk's parts of a list

    def same_as(self, number: int, others: range) -> None:
        """Chunk `number` was run in place of `others`: their parts of lists equal its own."""
        for other in others:
            self._lists[other] = self._lists[number]

    def arrays_in(self, number: int, out: Any) -> list[Array]:
        """The arrays in a chunk's output, checked against the structure of the chunks before."""
        backend = self.backend
        if self._of_lists and type(out) is list and len(out) == self.cut.sizes[number]:
            flat = [backend.flatten(x) for x in out]
            self._lists[number] = [(treedef, len(leaves)) for leaves, treedef in flat]
            return [leaf for leaves, _ in flat for leaf in leaves]
        leaves, treedef, kinds = [out], None, ["array"]  # the common case, an array
        if type(out) is not backend.array_type and not backend.is_array(out):
            leaves, treedef, kinds = backend.flatten_arrays(out)
        if self._treedef is _UNKNOWN:
            self._treedef = treedef
        elif treedef != self._treedef:
            array = backend.flatten(backend.asarray(0.0))[1]
            now, known = (array if t is None else t for t in (treedef, self._treedef))
            raise other_structure("output", now, known, number)
        if self._out_axes is SUMMED:
            for k, leaf in enumerate(leaves):
                # checkpoint lets what is no array pass through
                if self.caller == "checkpoint" or is_numeric(backend, leaf):
                    continue
                cached = type(leaf).__name__.endswith("Cache")  # transformers' key-value cache
                raise GradtoolsError(
                    f"{self.caller}: the function returned {describe(backend, leaf)} at "
                    f"output{backend.leaf_paths(out)[k]}, expected an array. "
                    f"{'Call the model with use_cache=False.' if cached else 'Return arrays.'}"
                )
            return leaves
        if self.axes is None:
            self.axes = self._axes_of(leaves, kinds, out)
        arrays: list[Array] = []
        size = self.cut.sizes[number] if self.cut.interleaved else None
        for k, leaf in enumerate(leaves):
            if kinds[k] is None:
                self._note_constant(leaf, out, k, number)
                continue
            axis, shape = self.axes[len(arrays)], tuple(leaf.shape)
            if not -len(shape) <= axis < len(shape):
                raise GradtoolsError(
                    f"chunked: f's output{backend.leaf_paths(out)[k]} has shape {shape}, which has "
                    f"no axis {axis} to join chunks on. f must return one entry for each example; "
                    "for a loss that is a mean or a sum over examples use "
                    f"microbatched_value_and_grad.{self._without(out, self.cut.sizes[number])}"
                )
            if size not in (None, shape[axis]):
                raise GradtoolsError(
                    f"chunked: f's output{backend.leaf_paths(out)[k]} has {shape[axis]} entries on "
                    f"axis {axis} for {size} examples; with interleaved=True f must return one for "
                    "each, so that their order can be restored."
                )
            arrays.append(leaf)
        return arrays

    def _axes_of(self, leaves: list[Any], kinds: list[Any], out: Any) -> list[int]:
        if leaves and kinds.count(None) == len(kinds):
            path = self.backend.leaf_paths(out)[0]
            fix = f" Wrap f so that it returns what the loss needs of it: out{path}.<name>"
            raise GradtoolsError(
                f"chunked: f's output{path} is {describe(self.backend, leaves[0])}; expected an "
                "array with an entry for each example."
                + (fix if type(leaves[0]).__hash__ in _BY_IDENTITY else "")
            )
        axes = [self._out_axes] * len(leaves)
        if type(self._out_axes) is not int:
            axes = _axes_of(self.backend, self._out_axes, out)
        return [*compress(axes, kinds)]  # of arrays only

    def _note_constant(self, leaf: Any, out: Any, k: int, number: int) -> None:
        """Stores a non-array leaf; raises unless it is a constant, equal for all chunks."""
        name, size = f"f's output{self.backend.leaf_paths(out)[k]}", self.cut.sizes[number]
        if type(leaf).__hash__ in _BY_IDENTITY:  # an object that compares by identity
            raise GradtoolsError(
                f"chunked: {name} is {describe(self.backend, leaf)}; expected an array with an "
                f"entry for each example, or a constant.{self._without(out, size)}"
            )
        counts = isinstance(leaf, int) and not isinstance(leaf, bool)
        if counts and leaf == size and self.cut.count != 1:
            raise GradtoolsError(
                f"chunked: {name} is {leaf}, the number of examples in its chunk, and so not what "
                "the whole batch would give. Return an array with an entry for each example."
                f"{self._without(out, size)}"
            )
        known = self._constants.setdefault(k, leaf)
        same = known is leaf or known == leaf or (known != known and leaf != leaf)  # NaN is itself
        if not bool(same):
            raise GradtoolsError(
                f"chunked: {name} is {leaf!r} at chunk {number} and {known!r} before; what is no "
                "array must be the same for all chunks. Return an array with an entry for each "
                f"example.{self._without(out, size)}"
            )

    # --- whether they are rows of examples

    def check_rows(
        self,
        call: Chunks,
        shapes: Sequence[tuple[int, Sequence[Sequence[int]]]],
        again: Callable[[Chunks], Sequence[Sequence[int]] | None] | None = None,
        sizes: Sequence[int] = (),
        by_data: bool = False,
    ) -> None:
        """Raises unless the outputs of all chunks are rows of examples, once for each shape.

        Args:
            call: The call.
            shapes: The size of each chunk, or kind of chunk, and the shapes of its arrays.
            again: Returns the shapes of the first chunk's arrays of a recut call, at other examples
                in each call, or None. Called if all chunks have equal shapes, and before an error.
            sizes: The numbers of examples for which f may be called again.
            by_data: Whether lengths may depend on values, as that of `x[mask]`.
        """
        if self.axes is None or self.cut.count == 1:
            return
        seen = call.options.latest.setdefault("rows", set())
        key = self.cut, *[(size, *map(tuple, of_size)) for size, of_size in shapes]
        if key in seen:
            return
        axes, chunks = self.axes, [OutputShapes(*of_chunk) for of_chunk in shapes]
        known = chunks[0]

        def elsewhere() -> OutputShapes | None:
            if again is None:
                return None
            for size in sizes:
                try:
                    other = call.recut(self.cut.with_chunks_of(size))
                    others = again(other)
                    return None if others is None else OutputShapes(other.cut.sizes[0], others)
                except Exception as error:
                    if not (may_be_of_shapes(error) or isinstance(error, GradtoolsError)):
                        raise
            return None

        def check_rest(chunk: OutputShapes, differs: Callable[..., bool]) -> None:
            """Raises if an output's other axes differ from the first chunk's."""
            for axis, shape, first in zip(axes, chunk.shapes, known.shapes, strict=True):
                if differs(_rest(shape, axis), chunk.size, _rest(first, axis), known.size):
                    raise GradtoolsError(
                        f"chunked: an output of f has shape {tuple(shape)} for {chunk.size} "
                        f"examples and {tuple(first)} for {known.size}; they cannot be joined on "
                        f"axis {axis}. Only that axis may depend on the size of a chunk; "
                        "return no other outputs."
                    )

        for chunk in chunks:
            if chunk.shapes != known.shapes:
                check_rest(chunk, lambda rest, _, first, of_first: rest != first)
        other = elsewhere() if all(chunk == known for chunk in chunks) else None
        if other is not None and len(other.shapes) == len(axes):
            check_rest(other, _grows)
            chunks.append(other)
        is_told = len({chunk.size for chunk in chunks}) > 1
        tries = 0 if not by_data else 1 if len(chunks) >= 3 else 2  # each at other examples
        while True:
            lengths = [[(c.size, c.shapes[k][axis]) for c in chunks] for k, axis in enumerate(axes)]
            follows = [_follows(of_array, by_data) for of_array in lengths]
            if again is None and not is_told:  # lengths are the only sign
                follows = [all(n == size for size, n in of_array) for of_array in lengths]
                is_told = not all(follows)
            if all(follows) or not is_told:
                seen.add(key)
                return
            other = elsewhere() if tries else None
            if other is None:
                break
            chunks, tries = [*chunks, other], tries - 1
        k, tree = follows.index(False), self._tree()
        other = next((c for c in chunks if c.size != known.size), known)
        arrays = [i for i in range(len(follows) + len(self._constants)) if i not in self._constants]
        good = {arrays[i] for i, f in enumerate(follows) if f}
        paths = self.backend.leaf_paths(tree)
        means = (
            "" if good else " For a mean or a sum over examples use microbatched_value_and_grad."
        )
        known_length, length = (c.shapes[k][axes[k]] for c in (known, other))
        also = "" if other is known else f" and {length} for {other.size}"
        raise GradtoolsError(
            f"chunked: f's output{paths[arrays[k]]} has length {known_length} on axis {axes[k]} "
            f"for {known.size} examples{also}; only rows of examples can "
            "be joined. State that goes from chunk to chunk, such as batch statistics, belongs in "
            f"an argument that carry_argnums names.{_without(paths, tree, good)}{means}"
        )

    def _tree(self) -> Any:
        """A tree like f's output, with scalars for arrays."""
        count, number = len(self.axes or []) + len(self._constants), self.backend.asarray(0.0)
        if self._treedef is None:
            return number
        leaves = [self._constants.get(k, number) for k in range(count)]
        return self.backend.unflatten(self._treedef, leaves)

    def _without(self, out: Any, size: int) -> str:
        """Advice for messages: a `select` that leaves out what cannot be joined."""
        leaves, axis = self.backend.flatten(out)[0], self._out_axes
        shapes = {k: getattr(x, "shape", ()) for k, x in enumerate(leaves)}
        axis = axis if type(axis) is int else 0
        lengths = {k: s[axis] for k, s in shapes.items() if -len(s) <= axis < len(s)}
        good = {k for k, length in lengths.items() if length == size}
        return _without(self.backend.leaf_paths(out), out, good or set(lengths))

    # --- the whole output

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
        constants = self._constants
        count = len(outs) + len(constants)
        leaves = [constants[k] if k in constants else next(left) for k in range(count)]
        return self.backend.unflatten(self._treedef, leaves)


def _rest(shape: Sequence[int], axis: int) -> list[int]:
    """A shape without the joined axis."""
    rest = list(shape)
    if -len(rest) <= axis < len(rest):
        del rest[axis]
    return rest


def _grows(rest: list[int], size: int, first: list[int], of_first: int) -> bool:
    """Whether another axis than the joined one grows with the number of examples."""
    pairs = zip(rest, first, strict=False)
    return len(rest) != len(first) or any(a != b and a * of_first == b * size for a, b in pairs)


def _follows(lengths: list[tuple[int, int]], by_data: bool) -> bool:
    """Whether lengths are proportional to numbers of examples, given as pairs (number, length)."""
    size, length = lengths[0]
    if all(n * size == length * m for m, n in lengths):
        return True
    return by_data and len({n for _, n in lengths}) > 1  # a constant length is not by data


def _without(paths: list[str], out: Any, good: set[int]) -> str:
    """Advice for messages: to return the `good` leaves, which can be joined."""
    heads: dict[str, list[int]] = {}  # the leaves below each part of the output
    for k, path in enumerate(paths):
        step = _STEP.match(path)
        heads.setdefault(step[0] if step else path, []).append(k)
    parts: list[str] = []
    for head, below in heads.items():
        parts += [head] if good.issuperset(below) else [paths[k] for k in below if k in good]
    chosen = f"({', '.join(f'out{part}' for part in parts)})"
    if isinstance(out, tuple | list) and parts == [f"[{k}]" for k in range(len(parts))]:
        chosen = f"out[:{len(parts)}]"
    if len(parts) == 1:
        chosen = f"out{parts[0]}"
    if not parts or len(paths) == 1:
        return ""
    return f" To leave it out, wrap f so that it returns {chosen}."


def _axes_of(backend: Backend, axes: Any, out: Any) -> list[int]:
    if isinstance(axes, int) and not isinstance(axes, bool):
        return [axes] * len(backend.flatten(out)[0])
    if type(axes) is type(out) and type(out) in (tuple, list, dict) and len(axes) == len(out):
        if type(out) is dict:
            if axes.keys() == out.keys():  # in the order of the dict's leaves
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


def other_structure(what: str, treedef: Any, known: Any, number: int) -> GradtoolsError:
    """The error of an output or carry with another structure than in the chunks before."""
    origin = "of the carry passed to f" if what == "carry" else "of the other chunks"
    return GradtoolsError(
        f"chunked: f's {what} at chunk {number} has the structure {in_words(treedef)}; expected "
        f"{in_words(known)}, that {origin}. Return the same structure for every chunk."
    )
