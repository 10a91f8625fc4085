"""The engine inside of torch.func's transforms and in compiled code: `torch.func`.

There autograd's own graph is hidden, and dynamo traces this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradtools.backend import CannotPush, Evaluation, Fun
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import CPP_NODE, refuse_torchscript, surveyed
from gradtools.torch.compiling import is_compiling, nodes_of
from gradtools.torch.forward_mode.no_grad import NoGradStopsTangents
from gradtools.torch.forward_mode.pushing import RightTangents
from gradtools.torch.functorch_wrappers import is_inexact, is_pushed, unshared
from gradtools.torch.known_errors import explained
from gradtools.torch.modes import forward_mode, has_checkpoint, unpacked
from gradtools.torch.open_derivatives import (
    OpenDerivative,
    ReadsElsewhere,
    caller_of,
    note_taken,
    open_flags,
    pushed_in_trace,
    refuse_read_elsewhere,
    watched,
)
from gradtools.torch.operation_marks import hooks_of_users
from gradtools.torch.plain_programs.backward_nodes import corrected
from gradtools.torch.plain_programs.modes import PlainPrograms, PlainProgramsInTrace
from gradtools.torch.rules.installing import evaluated_to_push

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped


def in_functorch() -> bool:
    return is_compiling() or upstream.peek_interpreter_stack() is not None


def _vjp(fun: Any, primals: Sequence[Any], has_aux: bool = False) -> Any:
    """`torch.func.vjp`, outside of hooks on saved tensors, inside of which it refuses to run.

    It still does inside of a checkpoint, which computes again what an operator computed without
    torch.func, and would not find the same saved tensors.
    """
    if not is_compiling():
        with unpacked() as hooks:
            if not has_checkpoint(hooks):
                return torch.func.vjp(fun, *primals, has_aux=has_aux)
    return torch.func.vjp(fun, *primals, has_aux=has_aux)


def functorch_vjp(fun: Fun, leaves: list[Tensor], groups: Sequence[int] | None) -> Evaluation:
    reached: list[bool] = []
    nested: list[bool] = []
    entered: list[OpenDerivative] = []
    empty: list[bool] = []
    wrong: list[Any] = []
    hooked: list[Tensor] = []  # if f sets hooks, the leaves of its graph
    plain: list[bool] = []
    keep = torch.is_grad_enabled()

    def paired(*xs: Tensor) -> Any:
        if is_compiling():
            probed = lambda *a: _probed(fun, a, groups or (), reached)
            with PlainProgramsInTrace(1 + len(groups or ()), bool(open_flags())):
                outs, extras, inside = watched(probed, xs)
            nested[:] = [inside]
        else:
            again = is_differentiated_again(1)
            guarding = _calls_guarded(caller_of(fun)) if again or keep else nullcontext()
            # Inside of PyTorch's own `torch.func.jvp`.
            is_set = any(
                isinstance(mode, NoGradStopsTangents) for mode in upstream.function_modes()
            )
            stops = is_pushed() and not is_set
            stopping = NoGradStopsTangents(False, True) if stops else nullcontext()
            count = hooks_of_users()
            inside = OpenDerivative(xs, xs, set(), set(), [], [False])
            with inside, guarding, PlainPrograms(), stopping:
                outs, extras = fun(*xs)
            entered[:] = [inside]
            survey = surveyed(outs)
            sets_hooks = hooks_of_users() != count
            if (again or keep) and sets_hooks:
                hooked[:] = survey.leaves
            if again:
                refuse_torchscript(caller_of(fun), outs)
            leaves_behind, wrong[:] = {id(leaf) for leaf in survey.leaves}, survey.wrong
            reached[:] = [id(x) in leaves_behind for x in xs]
            ordinary = not (again or survey.lost or survey.wrong or survey.custom or sets_hooks)
            plain[:] = [getattr(fun, "may_transpose", False) and ordinary and is_plain(outs)]
        empty[:] = [not outs]
        return tuple(outs) or (xs[0].new_zeros(()),), tuple(extras)

    outs, pull, extras = _vjp(paired, leaves, has_aux=True)
    outs = () if empty[0] else outs

    def pullback(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not outs:
            return [None] * len(leaves)
        filled = tuple(
            torch.zeros_like(y) if ct is None else ct for ct, y in zip(cts, outs, strict=True)
        )
        # A view, since a tensor that a rule returns unchanged may be a wrapper of a dead level.
        with explained(caller_of(fun)), corrected(wrong) if wrong else nullcontext():
            grads = [g.view_as(g) for g in pull(filled)]
        if hooked:
            from gradtools.torch.hook_trials import gated_in_functorch

            grads = gated_in_functorch(caller_of(fun), fun, leaves, hooked, filled, grads)
        if not is_compiling():
            note_taken(outs, grads, leaves, leaves, torch.is_grad_enabled(), *entered)
        if not reached or any(nested):
            return list(grads)
        grads = [g if r else None for g, r in zip(grads, reached, strict=True)]
        return entered[0].filled(grads, ()) if entered else grads

    def transposed() -> Any:
        if not any(plain) or entered[0].entered:
            return None
        return pushforward_of(lambda: _pulled_back(pull, outs), False)

    if not entered:  # compiled, or evaluated after a graph break
        return Evaluation(list(outs), list(extras), pullback)

    def cut(grads: Sequence[Tensor | None]) -> list[int]:
        if not all(g is not None for g in grads):
            refuse_read_elsewhere(fun, outs, leaves, grads)
        return entered[0].cut(grads, ())

    return Evaluation(list(outs), list(extras), pullback, cut, transposed=transposed)


def _probed(fun: Fun, xs: Sequence[Tensor], groups: Sequence[int], reached: list[bool]) -> Any:
    """f, recording at trace time for each leaf whether its group reaches an output.

    Dynamo exposes no graph, but `requires_grad` shows at each level whether a result depends on the
    inputs of that level; so each group gets a level. This adds nothing to the compiled program.
    """
    if not groups:
        return fun(*xs)
    mine, others = xs[: groups[0]], xs[groups[0] :]
    deeper: list[bool] = []

    def level(*tracked: Tensor) -> Any:
        def rest(*a: Tensor) -> Any:
            return fun(*tracked, *a)

        outs, extras = _probed(rest, others, groups[1:], deeper)
        hit = any(y.requires_grad for y in outs)
        reached[:] = [hit for _ in tracked] + deeper
        return tuple(outs), tuple(extras)

    if not mine:
        return level()
    outs, _, extras = _vjp(level, mine, has_aux=True)
    return list(outs), list(extras)


def functorch_jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor]) -> Any:
    """`(outs, extras, pushed)`, and whether leaves may be cut or read by another reference."""
    stopped: list[bool] = []

    def paired(*xs: Tensor) -> Any:
        if is_compiling():
            pushed_in_trace.append(True)
            try:
                with sdpa_kernel(SDPBackend.MATH), RightTangents():  # others push no tangents
                    outs, extras = fun(*xs)
            finally:
                pushed_in_trace.pop()
        else:
            mode = NoGradStopsTangents(False, True, caller_of(fun))
            with torch.enable_grad(), mode, ReadsElsewhere(leaves) as elsewhere:
                outs, extras, nested = watched(fun, xs)
            refuse_torchscript(caller_of(fun), outs)
            lost = nested and all(forward_ad.unpack_dual(y).tangent is None for y in outs)
            stopped[:] = [lost or elsewhere.found]
        return tuple(outs), tuple(extras)

    apart = tuple(unshared(x) for x in leaves)
    with nullcontext() if is_compiling() else forward_mode():
        outs, pushed, extras = torch.func.jvp(paired, apart, tuple(tangents), has_aux=True)  # type: ignore[misc]
    # Under vmap PyTorch promotes the tangent of a scalar times a Python number, unlike its value.
    pushed = [
        t if t.dtype == y.dtype or not is_inexact(y) else t.to(y.dtype)
        for y, t in zip(outs, pushed, strict=True)
    ]
    if not is_compiling():
        note_taken(outs, pushed, leaves, leaves, torch.is_grad_enabled())
    results = [list(xs) for xs in (outs, extras, pushed)]
    if not torch.is_grad_enabled():  # a view has no graph then, but its tangent and wrappers
        tracked = lambda x: isinstance(x, Tensor) and x.requires_grad
        results = [[x.view_as(x) if tracked(x) else x for x in xs] for xs in results]
    return results, any(stopped) and not any(map(is_wrapped, leaves))


def functorch_linearize(fun: Fun, leaves: list[Tensor]) -> Any:
    caller = caller_of(fun)

    def paired(*xs: Tensor) -> Any:
        if is_compiling():
            with sdpa_kernel(SDPBackend.MATH):  # the one that is differentiated again
                outs, extras = evaluated_to_push(caller, fun, *xs)
        else:
            with _calls_guarded(caller), PlainPrograms(times=1, control_flow=True):
                outs, extras = evaluated_to_push(caller, fun, *xs)
            refuse_torchscript(caller, outs)
        return tuple(outs), tuple(extras)

    outs, pull, extras = _vjp(paired, leaves, has_aux=True)
    push = _pulled_back(pull, outs)

    def noted(tangents: list[Tensor]) -> list[Tensor]:
        pushed = push(tangents)
        if not is_compiling():
            note_taken(outs, pushed, leaves, leaves, torch.is_grad_enabled())
        return pushed

    return list(outs), list(extras), noted


def _pulled_back(pull: Any, outs: Sequence[Tensor]) -> Any:
    """The pushforward, as the pullback of the pullback."""
    ones = tuple(torch.ones_like(y) for y in outs)
    _, push = _vjp(pull, [ones])
    return lambda tangents: list(push(tuple(tangents))[0])


def is_differentiated_again(own: int = 0) -> bool:
    """Whether an outer level differentiates: PyTorch's forward rules may then lose a term.

    (Inside plain dual numbers `torch.func.jvp` does not nest at all.)

    own: How many levels belong to this call.
    """
    if is_compiling():
        return False
    if upstream.forward_level() >= 0:
        return True
    kinds = upstream.TransformType
    stack = upstream.get_interpreter_stack() or ()
    return sum(level.key() in (kinds.Grad, kinds.Jvp) for level in stack) > own


def _calls_guarded(caller: str) -> AbstractContextManager[Any]:
    from gradtools.torch.double_backward import calls_guarded

    return calls_guarded(caller)


def is_plain(ys: Sequence[Tensor]) -> bool:
    """Whether the graph consists of PyTorch's own operations, without custom Functions."""
    nodes = nodes_of([y for y in ys if y.requires_grad])
    return not any(isinstance(n, BackwardCFunction) or type(n).__name__ == CPP_NODE for n in nodes)


def pushforward_of(transposed: Callable[[], Any], attached: bool) -> Any:
    """A transposed pullback that raises `CannotPush` if an operation has no second derivative.

    None if that is already known.
    """
    try:
        push = transposed()
    except RuntimeError:
        return None

    def pushed(tangents: list[Tensor]) -> list[Tensor]:
        try:
            result = push(tangents)
        except RuntimeError as error:
            raise CannotPush from error
        if attached and not is_plain(result):
            raise CannotPush
        return result

    return pushed
