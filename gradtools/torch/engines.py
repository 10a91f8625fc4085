"""The engines that differentiate in PyTorch, chosen by the context of the call.

    eager code                       `torch.autograd.grad`, at aliases of the arguments
    torch.func and compiled code     `torch.func`, which nests and can be traced there
    forward mode                     dual numbers, of which a process has one level; where that is
                                     in use, the transpose of the pullback

What f holds is differentiated as PyTorch differentiates it. Whether that is right is the question
of `gradtools.testing.checked`.

Results are attached to autograd's graph exactly when grad mode is on at entry and something that
they depend on requires grad. Otherwise they are detached, and the graph is freed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.function import BackwardCFunction

from gradtools.backend import CannotPush, Evaluation, Fun
from gradtools.rules import spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import SPENT, depends_on_others, leaves_of, nodes_of
from gradtools.torch.compiling import is_compiling, only_inlined, uncompiled
from gradtools.torch.function_modes import MappedNorms, PlainKernels
from gradtools.torch.functorch_wrappers import is_inexact, unshared
from gradtools.torch.known_errors import explained
from gradtools.torch.modes import (
    NOTHING,
    NoForwardMode,
    dual_level,
    dual_of,
    forward_mode,
    has_checkpoint,
    unpacked,
)
from gradtools.torch.operation_marks import DERIVATIVE, detached
from gradtools.torch.rules.installing import evaluated_to_push

Tensor = torch.Tensor
Tensors = list[Tensor]
Pushforward = Callable[[Tensors], Tensors]
traced: list[bool] = []  # not empty while dynamo traces a function that is differentiated here


_NONE: frozenset[int] = frozenset()


class _Here(threading.local):
    """How many derivatives this thread has taken: it shows whether a function took one itself."""

    taken = 0
    depth = 0  # of derivatives whose functions are being evaluated


_here = _Here()


def in_functorch() -> bool:
    return is_compiling() or upstream.peek_interpreter_stack() is not None


def vjp(fun: Fun, leaves: Tensors, *, groups: Sequence[int] | None, once: bool) -> Evaluation:
    """One evaluation and its pullback."""
    if is_compiling():
        return _functorch_vjp(fun, leaves)
    _here.taken += 1
    if upstream.peek_interpreter_stack() is not None:
        return _functorch_vjp(fun, leaves)
    if upstream.DYNAMO not in sys.modules:
        return _eager_vjp(fun, leaves, once)
    result = uncompiled(_eager_vjp, fun, leaves, once)
    # Dynamo would compile Python code that autograd calls, such as rules.
    return replace(result, pullback=partial(uncompiled, result.pullback))


@only_inlined
def jvp(fun: Fun, leaves: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    """`(outs, extras, pushed)`, of one evaluation.

    By dual numbers. Where their level is in use, and inside of a checkpoint, which would run all of
    this again in its backward pass, by the transpose of the pullback.
    """
    if is_compiling():
        return _functorch_jvp(fun, leaves, tangents)
    _here.taken += 1
    engine = _dual_jvp if upstream.peek_interpreter_stack() is None else _functorch_jvp
    with suppress(NoForwardMode), unpacked() as hooks:
        if not has_checkpoint(hooks):
            return _eagerly(engine, fun, leaves, tangents)
    outs, extras, push = linearize(fun, leaves)
    return outs, extras, push(tangents)


@only_inlined
def linearize(fun: Fun, leaves: Tensors) -> tuple[Tensors, Tensors, Pushforward]:
    """`(outs, extras, pushforward)`: the transpose of the pullback, so f is evaluated once."""
    if is_compiling():
        return _functorch_linearize(fun, leaves)
    _here.taken += 1
    in_eager = upstream.peek_interpreter_stack() is None
    return _eagerly(_eager_linearize if in_eager else _functorch_linearize, fun, leaves)


def _eagerly(engine: Callable[..., Any], fun: Fun, *args: Any) -> Any:
    """Runs an engine outside of compiled code, explaining PyTorch's errors."""
    with explained(caller_of(fun)):
        if upstream.DYNAMO in sys.modules:
            return uncompiled(engine, fun, *args)
        return engine(fun, *args)


def caller_of(fun: Fun) -> str:
    """The operator that the user called, if the function knows it."""
    return getattr(fun, "caller", "gradtools")


# --- eager code: torch.autograd.grad -------------------------------------------------------------


