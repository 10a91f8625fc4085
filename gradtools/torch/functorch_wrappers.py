"""Inspects and unwraps functorch wrappers and dual tensors, and creates zeros of their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor

is_wrapped = upstream.is_wrapped
PLAIN = frozenset([Tensor, torch.nn.Parameter])
"""The classes of plain tensors; subclasses such as DTensor are excluded."""


def unwrapped(x: Tensor) -> Tensor:
    """Returns x without the wrappers of torch.func transforms."""
    while is_wrapped(x):
        x = upstream.get_unwrapped(x)
    return x


def may_have_no_value(x: Tensor) -> bool:
    """Returns whether x may have no value that Python can read, because a transform is active."""
    return is_wrapped(x) or upstream.is_legacy_batched(x) or upstream.is_traced_by_make_fx()


def levels_differentiating(xs: Iterable[Any]) -> set[int]:
    """Returns the levels at which at least one tensor of xs is differentiated.

    A level is the number of a functorch transform, `OF_AUTOGRAD` for autograd's graph, or
    `OF_DUAL_NUMBERS` for forward mode outside of functorch. Inside of functorch, tangents of
    forward mode are not visible, so every floating or complex tensor of xs counts as differentiated
    if a level of forward mode is active.
    """
    result: set[int] = set()
    hidden = upstream.forward_level() >= 0 and upstream.peek_interpreter_stack() is not None
    for x in xs:
        if not isinstance(x, Tensor) or not is_inexact(x):
            continue
        is_pushed = hidden or is_dual(x)
        while is_wrapped(x):
            if upstream.is_gradtrackingtensor(x):
                result.add(upstream.maybe_get_level(x))
            x = upstream.get_unwrapped(x)
        result |= {OF_AUTOGRAD} if x.requires_grad else set()
        result |= {OF_DUAL_NUMBERS} if is_pushed else set()
    return result


OF_AUTOGRAD, OF_DUAL_NUMBERS = -1, -2


def levels_of_vmap(x: Tensor) -> set[int]:
    """Returns the functorch levels of vmap in which x is batched."""
    found = set[int]()
    while is_wrapped(x):
        if upstream.is_batchedtensor(x):
            found.add(upstream.maybe_get_level(x))
        x = upstream.get_unwrapped(x)
    return found


def with_batch_in_front(xs: Sequence[Tensor], dims: Sequence[Any], size: int) -> list[Tensor]:
    """Moves vmap's batch axis to the front, and expands tensors that are not batched (dim None)."""
    pairs = zip(xs, dims, strict=True)
    return [x.expand(size, *x.shape) if d is None else x.movedim(d, 0) for x, d in pairs]


def tensors_in(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from tensors_in(item)
    elif isinstance(x, dict):
        for item in x.values():
            yield from tensors_in(item)


def alive(x: Tensor) -> Tensor:
    """Removes the wrappers of finished transforms from x.

    A pullback that is called after a transform has ended may receive such a wrapper. A new
    transform at the same level would treat the wrapper as its own wrapper.
    """
    while is_wrapped(x) and upstream.maybe_get_level(x) == _ENDED:
        x = upstream.get_unwrapped(x)
    return x


_ENDED = -2


def is_dual(x: Any) -> bool:
    level = upstream.forward_level()
    if level < 0 or not isinstance(x, Tensor) or not may_be_dual(x):
        return False
    x = unwrapped(x)
    if upstream.is_legacy_batched(x) or x.is_inference():
        return False  # legacy batched tensors and inference tensors have no tangents
    return upstream.unpack_dual(x, level)[1] is not None


def may_be_dual(x: Tensor) -> bool:
    """Returns whether PyTorch supports tangents for tensors of x's dtype and layout."""
    return is_inexact(x) and x.layout is torch.strided


def is_inexact(x: Any) -> bool:
    return x.is_floating_point() or x.is_complex()


def unshared(x: Tensor) -> Tensor:
    """Returns x, or a copy if entries of x share memory, since a tangent has the strides of x."""
    if torch.compiler.is_dynamo_compiling() or x.is_contiguous() or not has_overlaps(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def has_overlaps(x: Tensor) -> bool:
    """Returns whether entries of a dense tensor share memory, for example after `expand`."""
    return any(n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True))


# --- zeros -------------------------------------------------------------------------------


class Example:
    """A detached tensor of a wrapper subclass, such as DTensor, which is passed to `zeros_like`."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()


def like(x: Tensor) -> Any:
    """Returns the shape, dtype and device of x, or None if x is not floating or complex.

    For a wrapper subclass, the result also contains an `Example`.
    """
    if not is_inexact(x):
        return None
    aval, inner = (x.shape, x.dtype, x.device), unwrapped(x)
    is_wrapper = type(inner) not in PLAIN and hasattr(inner, "__tensor_flatten__")
    return (*aval, Example(inner)) if is_wrapper and inner.shape == x.shape else aval


def zeros(shape: Any, dtype: Any, device: Any, example: Example | None = None) -> Tensor:
    if example is not None:
        return torch.zeros_like(example.x)
    return torch.zeros(shape, dtype=dtype, device=device)


def ones(shape: Any, dtype: Any, device: Any, example: Example | None = None) -> Tensor:
    """Returns ones. A linear map is traced with ones, because the map may branch on zeros."""
    if example is not None:
        return torch.ones_like(example.x)
    return torch.ones(shape, dtype=dtype, device=device)


def filled(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """Replaces None in `values` with zeros, unless the entry of `likes` is None."""
    pairs = zip(values, likes, strict=True)
    return [zeros(*like) if v is None and like else v for v, like in pairs]


def differentiated(xs: Sequence[Tensor]) -> bool:
    """Returns whether any of xs may be differentiated, in any mode or transform."""
    levels = upstream.get_interpreter_stack() or ()
    if any(level.key() in _DERIVATIVES for level in levels):
        return True
    plain = [unwrapped(x) for x in xs] if levels else xs
    if torch.is_grad_enabled() and any(x.requires_grad for x in plain):
        return True
    return upstream.forward_level() >= 0 and any(map(is_dual, plain))


_DERIVATIVES = (upstream.TransformType.Grad, upstream.TransformType.Jvp)
