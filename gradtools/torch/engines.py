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
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradtools.backend import CannotPush, Evaluation, Fun
from gradtools.disconnected_inputs import refuse_cut
from gradtools.errors import refusal
from gradtools.rules import spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import (
    CPP_NODE,
    SOURCE,
    SPENT,
    OpenDerivative,
    ReadsElsewhere,
    guarded,
    here,
    is_spent,
    nodes_made,
    note_taken,
    parameters_of,
    refuse_read_elsewhere,
    refuse_torchscript,
    scripts_refused,
    surveyed,
)
from gradtools.torch.compiling import (
    is_compiling,
    mark_lost,
    nodes_of,
    not_exported,
    only_inlined,
    refuse_lost,
    uncompiled,
)
from gradtools.torch.forward_mode.no_grad import NoGradStopsTangents, recorded_dual
from gradtools.torch.forward_mode.one_tangent import OneTangent
from gradtools.torch.forward_mode.pushing import RightTangents, gated_where_unseen
from gradtools.torch.forward_mode.training_machinery import pushed_through
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.known_errors import GOES_BACKWARD, explain, explained
from gradtools.torch.modes import NoForwardMode, dual_level, dual_of, forward_mode
from gradtools.torch.operation_marks import DERIVATIVE, detached, hooks_of_users
from gradtools.torch.plain_programs.backward_nodes import corrected, wrong_in_batches, wrong_nodes
from gradtools.torch.plain_programs.modes import (
    PlainPrograms,
    PlainProgramsInTrace,
)
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
    for flag in _compiled if compiling else _eager.open:
        flag[0] = True
    if not compiling and upstream.peek_interpreter_stack() is None:
        if upstream.DYNAMO in sys.modules:
            result = uncompiled(_eager_vjp, fun, leaves, once)
            # Dynamo would compile Python code that autograd calls, such as rules.
            return replace(result, pullback=partial(uncompiled, result.pullback))
        return _eager_vjp(fun, leaves, once)
    with explained(caller_of(fun)):
        return _functorch_vjp(fun, leaves, groups)


@only_inlined
def jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor]) -> Any:
    """`(outs, extras, pushed)`, by the engine for the current context."""
    if upstream.is_exporting():
        raise not_exported(caller_of(fun))
    if upstream.DYNAMO in sys.modules and not torch.compiler.is_dynamo_compiling():
        return uncompiled(_jvp, fun, leaves, tangents)
    return _jvp(fun, leaves, tangents)


def _jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor]) -> Any:
    _note_derivative(_open_derivatives())
    with explained(caller_of(fun)):
        if _in_functorch():
            if not _is_differentiated_again():
                with suppress(NoForwardMode):
                    return _functorch_jvp(fun, leaves, tangents)
            outs, extras, push = _functorch_linearize(fun, leaves)
            return outs, extras, push(tangents)
        with suppress(NoForwardMode):
            return _dual_jvp(fun, leaves, tangents)
        outs, extras, push = _eager_linearize(fun, leaves)
        return outs, extras, push(tangents)


@only_inlined
def linearize(fun: Fun, leaves: list[Tensor]) -> Any:
    """`(outs, extras, pushforward)`: the transpose of the pullback, so f is evaluated once."""
    if upstream.is_exporting():
        raise not_exported(caller_of(fun))
    if upstream.DYNAMO in sys.modules and not torch.compiler.is_dynamo_compiling():
        return uncompiled(_linearize, fun, leaves)
    return _linearize(fun, leaves)


