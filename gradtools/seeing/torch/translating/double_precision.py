"""A TorchFunctionMode that reads f's parameters and other captured tensors in float64.

A formula is compared in float64. The arguments are cast; what f holds besides, such as a module's
parameters, is read cast: each function of PyTorch that is called is given doubles in place of
single numbers. Nothing that f holds is changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.torch import _upstream as upstream
from gradtools.torch._upstream import pytree
from gradtools.torch.patches import functions_applied
from gradtools.torch.rerunning import memory_of

Tensor = torch.Tensor
_DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class _Reading(TorchFunctionMode):
    """Gives functions other tensors than those that they are called with."""

    def __init__(self, place: Mapping[int, Tensor], wide: bool) -> None:
        super().__init__()
        self.place, self.wide = place, wide
        self.cast: dict[int, tuple[Tensor, Tensor]] = {}
        self.origins: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, x: Any) -> Any:
        """What stands for x."""
        if isinstance(x, torch.dtype):
            return _DOUBLE.get(x, x) if self.wide else x
        if not isinstance(x, Tensor):
            return x
        result = self.place.get(id(x), x)
        if self.wide and result.dtype in _DOUBLE:
            return self._widened(result)
        return result

    def _widened(self, x: Tensor) -> Tensor:
        known = self.cast.get(id(x))
        if known is not None:
            return known[1]
        with torch.enable_grad():
            result = x.to(_DOUBLE[x.dtype])
        if x.is_leaf and upstream.version_of(x) == 0:
            self.cast[id(x)] = self.origins[memory_of(result)] = x, result
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS:
            return func(*args, **(kwargs or {}))
        func = _WIDER.get(func, func) if self.wide else func
        args, kwargs = pytree.tree_map(self.read, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    def around(self, cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """A function with a rule of its own."""
        return apply(*pytree.tree_map(self.read, tuple(args)), **kwargs)


_here = threading.local()


def origin_of(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """What was cast, and the cast, if x shows the memory of a cast that is read in its place."""
    mode = getattr(_here, "reading", None)
    result: tuple[Tensor, Tensor] | None = mode and mode.origins.get(memory_of(x))
    return result


_TENSOR: Any = Tensor
_WIDER: dict[Any, Any] = dict.fromkeys((Tensor.half, Tensor.float, Tensor.bfloat16), Tensor.double)
_COMPLEX: Any = Tensor  # of whose casts PyTorch's stubs know nothing
_WIDER |= dict.fromkeys((_COMPLEX.chalf, _COMPLEX.cfloat), _COMPLEX.cdouble)
_ASKS = frozenset({_TENSOR.is_leaf.__get__, _TENSOR.grad_fn.__get__})


@contextmanager
def reading(place: Mapping[int, Tensor], wide: bool) -> Iterator[None]:
    """Inside, functions read what stands in place of tensors, by their ids; wide: in doubles."""
    if not place and not wide:
        yield
        return
    mode, before = _Reading(place, wide), getattr(_here, "reading", None)
    with functions_applied(mode.around), mode:
        _here.reading = mode if wide else before
        try:
            yield
        finally:
            _here.reading = before
