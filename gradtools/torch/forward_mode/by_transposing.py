"""Forward mode by transposing reverse mode, where PyTorch's own is wrong or missing.

With J the Jacobian of F at x, reverse mode computes the map u -> J^H u. It is linear, so its
pullback at any u is J itself:

    J t  =  (d/du <J^H u, t>)^H

This is the double backward trick of Townsend (A new trick for calculating Jacobian vector
products, 2017). The pushforward and the pullback are functions of x and of t or u, which PyTorch
differentiates in reverse mode as well; each has a rule of this kind itself. So F has all orders in
every mix of modes and under every transform, as far as its backward pass can be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, replaced_where, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import guarded, surveyed
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.modes import unpacked
from gradtools.torch.rules.functions import BatchedRule
from gradtools.torch.rules.installing import apply_rule
from gradtools.torch.rules.transposing import vjp_of_inexact

Tensor = torch.Tensor
Entries = Sequence[Any]
Flat = Callable[..., list[Tensor]]


class NoTranspose(GradtoolsError):
    """The backward pass cannot be differentiated, so it has no transpose."""


def by_reverse_mode(
    name: str, fun: Flat, xs: Sequence[Tensor], opaque: bool = False
) -> list[Tensor]:
    """`fun(*xs)`, whose forward mode is the transpose of its reverse mode.

    Args:
        name: Its name in errors.
        fun: Takes tensors and returns a list of tensors; floating and complex ones may be
            differentiated.
        xs: Its arguments.
        opaque: Whether transforms of torch.func must not enter it: under vmap it is called once for
            each example.

    Raises:
        NoTranspose: (when a tangent is pushed) Its backward pass has no derivative.
    """
    return apply_rule(_rule_of_reverse_mode(name, fun, opaque), *xs)


def _rule_of_reverse_mode(name: str, fun: Flat, opaque: bool = False) -> Rule:
    """The rule by which `by_reverse_mode` calls a function."""

    def primal(*xs: Tensor) -> list[Tensor]:
        return fun(*[x.detach() for x in xs])

    def tangent(saved: Entries, dxs: Entries) -> list[Any]:
        return _linear(name, partial(_pushed, name, fun, opaque), saved, dxs, opaque)

    def cotangent(saved: Entries, cts: Entries) -> list[Any]:
        return _linear(name, partial(_pulled, name, fun, opaque), saved, cts, opaque)

    def batching_rule(size: int, axes: Entries, xs: Sequence[Tensor], randomness: str) -> Any:
        each = _rule_of_reverse_mode(name, partial(_looped, fun, size, tuple(axes)), opaque)
        return each, list(xs), lambda outs: (0,) * len(outs)

    maps = name, primal, tangent, cotangent
    return BatchedRule(*maps, batching_rule=batching_rule) if opaque else Rule(*maps)


def with_derivative(
    name: str, program: Flat, xs: Sequence[Tensor], values: Sequence[Tensor]
) -> list[Tensor]:
    """`values`, which equal `program(*xs)`, with the derivatives of the program.

    A fused kernel computes a gradient faster than the plain program and in less memory, but its
    derivative is wrong or missing. So the kernel's results are further arguments of a rule that
    returns them. First derivatives are unchanged, bit for bit.
    """
    rule, count = _rule_of_reverse_mode(name, program), len(xs)
    tangent, cotangent = rule.tangent, rule.cotangent
    assert tangent is not None and cotangent is not None
    rule = replace(
        rule,
        primal=lambda *xs: list(xs[count:]),
        tangent=lambda saved, dxs: tangent(saved, dxs[:count]),
        cotangent=lambda saved, cts: [*cotangent(saved, cts), *[None] * len(values)],
        saves=tuple(range(count)),
        nondifferentiable=tuple(range(count, count + len(values))),
    )
    return apply_rule(rule, *xs, *[value.detach() for value in values])


def _looped(fun: Flat, size: int, axes: Entries, *xs: Tensor) -> list[Tensor]:
    """`fun` applied to each example in a loop; the results are stacked."""
    pairs = list(zip(xs, axes, strict=True))
    rows = [fun(*[x if d is None else x.select(d, i) for x, d in pairs]) for i in range(size)]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _linear(name: str, linear: Any, xs: Entries, vs: Entries, opaque: bool) -> list[Any]:
    """`linear(xs, vs)` by a rule of the same kind, so that it can be differentiated again."""
    there = [v is not None for v in vs]
    there_out: list[bool] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        result = linear(tensors[: len(xs)], spread(tensors[len(xs) :], there))
        there_out[:] = [v is not None for v in result]
        return [v for v in result if v is not None]

    result = by_reverse_mode(name, flat, [*xs, *(v for v in vs if v is not None)], opaque)
    return spread(result, there_out)


def _pulled(name: str, fun: Flat, opaque: bool, xs: Sequence[Tensor], cts: Entries) -> list[Any]:
    """The pullback of cts; None for inputs that are not floating or complex."""
    mask = [is_inexact(x) for x in xs]
    with unpacked():
        ys, pull = _evaluated(name, fun, xs, mask, opaque)
        result = pull(_filled(ys, cts), _is_tracked([*xs, *cts]))
    return spread(_filled([x for x, m in zip(xs, mask, strict=True) if m], result), mask)


def _pushed(name: str, fun: Flat, opaque: bool, xs: Sequence[Tensor], dxs: Entries) -> list[Any]:
    """The pushforward of dxs; None for outputs that are not floating or complex."""
    mask = [dx is not None for dx in dxs]
    try:
        with torch.enable_grad(), unpacked():
            ys, pull = _evaluated(name, fun, xs, mask, opaque)
            carried = [is_inexact(y) for y in ys]

            def cotangents(*us: Tensor) -> list[Tensor]:
                return _filled(moving, pull(spread(us, carried), True))

            moving = [x for x, m in zip(xs, mask, strict=True) if m]
            at = [torch.ones_like(y) for y, c in zip(ys, carried, strict=True) if c]
            if opaque and _is_tracked(moving):
                from gradtools.torch.double_backward import refuse_lossy

                survey = surveyed([y for y in ys if y.requires_grad])
                refuse_lossy(name, lambda *xs: (fun(*xs), []), xs, survey)
            _, push = _evaluated(name, cotangents, at, [True] * len(at), False)
            dys = push([dx for dx in dxs if dx is not None], _is_tracked([*xs, *dxs]))
    except (RuntimeError, NotImplementedError) as error:
        raise NoTranspose(
            f"forward mode of {name} is had by differentiating its backward pass, of which "
            f"PyTorch says: {error} Use reverse mode (grad, vjp), or give it a rule of its own by "
            "gt.custom_rule."
        ) from error
    return spread(_filled(at, dys), carried)


def _evaluated(
    name: str, fun: Flat, xs: Sequence[Tensor], mask: Sequence[bool], custom: bool
) -> Any:
    """`fun(*xs)` and its pullback to the masked arguments, by torch.func inside of its transforms.

    custom: Whether fun is custom code, whose pullback must be checked to be differentiable.
    """
    if upstream.peek_interpreter_stack() is not None:
        run = lambda *moving: fun(*replaced_where(xs, mask, moving))
        moving = [x for x, m in zip(xs, mask, strict=True) if m]
        ys, carried, pullback = vjp_of_inexact(run, *moving)

        def pull_in_functorch(cts: Entries, create: bool) -> list[Any]:
            filled = [ct for ct, c in zip(_filled(ys, cts), carried, strict=True) if c]
            return [v.view_as(v) for v in pullback(tuple(filled))]

        return ys, pull_in_functorch
    alias = lambda x: x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
    with torch.enable_grad():
        aliases = [alias(x) if m else x for x, m in zip(xs, mask, strict=True)]
        ys = fun(*aliases)
    differentiated = [x for x, m in zip(aliases, mask, strict=True) if m]
    survey = surveyed([y for y in ys if y.requires_grad]) if custom else None

    def pull(cts: Entries, create: bool) -> list[Any]:
        both = zip(ys, cts, strict=True)
        pairs = [(y, ct) for y, ct in both if ct is not None and y.requires_grad]
        if not pairs or not differentiated:
            return [None] * len(differentiated)
        ends, seeds = zip(*pairs, strict=True)
        guard: Any = None
        if survey is not None:
            guard = guarded(name, lambda *xs: (fun(*xs), []), xs, survey, differentiated, create)
        grad = torch.autograd.grad
        with guard or nullcontext():
            return list(grad(ends, differentiated, seeds, True, create, allow_unused=True))

    return ys, pull


def _filled(ys: Sequence[Tensor], cts: Entries) -> list[Tensor]:
    return [torch.zeros_like(y) if ct is None else ct for y, ct in zip(ys, cts, strict=True)]


def _is_tracked(xs: Entries) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in xs)
