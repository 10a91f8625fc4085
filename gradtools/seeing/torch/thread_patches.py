"""Patches calls that a TorchFunctionMode does not intercept, in individual threads.

The patches intercept `Function.apply`, constructions of Parameters, and higher-order operators.
Inside of the context manager, `around(owner, beneath, args, kwargs)` replaces the patched method in
this thread: `owner` is the called class or operator, and `beneath` is the original method. A class
is patched until the last thread exits the context manager; other threads call the original method.
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
    """A method of a class that can be patched in individual threads."""

    def __init__(self, holder: Any, name: str) -> None:
        self._holder, self._name = holder, name
        self._lock = threading.Lock()
        self._blocks: dict[int, Around] = {}  # maps thread ids to `around`
        self._before: Any = None  # the original method, or None if inherited

    @contextmanager
    def by(self, around: Around) -> Iterator[None]:
        """Context manager that replaces the method with `around` in this thread."""
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
    """Context manager that patches `Function.apply`; the owner is the class of the Function.

    Before PyTorch 2.14, references to `apply` that were stored before the patch are also
    intercepted, because the patch is in a base class.
    """
    with ExitStack() as patches:
        for patch in _FUNCTIONS:
            patches.enter_context(patch.by(around))
        yield


parameters_made = _Patch(type(torch.nn.Parameter), "__call__").by
"""Patches the construction of Parameters and Buffers; the owner is the constructed class.

The metaclass of Parameter is patched. PyTorch functions are not replaced, because dynamo compares
functions by identity.
"""

control_flow_called = _Patch(private.HigherOrderOperator, "__call__").by
"""Patches calls of higher-order operators such as cond; the owner is the operator."""


# --- compiled code -------------------------------------------------------------------------------


class _AsWritten(AbstractContextManager[None]):
    """A reference-counted `torch.compiler.set_stance("force_eager")` for all threads.

    `set_stance` is process-wide and restores the previous stance on exit. Without the reference
    count, overlapping contexts of two threads could leave the stance set.
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
    """Returns a context manager that makes all threads run compiled functions eagerly.

    Eager execution is needed because modes do not intercept operations of compiled code.
    """
    return _AS_WRITTEN if upstream.DYNAMO in sys.modules and not is_compiling() else nullcontext()
