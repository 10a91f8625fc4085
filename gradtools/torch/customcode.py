"""autograd.Functions without double backward: a derivative that would be lost is refused by name.

A torch.autograd.Function, or an operator with a registered backward, may compute its gradient
where autograd does not look: under no_grad, through NumPy, from an intermediate that it saved. The
gradient is right then, and its own derivative is zero or lacks a term, in silence. So a class is
never trusted: it is tried (trials.py), once, when a derivative of its gradient may be asked for.
What it loses, and what cannot be tried, is refused by a node beside the gradient, a gate, that the
engine enters only on its way to what is lost. A constant gradient (of a linear map, a mask, a
straight-through estimator) loses nothing.

Here is also what a derivative taken inside a function depends on: so that what is cut from it
afterwards can be told from what is constant.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.errors import GradtoolsError, LostDerivativeError
from gradtools.torch import _upstream as upstream
from gradtools.torch.checking import value_of
from gradtools.torch.compiling import LOST, nodes_of
from gradtools.torch.gates import beside
from gradtools.torch.trials import Trial, Untried, standing_in, told
from gradtools.torch.wrappers import unwrapped
from gradtools.torch.wrong_gradients import WRONG, is_wrong, rightly

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped
Args = tuple[Any, ...]
_OWN = ("gradtools.", upstream.COMPILED_CODE)


# --- what a graph holds ------------------------------------------------------------------


class Survey(NamedTuple):
    """What one walk over a graph finds.

    Attributes:
        leaves: The tensors at its ends.
        custom: Nodes of code that is not PyTorch's, nor gradtools' own.
        lost: Nodes of operators without a backward pass, where PyTorch only warns.
        wrong: Nodes of operations whose gradient PyTorch has wrong.
        compiled: Backward passes of compiled code, which lose derivatives.
    """

    leaves: list[Tensor]
    custom: list[Any]
    lost: list[Any]
    wrong: list[Any]
    compiled: list[Any]


_PLAIN: set[type] = set()  # PyTorch's own nodes


def surveyed(outs: Sequence[Tensor]) -> Survey:
    """The graph of outs."""
    found, plain = Survey([], [], [], [], []), _PLAIN
    todo = [y.grad_fn or get_gradient_edge(y).node for y in outs if y.requires_grad]
    seen = set(todo)
    while todo:  # as `nodes_of`, at every derivative
        node = todo.pop()
        kind = type(node)
        if kind not in plain:
            _note(found, node, kind)
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return found


def _note(found: Survey, node: Any, kind: Any) -> None:
    if kind.__name__ == "AccumulateGrad":
        found.leaves.append(node.variable)
    elif kind.__name__ == LOST:
        found.compiled.append(node)
    elif issubclass(kind, BackwardCFunction):
        if not upstream.forward_class(kind).__module__.startswith(_OWN):
            found.custom.append(node)
    elif kind.__name__ in WRONG:
        if is_wrong(node):
            found.wrong.append(node)
    elif kind.__name__ != _COMPILED:
        _PLAIN.add(kind)
    elif node.name() == "torch::autograd::WarnNotImplemented":
        found.lost.append(node)
    elif _is_cpp_function(node) or _is_torchscript(node):
        found.custom.append(node)


_COMPILED = "CppFunction"  # nodes of many kinds, without types of their own


def _is_cpp_function(node: Any) -> bool:
    """Whether a node is of a torch::autograd::Function that is written in C++."""
    return type(node).__name__ == _COMPILED and node.name().startswith(_CPP_FUNCTION)


def _is_torchscript(node: Any) -> bool:
    """Whether a node is the backward pass of a piece of TorchScript."""
    return type(node).__name__ == _COMPILED and node.name().startswith("torch::jit::")


def _tracked(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in xs if x.requires_grad]


def _graph(outs: Sequence[Tensor]) -> set[Any]:
    return _upstream([_node_of(y) for y in outs if y.requires_grad])


def _node_of(x: Tensor) -> Any:
    """The node that ends in x; None if x is of another level of functorch than what runs."""
    if not x.requires_grad or (is_wrapped(x) and not _is_here(x)):
        return None
    return x.grad_fn or get_gradient_edge(x).node


def _is_here(x: Tensor) -> bool:
    """Whether a tensor of functorch's belongs to the level that runs, or is mapped in it."""
    level = upstream.peek_interpreter_stack()
    return level is not None and upstream.maybe_get_level(x) == level.level()


