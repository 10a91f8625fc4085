"""A walk over autograd's graph: its leaves, custom Functions, and nodes with wrong gradients.

One walk over the graph of a function's outputs finds its leaves, the nodes of custom code, whose
own derivatives `double_backward.py` checks, and the nodes whose gradient PyTorch computes wrongly.

This module also records which leaves an inner derivative depends on, to distinguish a leaf that is
cut from it afterwards from one on which it does not depend.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.errors import DisconnectedInputError, LostDerivativeError
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import COMPILED, LOST, nodes_of
from gradtools.torch.functorch_wrappers import unwrapped
from gradtools.torch.patches import scripts_called
from gradtools.torch.plain_programs.backward_nodes import (
    WRONG,
    is_wrong,
    multiplies_by_deviation,
)
from gradtools.torch.rerunning import put_back

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped
OWN = ("gradtools.", upstream.COMPILED_CODE)
CPP_NODE = "CppFunction"  # nodes of many kinds, without types of their own
CPP_FUNCTION = "torch::autograd::CppNode<"


class Survey(NamedTuple):
    """The findings of one walk over a graph.

    Attributes:
        leaves: The leaf tensors.
        custom: Nodes of code that is neither PyTorch's nor gradtools' own.
        lost: Nodes of operators without a backward pass, for which PyTorch only warns; and nodes
            that may treat a standard deviation as a constant, as PyTorch's vmap of a
            normalization's gradient does.
        wrong: Nodes of operations whose gradient PyTorch computes wrongly.
        compiled: Nodes of compiled code, whose backward passes lose derivatives.
        hooked: Whether gradient hooks were set during the evaluation.
    """

    leaves: list[Tensor]
    custom: list[Any]
    lost: list[Any]
    wrong: list[Any]
    compiled: list[Any]
    hooked: bool = False


_PLAIN: set[type] = set()  # PyTorch's own nodes


def surveyed(outs: Sequence[Tensor], made: int = 0) -> Survey:
    """The graph of outs.

    made: How many nodes the function made. Those of a derivative inside are not in its graph.
    """
    result, plain, accumulates = Survey([], [], [], [], []), _PLAIN, upstream.AccumulateGrad
    todo: list[Any] = []
    for y in outs:
        if y.requires_grad:
            todo.append(y.grad_fn or get_gradient_edge(y).node)
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


def _note(found: Survey, node: Any, kind: Any) -> None:
    if kind.__name__ == LOST:
        found.compiled.append(node)
    elif issubclass(kind, BackwardCFunction):
        if kind.__name__ == COMPILED:
            found.compiled.append(node)
        elif not upstream.forward_class(kind).__module__.startswith(OWN):
            found.custom.append(node)
    elif kind.__name__ in WRONG:
        if is_wrong(node):
            found.wrong.append(node)
    elif kind.__name__ != CPP_NODE:
        _PLAIN.add(kind)
    elif node.name() == "torch::autograd::WarnNotImplemented":
        found.lost.append(node)
    elif is_cpp_function(node) or is_torchscript(node):
        found.custom.append(node)


def is_cpp_function(node: Any) -> bool:
    """Whether a node belongs to a C++ torch::autograd::Function."""
    return type(node).__name__ == CPP_NODE and node.name().startswith(CPP_FUNCTION)


def is_torchscript(node: Any) -> bool:
    """Whether a node is the backward pass of a piece of TorchScript."""
    return type(node).__name__ == CPP_NODE and node.name().startswith("torch::jit::")


def tracked(xs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that require grad."""
    return [x for x in xs if x.requires_grad]


def graph_of(outs: Sequence[Tensor]) -> set[Any]:
    """The nodes of the graph of outs."""
    return all_behind([node_of(y) for y in outs if y.requires_grad])


