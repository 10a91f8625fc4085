"""Implements differentiation in PyTorch; the context of a call determines the engine.

    eager code                       `torch.autograd.grad`, at aliases of the arguments
    torch.func and compiled code     `torch.func`, which supports nesting and tracing
    forward mode                     dual numbers, or the transpose of the pullback if the only
                                     level of dual numbers is already active

PyTorch differentiates f's own operations; `gradtools.testing.checked` checks the result.

Results are attached to autograd's graph if and only if grad mode is on at entry and the results
depend on a tensor that requires grad. Otherwise the results are detached, and the graph is freed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.backend import Evaluation, Fun
from gradtools.errors import GradtoolsError
from gradtools.rules import spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import SPENT, depends_on_others, leaves_of, nodes_of, pulled
from gradtools.torch.captured_tensors import as_read_now
from gradtools.torch.compiling import NO_DOUBLE_BACKWARD, is_compiling, only_inlined, uncompiled
from gradtools.torch.function_modes import PlainKernels, kernels_of, run_in_trace
from gradtools.torch.functorch_wrappers import differentiated, is_inexact, unshared
from gradtools.torch.gradient_tensors import (
    freed,
    in_memory,
    kept,
    normal,
    tangent_in_memory,
    tangents_of,
    without_graph,
)
from gradtools.torch.known_errors import explain
from gradtools.torch.modes import (
    NoForwardMode,
    dual_level,
    dual_of,
    forward_mode,
    has_checkpoint,
    unpacked,
)
from gradtools.torch.operation_marks import evaluated_to_push, running

Tensor = torch.Tensor
Tensors = list[Tensor]
Push = Callable[[Tensors], Tensors]


@only_inlined
def vjp(fun: Fun, leaves: Tensors, *, groups: Sequence[int] | None, once: bool) -> Evaluation:
    """Evaluates fun once, and returns the outputs and the pullback."""
    if torch.compiler.is_dynamo_compiling():
        return _functorch_vjp(fun, leaves)
    in_eager = upstream.peek_interpreter_stack() is None
    engine = _eager_vjp if in_eager else _functorch_vjp
    result: Evaluation = _outside_of_dynamo(engine, fun, leaves, once)
    if upstream.DYNAMO not in sys.modules or (once and not upstream.compiles_here()):
        return result
    # Without `uncompiled`, dynamo would compile Python code that autograd calls, such as rules.
    return replace(result, pullback=partial(uncompiled, result.pullback))


@only_inlined
def jvp(fun: Fun, leaves: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    """Evaluates fun once with dual numbers, and returns `(outs, extras, pushed)`.

    If the level of forward mode is already active, the pullback is transposed instead. Inside of a
    checkpoint the pullback is also transposed, since the checkpoint's backward pass would otherwise
    evaluate the tangents again.
    """
    if is_compiling():
        return _functorch_jvp(fun, leaves, tangents)
    engine = _dual_jvp if upstream.peek_interpreter_stack() is None else _functorch_jvp
    with suppress(NoForwardMode), unpacked() as hooks:
        if not has_checkpoint(hooks):
            return _outside_of_dynamo(engine, fun, leaves, tangents)
    outs, extras, push = linearize(fun, leaves)
    return outs, extras, push(tangents)


@only_inlined
def linearize(fun: Fun, leaves: Tensors) -> tuple[Tensors, Tensors, Push]:
    """Evaluates fun once, transposes the pullback, and returns `(outs, extras, pushforward)`."""
    if is_compiling():
        return _functorch_linearize(fun, leaves)
    in_eager = upstream.peek_interpreter_stack() is None
    return _outside_of_dynamo(_eager_linearize if in_eager else _functorch_linearize, fun, leaves)


def reached(fun: Fun, leaves: Tensors) -> list[bool]:
    """See `Backend.reached`. The call is not counted among this thread's derivatives."""
    if not differentiated(leaves):
        return [True] * len(leaves)
    engine = _eager_vjp if upstream.peek_interpreter_stack() is None else _functorch_vjp
    result = engine(fun, leaves, True)
    return [g is not None for g in result.pullback([*map(torch.ones_like, result.outs)])]


