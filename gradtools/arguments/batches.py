"""Represents batches of arguments: each leaf is split along an axis, or shared by all examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradtools.arguments.in_axes import Argument
from gradtools.arguments.wording import in_words
from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A leaf of an argument, and the axis along which the leaf is split."""

    value: Any  # An array or any other object.
    axis: Any  # The axis along which the leaf is split; None if it is shared.
    is_array: bool
    place: int  # The leaf's index in the argument.


@dataclass(frozen=True, slots=True, eq=False)
class FlatArgument:
    """An argument with its leaves and tree structure."""

    argument: Argument
    treedef: Any  # the tree structure; None if the argument is a single array
    leaves: list[Leaf]
    is_list: bool  # whether the argument is a list of examples; each chunk receives a slice


Place = tuple[FlatArgument, Leaf | None]  # a split leaf; None if the argument is a list


class Batch:
    """The arguments of a call, and the axis along which each leaf is split (None if shared).

    If `lists` is true, a list that is split is a list of examples. Scalars are shared unless
    the user named an axis for them.
    """

    def __init__(
        self,
        backend: Backend,
        caller: str,
        arguments: Sequence[Argument],
        lists: bool = False,
    ) -> None:
        self.backend, self.caller = backend, caller
        self.arguments = [self._flat(a, lists, True) for a in arguments]
        self.size, self._counted = self._checked_size()

    @classmethod
    def whole(cls, backend: Backend, caller: str, args: Sequence[Any], kwargs: Any) -> Batch:
        """Makes a batch in which no argument is split."""
        batch = cls.__new__(cls)
        batch.backend, batch.caller, batch.size = backend, caller, 1
        pairs = *enumerate(args), *kwargs.items()
        batch.arguments = [batch._flat(Argument(key, x), False, False) for key, x in pairs]
        return batch

    @property
    def args(self) -> tuple[list[Any], dict[str, Any]]:
        """The values of the positional arguments and of the keyword arguments."""
        values = [flat.argument.value for flat in self.arguments]
        count = len(values) - len(self.keywords)
        return values[:count], dict(zip(self.keywords, values[count:], strict=True))

    @property
    def keywords(self) -> list[str]:
        """The names of the keyword arguments, which follow the positional arguments."""
        keys = [flat.argument.key for flat in self.arguments]
        return [key for key in keys if isinstance(key, str)]

    # --- reading

    def _flat(self, argument: Argument, lists: bool, converts: bool) -> FlatArgument:
        """Flattens an argument; if `converts` is true, NumPy arrays become framework arrays."""
        x, backend = argument.value, self.backend
        values, treedef, kinds = [x], None, ["array"]  # the common case, an array
        if type(x) is not backend.array_type and not backend.is_array(x):
            values, treedef, kinds = backend.flatten_arrays(x)
        are_arrays = [kind is not None for kind in kinds]
        for k, value in enumerate(values if converts else ()):
            if isinstance(value, np.ndarray):
                values[k], are_arrays[k] = backend.asarray(value), True
        is_list = lists and type(x) is list and isinstance(argument.axes, int)
        axes: list[Any] = [None] * len(values)
        if not is_list and argument.axes is not None:
            if isinstance(argument.axes, int):
                least = 0 if argument.named else 1  # the minimal rank of an array that is split
                pairs = zip(values, are_arrays, strict=True)
                axes = [argument.axes if a and _rank(x) >= least else None for x, a in pairs]
            elif treedef is None:
                axes = [argument.axes]
            else:
                try:
                    axes = treedef.flatten_up_to(argument.axes)
                except (ValueError, TypeError) as error:
                    raise GradtoolsError(
                        f"{self.caller}: in_axes[{argument.key!r}] is {argument.axes!r}; expected "
                        "an integer, None, or a tree of these values with the structure of "
                        f"{argument.name}, {in_words(treedef)}."
                    ) from error
            axes = [  # a negative axis becomes nonnegative if the leaf has that axis
                axis + _rank(x) if type(axis) is int and -_rank(x) <= axis < 0 else axis
                for axis, x in zip(axes, values, strict=True)
            ]
        triples = zip(values, axes, are_arrays, strict=True)
        leaves = [Leaf(*triple, place) for place, triple in enumerate(triples)]
        return FlatArgument(argument, treedef, leaves, is_list)

    def _checked_size(self) -> tuple[int, tuple[int, Leaf | None]]:
        """Returns `(size, (i, leaf))`: the size of the split axes, and a split leaf of argument i.

        leaf is None if argument i is a list of examples. Raises an error if the sizes differ.
        """
        places: dict[int, list[Place]] = {}
        for flat in self.arguments:
            if flat.is_list:
                if flat.argument.axes not in (0, -1):
                    raise GradtoolsError(
                        f"{self.caller}: {flat.argument.name} is a list of examples, which has "
                        f"only the axis 0; in_axes is {flat.argument.axes}, expected 0."
                    )
                if _are_fields(flat.argument.value):
                    raise GradtoolsError(
                        f"{self.caller}: {flat.argument.name} is a list of arrays of equal length "
                        "but different dtypes or numbers of axes, such as a batch [x, y] of a "
                        "DataLoader. A list is treated as a list of examples; pass tuple(batch), "
                        "whose arrays are split along axis 0."
                    )
                places.setdefault(len(flat.argument.value), []).append((flat, None))
            for leaf in flat.leaves:
                if leaf.axis is not None:
                    size = self._size(flat, leaf, leaf.axis)
                    places.setdefault(size, []).append((flat, leaf))
        if not places:
            for flat in self.arguments:
                for leaf in flat.leaves:
                    if isinstance(flat.argument.axes, int) and leaf.is_array:
                        self._size(flat, leaf, flat.argument.axes)  # raises an error for a scalar
            shared = ""
            if self.caller in ("microbatched_value_and_grad", "per_example_grad"):
                shared = (
                    " The arguments in argnums are not split: argnums selects the parameters or "
                    "the module, not the batch."
                )
            raise GradtoolsError(
                f"{self.caller}: no argument is split, so there are no examples. Pass the batch as "
                f"an array, and name its axis in in_axes.{shared}"
            )
        if len(places) > 1:
            listed = ", ".join(f"{n} in {self._name_of(*at[0])}" for n, at in places.items())
            labels = [flat.argument.label for at in places.values() for flat, _ in at]
            hint = " weights need one entry for each example of the batch." * ("weights" in labels)
            for flat, leaf in places.get(2, []):  # an old-style key consists of two uint32 words
                is_words = leaf and self.backend.dtype_name(leaf.value) == "uint32"
                if is_words and self.caller != "per_example_grad":
                    hint += f" If {flat.argument.name} is a random key, name it in key_argnums."
            raise GradtoolsError(
                f"{self.caller}: the batch sizes differ: {listed}. Set in_axes so that every split "
                f"axis has one entry for each example; None shares an argument.{hint}"
            )
        # `chunked` accepts an empty array; f and the chunked function then return empty outputs.
        if 0 in places and (self.caller != "chunked" or places[0][0][0].is_list):
            name = self._name_of(*places[0][0])
            raise GradtoolsError(
                f"{self.caller}: the batch is empty ({name} has size 0). Pass at least one example."
            )
        [(size, [(flat, leaf), *_])] = places.items()
        # Compares by identity, since dynamo cannot compare dataclasses.
        at = next(i for i, each in enumerate(self.arguments) if each is flat)
        return size, (at, leaf)

    def _size(self, flat: FlatArgument, leaf: Leaf, axis: Any) -> int:
        name = partial(self._name_of, flat, leaf)
        share = "Set the argument's entry of in_axes to None to share the argument."
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise GradtoolsError(
                f"{self.caller}: the entry of in_axes for {name()} is {axis!r}; expected an "
                "integer or None."
            )
        if not leaf.is_array:
            raise GradtoolsError(
                f"{self.caller}: {name()} is a {type(leaf.value).__name__}, which has no axis to "
                f"split on. {share}"
            )
        if not 0 <= axis < len(leaf.value.shape):
            raise GradtoolsError(
                f"{self.caller}: {name()} of shape {tuple(leaf.value.shape)} has no axis {axis} "
                f"to split on. {share}"
            )
        return leaf.value.shape[axis]

    def _name_of(self, flat: FlatArgument, leaf: Leaf | None) -> str:
        """Returns the name of an argument's leaf, or of a list of examples, for messages."""
        value, name = flat.argument.value, flat.argument.name
        if leaf is None:
            return f"the list {name}"
        return name + self.backend.leaf_paths(value)[leaf.place]

    # --- parts of the batch

    def size_of(self, values: Sequence[Any]) -> int:
        """Returns the number of examples in part of a batch, given the arguments' values."""
        i, leaf = self._counted
        if leaf is None:
            return len(values[i])
        return self.backend.flatten(values[i])[0][leaf.place].shape[leaf.axis]

    def map(self, one: Callable[..., Any], chunk_size: int | None) -> Any:
        """Calls `one(args, kwargs)` for each example, and stacks the results."""
        backend = self.backend
        batch = [axis_moved(backend, x, axis, 0) for x, axis in self.split]
        treedef: list[Any] = []

        def on_flat(*example: Array) -> list[Array]:
            leaves, out_def = backend.flatten(one(*self.at(example)))
            treedef[:] = [out_def]
            return leaves

        stacked = backend.map_batches(on_flat, batch, chunk_size)
        return backend.unflatten(treedef[0], stacked)

    @property
    def split(self) -> list[tuple[Array, int]]:
        """The leaves that are split, with their axes."""
        leaves = [leaf for flat in self.arguments for leaf in flat.leaves]
        return [(leaf.value, leaf.axis) for leaf in leaves if leaf.axis is not None]

    def at(self, example: Sequence[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns `(args, kwargs)` with an example's arrays in place of the split leaves."""
        left: Iterator[Array] = iter(example)
        values = []
        for flat in self.arguments:
            full = [x.value if x.axis is None else next(left) for x in flat.leaves]
            one_array = flat.treedef is None
            values.append(full[0] if one_array else self.backend.unflatten(flat.treedef, full))
        count = len(values) - len(self.keywords)
        return tuple(values[:count]), dict(zip(self.keywords, values[count:], strict=True))


def axis_moved(backend: Backend, x: Array, source: int, target: int) -> Array:
    """Moves one axis of x by a permutation; PyTorch's moveaxis does not support nested vmap."""
    source, target = source % x.ndim, target % x.ndim
    order = [i for i in range(x.ndim) if i != source]
    order.insert(target, source)
    return backend.xp.permute_dims(x, tuple(order))


def _are_fields(xs: list[Any]) -> bool:
    """Returns whether a list contains the fields of a batch, such as `[x, y]`, not examples."""
    if any(_rank(x) == 0 or x.shape[0] != xs[0].shape[0] for x in xs):
        return False
    return any(_rank(x) != _rank(xs[0]) or x.dtype != xs[0].dtype for x in xs)


def _rank(x: Any) -> int:
    return len(getattr(x, "shape", ()))
