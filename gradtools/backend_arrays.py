"""Defines how a backend represents arrays and pytrees, for the interface in `gradtools.backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.foreign_arrays import foreign_class, refuse_foreign
from gradtools.integrations.containers import is_same

Array = Any


class Arrays(ABC):
    """Backend members for arrays and pytrees: abstract methods, and defaults in terms of `xp`."""

    name: str  # "torch", "jax", or the module of another backend, which defines `_api`.
    package: str | None = None  # The package of the lazily imported submodules.

    def submodule(self, name: str, caller: str) -> Any:
        """Imports a submodule of the backend; error messages name the operator `caller`."""
        if self.package is None:
            raise GradtoolsError(
                f"{caller}: the backend {self.name!r} does not provide this operator."
            )
        return import_module(f"{self.package}.{name}")

    @property
    @abstractmethod
    def xp(self) -> Any:
        """A namespace of array functions with the names of the array-API standard."""

    # Pytrees. None is an empty tree.
    @abstractmethod
    def flatten(self, tree: Any) -> tuple[list[Any], Any]: ...
    @abstractmethod
    def unflatten(self, treedef: Any, leaves: Sequence[Any]) -> Any: ...
    @abstractmethod
    def leaf_paths(self, tree: Any) -> list[str]: ...

    def entries_of(self, treedef: Any, leaves: Sequence[Any]) -> list[tuple[list[Any], Any]]:
        """Splits a tuple's leaves and structure into the leaves and structures of its entries."""
        return [self.flatten(x) for x in self.unflatten(treedef, list(leaves))]

    def flatten_like(self, treedef: Any, tree: Any) -> tuple[list[Any], Any]:
        """Flattens a tree, with dict keys in the order of `treedef` if the keys are the same."""
        leaves, own = self.flatten(tree)
        if not is_same(own, treedef) and own.num_leaves == treedef.num_leaves:
            with suppress(ValueError, TypeError):  # raised for trees of different structures
                return self.flatten(self.unflatten(treedef, treedef.flatten_up_to(tree)))
        return leaves, own

    def flatten_arrays(self, tree: Any) -> tuple[list[Any], Any, list[str | None]]:
        """Returns the leaves, the structure, and the kind of each leaf.

        The kind is "real" or "complex" for floating and complex arrays, "exact" for integers and
        booleans, and None for non-arrays.
        """
        leaves, treedef = self.flatten(tree)
        return leaves, treedef, [self._kind(x) if self.is_array(x) else None for x in leaves]

    def _kind(self, x: Array) -> str:
        return "complex" if self.is_complex(x) else "real" if self.is_inexact(x) else "exact"

    def flatten_static(self, tree: Any) -> tuple[list[Any], Any]:
        """Returns the leaves, and the structure in a hashable form that dynamo can embed."""
        return self.flatten(tree)

    def treedef_of_static(self, structure: Any) -> Any:
        return structure

    def static_treedef(self, treedef: Any) -> Any:
        return treedef

    def unflatten_static(self, structure: Any, leaves: Sequence[Any]) -> Any:
        return self.unflatten(structure, leaves)

    def is_traced(self, x: Any) -> bool:
        """Returns whether x is a tracer of a transform that is still running."""
        return False

    def check_arrays(self, *trees: Any) -> None:
        """Raises an error if a tree contains an array of the other framework."""
        if foreign_class(self.name):
            for tree in trees:
                if type(tree) is not self.array_type:
                    self.flatten(tree)

    def check_array(self, x: Any, name: str) -> None:
        """Raises an error if x is an array of the other framework."""
        refuse_foreign(self.name, x, name)

    # Arrays.
    array_type: type | None = None
    """The most common class of arrays: if `type(x)` is this class, `is_array(x)` is not called."""

    @abstractmethod
    def is_array(self, x: Any, /) -> bool: ...
    @abstractmethod
    def asarray(self, x: Any, device_of: Array | None = None) -> Array:
        """Converts x to an array on the device of `device_of`; JAX ignores `device_of`."""

    @abstractmethod
    def to_numpy(self, x: Array) -> Any: ...
    @abstractmethod
    def stop_gradient(self, x: Array) -> Array: ...

    def number_on_host(self, x: Array) -> Any:
        """Returns the number in an array of shape (), or None if reading it might block or fail.

        The number is known if x is not traced and is stored in the host's memory.
        """
        return None

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype)

    def is_inexact(self, x: Array) -> bool:
        return self.dtype_name(x).startswith(("float", "bfloat", "complex"))

    def is_complex(self, x: Array) -> bool:
        return self.dtype_name(x).startswith("complex")

    def as_leaf(self, x: Any) -> Any:
        """Converts x to an array if x is a float, complex number or NumPy array; else returns x."""
        return self.asarray(x) if isinstance(x, (float, complex)) or hasattr(x, "dtype") else x

    def cast(self, x: Any, like: Array | str) -> Array:
        return self.asarray(x).astype(like if isinstance(like, str) else like.dtype)

    def real_scalar(self, x: Any, like: Array) -> Array:
        return self.asarray(x).real.astype(np.finfo(self.dtype_name(like)).dtype)

    def clip(self, x: Array, bound: Any) -> Array:
        """Clips a real x to [-bound, bound]; bound is a number or an array, and NaN stays NaN."""
        bound = self.real_scalar(bound, x)
        return self.xp.minimum(self.xp.maximum(x, -bound), bound)

    def clipped_by_norm(self, xs: list[Array], bound: Any) -> list[Array] | None:
        """Returns xs * min(1, bound / norm) for the norm of all xs, or None if not implemented."""
        return None

    def zeros_like(self, x: Array) -> Array:
        return self.xp.zeros_like(x)

    def aval(self, x: Array) -> Any:
        """Returns the abstract value of x: shape, dtype and other properties of its type."""
        return tuple(x.shape), x.dtype

    def zeros(self, aval: Any, device_of: Array) -> Array:
        """Returns zeros with the given abstract value, on the device of another array."""
        return self.xp.zeros(aval[0], dtype=aval[1])

    def ones_like(self, x: Array) -> Array:
        """Returns ones with x's shape, dtype and device."""
        return self.xp.ones_like(x)

    def unit_basis(self, x: Array, before: int = 0, after: int = 0) -> Array:
        """Returns `before` zero vectors, all unit vectors like x, and `after` zero vectors."""
        count = before + x.size + after
        return self.xp.eye(count, x.size, k=-before, dtype=x.dtype).reshape((count, *x.shape))

    def split(self, x: Array, parts: Sequence[slice]) -> Sequence[Array]:
        """Splits x into consecutive parts along its first axis."""
        return [x[part] for part in parts]

    def is_known_zero(self, x: Array) -> bool:
        return False

    def is_symbolic_zero(self, x: Any) -> bool:
        """Returns whether x is the framework's symbolic zero, which has a shape and a dtype."""
        return False
