"""The name, signature and pickling of a function that an operator returns."""

from __future__ import annotations

from functools import partial
from typing import Any

from gradtools.boundary import called


def like_function(prefix: str, f: Any, call: Any, suffix: str = "") -> Any:
    """The call under a name like f's and with f's signature; it can be pickled if f can."""
    name = f"{prefix}{getattr(f, '__name__', type(f).__name__)}{suffix}"
    known = {"__name__": name, "__qualname__": name, "__wrapped__": f}
    try:
        call.__dict__.update(known)
    except AttributeError:  # dynamo's stand-in for a partial has no attributes
        return call
    if type(call) is partial:
        call = _Method(called, call.func, *call.args, **call.keywords)
        call.__dict__.update(known)
    return call


class _Method(partial[Any]):
    """A partial that a class may hold as a method, as it may a function: as from Python 3.14 on."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)
