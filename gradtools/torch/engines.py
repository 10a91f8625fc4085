"""The engines that differentiate in PyTorch, chosen by the context of the call.

- In eager mode `torch.autograd.grad` on aliases of the inputs, which takes any eager function.
- Inside torch.func transforms and in compiled code `torch.func`, which can be traced there.
- Forward mode by dual numbers at the outermost level, by `torch.func.jvp` inside torch.func. There
  is one dual level in a process: if an outer call or another thread uses it, the pullback is
  transposed instead.

Results stay differentiable exactly when grad mode is on at entry and an argument or a captured
tensor requires grad; otherwise they are detached and the graph is freed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.backend import Evaluation, Fun
from gradtools.disconnected_inputs import refuse_cut
from gradtools.errors import refusal
from gradtools.rules import spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import guarded, nodes_made, scripts_refused, surveyed
from gradtools.torch.compiling import mark_lost, not_exported, only_inlined, refuse_lost, uncompiled
from gradtools.torch.forward_mode.checkpoints import pushed_through
from gradtools.torch.forward_mode.no_grad import NoGradStopsTangents, recorded_dual
from gradtools.torch.forward_mode.one_tangent import OneTangent
from gradtools.torch.forward_mode.pushing import gated_at_custom_code
from gradtools.torch.functorch_engine import (
    functorch_jvp,
    functorch_linearize,
    functorch_vjp,
    in_functorch,
    is_differentiated_again,
    is_plain,
    pushforward_of,
)
from gradtools.torch.functorch_wrappers import is_inexact, unshared
from gradtools.torch.known_errors import GOES_BACKWARD, explain, explained
from gradtools.torch.modes import NoForwardMode, dual_level, dual_of, has_checkpoint, unpacked
from gradtools.torch.open_derivatives import (
    SOURCE,
    SPENT,
    TRACED,
    OpenDerivative,
    ReadsElsewhere,
    caller_of,
    cut_in,
    here,
    is_spent,
    note_taken,
    open_flags,
    parameters_of,
    refuse_read_elsewhere,
    watched,
)
from gradtools.torch.operation_marks import DERIVATIVE, OWN_HOOKS, detached
from gradtools.torch.plain_programs.backward_nodes import corrected, wrong_in_batches, wrong_nodes
from gradtools.torch.plain_programs.modes import PlainPrograms
from gradtools.torch.rerunning import rerun
from gradtools.torch.rules.installing import evaluated_to_push

Tensor = torch.Tensor
is_wrapped = upstream.is_wrapped
_is_tracked = attrgetter("requires_grad")


def vjp(fun: Fun, leaves: list[Tensor], *, groups: Sequence[int] | None, once: bool) -> Evaluation:
    """One evaluation and its pullback, by the engine for the current context."""
    if upstream.is_exporting():
        raise not_exported(caller_of(fun))
    compiling = torch.compiler.is_dynamo_compiling()
    for flag in TRACED if compiling else here.flags:
        flag[0] = True
    if not compiling and upstream.peek_interpreter_stack() is None:
        if upstream.DYNAMO in sys.modules:
            result = uncompiled(_eager_vjp, fun, leaves, once)
            # Dynamo would compile Python code that autograd calls, such as rules.
            return replace(result, pullback=partial(uncompiled, result.pullback))
        return _eager_vjp(fun, leaves, once)
    with explained(caller_of(fun)):
        return functorch_vjp(fun, leaves, groups)


@only_inlined
def jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor]) -> Any:
    """`(outs, extras, pushed)`, by the engine for the current context."""
    return _in_context(_jvp, fun, leaves, tangents)


def _jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor]) -> Any:
    if in_functorch():
        if not is_differentiated_again():
            with suppress(NoForwardMode):
                result, may_be_lost = functorch_jvp(fun, leaves, tangents)
                if may_be_lost:
                    refuse_lost_along(fun, leaves)
                return result
    # Hooks on saved tensors may drop tangents, and a checkpoint around this call runs all of it
    # again inside of the dual level, which cannot nest. Without a graph, hooks that compute
    # nothing again need see nothing.
    elif upstream.saved_tensors_hooks_on(False) is None or not torch.is_grad_enabled():
        with suppress(NoForwardMode), unpacked() as hooks:
            if not has_checkpoint(hooks):
                return _dual_jvp(fun, leaves, tangents)
    outs, extras, push = _linearize(fun, leaves)
    return outs, extras, push(tangents)


@only_inlined
def linearize(fun: Fun, leaves: list[Tensor]) -> Any:
    """`(outs, extras, pushforward)`: the transpose of the pullback, so f is evaluated once."""
    return _in_context(_linearize, fun, leaves)


def _linearize(fun: Fun, leaves: list[Tensor]) -> Any:
    return (functorch_linearize if in_functorch() else _eager_linearize)(fun, leaves)


@only_inlined
def _in_context(engine: Any, fun: Fun, *args: Any) -> Any:
    """The engine's results; dynamo compiles none of it but as part of a graph around it."""
    if upstream.is_exporting():
        raise not_exported(caller_of(fun))
    if upstream.DYNAMO in sys.modules and not torch.compiler.is_dynamo_compiling():
        return uncompiled(_noted, engine, fun, *args)
    return _noted(engine, fun, *args)


