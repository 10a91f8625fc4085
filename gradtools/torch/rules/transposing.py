"""Computes tangent and cotangent maps of a rule; each map is the transpose of the other.

`ctx` is the context object of the `torch.autograd.Function` in `functions.py`. If the author
defined only one of the linear maps, the other map is the transpose, computed by differentiation.
Differentiation of a nonlinear map would give a wrong result, so `checking.py` first checks that the
map is linear. Extras are differentiated through the code that computed them, by a second evaluation
of the rule.

A rule that applies itself to tangents would recurse infinitely. The forward rule of a linear
function f may be the function itself, df(x)[t] = f(t). Transposing this rule requires the
derivative of t -> f(t), which by the rule is df(t)[s] = f(s), and so on. A linear function is its
own derivative, so the code of f is transposed instead of the rule. JAX similarly evaluates a
`custom_jvp` as plain code when it is transposed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.rules import JvpRule, Map, Rule, evaluating_again, replaced_where, spread, total
from gradtools.torch import _upstream as upstream
from gradtools.torch import engines
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.compiling import is_compiling, real_tensors_too
from gradtools.torch.functorch_wrappers import alive, filled, is_inexact, like, ones, unwrapped
from gradtools.torch.modes import unpacked
from gradtools.torch.rules.checking import check_linear
from gradtools.torch.state import restored

Tensor = torch.Tensor
Fun = Callable[..., Sequence[Any]]


def in_eager() -> bool:
    """Returns whether no torch.func transform and no compiler is active."""
    stack = upstream.peek_interpreter_stack()
    return stack is None and not is_compiling() and upstream.TracingContext.try_get() is None


def pulled_back(ctx: Any, cts: Sequence[Any]) -> Any:
    """Computes the cotangents of the inputs of a rule in the backward pass."""
    point, tensors = ctx.point, [alive(x) for x in ctx.saved_tensors]
    if point.rule.reverse_only:
        return point.linearized.cotangent(tensors, cts)
    cts = [None if ct is None else alive(ct) for ct in cts]
    inner, hidden = cts[: point.count], cts[point.count :]
    parts = []
    with real_tensors_too(tensors):
        if any(ct is not None for ct in inner):
            parts.append(_cotangent(point, tensors, inner))
        if any(ct is not None for ct in hidden):
            run, xs, mask = _extras_of(point, inputs_of(point, point.pulling, tensors))
            parts.append(spread(pull(run, xs, hidden), mask))
    if not parts:
        return (None,) * len(point.like_xs)
    return parts[0] if len(parts) == 1 else [*map(total, zip(*parts, strict=True))]


def inputs_of(point: Any, kept: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the saved inputs of the rule, which are needed for a second evaluation."""
    return [tensors[kept.index(i)] for i in range(len(point.like_xs))]


# --- the maps, each the transpose of the other --------------------------------------------


