"""Implements host kernels in PyTorch with one custom operator, which looks up a kernel by its key.

A compiled program contains no Python objects, so the operator takes the key of a `KernelCall`. The
operator has an implementation for fake tensors and a vmap rule. The derivative is defined by the
rule that calls the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gradtools.host_kernels import KernelCall, Results, call_by_key
from gradtools.torch import _upstream as upstream
from gradtools.torch.arrays import on_cpu
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import PLAIN, differentiated, with_batch_in_front
from gradtools.torch.modes import by_new_vmap, is_followed
from gradtools.torch.operation_marks import running

Tensor = torch.Tensor
_graphs, _is_zero = torch.is_grad_enabled, upstream.is_zero
_ARRAY, _tensor = np.ndarray, torch.from_numpy
_is_compiling = torch.compiler.is_dynamo_compiling


def call_kernel(call: KernelCall, xs: Sequence[Tensor]) -> list[Tensor]:
    """Calls the host kernel. The results are on the device of the first array."""
    if not is_compiling() and running.checked:
        return [torch.zeros_like(y) for y in _fake(call.key, xs, [])]
    if not xs:  # an operator without tensor arguments is not traced
        return _run(call.key, xs, [])
    return by_new_vmap(lambda *xs: list(_bind(call.key, xs, [])), xs)


class KernelCalls:
    """Fast path of a host function for plain tensors if no derivative, transform or mode is active.

    PyTorch's dispatcher takes ten times as long as the kernel of a small host function.

    Attributes:
        kernel: The `Kernel` of the host function.
        differentiated: The fast path for tensors that require grad, or None if there is none.
        count: The number of arguments, or 0 if any number of arguments is allowed.
        alike: Whether the result is one array with the shape and dtype of the first argument.
        fresh: The number of arguments if the kernel is a NumPy ufunc, which stores no array and
            returns a new array, so that no copy is needed; 0 for other kernels.
    """

    def __init__(self, of: Any, differentiated: Callable[[Any, Any], Any] | None) -> None:
        self.kernel, self.backend, self.differentiated = of.kernel, of._backend, differentiated
        self.count = len(of._binding.names)
        self.fun = self.kernel.fun
        self.alike = self.kernel.out is None and not self.kernel.raw
        # With more arguments, a ufunc writes its result to the additional argument.
        self.fresh = self.fun.nin if isinstance(self.fun, np.ufunc) else 0

    def call(self, args: tuple[Any, ...], statics: tuple[()] = ()) -> Any:
        """Calls the kernel. Returns NotImplemented if the fast path does not apply to args."""
        if _is_compiling() or not args or (len(args) != self.count and self.count):
            return NotImplemented
        graphs, tracked = _graphs(), False
        for x in args:
            if type(x) not in PLAIN or _is_zero(x):
                return NotImplemented
            if graphs and x.requires_grad:
                tracked = True
        if tracked:
            return self.differentiated(args, statics) if self.differentiated else NotImplemented
        if is_followed() or running.checked:
            return NotImplemented
        arrays: list[np.ndarray] = []
        keeps = len(args) != self.fresh
        try:
            for x in args:
                array = x.numpy()
                if keeps:  # copied: the kernel may store the array, and x may change in place
                    array = array.copy()
                    array.setflags(write=False)
                    array = array.view()  # a view cannot be made writable again
                arrays.append(array)
        except (RuntimeError, TypeError):  # raised if NumPy cannot read a tensor
            return NotImplemented
        if not self.alike:
            call, expected = self._known(args, arrays)
            ys = list(map(_tensor, call.fresh(arrays, expected)))
            if expected.widened:
                pairs = zip(ys, expected.specs, strict=True)
                ys = [y.to(getattr(torch, s.dtype)) for y, s in pairs]
            return ys[0] if expected.alone else call.trees.unflatten(expected.treedef, ys)
        try:
            y = self.kernel.fun(*arrays)
        except ValueError as error:
            self.kernel.note(error)
            raise
        first = arrays[0]
        if type(y) is _ARRAY and y.dtype is first.dtype and y.shape == first.shape:
            keeps = keeps or not y.flags.c_contiguous
            return _tensor(y.copy() if keeps else y)  # the kernel may store y
        call, expected = self._known(args, arrays)
        return _tensor(call.owned(y, expected)[0])

    def _known(self, args: tuple[Any, ...], arrays: list[np.ndarray]) -> tuple[KernelCall, Results]:
        """Returns the `KernelCall` for the shapes and dtypes of arrays, and its `Results`."""
        avals = tuple([(array.shape, array.dtype) for array in arrays])
        return self.kernel.known_call(avals, self.backend, args)


# --- the operator ------------------------------------------------------------------------


def _bind(key: str, xs: Sequence[Tensor], batch: Sequence[int]) -> Sequence[Tensor]:
    if not is_compiling() and differentiated(xs):
        return _WithoutDerivative.apply(key, batch, *xs)
    return torch.ops.gradtools.call_kernel(key, list(xs), batch)


def _run(key: str, xs: Sequence[Tensor], batch: Sequence[int]) -> list[Tensor]:
    call = call_by_key(key)
    expected = call.results_of(xs, len(batch))
    result = call.run([_numpy(x) for x in xs], expected, tuple(batch))
    device = xs[0].device if xs else None
    return [
        torch.from_numpy(y).to(device, getattr(torch, s.dtype))
        for y, s in zip(result, expected.specs, strict=True)
    ]


def _numpy(x: Tensor) -> np.ndarray:
    """Copies x to NumPy, since the kernel may store the array and x may be changed in place."""
    x = on_cpu(x)
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy().copy()


def _fake(key: str, xs: Sequence[Tensor], batch: Sequence[int]) -> list[Tensor]:
    call = call_by_key(key)
    call.keep()
    device = xs[0].device if xs else None
    return [
        torch.empty((*batch, *s.shape), dtype=getattr(torch, s.dtype), device=device)
        for s in call.results_of(xs, len(batch)).specs
    ]


def _vmap(info: Any, in_dims: Any, key: str, xs: Sequence[Tensor], batch: Sequence[int]) -> Any:
    run = lambda *xs: torch.ops.gradtools.call_kernel(key, list(xs), [info.batch_size, *batch])
    result = by_new_vmap(run, with_batch_in_front(xs, in_dims[1], info.batch_size))
    return result, [0] * len(result)


_LIBRARY = torch.library.Library("gradtools", "FRAGMENT")
_LIBRARY.define("call_kernel(str key, Tensor[] xs, SymInt[] batch) -> Tensor[]")
_LIBRARY.impl("call_kernel", _run, "CompositeExplicitAutograd")
torch.library.register_fake("gradtools::call_kernel", _fake, lib=_LIBRARY)
torch.library.register_vmap("gradtools::call_kernel", _vmap, lib=_LIBRARY)


# --- a kernel without a rule -------------------------------------------------------------


class _WithoutDerivative(torch.autograd.Function):
    """Calls a kernel that has no derivative. Differentiating the call raises an error."""

    @staticmethod
    def forward(key: str, batch: Sequence[int], *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_bind(key, xs, batch))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.call = call_by_key(inputs[0])

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> Any:
        raise ctx.call.no_derivative()

    @staticmethod
    def jvp(ctx: Any, *dxs: Any) -> Any:
        raise ctx.call.no_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: Any, key: str, batch: Sequence[int], *xs: Tensor) -> Any:
        front = with_batch_in_front(xs, in_dims[2:], info.batch_size)
        result = _bind(key, front, [info.batch_size, *batch])
        return tuple(result), (0,) * len(result)
