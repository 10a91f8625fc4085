"""Lazy access to the modules of `gradtools.seeing.torch` or `gradtools.seeing.jax`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradtools.errors import GradtoolsError

if TYPE_CHECKING:
    from gradtools.backend import Backend


class Framework:
    """The modules of one framework, each imported on first access.

    Both frameworks provide `recorded_run`, `training`, `passes` and `translating`.

    Args:
        backend: The backend of the user's program.
        caller: The operator that the user called, for error messages.

    Raises:
        GradtoolsError: The backend is neither PyTorch nor JAX.
    """

    def __init__(self, backend: Backend, caller: str) -> None:
        if backend.name not in ("torch", "jax"):
            raise GradtoolsError(f"{caller}: the backend {backend.name!r} does not provide it.")
        self._package = f"gradtools.seeing.{backend.name}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return import_module(f"{self._package}.{name}")
