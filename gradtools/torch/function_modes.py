"""Defines thread-local function modes that choose the kernels for second derivatives.

The fused attention kernels have only a first derivative, in reverse mode. If gradtools uses forward
mode or computes a second derivative, attention uses plain operations. (The context manager
`torch.nn.attention.sdpa_kernel` is not used, because it sets process-wide flags: if two threads
exit in the order in which they entered, flash attention stays disabled.) Normalization layers use
`normalization.PROGRAMS`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import (
    PLAIN,
    is_dual,
    is_wrapped,
    levels_differentiating,
    tensors_in,
)
from gradtools.torch.modes import NoForwardMode
from gradtools.torch.normalization import PROGRAMS as NORMS
from gradtools.torch.normalization import value_of

Tensor = torch.Tensor


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
    """Computes softmax(query key^T / sqrt(d)) value, where d is the size of the last axis."""
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
    # The jvp of PyTorch's softmax cannot be differentiated. If all scores of a row are masked, the
    # weights of the row are zeros.
    most = value_of(scores).amax(-1, keepdim=True)
    terms = torch.exp(scores - most.masked_fill(most.isinf(), 0.0))
    total = terms.sum(-1, keepdim=True)
    weights = terms / total.masked_fill(value_of(total) == 0, 1.0)
    return torch.dropout(weights, dropout_p, True) @ value


_FUSED = functional.scaled_dot_product_attention
_NEEDS_WEIGHTS = 15  # the position of the argument `need_weights`


def _multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Calls `multi_head_attention_forward` with need_weights=True to avoid the fused kernel."""
    patched = functional.scaled_dot_product_attention is not _FUSED  # a library patched attention
    if patched or len(args) > _NEEDS_WEIGHTS:
        return functional.multi_head_attention_forward(*args, **kwargs)
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
    """Base class of function modes that need not intercept calls of autograd's engine."""


class PlainAttention(OwnMode):
    """Computes attention with plain operations, but calls PyTorch's normalization functions."""

    programs = _ATTENTION

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        program = self.programs.get(fun, fun)
        return program(*args, **kwargs) if kwargs else program(*args)


class PlainKernels(PlainAttention):
    """Computes attention and norms with operations that support jvp, vmap and double backward."""

    programs = _PLAIN_KERNELS


def plain_kernels_are_on() -> bool:
    """Returns whether `PlainKernels` is active in this thread."""
    if not upstream.count_of_function_modes():
        return False
    return any(isinstance(mode, PlainKernels) for mode in upstream.function_modes())


class MappedNorms(OwnMode):
    """Replaces a normalization with its entry in `NORMS` if two levels differentiate it."""

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        program = NORMS.get(fun)
        if program is None or len(levels_differentiating(upstream.tree_leaves((args, kwargs)))) < 2:
            return fun(*args, **kwargs)
        return program(*args, **kwargs)


_set_graphs = upstream.set_grad_enabled
_redispatch = getattr(torch.overrides, "redispatch_function", None)  # from PyTorch 2.13 on


class OneTangent(PlainAttention):
    """Evaluates operations on dual numbers without a graph, and `no_grad` blocks without tangents.

    PyTorch propagates tangents through `no_grad` blocks (pytorch#128600). `frozen` and
    `mixed_partial` use this mode for derivatives in forward mode. PyTorch's jvp rules of
    linear operations multiply zero tangents, so this mode applies the operation only to the tangent
    that is not zero, which is faster.
    """

    def __init__(self) -> None:
        super().__init__()
        # `read` maps ids to captured tensors that require grad. `_made` maps ids to leaves that a
        # derivative inside of the function created.
        self.read: dict[int, weakref.ref[Tensor]] = {}
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._began = upstream.nodes_made()

    _stopped = 0  # 1 + the number of torch.func levels where tangents were disabled, or 0
    _inside: Any = None  # a redispatched function, which calls this mode again

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fun is _set_graphs:
            # Inside of a `torch.autograd.Function`, autograd has already disabled graphs or
            # tangents.
            levels = 1 + len(upstream.get_interpreter_stack() or ())
            if args[0] and self._stopped >= levels:  # torch.func.grad adds a level
                upstream.set_forward_mode_enabled(True)
                self._stopped = 0
            elif torch.is_grad_enabled() > args[0] and upstream.is_forward_mode_enabled():
                upstream.set_forward_mode_enabled(False)
                self._stopped = levels
            return fun(*args)
        if fun is torch.autograd.grad:  # requires a graph, which this mode does not record
            raise NoForwardMode
        if _redispatch and type(fun) is FunctionType and fun not in (self._inside, *_ATTENTION):
            before, self._inside = self._inside, fun
            try:
                with self:
                    return _redispatch(fun, types, args, kwargs or {})
            finally:
                self._inside = before
        within, given = not torch.is_grad_enabled(), (*args, *kwargs.values()) if kwargs else args
        if not within and any(map(_requires_grad, given)):
            tracked = [x for x in map(_tracked, tensors_in(given)) if x is not None]
            outside = [x for x in tracked if not self._is_inside(x)]
            within = len(outside) < len(tracked)
            self.read.update((id(x), weakref.ref(x)) for x in outside)
        if within:
            y = super().__torch_function__(fun, types, args, kwargs)
        else:
            _set_graphs(False)
            try:
                rule = None if kwargs or upstream.peek_interpreter_stack() else _RULES.get(fun)
                y = None if rule is None else rule(fun, *args)
                if y is None:
                    y = super().__torch_function__(fun, types, args, kwargs)
            finally:
                _set_graphs(True)
        leaf = args[0] if y is None and args else y  # y is None for `x.requires_grad = True`
        if isinstance(leaf, Tensor) and (leaf.requires_grad or is_wrapped(leaf)):
            self._note(_tracked(leaf))
        return y

    def _note(self, leaf: Tensor | None) -> None:
        """Records a leaf that requires grad, which an inner derivative created."""
        if leaf is not None and leaf.grad_fn is None and not holds(self.read, leaf):
            self._made[id(leaf)] = weakref.ref(leaf)

    def _is_inside(self, x: Tensor) -> bool:
        """Returns whether x, which requires grad, was created by an inner derivative."""
        if is_dual(x) or is_wrapped(x):
            return True
        if x.grad_fn is not None:
            return upstream.sequence_of(x.grad_fn) >= self._began
        return holds(self._made, x)


