"""Computes layer, batch, group and instance norm, and distances, with elementary operations.

The fused kernels also return the mean and the inverse standard deviation, which PyTorch's vmap and
jvp rules treat as constants. In torch.func, derivatives of tangents and of gradients under vmap are
therefore wrong (pytorch#196699, pytorch#196700). `per_example_grad`, Jacobians and forward mode in
gradtools call the functions of this module instead, whose derivatives of all orders are correct.
`cdist` replaces `torch.cdist`, whose backward kernel has a wrong batching rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_dual

Tensor = torch.Tensor


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Computes (input - mean) / sqrt(var + eps) over the last axes, times weight, plus bias."""
    axes = tuple(range(-len(normalized_shape), 0))
    return _scaled(_normalized(input, axes, eps), weight, bias)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalizes groups of channels of each example."""
    x = input.reshape(input.shape[0], num_groups, -1)
    y = _normalized(x, (-1,), eps).reshape(input.shape)
    return _scaled(y, *_of_channels(input, weight, bias))


def batch_norm(
    input: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *cudnn_enabled: bool,
) -> Tensor:
    """Computes `torch.batch_norm`. PyTorch's kernel is called to update the running statistics."""
    axes = (0, *range(2, input.dim()))
    how = training, momentum, eps, *cudnn_enabled
    return _by_statistics(torch.batch_norm, axes, input, weight, bias, mean, var, how)


def instance_norm(
    input: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *cudnn_enabled: bool,
) -> Tensor:
    """Computes `torch.instance_norm`, over the spatial axes of each example."""
    axes = tuple(range(2, input.dim()))
    how = use_input_stats, momentum, eps, *cudnn_enabled
    return _by_statistics(torch.instance_norm, axes, input, weight, bias, mean, var, how)


def _by_statistics(
    kernel: Callable[..., Tensor],
    axes: tuple[int, ...],
    input: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    how: tuple[Any, ...],
) -> Tensor:
    """Normalizes with the statistics of the input in training, otherwise with running statistics.

    how: The remaining arguments of the kernel: `training`, `momentum`, `eps` and the cuDNN flag.
    """
    training, _, eps, *_ = how
    if not training:
        return kernel(input, weight, bias, mean, var, *how)
    if mean is not None or var is not None:
        with torch.no_grad():
            kernel(value_of(input), None, None, mean, var, *how)
    return _scaled(_normalized(input, axes, eps), *_of_channels(input, weight, bias))


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Computes `torch.cdist` from the differences of all pairs of rows."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _functional(
    program: Callable[..., Tensor],
    default: bool,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    use_input_stats: bool | None = None,
) -> Tensor:
    """Calls `program` with the arguments of the corresponding function in `torch.nn.functional`."""
    training = use_input_stats if training is None else training
    training = default if training is None else training
    momentum = 0.0 if momentum is None else momentum
    on = torch.backends.cudnn.enabled
    return program(input, weight, bias, running_mean, running_var, training, momentum, eps, on)


def _of_channels(input: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """Reshapes per-channel parameters so that they broadcast with the input."""
    shape = (-1, *[1] * (input.dim() - 2))
    return [None if x is None else x.reshape(shape) for x in parameters]


def _normalized(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Computes (x - mean) / sqrt(variance + eps) over the given axes."""
    dtype = x.dtype
    if dtype in (torch.bfloat16, torch.float16):  # PyTorch's kernels also compute in float32
        x = x.float()
    centered = x - x.mean(axes, keepdim=True)
    variance = (centered * centered).mean(axes, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    return (centered * rstd).to(dtype)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x if weight is None else x * _with_tangent(weight, x)
    return (y if bias is None else y + _with_tangent(bias, x)).to(x.dtype)


def _with_tangent(x: Tensor, like: Tensor) -> Tensor:
    """Returns x with a tangent of zeros if `like` has a tangent and x does not.

    For an x without a tangent, PyTorch creates a symbolic zero; operations on it are a hundred
    times slower.
    """
    if upstream.peek_interpreter_stack() is not None or not is_dual(like) or is_dual(x):
        return x
    return forward_ad.make_dual(x, torch.zeros_like(value_of(x)))


def value_of(x: Tensor) -> Tensor:
    """Returns the detached primal value of a dual number."""
    return forward_ad.unpack_dual(x).primal.detach()


_functions = torch.nn.functional
PROGRAMS: dict[Any, Callable[..., Any]] = {
    torch.layer_norm: layer_norm,
    _functions.layer_norm: layer_norm,
    torch.group_norm: group_norm,
    _functions.group_norm: group_norm,
    torch.batch_norm: batch_norm,
    _functions.batch_norm: partial(_functional, batch_norm, False),
    torch.instance_norm: instance_norm,
    _functions.instance_norm: partial(_functional, instance_norm, True),
    torch.cdist: cdist,
}
"""Maps PyTorch functions to the functions of this module that replace them."""
