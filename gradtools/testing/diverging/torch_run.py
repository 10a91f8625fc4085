"""Records a run in PyTorch: every operation's value, and the cotangents that reach it.

A dispatch mode sees the operations below autograd. Hooks on the autograd nodes of the recorded
tensors store the cotangents in one backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from gradtools.code_origin import lines_above, users_lines
from gradtools.seeing.torch._upstream import Watching, schema_of
from gradtools.testing.cross_checking.sides import Side
from gradtools.testing.diverging.runs import HALF, Place, Run, Step


def run_in_torch(side: Side, program: Any, leaves: dict[str, np.ndarray]) -> Run:
    """Runs a program forward.

    Args:
        side: The side that the program belongs to.
        program: A function of the leaves in PyTorch.
        leaves: The arrays by name, all of them differentiated.
    """
    recorder = _Operations()
    inputs = [torch.clone(x).requires_grad_() for x in side.arrays([*leaves.values()])]
    own = [recorder.add(Place(n), x, [], leaf=n) for x, n in zip(inputs, leaves, strict=True)]
    aliases = [x.view_as(x) for x in inputs]  # f may write in place
    with recorder, torch.enable_grad():
        outs = side.named_arrays(program(*aliases))
    ends = {path: recorder.step_of(y) for path, y in outs.items()}

    def pull(cotangents: dict[str, Any]) -> None:
        ys = {path: y for path, y in outs.items() if y.requires_grad}
        if not ys:
            return
        cts = [torch.as_tensor(cotangents[path]).to(y) for path, y in ys.items()]
        handles = recorder.hooks()
        gradients = torch.autograd.grad([*ys.values()], inputs, cts, allow_unused=True)
        for handle in handles:
            handle.remove()
        for step, g in zip(own, gradients, strict=True):
            step.tracked, step.cotangent = True, None if g is None else _array(g)[0]

    return Run(recorder.steps, ends, pull)


class _Operations(Watching):
    """The dispatch mode. Tensors are recognized by identity, or by the memory they view."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.nodes: dict[int, tuple[Any, list[tuple[int, Step]]]] = {}
        self.held: list[Any] = []  # keeps objects alive, so that no id or address is reused
        self.by_id: dict[int, Step] = {}
        self.by_view: dict[Any, Step] = {}
        self.latest: dict[int, Step] = {}  # the latest step in each memory, and the latest write
        self.written: dict[int, Step] = {}

    def add(self, place: Place, x: torch.Tensor, parents: list[Step], leaf: str = "") -> Step:
        value, accuracy = _array(x)
        step = Step(place, value, parents, len(self.steps), accuracy, leaf)
        self.steps.append(step)
        self.held.append(x)
        self.by_id[id(x)] = self.latest[_memory(x)] = step
        if place.operation != "detach":
            self.by_view[_view(x)] = step
        return step

    def step_of(self, x: torch.Tensor) -> Step:
        """The step of a tensor, a new step if an operation in place has changed its memory."""
        memory = _memory(x)
        step, written = (
            self.by_id.get(id(x)) or self.by_view.get(_view(x)),
            self.written.get(memory),
        )
        if step is None or (written is not None and step.number < written.number):
            parents = [p for p in (step, self.latest.get(memory)) if p is not None]
            step = self.add(_place("view"), x, parents, leaf="" if parents else "captured")
        if (node := x.grad_fn) is not None:
            step.tracked = True
            self.nodes.setdefault(id(node), (node, []))[1].append((x.output_nr, step))
        return step

    def hooks(self) -> list[Any]:
        """Hooks that store the cotangents of the recorded tensors."""

        def hook(grads: Any, steps: Any) -> None:
            for k, step in steps:
                g = grads[k] if k < len(grads) else None
                if g is not None and tuple(g.shape) == step.value.shape:
                    step.cotangent = _array(g)[0]

        every = self.nodes.values()
        return [node.register_prehook(partial(hook, steps=steps)) for node, steps in every]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parents = [self.step_of(x) for x in _tensors([*args, *kwargs.values()])]
        out = func(*args, **kwargs)
        schema = schema_of(func)
        place = _place(schema.name.rpartition("::")[2])
        for x in _tensors([out]):
            step = self.add(place, x, parents)
            if schema.is_mutable:
                self.written[_memory(x)] = step
        return out


def _place(operation: str) -> Place:
    return Place(operation, users_lines(lines_above(1, run_in_torch)), _running_layer())


def _running_layer() -> str:
    """The path of the innermost module whose forward runs, from the outermost module."""
    owners = (frame.f_locals.get("self") for frame, _ in lines_above(1, run_in_torch))
    running = [x for x in owners if isinstance(x, torch.nn.Module)]
    paths = (n for n, m in running[-1].named_modules() if m is running[0]) if running else ()
    return next(iter(paths), "")


def _tensors(xs: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments or results, which may be in lists."""
    for x in xs:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _array(x: torch.Tensor) -> tuple[np.ndarray, float]:
    """A copy in NumPy, and its accuracy if it was widened from 16 bits."""
    x = x.detach().resolve_conj().resolve_neg().cpu()
    x = x if x.layout is torch.strided else x.to_dense()
    half = x.dtype in (torch.bfloat16, torch.float16)
    return np.array((x.float() if half else x).numpy()), HALF if half else 0.0


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def _view(x: torch.Tensor) -> Any:
    if x.layout is not torch.strided:
        return id(x)
    place = x.storage_offset(), x.shape, x.stride(), x.dtype
    return _memory(x), *place, x.is_conj(), x.is_neg()
