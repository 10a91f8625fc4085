"""Derivatives that PyTorch computes without one of their terms.

Some of its rules may not be differentiated again: a term is left out, in silence. What they give
is right and may be read; here it is made to refuse the derivative that would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.overrides import TorchFunctionMode

from gradtools.errors import GradtoolsError
from gradtools.torch.compiling import nodes_of

Tensor = torch.Tensor

# Operations whose tangent may not be differentiated again: PyTorch's rules leave a term out, in
# silence. The umbrella is torch#198017; test_torch_engine.py tells when one is mended.
_TANGENT_IS_A_CONSTANT = {
    "NativeLayerNormBackward0": "layer_norm (torch#196700)",
    "NativeBatchNormBackward0": "batch_norm in training mode (torch#196699)",
    "CudnnBatchNormBackward0": "batch_norm in training mode (torch#196699)",
    "LinalgDetBackward0": "linalg.det (torch#192540)",
    "LinalgSlogdetBackward0": "linalg.slogdet (torch#192540)",
    "LinalgSolveExBackward0": "linalg.solve (torch#192540)",
    "LinalgHouseholderProductBackward0": "linalg.householder_product (torch#198017)",
}
# The same in reverse mode: second derivatives are right, third ones are not.
_TWICE_AT_MOST = {
    "NativeLayerNormBackwardBackward0": "layer_norm (torch#175754)",
    "NativeBatchNormBackwardBackward0": "batch_norm in training mode (torch#186256)",
    "CudnnBatchNormBackwardBackward0": "batch_norm in training mode (torch#186256)",
}
NORMALISATIONS = {k: v for k, v in _TANGENT_IS_A_CONSTANT.items() if "norm (" in v or "mode" in v}


class _Once(torch.autograd.Function):
    """A derivative that may be read, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, message: str) -> Tensor:
        ctx.message = message
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        raise GradtoolsError(ctx.message)


def guarded_tangents(asked: str, primals: list[Tensor], pushed: list[Tensor]) -> list[Tensor]:
    """The tangents; those that PyTorch would differentiate wrongly refuse it."""
    wrong = first_of(_TANGENT_IS_A_CONSTANT, primals) if _tracked(pushed) else None
    if wrong is None:
        return pushed
    mend = (
        "Write it by plain operations (mean, var, sqrt)"
        if "norm" in wrong
        else "Use linearize(f, *primals)[1], which pushes by transposing the pullback"
    )
    return _refusing(
        pushed,
        f"{asked}: the tangent is differentiated once more, but f holds {wrong}, of whose "
        f"forward-mode rule PyTorch then leaves a term out. {mend}.",
    )


def guarded_gradients(
    asked: str, outs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """The cotangents; those of second order that PyTorch would differentiate wrongly refuse it."""
    pushed = [g for g in grads if g is not None and _has_tangent(g)]
    if not pushed and not _tracked(grads):
        return grads
    wrong = first_of(_TWICE_AT_MOST, outs)
    if wrong is None:
        return grads
    if pushed:
        raise GradtoolsError(third(asked, wrong))
    return _refusing(grads, third(asked, wrong))


# --- first derivatives that are wrong in forward mode -----------------------------------------


def _inverse_of(L: Tensor, upper: bool = False) -> Tensor:
    """The inverse of L L^H, where PyTorch's own tangent has its factors in the wrong order."""
    return _solved(torch.eye(L.shape[-1], dtype=L.dtype, device=L.device), L, upper)


def _solved(B: Tensor, L: Tensor, upper: bool = False) -> Tensor:
    """The solution X of L L^H X = B, by two triangular systems."""
    lower = L.mH if upper else L
    found = torch.linalg.solve_triangular(lower, B, upper=False)
    return torch.linalg.solve_triangular(lower.mH, found, upper=True)


# PyTorch's forward-mode rules of these are wrong at first order, in silence;
# test_torch_terms_upstream.py tells when they are mended.
_BY_PLAIN_OPERATIONS: dict[Any, Callable[..., Tensor]] = {
    torch.cholesky_inverse: _inverse_of,  # torch#196682
    Tensor.cholesky_inverse: _inverse_of,
    torch.cholesky_solve: _solved,  # torch#196694
    Tensor.cholesky_solve: _solved,
}


class RightTangents(TorchFunctionMode):
    """While f is pushed along: operations whose tangent PyTorch gets wrong go another way."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function, or what stands for it where a dual number comes in."""
        kwargs = kwargs or {}
        instead = _BY_PLAIN_OPERATIONS.get(func)
        if instead is None or "out" in kwargs or not _any_dual([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        if "input2" in kwargs:
            kwargs["L"] = kwargs.pop("input2")
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        return instead(*args, **kwargs)


def _any_dual(values: Sequence[Any]) -> bool:
    return any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in values
    )


def _has_tangent(x: Tensor) -> bool:
    beneath = torch._C._functorch.peek_interpreter_stack() is not None  # its levels are hidden
    if beneath or forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def third(asked: str, wrong: str) -> str:
    """What is said of a third derivative that would be wrong."""
    return (
        f"{asked}: a third derivative is taken of {wrong}, which PyTorch computes without one of "
        "its terms. Write it by plain operations (mean, var, sqrt)."
    )


def _refusing(xs: Sequence[Tensor | None], message: str) -> Any:
    tracked = lambda x: x is not None and x.requires_grad
    return [_Once.apply(x, message) if tracked(x) else x for x in xs]


def _tracked(xs: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in xs if x is not None and x.requires_grad]


def first_of(names: dict[str, str], outs: Sequence[Tensor]) -> str | None:
    """What the graph of outs holds of these operations."""
    for node in nodes_of(_tracked(outs)):
        name = names.get(type(node).__name__)
        if name is not None and _trains(node):
            return name
    return None


def _trains(node: Any) -> bool:
    """Whether a normalisation takes its statistics from its input; all others do."""
    return bool(getattr(node, "_saved_training", getattr(node, "_saved_train", True)))