def node_of(x: Tensor) -> Any:
    """The node whose output is x; None if x belongs to another functorch level."""
    if not x.requires_grad or (is_wrapped(x) and not _is_here(x)):
        return None
    if x.grad_fn is None and not is_wrapped(x) and upstream.peek_interpreter_stack() is not None:
        return None  # a leaf outside of the transform that runs
    return x.grad_fn or get_gradient_edge(x).node


def _is_here(x: Tensor) -> bool:
    """Whether a functorch wrapper belongs to the current level.

    Level numbers are reused, so the kind of wrapper must match as well.
    """
    level = upstream.peek_interpreter_stack()
    if level is None or upstream.maybe_get_level(x) != level.level():
        return False
    return upstream.is_batchedtensor(x) == (level.key() == upstream.TransformType.Vmap)


def all_behind(nodes: Sequence[Any]) -> set[Any]:
    """These nodes and all of their ancestors."""
    seen: set[Any] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return seen


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
    from gradtools.torch.double_backward import Guard

    return Guard(caller, fun, leaves, survey, aliases).watching(again)


# --- derivatives taken inside a function ----------------------------------------------------

SPENT = "gradtools_spent"
_UNSPENT = [False]


class _OpenDerivatives(threading.local):
    """This thread's stack of derivatives whose functions are being evaluated."""

    def __init__(self) -> None:
        self.opened: list[OpenDerivative] = []


here = _OpenDerivatives()


def is_spent(x: Tensor) -> bool:
    """Whether x is an alias of a finished call. Such aliases do not count as captured tensors."""
    return getattr(x, SPENT, _UNSPENT)[0]


