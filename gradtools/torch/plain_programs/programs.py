"""Decompositions: PyTorch operations as programs of simple ones, right at every order.

PyTorch's derivatives of these operations are wrong or missing; those of the programs are right in
both modes, at every order and under vmap. `rows.py` lists which operations are replaced, and when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import batches_first, is_dual, is_inexact, is_wrapped

Tensor = torch.Tensor


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """By doubling steps (Hillis and Steele, Data parallel algorithms, 1986)."""
    if input.dim() == 0:
        return input * 1
    y, step = input.movedim(dim, 0), 1
    while step < y.shape[0]:
        a, b = y[step:], y[:-step]
        # By plain operations: torch.logaddexp has NaN for second derivatives (torch#196704).
        most = torch.maximum(value_of(a).real, value_of(b).real)
        most = most.masked_fill(most.isinf(), 0.0)
        y = torch.cat((y[:step], torch.log(torch.exp(a - most) + torch.exp(b - most)) + most))
        step *= 2
    y = y.movedim(0, dim)
    if not y.is_complex():
        return y
    # Takes PyTorch's branch of the logarithm; branches differ by multiples of 2 pi i.
    apart = torch.logcumsumexp(value_of(input), dim) - value_of(y)
    return y + 2j * torch.pi * torch.round(apart.imag / (2 * torch.pi)).nan_to_num()


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """clamp(x + 3, 0, 6) / 6."""
    result = torch.clamp(input + 3, 0, 6) / 6
    return input.copy_(result) if inplace else result


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    """The distances between the rows of x1 and those of x2."""
    return _norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """The distances between the rows."""
    i, j = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _norm(input[i] - input[j], p)


def _norm(x: Tensor, p: float) -> Tensor:
    """The p-norm over the last axis, whose derivatives are zero at zero, as PyTorch's."""
    if p == 0:
        return x.sign().abs().sum(-1)
    size = x.abs()
    if p == 1 or p == math.inf:
        return size.sum(-1) if p == 1 else size.amax(-1)
    if p == 2:
        total = (x * x).sum(-1)
    else:
        at_zero = value_of(x) == 0
        total = torch.where(at_zero, 0, torch.where(at_zero, 1, size) ** p).sum(-1)
    is_zero = value_of(total) == 0
    safe = torch.where(is_zero, 1, total)
    return torch.where(is_zero, 0, torch.sqrt(safe) if p == 2 else safe ** (1 / p))


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """v / |v| times g, with one norm for each index of an axis, or one for all (-1)."""
    norm = torch.sqrt((v * v).sum([k for k in range(v.dim()) if k != dim], keepdim=True))
    return v * (g.reshape(norm.shape) / norm)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | Tensor = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """(x - mean) / deviation over the last axes, scaled."""
    return native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm, and its mean and reciprocal deviation."""
    dims = tuple(range(-len(normalized_shape), 0))
    y, mean, rstd = _normalised(input, dims, eps)
    return _scaled(y, weight, bias), mean, rstd


def batch_norm(input: Tensor, *args: Any) -> Tensor:
    """Batch norm; PyTorch's own kernel updates the running statistics."""
    dims = (0, *range(2, input.dim()))
    return _over_statistics(torch.batch_norm, dims, input, *args)[0]


