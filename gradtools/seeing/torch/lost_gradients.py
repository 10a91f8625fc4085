"""The backward pass of a recorded PyTorch run, for `seeing/diagnostics/bad_gradients.py`.

The operations are autograd's nodes; hooks show the cotangents that each receives and passes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.seeing.diagnostics.bad_gradients import (
    BackwardStep,
    at_origins,
    lost_at_values,
    origins_of_bad_values,
)
from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.recording import Vanished, Wanted
from gradtools.seeing.torch.live_graph import in_order
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.connections import ConnectionRecorder
from gradtools.seeing.torch.recording.values import size_of
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import nodes_of

Tensor = torch.Tensor


def vanished(recorder: ConnectionRecorder, wanted: Wanted) -> dict[int, list[Vanished]]:
    """Where the gradients that are zero, NaN or infinite become so, by the id of the leaf tensor.

    Args:
        recorder: A finished recording, whose effects are not undone yet.
        wanted: Whether a leaf of autograd's graph is examined.
    """
    outs = [y for y in recorder.outs if isinstance(y, Tensor) and y.requires_grad]
    every = nodes_of(outs)
    ends = {n: n.variable for n in every if type(n) is upstream.AccumulateGrad}
    ends = {node: x for node, x in ends.items() if x.numel() and wanted(x)}
    if not ends:
        return {}
    grads = _gradients(outs, list(ends.values()))
    if any(grad is not None and grad.is_meta for grad in grads):
        raise GradtoolsError(
            "why_zero: the gradient is on the meta device, which holds no numbers, so nobody "
            "can tell whether it is zero. Pass arrays that hold numbers."
        )
    pairs = zip(ends, grads, strict=True)
    sizes = {(node, 0): size_of(grad) for node, grad in pairs if grad is not None}
    places: dict[Any, list[Vanished]] = {}
    if not all(size and math.isfinite(size) for size in sizes.values()):
        places = lost_at_values(_steps(recorder, outs, list(ends.values())), sizes)
    if not all(math.isfinite(size_of(y)) for y in outs):
        # None stands for an infinite Python number among an operation's arguments
        given = lambda k, n: (*n.inputs, None) if k in recorder.given_infinity else n.inputs
        flows = [(n, given(k, n), n.outputs) for k, n in enumerate(recorder.nodes)]
        origins = origins_of_bad_values(flows, {*recorder.bad, None}, recorder.outputs)
        for end in sizes:
            if of := at_origins(places.get(end), origins):
                places[end] = of
    return {id(ends[end[0]]): of for end, of in places.items()}


def _steps(
    recorder: ConnectionRecorder, outs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[BackwardStep]:
    """The operations of the backward pass, in program order."""
    nodes = recorder.nodes
    made = lambda node: recorder.positions.get(upstream.sequence_of(node))
    positions: dict[Any, int] = {}  # of autograd's nodes, by the recorded nodes that made them
    for node in in_order([y.grad_fn for y in outs]):
        before = (positions.get(of, 0) for of, _ in node.next_functions)
        positions[node] = max(made(node) or 0, *before, 0)
    result: dict[Any, BackwardStep] = {}

    def hook(node: Any) -> Callable[[Any, Any], None]:
        def note(passed: Sequence[Any], given: Sequence[Any]) -> None:
            sizes = lambda cts: [None if ct is None else size_of(ct) for ct in cts]
            empty = {k for k, ct in enumerate(passed) if ct is not None and not ct.numel()}
            results = [(node, k) for k in range(len(given))]
            operands = node.next_functions[: len(passed)]
            at = made(node)
            named = _named(None if at is None else nodes[at], node)
            result[node] = BackwardStep(
                named, results, operands, sizes(given), sizes(passed), empty
            )

        return note

    with ExitStack() as hooks:
        for node in positions:
            hooks.callback(node.register_hook(hook(node)).remove)
        _gradients(outs, leaves)
    return [result[node] for node in sorted(positions, key=positions.__getitem__) if node in result]


def _gradients(outs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients, for random cotangents from a generator of their own; 1 for a real number."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, device="cpu")
    cts = [draw(y.shape, dtype=y.dtype).to(y.device) for y in outs]
    if len(outs) == 1 and outs[0].numel() == 1 and not outs[0].is_complex():
        cts = [torch.ones_like(outs[0])]
    return torch.autograd.grad(outs, leaves, cts, retain_graph=True, allow_unused=True)


def _named(recorded: Node | None, node: Any) -> Node:
    """The recorded node of an autograd node, with the neutral name of the latter."""
    operation = operations.neutral_of_node(node)
    if recorded is None:
        return Node(operation, (), (), type(node).__name__)
    if recorded.operation == "scale_gradient":
        operation = "multiply"
    return recorded if recorded.operation == operation else replace(recorded, operation=operation)
