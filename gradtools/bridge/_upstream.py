"""The private names of PyTorch that only the bridge uses, each with its reason.

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
    """Context in which operations dispatch as in a new thread: to autograd, without modes."""
    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch._C._ForceDispatchKeyGuard(*_keys_of_a_thread()),
    ):
        yield


@cache
def _keys_of_a_thread() -> tuple[Any, Any]:
    """Returns the dispatch keys that are included and excluded in a new thread."""
    result: list[Any] = []
    c: Any = torch._C
    local = c._dispatch_tls_local_include_set, c._dispatch_tls_local_exclude_set
    thread = threading.Thread(target=lambda: result.extend(keys() for keys in local))
    thread.start()
    thread.join()
    return result[0], result[1]


def fake_tensors(**options: Any) -> Any:
    """Makes a `FakeTensorMode`: operations compute only shapes. Its import takes a second."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**options)
