"""The constants of a graph, on which derivatives may depend where no output does.

The coefficient of an edit, of a straight-through estimator, of a Function that scales its gradient:
each is saved by a node. A recomputation of the same function saves the same ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from gradtools.torch import _upstream as upstream
from gradtools.torch.state import contents_of

Tensor = torch.Tensor
Constants = list[tuple[Any, Any]]  # a value, and the variable of a function that holds it, if any

_NUMBERS = (bool, int, float, complex)
_SMALL = 64  # entries of a tensor that is read where PyTorch's own node saved it
_DEPTH = 4  # of functions that functions close over


def constants_of(nodes: Iterable[Any]) -> Constants:
    """The constants of a graph, in the order in which it was made."""
    result: Constants = []
    inner = [node for node in nodes if type(node) is not upstream.AccumulateGrad]
    for node in sorted(inner, key=upstream.sequence_of):
        if isinstance(node, BackwardCFunction):
            result += [(x, None) for x in _bits_of(upstream.packed(node, "tensors"))]
            numbers = {k: v for k, v in vars(node).items() if isinstance(v, _NUMBERS)}
            result += [(repr(value), None) for value in numbers.values()]
            linearized = getattr(getattr(node, "point", None), "linearized", None)
            if linearized is not None:  # of a rule
                result += _closed_over(linearized.cotangent, _DEPTH)
            continue
        for name, is_tensor in upstream.saved_by(type(node)):  # type: ignore[arg-type]
            if is_tensor:
                result += [(x, None) for x in _bits_of(upstream.packed(node, name), _SMALL)]
            elif isinstance(value := upstream.saved(node, name), _NUMBERS):
                result.append((repr(value), None))
    return result


def are_other(first: Constants, second: Constants) -> bool:
    """Whether constants differ; None is not known.

    A variable that both passes share may count their calls.
    """
    pairs = zip(first, second, strict=False)
    known = [pair for pair in pairs if pair[0][0] is not None and pair[1][0] is not None]
    return any(a != b and (at is None or at is not now) for (a, at), (b, now) in known)


def _closed_over(f: Any, depth: int) -> Constants:
    """The numbers that a function closes over, and functions that it closes over."""
    if not isinstance(f, FunctionType) or not depth:
        return []
    result: Constants = []
    for cell in f.__closure__ or ():
        value = contents_of(cell)
        if isinstance(value, _NUMBERS):
            result.append((repr(value), cell))
        else:
            result += _closed_over(value, depth - 1)
    return result


def _bits_of(saved: Iterable[Any], size: int | None = None) -> Iterator[Any]:
    """Checksums of saved tensors; None of those that are large, elsewhere, or packed by hooks."""
    for each in saved:
        x = upstream.unpacked(each)
        if x is None or upstream.is_zero(x) or (size is not None and x.numel() > size):
            yield None
        else:
            yield checksum(x)


def is_readable(x: Tensor) -> bool:
    """Whether the values can be read: a plain, strided tensor on a real device."""
    plain = type(x) in (Tensor, torch.nn.Parameter)
    known = plain and x.layout is torch.strided and x.device.type != "meta" and not x.is_quantized
    return known and not (upstream.is_wrapped(x) or upstream.is_legacy_batched(x))


def checksum(x: Tensor) -> tuple[Any, ...]:
    """Shape, dtype and a checksum of all bits."""
    if not is_readable(x) or not x.numel():
        return x.shape, x.dtype
    plain = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return x.shape, x.dtype, zlib.crc32(plain.view(torch.uint8).numpy().tobytes())
