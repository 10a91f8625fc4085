"""Determines the names and marks of torch.autograd.Function classes in graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.seeing.graphs.gradient_losses import EDITS
from gradtools.seeing.graphs.passes import EDITED
from gradtools.torch.functorch_wrappers import tensors_in
from gradtools.torch.operation_marks import RULE, function_of_ours

Tensor = torch.Tensor


class ParametersRead(TorchFunctionMode):
    """Collects the leaf tensors with requires_grad that PyTorch functions receive."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs))
        self.tensors += [x for x in given if x.requires_grad and x.is_leaf]
        return fun(*args, **(kwargs or {}))


_AGAIN = ("chunked", "frozen", "checkpoint")  # operators that recompute a part of the program
_MARKS = {**{name: name for name in _AGAIN}, **dict.fromkeys(EDITS, EDITED)}


def name_and_mark(kind: Any, args: Any) -> tuple[str, str]:
    """Returns the name and the mark of a torch.autograd.Function for graphs."""
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