def _linearize(fun: Fun, leaves: list[Tensor]) -> Any:
    _note_derivative(_open_derivatives())
    with explained(caller_of(fun)):
        return (_functorch_linearize if _in_functorch() else _eager_linearize)(fun, leaves)


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
        given: list[Tensor] = []
        for y, ct in zip(outs, cts, strict=True):
            if ct is not None and y.requires_grad:
                ys.append(y)
                given.append(_normal(ct) if ct.is_inference() else ct)
        if not ys:
            return inside.filled([None] * len(aliases), outs)
        create = torch.is_grad_enabled() and (attached or any(map(_is_tracked, given)))
        again = create or upstream.forward_level() >= 0
        guard, seen = None, survey
        if again and upstream.peek_interpreter_stack() is not None:  # the rows of a Jacobian
            seen = survey._replace(wrong=[*{*survey.wrong, *wrong_in_batches(ys)}])
        if not ordinary or seen.wrong:
            guard = guarded(caller_of(fun), fun, points(), seen, aliases, again)
        try:
            # Some tangents are wrong without create_graph=True.
            grads = _pulled(ys, aliases, given, create or not once, again, inside.spent, guard)
        except RuntimeError as error:
            if any(x.is_leaf and x.grad is not None for x in aliases):
                raise refusal(error, f"{caller_of(fun)}: {GOES_BACKWARD}") from error
            explain(caller_of(fun), error)
            raise
        if again and survey.hooked:
            grads = _gated_at_hooks(fun, points(), aliases, ys, given, grads)
        if here.opened:
            note_taken(ys, grads, leaves, aliases, create, inside)
        if not create:
            grads = _freed(grads)
        return inside.filled(grads, outs) if inside.entered or inside.constant else list(grads)

    def cut(grads: Sequence[Tensor | None]) -> list[int]:
        if not all(g is not None for g in grads):
            refuse_read_elsewhere(fun, outs, leaves, grads)
        return inside.cut(grads, outs)

    def where_lost(i: int) -> list[str]:
        from gradtools.seeing.torch.recorded_run import where_lost

        return where_lost(fun, points(), i)

    def transposed() -> Any:
        linear = ordinary and not survey.hooked  # hooks need not be
        if not (getattr(fun, "may_transpose", False) and linear and _is_plain(outs)):
            return None
        try:
            return _pushing(_transposed(fun, leaves, evaluated), attached)
        except RuntimeError:  # some operation's backward pass has no derivative
            return None

    keeps_graph = attached or not getattr(fun, "returns_output", True)
    return Evaluation(
        outs if keeps_graph else _freed(outs),
        extras if attached or not extras else _freed(extras),
        pullback,
        cut=cut,
        where_lost=where_lost,
        transposed=transposed,
    )


def _is_plain(ys: Sequence[Tensor]) -> bool:
    """Whether the graph consists of PyTorch's own operations, without custom Functions."""
    nodes = nodes_of([y for y in ys if y.requires_grad])
    return not any(isinstance(n, BackwardCFunction) or type(n).__name__ == CPP_NODE for n in nodes)


def _pushing(push: Any, attached: bool) -> Any:
    """A transposed pullback that raises `CannotPush` if an operation has no second derivative."""

    def pushed(tangents: list[Tensor]) -> list[Tensor]:
        try:
            result = push(tangents)
        except RuntimeError as error:
            raise CannotPush from error
        if attached and not _is_plain(result):
            raise CannotPush
        return result

    return pushed


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
        if guard is not None or is_in_inference():
            return _pulled_within(guard, ys, xs, cts, retain, create)
        return pulled(ys, xs, cts, retain, create)
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


def _pulled_within(guard: Any, ys: Any, xs: Any, cts: Any, retain: bool, create: bool) -> Any:
    keep = torch.is_grad_enabled()
    with guard or nullcontext(), outside_of_inference():
        if torch.is_grad_enabled() != keep:  # leaving inference mode enables it
            torch.set_grad_enabled(keep)
        return torch.autograd.grad(ys, xs, cts, retain, create, allow_unused=True)


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
    found = pulled or [None] * len(leaves)
    refuse_read_elsewhere(fun, outs, leaves, found)
    refuse_cut(fun, inside.cut(found, outs))

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
        return [torch.zeros_like(y) if t is None else t for y, t in zip(outs, pushed, strict=True)]

    return push


def _evaluate(fun: Fun, leaves: list[Tensor]) -> Any:
    """f at aliases of the leaves, once, with a graph, and a survey of the graph."""
    keep = torch.is_grad_enabled()  # before leaving inference mode enables it
    if not is_in_inference():
        # Function modes must see that gradients are enabled.
        return _evaluated(fun, leaves, keep, keep and not upstream.count_of_function_modes())
    with torch.inference_mode(False):
        return _evaluated(fun, leaves, keep, False)


def _evaluated(fun: Fun, leaves: list[Tensor], keep: bool, on: bool) -> Any:
    around = here.opened
    # Skip tagging these detaches; no recorder is active.
    plain = on and not upstream.count_of_dispatch_modes() and upstream.forward_level() < 0
    tracks = keep and not getattr(fun, "deferred", False)  # whether aliases are views of leaves
    aliases = [
        x.detach().requires_grad_()
        if plain and not ((tracks and x.requires_grad) or x.is_inference())
        else _alias(x, tracks)
        for x in leaves
    ]
    inside, hooks = _begun(aliases, around, leaves), hooks_of_users()
    before = nodes_made()
    around.append(inside)
    try:
        if on:
            outs, extras = fun(*aliases)
        else:
            with torch.enable_grad():
                outs, extras = fun(*aliases)
    finally:
        around.pop()
        if on and not torch.is_grad_enabled():  # f disabled it
            torch.set_grad_enabled(True)
    survey = surveyed(outs, nodes_made() - before)
    if survey.compiled:
        refuse_lost(caller_of(fun), outs)
    if hooks_of_users() != hooks:
        survey = survey._replace(hooked=True)
    if survey.compiled:
        mark_lost(survey.compiled)
    inside.spent[0] = True
    captured = not all(map(is_spent, survey.leaves))
    attached = keep and (captured or (tracks and any(map(_is_tracked, leaves))))
    return outs, extras, aliases, attached, survey, inside


