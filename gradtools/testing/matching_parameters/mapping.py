"""Defines `ParameterMapping`, the pairs of parameters of a torch.nn model and its JAX port.

The linear map of each pair converts arrays, gradients and tangents from PyTorch to JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.sides import library, nested
from gradtools.testing.matching_parameters.parameter_names import (
    STATISTICS,
    Path,
    as_numpy,
    joined,
    not_parameters,
    path_of,
    read_torch,
    without_collection,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Converts a PyTorch array to JAX's layout by permuting, reversing and reshaping its axes.

    Attributes:
        name: A short name for messages, such as "linear".
        axes: The permutation of the axes. If None, the axes are not permuted.
        reversed_axes: The axes that are reversed after the permutation.
        shape: The shape to which the array is finally reshaped. If None, the array is not reshaped.
        rows: The range (start, stop) of rows of PyTorch's array that are converted. If None, all
            rows are converted.
    """

    name: str
    axes: tuple[int, ...] | None = None
    reversed_axes: tuple[int, ...] = ()
    shape: Shape | None = None
    rows: tuple[int, int] | None = None

    def to_jax(self, x: np.ndarray) -> np.ndarray:
        """Converts PyTorch's array to JAX's layout."""
        given = as_numpy(x)
        x = given if self.rows is None else given[slice(*self.rows)]
        try:
            x = x if self.axes is None else x.transpose(self.axes)
            x = np.flip(x, self.reversed_axes) if self.reversed_axes else x
            return np.asarray(x if self.shape is None else x.reshape(self.shape), order="C")
        except ValueError as error:
            raise GradtoolsError(
                f"Layout.to_jax: {self} does not fit an array of shape {given.shape}: {error}."
            ) from error


@dataclass(frozen=True)
class ParameterPair:
    """A pair of parameters: PyTorch's name, JAX's path, the layout, and PyTorch's shape.

    `added` names a second parameter of PyTorch, of the same shape, whose rows `added_rows` are
    added to the first parameter: a recurrent layer has two biases in PyTorch and their sum in JAX.
    The gradient with respect to the sum equals the gradient with respect to each parameter.
    """

    torch_name: str
    jax_path: Path
    layout: Layout
    torch_shape: Shape
    added: str = ""
    added_rows: tuple[int, int] = (0, 0)

    def to_jax(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Builds the JAX parameter from a dictionary of PyTorch's parameters."""
        x = arrays[self.torch_name]
        if self.added:
            x, rows = x.copy(), slice(*self.added_rows)
            x[rows] += arrays[self.added][rows]
        return self.layout.to_jax(x)

    def __str__(self) -> str:
        source = self.torch_name + (f" + {self.added}" if self.added else "")
        return f"{source} -> {'/'.join(map(str, self.jax_path))} ({self.layout.name})"


@dataclass(frozen=True)
class ParameterMapping:
    """The pairs of two models' parameters, and the conversion of PyTorch's arrays to JAX's layout.

    Attributes:
        entries: The pairs of parameters.
        left_out: Parameters and buffers without a counterpart, with reasons.
        notes: Notes on pairs that were matched by order rather than by name.
        source: The PyTorch arrays from which the mapping was made.
    """

    entries: tuple[ParameterPair, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def to_jax(self, torch_params: Any) -> dict[Any, Any]:
        """Converts PyTorch's arrays to JAX's names and layout.

        Args:
            torch_params: A `torch.nn.Module`, or a dictionary from names to arrays, such as a
                state_dict or gradients keyed by name; names that are missing from the argument are
                also missing from the result.

        Returns:
            Nested dictionaries of NumPy arrays with the structure of the JAX parameters:
            flax.linen's new variables, or the argument of `nnx.update`.

        Raises:
            GradtoolsError: A name in `torch_params` is not in this mapping, or a shape differs.
        """
        arrays = read_torch("to_jax", torch_params)
        if unknown := [name for name in arrays if name not in self.source]:
            raise GradtoolsError(
                f"to_jax: the mapping does not contain {', '.join(unknown[:8])}; its names "
                f"begin with {', '.join([*self.source][:4])}. Make the mapping from these models."
            )
        flat: dict[Path, np.ndarray] = {}
        for e in self.entries:
            if e.torch_name in arrays:
                for name in filter(None, (e.torch_name, e.added)):
                    x = arrays.get(name, np.asarray(None))
                    if x.shape != e.torch_shape:
                        came = f"is {x}" if x.dtype == object else f"has shape {x.shape}"
                        raise GradtoolsError(
                            f"to_jax: {name} {came}; expected an array of shape {e.torch_shape} "
                            f"for {e}. Names without arrays may be omitted."
                        )
                flat[e.jax_path] = e.to_jax(arrays)
        return nested(flat)

    def into(self, module: Any) -> Any:
        """Returns a copy of the JAX model with the PyTorch weights of this mapping.

        Args:
            module: An `equinox.Module`, an `nnx.Module`, or flax.linen's variables.

        Returns:
            A new model of the same type, whose arrays have the dtypes of `module`.

        Raises:
            GradtoolsError: An array of this mapping is absent or has another shape in `module`.

        Example:
            >>> import equinox as eqx, jax, torch
            >>> from gradtools.testing import match_parameters
            >>> mine, port = torch.nn.Linear(3, 2), eqx.nn.Linear(3, 2, key=jax.random.key(0))
            >>> port = match_parameters(mine, port).into(port)
            >>> bool((port.bias == mine.bias.detach().numpy()).all())
            True
        """
        import jax

        if library(module) in ("torch.nn", "flax.linen"):
            raise not_parameters("into", "JAX", module)
        if library(module) == "flax.nnx":
            from flax import nnx

            graph, state = nnx.split(module)
            return nnx.merge(graph, self.into(state))
        name = lambda path: joined(without_collection(path))
        arrays = {name(e.jax_path): e.to_jax(self.source) for e in self.entries}
        leaves = {name(path_of(p)): x for p, x in jax.tree_util.tree_leaves_with_path(module)}
        for e in self.entries:
            path, leaf = name(e.jax_path), leaves.get(name(e.jax_path))
            shape = getattr(leaf, "shape", "no such array")
            is_optional = leaf is None and e.torch_name.endswith(STATISTICS)
            if arrays[path].shape != shape and not is_optional:
                raise GradtoolsError(
                    f"into: {path} has shape {arrays[path].shape} in the mapping; this model has "
                    f"{shape}. Make the mapping from this model."
                )

        def replaced(path: Any, leaf: Any) -> Any:
            x = arrays.get(name(path_of(path)))
            return leaf if x is None else jax.numpy.asarray(x, leaf.dtype)

        return jax.tree_util.tree_map_with_path(replaced, module)

    def __str__(self) -> str:
        lines = [str(e) for e in self.entries]
        return "\n".join([*lines, *(f"left out: {r}" for r in self.left_out), *self.notes])
