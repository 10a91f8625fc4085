"""The dependence links of a recorded call, and the reason if one carries no derivative.

Autograd's graph shows which inputs an output is connected to. Dtypes, grad mode and the table of
operations determine which links have a zero derivative, and why a link is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradtools.seeing.graphs.nodes import Dependence, Links
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.values import may_share
from gradtools.torch.functorch_wrappers import is_inexact, unwrapped

if TYPE_CHECKING:
    from gradtools.seeing.torch.recording.calls import RecordedCall

Tensor = torch.Tensor
_NONE, _CUT, _ZERO, _FULL = Dependence


@dataclass(frozen=True)
class CallLinks:
    """A call as a node: its neutral name, what it reads, its links and the kind of loss."""

    operation: str
    inputs: list[int]
    links: Links
    loss: str | None


def links_of(
    call: RecordedCall,
    outs: Sequence[Tensor],
    reached: Sequence[Sequence[int]],
    hosts: Sequence[int],
    dropped: set[int],
    managed: bool,
) -> CallLinks:
    """The links of a call.

    Args:
        call: The call.
        outs: The tensors that it made or changed.
        reached: For each of `outs`, the known values that autograd connects it to.
        hosts: Additional values that it reads, such as `.grad` after a backward pass.
        dropped: The ids of tensors that it overwrites without reading.
        managed: Whether it is a detach by gradtools itself, which runs a chunk separately and
            connects it by a Function.
    """
    if managed:
        links = tuple([(_FULL,) * len(call.numbers) for _ in outs])
        return CallLinks("identity", call.numbers, links, None)
    read = _read(call, dropped)
    inputs = [call.numbers[k] for k in read]
    known = {call.numbers[k] for k in range(len(call.numbers))}
    more = list(dict.fromkeys(v for result in reached for v in result if v not in known))
    rows, reasons = [], []
    for y, result in zip(outs, reached, strict=True):
        row = [_link(call, k, y, result) for k in read]
        inexact = is_inexact(y)
        lost = [
            link
            for k, link in zip(read, row, strict=True)
            if call.tracked[k] and _NONE < link < _FULL
        ]
        if lost:
            reasons.append(_reason(call, inexact, min(lost)))
        row += [_FULL if inexact else _CUT] * len(hosts)
        row += [_FULL if v in result else _NONE for v in more]
        rows.append(tuple(row))
    operation = "floor_divide" if _rounds(call) else operations.neutral(call.name)
    loss = max(reasons, key=reasons.count) if reasons else None
    return CallLinks(operation, [*inputs, *hosts, *more], tuple(rows), loss)


def _read(call: RecordedCall, dropped: set[int]) -> list[int]:
    """The positions of the tensors whose contents the call reads."""
    kept = [k for k, x in enumerate(call.tensors) if id(x) not in dropped]
    if call.raw == "__get__" and call.name == "grad":
        return []
    if call.name in operations.FIRST_ALONE:
        return kept[:1]
    form = unwrapped(call.args[0]) if call.name in operations.NO_DATA and call.args else None
    return [k for k in kept if call.tensors[k] is not form]


def _link(call: RecordedCall, k: int, y: Tensor, reached: Sequence[int]) -> Dependence:
    if call.name in operations.EACH_ITS_OWN and not may_share(unwrapped(y), call.tensors[k]):
        return _NONE
    if not (is_inexact(y) and is_inexact(call.tensors[k])):
        return _CUT
    if not call.tracked[k]:
        return _ZERO if _is_flat(call) else _FULL
    number = call.numbers[k]
    if number not in reached or number in call.unruled:
        return _NONE if _is_gradient(call) else _CUT
    if call.name in operations.UNDIFFERENTIABLE:
        return _CUT
    return _ZERO if _is_flat(call) else _FULL


def _is_flat(call: RecordedCall) -> bool:
    """Whether its derivative is zero everywhere."""
    operation = operations.neutral(call.name)
    if operation == "sign":
        return not call.tensors[0].is_complex()
    return operation in operations.ZERO_DERIVATIVE | operations.DRAWS or _rounds(call)


def _rounds(call: RecordedCall) -> bool:
    return bool(call.kwargs.get("rounding_mode"))


def _is_gradient(call: RecordedCall) -> bool:
    """Whether it takes a differentiable derivative, which need not depend on the loss itself."""
    return call.raw in ("grad", "backward") and bool(call.kwargs.get("create_graph"))


def _reason(call: RecordedCall, inexact: bool, link: Dependence) -> str:
    if link == _ZERO:
        drawn = operations.neutral(call.name) in operations.DRAWS
        return "discrete" if drawn else "zero_derivative"
    if call.reason:
        return call.reason
    if call.raw == "grad":
        return "inner_gradient"
    if call.mark in ("custom rule", "edited gradient") and inexact and call.grad:
        return "rule"
    return operations.loss_of(call.name, call.grad, inexact)
