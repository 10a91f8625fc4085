"""`formula` in PyTorch: one run of f as expressions, and the derivatives that it is compared with.

f runs once under `recorder.py` at copies of its arguments, and its effects are undone. Captured
tensors that require grad are differentiated like arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradtools.seeing.formulas.expressions import order
from gradtools.seeing.formulas.reverse_mode import Recorded
from gradtools.seeing.formulas.words import constant
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.torch.recording.observation import followed, recording_run
from gradtools.seeing.torch.translating.recorder import FormulaRecorder, numbers
from gradtools.seeing.torch.undo import copied, undone
from gradtools.torch.function_modes import PlainAttention, PlainKernels
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.operation_marks import plainly

Tensor = torch.Tensor


def formula_graph(program: LeafProgram) -> Recorded:
    """Records one forward run of a program and undoes its effects."""
    active = set(program.wrt)
    with recording_run(f"{program.caller}: a program", program.run, program.leaves) as undo:
        recorder = FormulaRecorder(undo, program.backend)
        xs = [copied(x, k in active) for k, x in enumerate(program.leaves)]
        pairs = zip(xs, program.names, strict=True)
        inputs = [recorder.introduced(x, name) for x, name in pairs]
        value = lambda y: recorder.of(y) if isinstance(y, Tensor) else constant(y)
        with plainly():  # without recomputation
            outputs = recorder.run(lambda: [value(y) for y in _plain_run(program, xs)])
    read = set(order(outputs))
    held = {p: x for p, x in recorder.held.items() if p in read}
    wanted = tuple(p for p, x in held.items() if x.requires_grad and is_inexact(x))
    return Recorded(
        tuple(inputs),
        tuple(outputs),
        {p: numbers(x) for p, x in held.items()},
        wanted,
        tuple(held[p] for p in wanted),
        frozenset(recorder.dtypes),
    )


def _plain_run(program: LeafProgram, xs: Sequence[Any]) -> Sequence[Any]:
    with PlainAttention():  # as a softmax between two products
        return program.run(xs)


def differentiated(
    program: LeafProgram,
    recorded: Recorded,
    active: Sequence[int],
    inputs: Sequence[Any],
    cotangents: Sequence[Tensor],
    directions: Sequence[Tensor],
) -> tuple[list[Any], list[Any], list[Any]]:
    """f's outputs and gradients by PyTorch, and with directions the derivatives of the gradients.

    active: Which of the inputs and the captured tensors are differentiated.
    """
    wrt = [k for k in active if k < len(inputs)]
    undoing = undone(program.run, program.leaves)
    with undoing, followed(), torch.inference_mode(False), torch.enable_grad():
        xs = [copied(x, k in wrt) for k, x in enumerate(inputs)]
        moving = [*(xs[k] for k in wrt), *recorded.captured]
        with PlainKernels():  # fused ones are differentiated once
            ys = program.run(xs)
            # A default device would move tensors, too.
            outs = [y if isinstance(y, Tensor) else torch.as_tensor(y) for y in ys]
        inexact = [y for y in outs if is_inexact(y)]
        pairs = zip(cotangents, inexact, strict=True)
        given = [c.to(y.dtype).requires_grad_(bool(directions)) for c, y in pairs]
        gradients = _gradients(inexact, moving, given, create_graph=bool(directions))
        second: list[Tensor] = []
        if directions:
            along = [u.to(g.dtype) for u, g in zip(directions, gradients, strict=True)]
            second = _gradients(gradients, [*moving, *given], along)
        return tuple([*map(numbers, group)] for group in (outs, gradients, second))  # type: ignore[return-value]


def _gradients(
    outs: Sequence[Tensor],
    xs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    create_graph: bool = False,
) -> list[Tensor]:
    """torch.autograd.grad, with zeros where nothing depends on an input."""
    pairs = [(y, c) for y, c in zip(outs, cotangents, strict=True) if y.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(xs)
    if pairs and xs:
        ys, cts = zip(*pairs, strict=True)
        grads = torch.autograd.grad(ys, xs, cts, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, grads, strict=True)]