def _noted(engine: Any, fun: Fun, *args: Any) -> Any:
    for flag in open_flags():  # the functions that are being evaluated take a derivative
        flag[0] = True
    with explained(caller_of(fun)):
        return engine(fun, *args)


# --- the eager engine --------------------------------------------------------------------
#
# After a graph break in the calling code dynamo would still compile f piece by piece, and compiled
# pieces have no second derivatives. So dynamo skips all of this.


def _eager_vjp(fun: Fun, leaves: list[Tensor], once: bool) -> Evaluation:
    try:
        evaluated = _evaluate(fun, leaves)
    except RuntimeError as error:
        explain(caller_of(fun), error)
        raise
    outs, extras, aliases, attached, survey, inside = evaluated
    ordinary = not (survey.lost or survey.wrong or survey.custom)

    def points() -> list[Tensor]:
        """The leaves for another evaluation."""
        return [*map(_detached, leaves)] if getattr(fun, "deferred", False) else leaves

    def pullback(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        ys: list[Tensor] = []
        seeds: list[Tensor] = []
        for y, ct in zip(outs, cts, strict=True):
            if ct is not None and y.requires_grad:
                ys.append(y)
                seeds.append(_normal(ct) if ct.is_inference() else ct)
        if not ys:
            return inside.filled([None] * len(aliases), outs)
        create = torch.is_grad_enabled() and (attached or any(map(_is_tracked, seeds)))
        again = create or upstream.forward_level() >= 0
        guard, seen = None, survey
        if again and upstream.peek_interpreter_stack() is not None:  # the rows of a Jacobian
            seen = survey._replace(wrong=[*{*survey.wrong, *wrong_in_batches(ys)}])
        if not ordinary or seen.wrong:
            guard = guarded(caller_of(fun), fun, points(), seen, aliases, again)
        try:
            # Some tangents are wrong without create_graph=True.
            grads = _pulled(ys, aliases, seeds, create or not once, again, inside.spent, guard)
        except RuntimeError as error:
            if any(x.is_leaf and x.grad is not None for x in aliases):
                raise refusal(error, f"{caller_of(fun)}: {GOES_BACKWARD}") from error
            explain(caller_of(fun), error)
            raise
        if again and survey.hooked:
            grads = _gated_at_hooks(fun, points(), aliases, ys, seeds, grads)
        if here.opened:
            note_taken(ys, grads, leaves, aliases, create, inside)
        if not create:
            grads = _freed(grads)
        return inside.filled(grads, outs) if inside.entered or inside.constant else list(grads)

    def cut(grads: Sequence[Tensor | None]) -> list[int]:
        if not all(g is not None for g in grads):
            refuse_read_elsewhere(fun, outs, leaves, grads)
        return cut_in(fun, points(), inside.cut(grads, outs))

    def where_lost(i: int) -> list[str]:
        from gradtools.seeing.torch.recorded_run import where_lost

        return where_lost(fun, points(), i)

    def transposed() -> Any:
        linear = ordinary and not survey.hooked  # hooks need not be
        if not (getattr(fun, "may_transpose", False) and linear and is_plain(outs)):
            return None
        return pushforward_of(lambda: _transposed(fun, leaves, evaluated), attached)

    keeps_graph = attached or not getattr(fun, "returns_output", True)
    return Evaluation(
        outs if keeps_graph else _freed(outs),
        extras if attached or not extras else _freed(extras),
        pullback,
        cut=cut,
        where_lost=where_lost,
        transposed=transposed,
    )


def _gated_at_hooks(fun: Fun, *where: Any) -> list[Tensor | None]:
    from gradtools.torch.hook_trials import gated_at_hooks

    return gated_at_hooks(caller_of(fun), fun, *where)


def _pulled(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    cts: Sequence[Tensor],
    retain: bool,
    create: bool,
    spent: list[bool],
    guard: AbstractContextManager[None] | None = None,
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad`.

    spent: The flag of the aliases, which is unset meanwhile: a checkpoint that recomputes in the
        backward pass must attach to them as before.
    guard: The context that `guarded` returned.
    """
    spent[0] = False
    try:
        if guard is None and not is_in_inference():
            return pulled(ys, xs, cts, retain, create)
        keep = torch.is_grad_enabled()
        with guard or nullcontext(), outside_of_inference():
            if torch.is_grad_enabled() != keep:  # leaving inference mode enables it
                torch.set_grad_enabled(keep)
            return torch.autograd.grad(ys, xs, cts, retain, create, allow_unused=True)
    finally:
        spent[0] = True


def pulled(
    ys: Sequence[Tensor], xs: Sequence[Tensor], cts: Sequence[Tensor], retain: bool, create: bool
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` without its argument checks; None for unreached inputs."""
    if torch.overrides.has_torch_function((*ys, *xs)):  # a mode or a subclass must see the call
        return torch.autograd.grad(ys, xs, cts, retain, create, allow_unused=True)
    run = upstream.engine
    # A recording identifies autograd's accumulations by the calling function.
    if upstream.DYNAMO in sys.modules or upstream.count_of_dispatch_modes():
        run = upstream.run_engine
    ends, seeds, sources = tuple(ys), tuple(cts), tuple(xs)
    return run(ends, seeds, retain, create, sources, allow_unreachable=True, accumulate_grad=False)


def _eager_linearize(fun: Fun, leaves: list[Tensor]) -> Any:
    with PlainPrograms(control_flow=True):
        evaluated = evaluated_to_push(caller_of(fun), _evaluate, fun, leaves)
    push = _transposed(fun, leaves, evaluated)
    outs, extras, _, attached, _, _ = evaluated
    return (outs, extras, push) if attached else (_freed(outs), _freed(extras), push)


def _transposed(fun: Fun, leaves: list[Tensor], evaluated: Any) -> Any:
    """The pushforward, as the pullback of the pullback, which is linear in the cotangents."""
    outs, _, aliases, attached, survey, inside = evaluated
    tracked = [y for y in outs if y.requires_grad]
    guard = guarded(caller_of(fun), fun, leaves, survey, aliases, True)
    with outside_of_inference(), torch.enable_grad(), guard or nullcontext():
        # Any cotangents will do, since the pullback is linear; logcumsumexp's is NaN at zero.
        dummies = [torch.ones_like(y, requires_grad=True) for y in tracked]
        for dummy in dummies:
            setattr(dummy, SPENT, [True])  # no derivative is taken with respect to it elsewhere
        pulled = _pulled(tracked, aliases, dummies, True, True, inside.spent) if tracked else ()
        if survey.hooked and pulled:
            pulled = _gated_at_hooks(fun, leaves, aliases, tracked, dummies, pulled, True)
    grads = pulled or [None] * len(leaves)
    refuse_read_elsewhere(fun, outs, leaves, grads)
    refuse_cut(fun, cut_in(fun, leaves, inside.cut(grads, outs)))

    wrong: list[Any] | None = None

    def push(tangents: list[Tensor]) -> list[Tensor]:
        nonlocal wrong
        moved = [
            (p, t)
            for p, t in zip(pulled, tangents, strict=bool(tracked))
            if p is not None and p.requires_grad
        ]
        result: Sequence[Tensor | None] = [None] * len(tracked)
        if moved:
            create = torch.is_grad_enabled() and (
                attached or any(t.requires_grad for _, t in moved)
            )
            again = create or upstream.forward_level() >= 0
            ps, ts = [p for p, _ in moved], [_normal(t) for _, t in moved]
            if again and wrong is None:  # the same at each push
                wrong = wrong_nodes(ps)
            with explained(caller_of(fun)), corrected(wrong or () if again else ()):
                result = _pulled(ps, dummies, ts, True, again, inside.spent)
            note_taken(tracked, result, leaves, aliases, create, inside)
            result = result if create else _freed(result)
        pushed = spread(result, [y.requires_grad for y in outs])
        return [
            torch.zeros_like(y) if t is None or upstream.is_zero(t) else t
            for y, t in zip(outs, pushed, strict=True)
        ]

    return push


def _evaluate(fun: Fun, leaves: list[Tensor], keep: bool | None = None) -> Any:
    """f at aliases of the leaves, once, with a graph, and a survey of the graph.

    keep: Whether gradients were enabled at first; leaving inference mode enables them.
    """
    keep = torch.is_grad_enabled() if keep is None else keep
    if is_in_inference():
        with torch.inference_mode(False):
            return _evaluate(fun, leaves, keep)
    on = keep and not upstream.count_of_function_modes()  # these must see that they are enabled
    # Skip tagging these detaches; no recorder is active.
    plain = on and not upstream.count_of_dispatch_modes() and upstream.forward_level() < 0
    tracks = keep and not getattr(fun, "deferred", False)  # whether aliases are views of leaves
    aliases = [
        x.detach().requires_grad_()
        if plain and not ((tracks and x.requires_grad) or x.is_inference())
        else _alias(x, tracks)
        for x in leaves
    ]
    inside = OpenDerivative(aliases, leaves, set(), set(), [], [False])
    before, hooks = nodes_made(), upstream.hooks_made() - OWN_HOOKS[0]
    try:
        with inside:
            if on:
                outs, extras = fun(*aliases)
            else:
                with torch.enable_grad():
                    outs, extras = fun(*aliases)
    finally:
        if on and not torch.is_grad_enabled():  # f disabled it
            torch.set_grad_enabled(True)
    survey = surveyed(outs, nodes_made() - before)
    if survey.compiled:
        refuse_lost(caller_of(fun), outs)
        mark_lost(survey.compiled)
    if upstream.hooks_made() - OWN_HOOKS[0] != hooks:
        survey = survey._replace(hooked=True)
    inside.spent[0] = True
    captured = not all(map(is_spent, survey.leaves))
    attached = keep and (captured or (tracks and any(map(_is_tracked, leaves))))
    return outs, extras, aliases, attached, survey, inside


def is_in_inference() -> bool:
    """Whether `torch.inference_mode(False)`, which is slow, would change anything."""
    return torch.is_inference_mode_enabled() or not upstream.is_forward_mode_enabled()


def outside_of_inference() -> AbstractContextManager[Any]:
    """`torch.inference_mode(False)`, or nothing if it would not change anything."""
    return torch.inference_mode(False) if is_in_inference() else nullcontext()


def _normal(x: Tensor) -> Tensor:
    """x, or a copy that autograd can save if x is an inference tensor."""
    if not x.is_inference():
        return x
    with outside_of_inference():
        return x.clone()


def _alias(x: Tensor, keep: bool) -> Tensor:
    """An alias of x that requires grad: a view if x requires grad, else a leaf.

    A dual number keeps its tangent, which `detach` alone would silently drop.
    """
    if x.is_inference():
        return x.clone().requires_grad_()
    if keep and x.requires_grad:
        alias = x.view_as(x)
        if alias.grad_fn is not None:  # forward mode under no_grad records no graph
            return alias
    return _detached(x).requires_grad_()


def _detached(x: Tensor) -> Tensor:
    """x detached; a dual number keeps its (detached) tangent."""
    if upstream.forward_level() < 0:
        if upstream.count_of_dispatch_modes() or upstream.count_of_function_modes():
            return detached(x, DERIVATIVE)
        return x.detach()  # no recorder is active, so no tag
    primal, tangent = forward_ad.unpack_dual(x)
    if tangent is None:
        return detached(x, DERIVATIVE)
    primal, tangent = detached(primal, DERIVATIVE), detached(tangent, DERIVATIVE)
    return forward_ad.make_dual(primal, tangent)


def _freed(xs: Sequence[Any]) -> list[Any]:
    """The tensors, detached if they require grad; None stays None."""
    return [_detached(x) if x is not None and x.requires_grad else x for x in xs]


# --- forward mode ------------------------------------------------------------------------


def _dual_jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor], seen: bool = False) -> Any:
    keep = torch.is_grad_enabled()  # before leaving inference mode enables it
    with outside_of_inference(), torch.set_grad_enabled(keep), dual_level():
        pairs = zip(leaves, tangents, strict=True)
        duals = [dual_of(unshared(_normal(x)), _normal(t)) for x, t in pairs]
        shows = keep and any(map(_is_tracked, tangents))
        if shows:  # record a graph to see which operations the tangents' derivatives pass
            duals = [recorded_dual(x) for x in duals]
        recorded = nodes_made()
        with torch.enable_grad():
            caller = caller_of(fun)
            mode = NoGradStopsTangents(False, True, caller) if keep else OneTangent((), caller)
            with mode, pushed_through(mode, caller, keep), ReadsElsewhere(leaves) as elsewhere:
                outs, extras, nested = watched(fun, duals)
            unseen = not (keep or nested or seen) and nodes_made() != recorded
            # Under no_grad a view of a tracked tensor would require grad without a graph.
            unpacked = [forward_ad.unpack_dual(y) for y in outs]
        extras = [forward_ad.unpack_dual(x).primal if is_inexact(x) else x for x in extras]
        primals = [y.primal for y in unpacked]
        pushed = [
            torch.zeros_like(y) if t is None or upstream.is_zero(t) else t for y, t in unpacked
        ]
        if keep:
            entered = [x if x.requires_grad else d for x, d in zip(leaves, duals, strict=True)]
            pushed = gated_at_custom_code(fun, leaves, entered, tangents, primals, pushed)
        # A derivative in f may leave a graph to its own aliases.
        leaves_graph = keep and nested and not any(map(_is_tracked, leaves))
        if shows or mode.shows or leaves_graph:
            primals, pushed = _without_recorded(primals), _without_recorded(pushed)
            extras = [_without_recorded([x])[0] if is_inexact(x) else x for x in extras]
    if unseen:  # a TorchScript call made the nodes: run f again to find it, and raise

        def again(xs: Sequence[Tensor]) -> list[Tensor]:
            with torch.no_grad():
                return _dual_jvp(fun, [detached(x, DERIVATIVE) for x in xs], tangents, seen=True)[0]

        with scripts_refused(caller):
            rerun(again, leaves)
    if elsewhere.found or (nested and all(t is None for _, t in unpacked)):
        refuse_lost_along(fun, leaves)
    note_taken(primals, pushed, leaves, leaves, torch.is_grad_enabled())
    if torch.is_grad_enabled():
        return primals, extras, pushed
    return [_freed(xs) for xs in (primals, extras, pushed)]


def _without_recorded(xs: Sequence[Tensor]) -> list[Tensor]:
    """Results, detached if their graph exists only because of `recorded_dual`."""
    return [
        _detached(x) if x.requires_grad and all(map(is_spent, surveyed([x]).leaves)) else x
        for x in xs
    ]


def refuse_lost_along(fun: Fun, leaves: Sequence[Tensor]) -> None:
    """Raises for leaves that are cut, or read by another reference, as reverse mode finds."""
    parameters = parameters_of(leaves)

    def run(xs: Sequence[Tensor]) -> list[int]:
        for x, p in zip(xs, parameters, strict=True):
            if p is not None:
                setattr(x, SOURCE, weakref.ref(p))
        result = uncompiled(_eager_vjp, fun, list(xs), True)
        return result.cut(result.pullback(result.outs))

    cut: Sequence[int] = ()  # where reverse mode fails nothing is known
    with upstream.temporarily_clear_interpreter_stack(), suppress(RuntimeError):
        cut = rerun(run, leaves)
    refuse_cut(fun, cut)
