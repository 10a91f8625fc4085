"""Configures dynamo without importing it, and avoids compiled code where it would drop tangents.

Importing dynamo takes longer than importing the rest of PyTorch, and programs without compiled
functions do not need dynamo. Functions that dynamo must not trace are therefore registered by an
import hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

from gradtools.backend import Compiler
from gradtools.boundary import like_function, trimmed
from gradtools.foreign_arrays import refuse_foreign
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import unwrapped

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
_SKIPPED: dict[str, Callable[..., Any]] = {}
_TO_REGISTER: list[Callable[[], Any]] = []  # functions to call once dynamo is loaded


def is_compiling() -> bool:  # dynamo may replace an alias of PyTorch's function with False
    """Returns whether dynamo is tracing this line."""
    return torch.compiler.is_dynamo_compiling()


def _with_dynamo(register: Callable[[], Any]) -> None:
    """Calls `register` when dynamo is loaded, or immediately if dynamo is already loaded."""
    if upstream.DYNAMO in sys.modules:
        register()
    else:
        _TO_REGISTER.append(register)


def opaque_to_dynamo(fun: F) -> F:
    """Makes dynamo record each call of `fun` as one node (`torch.compiler.allow_in_graph`)."""
    _with_dynamo(lambda: torch.compiler.allow_in_graph(fun))
    return fun


def skipped_by_dynamo(fun: F) -> F:
    """Marks `fun` as a function that dynamo does not trace (`torch.compiler.disable`)."""
    name = f"{fun.__module__}.{fun.__qualname__}"
    _SKIPPED[name] = fun
    _with_dynamo(lambda: _SKIPPED.update({name: torch.compiler.disable(fun)}))

    @wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _SKIPPED[name](*args, **kwargs)

    return cast(F, call)


def only_inlined(fun: F) -> F:
    """Marks `fun` as a function that dynamo traces only as part of a surrounding graph.

    After a graph break, dynamo runs `fun` again from the first line. If dynamo compiled `fun`
    separately, `is_compiling()` would be True in that run.
    """
    _with_dynamo(lambda: upstream.skip_code(fun))
    return fun


def left_to_python(module: str) -> None:
    """Makes dynamo skip a module. Dynamo may still compile functions that the module calls.

    Call `left_to_python(__name__)` in the first lines of a module that reruns functions under
    nested modes, because dynamo cannot trace nested modes.
    """
    _with_dynamo(lambda: upstream.skip_module(module))


@_with_dynamo
def _substitute() -> None:
    """Makes dynamo skip `trimmed` and `like_function`, which only change metadata."""

    @torch.compiler.substitute_in_graph(trimmed)
    def unchanged(error: Exception) -> Exception:
        return error

    @torch.compiler.substitute_in_graph(like_function)
    def unnamed(prefix: str, f: Any, call: Any, suffix: str = "", doc: str = "") -> Any:
        return call


@skipped_by_dynamo
def uncompiled(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls `fun(*args, **kwargs)`, with a graph break in compiled code."""
    return fun(*args, **kwargs)


class Dynamo(Compiler):
    """Implements `Compiler` for dynamo."""

    is_tracing = staticmethod(is_compiling)
    uncompiled = staticmethod(uncompiled)

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        def constant(*args: Any) -> Any:
            return fun(*args)

        return upstream.marked_constant(constant)

    def refuse(self, reason: str) -> None:
        if is_compiling():
            upstream.break_graph(reason)


class _WhenDynamoArrives(MetaPathFinder):
    """Import hook that registers gradtools' functions once dynamo is loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != upstream.DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = getattr(spec, "loader", None)
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for register in _TO_REGISTER:
                register()

        loader.exec_module = exec_module  # the loader is a new object for each module
        return spec


if upstream.DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _WhenDynamoArrives())


# --- compiled functions ------------------------------------------------------------------


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiles f.

    In forward mode, an f that is not a module runs eagerly, because compiled code drops tangents.
    """
    code = torch.compile(f, **options)
    if isinstance(f, torch.nn.Module):
        return code

    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            for x in (*args, *kwargs.values()):
                refuse_foreign("torch", x)  # a foreign array would be a constant in compiled code
            if upstream.forward_level() >= 0:
                return f(*args, **kwargs)
        return code(*args, **kwargs)

    return call


NO_DOUBLE_BACKWARD = (
    "a function compiled by torch.compile was differentiated twice outside of the compiled code; "
    "PyTorch has no compiled double backward (pytorch#91469) and silently drops the second "
    "derivative. Compile the derivative instead, as in torch.compile(lambda x: gt.hvp(f, (x,), "
    "(v,)))."
)


@contextmanager
def real_tensors_too(xs: Sequence[Tensor]) -> Iterator[None]:
    """Context manager in which captured tensors become constants of a compiled graph."""
    tracing = upstream.TracingContext.try_get() is not None
    mode = upstream.detect_fake_mode([unwrapped(x) for x in xs]) if tracing else None
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before
