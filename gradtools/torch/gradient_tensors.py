"""Detaches and compares tensors, materializes symbolic zeros, and copies inference tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.operation_marks import DERIVATIVE, detached

Tensor = torch.Tensor


def normal(x: Tensor) -> Tensor:
    """Returns x or, if x is an inference tensor, a copy that autograd can save."""
    return x.clone() if x.is_inference() else x


def kept(fun: Any, x: Tensor) -> Tensor:
    """Returns x, detached if x is a parameter to which a lazy graph will attach the results."""
    return x.detach() if id(x) in getattr(fun, "own", ()) and fun.is_deferred() else x


def without_graph(x: Tensor, of_tangent: bool = True) -> Tensor:
    """Detaches x but preserves the tangent of a dual number, which `detach` alone would drop.

    of_tangent: Whether to detach the tangent too.
    """
    if upstream.forward_level() >= 0:
        primal, tangent = forward_ad.unpack_dual(x)
        if tangent is not None:
            tangent = detached(tangent, DERIVATIVE) if of_tangent else tangent
            return forward_ad.make_dual(detached(primal, DERIVATIVE), tangent)
    if upstream.count_of_dispatch_modes() or upstream.count_of_function_modes():
        return detached(x, DERIVATIVE)  # marked for a recorder
    return x.detach()


def tangents_of(xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tangents of the dual numbers in xs. A tangent may require grad."""
    if upstream.forward_level() < 0 or upstream.peek_interpreter_stack() is not None:
        return []  # inside of vmap a batched dual tensor cannot be unpacked
    tangents = [forward_ad.unpack_dual(x).tangent for x in xs if is_inexact(x)]
    return [t for t in tangents if t is not None]


def freed(xs: Sequence[Any], of_tangent: bool = True) -> list[Any]:
    """Returns a list of xs in which the tensors that require grad are detached.

    of_tangent: Whether to detach the tangents too.
    """
    result = []
    for x in xs:  # a loop is faster, and every derivative calls this function
        result.append(without_graph(x, of_tangent) if x is not None and x.requires_grad else x)
    return result


def in_memory(xs: Sequence[Tensor | None], likes: Sequence[Tensor]) -> list[Tensor | None]:
    """Replaces symbolic zeros, which forward mode creates, with allocated zeros."""
    return [
        x if x is None else tangent_in_memory(x, like) for x, like in zip(xs, likes, strict=True)
    ]


def tangent_in_memory(tangent: Tensor | None, like: Tensor) -> Tensor:
    """Returns the tangent, or allocated zeros if the tangent is None or a symbolic zero."""
    if tangent is None or upstream.is_zero(tangent):
        return torch.zeros_like(like, requires_grad=False)
    return tangent


def is_equal(
    y: Tensor, first: Tensor, exact: bool, scale: Sequence[Tensor], every: Sequence[Tensor]
) -> bool:
    """Returns whether two results are equal, or equal up to rounding if not `exact`.

    scale: The outputs whose largest entry determines the absolute tolerance.
    every: All outputs, whose largest entry determines the rounding error of an entry that is zero.
    """
    if y.dtype is torch.complex32:  # PyTorch does not compare complex32
        y, first = map(torch.view_as_real, (y, first))
        scale, every = ([torch.view_as_real(x) for x in xs] for xs in (scale, every))
    if exact and y.device.type == "cpu":
        return torch.equal(y, first) or torch.allclose(y, first, 0, 0, equal_nan=True)
    eps = torch.finfo(y.dtype).eps
    near = 1e-2 if y.dtype.itemsize < 4 or y.device.type != "cpu" else 1e-4
    if y.device.type == "cpu" and eps < 1e-10:
        near = 1e-9
    close = (y - first).abs() <= near * (first.abs() + _largest(scale)) + 4 * eps * _largest(every)
    close |= (y == first) | ((y != y) & (first != first))  # equal infinite entries, or NaN
    return bool(close.all())  # reads one value, which synchronizes the device


def _largest(xs: Sequence[Tensor]) -> Any:
    """Returns the largest modulus of the finite entries, or 0.0 if there are no entries."""
    each = [torch.where(x.isfinite(), x, 0).abs().max() for x in xs if x.numel()]
    return torch.stack(each).max() if each else 0.0
