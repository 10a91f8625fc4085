"""Verdicts on custom autograd.Functions: what their derivative loses, by class, from trials.

The calls of a class in a function are recorded by running the function again, and tested by finite
differences (`double_backward_trials.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import (
    CPP_FUNCTION,
    CPP_NODE,
    graph_of,
    is_cpp_function,
    is_torchscript,
)
from gradtools.torch.double_backward_trials import (
    TangentTrial,
    Trial,
    TrialCall,
    Untried,
    is_tracked,
    on_one_line,
)
from gradtools.torch.rerunning import Rerunnable, rerun

Tensor = torch.Tensor
Args = tuple[Any, ...]


@dataclass(frozen=True)
class Key:
    """A class, and which of its arguments are differentiated.

    pushed: Whether its tangent (by its jvp) is differentiated again, and not its gradient.
    """

    kind: Any
    needs: tuple[bool, ...]
    pushed: bool = False

    @property
    def name(self) -> str:
        if isinstance(self.kind, _CppFunction):
            return f"the C++ torch::autograd::Function {self.kind.name}"
        name = self.kind.__name__
        if not name.startswith(_GENERATED):
            return f"the torch.autograd.Function {name.removeprefix('Vmapped')}"
        return f"the custom operator {name.removeprefix(_GENERATED).rpartition('_')[0]}"

    @property
    def unseen(self) -> str:
        """The reason why no call was recorded, for errors."""
        if isinstance(self.kind, _CppFunction):
            return (
                "evaluated a second time, f calls no operator of torch.ops in whose graph it is "
                "(what is bound to Python in another way is not seen; bind it by TORCH_LIBRARY)"
            )
        return "evaluated a second time, f does not call it in this thread"

    def fine(self, forward: bool) -> bool | None:
        """Whether it lost nothing in a trial; None without a trial."""
        if self == TORCHSCRIPT:
            return not forward
        verdict = _VERDICTS.get(self.kind, {}).get((self.needs, self.pushed, forward))
        return None if verdict is None else verdict == FINE

    @property
    def attaches(self) -> bool:
        """Whether nothing is lost if the backward's own torch.autograd.grad creates graphs."""
        return _VERDICTS.get(self.kind, {}).get((self.needs, self.pushed, False)) == ATTACHES

    @property
    def gives(self) -> str:
        return "tangent" if self.pushed else "gradient"

    def called(self, which: str) -> str:
        return "tangents" if self.pushed and which == "cotangents" else which

    @property
    def trial(self) -> type[Trial]:
        return TangentTrial if self.pushed else Trial

    def like(self, needs: tuple[bool, ...]) -> bool:
        """Whether a trial of a call with these differentiated arguments is valid for this key."""
        if self.pushed:  # the rerun differentiates all inputs that have tangents
            return any(needs) and all(a <= b for a, b in zip(self.needs, needs, strict=False))
        return needs == self.needs[: len(needs)]

    def record(self, verdict: str, forward: bool) -> None:
        _VERDICTS.setdefault(self.kind, {})[self.needs, self.pushed, forward] = verdict


@dataclass(frozen=True)
class _CppFunction:
    """A C++ torch::autograd::Function, known by its name."""

    name: str


TORCHSCRIPT = Key(_CppFunction("TorchScript"), ())
_cpp_function = cache(_CppFunction)  # one object for each name, for the weak dictionary
_GENERATED = "GeneratedBackwardFor_"
FINE, LOSES, ATTACHES = "fine", "loses", "loses but where inner derivatives keep their graphs"
# The verdicts by class. A class that lost is tested again for each use: one that takes functions
# may lose the derivative of one function and not of another.
_VERDICTS: weakref.WeakKeyDictionary[Any, dict[Any, str]] = weakref.WeakKeyDictionary()


def key_of(node: Any, pushed: bool = False) -> Key:
    if is_torchscript(node):
        return TORCHSCRIPT
    if type(node).__name__ == CPP_NODE:
        return Key(_cpp_function(node.name().removeprefix(CPP_FUNCTION)[:-1]), ())
    return Key(upstream.forward_class(type(node)), tuple(node.needs_input_grad), pushed)


def is_fine(node: Any) -> bool:
    forward = upstream.forward_level() >= 0
    return key_of(node).fine(forward) is True


