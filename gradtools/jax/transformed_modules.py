"""`chunked(model)` and the like: a transformed `equinox` or `flax.nnx` model is again a model.

Its arrays are leaves of a tree or of a graph, and so must be those of what is made of it; the
libraries' rooms are opened once such a module comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gradtools.integrations import integration


def like_module(f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
    """`make(f)`, as a module if f is one."""
    for library in ("equinox", "flax.nnx"):
        loaded = sys.modules.get(library)
        if loaded is not None and isinstance(f, loaded.Module):
            return integration(library).Transformed(f, make)
    return make(f)
