"""`formula` in PyTorch: one run of f, recorded as expressions.

f runs once at copies of its arguments and is written down (`recorder.py`); what it changes is
put back. Parameters that f holds and that require grad are differentiated like its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gradtools.seeing.formulas.expressions import Expr, order
from gradtools.seeing.formulas.recorded import Recorded
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.torch.recording.observation import recording_run
from gradtools.seeing.torch.translating.control import followed
from gradtools.seeing.torch.translating.double_precision import origin_of, reading
from gradtools.seeing.torch.translating.recorder import FormulaRecorder
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.modes import Modes
from gradtools.torch.replaying.guards import plainly
from gradtools.torch.rerunning import copied, put_back

Tensor = torch.Tensor


def formula_graph(program: LeafProgram) -> Recorded:
    """One run of a program, forward only. Its effects are undone."""
    with recording_run(f"{program.caller}: a program", program.run, program.leaves) as undo:
        return _written(program, FormulaRecorder(undo, program.backend, origin_of))


def _written(program: LeafProgram, recorder: FormulaRecorder) -> Recorded:
    active = set(program.wrt)
    xs = [copied(x, k in active) for k, x in enumerate(program.leaves)]
    pairs = zip(xs, program.names, strict=True)
    inputs = [recorder.introduced(x, name) for x, name in pairs]
    with followed(), plainly():  # control flow runs in Python, and nothing again
        outputs = recorder.run(lambda: [_output(recorder, y) for y in program.run(xs)])
    read = set(order(outputs))
    held = {p: x for p, x in recorder.held.items() if p in read}
    wanted = tuple(p for p, x in held.items() if x.requires_grad and is_inexact(x))
    return Recorded(
        tuple(inputs),
        tuple(outputs),
        {p: x.detach() for p, x in held.items()},
        wanted,
        {p: value for p, value in recorder.draws.items() if p in read},
        partial(_run_with_others, program, [held[p] for p in wanted]),
        recorder.narrow,
    )


def _output(recorder: FormulaRecorder, y: Any) -> Expr:
    return recorder.of(y) if isinstance(y, Tensor) else recorder.constant(torch.as_tensor(y))


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
