"""Products with symbolic zero tangents, skipped inside a TorchDispatchMode.

PyTorch's forward mode represents a missing tangent, such as that of a fixed weight w, by a symbolic
zero, and multiplies with it: a layer y = x w then takes three products,

    dy = dx w + x dw        dw = 0

where two are enough. In this mode such a zero is a marked 0-d tensor expanded to the shape, and a
product with it is again one, without arithmetic. The mode adds some microseconds to each operation,
so it is active only in passes by PyTorch's own rules. Below any dispatch mode, PyTorch's
forward-over-reverse mode of complex numbers may be wrong (that of linalg.pinv is; no upstream
report was found), so a pass with complex numbers is repeated without the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
_aten = torch.ops.aten
_SYMBOLIC_ZERO = _aten._efficientzerotensor.default
_MARK = "gradtools_zero"


class ComplexNumbers(Exception):
    """An operation on complex numbers ran under `NoProductsOfZero`."""


class NoProductsOfZero(upstream.Watching):
    """The dispatch mode.

    Args:
        refuses_complex: Whether an operation on complex numbers raises `ComplexNumbers`.
    """

    def __init__(self, refuses_complex: bool = False) -> None:
        super().__init__()
        self._refuses_complex = refuses_complex

    def __torch_dispatch__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fun.namespace != "aten":
            self._refuse_complex(args)
            return fun(*args, **kwargs)
        with upstream.DisableTorchFunction():  # function modes have seen the call already
            if fun is _SYMBOLIC_ZERO and kwargs.get("layout") in (None, torch.strided):
                return _zero(args[0], **kwargs)
            shape_of = _PRODUCTS.get(fun)
            shape = None if shape_of is None else shape_of(*args)
            if shape is not None:
                return _zero(shape, dtype=args[0].dtype, device=args[0].device)
            self._refuse_complex(args)
            return fun(*args, **kwargs)

    def _refuse_complex(self, args: Any) -> None:
        if not self._refuses_complex:
            return
        for x in args:  # a loop, for speed: it runs at each operation
            if isinstance(x, Tensor) and x.is_complex():
                raise ComplexNumbers


def _zero(shape: Any, **how: Any) -> Tensor:
    result = torch.zeros((), **how).expand(shape)
    setattr(result, _MARK, True)
    return result


def _is_zero(x: Any) -> bool:
    return hasattr(x, _MARK)


# --- the shape of a product, if an operand is zero; else None ------------------------------------


def _of_matrices(a: Tensor, b: Tensor) -> Any:
    return (*a.shape[:-1], b.shape[-1]) if _is_zero(a) or _is_zero(b) else None


def _of_convolution(x: Tensor, w: Tensor, bias: Tensor | None, *how: Any) -> Any:
    if not (_is_zero(x) or _is_zero(w)) or not (bias is None or _is_zero(bias)):
        return None
    stride, pad, dilation, transposed, extra, groups = how
    rows = zip(x.shape[2:], w.shape[2:], stride, pad, dilation, extra, strict=True)
    if transposed:
        sizes = [(n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in rows]
        return (x.shape[0], w.shape[1] * groups, *sizes)
    sizes = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in rows]
    return (x.shape[0], w.shape[0], *sizes)


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _of_matrices,
    _aten.bmm.default: _of_matrices,
    _aten.convolution.default: _of_convolution,
}
