"""Defines the types of gradient functions, and of numbers that edits accept, for type checkers.

A gradient has the type of its argument; the gradient of a `torch.nn.Module` is a dict of tensors
with the parameter names as keys. This module is unused at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, overload

from gradtools.backend import P

T_co = TypeVar("T_co", bound=Any, covariant=True)
R_co = TypeVar("R_co", covariant=True)
V = TypeVar("V")


class ArrayLike(Protocol):
    """A protocol that arrays of PyTorch, JAX and NumPy satisfy."""

    @property
    def shape(self) -> Any:
        """The length of each axis."""

    @property
    def dtype(self) -> Any:
        """The type of the entries."""


RealLike = float | ArrayLike


class TorchModule(Protocol):
    """A protocol that `torch.nn.Module` satisfies, so that PyTorch need not be imported."""

    def named_parameters(
        self, prefix: str = ..., recurse: bool = ..., remove_duplicate: bool = ...
    ) -> Iterator[tuple[str, Any]]:
        """Returns the parameters and their names."""

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Adds a hook that runs after the forward pass."""


M = TypeVar("M", bound=TorchModule)


class _Unknown:
    """A placeholder type that matches only Any, the type of a lambda's parameter."""


class Gradient(Protocol[T_co, P]):
    """The type of `grad(f)`, whose result has the type of the first argument."""

    @overload
    def __call__(
        self: Gradient[_Unknown, P], x: Any, /, *args: P.args, **kwargs: P.kwargs
    ) -> Any: ...
    @overload
    def __call__(
        self: Gradient[M, P], x: M, /, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, Any]: ...
    @overload
    def __call__(self, x: T_co, /, *args: P.args, **kwargs: P.kwargs) -> T_co: ...  # type: ignore[misc]


class ValueAndGradient(Protocol[T_co, P, R_co]):
    """The type of `value_and_grad(f)`, which returns the output and the gradient of f."""

    @overload
    def __call__(
        self: ValueAndGradient[_Unknown, P, V], x: Any, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[V, Any]: ...
    @overload
    def __call__(
        self: ValueAndGradient[M, P, V], x: M, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[V, dict[str, Any]]: ...
    @overload
    def __call__(self, x: T_co, /, *args: P.args, **kwargs: P.kwargs) -> tuple[R_co, T_co]: ...  # type: ignore[misc]
