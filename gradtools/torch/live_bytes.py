"""Counts the bytes of live storages that operations create, with a dispatch mode."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor


class LiveBytes(upstream.Watching):
    """Dispatch mode that counts storages from their creation until they are freed.

    Attributes:
        now: The live bytes.
        peak: The most live bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, tuple[int, int]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = func is torch.ops.aten.lift_fresh.default  # torch.tensor(...) of Python numbers
        before = () if fresh else upstream.tree_leaves((args, kwargs))
        given = {_key(x) for x in before if is_plain(x)}
        for x in upstream.tree_leaves(result):
            storage = x.untyped_storage() if is_plain(x) else None
            if storage is None or id(storage) in self._known or id(storage) in given:
                continue
            self._count += 1
            key, size = id(storage), storage.nbytes()
            self._known[key] = self._count, size
            weakref.finalize(storage, self._forget, key, size).atexit = False
            self.now += size
            self.peak = max(self.peak, self.now)
        return result

    def number_of(self, x: Any) -> int | None:
        """A unique number of a tensor's storage; None if it existed before."""
        entry = self._known.get(_key(x)) if is_plain(x) else None
        return None if entry is None else entry[0]

    def bytes_of(self, x: Tensor) -> int:
        return self._known[_key(x)][1]

    def _forget(self, key: int, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self.now -= size


def is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


def _key(x: Tensor) -> int:
    return id(x.untyped_storage())


def peak_bytes(run: Callable[[], Any]) -> tuple[int, Any]:
    """The peak of live bytes that `run()` created, and its result."""
    with LiveBytes() as live:
        result = run()
    return live.peak, result
