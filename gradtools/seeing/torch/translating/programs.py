"""`formula` in PyTorch: one run of f, recorded in framework-neutral operations.

f runs once at copies of its arguments and is written down (`translating/`); what it changes is
put back. Parameters that f holds and that require grad are differentiated like its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradtools.seeing.formulas.recorded import Recorded
from gradtools.seeing.graphs.nodes import needed
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.torch.recording.observation import recording_run
from gradtools.seeing.torch.translating.arrays import ARRAYS
from gradtools.seeing.torch.translating.composites import FUNCTIONS, PLAIN
from gradtools.seeing.torch.translating.control import followed
from gradtools.seeing.torch.translating.double_precision import origin_of, reading
from gradtools.seeing.torch.translating.layers import LAYERS
from gradtools.seeing.torch.translating.recorder import FormulaRecorder
from gradtools.seeing.torch.translating.rules import write_rule
from gradtools.seeing.torch.translating.writer import Ref
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.modes import Modes
from gradtools.torch.replaying.guards import plainly
from gradtools.torch.rerunning import copied, put_back

Tensor = torch.Tensor
OPERATIONS = {**ARRAYS, **LAYERS}  # all others are said as the graph says them


def formula_graph(program: LeafProgram) -> Recorded:
    """One run of a program, forward only. Its effects are undone."""
    result, lost = _recorded(program, FUNCTIONS)
    if lost:  # f takes a derivative through something that was written down as a whole
        result, _ = _recorded(program, PLAIN)
    return result


def _recorded(program: LeafProgram, functions: Mapping[Any, Any]) -> tuple[Recorded, bool]:
    """One run, and whether a derivative inside of f was lost."""
    with recording_run(f"{program.caller}: a program", program.run, program.leaves) as undo:
        recorder = FormulaRecorder(undo, OPERATIONS, functions, write_rule, origin_of)
        return _written(program, recorder), recorder.lost


def _written(program: LeafProgram, recorder: FormulaRecorder) -> Recorded:
    active = set(program.wrt)
    xs = [copied(x, k in active) for k, x in enumerate(program.leaves)]
    pairs = zip(xs, program.names, strict=True)
    inputs = [recorder.introduced(x, name) for x, name in pairs]
    with followed(), plainly():  # control flow runs in Python, and nothing again
        outputs = recorder.run(lambda: [_output(recorder, y) for y in program.run(xs)])
    captured = recorder.captured
    wanted = tuple(v for v, x in captured.items() if x.requires_grad and is_inexact(x))
    nodes = recorder.writer.frames[0]
    nodes = [nodes[i] for i in needed(nodes, [y.number for y in outputs])]
    graph = recorder.writer.graph(nodes, inputs, outputs)
    return Recorded(
        graph.nodes,
        graph.values,
        graph.inputs,
        graph.outputs,
        tuple(captured),
        held={v: x.detach() for v, x in captured.items()},
        wanted=wanted,
        run=partial(_run_with_others, program, [captured[v] for v in wanted]),
        narrow=recorder.narrow,
    )


def _output(recorder: FormulaRecorder, y: Any) -> Ref:
    if isinstance(y, Tensor):
        return recorder.of(y)
    return recorder.constant(torch.as_tensor(y))


def _run_with_others(
    program: LeafProgram, held: Sequence[Tensor], values: Sequence[Any]
) -> Sequence[Any]:
    count = len(program.leaves)
    place = {id(x): v for x, v in zip(held, values[count:], strict=True)}
    kinds = {v.device.type for v in values if isinstance(v, Tensor)}
    others = Modes.now(kinds).by_other_kernels()  # fused ones are differentiated once
    with reading(place, wide=False), others.again():
        return program.run(values[:count])


@contextmanager
def trying(program: LeafProgram, wide: bool) -> Iterator[None]:
    """Inside, f may run; what it changes is undone. wide: what it holds is read in float64."""
    here = put_back(program.run, program.leaves), followed(), reading({}, wide)
    with here[0], here[1], here[2], torch.enable_grad():
        yield


__all__ = ["formula_graph", "trying"]
