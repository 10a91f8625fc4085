"""Forward mode that respects torch.no_grad: results computed under it have no tangent.

PyTorch's dual numbers ignore `no_grad`, so a function that stops a gradient with it would have
different derivatives in forward and reverse mode. Here

    y = f(x) under no_grad        dy = 0

in both: a function mode intercepts the switching of gradients and switches tangents alike. A tensor
with a tangent reports `requires_grad`, so that a function that branches on it takes the same branch
as in reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import as_written
from gradtools.torch.forward_mode.pushing import pushed_rightly
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.hooks import HookGuard
from gradtools.torch.open_derivatives import SPENT
from gradtools.torch.plain_programs.modes import StaysInside
from gradtools.torch.plain_programs.rows import is_wrong_at

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_unpack: Callable[..., Any] = upstream.unpack_dual  # type: ignore[attr-defined]
_is_wrapped = upstream.is_wrapped
set_graphs: Callable[[bool], None] = upstream.set_grad_enabled  # type: ignore[attr-defined]
_set_tangents: Callable[[bool], None] = upstream.set_forward_mode_enabled
_is_excluded: Callable[[Any], bool] = upstream.is_dispatch_key_excluded
_AUTOGRAD = upstream.DispatchKey.AutogradFunctionality  # type: ignore[attr-defined]
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_AS_IT_IS = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_REQUIRES: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class NoGradStopsTangents(StaysInside):
    """A function mode in which results computed under `torch.no_grad` have no tangent.

    It is entered for one call of one function in a dual level, with gradients enabled.

    Args:
        hidden: Whether operations record no graph, although f sees gradients enabled. Ends when f
            enables gradients itself, for it then needs a graph.
        again: Whether the tangents may be differentiated; some are then computed by other programs.
        caller: The operator's name, if it refuses hooks on gradients.
    """

    def __init__(self, hidden: bool, again: bool = False, caller: str | None = None) -> None:
        super().__init__()
        self.operator = caller
        self._hooks: HookGuard | None = None
        self._again = again
        self._level = upstream.forward_level()
        self._hidden = hidden
        self._stopped: int | None = None  # the depth of transforms at which f disabled gradients
        self._around: list[int | None] = []  # a stack of it: one entry per block that enables them
        self.shows = False  # whether dual numbers record a graph only to be seen

    def __enter__(self) -> NoGradStopsTangents:
        self._compiled = as_written()  # which may refuse: before this mode is entered
        self._compiled.__enter__()
        super().__enter__()
        if self.operator is not None:
            self._hooks = HookGuard(self.operator, self._moves)
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._compiled.__exit__(*error)
        if self._stopped is not None:  # f has left gradients disabled
            _set_tangents(True)
        hooks, self._hooks = self._hooks, None  # breaks a reference cycle with this mode
        if hooks is not None:
            hooks.end(error[0] is None)

    @contextmanager
    def without_graph(self) -> Iterator[None]:
        """Context in which operations record no graph, although f sees gradients enabled.

        A hook on a gradient then raises `NeedsGraph`.
        """
        before, self._hidden = self._hidden, True
        if self._hooks is not None:
            self._hooks.hidden = True
        try:
            yield
        finally:
            self._hidden = before
            if self._hooks is not None:
                self._hooks.hidden = before

    def _moves(self, x: Tensor) -> bool:
        return is_inexact(x) if _is_wrapped(x) else _unpack(x, level=self._level)[1] is not None

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fun is set_graphs:
            return self._switched(*args)
        if fun is torch.autograd.grad:
            return self._pulled(fun, args, kwargs)
        if fun is Tensor.register_hook and self._hooks is not None:
            return self._hooks.register(fun, *args, **kwargs)
        if upstream.peek_interpreter_stack() is not None:
            return self.flowing(fun, types, args, kwargs)
        if fun == _REQUIRES and not upstream.is_frameworks_own_question(1):
            return fun(*args) or self._requires(args[0])
        if self._may_enter(fun, types, args, kwargs):
            return self.within(fun, (), args, kwargs)  # with gradients enabled, as f has them
        if not (self._hidden and torch.is_grad_enabled()):
            return self.flowing(fun, types, args, kwargs)
        set_graphs(False)
        try:
            return self.flowing(fun, types, args, kwargs)
        finally:
            set_graphs(True)

    def flowing(self, fun: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        """Calls a function; this mode stays active inside of a Python function of PyTorch."""
        if self._may_enter(fun, types, args, kwargs):
            return self.within(fun, (), args, kwargs)
        if fun is upstream.custom_function_call and self._again:
            level = upstream.peek_interpreter_stack()
            if level is not None and level.key() == upstream.TransformType.Jvp:
                from gradtools.torch.double_backward import gated_call

                call = partial(fun, args[0])
                return gated_call(self.operator or "jvp", args[0], call, args[1:])
            return self.within(fun, (), args, kwargs)  # gated at the level beneath, or in the graph
        of_functions = isinstance(fun, upstream.HigherOrderOperator) and fun is not self.inside
        if of_functions and fun is not upstream.custom_function_call:
            with self.inside_of(fun):  # for the functions among its arguments
                return pushed_rightly(fun, args, kwargs, self._again)
        return pushed_rightly(fun, args, kwargs, self._again)

    def _may_enter(self, fun: Any, types: Any, args: Args, kwargs: Kwargs) -> bool:
        in_python = type(fun) is FunctionType and fun is not self.inside
        return in_python and all(map(is_plain, types)) and not is_wrong_at(fun, args, kwargs)

    def _pulled(self, fun: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs torch.autograd.grad inside of f; without create_graph its results have no tangent.

        A tensor with a tangent requires a gradient here, so the pullback has a graph.
        """
        on = upstream.is_forward_mode_enabled()
        _set_tangents(on and bool(kwargs.get("create_graph", args[4:5] == (True,))))
        try:
            return self.within(fun, (), args, kwargs)
        finally:
            _set_tangents(on)

    def _switched(self, on: bool) -> None:
        """Intercepts `set_grad_enabled`: f disables or enables gradients.

        Enabling means that f needs a graph, except on leaving a block that disabled them.
        Transforms of torch.func enable them inside, whatever was before. A block may also restore
        the disabled state that autograd itself set, as it does around the forward of a Function.
        """
        were_on = torch.is_grad_enabled()
        if not (on or were_on):  # disabled by f, or by autograd, which enables them in C++
            return
        depth = len(upstream.get_interpreter_stack() or ())
        leaving = upstream.is_leaving_a_block(1)
        if on and not leaving and not were_on:
            self._around.append(self._stopped)
        set_graphs(on)
        if were_on and not on and leaving and self._around:
            self._stopped = self._around.pop()
        elif not on:
            self._stopped = depth if self._stopped is None else self._stopped
        elif self._stopped is None or depth <= self._stopped:
            self._stopped = None
            self._hidden = self._hidden and (depth > 0 or leaving)
        _set_tangents(on and self._stopped is None)

    def _requires(self, x: Tensor) -> bool:
        """Whether x would require a gradient in reverse mode; if graphs are recorded, it then does.

        Below autograd, as in the `__torch_dispatch__` of a wrapper, no tensor has a tangent.
        """
        if _is_excluded(_AUTOGRAD) or _unpack(x, level=self._level)[1] is None:
            return False
        if self._stopped is None and not self._hidden:
            self.shows = True
            recorded_dual(x)
        return True


def recorded_dual(x: Tensor) -> Tensor:
    """A dual number that requires grad, only so that operations on it record a graph."""
    if x.requires_grad:
        return x
    setattr(x, SPENT, [True])
    return x.requires_grad_()


def is_plain(kind: Any) -> bool:
    """Whether a tensor class has the default `__torch_function__`."""
    return kind in _PLAIN or getattr(kind.__torch_function__, "__func__", None) is _AS_IT_IS
