"""The tangent and cotangent map of one application of a rule, and of its extras.

`ctx` is the context of the application's `torch.autograd.Function` (`functions.py`). A map that the
author did not give is the transpose of the other one. Extras are differentiated through the code
that computed them, by a second evaluation of the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from gradtools.rules import Linearized, Map, Rule, evaluating_again, spread, total
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import (
    alive,
    filled,
    like,
    ones,
    unwrapped,
    zeros,
)
from gradtools.torch.modes import NOTHING
from gradtools.torch.randomness import restored
from gradtools.torch.rules.captures import closed_over_error, other_leaves
from gradtools.torch.rules.checking import CheckedMap, check_linear
from gradtools.torch.rules.transposing import in_eager, refuse_layout, transposed, vjp

Tensor = torch.Tensor


def pulled_back(ctx: Any, cts: Sequence[Any]) -> Any:
    """The backward pass, at any order."""
    point, tensors = ctx.point, [alive(x) for x in ctx.saved_tensors]
    if point.rule.reverse_only:
        return point.linearized.cotangent(tensors, cts)
    cts = tuple([None if ct is None else alive(ct) for ct in cts])
    inner, hidden = cts[: point.count], cts[point.count :]
    parts = []
    with real_tensors_too(tensors):
        if any(ct is not None for ct in inner):
            parts.append(_cotangent(ctx, tensors, inner))
        if any(ct is not None for ct in hidden):
            xs = inputs_of(point, point.pulling, tensors)
            pullback, mask = _extras_vjp(point, xs, [ct is not None for ct in hidden])
            parts.append(spread(pullback(tuple([ct for ct in hidden if ct is not None])), mask))
    if not parts:
        return (None,) * len(point.like_xs)
    return parts[0] if len(parts) == 1 else [*map(total, zip(*parts, strict=True))]


def inputs_of(point: Any, kept: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, which were saved for a second evaluation."""
    return [tensors[kept.index(i)] for i in range(len(point.like_xs))]


# --- the maps, and the transpose of one for the other -------------------------------------


