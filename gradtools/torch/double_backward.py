"""Double backward through custom autograd.Functions: silently lost derivatives are refused.

The backward of a torch.autograd.Function, or of an operator with a registered backward, may compute
the gradient outside of autograd: under no_grad, through NumPy, from a saved intermediate. The
gradient is right then, but its own derivative is zero or lacks a term, without an error. So each
class is tested once by finite differences (double_backward_trials.py), when its gradient may be
differentiated. A derivative that it loses, or that cannot be tested, is refused by a *gate*: an
extra node at the gradient that the engine runs only on a path to the lost source. A constant
gradient (of a linear map, a mask, a straight-through estimator) loses nothing. Tangents by a
class's own jvp are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.errors import GradtoolsError, LostDerivativeError
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import (
    OWN,
    TORCHSCRIPT_LOSES,
    Survey,
    all_behind,
    graph_of,
    node_of,
    surveyed,
)
from gradtools.torch.double_backward_trials import (
    TORCHSCRIPT,
    InnerGraphs,
    Key,
    TrialCall,
    key_of,
    lost_in_rerun,
    verdict_on,
)
from gradtools.torch.functorch_wrappers import is_inexact, is_pushed
from gradtools.torch.nondifferentiable import gated_where_lost
from gradtools.torch.open_derivatives import tracked_in
from gradtools.torch.operation_marks import OWN_HOOKS
from gradtools.torch.plain_programs.backward_nodes import corrected
from gradtools.torch.rerunning import program_of, rerun
from gradtools.torch.trials import Suspect, Untestable, is_tracked

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped
Args = tuple[Any, ...]


@dataclass(frozen=True)
class CustomCode(Suspect):
    """A class of custom code, some of whose arguments are differentiated.

    Attributes:
        caller: The operator's name.
        key: The class.
        tried: `tried(forward)`: what the class loses in this mode, by a trial.
    """

    caller: str
    key: Key
    tried: Callable[[bool], set[str]]

    @classmethod
    def in_rerun(cls, caller: str, key: Key, fun: Fun, leaves: Sequence[Tensor]) -> CustomCode:
        """The class in `fun(*leaves)`, which is run again for a trial."""
        return cls(caller, key, partial(lost_in_rerun, fun, leaves, key))

    def fine(self, forward: bool) -> bool | None:
        return self.key.fine(forward)

    def lost(self, forward: bool) -> set[str]:
        return {"inputs", "cotangents"} if self.key == TORCHSCRIPT else self.tried(forward)

    def says(self, which: str, lost: set[str] | Untestable) -> str | None:
        key = self.key
        if key == TORCHSCRIPT:
            return TORCHSCRIPT_LOSES
        along = "tangents" if key.pushed and which == "cotangents" else which
        gives, method = ("tangent", "jvp") if key.pushed else ("gradient", "backward")
        if isinstance(lost, Untestable):
            return (
                f"f holds {key.name}, whose {gives} is to be differentiated with respect to its "
                f"{along}. PyTorch may lose that in silence, so a class is tried once, by finite "
                f"differences, and this one could not be: {lost}. Use gt.custom_rule; or take a "
                "second derivative of it once where it can be tried, by a call that may be "
                "repeated and near arguments that it takes, which gradtools remembers."
            )
        if which not in lost:
            return None
        return (
            f"f holds {key.name}, whose {method} gives a {gives} that autograd cannot "
            f"differentiate with respect to its {along} (it is marked once_differentiable, "
            "computes under no_grad or outside of PyTorch, or uses a detached tensor or a saved "
            f"intermediate, torch#76185), so that a second derivative is lost. Write {method} of "
            "PyTorch's operations on saved inputs and outputs, or use gt.custom_rule."
        )


# --- gates at custom code ----------------------------------------------------------------


def refuse_lossy(caller: str, fun: Fun, leaves: Sequence[Tensor], survey: Survey) -> None:
    """Raises if custom code loses the derivative of its gradient with respect to the arguments."""
    for node in survey.custom:
        CustomCode.in_rerun(caller, key_of(node), fun, leaves).refuse("inputs")


@contextmanager
def guarding(
    caller: str,
    fun: Fun,
    leaves: Sequence[Tensor],
    survey: Survey,
    aliases: Sequence[Tensor],
    again: bool,
) -> Iterator[None]:
    """A context for a pullback that guards the custom code in the graph of one evaluation.

    Args:
        caller: The operator's name.
        fun: The function.
        leaves: The arguments at which it was evaluated.
        survey: The survey of its graph.
        aliases: The leaves' aliases in that graph.
        again: Whether the pullback's result may be differentiated.
    """

    def refusing(cts: Any) -> None:
        if upstream.current_node().name() != "MulBackward0":
            raise GradtoolsError(
                f"{caller}: f holds an operator without a backward pass (PyTorch's own message "
                "names it, once, in a warning: no autograd kernel was registered), so a term of "
                "the gradient is lost. Give the operator a backward by "
                "torch.library.register_autograd, or wrap it in gt.custom_rule; if it is a "
                "constant, call it under torch.no_grad."
            )
        with upstream.temporarily_clear_interpreter_stack(), _MappedNorms() as norms:
            rerun(program_of(fun), leaves)
        if norms.found:
            raise LostDerivativeError(
                f"{caller}: f takes the gradient of a normalization by PyTorch's own vmap "
                "(torch.func.vmap of grad, jacrev, hessian), whose rule takes mean and deviation "
                "for constants (functorch#534), so that a term of the derivative is lost. Use "
                "gt.vmap with gt.grad, gt.per_example_grad, gt.jacobian or gt.hessian in f."
            )

    handles = [node.register_prehook(refusing) for node in survey.lost]
    if again:
        handles += _gates(caller, fun, leaves, survey, aliases)
    OWN_HOOKS[0] += len(handles)
    try:
        with corrected(survey.wrong, again):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _MappedNorms(TorchFunctionMode):
    """Notes whether PyTorch's own vmap maps the gradient of a normalisation."""

    names = ("layer_norm", "batch_norm", "instance_norm", "native_layer_norm", "native_batch_norm")
    found = False

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if getattr(fun, "__name__", "") in self.names:
            levels = upstream.get_interpreter_stack() or ()
            kinds = {level.key() for level in levels}
            self.found |= {upstream.TransformType.Vmap, upstream.TransformType.Grad} <= kinds
        return fun(*args, **(kwargs or {}))


