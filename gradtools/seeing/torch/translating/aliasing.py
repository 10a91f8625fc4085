"""Functionalization: views and in-place writes of a recorded run become slices and indexing.

The first tensor that is met on a piece of memory is its root. Any other shows some of the root's
elements, which its strides tell. A write to it makes a new root; what is read afterwards is taken
from the new root. Parts that are boxes are slices, all others are taken by index.
"""

from __future__ import annotations

import numpy as np
import torch

from gradtools.errors import GradtoolsError
from gradtools.seeing.torch.recording.values import offsets
from gradtools.seeing.torch.translating.writer import Ref, Writer

Tensor = torch.Tensor


def places(x: Tensor, root: Tensor) -> np.ndarray:
    """For each element of x the place in the flattened root."""
    if x.dtype != root.dtype or x.is_conj() != root.is_conj() or x.is_neg() != root.is_neg():
        raise GradtoolsError(
            "formula: f writes in place through a view of another dtype, or of a conjugate; "
            "write it by an operation that is not in place."
        )
    known, wanted = offsets(root).ravel(), offsets(x)
    order = np.argsort(known, kind="stable")
    result = np.searchsorted(known[order], wanted.ravel())
    result = order[np.minimum(result, len(order) - 1)] if len(order) else result
    if len(result) and not np.array_equal(known[result], wanted.ravel()):
        raise GradtoolsError("formula: f reads memory beyond what it made; copy it first.")
    return result.reshape(wanted.shape)


def read(w: Writer, root: Ref, where: np.ndarray) -> Ref:
    """The elements of the root at these places."""
    if where.size == root.size and np.array_equal(where.ravel(), np.arange(root.size)):
        return w.reshape(root, where.shape)
    box = _box(root, where)
    if box is not None:
        starts, sizes = box
        limits = [a + n for a, n in zip(starts, sizes, strict=True)]
        return w.reshape(w.window(root, starts, limits, [1] * root.ndim), where.shape)
    flat = w.reshape(root, (root.size,))
    return w.take(flat, w.constant(where), axes=(0,))


def write(w: Writer, root: Ref, where: np.ndarray, u: Ref) -> Ref:
    """The root with u written at these places."""
    if where.size == root.size and np.array_equal(where.ravel(), np.arange(root.size)):
        return w.reshape(u, root.shape)
    box = _box(root, where)
    if box is not None:
        starts, sizes = box
        window = w.reshape(u, sizes)
        at = [w.constant(a) for a in starts]
        return w("dynamic_update", root, window, *at, shape=root.shape, dtype=root.dtype)
    flat = w.reshape(root, (root.size,))
    given = flat, w.reshape(u, (u.size,)), w.constant(where.ravel())
    done = w("scatter", *given, shape=flat.shape, dtype=root.dtype, axes=(0,), mode="set")
    return w.reshape(done, root.shape)


def _box(root: Ref, where: np.ndarray) -> tuple[list[int], list[int]] | None:
    """Where a box begins and how long it is on each axis; None if it is none."""
    if not where.size or not root.ndim:
        return None
    at = np.stack(np.unravel_index(where.ravel(), root.shape))
    starts, ends = at.min(axis=1), at.max(axis=1) + 1
    if np.prod(ends - starts) != where.size:
        return None
    whole = np.arange(root.size).reshape(root.shape)
    box = whole[tuple(slice(a, b) for a, b in zip(starts, ends, strict=True))]
    if not np.array_equal(box.ravel(), where.ravel()):
        return None
    return [int(a) for a in starts], [int(b - a) for a, b in zip(starts, ends, strict=True)]
