"""`record` for PyTorch runs a function and returns its graph and backward pass.

The user's function runs once under the recorders of `recording/`, and its side effects are undone.

The graph does not show operations of NumPy or Python on data from tensors. To find where such data
returns to PyTorch, the run is repeated with perturbed numbers at the line of the conversion.
Any output that changes in this run depends on the converted data. A number or array that is
converted back to a tensor also depends on the converted data if its contents change in this run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import numpy as np
import torch

from gradtools.errors import GradtoolsError, is_of
from gradtools.seeing.diagnostics.gradients_at_values import PassesAtValues, PassStep
from gradtools.seeing.graphs.derivative_flow import backward, forward
from gradtools.seeing.graphs.nodes import Dependence, grouped
from gradtools.seeing.graphs.recording import Recording, Run
from gradtools.seeing.torch.recording.connections import ConnectionRecorder
from gradtools.seeing.torch.recording.observation import recording_run
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of

Tensor = torch.Tensor
_FULL = Dependence.DIFFERENTIABLE
_MOST = 8  # maximum number of perturbed lines, with up to three runs each


def record(run: Run, leaves: Sequence[Any], names: Sequence[str]) -> Recording:
    """Records one run and its backward pass as a graph, and undoes the side effects of the run."""
    is_new = upstream.DYNAMO not in sys.modules
    try:
        return _recorded(run, leaves, names)
    except Exception:
        if not is_new or upstream.DYNAMO not in sys.modules:
            raise
    # torch.cond imported dynamo in the first run; record again with dynamo in eager mode.
    return _recorded(run, leaves, names)


def _recorded(run: Run, leaves: Sequence[Any], names: Sequence[str]) -> Recording:
    passes = None
    with recording_run("why_zero: a run", run, leaves) as undo:
        seen = ConnectionRecorder(undo).observe(run, leaves, names)
        if seen.refusal is not None:
            return Recording(seen.graph(), seen.refusal[1])
        try:
            passes = _differentiated(seen)
        except RuntimeError as error:  # a freed graph, or a reentrant checkpoint
            if not is_of("torch", error):
                raise
    _follow(run, leaves, seen)

    reads: dict[int, list[int]] = {}
    for number, x in seen.captured_tensors.items():
        computed_from = leaves_of([x]) if x.grad_fn is not None else ()
        for tensor in (x, *computed_from):
            reads.setdefault(id(tensor), []).append(number)
    own = {id(x) for x in leaves}
    parameters = [
        (seen.names[key], x)
        for key, x in undo.reachable.items()
        if x.requires_grad and x.is_leaf and key not in own
    ]
    return Recording(seen.graph(), None, tuple(parameters), reads, passes)


def _differentiated(seen: ConnectionRecorder) -> PassesAtValues:
    """Records the backward pass of a run; the cotangent is 1 for a real scalar, else random."""
    outs = [y for y in seen.outs if isinstance(y, Tensor) and y.requires_grad]
    every = [*leaves_of(outs)]
    # A graph from before the run may be freed, so leaves that the run reads are preferred.
    leaves = [x for x in every if seen.table.get(x) is not None] or every
    if not leaves:
        return PassesAtValues()
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    cts = [draw(y.shape, dtype=y.dtype).to(y.device) for y in outs]
    if len(outs) == 1 and outs[0].numel() == 1 and not outs[0].is_complex():
        cts = [torch.ones_like(outs[0])]
    with seen.silent():
        outputs, inputs = [*map(seen.of, outs)], [*map(seen.of, leaves)]
    seeds, seen.phase = [seen.introduced(ct, "") for ct in cts], 1
    grads = seen.run(
        partial(torch.autograd.grad, retain_graph=True, allow_unused=True), outs, leaves, cts
    )
    if any(grad is not None and grad.is_meta for grad in grads):
        raise GradtoolsError(
            "why_zero: the gradient is on the meta device, which has no values to compare "
            "with zero. Pass arrays with values."
        )
    with seen.silent():
        pairs = zip(inputs, grads, strict=True)
        gradients = {n: (n, seen.of(g)) for n, g in pairs if g is not None}
    steps = []
    for made in seen.made:
        node = made.node if made.of is None else seen.linked(seen.made[made.of])
        steps.append(PassStep(node, made.node.inputs, made.node.outputs))
    return PassesAtValues(steps, seen.sizes, outputs, seeds, gradients)


def repeatable(caller: str, f: Any) -> Any:
    """Returns f unchanged, because `record` undoes the side effects of f."""
    return f


def is_model(x: Any) -> bool:
    """Returns whether x is a torch.nn.Module."""
    return isinstance(x, torch.nn.Module)


# --- data that leaves PyTorch, and returns -----------------------------------------------


def _follow(run: Run, leaves: Sequence[Any], seen: ConnectionRecorder) -> None:
    """Links conversions to NumPy or Python to the values that depend on the converted data.

    If no perturbed run succeeds, or the function is not deterministic, every output counts as
    dependent.
    """
    lost = _untraced(seen)
    changes = partial(_changes, run, leaves, seen)
    is_deterministic = bool(lost) and changes(()) == []
    lines = grouped(lost, lambda k: seen.leavings[k].source or k)
    for which in [*lines.values()][:_MOST] if is_deterministic else [lost]:
        moved = changes(which) if is_deterministic else None
        if moved is None and all(seen.leavings[k].operation == "branch" for k in which):
            continue  # the branch only validates arguments
        returned = seen.outputs if moved is None else moved
        seen.outside += [(seen.leavings[k].outputs[0], v) for k in which for v in returned]


def _untraced(seen: ConnectionRecorder) -> list[int]:
    """Returns the indices of the conversions whose dependent values are not yet known.

    Only conversions of values that depend on a leaf are included. For a branch condition, the leaf
    must be one from which no data flows to the outputs in the graph.
    """
    graph = seen.graph()
    held = [number for number, x in seen.captured_tensors.items() if x.requires_grad]
    back = {source for source, _ in seen.outside}
    matters = backward(graph, dict.fromkeys(graph.outputs, _FULL))
    leaves = [v for v in (*graph.inputs, *held) if graph.values[v].is_inexact]
    reached = forward(graph, dict.fromkeys(leaves, _FULL))
    absent = forward(graph, {v: _FULL for v in leaves if not matters.get(v)})
    result = []
    for k, leaving in enumerate(seen.leavings):
        of = absent if leaving.operation == "branch" else reached
        if of.get(leaving.inputs[0]) and leaving.outputs[0] not in back:
            result.append(k)
    return result


def _changes(
    run: Run, leaves: Sequence[Any], first: ConnectionRecorder, which: Sequence[int]
) -> list[int] | None:
    """Returns the values that change in a run with perturbed numbers at the conversions `which`.

    The result is None if the function raises an error for all perturbed numbers.
    """
    changes = None
    # With a large step, the function may raise an error. A clipped value may change in one
    # direction only.
    for size in (1.0, -1.0, 1e-3):
        if changes is not None and (changes or not which or abs(size) < 1):
            break
        again = recording_run("why_zero: a run", run, leaves)
        with redirect_stdout(StringIO()), again as undo:  # the first run already printed the output
            other = ConnectionRecorder(undo, which, partial(_other, size=size))
            try:
                other.observe(run, leaves)
            except Exception:  # user code may fail at perturbed numbers
                continue
        if other.refusal is None:
            changes = first.changes(other)
    return changes


def _other(x: Any, size: float) -> Any:
    """Returns a perturbed number, array or list of the same type as x."""
    if isinstance(x, list):
        return [_other(item, size) for item in x]
    array = np.asarray(x)
    if array.dtype.kind == "b":
        other = ~array
    elif array.dtype.kind in "fc":
        factors = 1 + np.random.default_rng(0).random(array.shape)
        other = (array + size * (1 + np.abs(array)) * factors).astype(array.dtype)
    else:
        other = array + 1
    return other if isinstance(x, np.ndarray) else type(x)(other.item())
