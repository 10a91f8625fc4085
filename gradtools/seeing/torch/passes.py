"""Records a PyTorch program with its backward passes as a graph of aten operations.

The program runs once under a dispatch mode that records each operation; then the backward passes
run under the same mode. The sequence number of the running autograd node identifies the forward
operation, so each backward operation gets the source line, modules and mark of the forward
operation that it differentiates.

A tensor is identified by its id; an alias of a known tensor is identified by its storage elements.
An in-place write gives the tensor a new value index. Views of the tensor get a new value index when
they are next read: a view is recomputed from its base, and a base is updated at the elements of a
written view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradtools.seeing.graphs.nodes import PlainGraph, needed
from gradtools.seeing.graphs.passes import (
    FORWARD,
    INNER,
    SECOND,
    cotangent_of,
    gradient_of,
    second_gradient_of,
    with_named_outputs,
)
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.live_graph import graph_of_outputs
from gradtools.seeing.torch.recording.autograd_functions import name_and_mark
from gradtools.seeing.torch.recording.observation import recording_run
from gradtools.seeing.torch.recording.recorder import Origin
from gradtools.seeing.torch.recording.run_recorder import RunRecorder
from gradtools.seeing.torch.undo import copied
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.function_modes import PlainKernels
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in
from gradtools.torch.operation_marks import mark as mark_of_running
from gradtools.torch.operation_marks import marked

Tensor = torch.Tensor


def gradient_graph(program: LeafProgram, order: int) -> PlainGraph:
    """Records the passes of a program as a graph; undoes the side effects of the run.

    order: 0 for the forward pass, 1 to add the backward pass, 2 to add the backward of the
        backward.
    """
    # fused attention kernels have no second derivative
    kernels = PlainKernels() if order == SECOND else nullcontext()
    what = f"{program.caller}: a program"
    with kernels, recording_run(what, program.run, program.leaves) as undo:
        recorder, active = _PassRecorder(undo), set(program.wrt)
        xs = [copied(x, k in active) for k, x in enumerate(program.leaves)]
        inputs = [recorder.introduced(x, name) for x, name in zip(xs, program.names, strict=True)]
        ys = recorder.run_pass(FORWARD, lambda: [*program.run(xs)])
        ends = [*map(recorder.number_of, ys)]
        names = [*program.out_names]
        outs = dict(zip(program.out_names, ys, strict=True))
        leaves = {program.names[k]: xs[k] for k in sorted(active)}
        tracked = [y for y in ys if _is_tracked(y)]
        leaves |= recorder.parameters(tracked, leaves)
        for phase in range(1, order + 1):
            outs = {name: y for name, y in outs.items() if _is_tracked(y)}
            if not outs:
                break
            again = phase < order
            cts = {
                cotangent_of(name): torch.ones_like(y, requires_grad=again)
                for name, y in outs.items()
            }
            inputs += [recorder.introduced(ct, name) for name, ct in cts.items()]
            differentiated = partial(
                torch.autograd.grad,
                [*outs.values()],
                [*leaves.values()],
                [*cts.values()],
                create_graph=again,
                retain_graph=True,
                allow_unused=True,
            )
            grads = zip(leaves, recorder.run_pass(phase, differentiated), strict=True)
            named = gradient_of if phase < SECOND else second_gradient_of
            outs = {named(x): g for x, g in grads if g is not None}
            ends += map(recorder.number_of, outs.values())
            names += outs
            leaves = {**leaves, **cts}
        return with_named_outputs(recorder.graph(inputs, ends), names)


def _is_tracked(y: Any) -> bool:
    return isinstance(y, Tensor) and y.requires_grad and is_inexact(y)


# --- recording ---------------------------------------------------------------------------


class _PassRecorder(RunRecorder):
    """Records the aten operations of each pass."""

    caller, levels = "gradient_graph", ("rules", "functions", "operations")

    # --- calls

    def run_pass(self, phase: int, fun: Callable[[], Any]) -> Any:
        """Runs `fun()` and records the operations with the pass `phase`."""
        self.phase = phase
        with marked(""):
            return self.run(fun)

    def origin(self) -> Origin:
        """Returns the origin of the operation or, in a backward pass, of its forward operation."""
        here, managed = super().origin(), mark_of_running()
        rule, own = next((known for known in self.rules if known[1]), ("", ""))
        source, mark = here.source, managed or own or here.mark
        running = private.current_node()
        of = self.origins.get(-1 if running is None else upstream.sequence_of(running), Origin())
        if not self.phase:  # the forward pass, including inner derivatives
            return Origin(source or of.source, here.scope, mark, rule)
        if source is None or (of.source is not None and "-packages" in source.file):
            source = of.source
        if managed and of.mark:  # a frozen function is recomputed as a chunk
            mark = of.mark
        return Origin(source, here.scope or of.scope, mark or of.mark, rule or of.rule)

    def ruled(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Runs a torch.autograd.Function and records its operations with its name and mark."""
        with self.within(*name_and_mark(kind, args)):
            out = apply(*args, **kwargs)
            for y in tensors_in(out):  # forward may run no operations
                if y.grad_fn is not None:
                    self.origins.setdefault(upstream.sequence_of(y.grad_fn), self.origin())
            return out

    # --- captured tensors

    def parameters(self, outs: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Maps names to the captured leaves that require grad and on which the outputs depend."""
        own = {id(x) for x in given.values()}
        result: dict[str, tuple[int, Tensor]] = {}
        for x in reversed(list(leaves_of(list(outs)))):
            known = self.table.get(x)
            if id(x) not in own and known is not None:
                value = self.values[known.value]
                name = value.name or f"captured tensor {len(result)}"
                name = f"captured {name}" if name in given else name
                result[name] = known.value, x
                self.values[known.value] = replace(value, name=name)
        ordered = sorted(result.items(), key=lambda item: item[1][0])
        return {name: x for name, (_, x) in ordered}

    # --- the result

    def graph(self, inputs: Sequence[int], outputs: Sequence[int]) -> PlainGraph:
        """Returns the recorded graph, without dead code of the backward passes."""
        nodes = [
            replace(node, mark=node.mark or INNER) if made.inner else node
            for made, node in zip(self.made, map(self.linked, self.made), strict=True)
        ]
        stays = lambda node: not (node.phase or node.mark)  # keep dead code of the forward pass
        nodes = [nodes[i] for i in needed(nodes, outputs, stays)]
        read = {value for node in nodes for value in node.inputs}.union(outputs)
        captured = tuple(number for number in self.captured if number in read)
        return PlainGraph(tuple(nodes), self.values, tuple(inputs), tuple(outputs), captured)


__all__ = ["gradient_graph", "graph_of_outputs"]
