"""Function modes of one thread: the kernels that gradtools chooses where it differentiates again.

The fused kernels of attention have one derivative, in reverse mode. Where gradtools itself pushes
tangents or takes a second derivative, attention runs by plain operations. (`sdpa_kernel`, PyTorch's
own way to choose its math kernel, sets flags of the process: two threads that leave it in the order
in which they entered switch flash attention off for good.) The norms run by
`normalization.PROGRAMS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_dual, levels_differentiating, tensors_in
from gradtools.torch.normalization import PROGRAMS as NORMS

Tensor = torch.Tensor


class NoForwardMode(Exception):
    """PyTorch's only forward-mode level is in use, or cannot be used."""


def _attention(
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
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # PyTorch's own softmax has a tangent that has no derivative. All masked: a row of zeros.
    most = _value_of(scores).amax(-1, keepdim=True)
    terms = torch.exp(scores - most.masked_fill(most.isinf(), 0.0))
    total = terms.sum(-1, keepdim=True)
    weights = terms / total.masked_fill(_value_of(total) == 0, 1.0)
    return torch.dropout(weights, dropout_p, True) @ value


def _value_of(x: Tensor) -> Tensor:
    return forward_ad.unpack_dual(x).primal.detach()


_FUSED = functional.scaled_dot_product_attention
_NEEDS_WEIGHTS = 15  # the position of multi_head_attention_forward's argument


def _multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`multi_head_attention_forward`, which takes no fused kernel if it returns the weights."""
    if functional.scaled_dot_product_attention is not _FUSED:  # patched, as attention libraries do
        return functional.multi_head_attention_forward(*args, **kwargs)
    if len(args) > _NEEDS_WEIGHTS:
        names = ("need_weights", "attn_mask", "use_separate_proj_weight", "q_proj_weight")
        names += ("k_proj_weight", "v_proj_weight", "static_k", "static_v", "average_attn_weights")
        names += ("is_causal",)
        kwargs = {**dict(zip(names, args[_NEEDS_WEIGHTS:], strict=False)), **kwargs}
        args = args[:_NEEDS_WEIGHTS]
    out, weights = functional.multi_head_attention_forward(
        *args, **{**kwargs, "need_weights": True}
    )
    return out, weights if kwargs.get("need_weights", True) else None


_ATTENTION: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.multi_head_attention_forward: _multi_head_attention,
}
_PLAIN_KERNELS = {**_ATTENTION, **NORMS}


class OwnMode(TorchFunctionMode):
    """A mode of gradtools that need not see how gradtools calls autograd's engine."""


class PlainKernels(OwnMode):
    """Attention and norms by operations that can be pushed, mapped and differentiated again."""

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        program = _PLAIN_KERNELS.get(fun, fun)
        return program(*args, **kwargs) if kwargs else program(*args)


def plain_kernels_are_on() -> bool:
    """Whether `PlainKernels` is active in this thread."""
    if not upstream.count_of_function_modes():
        return False
    return any(isinstance(mode, PlainKernels) for mode in upstream.function_modes())


class MappedNorms(OwnMode):
    """Norms by their programs under vmap, where two levels differentiate them."""

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        program = NORMS.get(fun)
        if program is None or len(levels_differentiating(upstream.tree_leaves((args, kwargs)))) < 2:
            return fun(*args, **kwargs)
        return program(*args, **kwargs)


class GradModeStopsTangents(PlainKernels):
    """A pass of dual numbers in which `no_grad` stops tangents; PyTorch's does not (torch#128600).

    It is for the functions that gradtools chose to push: those of `frozen` and `mixed_partial`.
    """

    _stopped = 0  # if tangents are stopped, one more than the levels of torch.func there

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fun is upstream.set_grad_enabled:
            # Inside of a Function autograd has disabled graphs itself, or tangents.
            levels = 1 + len(upstream.get_interpreter_stack() or ())
            if args[0] and self._stopped >= levels:  # not by torch.func.grad within
                upstream.set_forward_mode_enabled(True)
                self._stopped = 0
            elif torch.is_grad_enabled() > args[0] and upstream.is_forward_mode_enabled():
                upstream.set_forward_mode_enabled(False)
                self._stopped = levels
        elif fun is torch.autograd.grad:  # PyTorch's dual numbers leave its results a tangent
            raise NoForwardMode
        return super().__torch_function__(fun, types, args, kwargs)


_AUTOGRAD = upstream.DispatchKey.AutogradFunctionality


class OnlyTangents(GradModeStopsTangents):
    """The same, without recording a graph of what has a tangent."""

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        below = upstream.is_dispatch_key_excluded(_AUTOGRAD)  # where no tensor has a tangent
        if below or fun is upstream.set_grad_enabled or not torch.is_grad_enabled():
            return super().__torch_function__(fun, types, args, kwargs)
        moving = [x for x in tensors_in((args, kwargs or {})) if is_dual(x)]
        # What requires grad belongs to a derivative inside of the function.
        if not moving or any(x.requires_grad for x in moving):
            return super().__torch_function__(fun, types, args, kwargs)
        upstream.set_grad_enabled(False)
        try:
            return super().__torch_function__(fun, types, args, kwargs)
        finally:
            upstream.set_grad_enabled(True)


# --- which of them a derivative takes ------------------------------------------------------------


def only_own_modes(xs: Sequence[Tensor]) -> bool:
    """Whether no other mode and no subclass must see a call of these tensors."""
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in xs)
    return plain and all(isinstance(mode, OwnMode) for mode in upstream.function_modes())


def kernels_of(fun: Any) -> AbstractContextManager[Any]:
    """The kernels for a function that is pulled back inside of torch.func's transforms."""
    around = [level.key() for level in upstream.get_interpreter_stack()[:-1]]
    kinds = upstream.TransformType
    if getattr(fun, "plain_kernels", False) or kinds.Grad in around or kinds.Jvp in around:
        return PlainKernels()
    return MappedNorms() if around else _NOTHING


_NOTHING = nullcontext()
traced: list[bool] = []  # not empty while dynamo traces a function that is differentiated


def run_in_trace(fun: Any, xs: Sequence[Tensor], plain: bool) -> Any:
    """`fun(*xs)`, which dynamo traces; `plain` is whether it runs by `PlainKernels`."""
    traced.append(True)
    try:
        with PlainKernels() if plain else _NOTHING:
            return fun(*xs)
    finally:
        traced.pop()
