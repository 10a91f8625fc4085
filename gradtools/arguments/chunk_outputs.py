"""Checks the outputs of the chunks, and builds the output of the whole batch.

Outputs are concatenated along the axis of examples, so each output array must have one entry for
each example.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from gradtools.arguments.wording import describe, in_words, is_numeric
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError
from gradtools.integrations.containers import is_same

if TYPE_CHECKING:
    from gradtools.arguments.chunks import Partition

SUMMED = object()  # out_axes of outputs that are summed, not concatenated
_BY_IDENTITY: tuple[Any, ...] = (None, object.__hash__)
_UNKNOWN = object()  # the structure before the first output


class Outputs:
    """The structure and constants of f's output, which must be equal for all chunks."""

    def __init__(
        self, backend: Backend, caller: str, out_axes: Any, cut: Partition, of_lists: bool
    ) -> None:
        self.backend, self.caller, self.cut = backend, caller, cut
        # The axis along which each array is concatenated. None before f was called, if outputs are
        # summed, or if f maps a list of examples to a list.
        self.axes: list[int] | None = None
        self._out_axes, self._of_lists = out_axes, of_lists
        self._treedef: Any = _UNKNOWN  # None if the output is a single array.
        self._constants: dict[int, Any] = {}  # The leaves that are not arrays, by index.
        self._rests: list[list[int]] = []  # The first chunk's shapes, without the axes in `axes`.
        # For each chunk, the pair (treedef, number of leaves) of each list item.
        self._lists: list[list[Any]] = [[] for _ in cut.rows]

    def same_as(self, number: int, others: range) -> None:
        """Copies the structures of the list items of chunk `number` to the chunks `others`."""
        for other in others:
            self._lists[other] = self._lists[number]

    def arrays_in(self, number: int, out: Any) -> list[Array]:
        """Returns the arrays in the output of chunk `number`.

        Raises an error if the output differs in structure from the output of an earlier chunk.
        """
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
        elif not is_same(treedef, self._treedef):
            array = backend.flatten(backend.asarray(0.0))[1]
            now, known = (array if t is None else t for t in (treedef, self._treedef))
            ordered, now = backend.flatten_like(known, out)
            if not is_same(now, known):
                raise other_structure("output", now, known, number)
            return self.arrays_in(number, backend.unflatten(known, ordered))
        if self._out_axes is SUMMED:
            for k, leaf in enumerate(leaves):
                # checkpoint passes non-arrays through
                if self.caller != "checkpoint" and not is_numeric(backend, leaf):
                    raise GradtoolsError(
                        f"{self.caller}: the function returned {describe(backend, leaf)} at "
                        f"output{backend.leaf_paths(out)[k]}, expected an array. Return arrays."
                    )
            return leaves
        if self.axes is None:
            self.axes = self._axes_of_arrays(leaves, kinds, out)
        arrays: list[Array] = []
        for k, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
            if kind is None:
                self._note_constant(leaf, out, k, number)
            else:
                self._check_rows(leaf, out, k, len(arrays), number)
                arrays.append(leaf)
        return arrays

    def _check_rows(self, leaf: Array, out: Any, k: int, place: int, number: int) -> None:
        """Raises an error if the array `leaf` does not have one entry for each example."""
        assert self.axes is not None
        axis, shape, size = self.axes[place], list(leaf.shape), self.cut.sizes[number]
        path = self.backend.leaf_paths(out)[k] if self._treedef is not None else ""
        there = -len(shape) <= axis < len(shape)
        has = f"length {shape[axis]} on axis {axis}" if there else f"shape {tuple(shape)}"
        if not there and axis not in (0, -1):
            raise GradtoolsError(
                f"chunked: f's output{path} has {has}, so it has no axis {axis}, which out_axes "
                "names. out_axes is the axis of f's output with one entry per example."
            )
        if not there or (shape.pop(axis) != size and self.cut.count != 1):
            raise GradtoolsError(
                f"chunked: f's output{path} has {has} for {size} examples; an output "
                "must have one entry per example. For a mean or a sum over examples use "
                "microbatched_value_and_grad. Pass state from chunk to chunk, such as batch "
                "statistics, in an argument that is in carry_argnums. Otherwise wrap f and "
                "omit this output."
            )
        if place == len(self._rests):
            self._rests.append(shape)
        elif shape != self._rests[place]:
            raise GradtoolsError(
                f"chunked: f's output{path} has shape {tuple(leaf.shape)} for {size} examples, and "
                f"{self._rests[place]} on its other axes in earlier chunks; the outputs of the "
                f"chunks cannot be concatenated along axis {axis}. Only the length of this axis "
                "may depend on the size of a chunk."
            )

    def _axes_of_arrays(self, leaves: list[Any], kinds: list[Any], out: Any) -> list[int]:
        if leaves and kinds.count(None) == len(kinds):
            path = self.backend.leaf_paths(out)[0]
            raise GradtoolsError(
                f"chunked: f's output{path} is {describe(self.backend, leaves[0])}; expected an "
                "array with an entry for each example. If the object contains an array, return "
                "the array."
            )
        axes = [self._out_axes] * len(leaves)
        if type(self._out_axes) is not int:
            axes = _axes_of(self.backend, self._out_axes, out)
        return [*compress(axes, kinds)]  # the axes of arrays only

    def _note_constant(self, leaf: Any, out: Any, k: int, number: int) -> None:
        """Stores a non-array leaf; raises an error if the leaf is not equal for all chunks."""
        known = self._constants.setdefault(k, leaf)
        same = known is leaf or known == leaf or (known != known and leaf != leaf)  # two NaNs
        counts = type(leaf) is int and leaf == self.cut.sizes[number] and self.cut.count != 1
        if counts or type(leaf).__hash__ in _BY_IDENTITY or not bool(same):
            came = "the number of the chunk's examples" if counts else repr(leaf)
            came = came if same else f"{leaf!r} for chunk {number} and {known!r} for the first"
            raise GradtoolsError(
                f"chunked: f's output{self.backend.leaf_paths(out)[k]} is {came}; a non-array "
                "output must be the same for all chunks. Return an array with an entry for each "
                "example, or wrap f and omit this output."
            )

    # --- the whole output

    def tree(self, outs: list[Array]) -> Any:
        """Builds the output for the whole batch; concatenates the lists of the chunks."""
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


