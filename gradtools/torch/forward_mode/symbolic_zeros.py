"""Products with symbolic zero tangents, skipped inside a TorchDispatchMode.

Forward mode takes a symbolic zero for the tangent of what has none, such as a fixed weight w, and
multiplies it out: a layer y = x w then takes three products,

    dy = dx w + x dw        dw = 0

where two would do. Inside, such a zero is a single number expanded to the shape, with a mark, and a
product with it is another. The mode adds some microseconds to each operation, so it stands only
around passes that PyTorch's own rules differentiate. Beneath any dispatch mode PyTorch's forward
over reverse mode of complex numbers may go wrong (linalg.pinv does; no upstream report was found),
so what meets one there is done again without.
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
    """They came up where the mode had better not stand."""


class NoProductsOfZero(upstream.TorchDispatchMode):
    """For what is called inside, in this thread.

    Raises `ComplexNumbers` if refuses_complex is set.
    """

    def __init__(self, refuses_complex: bool = False) -> None:
        super().__init__()
        self._refuses_complex = refuses_complex

    def __torch_dispatch__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fun is _SYMBOLIC_ZERO and (kwargs or {}).get("layout") in (None, torch.strided):
            return _zero(args[0], **(kwargs or {}))
        shape_of = _PRODUCTS.get(fun)
        shape = None if shape_of is None else shape_of(*args)
        if shape is not None:
            return _zero(shape, dtype=args[0].dtype, device=args[0].device)
        if self._refuses_complex and any(isinstance(x, Tensor) and x.is_complex() for x in args):
            raise ComplexNumbers
        return fun(*args, **kwargs) if kwargs else fun(*args)


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
