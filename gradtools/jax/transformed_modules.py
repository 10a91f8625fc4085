"""`chunked(model)` and the like: a transformed `equinox` or `flax.nnx` module is a module again.

So its arrays are still leaves of the pytree or graph. An integration is imported when the first
such module is transformed.
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
