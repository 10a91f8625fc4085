"""Recognizes PyTorch's errors by their texts, and raises them again with advice.

PyTorch raises a RuntimeError for nearly everything, so only the text identifies an error; that it
is PyTorch's own follows from the frame that raised it. The user's errors pass unchanged. Only this
module reads error texts of PyTorch: if one is reworded upstream, PyTorch's own error is raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from gradtools.code_origin import place_of
from gradtools.errors import refusal, said_by
from gradtools.rules import USE_REVERSE_MODE
from gradtools.torch.compiling import is_compiling

T = TypeVar("T")


def torch_says(error: BaseException) -> str:
    """The text of PyTorch's own error; empty for others, and for a `raise` in TorchScript."""
    return "" if isinstance(error, torch.jit.Error) else said_by("torch", error)


def known(error: BaseException, table: Mapping[str, T]) -> T | None:
    """The table's entry whose key is in the text of PyTorch's own error; else None."""
    text = torch_says(error)
    return next((value for part, value in table.items() if part in text), None)


def says(error: BaseException, part: str) -> bool:
    """Whether an error is PyTorch's own and contains this text."""
    return part in torch_says(error)


LEAF_CHANGED = "leaf Variable that requires grad"
VIEW_CHANGED = "is a view and is being modified inplace"
NO_SAVED_TENSORS_HOOKS = "yet support saved tensor hooks"
SAVED_CHANGED = "modified"
NO_STRIDES = "tensors do not have strides"  # of a sparse matrix and dual numbers


def kernel_without(lacking: re.Pattern[str], error: BaseException) -> str | None:
    """The name of the kernel that lacks a derivative, if the error says so."""
    match = lacking.search(torch_says(error))
    return None if match is None else match[1]


NO_FORWARD_MODE = re.compile(r"Trying to use forward AD with (\S+) that does not support it")
NO_DERIVATIVE = re.compile(r"derivative for (\S+) is not implemented")


def lacks_derivative(error: BaseException) -> str | None:
    """The kernel or function in a frozen G that lacks a derivative, if the error says so."""
    kernel = kernel_without(NO_FORWARD_MODE, error) or kernel_without(NO_DERIVATIVE, error)
    return kernel or known(error, NO_KERNELS)


_FUNCTION, _IN_G = "a torch.autograd.Function", "a derivative or a hook on a gradient"
NO_KERNELS = {
    "must implement the jvp function": _FUNCTION,
    "marked with @once_differentiable": _FUNCTION,
    "does not require grad": _IN_G,
    "doesn't require grad": _IN_G,
    "Could not run 'aten::_efficientzerotensor'": "a sparse matrix",
    "Nested forward mode AD is not supported": "torch.func.jvp",
    "view size is not compatible with input tensor's": "a view of a channels_last image",
}


class explained:
    """Context that raises PyTorch's known errors again with advice."""

    __slots__ = ("caller",)

    def __init__(self, caller: str) -> None:
        self.caller = caller

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError | AssertionError) and not is_compiling():
            explain(self.caller, error)


def explain(caller: str, error: RuntimeError | AssertionError) -> None:
    """Raises a known error of PyTorch again with advice; returns for another error."""
    advice = known(error, _ADVICE)
    if advice is not None:
        text = f"{caller}: {advice} PyTorch says{place_of(error)}: {error}"
        raise refusal(error, text) from error


