"""Walks over autograd's graph: its nodes, and the leaves that a result depends on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
_parent = itemgetter(0)  # of an edge: a comprehension is a call of Python for each node


def nodes_of(outs: Iterable[Tensor], ends: Collection[Any] = ()) -> list[Any]:
    """The nodes of the graph of outs, including leaves, not followed past `ends`."""
    tracked = [y for y in outs if y.requires_grad]
    return nodes_behind([y.grad_fn or get_gradient_edge(y).node for y in tracked], ends)


def nodes_behind(nodes: Iterable[Any], ends: Collection[Any] = ()) -> list[Any]:
    """These nodes and their ancestors, except for those that only the nodes `ends` lead to."""
    found, seen, todo = list[Any](), {None}, [*nodes]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            found.append(node)
            todo += map(_parent, node.next_functions) if node not in ends else ()
    return found


def leaves_of(outs: Iterable[Tensor]) -> Iterator[Tensor]:
    """The leaves in the graph of outs."""
    return (node.variable for node in nodes_of(outs) if type(node) is upstream.AccumulateGrad)


SPENT = "_gradtools_spent"
_UNSPENT = [False]


def is_spent(x: Tensor) -> bool:
    """Whether x is the alias of an argument in a derivative that has been taken.

    Nobody differentiates with respect to such a leaf: it is a constant. Its attribute `SPENT` holds
    a list of one flag, which the aliases of a derivative share.
    """
    return bool(getattr(x, SPENT, _UNSPENT)[0])


def depends_on_others(outs: Sequence[Tensor]) -> bool:
    """Whether outs depend on a leaf that may be differentiated: one that is not spent."""
    accumulates = upstream.AccumulateGrad
    todo: list[Any] = [y.grad_fn or get_gradient_edge(y).node for y in outs if y.requires_grad]
    seen = set(todo)
    for node in todo:  # which grows
        if type(node) is accumulates:
            if not is_spent(node.variable):
                return True
            continue
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return False
