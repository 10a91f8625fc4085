"""A batch of arguments, split into what its examples share and what each has of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError


class Batch:
    """Arguments with the axis on which each leaf is split; None where it is shared.

    An argument that is a list, and is to be split, is a list of examples, if `lists` says so.
    With `whole` nothing is split, whatever `in_axes` says.
    """

    def __init__(
        self,
        backend: Backend,
        asked: str,
        args: Sequence[Any],
        in_axes: Any,
        shared: Iterable[int] = (),
        lists: bool = False,
        whole: bool = False,
    ) -> None:
        self.backend, self.asked, self.args = backend, asked, tuple(args)
        self.whole = whole
        entries = [None] * len(args) if whole else self._entries(in_axes, set(shared))
        self.lists = [
            i
            for i, axis in enumerate(entries)
            if lists and type(args[i]) is list and isinstance(axis, int)
        ]
        flat = [backend.flatten(a) for a in args]
        self.treedefs = [treedef for _, treedef in flat]
        self.leaves = [[self._as_array(leaf) for leaf in leaves] for leaves, _ in flat]
        self.axes = [
            [None] * len(leaves) if whole or i in self.lists else self._leaf_axes(i, axes, leaves)
            for i, (axes, leaves) in enumerate(zip(entries, self.leaves, strict=True))
        ]
        self.size = 1 if whole else self._checked_size(entries)

    def _as_array(self, leaf: Any) -> Any:
        """NumPy's arrays are split as well; anything else that is no array is shared."""
        split = isinstance(leaf, np.ndarray) and not self.whole
        return self.backend.asarray(leaf) if split else leaf

    def _entries(self, in_axes: Any, shared: set[int]) -> list[Any]:
        """The entry of in_axes for each argument; None for those that are shared anyway."""
        count = len(self.args)
        if isinstance(in_axes, int):
            in_axes = (in_axes,) * count
        if not isinstance(in_axes, tuple | list) or len(in_axes) != count:
            raise GradtoolsError(
                f"{self.asked}: in_axes is {in_axes!r}; expected one entry for each of the "
                f"{count} positional arguments."
            )
        return [None if i in shared else axes for i, axes in enumerate(in_axes)]

    def _leaf_axes(self, i: int, axes: Any, leaves: list[Any]) -> list[int | None]:
        if axes is None or isinstance(axes, int):
            found = [axes if self.backend.is_array(leaf) else None for leaf in leaves]
        else:
            try:
                found = self.treedefs[i].flatten_up_to(axes)
            except (ValueError, TypeError) as error:
                raise GradtoolsError(
                    f"{self.asked}: in_axes[{i}] is {axes!r}; expected an integer, None, or a "
                    f"tree of them like argument {i}, {self.treedefs[i]}."
                ) from error
        return [
            axis + len(leaf.shape) if type(axis) is int and -_rank(leaf) <= axis < 0 else axis
            for axis, leaf in zip(found, leaves, strict=True)
        ]

    def _checked_size(self, entries: list[Any]) -> int:
        """How many examples there are, the same in every split axis."""
        sizes: dict[int, str] = {}
        for i in self.lists:
            if entries[i] not in (0, -1):
                raise GradtoolsError(
                    f"{self.asked}: argument {i} is a list of examples, which has only the axis 0; "
                    f"in_axes says {entries[i]}."
                )
            sizes.setdefault(len(self.args[i]), f"argument {i}, a list")
        for i, (leaves, axes) in enumerate(zip(self.leaves, self.axes, strict=True)):
            for k, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
                if axis is not None:
                    sizes.setdefault(self._size(i, k, leaf, axis), self._name(i, k))
        if not sizes:
            raise GradtoolsError(
                f"{self.asked}: no argument is split, so there are no examples. Pass the batch "
                "as an array, and name its axis in in_axes."
            )
        if len(sizes) > 1:
            found = ", ".join(f"{size} in {name}" for size, name in sizes.items())
            raise GradtoolsError(
                f"{self.asked}: the batch sizes differ: {found}. Set in_axes so that every "
                "split axis has one entry for each example; None shares an argument."
            )
        if 0 in sizes:
            raise GradtoolsError(f"{self.asked}: the batch is empty ({sizes[0]} has size 0).")
        return next(iter(sizes))

    def _size(self, i: int, k: int, leaf: Any, axis: Any) -> int:
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise GradtoolsError(
                f"{self.asked}: the entry of in_axes for {self._name(i, k)} is {axis!r}; expected "
                "an integer or None."
            )
        if not self.backend.is_array(leaf):
            raise GradtoolsError(
                f"{self.asked}: {self._name(i, k)} is a {type(leaf).__name__}, which has no axis "
                "to split on. Set its entry of in_axes to None to share it."
            )
        if not 0 <= axis < len(leaf.shape):
            raise GradtoolsError(
                f"{self.asked}: {self._name(i, k)} of shape {tuple(leaf.shape)} has no axis "
                f"{axis} to split on. Set its entry of in_axes to None to share it."
            )
        return leaf.shape[axis]

    def _name(self, i: int, k: int) -> str:
        return f"argument {i}{self.backend.leaf_paths(self.args[i])[k]}"

    def map(self, one: Callable[..., Any], chunk_size: int | None) -> Any:
        """`one` at each example, stacked."""
        backend = self.backend
        flat_axes = [a for axes in self.axes for a in axes]
        flat = [leaf for leaves in self.leaves for leaf in leaves]
        batch = [
            axis_moved(backend, x, a, 0)
            for x, a in zip(flat, flat_axes, strict=True)
            if a is not None
        ]
        treedef: list[Any] = []

        def on_flat(*example: Array) -> list[Array]:
            left = iter(example)
            full = [x if a is None else next(left) for x, a in zip(flat, flat_axes, strict=True)]
            leaves, found = backend.flatten(one(*self._arguments(full)))
            treedef[:] = [found]
            return leaves

        found = backend.map_batches(on_flat, batch, chunk_size)
        return backend.unflatten(treedef[0], found)

    def _arguments(self, flat: list[Any]) -> list[Any]:
        left = iter(flat)
        pairs = zip(self.treedefs, self.leaves, strict=True)
        return [self.backend.unflatten(t, [next(left) for _ in leaves]) for t, leaves in pairs]


def axis_moved(backend: Backend, x: Array, source: int, target: int) -> Array:
    """x with one axis in another place; PyTorch's moveaxis has no rule under a second vmap."""
    source, target = source % x.ndim, target % x.ndim
    order = [i for i in range(x.ndim) if i != source]
    order.insert(target, source)
    return backend.xp.permute_dims(x, tuple(order))


def shared_unless_named(argnums: Sequence[int], count: int) -> tuple[int | None, ...]:
    """in_axes by default: the arguments in argnums are shared, the others are split on axis 0."""
    return tuple(None if i in argnums else 0 for i in range(count))


def _rank(x: Any) -> int:
    return len(getattr(x, "shape", ()))
