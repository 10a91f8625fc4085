"""Where a cotangent becomes zero on its way back, at these very values.

The gradient is taken once as it is. If it is zero everywhere, it is taken again with every node
of autograd watched that leads to the leaf: one that is given a cotangent that is not zero, and
gives on nothing but zeros, is where it vanishes. Whether the factor is zero or only the product
is too small is told by giving the same node a cotangent of far greater size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradtools.seeing.graph import Node
from gradtools.seeing.recording import Run, Vanished
from gradtools.torch.compiling import nodes_of
from gradtools.torch.recording import operations
from gradtools.torch.recording.observing import observed
from gradtools.torch.recording.recorder import Recorder
from gradtools.torch.rules import is_inexact

Tensor = torch.Tensor
Cotangents = Sequence[Tensor | None]


def vanishing(run: Run, leaves: Sequence[Any], index: int) -> list[Vanished] | None:
    """Where the cotangent of a leaf becomes zero; None if its gradient is not zero everywhere.

    One run answers for all leaves, and is remembered as long as the program that `run` belongs to.
    """
    program = getattr(run, "__self__", None)
    if program is None:
        return _of_all(run, leaves)[index]
    if program not in _KNOWN:
        _KNOWN[program] = _of_all(run, leaves)
    return _KNOWN[program][index]


_KNOWN: weakref.WeakKeyDictionary[Any, list[list[Vanished] | None]] = weakref.WeakKeyDictionary()


def _of_all(run: Run, leaves: Sequence[Any]) -> list[list[Vanished] | None]:
    with observed(run, leaves, [""] * len(leaves)) as seen:
        outs = [y for y in seen.outs if isinstance(y, Tensor) and y.requires_grad]
        asked = [k for k, x in enumerate(seen.aliases) if isinstance(x, Tensor) and is_inexact(x)]
        found: list[list[Vanished] | None] = [[] for _ in leaves]
        if not (outs and asked):
            return found
        grads = _gradients(outs, [seen.aliases[k] for k in asked])
        for k, grad in zip(asked, grads, strict=True):
            if grad is not None and (_moves(grad) or not grad.numel()):
                found[k] = None
        zero = [k for k, grad in zip(asked, grads, strict=True) if grad is not None]
        zero = [k for k in zero if found[k] is not None]
        if zero:
            with _watched(outs) as passed:
                _gradients(outs, [seen.aliases[k] for k in zero])
            for k in zero:
                found[k] = _stops(seen.recorder, outs, seen.aliases[k], passed)
        return found


def _stops(
    recorder: Recorder, outs: Sequence[Tensor], leaf: Tensor, passed: Mapping[Any, _Passed]
) -> list[Vanished]:
    """The nodes at which what goes to one leaf becomes zero, in the order of the program."""
    leading = _leading_to(outs, leaf)
    found = []
    made = recorder.numbering.made
    for node, at in sorted(passed.items(), key=lambda pair: made.get(pair[0], len(made))):
        path = [k for k, (to, _) in enumerate(node.next_functions) if to in leading]
        if path and not any(at.on[k] for k in path):
            found.append(Vanished(_named(recorder, node), _underflows(node, at.given)))
    return found


@dataclass(frozen=True)
class _Passed:
    """What a node of autograd was given, not all zero, and which of what it gave on is not zero."""

    given: Cotangents
    on: list[bool]


def _cotangents(outs: Sequence[Tensor]) -> list[Tensor]:
    """Random ones; one for a single real number. The generator is one's own."""
    if len(outs) == 1 and outs[0].numel() == 1 and not outs[0].is_complex():
        return [torch.ones_like(outs[0])]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(y.shape, dtype=y.dtype, generator=generator).to(y.device) for y in outs]


def _gradients(outs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    cts = _cotangents(outs)
    return torch.autograd.grad(outs, leaves, cts, retain_graph=True, allow_unused=True)


@contextmanager
def _watched(outs: Sequence[Tensor]) -> Iterator[dict[Any, _Passed]]:
    """Collects what passes the nodes of autograd, where some of it becomes zero."""
    found: dict[Any, _Passed] = {}

    def watch(node: Any) -> Callable[[Any, Any], None]:
        def note(given_on: Any, given: Any) -> None:
            on = [_moves(ct) for ct in given_on]
            if not all(on) and any(map(_moves, given)):
                found[node] = _Passed(given, on)

        return note

    handles = [node.register_hook(watch(node)) for node in nodes_of(outs) if node.next_functions]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _moves(ct: Any) -> bool:
    return ct is not None and bool(ct.ne(0).any())


def _leading_to(outs: Sequence[Tensor], leaf: Tensor) -> dict[Any, None]:
    """The nodes of autograd from which the leaf is reached, its own among them."""
    readers: dict[Any, list[Any]] = {}
    ends = []
    for node in nodes_of(outs):
        if type(node).__name__ == "AccumulateGrad" and node.variable is leaf:
            ends.append(node)
        for to, _ in node.next_functions:
            if to is not None:
                readers.setdefault(to, []).append(node)
    found: dict[Any, None] = {}
    while ends:
        node = ends.pop()
        if node not in found:
            found[node] = None
            ends += readers.get(node, [])
    return found


def _named(recorder: Recorder, node: Any) -> Node:
    """The recorded node that made a node of autograd, by that one's neutral name."""
    operation = operations.neutral_of_node(node)
    at = recorder.numbering.made.get(node)
    if at is None:
        return Node(operation, (), (), type(node).__name__)
    recorded = recorder.nodes[at]
    if recorded.operation == "scale_gradient":
        return replace(recorded, operation="multiply")
    if recorded.mark in ("custom rule", "edited gradient"):
        return replace(recorded, loss="rule")
    return recorded if operation == recorded.operation else replace(recorded, operation=operation)


# --- underflow ---------------------------------------------------------------------------


def _underflows(node: Any, given: Cotangents) -> bool:
    """Whether it is not the factor that is zero."""
    name = type(node).__name__
    if name.startswith(("ExpBackward", "Exp2Backward")):
        return True  # no exponential is zero
    if name.startswith("PowBackward0"):
        return bool(node._saved_self.ne(0).any())
    if not callable(node) or any(ct is not None and not is_inexact(ct) for ct in given):
        return False
    with torch.no_grad():
        found = node(*[None if ct is None else _large(ct) for ct in given])
    return any(map(_moves, found if isinstance(found, tuple) else (found,)))


def _large(ct: Tensor) -> Tensor:
    """The same direction, near the square root of the greatest number."""
    size = ct.abs().max()
    return ct if size == 0 else ct / size * torch.finfo(ct.dtype).max ** 0.5
