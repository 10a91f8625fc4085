"""Fused attention at second order: its own kernel first, plain operations from there on.

With P = softmax(s Q K^T + M), O = P V and a cotangent C of O, the pullback is

    dV = P^T C    dP = C V^T    dM = dS = P (dP - rowsum(P dP))    dQ = s dS K    dK = s dS^T Q

PyTorch's fused kernels compute it without the matrix P, and have no derivative of it. So what a
kernel gave is kept as a value whose derivative, once somebody asks for it, is that of this formula.
What is differentiated once stays as it was, to the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gradtools.rules import Rule
from gradtools.torch import _upstream as upstream
from gradtools.torch.forward_mode.by_transposing import rule_of_reverse_mode
from gradtools.torch.rules.installing import apply_rule
from gradtools.torch.upstream_bugs.formulas import attention_weights, over_groups

Tensor = torch.Tensor


def differentiable(node: Any, given: Sequence[Tensor | None], ct: Tensor) -> list[Any]:
    """What a fused kernel's node gave for a cotangent, such that it can be differentiated.

    node: Saves query, key, value and what else the kernel was called with.
    given: Gradients of query, key and value, and of a bias where the kernel gives that.
    """
    mask = _mask_of(node)
    places = [k for k, g in enumerate(given) if g is not None]
    result = [g.detach() for g in given if g is not None]
    options = upstream.saved(node, "is_causal"), upstream.saved(node, "scale")
    masks = [] if mask is None else [mask]

    def pulled(ct: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> list[Tensor]:
        mask = rest[0] if masks else None
        grads = attention_pullback(ct, q, k, v, mask, *options)
        return [g for i, g in enumerate(grads) if i in places and g is not None]

    xs = [ct, *(upstream.saved(node, name) for name in ("query", "key", "value")), *masks]
    rule = rule_of_reverse_mode("scaled_dot_product_attention", pulled)
    left = iter(apply_rule(_at_values(rule, len(xs), len(result)), *xs, *result))
    return [None if g is None else next(left) for g in given]


def _at_values(rule: Rule, count: int, values: int) -> Rule:
    """The rule of a function whose values are known, and come after its arguments."""
    tangent, cotangent = rule.tangent, rule.cotangent
    assert tangent is not None and cotangent is not None
    return replace(
        rule,
        primal=lambda *xs: list(xs[count:]),
        tangent=lambda saved, dxs: tangent(saved, dxs[:count]),
        cotangent=lambda saved, cts: [*cotangent(saved, cts), *[None] * values],
        saves=tuple(range(count)),
        nondifferentiable=tuple(range(count, count + values)),
    )


def _mask_of(node: Any) -> Tensor | None:
    """What was added to the scores; kernels on the CPU and on CUDA name it differently."""
    name = next((n for n in ("_saved_attn_mask", "_saved_attn_bias") if hasattr(node, n)), None)
    return None if name is None else getattr(node, name)


def attention_pullback(
    ct: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> list[Tensor | None]:
    """The gradients of query, key, value and mask, by plain operations."""
    kind = query.dtype
    if kind in (torch.bfloat16, torch.float16):  # as the kernels do, and rounded at the end
        ct, query, key, value = (x.float() for x in (ct, query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    times = query.shape[-3] // key.shape[-3]
    keys, values = (over_groups(x, times) for x in (key, value))
    weights = attention_weights(query, keys, mask, is_causal, scale)
    dweights = ct @ values.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
    result = [
        dscores @ keys * scale,
        _summed(dscores.mT @ query * scale, times),
        _summed(weights.mT @ ct, times),
    ]
    dmask = None if mask is None else dscores.sum_to_size(mask.shape).to(mask.dtype)
    return [*(g.to(kind) for g in result), dmask]


def _summed(x: Tensor, times: int) -> Tensor:
    """Over the heads of queries that share one of keys."""
    return x if times == 1 else x.unflatten(-3, (-1, times)).sum(-3)


_ATTENDING = ("scaled_dot_product_attention", "multi_head_attention_forward")


class PlainWhereLive(TorchFunctionMode):
    """Around what dynamo traces: attention by plain operations where its gradient has a graph.

    The compiled graph is differentiated as a whole if what goes into it requires grad, the
    backward pass of fused attention in it too, which has no derivative.

    Attributes:
        levels: How many of `torch.func`'s levels are the caller's own, above those operands.
    """

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(fun, "__name__", "") not in _ATTENDING or not self._is_live(args, kwargs):
            return fun(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH):
            return fun(*args, **kwargs)

    def _is_live(self, args: Any, kwargs: Any) -> bool:
        """Whether an operand, without the caller's levels, requires grad."""
        for x in upstream.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                for level in range(self.levels, 0, -1):
                    x = upstream.unwrap_for_grad(x, level)
                if x.requires_grad:
                    return True
        return False
