"""Scaled gradients without a rule's checks, and an error for gradient hooks in forward mode.

A gradient hook edits cotangents, and forward mode would silently ignore it. So two cases raise: a
module with backward hooks that runs on dual numbers, and a hook that f sets on a tensor with a
tangent, unless a derivative inside of f runs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from gradtools.errors import GradtoolsError
from gradtools.rules import Rule
from gradtools.torch import _upstream as upstream
from gradtools.torch.coefficients import HERE, note_edit
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.operation_marks import OWN_HOOKS, only_observes
from gradtools.torch.rules.functions import RuleApplication, attach, edit_application
from gradtools.torch.rules.installing import apply_rule

Tensor = torch.Tensor


def scaled(x: Any, factor: float) -> Tensor | None:
    """x with its derivative times a number; None in compiled code, and for non-tensors.

    In plain eager mode a constant is returned unchanged, and for others the node is attached
    directly, since the rule needs no checks.
    """
    if torch.compiler.is_dynamo_compiling() or type(x) not in _EXACT:
        return None
    if (
        upstream.forward_level() < 0
        and upstream.peek_interpreter_stack() is None
        and not upstream.count_of_function_modes()
        and not upstream.count_of_dispatch_modes()
        and not upstream.is_wrapped(x)
        and upstream.tracing_state() is None
    ):
        if HERE.note is not None:
            note_edit(HERE.note, _scaling(factor.hex()).rule, (x,))
        if not x.requires_grad:
            return x
        if torch.is_grad_enabled() and x.layout is torch.strided and not x.is_nested:
            application = _scaling(factor.hex())
            return attach(application, (x,), x)[0]
    return apply_rule(_scaling(factor.hex()).rule, x)[0] if is_inexact(x) else None


_EXACT = (Tensor, torch.nn.Parameter)


@lru_cache(maxsize=128)
def _scaling(factor: str) -> RuleApplication:
    """The application of the scaling rule that all calls share."""
    number = float.fromhex(factor)  # hex, since 0.0 and -0.0 are equal as keys
    is_negation = number == -1.0

    def scale(_: Any, moved: Sequence[Tensor | None]) -> list[Any]:
        v = moved[0]
        return [None if v is None else -v if is_negation else number * v]

    rule = Rule(
        "scale_gradient",
        primal=lambda x: [x],
        tangent=scale,
        cotangent=scale,
        saves=(),
        reaches="identity",
    )
    return edit_application(rule, 1)


class NeedsGraph(GradtoolsError):
    """f cannot be pushed without a graph: it sets a hook, or records a graph that no mode sees."""


class HookGuard:
    """Raises for gradient hooks during one call of an operator in forward mode, in this thread.

    Args:
        caller: The operator's name.
        moves: Whether a tensor has a tangent.

    Attributes:
        hidden: Whether no graph is recorded now, so that no hook would run.
    """

    hidden = False

    def __init__(self, caller: str, moves: Callable[[Tensor], bool]) -> None:
        self._caller, self._moves = caller, moves
        self._set: list[tuple[RemovableHandle, list[bool]]] = []
        self._thread = threading.get_ident()
        self._watch = register_module_forward_pre_hook(self._look)
        OWN_HOOKS[0] += 1

    def end(self, well: bool) -> None:
        """Ends the guard. If `well`, raises if a hook that f set and did not remove never ran."""
        self._watch.remove()
        for handle, ran in self._set if well else ():
            hooks = handle.hooks_dict_ref()
            if not ran and hooks is not None and handle.id in hooks:
                raise self._refusal("f sets a hook on a tensor")

    def register(self, fun: Any, x: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """`x.register_hook(hook)`, recording whether the hook runs."""
        if not self._moves(x):
            return fun(x, hook)
        if upstream.gathers_parameters(hook):
            both = [x, upstream.unpack_dual(x, level=upstream.forward_level())[1]]
            handles = [fun(y, hook) for y in both if y.requires_grad]
            return handles[0] if handles else RemovableHandle({})
        if only_observes(hook):
            return fun(x, hook) if x.requires_grad else RemovableHandle({})
        ran: list[bool] = []

        def noted(ct: Tensor) -> Any:
            ran[:] = [True]
            return hook(ct)

        if self.hidden or not x.requires_grad:
            raise self._refusal("f sets a hook on a tensor")
        handle = fun(x, noted)
        self._set.append((handle, ran))
        return handle

    def _look(self, module: torch.nn.Module, args: Any) -> None:
        """A forward pre-hook of all modules. If an input requires grad, PyTorch sets the hooks."""
        if threading.get_ident() != self._thread:
            return
        if not upstream.has_backward_hooks(module):
            return
        xs = [x for x in upstream.tree_leaves(args) if isinstance(x, Tensor)]
        tracked = upstream.takes_whole_gradients(module) and any(x.requires_grad for x in xs)
        if not tracked and any(map(self._moves, xs)):
            raise self._refusal(f"a {type(module).__name__} in f has a backward hook")

    def _refusal(self, what: str) -> NeedsGraph:
        return NeedsGraph(
            f"{self._caller}: {what}, which edits gradients in reverse mode, and f is pushed along "
            "in forward mode, which would pass it by. Take reverse mode (grad, vjp, linearize, "
            "frozen, jacobian with mode='reverse'), or remove the hook."
        )
