"""Edits of one tensor without a rule's checks: nodes of scaled and of transformed gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from gradtools.rules import Rule
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.rules.functions import RuleApplication, attach, edit_application
from gradtools.torch.rules.installing import apply_rule, is_plain_eager, note_edit

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
