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
from gradtools.rules import Rule, captured_objects
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_dual, is_wrapped

Tensor = torch.Tensor
_requires_grad = attrgetter("requires_grad")


def closes_over_tracked(rule: Rule) -> bool:
    """Whether a rule captures a differentiated tensor, whose derivative would be lost.

    Not of a rule without a contract, which gradtools derived from another one.
    """
    if rule.contract is None:
        return False
    if closures_of(rule).captures(_requires_grad):
        return True
    if upstream.peek_interpreter_stack() is not None:
        return _captures(rule.user_functions, is_wrapped)
    return upstream.forward_level() >= 0 and _captures(rule.user_functions, is_dual)


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
    """The tensors in the closures of functions, which are searched again if a cell is rebound.

    Other rules among what they close over look at their own closures when they are called.

    Attributes:
        empty: Whether the functions close over nothing.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self._functions = functions
        self._search()

    def _search(self) -> None:
        is_kept = lambda x: isinstance(x, CellType | Tensor | dict | list | set)
        leaves = Tensor, CustomRule
        objects = [*captured_objects(self._functions, is_kept, leaves, attributes=False)]
        self.empty = not objects
        self._tensors = [x for x in objects if isinstance(x, Tensor)]
        self._cells = [(x, _contents(x)) for x in objects if isinstance(x, CellType)]
        self._may_change = any(isinstance(x, dict | list | set) for x in objects)

    def captures(self, wanted: Callable[[Tensor], bool]) -> bool:
        """Whether a tensor with `wanted(x)` is captured."""
        for cell, content in self._cells:
            if _contents(cell) is not content:
                self._search()
                break
        if self._may_change:  # the contents of a container, without a new object
            return _captures(self._functions, wanted, attributes=False)
        return any(map(wanted, self._tensors))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
