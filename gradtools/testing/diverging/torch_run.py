"""Records the values and cotangents of a PyTorch run with the recorder of `gradient_graph`.

The cotangents are gradients at the edges of autograd's graph, from one backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import GradientEdge

from gradtools.code_origin import lines_above, users_lines
from gradtools.seeing.torch.recording.observation import recording_run
from gradtools.seeing.torch.recording.recorder import Origin, Recorder
from gradtools.seeing.torch.recording.run_recorder import RecordedNode, RunRecorder
from gradtools.seeing.torch.undo import Undo, copied
from gradtools.testing.cross_checking.sides import Side
from gradtools.testing.diverging.runs import Place, Run, Step
from gradtools.torch.arrays import to_numpy


def run_in_torch(side: Side, program: Any, leaves: dict[str, np.ndarray]) -> Run:
    """Records a forward run in PyTorch.

    Args:
        side: The side to which the program belongs.
        program: A function of the leaves in PyTorch.
        leaves: The arguments and parameters, keyed by name; all are differentiated.
    """
    arrays = side.arrays([*leaves.values()])
    with recording_run("first_divergence: a program", lambda xs: program(*xs), arrays) as undo:
        recorder, inputs = _ValueRecorder(undo), [*map(copied, arrays)]
        for x, name in zip(inputs, leaves, strict=True):
            step = recorder.steps[recorder.introduced(x, name)]
            step.place, step.leaf = Place(name), name
        outs = side.named_arrays(recorder.run(program, *inputs))
        ends = {path: recorder.steps[recorder.of(y)] for path, y in outs.items()}
    edges: dict[int, Any] = {**recorder.edges, **dict(enumerate(inputs))}

    def pull(cotangents: dict[str, Any]) -> None:
        ys = {path: y for path, y in outs.items() if y.requires_grad}
        if not ys:
            return
        cts = [torch.as_tensor(cotangents[path]).to(y) for path, y in ys.items()]
        grads = torch.autograd.grad([*ys.values()], [*edges.values()], cts, allow_unused=True)
        for number, g in zip(edges, grads, strict=True):
            step = recorder.steps[number]
            step.tracked, step.cotangent = True, None if g is None else _array(g)

    return Run([*recorder.steps.values()], ends, pull)


class _ValueRecorder(RunRecorder):
    """Records the values of a run.

    Attributes:
        steps: Maps the index of a value to its step.
        edges: Maps the index of a value to its edge in autograd's graph, if the edge exists.
    """

    caller, levels = "first_divergence", ("functions", "operations")

    def __init__(self, undo: Undo) -> None:
        super().__init__(undo)
        self.steps: dict[int, Step] = {}
        self.edges: dict[int, GradientEdge] = {}

    def new(self, x: Any, name: str = "") -> int:
        """Creates a step that marks x as captured; `add` changes the mark of computed tensors."""
        number = super().new(x, name)
        if isinstance(x, torch.Tensor):
            self.steps[number] = Step(Place("captured"), _array(x), leaf="captured")
        return number

    def of(self, x: torch.Tensor) -> int:
        """Returns the index of the value of x; stores the autograd edge of x."""
        number = super().of(x)
        if x.grad_fn is not None:
            self.edges.setdefault(number, GradientEdge(x.grad_fn, x.output_nr))
        return number

    def add(
        self, native: str, inputs: Sequence[int], outputs: Sequence[int], at: Origin, **about: Any
    ) -> RecordedNode:
        lines = users_lines(lines_above(1, Recorder.run))
        place = Place(native.removeprefix("aten."), lines, ".".join(at.scope[1:]))
        parents = [self.steps[n] for n in inputs if n in self.steps]
        for step in (self.steps[n] for n in outputs if n in self.steps):
            step.place, step.parents, step.leaf = place, parents, ""
        return super().add(native, inputs, outputs, at, **about)


def _array(x: torch.Tensor) -> np.ndarray:
    return to_numpy(x if x.layout is torch.strided else x.to_dense())
