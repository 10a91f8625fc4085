"""The one place that patches classes of PyTorch, for calls that none of its modes shows.

Each patch lasts for a block and calls `around(owner, beneath, args, kwargs)` in the place of
`owner(*args, **kwargs)`; `beneath` is what was there before, another patch perhaps. The classes are
the process's, so calls of other threads pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gradtools.torch import _upstream as upstream

Around = Callable[[Any, Callable[..., Any], Any, Any], Any]
_FUNCTIONS: Any = upstream.Functions
_PARAMETERS: Any = type(torch.nn.Parameter)
_OPERATORS: Any = upstream.HigherOrderOperator


def functions_applied(around: Around) -> AbstractContextManager[None]:
    """Calls of a `torch.autograd.Function`; the owner is its class.

    The patch stands beneath Function: who keeps a bound `apply` comes by here as well.
    """
    return _patched(_FUNCTIONS, "apply", around, classmethod)


def parameters_made(around: Around) -> AbstractContextManager[None]:
    """Whatever wraps a tensor in a Parameter or a Buffer; the owner is that class.

    The patch stands above them. PyTorch's own functions are left as they are: dynamo, which may be
    imported in between, takes them for what it finds.
    """
    return _patched(_PARAMETERS, "__call__", around)


def control_flow_called(around: Around) -> AbstractContextManager[None]:
    """Calls of PyTorch's operators that take functions, such as cond; the owner is the operator."""
    return _patched(_OPERATORS, "__call__", around)


@contextmanager
def scripts_called(around: Around) -> Iterator[None]:
    """Calls of TorchScript's functions and of the methods of its modules."""
    functions = _patched(torch.jit.ScriptFunction, "__call__", around)
    with functions, _patched(torch.ScriptMethod, "__call__", around):
        yield


@contextmanager
def _patched(
    holder: Any, name: str, around: Around, kind: Callable[[Any], Any] = lambda call: call
) -> Iterator[None]:
    thread, before = threading.get_ident(), vars(holder).get(name)

    def call(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        if before is None:
            beneath = getattr(super(holder, owner), name)
        else:
            beneath = before.__get__(*((None, owner) if kind is classmethod else (owner,)))
        if threading.get_ident() != thread:
            return beneath(*args, **kwargs)
        return around(owner, beneath, args, kwargs)

    setattr(holder, name, kind(call))
    try:
        yield
    finally:
        if before is None:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