def gate_graph(
    caller: str, fun: Fun, leaves: Sequence[Tensor], outs: Sequence[Any], aliases: Sequence[Tensor]
) -> None:
    """Adds gates to the graph of `outs = fun(*leaves)`, whose gradient will be differentiated."""
    _gates(caller, fun, leaves, surveyed([y for y in outs if isinstance(y, Tensor)]), aliases)


def _gates(
    caller: str, fun: Fun, leaves: Sequence[Tensor], survey: Survey, aliases: Sequence[Tensor]
) -> list[Any]:
    """Hooks on the nodes of custom code, which add gates to the gradients there."""
    handles = []
    for node in survey.custom:
        code = CustomCode.in_rerun(caller, key_of(node), fun, leaves)
        if code.fine(upstream.forward_level() >= 0) is not True:
            parents = [parent for parent, _ in node.next_functions]
            handles.append(node.register_hook(_gating(code, parents, aliases)))
    return handles


def _gating(
    code: CustomCode, parents: Sequence[Any], aliases: Sequence[Tensor]
) -> Callable[[Any, Any], Any]:
    """A hook on a node of custom code with these parents, which adds gates to its gradients."""

    def hook(given: Any, cts: Any) -> Any:
        pushed = upstream.forward_level() >= 0
        if code.fine(pushed):
            return None
        behind = [ct for ct in cts if isinstance(ct, Tensor) and ct.requires_grad]
        inputs = tracked_in(parents, aliases) if torch.is_grad_enabled() else []
        attached = lambda: _with_inner_graphs(given, cts) if code.key.attaches else None
        return tuple(code.gated(given, behind, inputs, pushed, attached))

    return hook