def verdict_on(
    key: Key, call: TrialCall, forward: bool, apply: Any = None, noted: bool = True
) -> set[str] | None:
    """Tests a call and records the verdict of its class: what it loses, or None if undecided.

    Raises:
        Untried: The call cannot be tested.
    """
    if call.held is None:
        raise Untried(_HELD)
    trial = key.trial.of(apply or key.kind.apply, call.args, call.held)
    if trial.is_unread(call.originals):
        raise Untried(_HELD)
    result = trial.lost(forward)
    if result is not None and noted:
        key.record(FINE if not result else LOSES, forward)
    if (
        result
        and not (key.pushed or forward)
        and replace(trial, attaches=True).lost(False) == set()
    ):
        key.record(ATTACHES, forward)
    return result


_HELD = (
    "an argument is handed in for autograd's sake alone, and the function reads in its place what "
    "holds it, as a module holds its parameters"
)


def lost_in_rerun(fun: Fun, leaves: Sequence[Tensor], key: Key, forward: bool) -> set[str]:
    """What calls of a class in fun lose. Reruns fun to record them, and undoes its side effects.

    Raises:
        Untried: No call could be tested.
    """
    result: list[set[str] | None] = []
    why: list[str] = []

    def tried(call: TrialCall, apply: Any = None) -> None:
        if len(result) < _CALLS:
            try:
                result.append(verdict_on(key, call, forward, apply, noted=False))
            except Untried as error:
                why.append(str(error))

    operators = _OperatorCalls(key, tried)
    run: Any = lambda xs: fun(*xs)[0]
    if isinstance(fun, Rerunnable):
        run = Rerunnable(run, fun.roots)
    try:
        with _forwards(key) as calls, operators, upstream.temporarily_clear_interpreter_stack():
            rerun(run, leaves)
    except Exception as error:
        why.append(f"evaluated a second time, f raises {on_one_line(error)}")
    with upstream.temporarily_clear_interpreter_stack(), torch.enable_grad():
        for call in calls.recorded:
            tried(call)
    if not result or _HELD in why:
        raise Untried((*why, key.unseen)[0])
    lost = set[str]().union(*[each for each in result if each is not None])
    if any(each is not None for each in result) and not (lost and key.attaches):
        key.record(LOSES if lost else FINE, forward)
    return lost


_CALLS = 4  # how many calls of one class in f are tested


class _RecordedCalls:
    """Recorded calls; exempt from the restoring of state after the rerun."""

    never_changes = True

    def __init__(self) -> None:
        self.recorded: list[TrialCall] = []


@contextmanager
def _forwards(key: Key) -> Iterator[_RecordedCalls]:
    """Records this thread's calls of a class, by patching its `forward`.

    A call by a bound `apply` or from C++ reaches `forward`, too.
    """
    result = _RecordedCalls()
    if not isinstance(key.kind, type):
        yield result
        return
    kind: Any = key.kind
    thread, own = threading.get_ident(), vars(kind).get("forward")
    forward = kind.forward
    old = kind.setup_context is torch.autograd.Function.setup_context  # forward takes ctx as well

    def noted(*given: Any, **kwargs: Any) -> Any:
        args = given[1:] if old else given
        needs = tuple([isinstance(x, Tensor) and is_tracked(x) for x in args])
        if threading.get_ident() == thread and len(result.recorded) < _CALLS and key.like(needs):
            result.recorded.append(TrialCall.of(args))
        return forward(*given, **kwargs)

    kind.forward = staticmethod(noted)
    try:
        yield result
    finally:
        if own is None:
            del kind.forward
        else:
            kind.forward = own


class _OperatorCalls(TorchFunctionMode):
    """A function mode that tests the calls of operators whose graph contains a C++ Function."""

    def __init__(self, key: Key, tried: Callable[[TrialCall, Any], None]) -> None:
        super().__init__()
        self.key, self.tried = key, tried

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        out = fun(*args, **(kwargs or {}))
        if isinstance(self.key.kind, _CppFunction) and isinstance(fun, _OPERATORS):
            flat, treedef = upstream.tree_flatten((args, kwargs or {}))
            outs = [y for y in upstream.tree_leaves(out) if isinstance(y, Tensor)]
            own = graph_of(outs) - graph_of([x for x in flat if isinstance(x, Tensor)])
            if any(is_cpp_function(node) and key_of(node) == self.key for node in own):
                self.tried(TrialCall.of(tuple(flat)), partial(_called_flat, fun, treedef))
        return out


_OPERATORS = (upstream.OpOverload, upstream.OpOverloadPacket)


def _called_flat(fun: Any, treedef: Any, *flat: Any) -> Any:
    args, kwargs = upstream.tree_unflatten(flat, treedef)
    return fun(*args, **kwargs)
