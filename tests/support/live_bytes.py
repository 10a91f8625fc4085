"""Counts the bytes of live storages that operations create, with a dispatch mode."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensor = torch.Tensor


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of storages from their creation until they are freed.

    Attributes:
        now: The current number of live bytes.
        peak: The maximum number of live bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # torch.tensor(...) calls lift_fresh with a new tensor, whose storage must be counted.
        fresh = func is torch.ops.aten.lift_fresh.default
        before = () if fresh else tree_leaves((args, kwargs))
        given = {_key(x) for x in before if _is_plain(x)}
        for x in tree_leaves(result):
            storage = x.untyped_storage() if _is_plain(x) else None
            if storage is None or id(storage) in self._known or id(storage) in given:
                continue
            key, size = id(storage), storage.nbytes()
            self._known.add(key)
            weakref.finalize(storage, self._forget, key, size).atexit = False
            self.now += size
            self.peak = max(self.peak, self.now)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


def _key(x: Tensor) -> int:
    return id(x.untyped_storage())


def peak_bytes(run: Callable[[], Any]) -> tuple[int, Any]:
    """Return the peak of live bytes that `run` creates, and the result of `run`."""
    with LiveBytes() as live:
        result = run()
    return live.peak, result
