"""A batch of arguments, split into what its examples share and what each has of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradtools.arguments.in_axes import Argument
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError


class Batch:
    """Arguments with the axis on which each leaf is split; None where it is shared.

    An argument that is a list, and is to be split, is a list of examples, if `lists` says so.
    Arrays without axes are shared unless the user named an axis of theirs.
    """

    leaves: list[list[Any]]
    treedefs: list[Any]  # None for an argument that is one array
    is_array: list[list[bool]]
    lists: list[int]
    axes: list[list[Any]]
    size: int

    def __init__(
        self, backend: Backend, caller: str, arguments: Sequence[Argument], lists: bool = False
    ) -> None:
        self._read(backend, caller, arguments)
        self.lists = [
            i
            for i, a in enumerate(arguments)
            if lists and type(a.value) is list and isinstance(a.axes, int)
        ]
        for leaves, is_array in zip(self.leaves, self.is_array, strict=True):
            for k, leaf in enumerate(leaves):  # NumPy's are split as well, what is none is shared
                if isinstance(leaf, np.ndarray):
                    leaves[k], is_array[k] = backend.asarray(leaf), True
        self.axes = [
            [None] * len(leaves) if i in self.lists else self._leaf_axes(i, leaves)
            for i, leaves in enumerate(self.leaves)
        ]
        self.size = self._checked_size()

    @classmethod
    def whole(cls, backend: Backend, caller: str, args: Sequence[Any], kwargs: Any) -> Batch:
        """Arguments of which nothing is split."""
        batch = cls.__new__(cls)
        shared = [Argument(key, x) for key, x in (*enumerate(args), *kwargs.items())]
        batch._read(backend, caller, shared)
        batch.lists, batch.size = [], 1
        batch.axes = [[None] * len(leaves) for leaves in batch.leaves]
        return batch

    def _read(self, backend: Backend, caller: str, arguments: Sequence[Argument]) -> None:
        self.backend, self.caller, self.arguments = backend, caller, arguments
        self.args = tuple([a.value for a in arguments])
        self.keywords = [a.key for a in arguments if isinstance(a.key, str)]
        self.treedefs, self.leaves, self.is_array = [], [], []
        for x in self.args:
            leaves, treedef, kinds = [x], None, ["array"]  # mostly
            if type(x) is not backend.array_type and not backend.is_array(x):
                leaves, treedef, kinds = backend.flatten_arrays(x)
            self.treedefs.append(treedef)
            self.leaves.append(leaves)
            self.is_array.append([kind is not None for kind in kinds])

    def parted(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """One value for each argument as what `f(*args, **kwargs)` takes."""
        if not self.keywords:
            return tuple(values), {}
        count = len(values) - len(self.keywords)
        return tuple(values[:count]), dict(zip(self.keywords, values[count:], strict=True))

    def _leaf_axes(self, i: int, leaves: list[Any]) -> list[int | None]:
        argument = self.arguments[i]
        axes = argument.axes
        if axes is None or isinstance(axes, int):
            least = 0 if argument.named else 1  # axes that an array must have to be split
            pairs = zip(leaves, self.is_array[i], strict=True)
            result = [axes if there and _rank(leaf) >= least else None for leaf, there in pairs]
        elif self.treedefs[i] is None:
            result = [axes]
        else:
            try:
                result = self.treedefs[i].flatten_up_to(axes)
            except (ValueError, TypeError) as error:
                raise GradtoolsError(
                    f"{self.caller}: in_axes[{argument.key!r}] is {axes!r}; expected an integer, "
                    f"None, or a tree of them like {argument.name}, {self.treedefs[i]}."
                ) from error
        return [
            axis + len(leaf.shape) if type(axis) is int and -_rank(leaf) <= axis < 0 else axis
            for axis, leaf in zip(result, leaves, strict=True)
        ]

    def _checked_size(self) -> int:
        """How many examples there are, the same in every split axis."""
        places: dict[int, list[tuple[int, int | None]]] = {}  # argument, leaf; a list has none
        for i in self.lists:
            argument = self.arguments[i]
            if argument.axes not in (0, -1):
                raise GradtoolsError(
                    f"{self.caller}: {argument.name} is a list of examples, which has only the "
                    f"axis 0; in_axes says {argument.axes}."
                )
            places.setdefault(len(self.args[i]), []).append((i, None))
        for i, (leaves, axes) in enumerate(zip(self.leaves, self.axes, strict=True)):
            for k, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
                if axis is not None:
                    places.setdefault(self._size(i, k, leaf, axis), []).append((i, k))
        if not places:
            self._refuse_numbers()
            raise GradtoolsError(
                f"{self.caller}: no argument is split, so there are no examples. Pass the batch "
                "as an array, and name its axis in in_axes."
            )
        if len(places) > 1:
            self._refuse_sizes(places)
        if 0 in places:
            name = self.name_of(*places[0][0])
            raise GradtoolsError(f"{self.caller}: the batch is empty ({name} has size 0).")
        [(size, [self._counted, *_])] = places.items()
        return size

    def _refuse_numbers(self) -> None:
        """Names an array without axes that was to be split, if there is one."""
        for i, (argument, leaves) in enumerate(zip(self.arguments, self.leaves, strict=True)):
            for k, leaf in enumerate(leaves):
                if isinstance(argument.axes, int) and self.is_array[i][k]:
                    self._size(i, k, leaf, argument.axes)

    def _refuse_sizes(self, places: dict[int, list[tuple[int, int | None]]]) -> None:
        result = ", ".join(f"{n} in {self.name_of(*of_size[0])}" for n, of_size in places.items())
        i, _ = min(reversed(places.values()), key=len)[0]
        odd = self.arguments[i].key
        how = f": in_axes={{{odd!r}: None}}" if isinstance(odd, str) else ""
        raise GradtoolsError(
            f"{self.caller}: the batch sizes differ: {result}. Set in_axes so that every split "
            f"axis has one entry for each example; None shares an argument{how}."
        )

    def _size(self, i: int, k: int, leaf: Any, axis: Any) -> int:
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise GradtoolsError(
                f"{self.caller}: the entry of in_axes for {self.name_of(i, k)} is {axis!r}; "
                "expected an integer or None."
            )
        if not self.is_array[i][k]:
            raise GradtoolsError(
                f"{self.caller}: {self.name_of(i, k)} is a {type(leaf).__name__}, which has no "
                "axis to split on. Set its entry of in_axes to None to share it."
            )
        if not 0 <= axis < len(leaf.shape):
            raise GradtoolsError(
                f"{self.caller}: {self.name_of(i, k)} of shape {tuple(leaf.shape)} has no axis "
                f"{axis} to split on. Set its entry of in_axes to None to share it."
            )
        return leaf.shape[axis]

    def size_of(self, values: Sequence[Any]) -> int:
        """How many examples a part of the batch has: one value for each argument."""
        i, k = self._counted
        if k is None:
            return len(values[i])
        return self.backend.flatten(values[i])[0][k].shape[self.axes[i][k]]

    def name_of(self, i: int, k: int | None) -> str:
        """What leaf k of argument i is called in messages, or a list of examples."""
        path = ", a list" if k is None else self.backend.leaf_paths(self.args[i])[k]
        return f"{self.arguments[i].name}{path}"

    def map(self, one: Callable[..., Any], chunk_size: int | None) -> Any:
        """`one(args, kwargs)` at each example, stacked."""
        backend = self.backend
        batch = [axis_moved(backend, x, axis, 0) for x, axis in self.split]
        treedef: list[Any] = []

        def on_flat(*example: Array) -> list[Array]:
            leaves, result = backend.flatten(one(*self.at(example)))
            treedef[:] = [result]
            return leaves

        result = backend.map_batches(on_flat, batch, chunk_size)
        return backend.unflatten(treedef[0], result)

    @property
    def split(self) -> list[tuple[Array, int]]:
        """The leaves that are split, with their axes."""
        pairs = zip(self.leaves, self.axes, strict=True)
        flat = [pair for leaves, axes in pairs for pair in zip(leaves, axes, strict=True)]
        return [(leaf, axis) for leaf, axis in flat if axis is not None]

    def at(self, example: Sequence[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with an example's arrays in place of the leaves that are split."""
        left = iter(example)
        values = []
        for treedef, leaves, axes in zip(self.treedefs, self.leaves, self.axes, strict=True):
            pairs = zip(leaves, axes, strict=True)
            full = [leaf if axis is None else next(left) for leaf, axis in pairs]
            values.append(full[0] if treedef is None else self.backend.unflatten(treedef, full))
        return self.parted(values)


def axis_moved(backend: Backend, x: Array, source: int, target: int) -> Array:
    """x with one axis in another place; PyTorch's moveaxis has no rule under a second vmap."""
    source, target = source % x.ndim, target % x.ndim
    order = [i for i in range(x.ndim) if i != source]
    order.insert(target, source)
    return backend.xp.permute_dims(x, tuple(order))


def _rank(x: Any) -> int:
    return len(getattr(x, "shape", ()))