def pushed(
    fun: Fun, leaves: Tensors, tangents: Tensors, kernels: Any
) -> tuple[Tensors, Tensors, Tensors]:
    """Computes `jvp` with the given kernels.

    Raises `NoForwardMode` if the level is already active.
    """
    return _outside_of_dynamo(partial(_dual_jvp, kernels=kernels), fun, leaves, tangents)


def _outside_of_dynamo(engine: Callable[..., Any], fun: Fun, *args: Any) -> Any:
    """Calls `engine(fun, *args)`, counts the derivative, and adds advice to known errors."""
    running.taken += 1
    try:
        if upstream.DYNAMO in sys.modules and upstream.compiles_here():
            return uncompiled(engine, fun, *args)
        return engine(fun, *args)
    except RuntimeError as error:
        explain(caller_of(fun), error)
        raise


def caller_of(fun: Fun) -> str:
    """Returns the name of the operator that the user called, or "gradtools" if it is unknown."""
    return getattr(fun, "caller", "gradtools")


# --- eager code: torch.autograd.grad -------------------------------------------------------------


class _Evaluated(NamedTuple):
    """The outputs of an evaluated function, with their graph, and the aliases of its arguments."""

    outs: Tensors
    extras: list[Any]
    aliases: Tensors
    attached: bool  # whether results are attached to an outer graph
    spent: list[bool]  # the flag that all aliases share, see `is_spent`
    plain: bool  # whether the function ran with `PlainKernels`
    pushes: bool  # whether tangents of the results are attached to an outer graph


