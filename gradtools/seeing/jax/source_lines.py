"""Finds the source lines and modules of JAX equations.

`gradtools.code_origin` classifies stack frames. The source line of an equation is the innermost
line of the user's code or, if the stack contains no such line, of an installed package. JAX stores
the stack of each equation up to the start of the trace.
"""

from __future__ import annotations

from typing import Any

from gradtools.code_origin import (
    PACKAGE,
    USER,
    Source,
    functions_in,
    innermost,
    is_in,
    is_ours,
    kind_of,
    lines_of,
)
from gradtools.jax._upstream import file_of, stack_of


def source(eqn: Any, site: Source | None = None) -> Source | None:
    """Returns the innermost line of the user's code in the stack of an equation.

    A stack ends at the start of the trace, so equations of a library's jitted function may have no
    line of the user's code. For a stack without a line of the user's code, the function returns
    `site` (the line of the call) or, if `site` is None, a line of an installed package.
    """
    package: Source | None = None
    for frame in stack_of(eqn):
        kind = kind_of(frame.file_name)
        if kind == USER:
            return _line(frame)
        if kind == PACKAGE and package is None:
            package = _line(frame)
    return site or package


def users_lines(eqn: Any) -> list[Source]:
    """Returns all lines of the user's code in an equation's stack, innermost first."""
    return [_line(frame) for frame in stack_of(eqn) if kind_of(frame.file_name) == USER]


def _line(frame: Any) -> Source:
    return Source(frame.file_name, frame.line_num, frame.function_name.rpartition(".")[2])


def source_of_error(error: BaseException) -> tuple[Source | None, tuple[str, ...]]:
    """Returns the innermost user line and the names of the modules in an error's traceback."""
    modules = [name for function, file in functions_in(error) for name in _module(function, file)]
    return innermost(lines_of(error), PACKAGE), tuple(modules)


def is_own(jaxpr: Any) -> bool | None:
    """Returns whether a jaxpr's function belongs to a library, or None if this is unknown."""
    where = file_of(jaxpr)
    return is_in(_LIBRARIES, where) if where else None


def is_gradtools(jaxpr: Any) -> bool:
    return is_ours(file_of(jaxpr))


def modules_around(eqn: Any) -> tuple[str, ...]:
    """Returns the names of classes with ``__call__`` in an equation's stack, outermost first.

    The class names replace named scopes, which flax.nnx modules and user-defined callables lack.
    """
    names = [name for f in stack_of(eqn) for name in _module(f.function_name, f.file_name)]
    return tuple(reversed(names))


def _module(function: str, file: str) -> list[str]:
    """Returns [class name] if the function is the ``__call__`` of a module, otherwise []."""
    owner, _, method = function.rpartition(".")
    called = method == "__call__" and owner and "<" not in owner and owner[0] != "_"
    return [owner] if called and not is_in(_ENGINES, file) else []


_ENGINES = ("jax", "jaxlib", "gradtools")
_LIBRARIES = (*_ENGINES, "flax", "equinox", "optax", "jaxtyping")