def _axes_of(backend: Backend, axes: Any, out: Any) -> list[int]:
    if isinstance(axes, int) and not isinstance(axes, bool):
        return [axes] * len(backend.flatten(out)[0])
    if type(axes) is type(out) and type(out) in (tuple, list) and len(axes) == len(out):
        pairs = zip(axes, out, strict=True)
        return [a for one, part in pairs for a in _axes_of(backend, one, part)]
    if isinstance(out, Mapping) and type(axes) is dict and axes.keys() == out.keys():
        keys = out  # keys in the order of the leaves
        if type(out) is dict:
            keys = backend.flatten({key: key for key in out})[0]
        return [a for key in keys for a in _axes_of(backend, axes[key], out[key])]
    raise GradtoolsError(
        f"chunked: out_axes is {axes!r} for {describe(backend, out)}; expected an integer, or "
        "a tree of integers like f's output. An output that is the same for all chunks, or has no "
        "axis for examples, cannot be concatenated."
    )


def other_structure(what: str, treedef: Any, known: Any, number: int) -> GradtoolsError:
    """Returns the error for an output or carry whose structure differs from earlier chunks."""
    origin = "the carry passed to f" if what == "carry" else "the outputs of the other chunks"
    return GradtoolsError(
        f"chunked: f's {what} for chunk {number} has the structure {in_words(treedef)}; expected "
        f"{in_words(known)}, like {origin}. Return the same structure for every chunk."
    )