def native_batch_norm(input: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm, and its mean and reciprocal deviation."""
    dims = (0, *range(2, input.dim()))
    plain = lambda *args: torch.native_batch_norm(*args[:-1])
    y, mean, rstd = _over_statistics(plain, dims, input, *args, False)
    return y, mean.flatten(), rstd.flatten()


def native_batch_norm_legit(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`native_batch_norm`; one overload has no running statistics."""
    statistics = () if len(args) == 8 else (None, None)
    return native_batch_norm(*args[:3], *statistics, *args[3:])


def batch_norm_with_update(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`native_batch_norm` in training mode, and an empty reserve of cuDNN."""
    result = native_batch_norm(*args[:5], True, *args[5:])
    return *result, torch.empty(0, dtype=torch.uint8, device=args[0].device)


def instance_norm(input: Tensor, *args: Any) -> Tensor:
    """Instance norm: over the spatial axes of each example."""
    return _over_statistics(torch.instance_norm, tuple(range(2, input.dim())), input, *args)[0]


def _over_statistics(
    plain: Any, dims: Any, input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if mean is not None or var is not None:
        with torch.no_grad():  # updates the running statistics
            plain(value_of(input), None, None, mean, var, True, *how[1:])
    shape = (-1, *[1] * (input.dim() - 2))
    reshaped = [None if x is None else x.reshape(shape) for x in (weight, bias)]
    y, mean, rstd = _normalised(input, dims, how[2])
    return _scaled(y, *reshaped), mean, rstd


def batch_norm_by_statistics(
    input: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """Batch norm by running statistics, which are constants."""
    shape = (-1, *[1] * (input.dim() - 2))
    mean, rstd = mean.reshape(shape), torch.rsqrt(var + eps).reshape(shape)
    affine = [None if x is None else x.reshape(shape) for x in (weight, bias)]
    return _scaled((input - mean) * rstd, *affine)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Group norm: over groups of channels of each example."""
    x = input.reshape(input.shape[0], num_groups, -1)
    y = _normalised(x, (-1,), eps)[0].reshape(input.shape)
    shape = (-1, *[1] * (input.dim() - 2))
    return _scaled(y, *[None if x is None else x.reshape(shape) for x in (weight, bias)])


def _normalised(
    x: Tensor, dims: tuple[int, ...], eps: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kind = x.dtype
    if kind in (torch.bfloat16, torch.float16):  # as the kernels do
        x = x.float()
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    variance = (centred * centred).mean(dims, keepdim=True)
    if not isinstance(eps, Tensor):
        eps = torch.full_like(value_of(variance), eps)
    rstd = torch.rsqrt(variance + _moved(eps, x))
    return (centred * rstd).to(kind), mean, rstd


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x if weight is None else x * _moved(weight, x)
    return (y if bias is None else y + _moved(bias, x)).to(x.dtype)


def _moved(x: Tensor, operand: Tensor) -> Tensor:
    """x, with a tangent of zeros if its `operand` has a tangent and x has none.

    PyTorch's symbolic zero takes a hundred times longer.
    """
    if upstream.peek_interpreter_stack() is not None or not is_dual(operand) or is_dual(x):
        return x
    return forward_ad.make_dual(x, torch.zeros_like(value_of(x)))


def value_of(x: Tensor) -> Tensor:
    """The primal of a dual number, detached."""
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
    """Heads of keys or values, each repeated for the heads of queries in its group."""
    return x if times == 1 else x.repeat_interleave(times, -3)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """softmax(scale q k^T + mask); zero in rows whose entries are all masked."""
    scores = query @ key.mT * scale
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return softmax_and_log(scores)[0]


def softmax_and_log(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(s) along the last axis (zero if all are -inf), log(sum(e^s)), and the maximum."""
    most = value_of(scores).amax(-1, keepdim=True)
    terms = torch.exp(scores - most.masked_fill(most.isinf(), 0.0))
    total = terms.sum(-1, keepdim=True)
    weights = terms / total.masked_fill(value_of(total) == 0, 1.0)
    return weights, (torch.log(total) + most).squeeze(-1), most.squeeze(-1)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """x sigmoid(x)."""
    return in_place(silu)(input) if inplace else input * torch.sigmoid(input)


def ldexp(input: Tensor, other: Tensor) -> Tensor:
    """x 2^n."""
    return input * torch.ldexp(torch.ones_like(value_of(input)), other)


def in_place(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The in-place variant of a formula: writes its result into the first argument."""
    return lambda input, *args, **kw: input.copy_(formula(input.clone(), *args, **kw))


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1 and input.dim() > 1:
        weight = weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, weight * input)


def ctc_loss(log_probs: Tensor, targets: Tensor, *args: Any) -> Tensor:
    """CTC loss with lengths as tensors; PyTorch has no batching rule for others."""
    lengths = [torch.as_tensor(n, device=targets.device) for n in args[:2]]
    loss: Any = torch.ctc_loss
    result: Tensor = loss(log_probs, targets, *lengths, *args[2:])
    return result


def _reduced(x: Tensor, reduction: int) -> Tensor:
    """Reduces by PyTorch's enum: 0 none, 1 mean, 2 sum."""
    return x.mean() if reduction == 1 else x.sum() if reduction == 2 else x


def mse_loss(input: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduced((input - target) ** 2, reduction)


def huber_loss(input: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """Quadratic up to delta, linear beyond."""
    gap = input - target
    within = gap.clamp(-delta, delta)
    return _reduced(within * (gap - 0.5 * within), reduction)


def soft_margin_loss(input: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduced(torch.nn.functional.softplus(-target * input), reduction)


def sinc(input: Tensor) -> Tensor:
    """sin(pi x) / (pi x), by its power series where |pi x| < 1."""
    z = torch.pi * (input if is_inexact(input) else input.to(torch.get_default_dtype()))
    small = value_of(z).abs() < 1
    square = torch.where(small, z, 0) ** 2
    series = torch.ones_like(square)
    for n in range(14, 0, -1):
        series = 1 - series * square / (2 * n * (2 * n + 1))
    far = torch.where(small, 1, z)
    return torch.where(small, series, torch.sin(far) / far)


def as_strided_scatter(
    input: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Tensor:
    """input, with src at the entries of the view `as_strided`."""
    places = torch.arange(input.numel(), device=input.device)
    places = places.as_strided(size, stride, storage_offset or 0).flatten()
    return input.flatten().index_copy(0, places, src.flatten().to(input.dtype)).reshape(input.shape)


def det(A: Tensor) -> Tensor:
    """The determinant, also of a singular matrix.

    With A = U S V^H of the values, det(A) = det(U V^H) det(U^H A V) with constants U and V.
    The trailing k by k block of U^H A V is small, where k is the rank deficiency; by the Schur
    complement of the leading block B

        det(A) = det(U V^H) det(B) det(E - D B^-1 C)

    where det(B) is the product of pivots, and the last determinant is division-free. Compiled code
    uses the product of pivots beyond 4 by 4, which has no derivative at a singular matrix.
    """
    n = A.shape[-1]
    if is_compiling():  # where the rank deficiency cannot be read
        return _without_division(A) if n <= 4 else _product_of_pivots(A)
    k = deficiency(A)
    if not k:
        return _product_of_pivots(A)
    u, _, vh = torch.linalg.svd(value_of(A))
    sign = torch.linalg.det(u) * torch.linalg.det(vh)
    m = u.mH @ A @ vh.mH
    halves = slice(n - k), slice(n - k, None)
    b, c, d, e = (m[..., i, j] for i in halves for j in halves)
    if k == n:
        return sign * _without_division(e)
    last = e - d @ torch.linalg.inv(b) @ c
    return sign * _product_of_pivots(b) * _without_division(last)


def deficiency(A: Tensor) -> int:
    """The number of singular values that are nearly zero; the maximum over a batch."""
    values = batches_first(A).detach() if is_wrapped(A) else value_of(A)
    if not values.numel():
        return 0
    sizes = torch.linalg.svdvals(values)
    small = sizes <= torch.finfo(sizes.dtype).eps ** 0.5 * sizes[..., :1]
    return int(small.sum(-1).max())


def _product_of_pivots(A: Tensor) -> Tensor:
    lu, pivots = torch.linalg.lu_factor(A)
    swaps = (pivots != torch.arange(1, A.shape[-1] + 1, device=A.device)).sum(-1) % 2
    return lu.diagonal(dim1=-2, dim2=-1).prod(-1) * (1 - 2 * swaps)


def _without_division(A: Tensor) -> Tensor:
    """Bird, A simple division-free algorithm for computing determinants, 2011."""
    n, power = A.shape[-1], A
    for _ in range(n - 1):
        diagonal = power.diagonal(dim1=-2, dim2=-1)
        later = diagonal - diagonal.flip(-1).cumsum(-1).flip(-1)  # minus those after it
        power = (power.triu(1) + torch.diag_embed(later)) @ A
    return (-1) ** (n - 1) * power[..., 0, 0]


# --- recurrent layers ---------------------------------------------------------------------------

Cell = Callable[..., tuple[Tensor, ...]]
linear = torch.nn.functional.linear


def _gru(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Any = None, c: Any = None) -> Any:
    xs, hs = linear(x, w, b).chunk(3, -1), linear(h, u, c).chunk(3, -1)
    reset, update = torch.sigmoid(xs[0] + hs[0]), torch.sigmoid(xs[1] + hs[1])
    new = torch.tanh(xs[2] + reset * hs[2])
    return (new + update * (h - new),)


def _lstm(
    x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    biases, projection = ((None, None), others) if len(others) < 2 else (others[:2], others[2:])
    gates = linear(x, w, biases[0]) + linear(h, u, biases[1])
    take, forget, new, give = gates.chunk(4, -1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(take) * torch.tanh(new)
    h = torch.sigmoid(give) * torch.tanh(c)
    return linear(h, projection[0]) if projection else h, c  # type: ignore[arg-type]


def _rnn(function: Callable[[Tensor], Tensor]) -> Cell:
    def cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Any = None, c: Any = None) -> Any:
        return (function(linear(x, w, b) + linear(h, u, c)),)

    return cell


_CELLS: dict[str, Cell] = {
    "gru": _gru,
    "lstm": _lstm,
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(torch.relu),
}


def recurrent_cell(name: str) -> Callable[..., Any]:
    """`torch.gru_cell`, `torch.lstm_cell`, `torch.rnn_tanh_cell` or `torch.rnn_relu_cell`."""
    step = _CELLS[name]

    def run(input: Tensor, hx: Any, *weights: Tensor | None) -> Any:
        states = [*hx] if isinstance(hx, tuple | list) else [hx]
        result = step(input, *states, *weights)
        return result if len(result) > 1 else result[0]

    return run


def recurrent_layers(name: str) -> Callable[..., Any]:
    """`torch.gru`, `lstm`, `rnn_tanh` or `rnn_relu`, for sequences that are not packed."""
    step = _CELLS[name]

    def run(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        states = [*hx] if isinstance(hx, tuple | list) else [hx]
        directions = 1 + bidirectional
        size = len(params) // (num_layers * directions)
        x, ends = input.transpose(0, 1) if batch_first else input, []
        for layer in range(num_layers):
            if layer and dropout and train:
                x = torch.dropout(x, dropout, True)
            outs = []
            for k in range(layer * directions, (layer + 1) * directions):
                backwards = bool(k % directions)
                state, ys = tuple([s[k] for s in states]), []
                for row in reversed(x.unbind(0)) if backwards else x.unbind(0):
                    state = step(row, *state, *params[k * size : (k + 1) * size])
                    ys.append(state[0])
                outs.append(torch.stack(ys[::-1] if backwards else ys))
                ends.append(state)
            x = torch.cat(outs, -1)
        x = x.transpose(0, 1) if batch_first else x
        return x, *[torch.stack(each) for each in zip(*ends, strict=True)]

    return run