def _eager_vjp(fun: Fun, leaves: Tensors, once: bool) -> Evaluation:
    hooks = upstream.hooks_made()
    with explained(caller_of(fun)):
        evaluated = _evaluated(fun, leaves)
    outs, extras, aliases, attached, spent, plain, nested = evaluated
    hooked = upstream.hooks_made() != hooks

    def pullback(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        with explained(caller_of(fun)):
            grads = _pulled(outs, aliases, cts, attached, not once, spent, plain)
        # Forward mode in f may leave symbolic zeros.
        return _in_memory(grads, aliases) if nested else grads

    def transposed() -> Pushforward | None:
        if hooked or not getattr(fun, "may_transpose", False):
            return None
        if any(issubclass(type(n), BackwardCFunction) for n in nodes_of(outs)):
            return None
        return _or_cannot_push(_transposed(evaluated))

    if not attached and getattr(fun, "returns_output", True):
        return Evaluation(
            _freed(outs), _freed(extras), pullback, nested=nested, transposed=transposed
        )
    extras = extras if attached else _freed(extras)
    return Evaluation(outs, extras, pullback, nested=nested, transposed=transposed)


def _evaluated(fun: Fun, leaves: Tensors, plain: bool = False) -> Any:
    """f at aliases of the leaves, once, with a graph.

    Returns the outputs, the extras, the aliases, whether results are attached to a graph outside,
    the flag of the aliases (see `is_spent`), whether f runs by plain kernels, and whether it took a
    derivative itself.
    """
    keep, taken, spent = torch.is_grad_enabled(), _here.taken, [False]
    own: frozenset[int] = getattr(fun, "own", _NONE)  # parameters, at which a module is called
    with _recording():
        aliases = [x if id(x) in own else _alias(x, keep, spent) for x in leaves]
        plain = plain or _here.depth > 0 or getattr(fun, "plain_kernels", False)
        _here.depth += 1
        try:
            with PlainKernels() if plain else NOTHING:
                outs, extras = fun(*aliases)
        finally:
            _here.depth -= 1
    spent[0] = True
    deferred = bool(own) and fun.is_deferred()  # type: ignore[attr-defined]
    attached = keep and not deferred and depends_on_others(outs)
    return outs, extras, aliases, attached, spent, plain, _here.taken != taken


def _pulled(
    outs: Sequence[Tensor],
    aliases: Sequence[Tensor],
    cts: Sequence[Tensor | None],
    attached: bool,
    retain: bool,
    spent: list[bool],
    plain: bool,
) -> list[Tensor | None]:
    """The pullback of cotangents to the aliases; None for those that the outputs do not reach."""
    pairs = [(y, ct) for y, ct in zip(outs, cts, strict=True) if ct is not None and y.requires_grad]
    if not pairs:
        return [None] * len(aliases)
    ys, seeds = zip(*pairs, strict=True)
    create = torch.is_grad_enabled() and (attached or True in [ct.requires_grad for ct in seeds])
    again = create or upstream.forward_level() >= 0  # some tangents are wrong without a graph
    # A checkpoint that computes f again attaches to the aliases, and takes the kernels, as before.
    spent[0], within = False, PlainKernels() if plain else NOTHING
    try:
        if not torch.is_inference_mode_enabled():
            seeds = [_normal(ct) for ct in seeds]
            grads = pulled(ys, aliases, seeds, retain or create, again, within)
        else:
            with torch.inference_mode(False), torch.no_grad():
                seeds = [_normal(ct) for ct in seeds]
                grads = pulled(ys, aliases, seeds, retain, again, within)
    finally:
        spent[0] = True
    return list(grads) if create else _freed(grads)


def pulled(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    cts: Sequence[Tensor],
    retain: bool,
    create: bool,
    within: AbstractContextManager[Any] = NOTHING,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` without its argument checks; None for unreached inputs."""
    if torch.overrides.has_torch_function((*ys, *xs)) and not _only_own_modes((*ys, *xs)):
        # A mode or a subclass must see the call.
        return torch.autograd.grad(ys, xs, cts, retain, create, allow_unused=True)
    run = upstream.engine
    # A recording identifies autograd's accumulations by the calling function.
    if upstream.DYNAMO in sys.modules or upstream.count_of_dispatch_modes():
        run = upstream.run_engine
    ends, seeds, sources = tuple(ys), tuple(cts), tuple(xs)
    how = {"allow_unreachable": True, "accumulate_grad": False}
    with within:
        return run(ends, seeds, retain, create, sources, **how)


def _only_own_modes(xs: Sequence[Tensor]) -> bool:
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in xs)
    return plain and all(isinstance(mode, PlainKernels) for mode in upstream.function_modes())


def _eager_linearize(fun: Fun, leaves: Tensors) -> Any:
    evaluated = evaluated_to_push(caller_of(fun), _evaluated, fun, leaves, True)
    outs, extras, _, attached, *_ = evaluated
    push = _transposed(evaluated)
    return (outs, extras, push) if attached else (_freed(outs), _freed(extras), push)


def _transposed(evaluated: Any) -> Pushforward:
    """The pushforward, as the pullback of the pullback, which is linear in the cotangents."""
    outs, _, aliases, attached, spent, plain, _ = evaluated
    tracked = [y for y in outs if y.requires_grad]
    with _recording():  # any cotangents will do
        dummies = [torch.ones_like(y, requires_grad=True) for y in tracked]
        for dummy in dummies:
            setattr(dummy, SPENT, spent)
        grads = _pulled(tracked, aliases, dummies, True, True, spent, plain)

    def push(tangents: Tensors) -> Tensors:
        pushed = _pulled(
            [x for x in grads if x is not None],
            dummies,
            [t for x, t in zip(grads, tangents, strict=True) if x is not None],
            attached,
            True,
            spent,
            plain,
        )
        full = spread(pushed, [y.requires_grad for y in outs])
        return [_filled(t, y) for t, y in zip(full, outs, strict=True)]

    return push


def _or_cannot_push(push: Pushforward) -> Pushforward:
    """A pushforward that raises `CannotPush` if an operation has no second derivative."""

    def pushed(tangents: Tensors) -> Tensors:
        try:
            return push(tangents)
        except RuntimeError as error:
            raise CannotPush from error

    return pushed


def _dual_jvp(fun: Fun, leaves: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    keep = torch.is_grad_enabled()
    outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING
    with outside, torch.set_grad_enabled(keep), dual_level():
        pairs = zip(leaves, tangents, strict=True)
        duals = [dual_of(unshared(_normal(_kept(fun, x))), _normal(t)) for x, t in pairs]
        with PlainKernels():
            outs, extras = fun(*duals)
        pushed = [forward_ad.unpack_dual(y) for y in outs]
        outs = [y for y, _ in pushed]
        tangents_out = [_filled(t, y) for y, t in pushed]
        extras = [forward_ad.unpack_dual(x).primal if is_inexact(x) else x for x in extras]
    if keep:
        return outs, extras, tangents_out
    return _freed(outs), _freed(extras), _freed(tangents_out)


# --- torch.func: inside of its transforms, and in compiled code ----------------------------------


def _functorch_vjp(fun: Fun, leaves: Tensors) -> Evaluation:
    """In compiled code there are zeros for leaves that do not reach an output."""
    some: list[bool] = []  # dynamo does not trace `list[bool]()`
    reached: list[bool] = []
    nested = [False]

    def run(*xs: Tensor) -> Any:
        if is_compiling():
            plain = getattr(fun, "plain_kernels", False)
            outs, extras = _traced(fun, xs, plain or True in [x.requires_grad for x in leaves])
        else:
            taken = _here.taken
            with _kernels(fun):
                outs, extras = fun(*xs)
            leaves_reached = {*map(id, leaves_of(outs))}
            reached[:] = [id(x) in leaves_reached for x in xs]
            nested[0] = _here.taken != taken
        some[:] = [bool(outs)]
        return tuple(outs) or (xs[0].new_zeros(()),), tuple(extras)

    with NOTHING if is_compiling() else explained(caller_of(fun)):
        xs = leaves if is_compiling() else [_kept(fun, x) for x in leaves]
        outs, pull, extras = _func_vjp(run, *xs, has_aux=True)

    def pullback(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not some[0]:
            return [None] * len(leaves)
        full = zip(outs, cts, strict=True)
        grads = pull(tuple([torch.zeros_like(y) if ct is None else ct for y, ct in full]))
        grads = [g.view_as(g) for g in grads]  # f may return a wrapper of a level that has ended
        if reached:
            grads = [g if r else None for g, r in zip(grads, reached, strict=True)]
        return _in_memory(grads, leaves) if nested[0] else grads

    shown = list(outs) if some[0] else []
    return Evaluation(shown, list(extras), pullback, checked=bool(reached), nested=nested[0])


def _func_vjp(fun: Any, *primals: Any, has_aux: bool = False) -> Any:
    """`torch.func.vjp`, which refuses to run inside of hooks on saved tensors, outside of them."""
    if is_compiling() or upstream.saved_tensors_hooks_on(False) is None:
        return torch.func.vjp(fun, *primals, has_aux=has_aux)
    with unpacked() as hooks:
        if not has_checkpoint(hooks):
            return torch.func.vjp(fun, *primals, has_aux=has_aux)
    return torch.func.vjp(fun, *primals, has_aux=has_aux)


def _functorch_jvp(fun: Fun, leaves: Tensors, tangents: Tensors) -> Any:
    def run(*xs: Tensor) -> Any:
        outs, extras = _traced(fun, xs, True)
        return tuple(outs), tuple(extras)

    xs = tuple([unshared(_kept(fun, x)) for x in leaves])
    with NOTHING if is_compiling() else forward_mode():
        outs, pushed, extras = torch.func.jvp(run, xs, tuple(tangents), has_aux=True)  # type: ignore[misc]
    # Under vmap PyTorch promotes the tangent of a scalar times a Python number, unlike its value.
    pairs = zip(pushed, outs, strict=True)
    pushed = [t if t.dtype == y.dtype or not is_inexact(y) else t.to(y.dtype) for t, y in pairs]
    return list(outs), list(extras), pushed


def _functorch_linearize(fun: Fun, leaves: Tensors) -> Any:
    def run(*xs: Tensor) -> Any:
        run = partial(evaluated_to_push, caller_of(fun), fun)
        outs, extras = _traced(run, xs, True)
        return tuple(outs), tuple(extras)

    outs, pull, extras = _func_vjp(run, *leaves, has_aux=True)
    push = _func_vjp(pull, tuple([torch.ones_like(y) for y in outs]))[1]
    return list(outs), list(extras), lambda tangents: list(push(tuple(tangents))[0])


def _traced(fun: Fun, xs: Sequence[Tensor], plain_kernels: bool) -> Any:
    traced.append(True)
    try:
        with PlainKernels() if plain_kernels else NOTHING:
            return fun(*xs)
    finally:
        traced.pop()


def _kernels(fun: Fun) -> AbstractContextManager[Any]:
    """The kernels for a function that is pulled back inside of torch.func's transforms."""
    kinds = [level.key() for level in upstream.get_interpreter_stack() or ()]
    own = kinds.pop()
    assert own == upstream.TransformType.Grad
    if getattr(fun, "plain_kernels", False) or any(k in _DERIVATIVES for k in kinds):
        return PlainKernels()
    return MappedNorms() if kinds else NOTHING


_DERIVATIVES = (upstream.TransformType.Grad, upstream.TransformType.Jvp)


# --- tensors -------------------------------------------------------------------------------------


def _recording() -> AbstractContextManager[Any]:
    """Context in which graphs are recorded, also inside of `no_grad` and `inference_mode`."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)  # which enables gradients
    return NOTHING if torch.is_grad_enabled() else torch.enable_grad()


def _alias(x: Tensor, tracks: bool, spent: list[bool]) -> Tensor:
    """An alias of x that requires grad: a view if `tracks` and x requires grad, else a leaf."""
    if tracks and x.requires_grad:
        alias = x.view_as(x)
        if alias.grad_fn is not None:  # forward mode under no_grad records no graph
            return alias
    alias = (x.clone() if x.is_inference() else _detached(x)).requires_grad_()
    setattr(alias, SPENT, spent)
    return alias


def _kept(fun: Fun, x: Tensor) -> Tensor:
    """x, detached if it is a parameter to which results are attached afterwards."""
    return x.detach() if id(x) in getattr(fun, "own", _NONE) and fun.is_deferred() else x  # type: ignore[attr-defined]


def _normal(x: Tensor) -> Tensor:
    """x, or a copy that autograd can save if x is an inference tensor."""
    return x.clone() if x.is_inference() else x


def _detached(x: Tensor) -> Tensor:
    """x detached. A dual number keeps its tangent, which `detach` alone would drop."""
    if upstream.forward_level() >= 0:
        primal, tangent = forward_ad.unpack_dual(x)
        if tangent is not None:
            primal, tangent = detached(primal, DERIVATIVE), detached(tangent, DERIVATIVE)
            return forward_ad.make_dual(primal, tangent)
    if upstream.count_of_dispatch_modes() or upstream.count_of_function_modes():
        return detached(x, DERIVATIVE)  # marked for a recorder
    return x.detach()


def _freed(xs: Sequence[Any]) -> list[Any]:
    """The tensors, detached if they require grad; None stays None."""
    return [_detached(x) if x is not None and x.requires_grad else x for x in xs]


def _in_memory(xs: Sequence[Tensor | None], likes: Sequence[Tensor]) -> list[Tensor | None]:
    """The tensors, with zeros in memory for PyTorch's symbolic zeros."""
    return [x if x is None else _filled(x, like) for x, like in zip(xs, likes, strict=True)]


def _filled(tangent: Tensor | None, like: Tensor) -> Tensor:
    """The tangent; zeros in memory for None and for PyTorch's symbolic zero."""
    if tangent is None or upstream.is_zero(tangent):
        return torch.zeros_like(like, requires_grad=False)
    return tangent