def tangent_at(point: Any, tensors: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """Computes the tangents of the outputs at the residuals in `tensors`."""
    rule = point.rule
    maps, at = _maps_at(point, point.pushing, tensors)
    dxs = [None if i in rule.nondifferentiable else dx for i, dx in enumerate(dxs)]
    if rule.fills("tangent"):
        dxs = filled(dxs, point.like_xs)
    if maps.tangent is not None:
        return list(maps.tangent(at, dxs))

    def run(at: Any, cts: Any) -> list[Any]:
        pairs = zip(maps.cotangent(at, cts), dxs, strict=True)
        return [None if dx is None else pulled for pulled, dx in pairs]

    likes = point.like_ys[: point.count]
    return _by_transposing(point, "cotangent", maps.cotangent, run, at, likes, dxs)


def _cotangent(point: Any, tensors: Sequence[Tensor], cts: Sequence[Any]) -> Sequence[Any]:
    """Computes the cotangents of the inputs at the residuals in `tensors`."""
    rule = point.rule
    maps, at = _maps_at(point, point.pulling, tensors)
    if rule.fills("cotangent") and any(ct is None for ct in cts):
        cts = filled(cts, point.like_ys[: point.count])
    pulling = maps.cotangent
    if maps.written is not None and in_eager() and upstream.forward_level() < 0:
        pulling = maps.written  # autograd differentiates the code of this map
    if pulling is not None:
        pulled = list(pulling(at, cts))
        return pulled if rule.contract is None else filled(pulled, point.like_xs)
    likes = [None if i in rule.nondifferentiable else x for i, x in enumerate(point.like_xs)]
    run = lambda at, dxs: maps.tangent(at, filled(dxs, point.like_xs) if rule.contract else dxs)
    return _by_transposing(point, "tangent", maps.tangent, run, at, likes, cts)


def _by_transposing(
    point: Any, which: str, whole: Any, run: Map, at: Any, likes: Any, values: Sequence[Any]
) -> list[Any]:
    """Applies the transpose of `vs -> run(at, vs)`, a part of the map `whole`, to `values`."""
    if which not in point.ones:
        check_linear(point.rule, which, whole, at, likes)
    known = point.ones.setdefault(which, [])
    return transposed(point.rule, run, at, likes, values, known if which == "cotangent" else None)


def transpose(
    rule: Rule, which: str, linear: Any, at: list[Any], examples: list[Any], values: list[Any]
) -> list[Any]:
    """Applies the transpose of `vs -> linear(at, *vs)` to `values`."""
    run, likes = lambda at, vs: linear(at, *vs), list(map(like, examples))
    check_linear(rule, which, run, at, likes)
    return filled(transposed(rule, run, at, likes, values), likes)


def _maps_at(
    point: Any, kept: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[Any, Sequence[Tensor]]:
    """Returns the linear maps of the rule and their residuals.

    If the maps evaluate the author's functions again, the functions draw the same random numbers as
    in the first evaluation.

    kept: The positions of `tensors` in `[*xs, *ys, *extras]`.
    """
    maps, at, opaque = point.linearized, tensors, point.linearized.opaque_residuals
    if opaque and maps.example is None and (torch.is_grad_enabled() or not in_eager()):
        at = inputs_of(point, kept, tensors)
        maps = evaluating_again(point.rule, maps, len(at), point.perturbed)
    if point.randomness is not None:
        drawing = partial(_drawn, point.randomness)
        if maps.tangent and (opaque or isinstance(point.rule, JvpRule)):
            maps = replace(maps, tangent=partial(drawing, maps.tangent))
        if maps.cotangent and opaque:
            maps = replace(maps, cotangent=partial(drawing, maps.cotangent))
    return maps, at[: len(maps.saves)]


def _drawn(randomness: Any, run: Map, saved: Sequence[Tensor], vs: Sequence[Any]) -> list[Any]:
    with restored(randomness):
        return list(run(saved, vs))


# --- extras: differentiated through the code that computed them ---------------------------


def _extras_of(point: Any, xs: Sequence[Tensor]) -> tuple[Fun, list[Tensor], list[bool]]:
    """Returns `(run, inexact, mask)`, where `run(*inexact)` computes the extras.

    The mask contains, for each input, whether the input is inexact.
    """
    mask = [like is not None for like in point.like_xs]

    def run(*changed: Tensor) -> list[Tensor]:
        with restored(point.randomness):
            at = replaced_where(xs, mask, changed)
            return list(point.rule.at(*at, perturbed=point.perturbed).extras)

    return run, [x for x, m in zip(xs, mask, strict=True) if m], mask


def extras_pushed(point: Any, tensors: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """Computes the tangents of the extras. A tangent that is zero or not used is None."""
    likes, xs = point.like_ys[point.count :], inputs_of(point, point.pushing, tensors)
    forward_alone = in_eager() and not any(x.requires_grad for x in xs)
    if forward_alone or not any(likes):
        return [None] * len(likes)
    run, moving, _ = _extras_of(point, xs)
    return push(run, moving, [dx for dx in filled(dxs, point.like_xs) if dx is not None])


# --- derivatives of functions -------------------------------------------------------------
#
# `pull` calls torch.func directly during compilation, where the engines would use autograd, and in
# forward mode, because autograd cannot write to tangents with overlapping memory.


def pull(fun: Fun, xs: Sequence[Tensor], cts: Sequence[Any]) -> list[Any]:
    """Applies the pullback of `fun` at xs to cotangents. None represents a zero."""
    if not in_eager() or upstream.forward_level() >= 0:
        return _vjp_of_inexact(fun, xs)[1](cts)
    result = engines.vjp(lambda *a: (list(fun(*a)), []), list(xs), groups=None, once=True)
    return result.pullback(cts)


def push(fun: Fun, xs: Sequence[Tensor], dxs: Sequence[Tensor]) -> list[Any]:
    """Returns the tangents of the outputs of fun at xs. The tangent of an integer output is None.

    The pullback is transposed, because levels of dual numbers cannot be nested.
    """
    outs, pullback = _vjp_of_inexact(fun, xs)
    mask = [y is not None for y in outs]
    zeros = [torch.zeros_like(y) for y in outs if y is not None]
    return spread(_vjp_of_inexact(lambda *cts: pullback(spread(cts, mask)), zeros)[1](dxs), mask)


def _vjp_of_inexact(fun: Fun, xs: Sequence[Tensor]) -> tuple[list[Any], Any]:
    """Applies `torch.func.vjp` to a function whose outputs may be None or integers."""
    mask = list[bool]()

    def dense(*xs: Tensor) -> tuple[Tensor, ...]:
        ys = fun(*xs)
        mask[:] = [y is not None and is_inexact(y) for y in ys]
        return tuple([y for y, m in zip(ys, mask, strict=True) if m]) or (torch.zeros(()),)

    with unpacked():  # torch.func rejects saved-tensor hooks
        outs, pull = torch.func.vjp(dense, *xs)[:2]
    ys = spread(outs[: sum(mask)], mask)

    def pullback(cts: Sequence[Any]) -> list[Any]:
        pairs = zip(ys, cts, strict=True)
        full = [torch.zeros_like(y) if ct is None else ct for y, ct in pairs if y is not None]
        with unpacked():
            # A view of a wrapper of a functorch level that has ended is an ordinary tensor.
            return [v.view_as(v) for v in pull(tuple(full) or (torch.zeros(()),))]

    return ys, pullback


# --- the transpose of a map --------------------------------------------------------------


def transposed(
    rule: Rule,
    linear: Map,
    at: Sequence[Tensor],
    likes: Sequence[Any],
    values: Sequence[Any],
    known: list[Tensor] | None = None,
) -> list[Any]:
    """Applies the transpose of `vs -> linear(at, vs)` to `values`.

    In eager code, autograd computes the transpose, which takes a third of the time of torch.func.
    Under a transform, torch.func computes the transpose. If grad mode is on, the result is
    differentiable with respect to `at` and `values`. In values and results, None means zero. An
    entry of `likes` is None for a vector of integers.

    known: A list that stores the vectors of ones at which the map is traced, for later calls. The
        list is passed only if no tensor in `at` has a tangent.
    """
    mask = [like is not None for like in likes]
    if not any(mask):
        return [None] * len(likes)
    if upstream.saved_tensors_hooks_on(False) is not None:  # the hooks must not pack this graph
        with unpacked():
            return transposed(rule, linear, at, likes, values, known)
    eager, graphs = in_eager(), torch.is_grad_enabled()
    alone = eager and not graphs and (known is not None or upstream.forward_level() < 0)
    at = [x.detach() for x in at] if alone else at

    def run(*vs: Tensor) -> Sequence[Any]:
        vectors: Vectors = None if alone else {*map(id, vs)}
        if not eager:
            vectors = upstream.peek_interpreter_stack().level()
        outs = applied_to(vectors, rule, linear, at, spread(vs, mask))
        if rule.contract is not None and rule.contract.checked:
            for y, v in zip(outs, values, strict=True):
                if y is not None and v is not None and not y.requires_grad:
                    _refuse_cut(rule, y, v)
        return outs

    vs = known if alone and known else [ones(*like) for like in likes if like is not None]
    if not eager:
        return spread(pull(run, vs, values), mask)
    if alone and known is not None:
        known[:] = vs
    upstream.set_grad_enabled(True)
    try:
        outs = run(*[v.requires_grad_() for v in vs])
    finally:
        upstream.set_grad_enabled(graphs)
    both = zip(outs, values, strict=True)
    pairs = [(y, v) for y, v in both if y is not None and v is not None and y.requires_grad]
    if not pairs:
        return [None] * len(likes)
    ys, given = zip(*pairs, strict=True)
    return spread(upstream.run_engine(ys, given, graphs, graphs, tuple(vs), True), mask)


def _refuse_cut(rule: Rule, y: Tensor, v: Tensor) -> None:
    """Raises an error if a result y of a linear map at vectors of ones is nonzero but has no graph.

    v: The vector to which the transpose is applied. If v is zero, y is not needed.
    """
    if upstream.TracingContext.try_get() is None and all(
        bool((unwrapped(x) != 0).any()) for x in (y, v)
    ):
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode is derived by transposing one of its maps, but "
            "PyTorch records no graph of that map, as under torch.no_grad or after detach. "
            "Compute the map with gradients enabled, or give the missing map as well."
        )


# --- rules that are applied to the tangents of their own map -------------------------------

Vectors = set[int] | int | None
"""Identifies the vectors of a map that is being transposed: in eager code, the ids of the vectors;
under torch.func, the level at which the map is traced; None if no other tensor requires grad."""


class _Ongoing(threading.local):
    """The maps that this thread is transposing, innermost last.

    Each entry consists of the `origin` of the map's rule and the map's vectors.
    """

    def __init__(self) -> None:
        self.maps: list[tuple[Any, Vectors]] = []


ongoing = _Ongoing()


def applied_to(vectors: Vectors, rule: Rule, run: Callable[..., Any], *args: Any) -> Any:
    """Calls a map that is being transposed, and records the call and its vectors in `ongoing`."""
    ongoing.maps.append((rule.origin, vectors))
    try:
        return run(*args)
    finally:
        ongoing.maps.pop()


def in_own_transpose(rule: Rule, xs: Sequence[Tensor]) -> bool:
    """Returns whether xs depend on vectors to which the tangent map of the same rule is applied.

    The tangent map may have applied another rule, which applies this rule. A rule with a cotangent
    map needs no transposition.
    """
    maps = ongoing.maps
    origins = [origin for origin, _ in maps]
    if rule.cotangent is not None or rule.linearize is not None or rule.origin not in origins:
        return False
    inner = [vectors for _, vectors in maps[origins.index(rule.origin) :]]
    ids = set[int]().union(*[v for v in inner if isinstance(v, set)])
    for x in xs:
        while upstream.is_wrapped(x):  # a BatchedTensor hides a tracked inner tensor
            if upstream.is_gradtrackingtensor(x) and upstream.maybe_get_level(x) in inner:
                return True
            x = upstream.get_unwrapped(x)
        if x.requires_grad and (
            None in inner or (ids and any(id(leaf) in ids for leaf in leaves_of([x])))
        ):
            return True
    return False