def _eager_vjp(fun: Fun, leaves: Tensors, once: bool) -> Evaluation:
    taken = running.taken
    of = _evaluated(fun, leaves)
    nested = running.taken != taken

    def pullback(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        try:
            grads = _pulled(of, of.outs, of.aliases, cts, not once)
        except RuntimeError as error:
            explain(caller_of(fun), error)
            raise
        if not nested:
            return grads
        if any(g is None for g in grads):
            kinds = {type(node).__name__ for node in nodes_of(of.outs)}
            # The graph of this node has no path to f's arguments.
            if "CompiledFunctionBackwardBackward" in kinds:
                raise GradtoolsError(f"{caller_of(fun)}: {NO_DOUBLE_BACKWARD}")
        return in_memory(grads, of.aliases)

    outs, extras = of.outs, of.extras
    if not of.attached:
        extras = freed(extras, not of.pushes) if extras else extras
        outs = freed(outs, not of.pushes) if getattr(fun, "returns_output", True) else outs
    return Evaluation(outs, extras, pullback, nested=nested)


def _evaluated(fun: Fun, leaves: Tensors, plain: bool = False, keep: bool = True) -> _Evaluated:
    """Evaluates f once at aliases of the leaves, and records a graph.

    plain: Whether f runs with `PlainKernels`, as in all second derivatives.
    keep: Whether grad mode was on when the operator was called.
    """
    inference = torch.is_inference_mode_enabled()  # grad mode may be on inside of inference mode
    if inference or not torch.is_grad_enabled():
        with torch.inference_mode(False) if inference else torch.enable_grad():
            return _evaluated(fun, leaves, plain, keep=False)
    own: Any = getattr(fun, "own", ())  # the parameters of module arguments
    spent, aliases, forward = [False], [], upstream.forward_level() >= 0
    for x in leaves:
        if id(x) in own:
            aliases.append(x)
            continue
        tracked = keep and x.requires_grad
        if tracked and forward:  # a Jacobian has the graph of its aliases, which are constants
            tracked = depends_on_others([x])
        alias = x.view_as(x) if tracked else None
        if alias is None or alias.grad_fn is None:  # forward mode under no_grad records no graph
            alias = (x.clone() if x.is_inference() else without_graph(x, not keep)).requires_grad_()
            setattr(alias, SPENT, spent)
        aliases.append(alias)
    plain = plain or running.depth > 0 or getattr(fun, "plain_kernels", False)
    running.depth += 1
    try:
        if plain:
            with PlainKernels():
                outs, extras = fun(*aliases)
        else:
            outs, extras = fun(*aliases)
    finally:
        running.depth -= 1
    for d in fun.tape.arrays if hasattr(fun, "tape") else ():  # marked values
        setattr(d, SPENT, spent)
        aliases.append(d)
    spent[0] = True
    keep = keep and not (own and fun.is_deferred())  # type: ignore[attr-defined]
    attached = keep and depends_on_others(outs)
    pushes = keep and upstream.forward_level() >= 0 and depends_on_others(tangents_of(outs))
    return _Evaluated(outs, extras, aliases, attached, spent, plain, pushes)


def _pulled(
    of: _Evaluated,
    outs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cts: Sequence[Tensor | None],
    retain: bool,
) -> list[Tensor | None]:
    """Computes the gradients with respect to the inputs for the given cotangents.

    A gradient is None if no output depends on the input.
    """
    create = torch.is_grad_enabled()
    if not create and torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return _pulled(of, outs, inputs, cts, retain)
    ys, seeds, moves = list[Tensor](), list[Tensor](), of.attached
    for y, ct in zip(outs, cts, strict=True):  # a loop is faster than comprehensions
        if ct is not None and y.requires_grad:
            ys.append(y)
            seeds.append(ct.clone() if ct.is_inference() else ct)
            moves = moves or ct.requires_grad
    if not ys:
        return [None] * len(inputs)
    forward = upstream.forward_level() >= 0
    pushes = of.pushes or (forward and any(t.requires_grad for t in tangents_of(seeds)))
    create = create and (moves or pushes)
    again = create or forward  # without a graph, autograd computes some tangents incorrectly
    of.spent[0] = False  # a checkpoint that recomputes f needs a graph of the aliases
    try:
        grads = pulled(ys, inputs, seeds, retain or create, again, of.plain)
    finally:
        of.spent[0] = True
    return list(grads) if create and moves else freed(grads, not pushes)


def _eager_linearize(fun: Fun, leaves: Tensors) -> tuple[Tensors, Tensors, Push]:
    """Computes the pushforward as the pullback of the pullback, which is linear."""
    of: _Evaluated = evaluated_to_push(caller_of(fun), _evaluated, fun, leaves, True)
    tracked = [y for y in of.outs if y.requires_grad]
    with torch.inference_mode(False), torch.enable_grad():  # records the graph of the gradients
        dummies = [torch.ones_like(y, requires_grad=True) for y in tracked]
        for dummy in dummies:
            setattr(dummy, SPENT, of.spent)
        grads = _pulled(of, tracked, of.aliases, dummies, True)
        # A gradient that is not connected to the dummy cotangents must be zero; otherwise the
        # backward pass recorded no graph.
        lost = any(g is not None and not g.requires_grad and bool(g.any()) for g in grads)

    def push(tangents: Tensors) -> Tensors:
        if lost:
            raise RuntimeError(
                "f's backward pass records no graph (as in torch.cond), so its derivative, the "
                "pushforward, is unknown; the pullback of gt.vjp is correct"
            )
        pairs = [(g, t) for g, t in zip(grads, tangents, strict=True) if g is not None]
        pushed = _pulled(of, [g for g, _ in pairs], dummies, [t for _, t in pairs], True)
        full = spread(pushed, [y.requires_grad for y in of.outs])
        return [tangent_in_memory(t, y) for t, y in zip(full, of.outs, strict=True)]

    return (of.outs, of.extras, push) if of.attached else (freed(of.outs), freed(of.extras), push)


def _dual_jvp(
    fun: Fun, leaves: Tensors, tangents: Tensors, kernels: Any = None
) -> tuple[Tensors, Tensors, Tensors]:
    keep = torch.is_grad_enabled()
    outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with outside, torch.set_grad_enabled(keep), dual_level():
        pairs = zip(leaves, tangents, strict=True)
        duals = [dual_of(unshared(normal(kept(fun, x))), normal(t)) for x, t in pairs]
        with PlainKernels() if kernels is None else kernels:
            outs, extras = fun(*duals)
        pushed = [forward_ad.unpack_dual(y) for y in outs]
        outs, tangents = [y for y, _ in pushed], [tangent_in_memory(t, y) for y, t in pushed]
        extras = [forward_ad.unpack_dual(x).primal if is_inexact(x) else x for x in extras]
    return (outs, extras, tangents) if keep else (freed(outs), freed(extras), freed(tangents))


# --- torch.func: inside of its transforms, and in compiled code ----------------------------------


def _functorch_vjp(fun: Fun, leaves: Tensors, once: bool = True) -> Evaluation:
    """Computes the vjp with `torch.func.vjp`.

    In compiled code, gradients of unused leaves are zeros instead of None.
    """
    some: list[bool] = []  # dynamo does not trace `list[bool]()`
    reached: list[bool] = []
    nested = [False]

    def run(*xs: Tensor) -> Any:
        if is_compiling():
            plain = getattr(fun, "plain_kernels", False)
            outs, extras = run_in_trace(fun, xs, plain or True in [x.requires_grad for x in leaves])
        else:
            taken = running.taken
            with kernels_of(fun):
                outs, extras = fun(*xs)
            nested[0], found = running.taken != taken, {*map(id, leaves_of(outs))}
            reached[:] = [id(x) in found for x in xs]
        some[:] = [len(outs) > 0]  # dynamo in PyTorch 2.11 does not trace bool(list)
        return tuple(outs) or (xs[0].new_zeros(()),), tuple(extras)

    xs = leaves if is_compiling() else [kept(fun, x) for x in as_read_now(leaves)]
    outs, pull, extras = _func_vjp(run, *xs, has_aux=True)

    def pullback(cts: Sequence[Tensor | None]) -> list[Tensor | None]:
        if not some[0]:
            return [None] * len(leaves)
        pairs = zip(cts, outs, strict=True)
        grads = pull(tuple([torch.zeros_like(y) if ct is None else ct for ct, y in pairs]))
        grads = [g.view_as(g) for g in grads]  # a view removes the wrapper of a finished transform
        if reached:
            grads = [g if r else None for g, r in zip(grads, reached, strict=True)]
        return in_memory(grads, leaves) if nested[0] else grads

    shown = list(outs) if some[0] else []
    return Evaluation(shown, list(extras), pullback, checked=bool(reached), nested=nested[0])


def _func_vjp(fun: Any, *primals: Any, has_aux: bool = False) -> Any:
    """Calls `torch.func.vjp` without saved-tensor hooks, except for the hooks of a checkpoint."""
    if not is_compiling() and upstream.saved_tensors_hooks_on(False) is not None:
        with unpacked() as hooks:
            if not has_checkpoint(hooks):
                return torch.func.vjp(fun, *primals, has_aux=has_aux)
    return torch.func.vjp(fun, *primals, has_aux=has_aux)


def _functorch_jvp(fun: Fun, leaves: Tensors, tangents: Tensors) -> Any:
    def run(*xs: Tensor) -> Any:
        outs, extras = run_in_trace(fun, xs, True)
        return tuple(outs), tuple(extras)

    leaves = leaves if is_compiling() else as_read_now(leaves)
    xs = tuple([unshared(kept(fun, x)) for x in leaves])
    with nullcontext() if is_compiling() else forward_mode():
        outs, pushed, extras = torch.func.jvp(run, xs, tuple(tangents), has_aux=True)  # type: ignore[misc]
    # Under vmap, PyTorch promotes the dtype of the tangent of a scalar times a Python number, but
    # not the dtype of the primal value.
    pairs = zip(pushed, outs, strict=True)
    pushed = [t if t.dtype == y.dtype or not is_inexact(y) else t.to(y.dtype) for t, y in pairs]
    return list(outs), list(extras), pushed


def _functorch_linearize(fun: Fun, leaves: Tensors) -> Any:
    def run(*xs: Tensor) -> Any:
        outs, extras = run_in_trace(partial(evaluated_to_push, caller_of(fun), fun), xs, True)
        return tuple(outs), tuple(extras)

    leaves = leaves if is_compiling() else as_read_now(leaves)
    outs, pull, extras = _func_vjp(run, *leaves, has_aux=True)
    push = _func_vjp(pull, tuple([torch.ones_like(y) for y in outs]))[1]
    return list(outs), list(extras), lambda tangents: list(push(tuple(tangents))[0])
