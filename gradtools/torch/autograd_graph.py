"""A walk over autograd's graph: its leaves, custom Functions, and nodes with wrong gradients.

One walk over the graph of a function's outputs finds its leaves, the nodes of custom code, whose
own derivatives `double_backward.py` checks, and the nodes whose gradient PyTorch computes wrongly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from gradtools.backend import Fun
from gradtools.errors import LostDerivativeError
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import COMPILED, LOST, nodes_behind, nodes_of
from gradtools.torch.functorch_wrappers import unwrapped
from gradtools.torch.patches import scripts_called
from gradtools.torch.plain_programs.backward_nodes import (
    WRONG,
    is_wrong,
    multiplies_by_deviation,
)

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped
OWN = ("gradtools.", upstream.COMPILED_CODE)
CPP_NODE = "CppFunction"  # nodes of many kinds, without types of their own
CPP_FUNCTION = "torch::autograd::CppNode<"


class Survey(NamedTuple):
    """The findings of one walk over a graph: its leaves, and lists of nodes."""

    leaves: list[Tensor]
    custom: list[Any]  # of code that is neither PyTorch's nor gradtools' own
    # Of operators without a backward pass, for which PyTorch only warns; and nodes that may treat a
    # standard deviation as a constant, as PyTorch's vmap of a normalization's gradient does.
    lost: list[Any]
    wrong: list[Any]  # of operations whose gradient PyTorch computes wrongly
    compiled: list[Any]  # of compiled code, whose backward passes lose derivatives
    hooked: bool = False  # whether gradient hooks were set during the evaluation


_PLAIN: set[type] = set()  # PyTorch's own nodes


def surveyed(outs: Sequence[Tensor], made: int = 0) -> Survey:
    """The graph of outs.

    made: How many nodes the function made. Those of a derivative inside are not in its graph.
    """
    result, plain, accumulates = Survey([], [], [], [], []), _PLAIN, upstream.AccumulateGrad
    todo: list[Any] = [y.grad_fn or get_gradient_edge(y).node for y in outs if y.requires_grad]
    seen = set(todo)
    for node in todo:  # inlined `nodes_of`, since every derivative runs this
        kind = type(node)
        if kind not in plain:
            if kind is accumulates:
                result.leaves.append(node.variable)
                continue
            _note(result, node, kind)
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)
    if made > len(todo):
        result.lost.extend(filter(multiplies_by_deviation, todo))
    return result


def _note(survey: Survey, node: Any, kind: Any) -> None:
    if kind.__name__ == LOST:
        survey.compiled.append(node)
    elif issubclass(kind, BackwardCFunction):
        if kind.__name__ == COMPILED:
            survey.compiled.append(node)
        elif not upstream.forward_class(kind).__module__.startswith(OWN):
            survey.custom.append(node)
    elif kind.__name__ in WRONG:
        if is_wrong(node):
            survey.wrong.append(node)
    elif kind.__name__ != CPP_NODE:
        _PLAIN.add(kind)
    elif node.name() == "torch::autograd::WarnNotImplemented":
        survey.lost.append(node)
    elif is_cpp_function(node) or is_torchscript(node):
        survey.custom.append(node)


def is_cpp_function(node: Any) -> bool:
    """Whether a node belongs to a C++ torch::autograd::Function."""
    return type(node).__name__ == CPP_NODE and node.name().startswith(CPP_FUNCTION)


def is_torchscript(node: Any) -> bool:
    """Whether a node is the backward pass of a piece of TorchScript."""
    return type(node).__name__ == CPP_NODE and node.name().startswith("torch::jit::")


def tracked(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in xs if x.requires_grad]


def graph_of(outs: Sequence[Tensor]) -> set[Any]:
    """The nodes of the graph of outs."""
    return all_behind([node_of(y) for y in outs if y.requires_grad])


def all_behind(nodes: Iterable[Any], ends: Collection[Any] = ()) -> set[Any]:
    """`nodes_behind` as a set."""
    return {*nodes_behind(nodes, ends)}


def node_of(x: Tensor) -> Any:
    """The node whose output is x; None if x belongs to another functorch level."""
    if not x.requires_grad:
        return None
    level = upstream.peek_interpreter_stack()
    if is_wrapped(x):
        if level is None or upstream.maybe_get_level(x) != level.level():
            return None
        # Level numbers are reused, so the kind of wrapper must match as well.
        if upstream.is_batchedtensor(x) != (level.key() == upstream.TransformType.Vmap):
            return None
    elif level is not None and x.grad_fn is None:  # a leaf outside of the transform that runs
        return None
    return x.grad_fn or get_gradient_edge(x).node


def guarded(
    caller: str,
    fun: Fun,
    leaves: Sequence[Tensor],
    survey: Survey,
    aliases: Sequence[Tensor],
    again: bool,
) -> AbstractContextManager[None] | None:
    """A context for a pullback that corrects wrong gradients and gates lost derivatives.

    None if the graph has neither.

    again: Whether the pullback's result may be differentiated.
    """
    if not (survey.lost or survey.wrong or (again and survey.custom)):
        return None
    from gradtools.torch.double_backward import guarding

    return guarding(caller, fun, leaves, survey, aliases, again)


# --- TorchScript ----------------------------------------------------------------------------


def refuse_torchscript(caller: str, outs: Sequence[Tensor]) -> None:
    """Raises if the graph of outs, in forward mode or torch.func, holds TorchScript nodes."""
    beneath = [unwrapped(y) for y in outs if is_wrapped(y)]
    if any(is_torchscript(node) for node in nodes_of(tracked([*outs, *beneath]))):
        raise LostDerivativeError(f"{caller}: {TORCHSCRIPT_LOSES}")


def scripts_refused(caller: str) -> AbstractContextManager[None]:
    """Around a function in forward mode: raises if a TorchScript call records a node."""

    def around(script: Any, call: Any, args: Any, kwargs: Any) -> Any:
        before = nodes_made()
        out = call(*args, **kwargs)
        if nodes_made() != before:
            raise LostDerivativeError(f"{caller}: {TORCHSCRIPT_LOSES}")
        return out

    return scripts_called(around)


# The number of nodes that this thread has made; TorchScript makes them under no_grad as well.
nodes_made = upstream.nodes_made
TORCHSCRIPT_LOSES = (
    "f holds a function of TorchScript (torch.jit), in which PyTorch loses tangents, and second "
    "derivatives inside of torch.func's transforms, without an error (torch#73972). Call the "
    "function that was scripted or traced; or stay in reverse mode outside of torch.func: "
    "linearize for jvp, hvp(mode='reverse_over_reverse')."
)
