"""What a rule's functions close over: a captured tensor that is differentiated is refused.

Autograd knows a rule's arguments only, so the derivative by anything else would be lost in silence.
Closures are searched before a call; results that require grad at detached arguments, and leaves in
the graph of a map, show what the search cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import CellType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gradtools.custom_rules import CustomRule
from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, captured_objects
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_dual, is_wrapped
from gradtools.torch.open_derivatives import is_spent

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

    def captures(wanted: Callable[[Tensor], bool], attributes: bool = True) -> bool:
        is_wanted = lambda x: isinstance(x, Tensor) and wanted(x)
        return any(True for _ in captured_objects(functions, is_wanted, Tensor, attributes))

    functions = rule.user_functions
    if is_derived(rule):
        return False
    if captures(lambda x: x.requires_grad, False):
        return True
    if upstream.peek_interpreter_stack() is not None:
        return captures(is_wrapped)
    return upstream.forward_level() >= 0 and captures(is_dual)


def is_derived(rule: Rule) -> bool:
    """Whether gradtools computes the rule's value, as a derivative whose graph is not wanted."""
    return rule.contract is None and rule.linearize is None


def is_captured(y: Tensor) -> bool:
    return y.requires_grad or is_wrapped(y)


def refuse_captured(rule: Rule, results: Sequence[Any], known: Sequence[Any]) -> None:
    """Raises if the results depend on a leaf that none of the map's arguments depends on."""
    if any(True for _ in other_leaves(results, known)):
        raise closed_over_error(rule)


def other_leaves(results: Sequence[Any], known: Sequence[Any]) -> Iterator[Any]:
    """The nodes of leaves in the results' graph that `known` tensors do not reach.

    The aliases of a derivative that the map itself took are skipped.
    """
    if any(x is not None and is_wrapped(x) for x in (*results, *known)):
        return  # functorch wrappers hide the graph
    known = [x for x in known if x is not None and x.requires_grad]
    seen = {x.grad_fn or get_gradient_edge(x).node for x in known}
    todo = [x for x in results if x is not None and x.requires_grad]
    nodes = [x.grad_fn or get_gradient_edge(x).node for x in todo]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if not node.next_functions and hasattr(node, "variable") and not is_spent(node.variable):
            yield node
        nodes += [parent for parent, _ in node.next_functions if parent is not None]


class Closures:
    """The closure cells and tensors of the rule's functions, cached between calls.

    A rebound cell triggers a new search. A list or dict may change unnoticed, so it is not cached.
    """

    def __init__(self, user_functions: Sequence[Any]) -> None:
        self.user_functions = user_functions
        self.search()

    def untracked(self) -> bool:
        """Whether no captured tensor requires grad; False if unknown."""
        for cell, content in self.cells:
            if cell.cell_contents is not content:
                self.search()
                return False
        if self.unbound:
            self.search()
        return self.known and not any(x.requires_grad for x in self.tensors)

    def search(self) -> None:
        """Searches the closures again. Other rules among the contents check theirs themselves."""
        leaves = Tensor, CustomRule
        held = [*captured_objects(self.user_functions, _may_change, leaves, False)]
        self.tensors = [x for x in held if isinstance(x, Tensor)]
        self.cells: list[tuple[Any, Any]] = []
        self.unbound = False  # whether a name is not bound yet
        for cell in held:
            if isinstance(cell, CellType):
                try:
                    self.cells.append((cell, cell.cell_contents))
                except ValueError:
                    self.unbound = True
        self.known = not self.unbound and len(self.cells) + len(self.tensors) == len(held)
        self.unsure = bool(self.tensors) or not self.known  # whether checking cells is not enough


def _may_change(x: Any) -> bool:
    return isinstance(x, CellType | Tensor | dict | list | set)
