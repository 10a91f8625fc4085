"""Function modes that replace PyTorch's operations by plain programs.

Inside of torch.func there is no graph whose nodes could be corrected, and batching rules treat the
kernels' other results (means, deviations) as constants. So an operation is replaced there if
several levels differentiate it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_mapped, levels_differentiating
from gradtools.torch.plain_programs.rows import (
    GRADIENT,
    GRADIENT_AGAIN,
    MAPPED,
    TANGENT_OF_GRADIENT,
    THIRD,
    UNDER_VMAP,
    PlainProgram,
    row_of,
    traced_programs,
)

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_REVERSE = (GRADIENT, GRADIENT_AGAIN, THIRD, MAPPED, UNDER_VMAP, TANGENT_OF_GRADIENT)


class StaysInside(TorchFunctionMode):
    """A function mode that stays active inside of PyTorch's Python functions which it calls."""

    inside: Any = None  # the Python function being run: its builtin may share its name

    def within(self, fun: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        """Calls a Python function of PyTorch with this mode active inside."""
        with self.inside_of(fun):
            return upstream.redispatch_function(fun, types, args, kwargs)

    @contextmanager
    def inside_of(self, fun: Any) -> Iterator[None]:
        before, self.inside = self.inside, fun
        TorchFunctionMode.__enter__(self)
        try:
            yield
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)
            self.inside = before


class PlainPrograms(StaysInside):
    """The mode around a function that torch.func pulls back, in a level of its own.

    Args:
        times: The number of levels that must differentiate an operation for it to be replaced.
        control_flow: Whether higher-order operators (cond, scan, map) run by plain code, too:
            PyTorch does not differentiate their backward pass.
    """

    def __init__(self, times: int = 2, control_flow: bool = False) -> None:
        super().__init__()
        self._times = times
        self._control_flow = control_flow

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        row: Any = _ROWS.get(fun, _UNKNOWN)
        if row is _UNKNOWN:
            row = row_of(fun)
            if row is None or row.program is None or not any(k in row.wrong for k in _REVERSE):
                row = None
            _ROWS[fun] = row
        if row is not None and "out" not in kwargs and row.applies(args, kwargs):
            leaves = upstream.tree_leaves((args, kwargs))
            mapped = UNDER_VMAP in row.wrong
            mapped = mapped and any(isinstance(x, Tensor) and is_mapped(x) for x in leaves)
            times = 1 if GRADIENT in row.wrong else self._times
            if mapped or len(levels_differentiating(leaves)) >= times:
                return row.program(*args, **kwargs)
        if type(fun) is FunctionType and fun is not self.inside and row is None:
            return self.within(fun, types, args, kwargs)
        compiling = torch.compiler.is_dynamo_compiling()
        if self._control_flow and not compiling and not isinstance(fun, _ORDINARY):
            is_operator = isinstance(fun, upstream.HigherOrderOperator)
            fun = (is_operator and plain_kernel(fun)) or fun
        return fun(*args, **kwargs) if kwargs else fun(*args)


def plain_kernel(fun: upstream.HigherOrderOperator) -> Any:
    """The plain implementation of a higher-order operator; None if it has none."""
    return fun.py_kernels.get(upstream.DispatchKey.CompositeExplicitAutograd)


_UNKNOWN: Any = object()
_ROWS: dict[Any, Any] = {}  # by function of PyTorch's


# Types that are no higher-order operators; `isinstance` of that class costs four times as much.
_ORDINARY = (BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType)


# --- in compiled code ----------------------------------------------------------------------------


class PlainProgramsInTrace(TorchFunctionMode):
    """The mode while dynamo traces a function that is pulled back.

    The compiled graph is differentiated as a whole, with the backward passes in it, if its inputs
    require grad.

    Args:
        levels: The number of `torch.func`'s levels that belong to this derivative; tensors beneath
            them may require grad.
        nested: Whether another derivative is being traced around this one.
    """

    def __init__(self, levels: int, nested: bool) -> None:
        super().__init__()
        self.levels, self.nested = levels, nested

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fun in _TRACED:
            return traced(_TRACED[fun], fun, args, kwargs)
        attends = getattr(fun, "__name__", "") in _ATTENDING
        if not (attends or fun in _TRACED_AGAIN) or not self._is_differentiated_again(args, kwargs):
            return fun(*args, **kwargs)
        if attends:
            with sdpa_kernel(SDPBackend.MATH):
                return fun(*args, **kwargs)
        return traced(_TRACED_AGAIN[fun], fun, args, kwargs)

    def _is_differentiated_again(self, args: Any, kwargs: Any) -> bool:
        """Whether an operand requires grad beneath this derivative's levels."""
        if self.nested:
            return True
        for x in upstream.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                for level in range(self.levels, 0, -1):
                    x = upstream.unwrap_for_grad(x, level)
                if x.requires_grad:
                    return True
        return False


def traced(row: PlainProgram, fun: Any, args: Args, kwargs: Kwargs) -> Any:
    """Calls the program of a row if it applies at these arguments, else the function."""
    if row.program is None or "out" in kwargs or not row.applies(args, kwargs):
        return fun(*args, **kwargs)
    return row.program(*args, **kwargs)


_ATTENDING = ("scaled_dot_product_attention", "multi_head_attention_forward")
_TRACED = traced_programs((GRADIENT,))
_TRACED_AGAIN = traced_programs((GRADIENT_AGAIN, THIRD, MAPPED))
