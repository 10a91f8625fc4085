"""Unwraps functorch and dual tensors, and creates zeros like them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor

is_wrapped = upstream.is_wrapped


def unwrapped(x: Tensor) -> Tensor:
    """x without the wrappers of torch.func transforms."""
    while is_wrapped(x):
        x = upstream.get_unwrapped(x)
    return x


def may_have_no_value(x: Tensor) -> bool:
    """Whether a transform is open in which x may have no value that Python could read."""
    return is_wrapped(x) or upstream.is_legacy_batched(x) or upstream.is_traced_by_make_fx()


def levels(x: Tensor) -> Iterator[int]:
    """The functorch levels in which x is wrapped."""
    while is_wrapped(x):
        yield upstream.maybe_get_level(x)
        x = upstream.get_unwrapped(x)


def levels_differentiating(xs: Iterable[Any]) -> set[int]:
    """The levels at which any of xs is differentiated.

    These are functorch's levels, `OF_AUTOGRAD` for autograd's own graph, and `OF_DUAL_NUMBERS` for
    forward mode outside of functorch. Functorch hides the latter's tangents, so if its level is
    open, any of xs counts as differentiated there.
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


def is_mapped(x: Tensor) -> bool:
    """Whether x is batched by vmap."""
    while is_wrapped(x) and not upstream.is_batchedtensor(x):
        x = upstream.get_unwrapped(x)
    return bool(is_wrapped(x))


def is_pushed() -> bool:
    """Whether a level of forward mode is active."""
    levels = upstream.get_interpreter_stack() or ()
    pushes = any(level.key() == upstream.TransformType.Jvp for level in levels)
    return pushes or upstream.forward_level() >= 0


def tensors_in(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for item in x:
            yield from tensors_in(item)
    elif isinstance(x, dict):
        for item in x.values():
            yield from tensors_in(item)


def alive(x: Tensor) -> Tensor:
    """x without dead wrappers of finished transforms, which a late pullback may receive.

    A new transform at the same level would mistake them for its own.
    """
    while is_wrapped(x) and upstream.maybe_get_level(x) == _ENDED:
        x = upstream.get_unwrapped(x)
    return x


_ENDED = -2


def is_dual(x: Any) -> bool:
    if upstream.forward_level() < 0 or not isinstance(x, Tensor) or not may_be_dual(x):
        return False
    x = unwrapped(x)
    if upstream.is_legacy_batched(x) or x.is_inference():
        return False  # which have no tangents
    return forward_ad.unpack_dual(x).tangent is not None


def may_be_dual(x: Tensor) -> bool:
    """Whether PyTorch supports tangents for tensors of this dtype and layout."""
    return is_inexact(x) and x.layout is torch.strided


def is_inexact(x: Any) -> bool:
    return x.is_floating_point() or x.is_complex()


def unshared(x: Tensor) -> Tensor:
    """x, or a copy if its entries overlap in memory: tangents get x's memory layout."""
    if torch.compiler.is_dynamo_compiling() or x.is_contiguous():
        return x
    if all(n == 1 or s for n, s in zip(x.shape, x.stride(), strict=True)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


# --- zeros -------------------------------------------------------------------------------


def like(x: Tensor) -> Any:
    """The shape, dtype and device of a floating or complex tensor, None for others.

    For a wrapper subclass, such as DTensor, also its parts.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return None
    aval = x.shape, x.dtype, x.device
    if type(x) in _PLAIN and not is_wrapped(x):
        return aval
    inner = unwrapped(x)
    if type(inner) in _PLAIN or inner.layout is not torch.strided or inner.shape != x.shape:
        return aval
    inside = _SubclassParts.of(inner)
    return aval if inside is None else (*aval, inside)


_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, eq=False, repr=False)
class _SubclassParts:
    """The parts of a wrapper subclass, by PyTorch's `__tensor_flatten__` protocol."""

    kind: Any
    parts: dict[str, Any]  # `like` of the inner tensors
    others: dict[str, Any]  # other parts, such as a mesh
    context: Any
    stride: Any

    @classmethod
    def of(cls, x: Any) -> _SubclassParts | None:
        if not hasattr(x, "__tensor_flatten__"):
            return None
        names, context = x.__tensor_flatten__()
        attributes = {name: getattr(x, name) for name in names}
        parts = {name: like(y) for name, y in attributes.items() if isinstance(y, Tensor)}
        if None in parts.values():  # integers, as in a quantized tensor
            return None
        others = {name: y for name, y in attributes.items() if name not in parts}
        return cls(type(x), parts, others, context, x.stride())

    def zeros(self, shape: Any) -> Tensor:
        inner = {**self.others, **{name: zeros(*part) for name, part in self.parts.items()}}
        made = self.kind.__tensor_unflatten__(inner, self.context, shape, self.stride)
        return made.detach()


def zeros(shape: Any, dtype: Any, device: Any, inside: _SubclassParts | None = None) -> Tensor:
    if inside is not None:
        return inside.zeros(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def ones(shape: Any, dtype: Any, device: Any, inside: _SubclassParts | None = None) -> Tensor:
    """Example vectors for tracing a linear map, which may branch on whether they are zero."""
    if inside is not None:
        return inside.zeros(shape)
    return torch.ones(shape, dtype=dtype, device=device)


def filled(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """`values` with zeros for None, except where `likes` is None."""
    pairs = zip(values, likes, strict=True)
    return [zeros(*like) if v is None and like else v for v, like in pairs]
