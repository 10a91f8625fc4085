"""Defines context managers for recorded runs, which undo the side effects of the user's function.

Compiled code runs eagerly, and control-flow operators run as Python loops and branches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.seeing.torch.thread_patches import control_flow_called
from gradtools.seeing.torch.undo import Run, Undo, undone
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling
from gradtools.torch.operation_marks import recorded

_here = threading.local()


@contextmanager
def recording_run(what: str, run: Run, leaves: Sequence[Any]) -> Iterator[Undo]:
    """Context manager that allows one recorded run in this thread, and undoes its side effects.

    what: The subject of the error message, such as "a run", if no run can be recorded.
    """
    inside = is_compiling() or upstream.peek_interpreter_stack() is not None
    if inside or getattr(_here, "recording", False):
        raise GradtoolsError(
            f"{what} can only be recorded in plain eager code, not inside a transform of "
            "torch.func, in compiled code, or while another run is recorded. Move the call of the "
            "operator to plain eager code."
        )
    with undone(run, leaves) as undo:
        _here.recording = True
        try:
            with followed(), recorded(), torch.inference_mode(False), torch.enable_grad():
                yield undo
        finally:
            _here.recording = False


# --- control flow as Python loops and branches


def _while_loop(goes_on: Any, body: Any, carried: Any, more: Any = ()) -> Any:
    while goes_on(*carried, *more):
        carried = tuple(body(*carried, *more))
    return carried


_FOLLOWED: dict[str, Callable[..., Any]] = {
    "cond": lambda chosen, yes, no, operands=(): (yes if chosen else no)(*operands),
    "while_loop": _while_loop,
}


def followed() -> AbstractContextManager[None]:
    """Context manager in which this thread runs cond and while_loop as Python control flow."""

    def follow(operator: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return _FOLLOWED.get(operator.name(), call)(*args, **kwargs)

    return control_flow_called(follow)
