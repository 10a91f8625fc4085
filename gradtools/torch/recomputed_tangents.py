"""The passes in forward mode of a frozen function: its tangents, and those of its pullback.

Both recompute the function at dual numbers. The first keeps no graph; the second one differentiates
the graph of one recomputation (forward over reverse).

PyTorch's forward mode represents a missing tangent, such as that of a fixed weight w, by a symbolic
zero, and multiplies with it: a layer y = x w then takes three products,

    dy = dx w + x dw        dw = 0

where two are enough. Here such a zero is a marked 0-d tensor expanded to the shape,
and a product with it is again one, without arithmetic (`NoProductsOfZero`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.function_modes import OneTangent as GradModeStopsTangents
from gradtools.torch.function_modes import OneTangent as OnlyTangents
from gradtools.torch.functorch_wrappers import is_inexact, unshared
from gradtools.torch.modes import NOTHING, dual_level, dual_of, unpacked
from gradtools.torch.operation_marks import CHUNK, detached
from gradtools.torch.replaying.nodes import pulled_back
from gradtools.torch.replaying.recomputing import first_pass_state, without_hooks

Tensor = torch.Tensor
Entries = Sequence[Any]
left_to_python(__name__)


def tangents(use: Any, zs: Entries, dzs: Entries) -> list[Any]:
    """Tangents of the outputs of a use of a frozen function, without any graph."""
    return _without_products_of_zero(use, lambda products: _tangents(use, zs, dzs, products))


def _tangents(use: Any, zs: Entries, dzs: Entries, products: Any) -> list[Any]:
    again = use.with_modes(use.modes)
    again.within = OnlyTangents
    with first_pass_state(again), dual_level(), products:
        ys, _ = again.one(0, [], [*map(_dual, zs, dzs)])
        return [_tangent(y) for y in ys]


def pullback_tangents(use: Any, zs: Entries, dzs: Entries, cts: Entries) -> list[Any]:
    """The tangent of a use's pullback of cts along dzs: forward over reverse."""
    run = lambda products: _pullback_tangents(use, zs, dzs, cts, products)
    return _without_products_of_zero(use, run)


def _without_products_of_zero(use: Any, run: Callable[[Any], list[Any]]) -> list[Any]:
    """`run` of a mode that takes no products of zero, or of none where numbers are complex."""
    try:
        if not use.uses.is_complex:
            return run(NoProductsOfZero(refuses_complex=True))
    except ComplexNumbers:
        use.uses.is_complex = True
    return run(NOTHING)


def _pullback_tangents(
    use: Any, zs: Entries, dzs: Entries, cts: Entries, products: Any
) -> list[Any]:
    # Users' saved tensors hooks cannot pack symbolic zeros; rules may use torch.func only if
    # no hooks are set.
    own = unpacked()
    use = use.with_modes(use.modes)
    use.within = GradModeStopsTangents
    level, graph = dual_level(), torch.enable_grad()
    with without_hooks(use.leaves), first_pass_state(use), own, level, graph, products:
        duals = [*map(_dual, zs, dzs)]
        duals = [x.requires_grad_() if is_inexact(x) else x for x in duals]
        ys, _ = use.one(0, [], duals)
        # With create_graph=True, without which some gradients have wrong tangents.
        grads = pulled_back(ys, duals, cts, True, True)
        return [_tangent(g) for g in grads]


def _dual(z: Tensor, dz: Tensor | None) -> Tensor:
    z = detached(z, CHUNK)
    return z if dz is None else dual_of(unshared(z), detached(dz, CHUNK))


def _tangent(y: Any) -> Tensor | None:
    if not isinstance(y, Tensor) or not is_inexact(y):
        return None
    tangent = upstream.unpack_dual(y, level=upstream.forward_level())[1]
    return None if tangent is None else detached(tangent, CHUNK)


# --- products with symbolic zeros, skipped inside a TorchDispatchMode ----------------------------

_aten = torch.ops.aten
_SYMBOLIC_ZERO = _aten._efficientzerotensor.default
_MARK = "gradtools_zero"


class ComplexNumbers(Exception):
    """An operation on complex numbers ran under `NoProductsOfZero`."""


class NoProductsOfZero(upstream.Watching):
    """A dispatch mode in which a product with a symbolic zero is a symbolic zero.

    It adds some microseconds to each operation, so it is active only in passes by PyTorch's own
    rules. Below any dispatch mode, PyTorch's forward-over-reverse mode of complex numbers may be
    wrong (that of linalg.pinv is; no upstream report was found), so a pass with complex numbers is
    repeated without the mode.

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
