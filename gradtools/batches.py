"""A batch of arguments, split into what its examples share and what each has of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError


class Batch:
    """The arguments of `per_example_grad`, split into what is shared and what is mapped."""

    def __init__(
        self, backend: Backend, args: Sequence[Any], argnums: tuple[int, ...], in_axes: Any
    ) -> None:
        self.backend = backend
        flat = [backend.flatten(a) for a in args]
        self.treedefs = [treedef for _, treedef in flat]
        self.leaves = [[self._as_array(leaf) for leaf in leaves] for leaves, _ in flat]
        self.axes = self._axes(args, argnums, in_axes)
        self._check_sizes(args)

    def _as_array(self, leaf: Any) -> Any:
        """NumPy's arrays are split as well; anything else that is no array is shared."""
        return self.backend.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf

    def _axes(self, args: Any, argnums: tuple[int, ...], in_axes: Any) -> list[list[int | None]]:
        if in_axes is None:
            in_axes = tuple(None if i in argnums else 0 for i in range(len(args)))
        if isinstance(in_axes, int):
            in_axes = (in_axes,) * len(args)
        if not isinstance(in_axes, tuple | list) or len(in_axes) != len(args):
            raise GradtoolsError(
                f"per_example_grad: in_axes is {in_axes!r}; expected one entry for each of the "
                f"{len(args)} positional arguments."
            )
        return [
            self._leaf_axes(i, axes, leaves)
            for i, (axes, leaves) in enumerate(zip(in_axes, self.leaves, strict=True))
        ]

    def _leaf_axes(self, i: int, axes: Any, leaves: list[Any]) -> list[int | None]:
        if axes is None or isinstance(axes, int):
            return [axes if self.backend.is_array(leaf) else None for leaf in leaves]
        try:
            return self.treedefs[i].flatten_up_to(axes)
        except (ValueError, TypeError) as error:
            raise GradtoolsError(
                f"per_example_grad: in_axes[{i}] is {axes!r}; expected an integer, None, or a "
                f"tree of them like argument {i}, {self.treedefs[i]}."
            ) from error

    def _check_sizes(self, args: Any) -> None:
        sizes: dict[int, str] = {}
        for i, (leaves, axes) in enumerate(zip(self.leaves, self.axes, strict=True)):
            paths = self.backend.leaf_paths(args[i])
            for leaf, axis, path in zip(leaves, axes, paths, strict=True):
                if axis is None:
                    continue
                if isinstance(axis, bool) or not isinstance(axis, int):
                    raise GradtoolsError(
                        f"per_example_grad: the entry of in_axes for argument {i}{path} is "
                        f"{axis!r}; expected an integer or None."
                    )
                if not self.backend.is_array(leaf):
                    raise GradtoolsError(
                        f"per_example_grad: argument {i}{path} is a {type(leaf).__name__}, which "
                        "has no axis to split on. Set its entry of in_axes to None to share it."
                    )
                if not -len(leaf.shape) <= axis < len(leaf.shape):
                    raise GradtoolsError(
                        f"per_example_grad: argument {i}{path} of shape {tuple(leaf.shape)} has "
                        f"no axis {axis} to split on. Set its entry of in_axes to None to share it."
                    )
                sizes.setdefault(leaf.shape[axis], f"argument {i}{path}")
        if not sizes:
            raise GradtoolsError(
                "per_example_grad: no argument is split, so there are no examples. Pass the batch "
                "in an argument outside argnums, or name its axis in in_axes."
            )
        if len(sizes) > 1:
            found = ", ".join(f"{size} in {name}" for size, name in sizes.items())
            raise GradtoolsError(
                f"per_example_grad: the batch sizes differ: {found}. Set in_axes so that every "
                "split axis has one entry for each example."
            )
        if 0 in sizes:
            raise GradtoolsError(f"per_example_grad: the batch is empty ({sizes[0]} has size 0).")

    def map(self, one: Callable[..., Any], chunk_size: int | None) -> Any:
        """`one` at each example, stacked."""
        backend = self.backend
        flat_axes = [a for axes in self.axes for a in axes]
        flat = [leaf for leaves in self.leaves for leaf in leaves]
        batch = [
            backend.xp.moveaxis(x, a, 0)
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
