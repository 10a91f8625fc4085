"""Patches for calls that a TorchFunctionMode does not intercept, in the recording thread.

The patches intercept `Function.apply`, constructions of Parameters, and higher-order operators. In
a block, `around(owner, beneath, args, kwargs)` replaces this thread's calls of `owner(*args,
**kwargs)`, and `beneath` calls the original. A class is patched from the first block of any thread
until the end of the last block; threads without a block call the original.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from gradtools.seeing.torch import _upstream as private
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling

Around = Callable[[Any, Callable[..., Any], Any, Any], Any]


class _Patch:
    """A patched method of a class."""

    def __init__(self, holder: Any, name: str) -> None:
        self._holder, self._name = holder, name
        self._lock = threading.Lock()
        self._blocks: dict[int, Around] = {}  # by thread
        self._before: Any = None  # the method, or None if it is inherited

    @contextmanager
    def by(self, around: Around) -> Iterator[None]:
        """Context manager in which `around` replaces this thread's calls."""
        thread = threading.get_ident()
        with self._lock:
            if not self._blocks:
                self._before = vars(self._holder).get(self._name)
                setattr(self._holder, self._name, self._patched(self._before))
            self._blocks[thread] = around
        try:
            yield
        finally:
            with self._lock:
                del self._blocks[thread]
                if not self._blocks and self._before is None:
                    delattr(self._holder, self._name)
                elif not self._blocks:
                    setattr(self._holder, self._name, self._before)

    def _patched(self, before: Any) -> Any:
        of_class = self._name == "apply"

        def call(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            if before is None:
                beneath = getattr(super(self._holder, owner), self._name)
            else:
                beneath = before.__get__(*((None, owner) if of_class else (owner,)))
            block = self._blocks.get(threading.get_ident())
            return block(owner, beneath, args, kwargs) if block else beneath(*args, **kwargs)

        return classmethod(call) if of_class else call


_FUNCTIONS = [_Patch(kind, "apply") for kind in private.Functions]


@contextmanager
def functions_applied(around: Around) -> Iterator[None]:
    """Patches `Function.apply`; the owner is the Function's class.

    Before PyTorch 2.14 a bound `apply` is also intercepted, since the patch is in a base class.
    """
    with ExitStack() as patches:
        for patch in _FUNCTIONS:
            patches.enter_context(patch.by(around))
        yield


parameters_made = _Patch(type(torch.nn.Parameter), "__call__").by
"""Patches the construction of Parameters and Buffers; the owner is their class.

The patch is in their metaclass. PyTorch's functions are not replaced, since dynamo, which may be
imported in the meantime, compares them by identity.
"""

control_flow_called = _Patch(private.HigherOrderOperator, "__call__").by
"""Patches calls of higher-order operators such as cond; the owner is the operator."""


# --- compiled code -------------------------------------------------------------------------------


class _AsWritten(AbstractContextManager[None]):
    """A reference-counted `torch.compiler.set_stance("force_eager")` for all threads.

    `set_stance` is process-wide and restores the previous stance. If two threads left it in the
    order in which they entered, the stance would remain set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = 0
        self._stance: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if not self.inside:
                self._stance = torch.compiler.set_stance("force_eager")
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.inside -= 1
            if not self.inside:
                self._stance.__exit__(None, None, None)


_AS_WRITTEN = _AsWritten()


def as_written() -> AbstractContextManager[None]:
    """Returns a context in which all threads run compiled functions eagerly.

    Modes do not intercept the operations of compiled code.
    """
    return _AS_WRITTEN if upstream.DYNAMO in sys.modules and not is_compiling() else nullcontext()
