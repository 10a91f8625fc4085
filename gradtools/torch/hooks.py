"""Edits of one tensor without a rule's checks: nodes of scaled and of transformed gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from gradtools.rules import Rule, captured_objects
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.operation_marks import DERIVATIVE, detached
from gradtools.torch.rules.functions import RuleApplication, attach, edit_application
from gradtools.torch.rules.installing import apply_rule, is_plain_eager, note_edit
from gradtools.torch.trees import flatten, unflatten

Tensor = torch.Tensor


def scaled(x: Any, factor: float) -> Tensor | None:
    """x with its derivative times a number; None in compiled code, and for non-tensors.

    In plain eager mode a constant is returned unchanged, and for others the node is attached
    directly, since the rule needs no checks.
    """
    if torch.compiler.is_dynamo_compiling() or type(x) not in _EXACT:
        return None
    if (
        upstream.forward_level() < 0
        and upstream.peek_interpreter_stack() is None
        and not upstream.count_of_function_modes()
        and not upstream.count_of_dispatch_modes()
        and not upstream.is_wrapped(x)
        and upstream.tracing_state() is None
    ):
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x.detach().clone() if is_inexact(x) else x
        if x.layout is torch.strided and not x.is_nested:
            application = _scaling(factor.hex())
            return attach(application, (x,), x)[0]
    return apply_rule(_scaling(factor.hex()).rule, x)[0] if is_inexact(x) else None


def transformed(x: Any, cotangent: Callable[[Tensor], Tensor]) -> Tensor | None:
    """x with another cotangent, in plain eager mode; None elsewhere.

    All calls share one rule, since a rule for each would take most of the time.
    """
    if type(x) not in _EXACT or not (x.requires_grad and torch.is_grad_enabled()):
        return None
    if not is_plain_eager((x,)):
        return None
    note_edit(_TRANSFORM.name, (x,))
    pull = lambda ctx, cts: (cotangent(cts[0]),)
    application = RuleApplication(_TRANSFORM, None, 1, avals=(), pull=pull, materializes=True)
    return attach(application, (x,), x)[0]


_TRANSFORM = Rule(
    "transform_gradient",
    primal=lambda x: [x],
    cotangent=lambda _, cts: list(cts),
    saves=(),
    reaches="identity",
    reverse_only=True,
)


def tied(x: Any, function: Callable[..., Any]) -> Any:
    """x, with edges to the leaves that a function captures: its derivatives depend on them.

    A backward pass sends nothing along these edges, but a derivative that is taken at x finds the
    leaves of an outer one, and keeps its graph.
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
    """The identity of its first argument."""

    recorded_as = "identity"

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        return detached(x, DERIVATIVE)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        return ct, *[None] * ctx.count


_EXACT = (Tensor, torch.nn.Parameter)


@lru_cache(maxsize=128)
def _scaling(factor: str) -> RuleApplication:
    """The application of the scaling rule that all calls share."""
    number = float.fromhex(factor)  # hex, since 0.0 and -0.0 are equal as keys
    is_negation = number == -1.0

    def scale(_: Any, moved: Sequence[Tensor | None]) -> list[Any]:
        v = moved[0]
        return [None if v is None else -v if is_negation else number * v]

    rule = Rule(
        "scale_gradient",
        primal=lambda x: [x],
        tangent=scale,
        cotangent=scale,
        saves=(),
        reaches="identity",
    )
    return edit_application(rule, 1)
