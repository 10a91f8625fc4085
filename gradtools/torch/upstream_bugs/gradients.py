"""Workarounds for wrong gradients of PyTorch's backward nodes: a hook replaces what they give.

What reverse mode does is known from the graph alone, so nothing looks on while f runs: before a
pullback the nodes of these operations are sought in the graph, and while it runs a hook at each
gives what the node should have given, which may be differentiated again. Compiled code shows no
graph; there the operations are exchanged (`upstream_bugs.RightGradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling, nodes_of
from gradtools.torch.upstream_bugs import formulas

Tensor = torch.Tensor
Given = Sequence[Any]
GRADIENT = "gradient"
GRADIENT_AGAIN = "derivative of the gradient"


@dataclass(frozen=True, eq=False, repr=False)
class WrongGradient:
    """A gradient that PyTorch has wrong.

    Attributes:
        operation: As its documentation names it, without `torch.`.
        node: The type of its nodes in a graph.
        wrong: "gradient", or "derivative of the gradient" alone.
        gives: What plain PyTorch gives in its place.
        right: Of the node, what it gave and what it was given: what it should have given.
        issue: Upstream's; empty where no report was found.
        when: Whether it is wrong at a node.
        example: As in `upstream_bugs.Bug`.
    """

    operation: str
    node: str
    wrong: str
    gives: str
    right: Callable[[Any, Given, Given], Any]
    issue: str = ""
    when: Callable[[Any], bool] = lambda node: True
    example: str = ""


def _ldexp(node: Any, given: Given, cts: Given) -> Any:
    x, *others = given
    if x is None:
        return None
    scale = torch.ldexp(torch.ones_like(cts[0]), upstream.saved(node, "other"))
    return ((cts[0] * scale).sum_to_size(x.shape).to(x.dtype), *others)


def _by_integers(node: Any) -> bool:
    other = upstream.saved(node, "other")  # None where nothing needs it
    return other is not None and not (other.is_floating_point() or other.is_complex())


def _silu(node: Any, given: Given, cts: Given) -> Any:
    x = upstream.saved(node, "self")
    s = torch.sigmoid(x)
    return (cts[0] * (s * (1 + x * (1 - s))).conj(),)


def _logcumsumexp(node: Any, given: Given, cts: Given) -> Any:
    """By the formula's pullback; what the node gave is right, if nobody differentiates it again."""
    if not torch.is_grad_enabled():
        return None
    x, dim = upstream.saved(node, "self"), upstream.saved(node, "dim")
    dim -= (dim >= 2**63) * 2**64  # it is shown without its sign
    return torch.func.vjp(lambda x: formulas.logcumsumexp(x, dim), x)[1](cts[0])


def _sparse(node: Any, given: Given, cts: Given) -> Any:
    """The cotangent's entries where the values stand, which PyTorch looks up without a graph."""
    if not torch.is_grad_enabled():
        return None
    at, ct = upstream.indices_of(upstream.saved(node, "result").detach()), cts[0]
    places = [k for k, g in enumerate(given) if g is not None]
    result = ct[tuple(at)] if ct.layout is torch.strided else _looked_up(ct, at)
    return tuple([result if k in places else g for k, g in enumerate(given)])


def _looked_up(x: Tensor, at: Tensor) -> Tensor:
    """The entries of a sparse tensor at these indices, by bisection among its own."""
    x = x.coalesce()
    sizes = torch.tensor(x.shape[: at.shape[0]], device=at.device)
    steps = torch.cat((sizes.flip(0).cumprod(0).flip(0)[1:], sizes.new_ones(1)))[:, None]
    own, wanted = ((indices * steps).sum(0) for indices in (x.indices(), at))
    entries = x.values()
    if not len(own):
        return entries.new_zeros((len(wanted), *entries.shape[1:]))
    k = torch.searchsorted(own, wanted).clamp(max=len(own) - 1)
    there = (own[k] == wanted).reshape(-1, *[1] * (entries.dim() - 1))
    return entries[k].masked_fill(~there, 0.0)


def _layer_norm(node: Any, given: Given, cts: Given) -> Any:
    """Of one without weight the gradient of the bias has no derivative: it is a sum."""
    *others, bias = given
    return None if bias is None else (*others, cts[0].sum_to_size(bias.shape))


def _batch_norm(node: Any, given: Given, cts: Given) -> Any:
    """The kernel's own gradient at compact copies of what it reads as if it were compact."""
    wanted = [g is not None for g in given]
    result = torch.ops.aten.native_batch_norm_backward(
        cts[0],
        upstream.saved(node, "input"),
        *[None if x is None else x.contiguous() for x in _statistics(node)],
        upstream.saved(node, "result1"),
        upstream.saved(node, "result2"),
        upstream.saved(node, "training"),
        upstream.saved(node, "eps"),
        wanted,
    )
    return tuple([g if w else None for g, w in zip(result, wanted, strict=True)])


def _statistics(node: Any) -> tuple[Any, Any, Any]:
    names = ("weight", "running_mean", "running_var")
    weight, mean, var = (upstream.saved(node, name) for name in names)
    return weight, mean, var


def _weight_norm(node: Any, given: Given, cts: Given) -> Any:
    """(c - v <c, v> / |v|^2) g / |v| and <c, v> / |v|; PyTorch's own takes the norms for constants.

    What it gave is right, if nobody differentiates it again.
    """
    if not torch.is_grad_enabled():
        return None
    v, g, dim = (upstream.saved(node, name) for name in ("v", "g", "dim"))
    square = formulas.summed_but(v * v, dim)
    along, norm = formulas.summed_but(cts[0] * v, dim), square.sqrt()
    dv = (cts[0] - v * (along / square)) * (g.reshape(norm.shape) / norm)
    result = dv, (along / norm).reshape(g.shape)
    return tuple([None if old is None else new for old, new in zip(given, result, strict=True)])