def _with_inner_graphs(given: Sequence[Any], cts: Any) -> tuple[Any, ...] | None:
    """The current node's gradients, recomputed with graphs of the derivatives that it takes."""
    node = upstream.current_node()
    if any(ct is None for ct in cts):
        return None
    with torch.enable_grad(), InnerGraphs():
        grads = upstream.forward_class(type(node)).backward(node, *cts)
    grads = grads if isinstance(grads, tuple | list) else (grads,)
    wanted = [g for g, needed in zip(grads, node.needs_input_grad, strict=False) if needed]
    tracked = [parent is not None for parent, _ in node.next_functions]
    if len(wanted) != sum(tracked) or len(given) != len(tracked):
        return None
    left = iter(wanted)
    return tuple([next(left) if t else g for g, t in zip(given, tracked, strict=True)])


def loses_inputs(node: Any, kind: Any, args: Args, outs: Sequence[Tensor], leaf: Tensor) -> bool:
    """Whether the gradient of outs at a leaf loses its dependence on the inputs of a call.

    Args:
        node: The call's node in autograd's graph.
        kind: Its torch.autograd.Function.
        args: Its arguments.
        outs: The outputs.
        leaf: The leaf.
    """
    if node not in graph_of(outs) or node_of(leaf) not in all_behind([node]):
        return False
    key = Key(kind, tuple(node.needs_input_grad))
    if key.fine(False):
        return False
    try:
        return "inputs" in (verdict_on(key, TrialCall.of(args), False) or ())
    except Untestable:  # undecided: no loss is reported
        return False


# --- gates at tangents --------------------------------------------------------------------


def gated_tangents(
    caller: str,
    fun: Fun,
    points: Sequence[tuple[Tensor, Tensor, Tensor]],
    ys: Sequence[Tensor],
    custom: Sequence[Any],
    pushed: list[Tensor],
) -> list[Tensor]:
    """The tangents of ys = f(xs), with gates at custom code in the graph of ys.

    `points` are triples of an x, its alias in that graph, and its tangent.
    """
    xs = [x for x, _, _ in points]
    for node in custom:
        key = key_of(node, True)
        if key == TORCHSCRIPT:
            raise LostDerivativeError(f"{caller}: {TORCHSCRIPT_LOSES}")
        if key.fine(False) or not _pushes(key.kind):
            continue
        behind = all_behind([node])
        moved = [(x, t) for x, entered, t in points if node_of(entered) in behind]
        inputs = [*tracked_in([node], ()), *[x for x, _ in moved if x.requires_grad]]
        # Operations before it may compute its tangents from the inputs, too.
        along = [*inputs, *[t for _, t in moved if t.requires_grad]]
        code = CustomCode.in_rerun(caller, key, fun, xs)
        for i, y in enumerate(ys):
            if node in graph_of([y]):
                (pushed[i],) = gated_where_lost([pushed[i]], along, inputs, code.refuse)
    return pushed


def gated_call(caller: str, kind: Any, beneath: Any, args: Args) -> Any:
    """Calls a Function at dual numbers, and adds gates to the tangents of its outputs.

    For calls inside of functorch, which have no graph.
    """
    out, kind = beneath(*args), upstream.users_class(kind)
    duals = [_unpacked(x) for x in args]
    inputs = [x for x, _ in duals if x is not None and is_tracked(x)]
    along = [t for _, t in duals if t is not None and is_tracked(t)]
    key = Key(kind, tuple([is_tracked(x) or t is not None for x, t in duals]), True)
    if not (inputs or along) or not _pushes(kind) or key.fine(False):
        return out
    code = CustomCode(caller, key, partial(_lost_by, key, TrialCall.of(args)))

    def gated(y: Any) -> Any:
        primal, t = _unpacked(y)
        if primal is None or t is None:
            return y
        if any(y is x for x in args):  # changed in place: gates cannot be added to the input itself
            code.refuse("inputs")
            code.refuse("cotangents")
            return y
        (t,) = gated_where_lost([t], along, inputs, code.refuse)
        return forward_ad.make_dual(primal, t)

    return tuple(map(gated, out)) if isinstance(out, tuple) else gated(out)