def _upstream(nodes: Sequence[Any]) -> set[Any]:
    seen: set[Any] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return seen


def _tracked_in(nodes: set[Any], aliases: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with respect to which somebody may differentiate a graph again.

    aliases: Leaves that belong to the derivative itself are not among them.
    """
    own = {id(x) for x in aliases}
    leaves = [node.variable for node in nodes if type(node).__name__ == "AccumulateGrad"]
    found = {id(x): x for x in leaves if id(x) not in own and not is_spent(x)}
    for x in (*aliases, *(x for opened in being_evaluated() for x in opened.aliases)):
        if x.grad_fn is not None and x.grad_fn in nodes:
            found[id(x)] = x
    return list(found.values())


_SPENT = "gradtools_spent"
_here = threading.local()


def spend(aliases: Sequence[Tensor], spent: bool) -> None:
    """Nobody asks for a spent alias: it is no reason for another result to stay attached."""
    for alias in aliases:
        setattr(alias, _SPENT, spent)


def is_spent(x: Tensor) -> bool:
    """Whether x is an alias of a derivative whose function was evaluated."""
    return getattr(x, _SPENT, False)


class OpenDerivative(NamedTuple):
    """A derivative whose function is being evaluated.

    Attributes:
        aliases: The tensors at which it is.
        entered: Which of these reach a derivative taken inside.
        constant: Which of these reach one that is constant.
        before: Which had entered one in the functions around when this one began.
    """

    aliases: Sequence[Tensor]
    entered: set[int]
    constant: set[int]
    before: list[set[int]]

    def cut(self, grads: Sequence[Tensor | None], outs: Sequence[Tensor]) -> list[int]:
        """Of what is not reached, what entered a derivative: it was cut afterwards."""
        if not self.entered:
            return []
        lost = [i for i in sorted(self.entered) if grads[i] is None]
        return [i for i in lost if i not in self._led_to(outs)] if lost else lost

    def _led_to(self, outs: Sequence[Tensor]) -> set[int]:
        """What the graph of outs leads to: if no gradient comes, it is zero on the way."""
        nodes = _graph(outs)
        return {i for i, x in enumerate(self.aliases) if _node_of(x) in nodes}

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


def being_evaluated() -> list[OpenDerivative]:
    """The derivatives of this thread whose functions are being evaluated, the innermost last."""
    try:
        return _here.opened  # type: ignore[no-any-return]
    except AttributeError:
        _here.opened = []
        return _here.opened


def begun(aliases: Sequence[Tensor], around: Sequence[OpenDerivative]) -> OpenDerivative:
    """A derivative whose function is about to be evaluated, inside of others."""
    before = [set(each.entered) for each in around] if around else []
    return OpenDerivative(aliases, set(), set(), before)


@contextmanager
def opened(aliases: Sequence[Tensor]) -> Iterator[OpenDerivative]:
    """Inside, a function is evaluated at the aliases."""
    around = being_evaluated()
    around.append(begun(aliases, around))
    try:
        yield around[-1]
    finally:
        around.pop()


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
    around = being_evaluated()
    if not around:
        return
    befores = inside.before if inside is not None else []
    nodes = _graph(outs)
    pairs = [(x, a) for x, a in zip(leaves, aliases, strict=True) if x.requires_grad]
    nodes |= _graph([x for x, a in pairs if x is a or _node_of(a) in nodes])
    moving = _graph([g for g in found if g is not None]) if kept else nodes
    for each, before in zip_longest(around, befores[: len(around)]):
        for i, x in enumerate(each.aliases):
            node = _node_of(x)
            if node is not None and node in moving:
                each.entered.add(i)
            elif node is not None and node in nodes:
                each.constant.add(i)
                if before is not None and i not in before:
                    each.entered.discard(i)


# --- gates at custom code ----------------------------------------------------------------


_NOTHING = nullcontext()


def guarded(
    asked: str,
    fun: Fun,
    leaves: Sequence[Tensor],
    survey: Survey,
    aliases: Sequence[Tensor],
    again: bool,
) -> AbstractContextManager[None]:
    """Around a pullback: what custom code loses is refused, and what PyTorch has wrong is right.

    again: Whether its result may be differentiated.
    """
    if not (survey.lost or survey.wrong or (again and survey.custom)):
        return _NOTHING
    return _Guard(asked, fun, leaves, survey, aliases).watching(again)


def refuse_lossy(asked: str, fun: Fun, leaves: Sequence[Tensor], survey: Survey) -> None:
    """Raises if custom code loses what its gradient depends on at the arguments."""
    for node in survey.custom:
        key = _key_of(node)
        _Gating(asked, key, partial(_tried, fun, leaves, key), ()).ask("inputs")


@dataclass(frozen=True, eq=False, repr=False)
class _Guard:
    """What is needed to ask about the custom code in the graph of one evaluation.

    Attributes:
        asked: The operator that the user called.
        fun: What was evaluated, at these leaves.
        survey: Its graph.
        aliases: The leaves' names in that graph.
    """

    asked: str
    fun: Fun
    leaves: Sequence[Tensor]
    survey: Survey
    aliases: Sequence[Tensor]

    @contextmanager
    def watching(self, again: bool) -> Iterator[None]:
        """Inside, a pullback runs. again: Whether its result may be differentiated."""
        handles = [node.register_prehook(self._refusing) for node in self.survey.lost]
        if again:
            nodes = [node for node in self.survey.custom if not _is_fine(node)]
            handles += [node.register_hook(self._gate(node)) for node in nodes]
        try:
            with rightly(self.survey.wrong):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _refusing(self, cts: Any) -> None:
        raise GradtoolsError(
            f"{self.asked}: f holds an operator without a backward pass (PyTorch's own message "
            "names it, once, in a warning: no autograd kernel was registered), so a term of the "
            "gradient is lost. Give the operator a backward by torch.library.register_autograd, "
            "or wrap it in gt.custom_rule; if it is a constant, call it under torch.no_grad."
        )

    def _gate(self, node: Any) -> Callable[[Any, Any], Any]:
        key = _key_of(node)
        tried = partial(_tried, self.fun, self.leaves, key)
        return _Gating(self.asked, key, tried, self.aliases).hook(node)


class _Gating(NamedTuple):
    """Puts gates beside what a node of custom code gives.

    Attributes:
        asked: The operator that the user called.
        key: The class.
        tried: What it loses, by a trial; its argument is whether in forward mode.
        aliases: Leaves that belong to the derivative itself.
    """

    asked: str
    key: _Key
    tried: Callable[[bool], set[str]]
    aliases: Sequence[Tensor]

    def hook(self, node: Any) -> Callable[[Any, Any], Any]:
        """What is registered with the node."""
        parents = [parent for parent, _ in node.next_functions]

        def hook(given: Any, cts: Any) -> Any:
            there = [g for g in given if isinstance(g, Tensor)]
            if not there or self.key.fine(upstream.forward_level() >= 0):
                return None
            if upstream.forward_level() >= 0:
                self.ask("inputs", forward=True)
                self.ask("cotangents", forward=True)
            if not torch.is_grad_enabled():
                return None
            behind = [ct for ct in cts if isinstance(ct, Tensor) and ct.requires_grad]
            inputs = _tracked_in(_upstream(parents), self.aliases)
            constant = not any(g.requires_grad for g in there)
            # A gate would make of a constant something that leads on.
            if constant and (behind or inputs) and not self._may_lose():
                return None
            for which, sources in (("cotangents", behind), ("inputs", inputs)):
                if sources:
                    there = list(beside(there, sources, partial(self.ask, which)))
            left = iter(there)
            return tuple([next(left) if isinstance(g, Tensor) else g for g in given])

        return hook

    def _may_lose(self) -> bool:
        fine = self.key.fine(False)
        if fine is not None:
            return not fine
        try:
            return bool(self.tried(False))
        except Untried:
            return True

    def ask(self, which: str, forward: bool = False) -> None:
        """Raises if the derivative along these is lost, or may be."""
        if not self.key.fine(forward):
            _ask(self.asked, self.key, which, partial(self.tried, forward))


@dataclass(frozen=True, eq=False, repr=False)
class Called:
    """A call of a torch.autograd.Function, of which is asked later what its gradient loses.

    Attributes:
        node: Its node in autograd's graph.
        kind: The class.
        apply: What calls it.
        args: What it was given.
    """

    node: Any
    kind: Any
    apply: Any
    args: Args

    def loses(self, outs: Sequence[Tensor], leaf: Tensor) -> bool:
        """Whether the gradient of outs at a leaf loses here how it depends on the call's inputs."""
        if self.node not in _graph(outs) or _node_of(leaf) not in _upstream([self.node]):
            return False
        key = _Key(self.kind, tuple(self.node.needs_input_grad))
        if key.fine(False):
            return False
        try:
            return "inputs" in _noted(Trial.of(self.apply, self.args), key, False)
        except Untried:  # nobody is blamed for what cannot be seen
            return False


@contextmanager
def gated_calls(asked: str, aliases: Sequence[Tensor]) -> Iterator[None]:
    """Inside, a function runs whose graph is differentiated again: its custom code gets gates.

    For functions that cannot run once more by themselves: each call is tried at its arguments.
    """

    def gated(kind: Any, beneath: Any, args: Args) -> Any:
        out = beneath(*args)
        key = _Key(kind, tuple([isinstance(x, Tensor) and x.requires_grad for x in args]))
        outs = out if isinstance(out, tuple | list) else (out,)
        nodes: list[Any] = [y.grad_fn for y in outs if isinstance(y, Tensor) and y.requires_grad]
        if nodes and not kind.__module__.startswith(_OWN) and not key.fine(False):
            trial = Trial.of(beneath, args)
            nodes[0].register_hook(
                _Gating(asked, key, partial(_noted, trial, key), aliases).hook(nodes[0])
            )
        return out

    with standing_in(gated):
        yield


def gate_compiled(asked: str, outs: Sequence[Tensor], aliases: Sequence[Tensor]) -> None:
    """Gates for a graph of such a function at what is written in C++: its calls are not seen."""

    def tried(key: _Key, forward: bool) -> set[str]:
        raise Untried("it is written in C++, and is called in what gradtools runs by itself")

    for node in surveyed(outs).custom:
        if type(node).__name__ == _COMPILED and not _is_fine(node):
            key = _key_of(node)
            node.register_hook(_Gating(asked, key, partial(tried, key), aliases).hook(node))


def refuse_torchscript(asked: str, outs: Sequence[Tensor]) -> None:
    """Raises if a function that was pushed along, or entered by torch.func, holds TorchScript."""
    beneath = [unwrapped(y) for y in outs if is_wrapped(y)]
    if any(_is_torchscript(node) for node in nodes_of(_tracked([*outs, *beneath]))):
        raise LostDerivativeError(f"{asked}: {_TORCHSCRIPT_LOSES}")


@contextmanager
def scripts_refused(asked: str) -> Iterator[None]:
    """Inside, where a function is pushed along once more: a call of TorchScript that makes a node.

    No mode sees these calls, so this stands in their classes, for as long as it lasts.
    """
    thread = threading.get_ident()

    def standing_in_for(call: Any) -> Any:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = nodes_made()
            out = call(self, *args, **kwargs)
            if nodes_made() != before and threading.get_ident() == thread:
                raise LostDerivativeError(f"{asked}: {_TORCHSCRIPT_LOSES}")
            return out

        return called

    classes: tuple[Any, ...] = (torch.jit.ScriptFunction, torch.ScriptMethod)
    calls = [kind.__call__ for kind in classes]
    try:
        for kind, call in zip(classes, calls, strict=True):
            kind.__call__ = standing_in_for(call)
        yield
    finally:
        for kind, call in zip(classes, calls, strict=True):
            kind.__call__ = call


# How many nodes this thread has made: TorchScript makes them under no_grad, too.
nodes_made = upstream.nodes_made
_TORCHSCRIPT_LOSES = (
    "f holds a function of TorchScript (torch.jit), in which PyTorch loses tangents, and second "
    "derivatives inside of torch.func's transforms, in silence (torch#73972). Call the function "
    "that was scripted or traced; or stay in reverse mode outside of torch.func: linearize for "
    "jvp, hvp(mode='reverse_over_reverse')."
)


def _ask(asked: str, key: _Key, which: str, tried: Callable[[], set[str]]) -> None:
    """Raises if a class loses the derivative of its gradient along these, or cannot be tried."""
    if key == _TORCHSCRIPT:
        raise LostDerivativeError(f"{asked}: {_TORCHSCRIPT_LOSES}")
    try:
        lost = which in tried()
    except Untried as why:
        raise LostDerivativeError(
            f"{asked}: f holds {key.name}, whose gradient is to be differentiated with respect to "
            f"its {which}. PyTorch may lose that in silence, so a class is tried once, by finite "
            f"differences, and this one could not be: {why}. Use gt.custom_rule; or take a second "
            "derivative of it once where it can be tried, by a call that may be repeated and near "
            "arguments that it takes, which gradtools remembers."
        ) from why
    if lost:
        raise LostDerivativeError(_message(asked, key, which))


def _message(asked: str, key: _Key, which: str) -> str:
    return (
        f"{asked}: f holds {key.name}, whose backward gives a gradient that autograd cannot "
        f"differentiate with respect to its {which} (it is marked once_differentiable, computes "
        "under no_grad or outside of PyTorch, or uses a detached tensor or a saved intermediate, "
        "torch#76185), so that a second derivative is lost. Write backward of PyTorch's operations "
        "on saved inputs and outputs, or use gt.custom_rule."
    )


class _Calls(TorchFunctionMode):
    """The same inside functorch's transforms, whose graphs do not show what they are made of."""

    def __init__(self, asked: str) -> None:
        super().__init__()
        self.asked = asked

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        """The function; a custom one gets a hook on its node."""
        out = fun(*args, **(kwargs or {}))
        if fun is upstream.custom_function_call and not args[0].__module__.startswith(_OWN):
            self._note(args[0], args[1:], out)
        return out

    def _note(self, kind: Any, args: Args, out: Any) -> None:
        outs = out if isinstance(out, tuple | list) else (out,)
        nodes: list[Any] = [y.grad_fn for y in outs if isinstance(y, Tensor) and y.requires_grad]
        key = _Key(kind, tuple([isinstance(x, Tensor) and x.requires_grad for x in args]))
        if not nodes or key.fine(False):
            return
        again = any(_is_tracked_beneath(x) for x, n in zip(args, key.needs, strict=True) if n)
        call = tuple([value_of(x) if isinstance(x, Tensor) else x for x in args])
        if any(isinstance(x, Tensor) and x.is_meta for x in args):
            return  # which has no numbers

        def hook(given: Any, cts: Any) -> None:
            behind = any(isinstance(ct, Tensor) and ct.requires_grad for ct in cts)
            for which, asked in (("inputs", again), ("cotangents", behind)):
                if asked:
                    _ask(self.asked, key, which, partial(self._lost, key, call))

        nodes[0].register_hook(hook)

    def _lost(self, key: _Key, call: Args) -> set[str]:
        if any(x is None and needed for x, needed in zip(call, key.needs, strict=True)):
            raise Untried("inside of torch.func a tensor of a subclass hides its numbers")
        with upstream.temporarily_clear_interpreter_stack(), torch.enable_grad():
            pairs = zip(call, key.needs, strict=True)
            args = tuple([x.clone().requires_grad_() if needed else x for x, needed in pairs])
            return _noted(Trial.of(key.kind.apply, args), key, False)


def calls_guarded(asked: str) -> AbstractContextManager[Any]:
    """Around a function that functorch differentiates, where that is differentiated again."""
    modes = upstream.function_modes()
    return _NOTHING if any(isinstance(mode, _Calls) for mode in modes) else _Calls(asked)


def _is_tracked_beneath(x: Tensor) -> bool:
    """Whether another derivative is being taken with respect to x than the innermost one."""
    levels = upstream.get_interpreter_stack() or ()
    if any(level.key() == upstream.TransformType.Jvp for level in levels[:-1]):
        return True
    while is_wrapped(x):
        x = upstream.get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


# --- is a class's backward differentiable? -----------------------------------------------


@dataclass(frozen=True)
class _Key:
    """A class, and which of its arguments were differentiated."""

    kind: Any
    needs: tuple[bool, ...]

    @property
    def name(self) -> str:
        """What an author calls it."""
        if isinstance(self.kind, _CppFunction):
            return f"the C++ torch::autograd::Function {self.kind.name}"
        name = self.kind.__name__
        if not name.startswith(_GENERATED):
            return f"the torch.autograd.Function {name}"
        return f"the custom operator {name.removeprefix(_GENERATED).rpartition('_')[0]}"

    @property
    def unseen(self) -> str:
        """Why no call of it was seen."""
        if isinstance(self.kind, _CppFunction):
            return (
                "evaluated a second time, f calls no operator of torch.ops in whose graph it is "
                "(what is bound to Python in another way is not seen; bind it by TORCH_LIBRARY)"
            )
        return "evaluated a second time, f does not call it in this thread"

    def fine(self, forward: bool) -> bool | None:
        """Whether it was tried, and lost nothing; None if it was not."""
        if self == _TORCHSCRIPT:
            return not forward
        return _SEEN.get(self.kind, {}).get((self.needs, forward))

    def note(self, fine: bool, forward: bool) -> None:
        """Remembers that."""
        _SEEN.setdefault(self.kind, {})[self.needs, forward] = fine


@dataclass(frozen=True)
class _CppFunction:
    """A class that is written in C++, of which Python sees the name."""

    name: str


_TORCHSCRIPT = _Key(_CppFunction("TorchScript"), ())
_cpp_function = cache(_CppFunction)  # one for each name, which stays
_CPP_FUNCTION = "torch::autograd::CppNode<"
_GENERATED = "GeneratedBackwardFor_"
# What was seen of a class: whether it is fine. One that is not is tried again where it matters,
# for a class that is handed functions may lose the derivative of one and not of another.
_SEEN: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


def _key_of(node: Any) -> _Key:
    if _is_torchscript(node):
        return _TORCHSCRIPT
    if type(node).__name__ == _COMPILED:
        return _Key(_cpp_function(node.name().removeprefix(_CPP_FUNCTION)[:-1]), ())
    return _Key(upstream.forward_class(type(node)), tuple(node.needs_input_grad))


def _is_fine(node: Any) -> bool:
    forward = upstream.forward_level() >= 0
    return _key_of(node).fine(forward) is True


def _noted(trial: Trial, key: _Key, forward: bool) -> set[str]:
    """What a call loses, which is remembered of its class."""
    found = trial.lost(forward)
    if found is not None:
        key.note(not found, forward)
    return found or set()


def _tried(fun: Fun, leaves: Sequence[Tensor], key: _Key, forward: bool) -> set[str]:
    """What is lost by calls of a class in fun, which runs once more: its effects are undone.

    Raises:
        Untried: No call could be tried.
    """
    from gradtools.torch.seeing import rerun

    found: list[set[str] | None] = []
    why: list[str] = []

    def tried(beneath: Any, args: Args) -> None:
        if torch.is_grad_enabled() and len(found) < _CALLS:
            try:
                found.append(Trial.of(beneath, args).lost(forward))
            except Untried as error:
                why.append(str(error))

    def called(kind: Any, beneath: Any, args: Args) -> Any:
        needs = tuple([isinstance(x, Tensor) and x.requires_grad for x in args])
        if kind is key.kind and needs == key.needs[: len(needs)]:
            tried(beneath, args)
        return beneath(*args)

    try:
        with (
            standing_in(called),
            _OperatorCalls(key, tried),
            upstream.temporarily_clear_interpreter_stack(),
        ):
            rerun(lambda xs: fun(*xs)[0], leaves)
    except Exception as error:
        why.append(f"evaluated a second time, f raises {told(error)}")
    if not found:
        raise Untried((*why, key.unseen)[0])
    lost = set[str]().union(*[each for each in found if each is not None])
    if any(each is not None for each in found):
        key.note(not lost, forward)
    return lost


_CALLS = 4  # of one class in f that are tried


class _OperatorCalls(TorchFunctionMode):
    """Inside, calls of operators in whose graph a class that is written in C++ stands are tried."""

    def __init__(self, key: _Key, tried: Callable[[Any, Args], None]) -> None:
        super().__init__()
        self.key, self.tried = key, tried

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        """The function; an operator that holds the class is tried."""
        out = fun(*args, **(kwargs or {}))
        if isinstance(self.key.kind, _CppFunction) and isinstance(fun, _OPERATORS):
            flat, treedef = upstream.tree_flatten((args, kwargs or {}))
            outs = [y for y in upstream.tree_leaves(out) if isinstance(y, Tensor)]
            own = _graph(outs) - _graph([x for x in flat if isinstance(x, Tensor)])
            if any(_is_cpp_function(node) and _key_of(node) == self.key for node in own):
                self.tried(partial(_called_flat, fun, treedef), tuple(flat))
        return out


_OPERATORS = (upstream.OpOverload, upstream.OpOverloadPacket)


def _called_flat(fun: Any, treedef: Any, *flat: Any) -> Any:
    args, kwargs = upstream.tree_unflatten(flat, treedef)
    return fun(*args, **kwargs)