def _attention(node: Any, given: Given, cts: Given) -> Any:
    """The kernel's own numbers, with the derivative that it lacks."""
    if not torch.is_grad_enabled():
        return None
    from gradtools.torch.upstream_bugs.fused_attention import (  # by rules, which rest on this file
        differentiable,
    )

    return tuple(differentiable(node, given, cts[0]))


_OTHER = "another number"
_KERNELS = ("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention")
_FUSED = tuple([f"ScaledDotProduct{kernel}Backward0" for kernel in _KERNELS])
_IS_COMPLEX = lambda node: upstream.saved(node, "self").is_complex()
_LIES_OTHERWISE = lambda node: not all(x is None or x.is_contiguous() for x in _statistics(node))
_WITHOUT_WEIGHT = lambda node: (
    upstream.saved(node, "weight") is None and upstream.saved(node, "bias") is not None
)
_WITHOUT_MASK = lambda node: not upstream.saved(node, "dropout_p")  # no formula draws it again

# The operation, its nodes, what is wrong, what PyTorch gives, what is right, its issue, and when.
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("ldexp", "LdexpBackward0", GRADIENT, "zero", _ldexp, "torch#186556", _by_integers),
    ("nn.functional.silu", "SiluBackward0", GRADIENT, _OTHER, _silu, "", _IS_COMPLEX),
    (
        *("logcumsumexp", "LogcumsumexpBackward0", GRADIENT_AGAIN, "NaN at a cotangent of zero"),
        *(_logcumsumexp, "torch#196705"),
    ),
    (
        *("sparse_coo_tensor", "SparseCooTensorWithDimsAndTensorsBackward0", GRADIENT_AGAIN),
        *(f"{_OTHER}, or an error", _sparse),
    ),
    (
        *("nn.functional.batch_norm", "NativeBatchNormBackward0", GRADIENT, _OTHER),
        *(_batch_norm, "", _LIES_OTHERWISE),
    ),
    (
        *("nn.functional.layer_norm", "NativeLayerNormBackward0", GRADIENT_AGAIN),
        *("zero, or an error", _layer_norm, "", _WITHOUT_WEIGHT),
    ),
    ("_weight_norm", "WeightNormInterfaceBackward0", GRADIENT_AGAIN, _OTHER, _weight_norm),
    *[
        (
            *("nn.functional.scaled_dot_product_attention", node, GRADIENT_AGAIN, "an error"),
            *(_attention, "", _WITHOUT_MASK),
        )
        for node in _FUSED
    ],
)
_EXAMPLES = {
    "LdexpBackward0": "torch.ldexp(x, torch.tensor([-1, -1, -2])).sum()",
    "SiluBackward0": "torch.nn.functional.silu(torch.complex(x, 1 - x), inplace=True).abs().sum()",
    "LogcumsumexpBackward0": "(0 * x * torch.logcumsumexp(x, 0) + x**3).sum()",
    "SparseCooTensorWithDimsAndTensorsBackward0": "(torch.sparse_coo_tensor(torch.tensor("
    "[[0, 1, 2], [1, 0, 2]]), x[0] ** 2, (3, 3)).to_dense() ** 2).sum()",
    "NativeBatchNormBackward0": "torch.nn.functional.batch_norm(x**2, None, None, "
    "torch.arange(6).to(x)[::2], None, True).mul(x).sum()",
    "WeightNormInterfaceBackward0": "torch._weight_norm(x, x[:, :1] ** 2, 0).pow(3).sum()",
    _FUSED[0]: "torch.nn.functional.scaled_dot_product_attention(*[x[None, None] ** 2] * 3).sum()",
}
WRONG_GRADIENTS = tuple(
    [replace(WrongGradient(*row), example=_EXAMPLES.get(row[1], "")) for row in _ROWS]
)
_BY_NODE = {wrong.node: wrong for wrong in WRONG_GRADIENTS}
WRONG = frozenset(_BY_NODE)
"""The types of their nodes."""


def is_wrong(node: Any) -> bool:
    result = _BY_NODE.get(type(node).__name__)
    return result is not None and result.when(node)


def rightly(nodes: Sequence[Any]) -> AbstractContextManager[None]:
    """Inside, a pullback runs: what these nodes give is right."""
    return _rightly(nodes) if nodes else nullcontext()


@contextmanager
def _rightly(nodes: Sequence[Any]) -> Iterator[None]:
    handles = [node.register_hook(_hook(node)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(node: Any) -> Callable[[Given, Given], Any]:
    right = _BY_NODE[type(node).__name__].right
    return lambda given, cts: None if cts[0] is None else right(node, given, cts)


def wrong_nodes(outs: Sequence[Any]) -> list[Any]:
    nodes = nodes_of([y for y in outs if y.requires_grad])
    return [node for node in nodes if type(node).__name__ in WRONG and is_wrong(node)]


def right_vjp(fun: Callable[..., Any], *xs: Tensor, has_aux: bool = False) -> Any:
    """`torch.func.vjp` of a function that returns a sequence of tensors, rightly."""
    if is_compiling():
        return torch.func.vjp(fun, *xs, has_aux=has_aux)  # type: ignore[misc]
    wrong: list[Any] = []

    def noted(*xs: Tensor) -> Any:
        result = fun(*xs)
        wrong[:] = wrong_nodes(result[0] if has_aux else result)
        return result

    outs, pull, *aux = torch.func.vjp(noted, *xs, has_aux=has_aux)  # type: ignore[misc]

    def pullback(cts: Any) -> Any:
        if not wrong:
            return pull(cts)
        with rightly(wrong):
            return pull(cts)

    return outs, pullback, *aux