def _unpacked(x: Any) -> tuple[Tensor | None, Tensor | None]:
    if not isinstance(x, Tensor) or not is_inexact(x):
        return None, None
    return forward_ad.unpack_dual(x)


def _pushes(kind: Any) -> bool:
    """Whether a user's class defines a jvp."""
    is_function = isinstance(kind, type) and not kind.__module__.startswith(OWN[0])
    return is_function and kind.jvp is not torch.autograd.Function.jvp


class _Calls(TorchFunctionMode):
    """A function mode that gates calls of Functions inside of functorch, whose graphs hide them."""

    def __init__(self, caller: str) -> None:
        super().__init__()
        self.caller = caller
        self._example: TrialCall | None = None  # of a call under vmap

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if fun is not upstream.custom_function_call or args[0].__module__.startswith(OWN[0]):
            return fun(*args, **(kwargs or {}))
        level = upstream.peek_interpreter_stack()
        if level is None or level.key() != upstream.TransformType.Vmap:
            out = fun(*args)
            self._note(upstream.users_class(args[0]), args[1:], out)
            return out
        before = self._example
        if before is None and not Key(upstream.users_class(args[0]), _needs(args[1:])).fine(False):
            self._example = TrialCall.of(args[1:])
        try:
            with self:  # intercepts the class that vmap generates from this one
                return upstream.redispatch_function(fun, (), args, {})
        finally:
            self._example = before

    def _note(self, kind: Any, args: Args, out: Any) -> None:
        outs = out if isinstance(out, tuple | list) else (out,)
        nodes: list[Any] = [y.grad_fn for y in outs if isinstance(y, Tensor) and y.requires_grad]
        key = Key(kind, _needs(args))
        if not nodes or key.fine(False) or any(isinstance(x, Tensor) and x.is_meta for x in args):
            return  # on the meta device there are no numbers
        call = self._example or TrialCall.of(args)
        code = CustomCode(self.caller, key, partial(_lost_by, key, call))
        moving = [x for x, needed in zip(args, key.needs, strict=True) if needed]

        def hook(given: Any, cts: Any) -> Any:
            behind = [ct for ct in cts if isinstance(ct, Tensor) and ct.requires_grad]
            if is_pushed():
                code.refuse("inputs")
                if behind:
                    code.refuse("cotangents")
                return None
            if code.fine(False):
                return None
            sources = tracked_beneath(behind), tracked_beneath(moving)
            return tuple(gated_where_lost(given, *sources, code.refuse))

        OWN_HOOKS[0] += 1
        nodes[0].register_hook(hook)


def _needs(args: Args) -> tuple[bool, ...]:
    return tuple([isinstance(x, Tensor) and x.requires_grad for x in args])


def _lost_by(key: Key, call: TrialCall, forward: bool) -> set[str]:
    """What a call with these values loses."""
    if any(x is None and needed for x, needed in zip(call.args, key.needs, strict=True)):
        raise Untestable("inside of torch.func a tensor of a subclass hides its numbers")
    with upstream.temporarily_clear_interpreter_stack(), torch.enable_grad():
        return verdict_on(key, call, forward) or set()


def calls_guarded(caller: str) -> AbstractContextManager[Any]:
    """The mode for a function whose gradient by functorch is differentiated again."""
    modes = upstream.function_modes()
    return nullcontext() if any(isinstance(mode, _Calls) for mode in modes) else _Calls(caller)


def tracked_beneath(xs: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, unwrapped by one level of functorch, that require a gradient there."""
    beneath = [upstream.get_unwrapped(x) for x in xs if is_wrapped(x)]
    return [x for x in beneath if is_tracked(x)]
