"""Recovers the slice by which one tensor is a view of another, from their strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def slice_of(part: Tensor, whole: Tensor) -> dict[str, Any] | None:
    """The slice of `whole` that `part`, a view of the same storage, is; None if it is no slice.

    Returns:
        The attributes of the operation "slice": start, limit, stride, and drop, the indexed axes
        that the part lacks.
    """
    if part.layout is not torch.strided or whole.layout is not torch.strided:
        return None
    rest = part.storage_offset() - whole.storage_offset()
    if rest < 0 or part.dtype != whole.dtype or part.numel() == 0:
        return None
    shape, strides = tuple(map(int, whole.shape)), tuple(map(int, whole.stride()))
    rest, start = int(rest), [0] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda a: -strides[a]):
        if shape[axis] > 1 and strides[axis] > 0:
            start[axis], rest = divmod(rest, strides[axis])
    limit, step = [n + 1 for n in start], [1] * len(shape)
    result = list[int]()
    for n, stride in zip(part.shape, part.stride(), strict=True):
        axis = _axis_along(n, stride, result[-1] + 1 if result else 0, whole, start)
        if axis is None:
            return None
        result.append(axis)
        if n > 1:
            step[axis] = stride // strides[axis]
            limit[axis] = start[axis] + step[axis] * (n - 1) + 1
    if rest or any(not 0 <= a < b <= n for a, b, n in zip(start, limit, shape, strict=True)):
        return None
    drop = tuple(a for a in range(len(shape)) if a not in result)
    attributes = {"start": tuple(start), "limit": tuple(limit)}
    strided = {"stride": tuple(step)} if any(n != 1 for n in step) else {}
    return {**attributes, **strided, **({"drop": drop} if drop else {})}


def _axis_along(n: int, stride: int, first: int, whole: Tensor, start: Sequence[int]) -> int | None:
    """The first axis of the whole, from `first` on, along which an axis of the part can run."""
    for axis in range(first, whole.dim()):
        length, along = whole.shape[axis], whole.stride(axis)
        if n == 1 and (length == 1 or stride == along):
            return axis
        fits = n > 1 and length > 1 and along > 0 and stride % along == 0 and stride >= along
        if fits and start[axis] + stride // along * (n - 1) < length:
            return axis
    return None


def shows_all_of(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors on one storage are reshapes of each other: contiguous, same elements."""
    strided = x.layout is other.layout is torch.strided
    if not strided or x.dtype != other.dtype or x.numel() != other.numel():
        return False
    same = x.storage_offset() == other.storage_offset()
    return same and x.is_contiguous() and other.is_contiguous()
