"""Gradients of a fused kernel, with the derivatives of a plain program.

A kernel computes a gradient faster than the plain program does, and in less memory, but has no
right derivative of it. So its numbers are the values of a rule whose derivative, where one is
taken, is the program's. What is differentiated once stays as it was, to the bit.
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
    """The values, which are those of `program(*xs)`, with its derivatives."""
    rule = _at_values(rule_of_reverse_mode(name, program), len(xs), len(values))
    return apply_rule(rule, *xs, *[value.detach() for value in values])


def _at_values(rule: Rule, count: int, values: int) -> Rule:
    """The rule of a function whose values are known, and come after its arguments."""
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
