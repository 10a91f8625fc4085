"""What gradtools asks of dynamo, without importing it.

Dynamo takes more time to import than the rest of PyTorch together, and a program that compiles
nothing never needs it. So functions that it must not look into are registered when it arrives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
_DYNAMO = "torch._dynamo"
_OPAQUE: list[Callable[..., Any]] = []
_SKIPPED: dict[str, Callable[..., Any]] = {}


def is_compiling() -> bool:
    """Whether dynamo is tracing this very line."""
    return torch.compiler.is_dynamo_compiling()


def opaque_to_dynamo(fun: F) -> F:
    """Marks `fun` as one node of a compiled graph (`torch.compiler.allow_in_graph`)."""
    _OPAQUE.append(fun)
    if _DYNAMO in sys.modules:
        torch.compiler.allow_in_graph(fun)
    return fun


def skipped_by_dynamo(fun: F) -> F:
    """Marks `fun` as one that compiled code calls as it is (`torch.compiler.disable`)."""
    name = f"{fun.__module__}.{fun.__qualname__}"
    _SKIPPED[name] = torch.compiler.disable(fun) if _DYNAMO in sys.modules else fun

    @wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _SKIPPED[name](*args, **kwargs)

    return cast(F, call)


class _WhenDynamoArrives(MetaPathFinder):
    """Finds dynamo as usual, and lets our functions be registered once it is loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for fun in _OPAQUE:
            torch.compiler.allow_in_graph(fun)
        for name, fun in _SKIPPED.items():
            _SKIPPED[name] = torch.compiler.disable(fun)


if _DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _WhenDynamoArrives())