def _begun(
    aliases: Sequence[Tensor], around: Sequence[OpenDerivative], leaves: Sequence[Tensor]
) -> OpenDerivative:
    """The record of a derivative whose function is about to be evaluated, in others' functions."""
    before, spent = [set(each.entered) for each in around] if around else [], [False]
    for alias in aliases:
        setattr(alias, SPENT, spent)
    return OpenDerivative(aliases, set(), set(), before, spent, leaves)


@contextmanager
def _opened(aliases: Sequence[Tensor]) -> Iterator[OpenDerivative]:
    """Around the evaluation of a function at the aliases."""
    around = here.opened
    around.append(_begun(aliases, around, aliases))
    try:
        yield around[-1]
    finally:
        around.pop()


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


def _unpacked(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return (x, None) if upstream.forward_level() < 0 else forward_ad.unpack_dual(x)


# --- forward mode ------------------------------------------------------------------------


def _dual_jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor], seen: bool = False) -> Any:
    keep = torch.is_grad_enabled()  # before leaving inference mode enables it
    with outside_of_inference(), torch.set_grad_enabled(keep), dual_level():
        pairs = zip(leaves, tangents, strict=True)
        duals = [dual_of(_unshared(_normal(x)), _normal(t)) for x, t in pairs]
        shows = keep and any(map(_is_tracked, tangents))
        if shows:  # record a graph to see which operations the tangents' derivatives pass
            duals = [recorded_dual(x) for x in duals]
        recorded = nodes_made()
        with torch.enable_grad():
            caller = caller_of(fun)
            mode = NoGradStopsTangents(False, True, caller) if keep else OneTangent((), caller)
            with mode, pushed_through(caller, keep), ReadsElsewhere(leaves) as elsewhere:
                outs, extras, nested = _watched(fun, duals)
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
            pushed = _gated_at_custom_code(fun, leaves, entered, tangents, primals, pushed)
        if shows or mode.shows:
            primals, pushed = _without_recorded(primals), _without_recorded(pushed)
            extras = [_without_recorded([x])[0] if is_inexact(x) else x for x in extras]
    if unseen:
        _refuse_unseen(fun, leaves, tangents)
    if elsewhere.found or (nested and all(t is None for _, t in unpacked)):
        refuse_lost_along(fun, leaves)
    note_taken(primals, pushed, leaves, leaves, torch.is_grad_enabled())
    if torch.is_grad_enabled():
        return primals, extras, pushed
    return [_freed(xs) for xs in (primals, extras, pushed)]


def _gated_at_custom_code(
    fun: Fun,
    leaves: Any,
    entered: Sequence[Tensor],
    tangents: Any,
    primals: list[Tensor],
    pushed: list[Tensor],
) -> list[Tensor]:
    """The tangents, with gates that raise where custom code loses a derivative of them.

    entered: The leaves in the graph of the primals.
    """
    tracked = [y for y in primals if y.requires_grad]
    pushed = gated_where_unseen(caller_of(fun), tracked, pushed)
    custom = surveyed(tracked).custom if tracked else []
    custom = [node for node in custom if not _is_bookkeeping(node)]
    if not custom:
        return pushed
    from gradtools.torch.double_backward import gated_tangents

    along = [*zip(leaves, entered, tangents, strict=True)]
    return gated_tangents(caller_of(fun), fun, along, primals, custom, pushed)


def _is_bookkeeping(node: Any) -> bool:
    if not isinstance(node, BackwardCFunction):  # TorchScript and C++ functions
        return False
    return upstream.forward_class(type(node)) in upstream.bookkeeping()


def _without_recorded(xs: Sequence[Tensor]) -> list[Tensor]:
    """Results, detached if their graph exists only because of `recorded_dual`."""
    return [
        _detached(x) if x.requires_grad and all(map(is_spent, surveyed([x]).leaves)) else x
        for x in xs
    ]