_USE_OTHERS = (
    "f holds an operation that has no forward mode in PyTorch. For attention use "
    "sdpa_kernel(SDPBackend.MATH), for an LSTM on CPU mkldnn.flags(enabled=False), for a sparse "
    "matrix times columns jacobian's chunk_size=1; or use linearize, which needs double backward "
    "instead."
)
_NO_GRAPH = (
    "f sets a hook on a gradient or takes a derivative by torch.autograd.grad where no graph is "
    "recorded: it is pushed along in forward mode, or computed by checkpoint, chunked or frozen "
    "inside of torch.func's transforms (vmap, per_example_grad). Use gt.grad in f, set a hook only "
    "if the tensor requires grad, or take a derivative in reverse mode (grad, vjp, linearize)."
)
_NO_JVP = (
    "f holds a function with a reverse rule only (clip_gradient, transform_gradient, "
    "replace_gradient, or a torch.autograd.Function without jvp), so it has no forward mode. "
    f"{USE_REVERSE_MODE}"
)
_NO_VMAP = (
    "f holds an operation that PyTorch's vmap cannot map. per_example_grad and jacobian take "
    "chunk_size=1, a plain loop; for a Hessian take gt.jacobian(gt.grad(f), chunk_size=1)."
)
_ADVICE = {
    "aten::_scaled_dot_product": (
        "of fused attention PyTorch has first derivatives alone. Others gradtools takes by plain "
        "operations where it takes them itself and the kernel draws no dropout: in f use gt.grad, "
        "not torch.func.grad or torch.autograd.grad, and linearize, not jvp, of a pullback. "
        "Elsewhere use sdpa_kernel(SDPBackend.MATH)."
    ),
    "FlexAttention does not support backward on CPU": (
        "f holds flex_attention, which PyTorch differentiates on CUDA devices alone. Use "
        "scaled_dot_product_attention, with the score's change as attn_mask."
    ),
    "Batching rule not implemented for": _NO_VMAP,
    "querying is_contiguous inside of vmap": _NO_VMAP,
    "vmap: we do not yet support": _NO_VMAP,
    "expand is unsupported for Sparse tensors": _NO_VMAP,
    NO_STRIDES: (
        "f multiplies by a CSR matrix, of which PyTorch's vmap has no tangent. Convert it by "
        "to_sparse_coo(), or take chunk_size=1, a plain loop."
    ),
    "You are attempting to call Tensor.requires_grad_()": (
        "f calls requires_grad_(), as torch.cond does, which torch.func's transforms refuse. "
        "per_example_grad and jacobian take chunk_size=1, a plain loop."
    ),
    "c++ API of custom Function": (
        "f holds a torch::autograd::Function that is written in C++, which has no forward mode. "
        "Use linearize(f, *primals)[1], which transposes reverse mode, or wrap it in "
        "gt.custom_rule."
    ),
    "cannot use C++ torch::autograd::Function with functorch transforms": (
        "f holds a torch::autograd::Function that is written in C++, which torch.func's transforms "
        "cannot enter. Take the derivative outside of the transform (per_example_grad and "
        "jacobian: chunk_size=1 is a plain loop), or wrap it in gt.custom_rule."
    ),
    " is not implemented": (
        "f holds an operation whose backward pass has no derivative in PyTorch, and that one is "
        "asked for. Write it by plain operations, or for a second derivative push forward: "
        "gt.jvp, or for attention sdpa_kernel(SDPBackend.MATH)."
    ),
    "arguments don't support automatic differentiation": (
        "f holds an operation whose backward pass writes into out=..., which PyTorch cannot "
        "differentiate. Write it by plain operations."
    ),
    "Can't call numpy() on Tensor that requires grad": (
        "f leaves PyTorch by numpy(), where no gradient follows. Write it by PyTorch's operations, "
        "or as a gt.host_function with a rule; x.detach().numpy() makes a constant of x, and "
        "gt.straight_through gives it a surrogate's derivative."
    ),
    "does not currently support double backward": (
        "f holds a function that torch.compile compiled, whose backward pass PyTorch cannot "
        "differentiate (pytorch#91469). Use gt.compile, or the function as it was before it was "
        "compiled, or compile the function that takes both derivatives."
    ),
    "must implement the jvp function": _NO_JVP,
    "flat_bdims must not be None": _NO_JVP,  # the same under vmap
    "modified by an inplace operation": (
        "what a derivative needs was changed in place, by f or by PyTorch's own forward-mode rule "
        "of softmax, log_softmax or logsumexp, whose tangents it cannot differentiate. For these "
        "push by linearize(f, *primals)[1] in place of jvp."
    ),
    "Trying to use forward AD with": _USE_OTHERS,
    "Could not run 'aten::_efficientzerotensor'": _USE_OTHERS,  # of sparse tensors
    "vmap: It looks like you're attempting to use a Tensor in some data-dependent": (
        "f branches on values, which vmap cannot follow. per_example_grad and jacobian take "
        "chunk_size=1, a plain loop that can."
    ),
    "We do not support batching operators": (
        "f holds an operation whose output's shape depends on values (nonzero, unique, indexing by "
        "a mask), which vmap cannot follow. Use torch.where, or give per_example_grad or jacobian "
        "chunk_size=1, a plain loop that can."
    ),
    "requires special handling, and does not yet have a batching rule": _NO_VMAP,
    "Could not run 'aten::view' with arguments from the 'SparseCPU' backend": _NO_VMAP,
    "Sparse CSR tensors do not have is_contiguous": _NO_VMAP,
    "accessing `data` under vmap": _NO_VMAP,  # TorchScript
    "Cannot access data pointer of Tensor that doesn't have storage": (
        "f holds an operation that reads the numbers of a tensor (lengths, places to split), which "
        "torch.func's transforms hide, and gradtools transposes a pullback through them. Pass them "
        "as a tuple of Python numbers, or give the missing map as well."
    ),
    "output_padding is not supported for non-transposed convolutions": (
        "f holds the gradient of a transposed convolution with output_padding, whose backward pass "
        "PyTorch cannot differentiate again in reverse mode. Push forward by gt.jvp."
    ),
    "specified up to multiplication by e^{i phi}": (
        "f holds eigenvectors of a complex matrix, whose phases are free: of what depends on them, "
        "as a tangent of the vectors does, there is no gradient. Use linearize or vjp for the "
        "first derivative, and hvp or linearize of grad for the second."
    ),
    "Expected isFloatingType(grad.scalar_type()) || (input_is_complex": (
        "f holds an operation of complex input and real outputs (linalg.eigh), whose backward pass "
        "PyTorch cannot differentiate inside of torch.func's transforms. Take the derivative "
        "outside of them, or give a rule both maps."
    ),
    "Expected a proper Tensor but got None": (
        "f holds layer_norm with a bias and no weight, whose backward pass PyTorch cannot "
        "differentiate inside of torch.func's transforms. Give it a weight of ones."
    ),
    NO_SAVED_TENSORS_HOOKS: (
        "f holds torch.utils.checkpoint, or other saved_tensors_hooks, or is called inside of "
        "them; torch.func's transforms do not support these. Use gt.checkpoint in their place, or "
        "take the derivative outside of the transform (per_example_grad and jacobian: chunk_size=1 "
        "is a plain loop)."
    ),
    "doesn't match the broadcast shape": (
        "f adds in place to a tensor of another shape, as PyTorch's own RNN, GRU, LSTM and their "
        "cells do when torch.func.grad under vmap is differentiated again. For these use "
        "per_example_grad, or gt.grad under vmap."
    ),
    "vmap: inplace arithmetic": (
        "f changes a tensor in place that is shared by all examples (such as batch "
        "normalization's running statistics in training mode), which vmap cannot follow. Put "
        "the module in evaluation mode, make_functional it, or give per_example_grad or jacobian "
        "chunk_size=1, a plain loop."
    ),
    "would mutate a captured Tensor": (
        "f changes a tensor in place that it captured (such as batch normalization's running "
        "statistics in training mode), which torch.func's transforms cannot follow. Put the "
        "module in evaluation mode or make_functional it; or take the derivative outside of the "
        "transform (per_example_grad and jacobian: chunk_size=1 is a plain loop)."
    ),
    "Nested forward mode AD is not supported": (
        "f holds torch.func.jvp, jacfwd or hessian, which do not nest in the dual numbers that "
        "jvp uses at the outermost level. Use gt.jvp, gt.jacobian and gt.hessian in f."
    ),
    "does not require grad and does not have a grad_fn": _NO_GRAPH,
    "One of the differentiated Tensors does not require grad": _NO_GRAPH,
    "cannot register a hook on a tensor that doesn't require grad": _NO_GRAPH,
    "backward through the graph a second time": (
        "a graph that was used up is asked again: f, or the loss, goes on from a tensor that was "
        "kept attached between calls (a cached function of a weight, a list of outputs). Detach "
        "it, return it from f, or compute it in each call."
    ),
    "use_reentrant=True": (
        "f holds a reentrant torch.utils.checkpoint, which takes no derivative with respect to "
        "chosen inputs. Pass use_reentrant=False to it, or use gt.checkpoint."
    ),
    "leaf Variable that requires grad is being used in an in-place operation": (
        "f changes an argument in place that is differentiated, or a parameter. Clone it in f "
        "first."
    ),
    "marked with @once_differentiable": (
        "f holds a torch.autograd.Function marked once_differentiable, which has no second "
        "derivative in reverse mode."
    ),
    "it must override the setup_context staticmethod": (
        "f holds an old-style torch.autograd.Function (forward takes ctx), which torch.func's "
        "transforms cannot enter. Split its forward into forward and setup_context, or take the "
        "derivative outside of the transform (per_example_grad and jacobian: chunk_size=1)."
    ),
    "it does not have vmap support": (
        "f holds a torch.autograd.Function without a vmap rule. Give it one "
        "(generate_vmap_rule = True), or give per_example_grad or jacobian chunk_size=1, a loop."
    ),
    "It looks like you're either (1) calling .item()": (
        "f takes a Python number out of a tensor, which vmap cannot follow. chunk_size=1 is a "
        "plain loop that can."
    ),
}
