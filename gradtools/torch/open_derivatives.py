"""The derivatives whose functions are being evaluated, and what inner ones depend on.

A leaf that is cut from an inner derivative afterwards is distinguished from one on which that
derivative does not depend; and so are parameters that a function reads by another reference.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.errors import DisconnectedInputError
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import all_behind, graph_of, node_of, tracked
from gradtools.torch.compiling import is_compiling, nodes_of
from gradtools.torch.functorch_wrappers import unwrapped
from gradtools.torch.rerunning import copied, put_back

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped


def caller_of(fun: Fun) -> str:
    """The operator that the user called, if the function knows it."""
    return getattr(fun, "caller", "gradtools")


class _OpenHere(threading.local):
    """This thread's stacks of derivatives whose functions are being evaluated.

    Attributes:
        flags: Whether the function took a gradtools derivative itself, in eager mode.
        opened: The records of those that record a graph.
    """

    def __init__(self) -> None:
        self.flags: list[list[bool]] = []
        self.opened: list[OpenDerivative] = []


here = _OpenHere()
TRACED: list[list[bool]] = []  # the flags in a trace: dynamo can trace a list, but no thread-local
pushed_in_trace: list[bool] = []  # not empty while dynamo traces a function in forward mode


# --- whether a function takes a derivative itself ----------------------------------------


def open_flags() -> list[list[bool]]:
    """A stack of flags, one for each derivative whose function is being evaluated."""
    return TRACED if is_compiling() else here.flags


def watched(fun: Fun, xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], bool]:
    """f at xs, and whether it took a gradtools derivative itself."""
    flag = [False]
    still_open = open_flags()
    still_open.append(flag)
    try:
        outs, extras = fun(*xs)
    finally:
        still_open.pop()
    return outs, extras, flag[0]


# --- what inner derivatives depend on -----------------------------------------------------

SPENT = "gradtools_spent"
_UNSPENT = [False]


def is_spent(x: Tensor) -> bool:
    """Whether x is an alias of a finished call. Such aliases do not count as captured tensors."""
    return getattr(x, SPENT, _UNSPENT)[0]


class OpenDerivative(NamedTuple):
    """A derivative whose function is being evaluated; the context of the evaluation.

    Attributes:
        aliases: The tensors at which the function is evaluated.
        leaves: The tensors of which these are aliases.
        entered: The indices of those on which an inner derivative depends.
        constant: The indices of those that reach an inner derivative which is constant in them.
        before: For each outer function its `entered` when this evaluation began.
        spent: Whether the call is finished, one flag shared by all aliases.
    """

    aliases: Sequence[Tensor]
    leaves: Sequence[Tensor]
    entered: set[int]
    constant: set[int]
    before: list[set[int]]
    spent: list[bool]

    def __enter__(self) -> OpenDerivative:
        for alias in self.aliases:
            setattr(alias, SPENT, self.spent)
        around = here.opened
        if around:
            self.before[:] = [set(each.entered) for each in around]
        around.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        here.opened.pop()

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
        """The gradients, with zeros for leaves in which inner derivatives are constant.

        Forward mode in f may leave zeros without memory, which NumPy cannot read.
        """
        if not (self.entered or self.constant):
            return list(grads)
        lost = {i for i in self.entered if grads[i] is None}
        zero = self.constant - self.entered
        zero |= lost & self._led_to(outs) if lost else lost
        return [
            torch.zeros_like(self.aliases[i], requires_grad=False)
            if (i in zero if g is None else upstream.is_zero(g))
            else g
            for i, g in enumerate(grads)
        ]


def note_taken(
    outs: Sequence[Tensor],
    derivatives: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    aliases: Sequence[Tensor],
    kept: bool,
    inside: OpenDerivative | None = None,
) -> None:
    """Records in all open derivatives which of their aliases an inner derivative depends on.

    outs: The outputs of the inner function.
    derivatives: Those at the leaves, whose aliases are in the graph of outs. They are constant in
        what the graph of outs reaches and their own graph does not.
    kept: Whether they have a graph.
    inside: The inner evaluation. Where this derivative is constant in an alias that entered one
        inside of it, the alias is not cut.
    """
    around = here.opened
    if not around:
        return
    level = upstream.peek_interpreter_stack()
    if level is not None and level.key() == upstream.TransformType.Vmap:  # the rows of a Jacobian
        of_level = lambda x: upstream.maybe_get_level(x) == level.level()
        outs, derivatives = (
            [upstream.get_unwrapped(x) if of_level(x) else x for x in xs if x is not None]
            for xs in (outs, derivatives)
        )
        with upstream.temporarily_pop_interpreter_stack():
            return note_taken(outs, derivatives, leaves, aliases, kept, inside)
    befores = inside.before if inside is not None else []
    nodes = graph_of(outs)
    pairs = [(x, a) for x, a in zip(leaves, aliases, strict=True) if x.requires_grad]
    nodes |= graph_of([x for x, a in pairs if x is a or node_of(a) in nodes])
    moving = graph_of([g for g in derivatives if g is not None]) if kept else nodes
    for each, before in zip_longest(around, befores[: len(around)]):
        for i, x in enumerate(each.aliases):
            node = node_of(x)
            if node is not None and node in moving:
                each.entered.add(i)
            elif node is not None and node in nodes:
                each.constant.add(i)
                if before is not None and i not in before:
                    each.entered.discard(i)


def tracked_in(nodes: Sequence[Any], aliases: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with respect to which the graph behind nodes may be differentiated again.

    The graph ends at the aliases of open derivatives: what is behind one is reached through it.

    aliases: The derivative's own aliases, which do not count if they are leaves.
    """
    own, around = {id(x) for x in aliases}, [x for opened in here.opened for x in opened.aliases]
    ends = [x for x in (*aliases, *around) if x.grad_fn is not None]
    nodes = all_behind(nodes, {x.grad_fn for x in ends})
    leaves = [node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"]
    tensors = {id(x): x for x in leaves if id(x) not in own and not is_spent(x)}
    tensors |= {id(x): x for x in ends if x.grad_fn in nodes}
    return list(tensors.values())


# --- parameters that are read by another reference -----------------------------------------

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
    if not torch.is_grad_enabled() and any(map(is_wrapped, outs)):
        # The graph beneath torch.func's transforms is not recorded under no_grad.
        with put_back(fun, leaves), torch.enable_grad():
            outs = fun(*leaves)[0]
    for node in nodes_of(tracked([unwrapped(y) for y in outs])):
        if type(node) is upstream.AccumulateGrad and id(node.variable) in lost:
            i, paths = lost[id(node.variable)], getattr(fun, "paths", None)
            raise DisconnectedInputError(
                f"{caller_of(fun)}: f reads the parameter "
                f"{paths[i] if paths else f'at leaf {i}'} by another reference (a module that f "
                "closes over and an argument holds, say), so the gradient of the argument would be "
                "zero there. In f, use the module that is passed as an argument, or detach what is "
                "meant to be constant."
            )


# --- cut after an inner derivative, or unused ---------------------------------------------
#
# Neither reaches an output. A second run of f, whose effects are undone, shows the calls that take
# a tensor which depends on the leaf, and return none that does. If no call does so, nothing is cut.


def cut_in(fun: Fun, leaves: Sequence[Tensor], unreached: list[int]) -> list[int]:
    """Of the leaves on which an inner derivative depends, but no output: those that are cut.

    All of them if f does not run twice.
    """
    if not unreached:
        return unreached
    outer, here.opened = here.opened, []
    try:
        with (
            upstream.temporarily_clear_interpreter_stack(),  # the rows of a Jacobian
            put_back(fun, leaves),
            torch.enable_grad(),
        ):
            with upstream.DisableTorchFunction():  # another trial around this one sees no cut here
                xs = [copied(x) for x in leaves]
            with _WatchForCuts([xs[i] for i in unreached]) as cuts:
                fun(*xs)
    except Exception:  # the caller refuses, as if the run had shown each cut
        return unreached
    finally:
        here.opened = outer
    return [i for k, i in enumerate(unreached) if k in cuts.found]


class _WatchForCuts(TorchFunctionMode):
    """Notes which of some leaves are cut in a call.

    Attributes:
        found: The positions of these leaves.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        super().__init__()
        self.found: set[int] = set()
        self._behind: dict[Any, frozenset[int]] = {
            get_gradient_edge(x).node: frozenset([k])
            for k, x in enumerate(leaves)
            if x.requires_grad
        }

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if upstream.is_dispatch_key_excluded(upstream.DispatchKey.AutogradFunctionality):
            return fun(*args, **kwargs)  # a decomposition that autograd runs
        before = self._reached(upstream.tree_leaves((args, kwargs)))
        out = fun(*args, **kwargs)
        name = getattr(fun, "__name__", "")
        if name == "__get__":
            reads_value = getattr(fun.__self__, "__name__", "") == "data"
        else:  # others read shapes, dtypes or flags alone
            named = name in _METADATA or name.startswith(("is_", "_is_")) or name.endswith("_like")
            reads_value = not named
        # Constant results of a derivative that keeps its graph are no cut.
        keeps = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        if before and reads_value and not (fun is torch.autograd.grad and keeps):
            self.found |= before - self._reached(upstream.tree_leaves(out))
        return out

    def _reached(self, xs: Iterable[Any]) -> set[int]:
        """The leaves on which xs or their tangents depend, beneath wrappers of torch.func."""
        result: set[int] = set()
        with upstream.DisableTorchFunction():
            tensors = [unwrapped(x) for x in xs if isinstance(x, Tensor)]
            if upstream.forward_level() >= 0:  # a dual number may have a graph at its tangent alone
                tensors = [y for x in tensors for y in unpack_dual(x) if y is not None]
            for y in tensors:
                if y.requires_grad:
                    result |= self._leaves_behind(get_gradient_edge(y).node)
        return result

    def _leaves_behind(self, node: Any) -> frozenset[int]:
        """The leaves that a node leads to."""
        todo = [node]
        while todo:
            node = todo[-1]
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            left = [parent for parent in parents if parent not in self._behind]
            if node in self._behind or not left:
                todo.pop()
                behind = [self._behind[parent] for parent in parents if parent in self._behind]
                self._behind.setdefault(node, frozenset().union(*behind))
            else:
                todo += left
        return self._behind[node]


_METADATA = frozenset(
    "dim size stride numel nelement element_size storage_offset ndimension get_device has_names "
    "__len__ __hash__ __repr__ new_empty new_zeros new_ones new_full register_hook "
    "retain_grad".split()
)
