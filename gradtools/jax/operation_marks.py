"""Function names that mark the jaxprs of gradtools' own operations, for the recorders.

The function's name is the only settable field that a jaxpr keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gradtools.jax._upstream import name_of

F = TypeVar("F", bound=Callable[..., Any])
_CHUNK = "gradtools_chunk_"


def chunk(f: F) -> F:
    """Marks a function as `chunked`'s own wrapper around the user's function."""
    f.__name__ = f"{_CHUNK}{f.__name__}"
    return f


def is_chunk(jaxpr: Any) -> bool:
    """Whether a jaxpr is that of a function marked by `chunk`."""
    return name_of(jaxpr).startswith(_CHUNK)


def function_name(jaxpr: Any) -> str:
    """The name of a jaxpr's function in the source, without the mark."""
    return name_of(jaxpr).removeprefix(_CHUNK)
