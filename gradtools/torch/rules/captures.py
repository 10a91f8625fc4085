"""What a rule's functions close over: a captured tensor that is differentiated is refused.

Autograd knows a rule's arguments only, so the derivative by anything else would be lost in silence.
Closures are searched before a call; results that require grad at detached arguments, and leaves in
the graph of a map, show what the search cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import CellType, FunctionType
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
    if is_derived(rule):
        return False
    if closures_of(rule).captures(attrgetter("requires_grad")):
        return True
    if upstream.peek_interpreter_stack() is not None:
        return closures_of(rule, attributes=True).captures(is_wrapped)
    return upstream.forward_level() >= 0 and closures_of(rule, attributes=True).captures(is_dual)


def closures_of(rule: Rule, attributes: bool = False) -> Closures:
    """What a rule's functions close over, and if `attributes`, what attributes hold."""
    known: dict[bool, Closures] = rule.__dict__.setdefault("_closures", {})
    if attributes not in known:
        known[attributes] = Closures(rule.user_functions, attributes)
    return known[attributes]


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
    for node in _nodes_behind(results, _nodes_of(known)):
        if not node.next_functions and hasattr(node, "variable") and not is_spent(node.variable):
            yield node


def reaches(y: Tensor, sources: Sequence[Tensor], known: Sequence[Any]) -> bool:
    """Whether y's graph leads to one of `sources`; it is not followed past `known` tensors."""
    wanted = _nodes_of(sources)
    past = _nodes_of(known) - wanted
    return any(node in wanted for node in _nodes_behind([y], past))


def _nodes_of(xs: Sequence[Any]) -> set[Any]:
    tracked = [x for x in xs if x is not None and x.requires_grad]
    return {x.grad_fn or get_gradient_edge(x).node for x in tracked}


def _nodes_behind(ys: Sequence[Any], ends: set[Any]) -> Iterator[Any]:
    """The nodes in the graph of ys, up to those in `ends`."""
    seen, todo = set(ends), [*_nodes_of(ys)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [parent for parent, _ in node.next_functions if parent is not None]


class Closures:
    """What functions close over, searched once.

    A later search is needed if a cell is bound to another object, or if a container is not empty or
    an object has slots, since their contents may change unnoticed.

    Attributes:
        cells: The closure cells and their contents.
        tensors: The captured tensors.
        unsure: Whether equal cells do not show that no tensor is captured, but by other rules.
    """

    def __init__(self, functions: Sequence[Any], attributes: bool = False) -> None:
        self.functions, self.attributes = functions, attributes
        self.search()

    def __reduce__(self) -> Any:
        return Closures, (self.functions, self.attributes)

    def captures(self, wanted: Callable[[Tensor], bool]) -> bool:
        """Whether a tensor with `wanted(x)` is captured."""
        if self.is_rebound() or self._unbound or any(self._empty):
            self.search()
        if not (self._filled or self._rules):
            return any(map(wanted, self.tensors))
        is_wanted = lambda x: isinstance(x, Tensor) and wanted(x)
        found = captured_objects(self.functions, is_wanted, Tensor, self.attributes)
        return any(True for _ in found)

    def is_rebound(self) -> bool:
        """Whether a cell was bound to another object, or emptied."""
        try:
            for cell, content in self.cells:
                if cell.cell_contents is not content:
                    return True
        except ValueError:
            return True
        return False

    def search(self) -> None:
        leaves = Tensor, CustomRule  # another rule's functions may be replaced
        may_change = _may_change_with_attributes if self.attributes else _may_change
        objects = [*captured_objects(self.functions, may_change, leaves, self.attributes)]
        self.tensors = [x for x in objects if isinstance(x, Tensor)]
        self.cells: list[tuple[Any, Any]] = []
        self._unbound = False  # whether a name is not bound yet
        for cell in objects:
            if isinstance(cell, CellType):
                try:
                    self.cells.append((cell, cell.cell_contents))
                except ValueError:
                    self._unbound = True
        containers = [x for x in objects if isinstance(x, dict | list | set)]
        if self.attributes:  # which an author may set later
            containers += [vars(f) for f in self.functions if isinstance(f, FunctionType)]
        self._empty = [x for x in containers if not x]
        slots = self.attributes and any(map(_has_slots, objects))
        self._filled = self._unbound or slots or len(self._empty) < len(containers)
        self._rules = any(isinstance(x, CustomRule) for x in objects)
        self.unsure = bool(self.tensors or containers or self._unbound)


def _may_change(x: Any) -> bool:
    return isinstance(x, CellType | Tensor | dict | list | set | CustomRule)


def _may_change_with_attributes(x: Any) -> bool:
    return _may_change(x) or _has_slots(x)


def _has_slots(x: Any) -> bool:
    return any(vars(kind).get("__slots__") for kind in type(x).__mro__)
