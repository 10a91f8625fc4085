"""What PyTorch's transforms wrap around a tensor, and zeros like one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

Tensor = torch.Tensor

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def unwrapped(x: Tensor) -> Tensor:
    """x beneath the wrappers of torch.func's transforms."""
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def alive(x: Tensor) -> Tensor:
    """x without the wrappers of transforms that ended, in which a pullback may still run.

    A transform that begins then would take them for its own.
    """
    while is_wrapped(x) and torch._C._functorch.maybe_get_level(x) == _ENDED:
        x = torch._C._functorch.get_unwrapped(x)
    return x


_ENDED = -2


def is_dual(x: Any) -> bool:
    """Whether x is a tensor with a tangent."""
    if forward_ad._current_level < 0 or not isinstance(x, Tensor) or not may_be_dual(x):
        return False
    x = unwrapped(x)
    if "Batched" in repr(torch._C._dispatch_keys(x)):
        return False  # of the vmap of before functorch, in which dual numbers cannot be
    return forward_ad.unpack_dual(x).tangent is not None


def may_be_dual(x: Tensor) -> bool:
    """Whether PyTorch gives tensors of this kind tangents at all."""
    return is_inexact(x) and x.layout is torch.strided


def is_inexact(x: Any) -> bool:
    """Whether x has a floating or complex dtype."""
    return x.is_floating_point() or x.is_complex()


# --- zeros -------------------------------------------------------------------------------


def like(x: Tensor) -> Any:
    """The shape, dtype and device of a tensor that is differentiated, None for others."""
    return (x.shape, x.dtype, x.device) if is_inexact(x) else None


def zeros(shape: Any, dtype: Any, device: Any) -> Tensor:
    """Zeros of what `like` says."""
    return torch.zeros(shape, dtype=dtype, device=device)


def filled(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """`values` with zeros for None, where there is something to be zero."""
    pairs = zip(values, likes, strict=True)
    return [zeros(*like) if v is None and like else v for v, like in pairs]
