"""Attaches the autograd nodes of edits directly, for a single tensor in plain eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradtools.rules import Rule, captured_objects
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.functorch_wrappers import PLAIN, is_inexact
from gradtools.torch.operation_marks import DERIVATIVE, detached, note_edit
from gradtools.torch.rules.functions import Application, attach
from gradtools.torch.trees import flatten, unflatten

Tensor = torch.Tensor
_levels, _forward_level = upstream.peek_interpreter_stack, upstream.forward_level
_functions, _dispatches = upstream.count_of_function_modes, upstream.count_of_dispatch_modes
_is_wrapped, _tracing = upstream.is_wrapped, upstream.tracing_state


def edited(rule: Rule, x: Any, cotangent: Any = None, value: Any = None) -> Tensor | None:
    """Implements `gradtools.backend.Backend.edited`: attaches the node in plain eager mode."""
    if type(x) not in PLAIN or _is_wrapped(x):
        return None
    # `is_followed` is inlined, because calling it takes as long as the rest of this function.
    if _levels() or _functions() or _dispatches() or _tracing() or _forward_level() >= 0:
        return None
    if rule.reverse_only:
        note_edit(rule.name, (x,))
    if not (x.requires_grad and torch.is_grad_enabled()):
        if value is not None:
            return None
        return x.detach().clone() if is_inexact(x) else x
    if x.layout is not torch.strided or x.is_nested:
        return None
    if cotangent is None:
        application = rule.__dict__.get("_application") or edit_application(rule, 1)
    else:
        application = Application(rule, None, 1, cotangent, materializes=True)
    # `value` is copied, because the caller may still use it and the output may be written in place.
    out = x if value is None else value.detach().clone()
    return attach((application, (out,)), x)[0]


def edit_application(rule: Rule, inputs: int) -> Application:
    """Returns the `Application` of an edit, which the first call creates and later calls reuse."""
    cotangent = rule.cotangent
    assert cotangent is not None

    def pulled(ctx: Any, cts: Sequence[Any]) -> Sequence[Any]:
        return (None,) * inputs if cts[0] is None else cotangent(ctx.saved_tensors, cts)

    maps = rule.linearized_from([None] * inputs, []).without_arrays()
    # Without saved tensors, the cotangent map does not read its first argument, here `ctx`.
    pull, count = pulled if maps.saves else cotangent, inputs - len(rule.nondifferentiable)
    application = Application(rule, maps, count, pull, maps.saves, materializes=rule.reverse_only)
    rule.__dict__["_application"] = application
    return application


def tied(x: Any, function: Callable[..., Any]) -> Any:
    """Returns x with edges to the leaves that a function captures.

    The derivatives of x depend on the leaves that the function captures. No gradient flows along
    the edges, but a derivative of a function of x finds these leaves through the edges, so its
    results are attached to the graph of an outer derivative.
    """
    if not torch.is_grad_enabled() or upstream.peek_interpreter_stack() is not None:
        return x
    captured = [*captured_objects((function,), _is_tracked, Tensor)]
    if not captured:
        return x
    leaves, treedef = flatten(x)
    for i, leaf in enumerate(leaves):
        if _is_tracked(leaf):
            leaves[i] = _Tied.apply(leaf, *leaves_of(captured))
            break
    return unflatten(treedef, leaves)


def _is_tracked(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


class _Tied(torch.autograd.Function):
    """Returns its first argument unchanged, with edges to the other arguments."""

    recorded_as = "identity"

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        return detached(x, DERIVATIVE)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return ct, *[None] * ctx.count
