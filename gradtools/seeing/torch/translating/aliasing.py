"""Functionalization: views and in-place writes of a recorded run become indexing.

The first tensor that is met on a piece of memory is its root. Any other shows some of the root's
elements, which its strides give. A write to it makes a new root; what is read afterwards is taken
from the new root.
"""

from __future__ import annotations

import numpy as np
import torch

from gradtools.errors import GradtoolsError
from gradtools.seeing.torch.recording.values import offsets

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


def name_of(places: np.ndarray, shape: tuple[int, ...]) -> str:
    """What part of an array of this shape lies at these places: a box, or some entries."""
    if places.size and shape:
        at = np.stack(np.unravel_index(places.ravel(), shape))
        bounds = [slice(int(a), int(b) + 1) for a, b in zip(at.min(1), at.max(1), strict=True)]
        box = np.arange(int(np.prod(shape))).reshape(shape)[tuple(bounds)]
        if np.array_equal(box.ravel(), places.ravel()):
            each = zip(shape, bounds, strict=True)
            said = [":" if s == slice(0, n) else _range(s, n) for n, s in each]
            return "[" + ", ".join(said) + "]"
    return "entries"


def _range(s: slice, n: int) -> str:
    if s.stop == s.start + 1:
        return str(s.start)
    return f"{s.start or ''}:{'' if s.stop == n else s.stop}"
