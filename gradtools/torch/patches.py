"""The one place that patches PyTorch, for calls that none of its modes shows.

Inside of a block `around(owner, beneath, args, kwargs)` takes the place of this thread's calls
`owner(*args, **kwargs)`; `beneath` is what was there before, the block around perhaps. Classes are
the process's: a patch is there from the first block of any thread to the end of the last, and calls
of threads without a block pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint

from gradtools.torch import _upstream as upstream

Around = Callable[[Any, Callable[..., Any], Any, Any], Any]


class _Patch:
    """A method of a class, or what it inherits, with blocks in its place."""

    def __init__(self, holder: Any, name: str, kind: Callable[[Any], Any] = lambda f: f) -> None:
        self._holder, self._name, self._kind = holder, name, kind
        self._lock, self._count = threading.Lock(), 0
        self._here, self._before = threading.local(), None

    @contextmanager
    def by(self, around: Around) -> Iterator[None]:
        blocks = self._blocks()
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._set()
        blocks.append(around)
        try:
            yield
        finally:
            blocks.pop()
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._unset()

    def _blocks(self) -> list[Around]:
        """Those of this thread, outermost first."""
        result: list[Around] = self._here.__dict__.setdefault("blocks", [])
        return result

    def _set(self) -> None:
        def call(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._called(len(self._blocks()), owner, *args, **kwargs)

        self._before = vars(self._holder).get(self._name)
        setattr(self._holder, self._name, self._kind(call))

    def _unset(self) -> None:
        if self._before is None:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._before)

    def _called(self, depth: int, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        if depth:
            beneath = partial(self._called, depth - 1, owner)
            return self._blocks()[depth - 1](owner, beneath, args, kwargs)
        return self._plain(owner)(*args, **kwargs)

    def _plain(self, owner: Any) -> Any:
        before: Any = self._before
        if before is None:
            return getattr(super(self._holder, owner), self._name)
        return before.__get__(None, owner) if self._kind is classmethod else before.__get__(owner)


_FUNCTIONS = [_Patch(kind, "apply", classmethod) for kind in upstream.Functions]
_PARAMETERS = _Patch(type(torch.nn.Parameter), "__call__")
_OPERATORS = _Patch(upstream.HigherOrderOperator, "__call__")
_CHECKPOINTS = _Patch(torch.utils.checkpoint, upstream.checkpoint_passes.__name__)
_FLEX: dict[Any, _Patch] = {}  # by the module, which is imported when it is first used
_SCRIPTS = [_Patch(kind, "__call__") for kind in (torch.jit.ScriptFunction, torch.ScriptMethod)]


class _Watching(threading.local):
    """How many look on at rules in this thread; a default of the class, as a miss is slow."""

    count = 0


WATCHING = _Watching()


@contextmanager
def functions_applied(around: Around, of_rules: bool = True) -> Iterator[None]:
    """Calls of a `torch.autograd.Function`; the owner is its class.

    Up to PyTorch 2.13 a bound `apply` is seen as well: the patch is in a base class.

    of_rules: Whether those of gradtools' rules matter, which then take their long way.
    """
    WATCHING.count += of_rules
    try:
        with ExitStack() as patches:
            for patch in _FUNCTIONS:
                patches.enter_context(patch.by(around))
            yield
    finally:
        WATCHING.count -= of_rules


def are_watched() -> bool:
    """Whether someone looks on at rules here."""
    return WATCHING.count > 0


def parameters_made(around: Around) -> AbstractContextManager[None]:
    """Whatever wraps a tensor in a Parameter or a Buffer; the owner is that class.

    The patch stands above them. PyTorch's own functions are left as they are: dynamo, which may be
    imported in between, takes them for what it finds.
    """
    return _PARAMETERS.by(around)


def control_flow_called(around: Around) -> AbstractContextManager[None]:
    """Calls of PyTorch's operators that take functions, such as cond; the owner is the operator."""
    return _OPERATORS.by(around)


def checkpoints_taken(around: Around) -> AbstractContextManager[None]:
    """Passes of `torch.utils.checkpoint` without reentrance; the owner is the function."""
    return _CHECKPOINTS.by(around)


def flex_validated(around: Around) -> AbstractContextManager[Any]:
    """Whether `flex_attention` may run where its operands are; the owner is the query."""
    module = upstream.flex_attention_module()
    if module is None:
        return nullcontext()
    return _FLEX.setdefault(module, _Patch(module, "_validate_device")).by(around)


@contextmanager
def scripts_called(around: Around) -> Iterator[None]:
    """Calls of TorchScript's functions and of the methods of its modules."""
    functions, methods = _SCRIPTS
    with functions.by(around), methods.by(around):
        yield