def tangent_at(ctx: Any, tensors: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """The tangents of the outputs, at the residuals in `tensors`."""
    point, rule = ctx.point, ctx.point.rule
    result, saved = _maps_at(ctx, point.pushing, tensors)
    if rule.fills("tangent"):
        dxs = filled(dxs, point.like_xs)
    if result.tangent is not None:
        return list(result.tangent(saved, dxs))
    likes = point.like_ys[: point.count]
    present = [i for i, dx in enumerate(dxs) if dx is not None]

    def run(at: Any, cts: Any) -> list[Any]:
        pulled = result.cotangent(at, cts)
        return [pulled[i] for i in present]

    checked = CheckedMap(rule, "cotangent", result.cotangent, saved, likes, point.avals)
    return _by_transposing(ctx, checked, run, [dxs[i] for i in present])


def _cotangent(ctx: Any, tensors: Sequence[Tensor], cts: Sequence[Any]) -> list[Any]:
    """The cotangents of the inputs, at the residuals in `tensors`."""
    point, rule, graphs = ctx.point, ctx.point.rule, torch.is_grad_enabled()
    result, saved = _maps_at(ctx, point.pulling, tensors)
    if point.like_ys is None:
        likes = [None if ct is None else like(ct) for ct in cts]
    else:
        likes = point.like_ys[: point.count]
    vectors = filled(cts, likes) if rule.fills("cotangent") else list(cts)
    pull = result.cotangent
    if result.written is not None and in_eager() and upstream.forward_level() < 0:
        pull = result.written  # autograd differentiates this code itself
    if pull is not None:
        pulled = list(pull(saved, vectors))
        watched = rule.user_functions and graphs and in_eager()
        if watched and other_leaves(pulled, (*tensors, *saved, *cts)):
            raise closed_over_error(rule)
        if rule.contract is None:
            return pulled
        return filled(pulled, point.like_xs)
    fixed = rule.nondifferentiable
    likes = [None if i in fixed else one for i, one in enumerate(point.like_xs)]

    def run(at: Any, dxs: Any) -> list[Any]:
        dxs = dxs if rule.contract is None else filled(dxs, point.like_xs)
        return list(result.tangent(at, dxs))

    checked = CheckedMap(rule, "tangent", result.tangent, saved, likes, point.avals)
    return _by_transposing(ctx, checked, run, vectors)


def _by_transposing(ctx: Any, checked: CheckedMap, run: Map, values: Sequence[Any]) -> list[Any]:
    """The transpose of `vs -> run(residuals, vs)`, which is the checked map, at `values`."""
    refuse_layout(checked.rule, ctx.layout, f"its {checked.which} map")
    check_linear(checked)
    mask = [like is not None for like in checked.likes]
    examples = [ones(*like) for like in checked.likes if like]
    linear = lambda at, vs: run(at, spread(vs, mask))
    return spread(transposed(checked.rule, linear, checked.at, examples, values), mask)


def _maps_at(
    ctx: Any, kept: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[Any, Sequence[Tensor]]:
    """The rule's maps and their residuals.

    kept: The positions of `tensors` in `[*xs, *ys, *extras]`.
    """
    point, result = ctx.point, ctx.point.linearized
    opaque = result.opaque_residuals and result.example is None
    if opaque and (torch.is_grad_enabled() or not in_eager()):
        xs = inputs_of(point, kept, tensors)
        result = evaluating_again(point.rule, result, len(xs), point.perturbed)
        return drawing_again(result, point.randomness), xs
    return result, tensors[: len(result.saves)]


def drawing_again(linearized: Linearized, randomness: Any) -> Linearized:
    """The maps, drawing f's random numbers again where they evaluate the rule again."""

    def drawing(run: Map) -> Map:
        def drawn(saved: Sequence[Tensor], vs: Sequence[Any]) -> list[Any]:
            with restored(randomness):
                return list(run(saved, vs))

        return drawn

    if randomness is None:
        return linearized
    tangent, cotangent = linearized.tangent, linearized.cotangent
    if cotangent is not None and linearized.opaque_residuals:
        cotangent = drawing(cotangent)
    return replace(linearized, tangent=tangent and drawing(tangent), cotangent=cotangent)


def transpose(
    rule: Rule, which: str, linear: Any, at: Sequence[Any], examples: Any, values: Any
) -> list[Any]:
    """The transpose of `vs -> linear(at, *vs)`, of tensors like `examples`, at `values`."""
    run = lambda at, vs: linear(at, *vs)
    check_linear(CheckedMap(rule, which, run, at, [like(e) for e in examples]))
    return transposed(rule, run, at, examples, values)


# --- extras: differentiated through the code that computed them ---------------------------


def _extras_vjp(point: Any, xs: Sequence[Tensor], wanted: Sequence[bool]) -> Any:
    """The pullback from the wanted extras to the inputs, by evaluating the rule again."""
    mask = [like is not None for like in point.like_xs]
    moving = [x for x, m in zip(xs, mask, strict=True) if m]
    extras: list[Tensor] = []

    def run(*changed: Tensor) -> tuple[Tensor, ...]:
        new = iter(changed)
        full = [next(new) if m else x for x, m in zip(xs, mask, strict=True)]
        result = point.rule.at(*full, perturbed=point.perturbed)
        extras[:] = result.extras
        return tuple([e for e, w in zip(result.extras, wanted, strict=True) if w])

    with restored(point.randomness):
        _, pullback = vjp(run, *moving)
    return pullback, mask


def extras_pushed(ctx: Any, xs: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """Tangents of the extras, by the transposed pullback, since dual levels do not nest."""
    likes = ctx.point.like_ys[ctx.point.count :]
    wanted = [like is not None for like in likes]
    forward_alone = in_eager() and not any(x.requires_grad for x in xs)
    if not any(wanted) or forward_alone:  # then nobody needs tangents of extras
        return [None] * len(likes)
    pullback, mask = _extras_vjp(ctx.point, xs, wanted)
    nothing = tuple([zeros(*like) for like in likes if like])
    pulled, push = vjp(lambda *cts: pullback(cts), *nothing)
    moving = [dx for dx, m in zip(dxs, mask, strict=True) if m]
    pairs = zip(pulled, moving, strict=True)
    dense = [torch.zeros_like(p) if dx is None else dx for p, dx in pairs]
    return spread(push(tuple(dense)), wanted)


@contextmanager
def _real_tensors(mode: Any) -> Iterator[None]:
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def real_tensors_too(xs: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Lets a compiled graph embed the tensors that a rule closes over as constants."""
    if upstream.TracingContext.try_get() is None:
        return NOTHING
    mode = upstream.detect_fake_mode([unwrapped(x) for x in xs])
    return NOTHING if mode is None else _real_tensors(mode)
