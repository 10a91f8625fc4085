"""The tangent and cotangent map of one application of a rule, and of its extras.

`ctx` is the context of the application's `torch.autograd.Function` (`functions.py`). A map that the
author did not give is the transpose of the other one. Extras are differentiated through the code
that computed them, by a second evaluation of the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradtools.rules import JvpRule, Map, Rule, evaluating_again, replaced_where, spread, total
from gradtools.torch import _upstream as upstream
from gradtools.torch import engines
from gradtools.torch.functorch_wrappers import alive, filled, like, unwrapped
from gradtools.torch.rules.checking import check_linear
from gradtools.torch.rules.transposing import in_eager, transposed
from gradtools.torch.state import restored

Tensor = torch.Tensor


def pulled_back(ctx: Any, cts: Sequence[Any]) -> Any:
    """The backward pass, at any order."""
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
            again = engines.vjp(run, xs, groups=None, once=True)
            parts.append(spread(again.pullback(hidden), mask))
    if not parts:
        return (None,) * len(point.like_xs)
    return parts[0] if len(parts) == 1 else [*map(total, zip(*parts, strict=True))]


def inputs_of(point: Any, kept: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, which were saved for a second evaluation."""
    return [tensors[kept.index(i)] for i in range(len(point.like_xs))]


# --- the maps, and the transpose of one for the other -------------------------------------


def tangent_at(point: Any, tensors: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """The tangents of the outputs, at the residuals in `tensors`."""
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
    """The cotangents of the inputs, at the residuals in `tensors`."""
    rule = point.rule
    maps, at = _maps_at(point, point.pulling, tensors)
    if rule.fills("cotangent") and any(ct is None for ct in cts):
        cts = filled(cts, point.like_ys[: point.count])
    pulling = maps.cotangent
    if maps.written is not None and in_eager() and upstream.forward_level() < 0:
        pulling = maps.written  # autograd differentiates this code itself
    if pulling is not None:
        pulled = list(pulling(at, cts))
        return pulled if rule.contract is None else filled(pulled, point.like_xs)
    likes = [None if i in rule.nondifferentiable else x for i, x in enumerate(point.like_xs)]

    def run(at: Any, dxs: Any) -> list[Any]:
        return list(maps.tangent(at, filled(dxs, point.like_xs) if rule.contract else dxs))

    return _by_transposing(point, "tangent", maps.tangent, run, at, likes, cts)


def _by_transposing(
    point: Any, which: str, whole: Any, run: Map, at: Any, likes: Any, values: Sequence[Any]
) -> list[Any]:
    """The transpose of `vs -> run(at, vs)`, a part of the map `whole`, at `values`."""
    if which not in point.ones:
        check_linear(point.rule, which, whole, at, likes)
    known = point.ones.setdefault(which, [])
    return transposed(point.rule, run, at, likes, values, known if which == "cotangent" else None)


def transpose(
    rule: Rule, which: str, linear: Any, at: Sequence[Any], zeros: Sequence[Any], values: Any
) -> list[Any]:
    """The transpose of `vs -> linear(at, *vs)`, of tensors like these zeros, at `values`."""
    run, likes = lambda at, vs: linear(at, *vs), [like(zero) for zero in zeros]
    check_linear(rule, which, run, at, likes)
    return filled(transposed(rule, run, at, likes, values), likes)


def _maps_at(
    point: Any, kept: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[Any, Sequence[Tensor]]:
    """The rule's maps and their residuals.

    Maps that evaluate the author's functions again draw the random numbers of the first evaluation.

    kept: The positions of `tensors` in `[*xs, *ys, *extras]`.
    """
    maps, at = point.linearized, tensors
    opaque = maps.opaque_residuals
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


def _extras_of(point: Any, xs: Sequence[Tensor]) -> tuple[Any, list[Tensor], list[bool]]:
    """The extras as a function of the floating and complex inputs, these, and their mask."""
    mask = [like is not None for like in point.like_xs]

    def run(*changed: Tensor) -> tuple[list[Tensor], list[Any]]:
        with restored(point.randomness):
            at = replaced_where(xs, mask, changed)
            return list(point.rule.at(*at, perturbed=point.perturbed).extras), []

    return run, [x for x, m in zip(xs, mask, strict=True) if m], mask


def extras_pushed(point: Any, tensors: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """Tangents of the extras."""
    likes, xs = point.like_ys[point.count :], inputs_of(point, point.pushing, tensors)
    forward_alone = in_eager() and not any(x.requires_grad for x in xs)
    if forward_alone or not any(likes):  # then nobody needs tangents of extras
        return [None] * len(likes)
    run, moving, _ = _extras_of(point, xs)
    dxs = [dx for dx in filled(dxs, point.like_xs) if dx is not None]
    pushed = engines.jvp(run, moving, dxs)[2]
    return [like and dy for like, dy in zip(likes, pushed, strict=True)]


# --- compiled graphs ---------------------------------------------------------------------


@contextmanager
def real_tensors_too(xs: Sequence[Tensor]) -> Iterator[None]:
    """Lets a compiled graph embed the tensors that a rule closes over as constants."""
    tracing = upstream.TracingContext.try_get() is not None
    mode = upstream.detect_fake_mode([unwrapped(x) for x in xs]) if tracing else None
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before