class OpenDerivative(NamedTuple):
    """A derivative whose function is being evaluated.

    Attributes:
        aliases: The tensors at which the function is evaluated.
        entered: The indices of those on which an inner derivative depends.
        constant: The indices of those that reach an inner derivative which is constant in them.
        before: For each outer function its `entered` when this evaluation began.
        spent: Whether the call is finished, one flag shared by all aliases.
        leaves: The tensors of which these are aliases.
    """

    aliases: Sequence[Tensor]
    entered: set[int]
    constant: set[int]
    before: list[set[int]]
    spent: list[bool]
    leaves: Sequence[Tensor]

    def cut(self, grads: Sequence[Tensor | None], outs: Sequence[Tensor]) -> list[int]:
        """The unreached leaves on which an inner derivative depends: cut after it."""
        if not self.entered:
            return []
        lost = [i for i in sorted(self.entered) if grads[i] is None]
        return [i for i in lost if i not in self._led_to(outs)] if lost else lost

    def _led_to(self, outs: Sequence[Tensor]) -> set[int]:
        """The aliases in the graph of outs: one without a gradient has a zero on its path."""
        nodes = graph_of(outs)
        return {i for i, x in enumerate(self.aliases) if node_of(x) in nodes}

    def filled(self, grads: Sequence[Tensor | None], outs: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients, with zeros for leaves in which inner derivatives are constant."""
        if not (self.entered or self.constant):
            return list(grads)
        lost = {i for i in self.entered if grads[i] is None}
        zero = self.constant - self.entered
        zero |= lost & self._led_to(outs) if lost else lost
        return [
            torch.zeros_like(self.aliases[i], requires_grad=False) if g is None and i in zero else g
            for i, g in enumerate(grads)
        ]


SOURCE = "_gradtools_source"
"""The attribute of an alias with a reference to the parameter."""


def parameters_of(leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The parameter that each leaf is, or is an alias of; None for other tensors."""
    around = {id(a): x for o in here.opened for a, x in zip(o.aliases, o.leaves, strict=True)}
    result: list[Tensor | None] = []
    for x in leaves:
        x = around.get(id(x), x)
        reference = getattr(x, SOURCE, None)
        p = x if reference is None else reference()
        result.append(p if isinstance(p, torch.nn.Parameter) else None)
    return result


class ReadsElsewhere(TorchFunctionMode):
    """Notes whether a function reads a parameter that it is differentiated at as an argument.

    In forward mode no graph shows it, and the tangent would be zero.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self.found = False
        self._ids = {id(p) for p in parameters_of(leaves) if p is not None and p.requires_grad}

    def __enter__(self) -> ReadsElsewhere:
        if self._ids:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._ids:
            super().__exit__(*error)

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.found and torch.is_grad_enabled() and fun.__name__ != "__get__":
            for x in (*args, *kwargs.values()):
                several = x if isinstance(x, list | tuple) else (x,)
                self.found = self.found or any(id(y) in self._ids for y in several)
        return fun(*args, **kwargs) if kwargs else fun(*args)


def refuse_read_elsewhere(
    fun: Any, outs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:
    """Raises if outs depend on a parameter by another reference than the leaf.

    For example a loss that closes over a submodule of the module argument.
    """
    lost: dict[int, int] = {}
    for i, p in enumerate(parameters_of(leaves)):
        if grads[i] is None and p is not None:
            lost[id(p)] = i
    if not lost:
        return

    def refuse(outs: Sequence[Tensor]) -> None:
        for node in nodes_of(tracked([unwrapped(y) for y in outs])):
            if type(node) is upstream.AccumulateGrad and id(node.variable) in lost:
                i, paths = lost[id(node.variable)], getattr(fun, "paths", None)
                raise DisconnectedInputError(
                    f"{getattr(fun, 'caller', 'gradtools')}: f reads the parameter "
                    f"{paths[i] if paths else f'at leaf {i}'} by another reference (a module that "
                    "f closes over and an argument holds, say), so the gradient of the argument "
                    "would be zero there. In f, use the module that is passed as an argument, or "
                    "detach what is meant to be constant."
                )

    if not torch.is_grad_enabled() and any(map(is_wrapped, outs)):
        # The graph beneath torch.func's transforms is not recorded under no_grad.
        with put_back(fun, leaves), torch.enable_grad():
            outs = fun(*leaves)[0]
    refuse(outs)


def note_taken(
    outs: Sequence[Tensor],
    found: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    aliases: Sequence[Tensor],
    kept: bool,
    inside: OpenDerivative | None = None,
) -> None:
    """Records in all open derivatives which of their aliases an inner derivative depends on.

    outs: The outputs of the inner function.
    found: Their derivative at the leaves, whose aliases are in the graph of outs. It is constant in
        what the graph of outs reaches and its own graph does not.
    kept: Whether found has a graph.
    inside: The inner evaluation. Where this derivative is constant in an alias that entered one
        inside of it, the alias is not cut.
    """
    around = here.opened
    if not around:
        return
    befores = inside.before if inside is not None else []
    nodes = graph_of(outs)
    pairs = [(x, a) for x, a in zip(leaves, aliases, strict=True) if x.requires_grad]
    nodes |= graph_of([x for x, a in pairs if x is a or node_of(a) in nodes])
    moving = graph_of([g for g in found if g is not None]) if kept else nodes
    for each, before in zip_longest(around, befores[: len(around)]):
        for i, x in enumerate(each.aliases):
            node = node_of(x)
            if node is not None and node in moving:
                each.entered.add(i)
            elif node is not None and node in nodes:
                each.constant.add(i)
                if before is not None and i not in before:
                    each.entered.discard(i)


def tracked_in(nodes: set[Any], aliases: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with respect to which a graph may be differentiated again.

    aliases: The derivative's own aliases, which do not count if they are leaves.
    """
    own = {id(x) for x in aliases}
    leaves = [node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"]
    tensors = {id(x): x for x in leaves if id(x) not in own and not is_spent(x)}
    for x in (*aliases, *(x for opened in here.opened for x in opened.aliases)):
        if x.grad_fn is not None and x.grad_fn in nodes:
            tensors[id(x)] = x
    return list(tensors.values())


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
    "linearize for "
    "jvp, hvp(mode='reverse_over_reverse')."
)
