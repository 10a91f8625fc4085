"""Names of jitted functions by which recordings know operations that gradtools made itself.

A jaxpr keeps the name of its function, and nothing else that could be set: so the mark is a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gradtools.jax._upstream import name_of

F = TypeVar("F", bound=Callable[..., Any])
_CHUNK = "gradtools_chunk_"


def chunk(f: F) -> F:
    """Marks a function as one that `chunked` makes of its own, around the user's."""
    f.__name__ = f"{_CHUNK}{f.__name__}"
    return f


def is_chunk(jaxpr: Any) -> bool:
    """Whether a jaxpr is of such a function."""
    return name_of(jaxpr).startswith(_CHUNK)


def function_name(jaxpr: Any) -> str:
    """The name of the function behind a jaxpr, as it is written."""
    return name_of(jaxpr).removeprefix(_CHUNK)
