"""Gradients by a fused kernel, with the derivatives of a plain program.

A kernel computes a gradient faster than the plain program and in less memory, but its derivative of
it is wrong or missing. So the kernel's results are the values of a rule whose derivative is the
program's. First derivatives are unchanged, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gradtools.rules import Rule
from gradtools.torch.forward_mode.by_transposing import rule_of_reverse_mode
from gradtools.torch.rules.installing import apply_rule

Tensor = torch.Tensor


def with_derivative(
    name: str, program: Callable[..., list[Tensor]], xs: Sequence[Tensor], values: Sequence[Tensor]
) -> list[Tensor]:
    """`values`, which equal `program(*xs)`, with the derivatives of the program."""
    rule = _at_values(rule_of_reverse_mode(name, program), len(xs), len(values))
    return apply_rule(rule, *xs, *[value.detach() for value in values])


def _at_values(rule: Rule, count: int, values: int) -> Rule:
    """The rule of a function that takes its own values as further arguments and returns them."""
    tangent, cotangent = rule.tangent, rule.cotangent
    assert tangent is not None and cotangent is not None
    return replace(
        rule,
        primal=lambda *xs: list(xs[count:]),
        tangent=lambda saved, dxs: tangent(saved, dxs[:count]),
        cotangent=lambda saved, cts: [*cotangent(saved, cts), *[None] * values],
        saves=tuple(range(count)),
        nondifferentiable=tuple(range(count, count + values)),
    )
