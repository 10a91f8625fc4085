"""Finds the nodes and leaves in the autograd graph of a result, and computes pullbacks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gradtools.torch import _upstream as upstream
from gradtools.torch.function_modes import PlainKernels, only_own_modes

Tensor = torch.Tensor
_parent = itemgetter(0)  # the node of an edge; a comprehension would be slower


def nodes_of(outs: Iterable[Tensor], ends: Collection[Any] = ()) -> list[Any]:
    """Returns the nodes of the graph of outs, including leaf nodes; the search stops at `ends`."""
    return nodes_behind([node_of(y) for y in outs if y.requires_grad], ends)


def node_of(y: Tensor) -> Any:
    """Returns the node of a tensor that requires grad."""
    return y.grad_fn or get_gradient_edge(y).node


def nodes_behind(nodes: Iterable[Any], ends: Collection[Any] = ()) -> list[Any]:
    """Returns the nodes and their ancestors, except ancestors reachable only through `ends`."""
    found, seen, todo = list[Any](), {None}, [*nodes]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            found.append(node)
            todo += map(_parent, node.next_functions) if node not in ends else ()
    return found


def leaves_of(outs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the leaves in the graph of outs."""
    return (node.variable for node in nodes_of(outs) if type(node) is upstream.AccumulateGrad)


SPENT = "_gradtools_spent"
_UNSPENT = [False]


def is_spent(x: Tensor) -> bool:
    """Returns whether x is the alias of an argument in a derivative that has been computed.

    After the derivative is computed, the alias is a constant, which is no longer differentiated.
    The attribute `SPENT` of an alias is a list with one flag, which all aliases of the derivative
    share.
    """
    return bool(getattr(x, SPENT, _UNSPENT)[0])


@contextmanager
def unspent(xs: Iterable[Tensor]) -> Iterator[None]:
    """Context manager in which a recomputation records the graphs of spent aliases among xs."""
    flags = [getattr(x, SPENT) for x in xs if is_spent(x)]
    try:
        for flag in flags:
            flag[0] = False
        yield
    finally:
        for flag in flags:
            flag[0] = True


def depends_on_others(outs: Sequence[Tensor]) -> bool:
    """Returns whether outs depend on a leaf for which `is_spent` is False."""
    accumulates, todo = upstream.AccumulateGrad, list[Any]()
    for y in outs:  # an explicit loop is faster, and every derivative runs this function
        if y.requires_grad:
            todo.append(y.grad_fn or get_gradient_edge(y).node)
    seen = set(todo)
    for node in todo:  # the loop appends to todo
        if type(node) is accumulates:
            if not getattr(node.variable, SPENT, _UNSPENT)[0]:
                return True
            continue
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return False


def pulled(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    cts: Sequence[Tensor],
    retain: bool,
    create: bool,
    plain: bool = False,
) -> tuple[Tensor | None, ...]:
    """Calls `torch.autograd.grad` without argument checks. The gradient of an unused input is None.

    plain: Whether checkpoints in the graph recompute their functions with `PlainKernels`.
    """
    if torch.overrides.has_torch_function((*ys, *xs)) and not only_own_modes((*ys, *xs)):
        return torch.autograd.grad(ys, xs, cts, retain, create, allow_unused=True)
    run = upstream.engine
    # A dispatch mode that records operations recognizes autograd's additions by the name of the
    # calling function.
    if upstream.DYNAMO in sys.modules or upstream.count_of_dispatch_modes():
        run = upstream.run_engine
    args = tuple(ys), tuple(cts), retain, create, tuple(xs)
    if plain:
        with PlainKernels():
            return run(*args, allow_unreachable=True, accumulate_grad=False)
    return run(*args, allow_unreachable=True, accumulate_grad=False)
