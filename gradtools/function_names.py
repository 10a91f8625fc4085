"""The name, signature and pickling of a function that an operator returns."""

from __future__ import annotations

from functools import partial
from typing import Any

from gradtools.boundary import called


def like_function(prefix: str, f: Any, call: Any, suffix: str = "") -> Any:
    """`call` with f's name (and a prefix) and signature; picklable if f is."""
    name = f"{prefix}{getattr(f, '__name__', type(f).__name__)}{suffix}"
    known = {"__name__": name, "__qualname__": name, "__wrapped__": f}
    try:
        call.__dict__.update(known)
    except AttributeError:  # dynamo's representation of a partial has no attributes
        return call
    if type(call) is partial:
        call = _Method(called, call.func, *call.args, **call.keywords)
        call.__dict__.update(known)
    return call


class _Method(partial[Any]):
    """A partial that binds as a method in a class, as Python 3.14's do."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)
