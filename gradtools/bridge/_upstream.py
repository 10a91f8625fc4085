"""Wraps the private names of PyTorch that only the bridge uses.

See `gradtools.torch._upstream` for the other names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def outermost() -> Iterator[None]:
    """Context manager that enables gradients and disables all modes, as in a new thread."""
    keys, c = _keys_of_a_thread(), torch._C
    if torch.is_grad_enabled() and _keys() == keys and not c._len_torch_function_stack():
        yield
        return
    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        c._ForceDispatchKeyGuard(*keys),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def _keys() -> tuple[Any, Any]:
    """Returns the dispatch keys that this thread includes and excludes."""
    c: Any = torch._C
    return c._dispatch_tls_local_include_set(), c._dispatch_tls_local_exclude_set()


@cache
def _keys_of_a_thread() -> tuple[Any, Any]:
    """Returns the dispatch keys of a new thread."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(_keys()))
    thread.start()
    thread.join()
    return result[0]


def fake_tensors(**options: Any) -> Any:
    """Creates a `FakeTensorMode`, in which operations compute only shapes and dtypes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**options)
