"""A walk over autograd's graph: its leaves, custom Functions, and nodes with wrong gradients.

One walk over the graph of a function's outputs finds its leaves, and the nodes that are no plain
operations of PyTorch's: those of custom code, whose own derivatives `double_backward.py` checks
where they are asked for, and those whose gradient PyTorch has wrong.

Here is also what a derivative taken inside a function depends on: so that what is cut from it
afterwards can be told from what is constant.
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

from gradtools.backend import Fun
from gradtools.errors import DisconnectedInputError, LostDerivativeError
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import COMPILED, LOST, nodes_of
from gradtools.torch.functorch_wrappers import unwrapped
from gradtools.torch.patches import scripts_called
from gradtools.torch.plain_programs.backward_nodes import (
    NORMS,
    WRONG,
    deviation_held,
    is_wrong,
    multiplies_by,
)
from gradtools.torch.rerunning import put_back

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped
OWN = ("gradtools.", upstream.COMPILED_CODE)
CPP_NODE = "CppFunction"  # nodes of many kinds, without types of their own
CPP_FUNCTION = "torch::autograd::CppNode<"


class Survey(NamedTuple):
    """What one walk over a graph finds.

    Attributes:
        leaves: The tensors at its ends.
        custom: Nodes of code that is not PyTorch's, nor gradtools' own.
        lost: Nodes of operators without a backward pass, where PyTorch only warns; and those that
            take a deviation for a constant, as in PyTorch's own vmap of a normalisation's gradient.
        wrong: Nodes of operations whose gradient PyTorch has wrong.
        hooked: Whether hooks were set where it was made.
        compiled: Nodes of compiled code, whose backward passes lose derivatives.
        norms: Nodes of normalisations.
    """

    leaves: list[Tensor]
    custom: list[Any]
    lost: list[Any]
    wrong: list[Any]
    compiled: list[Any]
    norms: list[Any]
    hooked: bool = False


_PLAIN: set[type] = set()  # PyTorch's own nodes


def surveyed(outs: Sequence[Tensor]) -> Survey:
    """The graph of outs."""
    result, plain, accumulates = Survey([], [], [], [], [], []), _PLAIN, upstream.AccumulateGrad
    todo: list[Any] = []
    for y in outs:
        if y.requires_grad:
            todo.append(y.grad_fn or get_gradient_edge(y).node)
    seen = set(todo)
    for node in todo:  # as `nodes_of`, at every derivative
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
    deviations = {at for at in map(deviation_held, result.norms) if at}
    if deviations:
        result.lost.extend([node for node in todo if multiplies_by(node, deviations)])
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
        if kind.__name__ in NORMS:
            found.norms.append(node)
        if is_wrong(node):
            found.wrong.append(node)
    elif kind.__name__ != CPP_NODE:
        _PLAIN.add(kind)
    elif node.name() == "torch::autograd::WarnNotImplemented":
        found.lost.append(node)
    elif is_cpp_function(node) or is_torchscript(node):
        found.custom.append(node)


def is_cpp_function(node: Any) -> bool:
    """Whether a node is of a torch::autograd::Function that is written in C++."""
    return type(node).__name__ == CPP_NODE and node.name().startswith(CPP_FUNCTION)


def is_torchscript(node: Any) -> bool:
    """Whether a node is the backward pass of a piece of TorchScript."""
    return type(node).__name__ == CPP_NODE and node.name().startswith("torch::jit::")


def tracked(xs: Sequence[Tensor]) -> list[Tensor]:
    """Those that require grad."""
    return [x for x in xs if x.requires_grad]


def graph_of(outs: Sequence[Tensor]) -> set[Any]:
    """The nodes of the graph of outs."""
    return all_behind([node_of(y) for y in outs if y.requires_grad])


def node_of(x: Tensor) -> Any:
    """The node that ends in x; None if x is of another level of functorch than what runs."""
    if not x.requires_grad or (is_wrapped(x) and not _is_here(x)):
        return None
    if x.grad_fn is None and not is_wrapped(x) and upstream.peek_interpreter_stack() is not None:
        return None  # a leaf outside of the transform that runs
    return x.grad_fn or get_gradient_edge(x).node


def _is_here(x: Tensor) -> bool:
    """Whether a tensor of functorch's belongs to the level that runs, or is mapped in it.

    Levels are numbered as they begin: another one may have had this number.
    """
    level = upstream.peek_interpreter_stack()
    if level is None or upstream.maybe_get_level(x) != level.level():
        return False
    return upstream.is_batchedtensor(x) == (level.key() == upstream.TransformType.Vmap)


def all_behind(nodes: Sequence[Any]) -> set[Any]:
    """These nodes, and all that lead to them."""
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
    """Around a pullback: what custom code loses is refused, and what PyTorch has wrong is right.

    None where there is neither.

    again: Whether its result may be differentiated.
    """
    if not (survey.lost or survey.wrong or (again and survey.custom)):
        return None
    from gradtools.torch.double_backward import Guard

    return Guard(caller, fun, leaves, survey, aliases).watching(again)


# --- derivatives taken inside a function ----------------------------------------------------

SPENT = "gradtools_spent"
_UNSPENT = [False]


class _OpenDerivatives(threading.local):
    """The derivatives of this thread whose functions are being evaluated, the innermost last."""

    def __init__(self) -> None:
        self.opened: list[OpenDerivative] = []


here = _OpenDerivatives()


def is_spent(x: Tensor) -> bool:
    """Whether x is an alias of a derivative whose function was evaluated.

    Aliases of a finished call do not count as captured: no other result stays attached for them.
    """
    return getattr(x, SPENT, _UNSPENT)[0]


class OpenDerivative(NamedTuple):
    """A derivative whose function is being evaluated.

    Attributes:
        aliases: The tensors at which it is.
        entered: Which of these reach a derivative taken inside.
        constant: Which of these reach one that is constant.
        before: Which had entered one in the functions around when this one began.
        spent: Whether the aliases are spent, one flag that all of them hold.
        leaves: What the aliases stand for.
    """

    aliases: Sequence[Tensor]
    entered: set[int]
    constant: set[int]
    before: list[set[int]]
    spent: list[bool]
    leaves: Sequence[Tensor]

    def cut(self, grads: Sequence[Tensor | None], outs: Sequence[Tensor]) -> list[int]:
        """Of what is not reached, what entered a derivative: it was cut afterwards."""
        if not self.entered:
            return []
        lost = [i for i in sorted(self.entered) if grads[i] is None]
        return [i for i in lost if i not in self._led_to(outs)] if lost else lost

    def _led_to(self, outs: Sequence[Tensor]) -> set[int]:
        """What the graph of outs leads to: if no gradient comes, it is zero on the way."""
        nodes = graph_of(outs)
        return {i for i, x in enumerate(self.aliases) if node_of(x) in nodes}

    def filled(self, grads: Sequence[Tensor | None], outs: Sequence[Tensor]) -> list[Tensor | None]:
        """Zeros for what is not reached because a derivative inside is constant."""
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
"""The attribute of an alias that a derivative is taken at: refers to the parameter."""


def refuse_read_elsewhere(
    fun: Any, outs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:
    """Raises for a parameter that outs depend on by another reference than the leaf.

    A loss that closes over a module and is differentiated at a module that holds it, say.
    """
    around = {id(a): x for o in here.opened for a, x in zip(o.aliases, o.leaves, strict=True)}
    lost: dict[int, int] = {}
    for i, x in enumerate(leaves):
        x = around.get(id(x), x)
        reference = getattr(x, SOURCE, None)
        p = x if reference is None else reference()
        if grads[i] is None and isinstance(p, torch.nn.Parameter):
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
    """Notes, where a function is being evaluated, what a derivative that it takes depends on.

    found: The derivative of outs at the leaves, which stand under the names `aliases` in outs'
        graph. What that graph reaches and its own does not is constant.
    kept: Whether found has a graph.
    inside: The evaluation of outs: what entered a derivative there, of which this one is constant,
        is not cut.
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
    """The tensors with respect to which somebody may differentiate a graph again.

    aliases: Leaves that belong to the derivative itself are not among them.
    """
    own = {id(x) for x in aliases}
    leaves = [node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"]
    result = {id(x): x for x in leaves if id(x) not in own and not is_spent(x)}
    for x in (*aliases, *(x for opened in here.opened for x in opened.aliases)):
        if x.grad_fn is not None and x.grad_fn in nodes:
            result[id(x)] = x
    return list(result.values())


# --- TorchScript ----------------------------------------------------------------------------


def refuse_torchscript(caller: str, outs: Sequence[Tensor]) -> None:
    """Raises if a function that was pushed along, or entered by torch.func, holds TorchScript."""
    beneath = [unwrapped(y) for y in outs if is_wrapped(y)]
    if any(is_torchscript(node) for node in nodes_of(tracked([*outs, *beneath]))):
        raise LostDerivativeError(f"{caller}: {TORCHSCRIPT_LOSES}")


def scripts_refused(caller: str) -> AbstractContextManager[None]:
    """Around a function that is pushed along once more: no call of TorchScript may make a node."""

    def around(script: Any, call: Any, args: Any, kwargs: Any) -> Any:
        before = nodes_made()
        out = call(*args, **kwargs)
        if nodes_made() != before:
            raise LostDerivativeError(f"{caller}: {TORCHSCRIPT_LOSES}")
        return out

    return scripts_called(around)


# How many nodes this thread has made: TorchScript makes them under no_grad, too.
nodes_made = upstream.nodes_made
TORCHSCRIPT_LOSES = (
    "f holds a function of TorchScript (torch.jit), in which PyTorch loses tangents, and second "
    "derivatives inside of torch.func's transforms, without an error (torch#73972). Call the "
    "function that was scripted or traced; or stay in reverse mode outside of torch.func: "
    "linearize for "
    "jvp, hvp(mode='reverse_over_reverse')."
)
