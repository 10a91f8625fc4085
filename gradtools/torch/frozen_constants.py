"""Defines the autograd node that marks the constants of a frozen function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradtools.boundary import user_facing
from gradtools.rules import constant_error
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import nodes_behind

Tensor = torch.Tensor


def gate_of(caller: str, constants: Sequence[Tensor]) -> list[Tensor]:
    """Returns a list with one scalar that represents all constants, or an empty list."""
    return [*Constants.apply(caller, True, *constants)] if constants else []


def constants_among(nodes: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Returns the `Constants` nodes in a graph, and the constants, which are leaves."""
    ends = upstream.nodes_of_function(nodes, Constants)
    behind = nodes_behind(ends) if ends else []
    return ends, [node.variable for node in behind if type(node) is upstream.AccumulateGrad]


class Constants(torch.autograd.Function):
    """Returns the constants of G, or one scalar that represents all constants.

    A derivative with respect to a constant raises an error.

    Args:
        one: Whether to return one scalar that represents all constants.
    """

    recorded_as = "frozen"

    @staticmethod
    def forward(ctx: Any, caller: str, one: bool, *constants: Tensor) -> Any:
        ctx.caller = caller
        return (torch.zeros(()),) if one else tuple([x.detach() for x in constants])

    @staticmethod
    @user_facing
    def backward(ctx: Any, *_: Any) -> Any:
        advice = " (make_functional), freeze it (module.requires_grad_(False)), select inputs "
        advice += "(torch.autograd.grad, or backward(inputs=...))"
        raise constant_error(ctx.caller, "a parameter", advice)