def _refuse_unseen(fun: Fun, leaves: Sequence[Tensor], tangents: list[Tensor]) -> None:
    """Runs f again to find the TorchScript call that made nodes unseen by modes, and raises."""

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return _dual_jvp(fun, [detached(x, DERIVATIVE) for x in xs], tangents, seen=True)[0]

    with scripts_refused(caller_of(fun)):
        rerun(run, leaves)


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


def caller_of(fun: Fun) -> str:
    """The operator that the user called, if the function knows it."""
    return getattr(fun, "caller", "gradtools")


# --- inside functorch and dynamo ---------------------------------------------------------


def _in_functorch() -> bool:
    return is_compiling() or upstream.peek_interpreter_stack() is not None


def _is_differentiated_again(own: int = 0) -> bool:
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
    result = [level for level in stack if level.key() in (kinds.Grad, kinds.Jvp)]
    return len(result) > own


def _functorch_vjp(fun: Fun, leaves: list[Tensor], groups: Sequence[int] | None) -> Evaluation:
    reached: list[bool] = []
    nested: list[bool] = []
    entered: list[OpenDerivative] = []
    empty: list[bool] = []
    wrong: list[Any] = []
    hooked: list[Tensor] = []  # if f sets hooks, the leaves of its graph
    plain: list[bool] = []
    keep = torch.is_grad_enabled()

    def paired(*xs: Tensor) -> Any:
        probed_groups = groups if groups is not None and is_compiling() else ()
        if is_compiling():
            nested_in_trace = bool(_open_derivatives())
            with PlainProgramsInTrace(1 + len(probed_groups), nested_in_trace):
                outs, extras, inside = _watched(
                    lambda *a: _probed(fun, a, probed_groups, reached), xs
                )
            nested[:] = [inside]
        else:
            again = _is_differentiated_again(1)
            guarding = _calls_guarded(caller_of(fun)) if again or keep else nullcontext()
            count = hooks_of_users()
            with _opened(xs) as inside, guarding, PlainPrograms(), _pushed_from_outside():
                outs, extras = fun(*xs)
            entered[:] = [inside]
            survey = surveyed(outs)
            sets_hooks = hooks_of_users() != count
            if (again or keep) and sets_hooks:
                hooked[:] = survey.leaves
            if again:
                refuse_torchscript(caller_of(fun), outs)
            result, wrong[:] = {id(leaf) for leaf in survey.leaves}, survey.wrong
            reached[:] = [id(x) in result for x in xs]
            ordinary = not (again or survey.lost or survey.wrong or survey.custom or sets_hooks)
            plain[:] = [getattr(fun, "may_transpose", False) and ordinary and _is_plain(outs)]
        empty[:] = [not outs]
        return tuple(outs) or (xs[0].new_zeros(()),), tuple(extras)

    outs, pull, extras = torch.func.vjp(paired, *leaves, has_aux=True)  # type: ignore[misc]
    outs = () if empty[0] else outs

    def pullback(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not outs:
            return [None] * len(leaves)
        filled = tuple(
            torch.zeros_like(y) if ct is None else ct for ct, y in zip(cts, outs, strict=True)
        )
        # A view, since a tensor that a rule returns unchanged may be a wrapper of a dead level.
        with explained(caller_of(fun)), corrected(wrong):
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
        try:
            return _pushing(_pulled_back(pull, outs), False)
        except RuntimeError:  # some operation's backward pass has no derivative
            return None

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
    outs, _, extras = torch.func.vjp(level, *mine, has_aux=True)  # type: ignore[misc]
    return list(outs), list(extras)


def _functorch_jvp(fun: Fun, leaves: list[Tensor], tangents: list[Tensor]) -> Any:
    stopped: list[bool] = []

    def paired(*xs: Tensor) -> Any:
        if is_compiling():
            _pushed_in_trace.append(True)
            try:
                with _twice_in_trace(), RightTangents():
                    outs, extras = fun(*xs)
            finally:
                _pushed_in_trace.pop()
        else:
            mode = NoGradStopsTangents(False, True, caller_of(fun))
            with torch.enable_grad(), mode, ReadsElsewhere(leaves) as elsewhere:
                outs, extras, nested = _watched(fun, xs)
            refuse_torchscript(caller_of(fun), outs)
            lost = nested and all(_unpacked(y)[1] is None for y in outs)
            stopped[:] = [lost or elsewhere.found]
        return tuple(outs), tuple(extras)

    apart = tuple(_unshared(x) for x in leaves)
    with nullcontext() if is_compiling() else forward_mode():
        outs, pushed, extras = torch.func.jvp(paired, apart, tuple(tangents), has_aux=True)  # type: ignore[misc]
    if any(stopped) and not any(map(is_wrapped, leaves)):
        refuse_lost_along(fun, leaves)
    # Under vmap PyTorch promotes the tangent of a scalar times a Python number, unlike its value.
    pushed = [
        t if t.dtype == y.dtype or not is_inexact(y) else t.to(y.dtype)
        for y, t in zip(outs, pushed, strict=True)
    ]
    result = [list(xs) for xs in (outs, extras, pushed)]
    return result if torch.is_grad_enabled() else [[_untracked(x) for x in xs] for xs in result]


def _untracked(x: Any) -> Any:
    """x without its graph, under no_grad, but with its tangent and functorch wrappers."""
    return x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x


def _unshared(x: Tensor) -> Tensor:
    """x, or a copy if its entries overlap in memory: tangents get x's memory layout."""
    if is_compiling() or x.is_contiguous():
        return x
    if all(n == 1 or s for n, s in zip(x.shape, x.stride(), strict=True)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _is_pushed_again() -> bool:
    """Whether an outer level is forward mode, or may be in compiled code."""
    stack = upstream.get_interpreter_stack() or ()
    pushes = any(level.key() == upstream.TransformType.Jvp for level in stack)
    return is_compiling() or pushes or upstream.forward_level() >= 0


def _twice_in_trace() -> AbstractContextManager[Any]:
    """Unfused attention, for traced code that is differentiated again."""
    return sdpa_kernel(SDPBackend.MATH)


def _pushed_from_outside() -> AbstractContextManager[Any]:
    """`NoGradStopsTangents`, for a vjp inside of PyTorch's own `torch.func.jvp`."""
    if not _is_pushed_again():
        return nullcontext()
    modes = upstream.function_modes()
    return (
        nullcontext()
        if any(isinstance(m, NoGradStopsTangents) for m in modes)
        else NoGradStopsTangents(False, True)
    )


@contextmanager
def _differentiated_twice(caller: str) -> Iterator[None]:
    """Around a function whose backward pass is differentiated again."""
    if is_compiling():
        with _twice_in_trace():
            yield
        return
    with _calls_guarded(caller), PlainPrograms(times=1, control_flow=True):
        yield


def _calls_guarded(caller: str) -> AbstractContextManager[Any]:
    from gradtools.torch.double_backward import calls_guarded

    return calls_guarded(caller)


def _functorch_linearize(fun: Fun, leaves: list[Tensor]) -> Any:
    def paired(*xs: Tensor) -> Any:
        with _differentiated_twice(caller_of(fun)):
            outs, extras = evaluated_to_push(caller_of(fun), fun, *xs)
        if not is_compiling():
            refuse_torchscript(caller_of(fun), outs)
        return tuple(outs), tuple(extras)

    outs, pull, extras = torch.func.vjp(paired, *leaves, has_aux=True)  # type: ignore[misc]
    return list(outs), list(extras), _pulled_back(pull, outs)


def _pulled_back(pull: Any, outs: Sequence[Tensor]) -> Any:
    """The pushforward, as the pullback of the pullback."""
    ones = tuple(torch.ones_like(y) for y in outs)
    _, push = torch.func.vjp(pull, ones)  # type: ignore[misc]
    return lambda tangents: list(push(tuple(tangents))[0])


# --- whether f takes a derivative itself -------------------------------------------------


class _OpenFlags(threading.local):
    def __init__(self) -> None:
        self.open: list[list[bool]] = []


_eager = _OpenFlags()
_compiled: list[list[bool]] = []  # dynamo can trace a plain list, but no thread-local


_pushed_in_trace: list[bool] = []


def is_pushed_in_trace() -> bool:
    """Whether dynamo traces a function in forward mode."""
    return bool(_pushed_in_trace)


def _open_derivatives() -> list[list[bool]]:
    """A stack of flags, one for each derivative whose function is being evaluated."""
    return _compiled if is_compiling() else _eager.open


def is_inside() -> bool:
    """Whether a gradtools derivative is evaluating its function."""
    return bool(_open_derivatives())


def _note_derivative(still_open: list[list[bool]]) -> None:
    for flag in still_open:
        flag[0] = True


def _watched(fun: Fun, xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], bool]:
    """f at xs, and whether it took a gradtools derivative itself."""
    flag = [False]
    still_open = _open_derivatives()
    still_open.append(flag)
    try:
        outs, extras = fun(*xs)
    finally:
        still_open.pop()
    return outs, extras, flag[0]
