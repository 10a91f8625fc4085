"""`chunked(model)` and the like: a transformed `equinox` or `flax.nnx` model is again a model.

Its arrays are leaves of a tree or of a graph, and so must be those of what is made of it; the
libraries' rooms are opened once such a module comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def like_module(f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
    """`make(f)`, as a module if f is one."""
    equinox, nnx = sys.modules.get("equinox"), sys.modules.get("flax.nnx")
    if equinox is not None and isinstance(f, equinox.Module):
        from gradtools.jax.equinox import Transformed

        return Transformed(f, make)
    if nnx is not None and isinstance(f, nnx.Module):
        from gradtools.jax.nnx import Transformed as TransformedGraph

        return TransformedGraph(f, make)
    return make(f)
