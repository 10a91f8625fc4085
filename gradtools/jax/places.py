"""Where in the user's program something runs: the innermost line of their own, and the modules.

A frame is the user's if its file belongs neither to JAX, to gradtools, to the standard library,
nor to an installed package; where there is none, the innermost of an installed package stands in.
JAX keeps with each equation the stack that made it, up to where it began to trace.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from gradtools.jax._upstream import file_of, stack_of

if TYPE_CHECKING:
    from gradtools.seeing.graph import Source


def source(eqn: Any, site: Source | None = None) -> Source | None:
    """The innermost line of the user's own code that made an equation.

    A stack ends where JAX began to trace a function, so inside of a library's function there may
    be no such line; `site`, that of the call, is then given back, and where there is none a line
    of an installed package.
    """
    package: Source | None = None
    for frame in stack_of(eqn):
        kind = _kind(frame.file_name)
        if kind == _USER:
            return _line(frame)
        if kind == _PACKAGE and package is None:
            package = _line(frame)
    return site or package


def _line(frame: Any) -> Source:
    return _source(frame.file_name, frame.line_num, frame.function_name.rpartition(".")[2])


def _source(file: str, line: int, function: str) -> Source:
    from gradtools.seeing.graph import Source  # a room that is loaded when a line is asked for

    return Source(file, line, function)


def source_of_error(error: BaseException) -> tuple[Source | None, tuple[str, ...]]:
    """The innermost line of the user's that an error went through, and the modules around it."""
    found: dict[int, Source] = {}
    modules: list[str] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        found[_kind(code.co_filename)] = _source(code.co_filename, line, code.co_name)
        modules += _module(code.co_qualname, code.co_filename)
    return found.get(_USER, found.get(_PACKAGE)), tuple(modules)


def is_own(jaxpr: Any) -> bool | None:
    """Whether the function behind a jaxpr is a library's, not the user's; None if unknown."""
    where = file_of(jaxpr)
    return is_of(_LIBRARIES, where) if where else None


def is_ours(jaxpr: Any) -> bool:
    """Whether the function behind a jaxpr is gradtools'."""
    return file_of(jaxpr).startswith(_HERE + os.sep)


def is_chunk(jaxpr: Any) -> bool:
    """Whether a jaxpr is what `gradtools.jax.chunking` runs for each chunk."""
    return file_of(jaxpr).startswith(_CHUNKING)


def modules_around(eqn: Any) -> tuple[str, ...]:
    """The classes whose ``__call__`` led to an equation, outermost first.

    Modules of flax.nnx, and callables of the user's own, give their scopes no name.
    """
    names: list[str] = []
    for frame in takewhile(lambda frame: not frame.file_name.startswith(_SEEING), stack_of(eqn)):
        names += _module(frame.function_name, frame.file_name)
    return tuple(reversed(names))


def _module(function: str, file: str) -> list[str]:
    """The class, if a function is the call of a module."""
    owner, _, method = function.rpartition(".")
    called = method == "__call__" and owner and "<" not in owner and owner[0] != "_"
    return [owner] if called and not is_of(_ENGINES, file) else []


_USER, _PACKAGE, _LIBRARY = range(3)
_ENGINES = ("jax", "jaxlib", "gradtools")
_LIBRARIES = (*_ENGINES, "flax", "equinox", "optax", "jaxtyping")
_STANDARD = os.path.dirname(os.__file__)
_HERE = os.path.dirname(__file__)
_CHUNKING = os.path.join(_HERE, "chunking.py")
_SEEING = os.path.join(os.path.dirname(_HERE), "seeing") + os.sep


@lru_cache(maxsize=4096)
def _kind(file: str) -> int:
    if is_of(_ENGINES, file) or file.startswith("<"):
        return _LIBRARY
    if is_of(_LIBRARIES, file) or "-packages" in file:
        return _PACKAGE
    return _LIBRARY if file.startswith(_STANDARD + os.sep) else _USER


def is_of(packages: Sequence[str], file: str) -> bool:
    """Whether a file belongs to one of these packages."""
    modules = (sys.modules.get(name) for name in packages)
    files = (getattr(module, "__file__", None) for module in modules)
    return any(file.startswith(os.path.dirname(f) + os.sep) for f in files if f)
