"""PyTorch operations written in plain ones, whose derivatives are right in both modes.

Where PyTorch's derivative of an operation is wrong or lacking, that of its formula is right, in
both modes and at any order. Which ones, and when, says `derivatives.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """By doubling steps (Hillis and Steele, Data parallel algorithms, 1986)."""
    if input.dim() == 0:
        return input * 1
    y, step = input.movedim(dim, 0), 1
    while step < y.shape[0]:
        y = torch.cat((y[:step], _logaddexp(y[step:], y[:-step])))
        step *= 2
    y = y.movedim(0, dim)
    if not y.is_complex():
        return y
    # Of the logarithm's branches PyTorch's own is taken: they part by multiples of 2 pi i.
    apart = torch.logcumsumexp(value_of(input), dim) - value_of(y)
    return y + 2j * torch.pi * torch.round(apart.imag / (2 * torch.pi)).nan_to_num()


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """By plain operations: that of torch has NaN for second derivatives (torch#196704)."""
    most = torch.maximum(value_of(x).real, value_of(y).real)
    most = most.masked_fill(most.isinf(), 0.0)
    return torch.log(torch.exp(x - most) + torch.exp(y - most)) + most


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """clamp(x + 3, 0, 6) / 6."""
    result = torch.clamp(input + 3, 0, 6) / 6
    return input.copy_(result) if inplace else result


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    """The distances between the rows of x1 and those of x2."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """The distances between the rows."""
    i, j = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return torch.linalg.vector_norm(input[i] - input[j], p, -1)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """v / |v| times g, with a norm for each index of one axis, or one for all (-1)."""
    norm = torch.sqrt(summed_but(v * v, dim))
    return v * (g.reshape(norm.shape) / norm)


def summed_but(x: Tensor, dim: int) -> Tensor:
    """The sums over all axes but one, which stay; over all of them for -1."""
    return x.sum([k for k in range(x.dim()) if k != dim], keepdim=True)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """(x - mean) / deviation over the last axes, scaled."""
    dims = tuple(range(-len(normalized_shape), 0))
    return _scaled(_normalised(input, dims, eps), weight, bias)


def batch_norm(input: Tensor, *args: Any) -> Tensor:
    """The same over the batch; the running statistics move as PyTorch's."""
    return _over_statistics(torch.batch_norm, (0, *range(2, input.dim())), input, *args)


def instance_norm(input: Tensor, *args: Any) -> Tensor:
    """The same over each example's own axes."""
    return _over_statistics(torch.instance_norm, tuple(range(2, input.dim())), input, *args)


def _over_statistics(
    plain: Any, dims: Any, input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *how: Any
) -> Tensor:
    with torch.no_grad():  # which moves the running statistics
        plain(value_of(input), None, None, mean, var, True, *how[1:])
    shape = (-1, *[1] * (input.dim() - 2))
    reshaped = [None if x is None else x.reshape(shape) for x in (weight, bias)]
    return _scaled(_normalised(input, dims, how[2]), *reshaped)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """The operation itself, of an input that lies in its own order."""
    return torch.group_norm(input.contiguous(), num_groups, weight, bias, eps, cudnn_enabled)


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    variance = (centred * centred).mean(dims, keepdim=True)
    return centred / torch.sqrt(variance + _moved(torch.full_like(value_of(variance), eps)))


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x if weight is None else x * _moved(weight)
    return (y if bias is None else y + _moved(bias)).to(x.dtype)


def _moved(x: Tensor) -> Tensor:
    """The same with zeros for a tangent: a symbolic zero takes PyTorch a hundred times longer."""
    if (
        upstream.peek_interpreter_stack() is not None
        or forward_ad.unpack_dual(x).tangent is not None
    ):
        return x
    return forward_ad.make_dual(x, torch.zeros_like(value_of(x)))


def value_of(x: Tensor) -> Tensor:
    """The number behind a dual number, in no graph."""
    return forward_ad.unpack_dual(x).primal.detach()


def cholesky_inverse(input: Tensor, upper: bool = False) -> Tensor:
    """The inverse of L L^H."""
    eye = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
    return cholesky_solve(eye, input, upper)


def cholesky_solve(input: Tensor, input2: Tensor, upper: bool = False) -> Tensor:
    """The solution X of L L^H X = B, by two triangular systems."""
    lower = input2.mH if upper else input2
    result = torch.linalg.solve_triangular(lower, input, upper=False)
    return torch.linalg.solve_triangular(lower.mH, result, upper=True)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (over_groups(x, times) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = attention_weights(query, key, attn_mask, is_causal, scale)
    return torch.dropout(weights, dropout_p, True) @ value


def over_groups(x: Tensor, times: int) -> Tensor:
    """Heads of keys or values, each for so many heads of queries."""
    return x if times == 1 else x.repeat_interleave(times, -3)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """softmax(scale q k^T + mask), zero in rows of which nothing is allowed."""
    scores = query @ key.mT * scale
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    most = value_of(scores).amax(-1, keepdim=True)
    terms = torch.exp(scores - most.masked_fill(most.isinf(), 0.0))
    total = terms.sum(-1, keepdim=True)
    return terms / total.masked_fill(value_of(total) == 0, 1.0)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """x sigmoid(x)."""
    return in_place(silu)(input) if inplace else input * torch.sigmoid(input)


def ldexp(input: Tensor, other: Tensor) -> Tensor:
    """x 2^n."""
    return input * torch.ldexp(torch.ones_like(value_of(input)), other)


def in_place(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same that writes what it finds into its first argument."""
    return lambda input, *args, **kw: input.copy_(formula(input.clone(), *args, **kw))
