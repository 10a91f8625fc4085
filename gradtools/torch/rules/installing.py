"""Applies rules in PyTorch: in eager code, under torch.func, in compiled code and under export.

If the inputs are differentiated, a `torch.autograd.Function` (`functions.py`) applies the rule.
Dynamo cannot trace a `Function` with a `jvp` and may drop a rule under `torch.func`
(pytorch#192985, pytorch#193279). In compiled code, dynamo therefore records an opaque call, which
functorch processes at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradtools.errors import GradtoolsError, warn
from gradtools.rules import Rule, by_key, closed_over_error, reverse_only_text
from gradtools.torch import _upstream as upstream
from gradtools.torch.captured_tensors import as_read_now
from gradtools.torch.compiling import is_compiling, opaque_to_dynamo, real_tensors_too
from gradtools.torch.edits import edit_application
from gradtools.torch.functorch_wrappers import differentiated, is_dual, is_inexact, is_wrapped
from gradtools.torch.modes import is_followed
from gradtools.torch.operation_marks import note_edit, pushing_in_trace
from gradtools.torch.rules.checking import closes_over_tracked
from gradtools.torch.rules.functions import Application, BatchedRule, apart, apply_at, attach
from gradtools.torch.rules.transposing import in_eager, in_own_transpose

Tensor = torch.Tensor
_levels, _functions = upstream.peek_interpreter_stack, upstream.count_of_function_modes


def apply_rule(rule: Rule, *xs: Tensor) -> list[Tensor]:
    """Calls `rule.primal(*xs)`, whose derivatives of all orders are defined by the rule."""
    if is_compiling():
        return apply_rule_by_key(rule.key, *xs)
    if rule.reverse_only:
        note_edit(rule.name, xs)
    return list(_apply(rule, xs))


def apply_rule_by_key(key: str, *xs: Tensor) -> list[Tensor]:
    """Applies a rule in compiled code. The key of the rule is a constant in the compiled code."""
    if not is_compiling():
        return apply_rule(by_key(key), *xs)
    # In compiled code, it is unknown which inputs are differentiated, so all inputs count as
    # differentiated.
    if pushing_in_trace and _reverse_only(key):
        raise GradtoolsError(reverse_only_text(pushing_in_trace[-1], _reverse_only(key)))
    return list(_apply_by_key(key, *xs))


@upstream.marked_constant
def _reverse_only(key: str) -> str:
    """Returns the name of the rule if it has no forward mode, or an empty string."""
    return by_key(key).name if by_key(key).reverse_only else ""


@opaque_to_dynamo
def _apply_by_key(key: str, *xs: Tensor) -> tuple[Tensor, ...]:
    """Applies a rule as one opaque node of dynamo's graph."""
    with real_tensors_too(xs):
        return tuple(_apply(by_key(key), xs))


def _apply(rule: Rule, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    xs = as_read_now(xs)
    if rule.reaches == "identity" and _is_plain_eager(xs):
        application = rule.__dict__.get("_application") or edit_application(rule, len(xs))
        xs = apart(xs)
        return attach((application, tuple(xs[: application.count])), *xs)
    if upstream.is_exporting() and _levels() is None:
        return _exported(rule, xs)
    if not isinstance(rule, BatchedRule) and not differentiated(xs):
        if rule.reaches is None:
            return _undifferentiated(rule, xs)
        if rule.reaches == "identity" and not _functions():
            return [y.detach().clone() for y in rule.primal(*xs)]
    if rule.user_functions:
        if in_own_transpose(rule, xs):
            return rule.primal(*xs)
        if closes_over_tracked(rule):
            raise closed_over_error(rule.name)
    point = Application(rule)
    if "cotangent" in rule.symbolic_zeros and in_eager():
        point.perturbed = tuple([is_inexact(x) and (x.requires_grad or is_dual(x)) for x in xs])
    return apply_at(point, xs)[: point.count]


def _undifferentiated(rule: Rule, xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs for inputs that are not differentiated, without an autograd node."""
    if rule.contract is None:
        with torch.no_grad():
            return [y.detach() if y.requires_grad else y for y in rule.primal(*xs)]
    ys = rule.primal(*xs)
    tracked = lambda x: x.requires_grad or upstream.is_gradtrackingtensor(x) or is_dual(x)
    if any(map(tracked, ys)) and not any(map(tracked, xs)):
        raise closed_over_error(rule.name)
    return list(ys)


def _is_plain_eager(xs: Sequence[Tensor]) -> bool:
    """Returns whether xs are dense tensors and no transform, mode or dual level is active."""
    for x in xs:
        if x.layout is not torch.strided or is_wrapped(x) or x.is_nested:
            return False
    # a TracingContext is also active in torch.export
    return not is_followed() and upstream.TracingContext.try_get() is None


def _exported(rule: Rule, xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the rule's outputs as constants, for `torch.export`.

    `torch.export` cannot represent a rule: PyTorch inlines the forward pass of a Function, so the
    custom gradient silently becomes the gradient of the inlined operations or, in strict mode, is
    dropped.
    """
    ys = rule.primal(*[x.detach() for x in xs])
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*xs, *ys)):
        warn(
            f"torch.export: the program contains the values of {rule.name}, but not its "
            "derivative: autograd treats its outputs as constants. Train the model before it "
            "is exported; if only the values are needed, call torch.export.export under "
            "torch.no_grad()."
        )
    return [y.detach() for y in ys]