def holds(tensors: dict[int, weakref.ref[Tensor]], x: Tensor) -> bool:
    """Returns whether x is one of the tensors; the id of a freed tensor may be the id of x."""
    ref = tensors.get(id(x))
    return ref is not None and ref() is x


def _requires_grad(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.requires_grad or (is_wrapped(x) and _tracked(x) is not None)
    return isinstance(x, (list, tuple, dict)) and any(map(_requires_grad, tensors_in(x)))


def _tracked(x: Tensor) -> Tensor | None:
    """Returns x, or a tensor inside of its functorch wrappers, that requires grad, or None."""
    while not x.requires_grad:
        if not is_wrapped(x):
            return None
        x = upstream.get_unwrapped(x)
    return x


# --- tangents of linear operations if one operand has a tangent; otherwise None ------------------


def _parts(x: Any) -> tuple[Any, Any]:
    constant = not isinstance(x, Tensor) or type(x) is torch.nn.Parameter
    return (x, None) if constant else upstream.unpack_dual(x, level=0)


def _linear(fun: Any, x: Any, w: Any, b: Any = None, *how: Any) -> Any:
    x, dx = _parts(x)
    if dx is None or _parts(w)[1] is not None or _parts(b)[1] is not None:
        return None
    return upstream.make_dual(fun(x, w, b, *how), fun(dx, w, None, *how), level=0)


def _bilinear(fun: Any, a: Any, b: Any, *more: Any) -> Any:
    (a, da), (b, db) = _parts(a), _parts(b)
    if more or (da is None) == (db is None) or (da is None and fun in _DIVISIONS):
        return None
    return upstream.make_dual(fun(a, b), fun(a, db) if da is None else fun(da, b), level=0)


def _sum(fun: Any, a: Any, b: Any, *more: Any) -> Any:
    (a, da), (b, db) = _parts(a), _parts(b)
    if more or (da is None) == (db is None):
        return None
    y, dx = fun(a, b), da if db is None else db.neg() if fun in _DIFFERENCES else db
    return upstream.make_dual(y, dx.expand(y.shape).to(y.dtype, copy=True), level=0)


_DIVISIONS = {torch.div, Tensor.div, Tensor.__truediv__}
_DIFFERENCES = {torch.sub, Tensor.sub, Tensor.__sub__}  # PyTorch handles b - a, `__rsub__`
_CONVOLUTIONS = [getattr(functional, f"conv{t}{n}d") for t in ("", "_transpose") for n in (1, 2, 3)]
_RULES: dict[Any, Any] = {
    **dict.fromkeys((functional.linear, *_CONVOLUTIONS), _linear),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, *_DIFFERENCES), _sum),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _bilinear),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm), _bilinear),
    **dict.fromkeys(_DIVISIONS, _bilinear),
}


# --- the choice of kernels for a derivative ------------------------------------------------------


def only_own_modes(xs: Sequence[Tensor]) -> bool:
    """Returns whether all xs are plain tensors and all active function modes are `OwnMode`s."""
    return PLAIN.issuperset(map(type, xs)) and all(
        isinstance(mode, OwnMode) for mode in upstream.function_modes()
    )


def kernels_of(fun: Any) -> AbstractContextManager[Any]:
    """Returns a context manager that chooses the kernels for `torch.func.vjp` of `fun`."""
    around = [level.key() for level in upstream.get_interpreter_stack()[:-1]]
    kinds = upstream.TransformType
    if getattr(fun, "plain_kernels", False) or kinds.Grad in around or kinds.Jvp in around:
        return PlainKernels()
    return MappedNorms() if around else _NOTHING


_NOTHING = nullcontext()
traced: list[bool] = []  # has an entry while dynamo traces a function that is differentiated


def run_in_trace(fun: Any, xs: Sequence[Tensor], plain: bool) -> Any:
    """Calls `fun(*xs)` for a derivative that dynamo may trace. `plain` enables `PlainKernels`."""
    traced.append(True)
    try:
        with PlainKernels() if plain else _NOTHING:
            return fun(*xs)
    finally:
        traced.pop()
