"""A call of a PyTorch function, its dependence links, and why one of them carries no derivative.

Autograd's graph shows which inputs an output is connected to. Dtypes, grad mode and the table of
operations determine which links have a zero derivative, and why a link is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gradtools.seeing.graphs.nodes import Dependence, Links
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.values import may_share
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_inexact, unwrapped

Tensor = torch.Tensor
_NONE, _CUT, _ZERO, _FULL = Dependence


class TensorOperand(NamedTuple):
    """A tensor among a call's arguments, with its state before the call.

    Attributes:
        tensor: The tensor, unwrapped from transforms.
        number: Its value number.
        tracked: Whether it requires grad.
        version: Its version counter.
    """

    tensor: Tensor
    number: int
    tracked: bool
    version: int | None


class CallLinks(NamedTuple):
    """A call as a node: its neutral name, what it reads, its links and the kind of loss."""

    operation: str
    inputs: list[int]
    links: Links
    loss: str | None


@dataclass
class RecordedCall:
    """A call of a PyTorch function.

    Attributes:
        raw: The function's name as PyTorch spells it.
        name: The name without underscores of in-place and reflected variants.
        operands: The tensors among its arguments.
        grad: Whether grad mode was on.
        mark: As in `Node`.
        unruled: The numbers of inputs for which its own backward returns None.
        reason: The kind of its losses, if known.
    """

    raw: str
    name: str
    args: Any
    kwargs: Any
    operands: list[TensorOperand]
    grad: bool
    mark: str = ""
    unruled: set[int] = field(default_factory=set)
    reason: str = ""

    @property
    def numbers(self) -> list[int]:
        """The value numbers of its operands."""
        return [x.number for x in self.operands]

    def rewritten(self) -> list[Tensor]:
        """The tensors whose contents the call changed."""
        if self.name == "set_data":
            return [x.tensor for x in self.operands[:1]]
        return [x.tensor for x in self.operands if x.version != version_of(x.tensor)]

    def overwrites(self) -> bool:
        """Whether it overwrites a tensor without reading it."""
        if self.raw in operations.OVERWRITES:
            return True
        key = self.args[1] if self.raw == "__setitem__" else None
        return key is Ellipsis or (isinstance(key, slice) and key == slice(None))

    def links(
        self,
        outs: Sequence[Tensor],
        reached: Sequence[Sequence[int]],
        hosts: Sequence[int],
        dropped: Collection[int],
    ) -> CallLinks:
        """The links of the call.

        Args:
            outs: The tensors that it made or changed.
            reached: For each of `outs`, the known values that autograd connects it to.
            hosts: Additional values that it reads, such as `.grad` after a backward pass.
            dropped: The ids of tensors that it overwrites without reading.
        """
        read = [x for x in self.operands if id(x.tensor) not in dropped]  # in their contents
        if self.raw == "__get__" and self.name == "grad":
            read = []
        elif self.name in operations.FIRST_ALONE:
            read = read[:1]
        elif self.name in operations.NO_DATA and self.args:
            form = unwrapped(self.args[0])
            read = [x for x in read if x.tensor is not form]
        known = set(self.numbers)
        more = list(dict.fromkeys(v for values in reached for v in values if v not in known))
        rows, reasons = [], []
        for y, values in zip(outs, reached, strict=True):
            inexact = is_inexact(y)
            row = [self._link(x, y, values) for x in read]
            pairs = zip(read, row, strict=True)
            lost = [link for x, link in pairs if x.tracked and _NONE < link < _FULL]
            if lost:
                reasons.append(self._reason(inexact, min(lost)))
            row += [_FULL if inexact else _CUT] * len(hosts)
            row += [_FULL if v in values else _NONE for v in more]
            rows.append(tuple(row))
        operation = operations.neutral(self.name)
        if self.kwargs.get("rounding_mode"):
            operation = "floor_divide"
        loss = max(reasons, key=reasons.count) if reasons else None
        return CallLinks(operation, [*(x.number for x in read), *hosts, *more], tuple(rows), loss)

    def _link(self, x: TensorOperand, y: Tensor, reached: Sequence[int]) -> Dependence:
        if self.name in operations.EACH_ITS_OWN and not may_share(unwrapped(y), x.tensor):
            return _NONE
        if not (is_inexact(y) and is_inexact(x.tensor)):
            return _CUT
        if x.tracked and (x.number not in reached or x.number in self.unruled):
            # A differentiable derivative need not depend on the loss itself.
            derives = self.raw in ("grad", "backward") and self.kwargs.get("create_graph")
            return _NONE if derives else _CUT
        if x.tracked and self.name in operations.UNDIFFERENTIABLE:
            return _CUT
        operation, rounds = operations.neutral(self.name), self.kwargs.get("rounding_mode")
        if operation == "sign":
            return _FULL if self.operands[0].tensor.is_complex() else _ZERO
        flat = operation in operations.ZERO_DERIVATIVE | operations.DRAWS
        return _ZERO if flat or rounds else _FULL

    def _reason(self, inexact: bool, link: Dependence) -> str:
        """Why a link to an output is weak; inexact: whether that output is floating or complex."""
        if link == _ZERO:
            drawn = operations.neutral(self.name) in operations.DRAWS
            return "discrete" if drawn else "zero_derivative"
        if self.reason:
            return self.reason
        if self.raw == "grad":
            return "inner_gradient"
        if self.mark in ("custom rule", "edited gradient") and inexact and self.grad:
            return "rule"
        return operations.loss_of(self.name, self.grad, inexact)


def version_of(x: Tensor) -> int | None:
    """A tensor's version counter; None for inference tensors, which have none."""
    return None if x.is_inference() else upstream.version_of(x)
