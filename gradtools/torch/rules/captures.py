"""What a rule's functions close over: a captured tensor that is differentiated is refused.

Autograd knows a rule's arguments only, so the derivative by anything else would be lost in silence.
Closures are searched before a call. A result that requires grad at detached arguments shows what
that search cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from types import CellType
from typing import Any

import torch

from gradtools.custom_rules import CustomRule
from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, captured_objects
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_dual, is_wrapped

Tensor = torch.Tensor


def closed_over_error(rule: Rule) -> GradtoolsError:
    """The error of a rule that closes over a tensor that is differentiated."""
    return GradtoolsError(
        f"rule {rule.name!r} closes over a tensor that is differentiated, or mapped by vmap, "
        "outside of it; its derivative would be lost. Pass the tensor to the function as an "
        "argument."
    )


def closes_over_tracked(rule: Rule) -> bool:
    """Whether a rule captures a differentiated tensor, whose derivative would be lost."""
    if is_derived(rule):
        return False
    if closures_of(rule).captures(attrgetter("requires_grad")):
        return True
    if upstream.peek_interpreter_stack() is not None:
        return _captures(rule.user_functions, is_wrapped)
    return upstream.forward_level() >= 0 and _captures(rule.user_functions, is_dual)


def is_derived(rule: Rule) -> bool:
    """Whether gradtools computes the rule's value, as a derivative whose graph is not wanted."""
    return rule.contract is None and rule.linearize is None


def _captures(functions: Any, wanted: Callable[[Tensor], bool], attributes: bool = True) -> bool:
    """Whether functions, or with `attributes` what their attributes hold, capture one."""
    is_wanted = lambda x: isinstance(x, Tensor) and wanted(x)
    return any(True for _ in captured_objects(functions, is_wanted, Tensor, attributes))


def closures_of(rule: Rule) -> Closures:
    """What a rule's functions close over."""
    known: Closures | None = rule.__dict__.get("_closures")
    if known is None:
        known = rule.__dict__["_closures"] = Closures(rule.user_functions)
    return known


class Closures:
    """The tensors that functions close over, searched once, and again if a cell is rebound.

    Other rules among what they close over look at their own closures when they are called.

    Attributes:
        empty: Whether they close over nothing.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self._functions = functions
        self._search()

    def __reduce__(self) -> Any:
        return Closures, (self._functions,)

    def captures(self, wanted: Callable[[Tensor], bool]) -> bool:
        """Whether a tensor with `wanted(x)` is captured."""
        rebound = False
        try:
            for cell, content in self._cells:
                rebound = rebound or cell.cell_contents is not content
        except ValueError:  # a cell is empty
            rebound = True
        if rebound:
            self._search()
        if self._may_change:  # the contents of a container, without a new object
            return _captures(self._functions, wanted, attributes=False)
        return any(map(wanted, self._tensors))

    def _search(self) -> None:
        is_kept = lambda x: isinstance(x, CellType | Tensor | dict | list | set)
        leaves = Tensor, CustomRule
        objects = [*captured_objects(self._functions, is_kept, leaves, attributes=False)]
        self._tensors = [x for x in objects if isinstance(x, Tensor)]
        self._cells = [(x, _contents(x)) for x in objects if isinstance(x, CellType)]
        self.empty = not objects
        self._may_change = any(isinstance(x, dict | list | set) for x in objects)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
