"""Implements `retained_gradients` in PyTorch, with a single evaluation of eager code.

The first evaluation of a mark creates a leaf tensor, and autograd computes the gradients with
respect to the arguments and the created leaves. Inside of torch.func's transforms, the leaf tensors
must exist before f runs.
"""

from __future__ import annotations

from typing import Any

import torch

from gradtools.arguments.marks import Mark, MarkedValues, here
from gradtools.backend import Backend, Evaluation
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import levels_of_vmap

Tensor = torch.Tensor


class _TorchTape(MarkedValues):
    """The marked values of a function that is evaluated at the level `level` of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.level = _level()


def retaining(backend: Any, call: Any) -> tuple[Evaluation, list[Mark], list[Tensor]]:
    call.tape = tape = _TorchTape()
    if tape.level:
        return Backend.retaining(backend, call)
    evaluation = backend.vjp(call, call.leaves, groups=None, once=True)
    return evaluation, tape.marks, tape.arrays


def marked(backend: Any, xs: list[Tensor], mark: Mark) -> list[Tensor]:
    tape: Any = here.tape
    arrays = tape.arrays_of(mark, lambda: [_zeros(x, tape.level) for x in xs])
    return [x + _batched(d, x, tape.level) for x, d in zip(xs, arrays, strict=True)]


def _zeros(x: Tensor, level: int) -> Tensor:
    """Returns negative zeros like x, with the batch axes of all vmaps above `level` in front."""
    shape = [upstream.batch_size_of(v) for v in _vmaps(x, level)] + [*x.shape]
    if level:
        return -torch.zeros(shape, dtype=x.dtype, device=x.device)
    with upstream.temporarily_clear_interpreter_stack(), torch.no_grad():
        return (-torch.zeros(shape, dtype=x.dtype, device=x.device)).requires_grad_()


def _batched(d: Tensor, x: Tensor, level: int) -> Tensor:
    for v in _vmaps(x, level):
        d = upstream.add_vmap_axis(d, 0, v.level())
    return d


def _vmaps(x: Tensor, level: int) -> list[Any]:
    """Returns the vmaps above `level` that batch x, outermost first."""
    own, stack = levels_of_vmap(x), upstream.get_interpreter_stack() or ()
    return [v for v in stack if v.level() > level and v.level() in own]


def _level() -> int:
    top = upstream.peek_interpreter_stack()
    return 0 if top is None else top.level()
