"""Patches for calls that a TorchFunctionMode cannot see, in the thread that records.

They see `Function.apply`, constructions of Parameters, and higher-order operators. Within a block
`around(owner, beneath, args, kwargs)` replaces this thread's calls of `owner(*args, **kwargs)`;
`beneath` calls the next outer block's function, or the original. A class is patched from the first
block of any thread until the end of the last one; calls in threads without a block go to the
original.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from gradtools.seeing.torch import _upstream as private

Around = Callable[[Any, Callable[..., Any], Any, Any], Any]


class _Patch:
    """A patched method of a class, which calls this thread's blocks."""

    def __init__(self, holder: Any, name: str, kind: Callable[[Any], Any] = lambda f: f) -> None:
        self._holder, self._name, self._kind = holder, name, kind
        self._lock, self._count = threading.Lock(), 0
        self._local, self._before = threading.local(), None

    @contextmanager
    def by(self, around: Around) -> Iterator[None]:
        """Context in which `around` replaces this thread's calls."""

        def call(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._called(len(self._blocks()), owner, *args, **kwargs)

        blocks = self._blocks()
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._before = vars(self._holder).get(self._name)
                setattr(self._holder, self._name, self._kind(call))
        blocks.append(around)
        try:
            yield
        finally:
            blocks.pop()
            with self._lock:
                self._count -= 1
                if not self._count and self._before is None:
                    delattr(self._holder, self._name)
                elif not self._count:
                    setattr(self._holder, self._name, self._before)

    def _blocks(self) -> list[Around]:
        """This thread's blocks, outermost first."""
        blocks: list[Around] = self._local.__dict__.setdefault("blocks", [])
        return blocks

    def _called(self, depth: int, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        if depth:
            beneath = partial(self._called, depth - 1, owner)
            return self._blocks()[depth - 1](owner, beneath, args, kwargs)
        before: Any = self._before
        if before is None:
            return getattr(super(self._holder, owner), self._name)(*args, **kwargs)
        bound = (None, owner) if self._kind is classmethod else (owner,)
        return before.__get__(*bound)(*args, **kwargs)


_FUNCTIONS = [_Patch(kind, "apply", classmethod) for kind in private.Functions]


@contextmanager
def functions_applied(around: Around) -> Iterator[None]:
    """Patches `Function.apply`; the owner is the Function's class.

    Up to PyTorch 2.13 a bound `apply` is seen as well, since the patch is in a base class.
    """
    with ExitStack() as patches:
        for patch in _FUNCTIONS:
            patches.enter_context(patch.by(around))
        yield


parameters_made = _Patch(type(torch.nn.Parameter), "__call__").by
"""Patches the construction of Parameters and Buffers; the owner is that class.

The patch is in their metaclass. PyTorch's functions are not replaced, since dynamo, which may be
imported meanwhile, identifies them by identity.
"""

control_flow_called = _Patch(private.HigherOrderOperator, "__call__").by
"""Patches calls of higher-order operators such as cond; the owner is the operator."""
