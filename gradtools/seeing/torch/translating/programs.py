"""`formula` in PyTorch: one run of f, recorded as expressions.

f runs once under `recorder.py` at copies of its arguments, and its effects are undone. Captured
tensors that require grad are differentiated like arguments. A formula is compared in float64: the
arguments are cast, and a TorchFunctionMode replaces captured tensors, such as a module's
parameters, by casts. Control-flow operators run as Python loops and branches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.seeing.formulas.arrays import constant
from gradtools.seeing.formulas.expressions import order
from gradtools.seeing.formulas.recorded import Recorded
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.torch.recording.observation import recording_run
from gradtools.seeing.torch.thread_patches import control_flow_called, functions_applied
from gradtools.seeing.torch.translating.recorder import FormulaRecorder
from gradtools.seeing.torch.undo import copied, memory_of, undone
from gradtools.torch import _upstream as upstream
from gradtools.torch._upstream import pytree
from gradtools.torch.function_modes import PlainAttention, PlainKernels
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.operation_marks import plainly

Tensor = torch.Tensor


def formula_graph(program: LeafProgram) -> Recorded:
    """Records one forward run of a program and undoes its effects."""
    active = set(program.wrt)
    with recording_run(f"{program.caller}: a program", program.run, program.leaves) as undo:
        recorder = FormulaRecorder(undo, program.backend, origin_of)
        xs = [copied(x, k in active) for k, x in enumerate(program.leaves)]
        pairs = zip(xs, program.names, strict=True)
        inputs = [recorder.introduced(x, name) for x, name in pairs]
        with followed(), plainly():  # control flow runs in Python, without recomputation
            value = lambda y: recorder.of(y) if isinstance(y, Tensor) else constant(y)
            outputs = recorder.run(lambda: [value(y) for y in _plain_run(program, xs)])
    read = set(order(outputs))
    held = {p: x for p, x in recorder.held.items() if p in read}
    wanted = tuple(p for p, x in held.items() if x.requires_grad and is_inexact(x))
    captured = [held[p] for p in wanted]

    detached = {p: x.detach() for p, x in held.items()}
    run = partial(_run_with, program, captured)
    return Recorded(tuple(inputs), tuple(outputs), detached, wanted, run)


def _plain_run(program: LeafProgram, xs: Sequence[Any]) -> Sequence[Any]:
    with PlainAttention():  # as a softmax between two products
        return program.run(xs)


def _run_with(
    program: LeafProgram, captured: Sequence[Tensor], values: Sequence[Any]
) -> Sequence[Any]:
    """The program at other leaves, followed by values of the tensors that it captures."""
    count = len(program.leaves)
    place = {id(x): v for x, v in zip(captured, values[count:], strict=True)}
    with reading(place, wide=False), PlainKernels():  # fused ones are differentiated once
        return program.run(values[:count])


@contextmanager
def trying(program: LeafProgram, wide: bool) -> Iterator[None]:
    """A context in which f may run; its effects are undone. wide: captures are read in float64."""
    undoing = undone(program.run, program.leaves)
    with undoing, followed(), reading({}, wide), torch.enable_grad():
        yield


# --- control flow as Python loops and branches


def _while_loop(goes_on: Any, body: Any, carried: Any, more: Any = ()) -> Any:
    while goes_on(*carried, *more):
        carried = tuple(body(*carried, *more))
    return carried


_FOLLOWED: dict[str, Callable[..., Any]] = {
    "cond": lambda chosen, yes, no, operands=(): (yes if chosen else no)(*operands),
    "while_loop": _while_loop,
}


def followed() -> AbstractContextManager[None]:
    """A context in which this thread's cond and while_loop run in Python."""

    def follow(operator: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return _FOLLOWED.get(operator.name(), call)(*args, **kwargs)

    return control_flow_called(follow)


# --- parameters and other captured tensors in float64


_NARROW = (torch.float16, torch.bfloat16, torch.float32, torch.complex32, torch.complex64)
_DOUBLE = {dtype: torch.promote_types(dtype, torch.float64) for dtype in _NARROW}


class _Reading(TorchFunctionMode):
    """A mode that replaces tensors among the arguments of functions."""

    def __init__(self, place: Mapping[int, Tensor], wide: bool) -> None:
        super().__init__()
        self.place, self.wide = place, wide
        self.cast: dict[int, tuple[Tensor, Tensor]] = {}
        self.origins: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, x: Any) -> Any:
        """The replacement of a tensor or dtype; x itself if it has none."""
        if isinstance(x, torch.dtype):
            return _DOUBLE.get(x, x) if self.wide else x
        if not isinstance(x, Tensor):
            return x
        x = self.place.get(id(x), x)
        if not self.wide or x.dtype not in _DOUBLE:
            return x
        if id(x) in self.cast:
            return self.cast[id(x)][1]
        with torch.enable_grad():
            result = x.to(_DOUBLE[x.dtype])
        if x.is_leaf and upstream.version_of(x) == 0:
            self.cast[id(x)] = self.origins[memory_of(result)] = x, result
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS:
            return func(*args, **(kwargs or {}))
        func = _WIDER.get(func, func) if self.wide else func
        args, kwargs = pytree.tree_map(self.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def around(self, cls: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Calls a torch.autograd.Function with replaced arguments."""
        return apply(*pytree.tree_map(self.read, args), **kwargs)


_here = threading.local()


def origin_of(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The original tensor and its cast, if x is a view of a cast that replaces it; else None."""
    mode: _Reading | None = getattr(_here, "reading", None)
    return mode.origins.get(memory_of(x)) if mode else None


_TENSOR: Any = Tensor  # PyTorch's stubs lack its complex casts
_WIDER: dict[Any, Any] = {
    **dict.fromkeys((Tensor.half, Tensor.float, Tensor.bfloat16), Tensor.double),
    **dict.fromkeys((_TENSOR.chalf, _TENSOR.cfloat), _TENSOR.cdouble),
}
_ASKS = frozenset({_TENSOR.is_leaf.__get__, _TENSOR.grad_fn.__get__})


@contextmanager
def reading(place: Mapping[int, Tensor], wide: bool) -> Iterator[None]:
    """A context that replaces tensors by id (`place`) and, if wide, reads them in float64."""
    if not place and not wide:
        yield
        return
    mode, before = _Reading(place, wide), getattr(_here, "reading", None)
    with functions_applied(mode.around), mode:
        _here.reading = mode if wide else before
        try:
            yield
        finally:
            _here.reading = before
