"""Copies of tensors' contents: compared bit for bit, and put back in place."""

from __future__ import annotations

from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python

Tensor = torch.Tensor
left_to_python(__name__)


def put_back(tensor: Tensor, contents: Tensor) -> None:
    """Restores a tensor's contents without changing its version counter.

    Graphs that saved the tensor stay valid: nothing else reads it before it has its contents again.
    """
    counted = not tensor.is_inference()
    uncounted = upstream.version_counter_kept(tensor) if counted else torch.inference_mode()
    with torch.no_grad(), uncounted:
        if tensor.shape != contents.shape:
            tensor.resize_(contents.shape)
        if tensor.layout is torch.strided and 0 in tensor.stride():
            once = tuple([slice(None if stride else 1) for stride in tensor.stride()])
            tensor, contents = tensor[once], contents[once]
        tensor.copy_(contents)


def changed_contents(tensors: list[Tensor], contents: list[Tensor]) -> list[bool]:
    """Whether tensors differ bitwise from these copies, with one synchronization per device."""
    if not tensors or upstream.peek_interpreter_stack() is not None:
        return [True] * len(tensors)  # values cannot be read under a transform
    differing: list[Any] = [_differs(x, c) for x, c in zip(tensors, contents, strict=True)]
    for device in {x.device for x in differing if isinstance(x, Tensor)}:
        which = [k for k, x in enumerate(differing) if isinstance(x, Tensor) and x.device == device]
        for k, differs in zip(
            which, torch.stack([differing[k] for k in which]).tolist(), strict=True
        ):
            differing[k] = differs
    return differing


def _differs(x: Tensor, copy: Tensor) -> bool | Tensor:
    """Whether x differs from a copy; a tensor on x's device if that is an accelerator."""
    plain = type(x) in _PLAIN and x.layout is torch.strided and not (x.is_conj() or x.is_neg())
    alike = x.shape == copy.shape and x.dtype == copy.dtype and x.device == copy.device
    if not (plain and alike) or x.is_quantized:
        return True
    a, b = _bits(x.detach()), _bits(copy)
    if x.device.type == "cpu":
        return not torch.equal(a, b)
    return a.ne(b).any()


_PLAIN = (Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(_INTEGERS[x.itemsize]) if x.is_floating_point() else x


def is_other(x: Tensor, copy: Tensor) -> bool:
    """Whether x differs bitwise from an earlier copy; False if that cannot be read."""
    plain = type(x) is Tensor and x.device.type == "cpu" and not (x.is_conj() or x.is_neg())
    hidden = upstream.peek_interpreter_stack() is not None or upstream.is_traced_by_make_fx()
    return plain and not (hidden or x.is_quantized) and any(changed_contents([x], [copy]))


def nbytes_of(x: Tensor) -> int:
    """The bytes of a tensor's stored entries."""
    if x.layout is torch.sparse_coo:
        return upstream.values_of(x).nbytes
    return x.nbytes if x.layout is torch.strided else x.values().nbytes
