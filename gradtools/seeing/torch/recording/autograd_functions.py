"""Names and marks of torch.autograd.Functions, and the inputs that their backward ignores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.rules import Rule, captured_objects
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import tensors_in, unwrapped
from gradtools.torch.operation_marks import RULE, function_of_ours

Tensor = torch.Tensor


class ParametersRead(TorchFunctionMode):
    """A mode that collects the leaves with requires_grad that PyTorch's functions receive."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs))
        self.tensors += [x for x in given if x.requires_grad and x.is_leaf]
        return fun(*args, **(kwargs or {}))


def captured_by(args: Any) -> list[Tensor]:
    """The tensors with requires_grad that an edit's function captures.

    The edit's value does not depend on them, but its derivative does.
    """
    rule = getattr(args[0], "rule", None) if args else None
    if not isinstance(rule, Rule) or rule.name not in _EDITS:
        return []
    wanted = lambda x: isinstance(x, Tensor) and x.requires_grad
    return list({id(x): x for x in captured_objects(rule.user_functions, wanted, Tensor)}.values())


_EDITS = ("scale_gradient", "clip_gradient", "transform_gradient", "replace_gradient")
_AGAIN = ("chunked", "frozen", "checkpoint")  # what computes a part of f again
_MARKS = {**{name: name for name in _AGAIN}, **dict.fromkeys(_EDITS, "edited gradient")}


def name_and_mark(kind: Any, args: Any) -> tuple[str, str]:
    """The name and the mark of a torch.autograd.Function."""
    recorded_as = function_of_ours(kind)
    if recorded_as is None:
        return kind.__name__, "custom rule"
    if recorded_as != RULE:
        program = getattr(args[0], "program", None) if args else None
        if program is not None and program.caller in _MARKS:
            return program.caller, _MARKS[program.caller]
        return recorded_as, _MARKS.get(recorded_as, "")
    name = getattr(getattr(args[0], "rule", None), "name", kind.__name__)
    return name, _MARKS.get(name, "custom rule")


def unruled(kind: Any, mark: str, operands: Sequence[Any], out: Any) -> set[int]:
    """The inputs for which a Function's backward returns None, found by one trial backward.

    PyTorch's and gradtools' own Functions are not tried.
    """
    stack = upstream.get_interpreter_stack() or ()
    if any(level.key() != upstream.TransformType.Vmap for level in stack):
        return set()  # a differentiating level has its own graph
    outs = [y for y in map(unwrapped, tensors_in(out)) if y.requires_grad and y.grad_fn is not None]
    tracked = [x for x in operands if x.tracked]
    own = function_of_ours(kind) not in (None, RULE) or kind.__module__.startswith("torch.")
    if not outs or not tracked or own or mark in _AGAIN:
        return set()
    try:
        with upstream.temporarily_clear_interpreter_stack(), torch.enable_grad():
            result = torch.autograd.grad(
                outs,
                [x.tensor for x in tracked],
                [torch.ones_like(y) for y in outs],
                retain_graph=True,
                allow_unused=True,
            )
    except Exception:  # no backward pass here; an error follows when the gradient is taken
        return set()
    return {x.number for x, g in zip(tracked, result, strict=True) if g is None}
