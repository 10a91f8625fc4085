"""The peak of the bytes that PyTorch's tensors hold, counted storage by storage."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations inside make, from when they are made to when they die."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if is_plain(x)}
        for x in tree_leaves(found):
            if is_plain(x):
                self._note(x.untyped_storage(), given)
        return found

    def _note(self, storage, given):
        key = storage._cdata
        if key in self._known or key in given:
            return
        size = storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._forget, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key, size):
        if self._known.pop(key, None) is not None:
            self.now -= size


def is_plain(x):
    return isinstance(x, torch.Tensor) and x.layout is torch.strided


def peak_bytes(run):
    """The most bytes that were alive at once of what `run()` made, and what it returned."""
    with LiveBytes() as live:
        found = run()
    return live.peak, found
