"""Where a cotangent becomes zero on its way back, at these very values.

The gradient is taken once as it is. If it is zero everywhere, it is taken again with every node
of autograd watched that leads to the leaf: one that is given a cotangent that is not zero, and
gives on nothing but zeros, is where it vanishes. Whether the factor is zero or only the product
is too small is told by giving the same node a cotangent of far greater size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
    """Where the cotangent of a leaf becomes zero; None if its gradient is not zero everywhere."""
    with observed(run, leaves, [""] * len(leaves)) as seen:
        leaf = seen.aliases[index]
        outs = [y for y in seen.outs if isinstance(y, Tensor) and y.requires_grad]
        if not outs:
            return []
        cts = _cotangents(outs)
        grad = _gradient(outs, leaf, cts)
        if grad is None:
            return []
        if bool(grad.ne(0).any()):
            return None
        with _watched(outs, leaf) as stops:
            _gradient(outs, leaf, cts)
        found = [
            Vanished(_named(seen.recorder, node), _underflows(node, given)) for node, given in stops
        ]
        order = {id(node): k for k, node in enumerate(seen.recorder.nodes)}
        return sorted(found, key=lambda v: order.get(id(v.node), len(order)))


def _cotangents(outs: Sequence[Tensor]) -> list[Tensor]:
    """Random ones; one for a single real number. The generator is one's own."""
    if len(outs) == 1 and outs[0].numel() == 1 and not outs[0].is_complex():
        return [torch.ones_like(outs[0])]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(y.shape, dtype=y.dtype, generator=generator).to(y.device) for y in outs]


def _gradient(outs: Sequence[Tensor], leaf: Tensor, cts: Sequence[Tensor]) -> Tensor | None:
    return torch.autograd.grad(outs, [leaf], cts, retain_graph=True, allow_unused=True)[0]


@contextmanager
def _watched(outs: Sequence[Tensor], leaf: Tensor) -> Iterator[list[tuple[Any, Cotangents]]]:
    """Collects the nodes at which a cotangent on its way to the leaf becomes zero."""
    found: list[tuple[Any, Cotangents]] = []
    leading = _leading_to(outs, leaf)

    def watch(node: Any) -> Callable[[Any, Any], None]:
        path = [k for k, (to, _) in enumerate(node.next_functions) if to in leading]

        def note(given_on: Any, given: Any) -> None:
            if any(map(_moves, given)) and not any(_moves(given_on[k]) for k in path):
                found.append((node, given))

        return note

    inner = [node for node in leading if node.next_functions]
    handles = [node.register_hook(watch(node)) for node in inner]
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
    single = recorded.mark or operation == recorded.operation
    return recorded if single else replace(recorded, operation=operation)


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
