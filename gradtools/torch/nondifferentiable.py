"""Gates: tensors that raise if they are differentiated with respect to certain sources.

They may be read, and differentiated with respect to everything else. Autograd runs a node only if
it lies on a path to a requested input. So the tensors get a second edge, to a node that raises and
that leads to the sources only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError

Tensor = torch.Tensor


def gated(
    xs: Sequence[Tensor], sources: Sequence[Tensor], message: str, transposed: bool = False
) -> tuple[Tensor, ...]:
    """xs; differentiating any of them with respect to one of the sources raises the message."""

    def refuse() -> None:
        raise GradtoolsError(message)

    return with_gate(xs, sources, refuse, transposed)


def with_gate(
    xs: Sequence[Tensor],
    sources: Sequence[Tensor],
    check: Callable[[], None],
    transposed: bool = False,
) -> tuple[Tensor, ...]:
    """xs; differentiating any of them with respect to one of the sources first calls `check`.

    Args:
        xs: The tensors.
        sources: The tensors to guard.
        check: Called in the backward pass to the sources; may raise.
        transposed: Whether the pullback of xs gets the gate, too. It needs one if xs is the value
            of a linear map, whose transpose depends on the sources as the map does.
    """
    return _WithGate.apply(len(xs), transposed, *xs, _Gate.apply(check, *sources))


class _Gate(torch.autograd.Function):
    """A zero with a graph to the sources; its backward pass calls `check`."""

    @staticmethod
    def forward(check: Callable[[], None], *sources: Tensor) -> Tensor:
        return sources[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.check, ctx.count = inputs[0], len(inputs)

    @staticmethod
    @user_facing
    def backward(ctx: Any, ct: Tensor) -> Any:
        ctx.check()
        return (None,) * ctx.count

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def vmap(info: Any, in_dims: Any, check: Any, *sources: Tensor) -> Any:
        return _Gate.apply(check, *sources), None


class _WithGate(torch.autograd.Function):
    """The identity on all tensors but the last, the gate, to which it adds an edge."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, transposed: bool, *tensors: Tensor) -> Any:
        return tuple([x.view_as(x) for x in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.transposed, *_, number = inputs
        if ctx.transposed:
            ctx.save_for_backward(number)

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> Any:
        if ctx.transposed:
            cts = _WithGate.apply(len(cts), True, *cts, *ctx.saved_tensors)
        return None, None, *cts, None

    @staticmethod
    def jvp(ctx: Any, count: None, transposed: None, *tangents: Any) -> Any:
        return tuple([t if t is None else t.view_as(t) for t in tangents[:-1]])
