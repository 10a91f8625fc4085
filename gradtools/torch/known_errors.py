"""Adds advice to PyTorch errors for which gradtools has an alternative.

PyTorch raises a RuntimeError for most failures, so an error is identified by its text, and by the
frame that raised the error, which must be in PyTorch. Other errors propagate unchanged. Only this
module matches PyTorch's error texts. If PyTorch rewords a text, PyTorch's error is raised without
advice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from gradtools.code_origin import place_of
from gradtools.errors import refusal, said_by
from gradtools.rules import USE_REVERSE_MODE
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling

T = TypeVar("T")


def _torch_says(error: BaseException) -> str:
    """Returns the text of an error that PyTorch raised, or "" for all other errors."""
    return "" if isinstance(error, torch.jit.Error) else said_by("torch", error)


def known(error: BaseException, table: Mapping[str, T]) -> T | None:
    """Returns the entry of the table whose key occurs in the text of PyTorch's error, or None."""
    text = _torch_says(error)
    return next((value for part, value in table.items() if part in text), None)


class explained:
    """Context manager around a vmap: raises known PyTorch errors again, with advice."""

    __slots__ = ("caller",)

    def __init__(self, caller: str) -> None:
        self.caller = caller

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (RuntimeError, AssertionError)) and not is_compiling():
            explain(self.caller, error, mapped=True)


def explain(caller: str, error: RuntimeError | AssertionError, mapped: bool = False) -> None:
    """Raises a known PyTorch error again, with advice. Does nothing for other errors.

    mapped: Whether to include advice for vmap errors; inside of vmap, this advice is always
        included.
    """
    said = _torch_says(error)
    levels = upstream.get_interpreter_stack() or ()
    mapped = mapped or any(level.key() == upstream.TransformType.Vmap for level in levels)
    for parts, advice in (_ADVICE | (_MAPPED if mapped else {})).items():
        if said and re.search(parts, said):
            text = f"{caller}: {advice} PyTorch says{place_of(error)}: {error}"
            raise refusal(error, text) from error


# The advice for errors for which gradtools has an alternative, keyed by patterns of their texts.
_ADVICE = {
    "vmap: inplace arithmetic|would mutate a captured Tensor": (
        "f changes an example, or a tensor that all examples share (such as batch normalization's "
        "running statistics in training mode), in place, which torch.func's transforms reject. Put "
        "the module in evaluation mode, call make_functional on it, or pass chunk_size=1 (a plain "
        "loop) to per_example_grad or jacobian; clone an example before you write into it "
        "(row.clone())."
    ),
    "leaf Variable that requires grad is being used in an in-place|being modified inplace": (
        "f writes in place into an argument that is differentiated, into a view of it, or into "
        "another tensor that requires grad. Compute a new tensor, such as w * 2 instead of "
        "w.mul_(2), or write into a copy, w.clone()."
    ),
    r"\bvmap\b|Batching rule not implemented for|data-dependent|do not support batching"
    r"|not yet have a batching rule|calling \.item\(\)|Tensor\.requires_grad_\(\)"
    r"|Function with functorch transforms|override the setup_context staticmethod"
    r"|inside functorch transform|Tensor that doesn't have storage|storage of BatchedTensorImpl"
    r"|unsupported for Sparse|'SparseCPU'|do not have ": (
        "f contains an operation that PyTorch's vmap, or another transform of torch.func, does "
        "not support, or branches or shapes that depend on values. Pass chunk_size=1 (a plain "
        "loop without transforms) to per_example_grad or jacobian; for a Hessian use "
        "gt.jacobian(gt.grad(f), chunk_size=1)."
    ),
    "yet support saved tensor hooks|use_reentrant=True": (
        "f contains torch.utils.checkpoint or other saved_tensors_hooks, or is called inside of "
        "them. torch.func's transforms do not support these hooks, and a reentrant checkpoint "
        "does not support derivatives with respect to selected inputs. Use gt.checkpoint instead."
    ),
    r"Trying to use forward AD with|c\+\+ API of custom Function|aten::_efficientzerotensor": (
        "f contains an operation without forward mode in PyTorch. Use "
        'jacobian(mode="reverse"), linearize(f, *primals)[1], which transposes reverse mode, or '
        'hvp(mode="reverse_over_reverse"); or wrap the operation in gt.custom_rule.'
    ),
    "must implement the jvp function|flat_bdims must not be None": (  # vmap raises the second
        "f contains a function with a reverse rule only (clip_gradient, transform_gradient, "
        "replace_gradient, or a torch.autograd.Function without jvp), so it has no forward mode. "
        f"{USE_REVERSE_MODE} For a Function use linearize(f, *primals)[1], which transposes "
        "the pullback."
    ),
    "aten::_scaled_dot_product": (
        "PyTorch supports only first derivatives of fused attention. For higher derivatives "
        "gradtools uses plain operations if it computes all derivatives and there is no dropout: "
        "in f use gt.grad instead of torch.func.grad or torch.autograd.grad, and linearize instead "
        "of jvp of a pullback."
    ),
    " is not implemented": (
        "f contains an operation whose backward pass has no derivative in PyTorch. Use forward "
        'mode instead, with gt.jvp of the gradient or hvp(mode="forward_over_reverse"), or '
        "express the operation in terms of other operations."
    ),
    r"Can't call numpy\(\) on Tensor that requires grad": (
        "f converts a tensor with numpy(), which stops gradients. Use PyTorch's operations, or "
        "a gt.host_function with a rule; x.detach().numpy() is a constant, to which "
        "gt.straight_through gives the derivative of a surrogate."
    ),
    "does not currently support double backward": (
        "f contains a function that torch.compile compiled, whose backward pass PyTorch cannot "
        "differentiate (pytorch#91469). Compile the derivative instead, as in "
        "torch.compile(lambda x: gt.hvp(f, (x,), (v,)))."
    ),
    "Nested forward mode AD|ensors does not require grad|a tensor that doesn't require grad": (
        "f registers a gradient hook or computes a derivative with PyTorch's functions, but runs "
        "in forward mode or torch.func, where no graph is recorded. Use gt.grad, gt.jvp or "
        "gt.hessian in f, or a derivative in reverse mode (grad, vjp, linearize)."
    ),
}

# The advice for errors that have other causes outside of vmap.
_MAPPED = {
    "doesn't match the broadcast shape|stack expects each tensor to be equal size": (
        "under PyTorch's vmap, f writes an example in place into a tensor that it creates, or the "
        "size of a result depends on values. If f accepts a single example, pass chunk_size=1 (a "
        "plain loop without transforms) to per_example_grad or jacobian; for a Hessian use "
        "gt.jacobian(gt.grad(f), chunk_size=1)."
    ),
}
