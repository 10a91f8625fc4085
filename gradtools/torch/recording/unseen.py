"""Calls that no mode of PyTorch shows, watched by standing in for what is called.

These are functions with their own rules, each one link whatever it does inside, and what wraps a
tensor in a Parameter. The places are the process's, so only one run is recorded at a time, and
calls of other threads pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.recording.recorder import Recorder

# Beneath Function: who keeps a bound `apply` comes by here as well.
_FUNCTIONS: Any = upstream.Functions
_APPLY = "apply"
# Above what makes a Parameter or a Buffer. PyTorch's own functions are left as they are: dynamo,
# which may be imported in between, takes them for what it finds.
_PARAMETERS: Any = type(torch.nn.Parameter)


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Inside, all calls of this thread are written down, with the modules that they run in."""
    thread = threading.get_ident()

    def watched() -> bool:
        return threading.get_ident() == thread and not recorder.quiet

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        beneath = getattr(super(_FUNCTIONS, cls), _APPLY)
        return recorder.ruled(cls, beneath, args, kwargs) if watched() else beneath(*args, **kwargs)

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        make = type.__call__
        return _made(recorder, cls, make, args, kwargs) if watched() else make(cls, *args, **kwargs)

    with recorder.scopes.watching():
        _FUNCTIONS.apply = classmethod(apply)
        _PARAMETERS.__call__ = make
        try:
            with recorder:
                yield
        finally:
            del _FUNCTIONS.apply
            del _PARAMETERS.__call__


def _made(recorder: Recorder, kind: Any, make: Any, args: Any, kwargs: Any) -> Any:
    call = recorder.entering(kind, args, kwargs)
    call.name = kind.__name__
    with recorder.silent():
        out = make(kind, *args, **kwargs)
        recorder.write(call, out)
        return out
