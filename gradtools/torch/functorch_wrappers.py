"""Wrappers of functorch and forward mode around a tensor: unwrapping, and zeros like one."""

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
    """x beneath the wrappers of torch.func's transforms."""
    while is_wrapped(x):
        x = upstream.get_unwrapped(x)
    return x


def batches_first(x: Tensor) -> Tensor:
    """x unwrapped, with the batch axes of all vmaps in front, the outermost first."""
    axes: list[int] = []
    while is_wrapped(x):
        axes += [upstream.maybe_get_bdim(x)] if upstream.is_batchedtensor(x) else []
        x = upstream.get_unwrapped(x)
    for done, axis in enumerate(reversed(axes)):  # the innermost first: it counts all axes
        x = x.movedim(axis + done, 0)
    return x


def levels(x: Tensor) -> Iterator[int]:
    """The levels of functorch that x is wrapped in."""
    while is_wrapped(x):
        yield upstream.maybe_get_level(x)
        x = upstream.get_unwrapped(x)


def levels_differentiating(xs: Iterable[Any]) -> set[int]:
    """The levels that differentiate any of these: functorch's, and what is beneath them.

    `OF_AUTOGRAD` is autograd's own graph, `OF_DUAL_NUMBERS` forward mode outside of functorch,
    which functorch hides: if it is open, any of these may be pushed.
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
    """Whether x is a batch of vmap's."""
    while is_wrapped(x) and not upstream.is_batchedtensor(x):
        x = upstream.get_unwrapped(x)
    return bool(is_wrapped(x))


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
    """x without the wrappers of transforms that ended, in which a pullback may still run.

    A transform that begins then would take them for its own.
    """
    while is_wrapped(x) and upstream.maybe_get_level(x) == _ENDED:
        x = upstream.get_unwrapped(x)
    return x


_ENDED = -2


def is_dual(x: Any) -> bool:
    if upstream.forward_level() < 0 or not isinstance(x, Tensor) or not may_be_dual(x):
        return False
    x = unwrapped(x)
    if upstream.is_legacy_batched(x):
        return False  # of the vmap of before functorch, in which dual numbers cannot be
    return forward_ad.unpack_dual(x).tangent is not None


def may_be_dual(x: Tensor) -> bool:
    """Whether PyTorch gives tensors of this kind tangents at all."""
    return is_inexact(x) and x.layout is torch.strided


def is_inexact(x: Any) -> bool:
    return x.is_floating_point() or x.is_complex()


# --- zeros -------------------------------------------------------------------------------


def like(x: Tensor) -> Any:
    """The shape, dtype and device of a tensor that is differentiated, None for others.

    Of a subclass that wraps tensors, such as a DTensor, also how it does so.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return None
    look = x.shape, x.dtype, x.device
    if type(x) in _PLAIN and not is_wrapped(x):
        return look
    inner = unwrapped(x)
    if type(inner) in _PLAIN or inner.layout is not torch.strided or inner.shape != x.shape:
        return look
    inside = _SubclassParts.of(inner)
    return look if inside is None else (*look, inside)


_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, eq=False, repr=False)
class _SubclassParts:
    """What a wrapper subclass is made of, by PyTorch's protocol of `__tensor_flatten__`."""

    kind: Any
    parts: dict[str, Any]  # what the tensors look like
    others: dict[str, Any]  # what else it is made of, such as a mesh
    context: Any
    stride: Any

    @classmethod
    def of(cls, x: Any) -> _SubclassParts | None:
        if not hasattr(x, "__tensor_flatten__"):
            return None
        names, context = x.__tensor_flatten__()
        held = {name: getattr(x, name) for name in names}
        parts = {name: like(y) for name, y in held.items() if isinstance(y, Tensor)}
        if None in parts.values():  # a quantized one, say
            return None
        others = {name: y for name, y in held.items() if name not in parts}
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
    """Where a linear map is traced: a branch of it that skips zeros is not the one to follow."""
    if inside is not None:
        return inside.zeros(shape)
    return torch.ones(shape, dtype=dtype, device=device)


def filled(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """`values` with zeros for None, where there is something to be zero."""
    pairs = zip(values, likes, strict=True)
    return [zeros(*like) if v is None and like else v for v, like in pairs]
