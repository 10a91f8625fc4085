"""What a rule's functions close over: a captured tensor that is differentiated is refused.

Autograd knows a rule's arguments only, so the derivative by anything else would be lost in silence.
Closures are searched before a call; results that require grad at detached arguments, and leaves in
the graph of a map, show what the search cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from types import CellType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gradtools.custom_rules import CustomRule
from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, captured_objects
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import depends_on_others, is_spent, nodes_behind
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
        return captures_tensor(rule.user_functions, is_wrapped)
    return upstream.forward_level() >= 0 and captures_tensor(rule.user_functions, is_dual)


def captures_tensor(
    functions: Sequence[Any], wanted: Callable[[Tensor], bool], attributes: bool = True
) -> bool:
    """Whether functions, or with `attributes` what their attributes hold, capture one."""
    is_wanted = lambda x: isinstance(x, Tensor) and wanted(x)
    return any(True for _ in captured_objects(functions, is_wanted, Tensor, attributes))


def is_derived(rule: Rule) -> bool:
    """Whether gradtools computes the rule's value, as a derivative whose graph is not wanted."""
    return rule.contract is None and rule.linearize is None


def is_captured(y: Tensor) -> bool:
    """Whether a result at detached arguments may be differentiated by what a rule closes over.

    What a derivative inside of the rule was taken at is a constant.
    """
    return (y.requires_grad and depends_on_others([y])) or is_wrapped(y)


def other_leaves(results: Sequence[Any], known: Sequence[Any]) -> list[Any]:
    """The leaves in the results' graph that `known` tensors do not reach.

    The aliases of a derivative that the map itself took are skipped.
    """
    if any(x is not None and is_wrapped(x) for x in (*results, *known)):
        return []  # functorch wrappers hide the graph
    ends = {x.grad_fn for x in known if x is not None}
    own = {id(x) for x in known}
    tracked = [y for y in results if y is not None and y.requires_grad and id(y) not in own]
    starts = [y.grad_fn or get_gradient_edge(y).node for y in tracked]
    nodes = [x for x in nodes_behind(starts, ends) if type(x) is upstream.AccumulateGrad]
    leaves = [x.variable for x in nodes if id(x.variable) not in own]
    if leaves:  # a tensor that hooks unpacked is another object, with the node of the leaf
        ends = _nodes_of(known)
        leaves = [x.variable for x in nodes if x not in ends]
    return [leaf for leaf in leaves if not is_spent(leaf)]


def reaches(y: Tensor, sources: Sequence[Tensor], known: Sequence[Any]) -> bool:
    """Whether y's graph leads to one of `sources`; it is not followed past `known` tensors."""
    wanted = _nodes_of(sources)
    return not wanted.isdisjoint(nodes_behind(_nodes_of([y]), wanted | _nodes_of(known)))


def _nodes_of(xs: Sequence[Any]) -> set[Any]:
    return {x.grad_fn or get_gradient_edge(x).node for x in xs if x is not None and x.requires_grad}


def closures_of(rule: Rule) -> Closures:
    """What a rule's functions close over."""
    known: Closures | None = rule.__dict__.get("_closures")
    if known is None:
        known = rule.__dict__["_closures"] = Closures(rule.user_functions)
    return known


class Closures:
    """The tensors that functions close over, searched once, and again if a cell is rebound.

    Attributes:
        cells: The closure cells and their contents.
        unsure: Whether equal cells do not show that no tensor is captured, but by other rules.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self._functions = functions
        self._search()

    def __reduce__(self) -> Any:
        return Closures, (self._functions,)

    def captures(self, wanted: Callable[[Tensor], bool]) -> bool:
        """Whether a tensor with `wanted(x)` is captured."""
        if any(_contents(cell) is not content for cell, content in self.cells):
            self._search()
        if self._may_change:
            return captures_tensor(self._functions, wanted, attributes=False)
        return any(map(wanted, self._tensors))

    def _search(self) -> None:
        kinds = CellType | Tensor | dict | list | set | CustomRule
        leaves = Tensor, CustomRule  # another rule's functions may be replaced
        is_kept = lambda x: isinstance(x, kinds)
        objects = [*captured_objects(self._functions, is_kept, leaves, attributes=False)]
        self._tensors = [x for x in objects if isinstance(x, Tensor)]
        self.cells = [(x, _contents(x)) for x in objects if isinstance(x, CellType)]
        self.unsure = any(isinstance(x, Tensor | dict | list | set) for x in objects)
        # The contents of a container, or of another rule, may change without a new object.
        self._may_change = any(isinstance(x, dict | list | set | CustomRule) for x in objects)


_EMPTY = object()


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
