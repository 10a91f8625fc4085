"""Frozen functions in JAX: a rule whose pullback is a rule again.

The first evaluation leaves what the pullback reads, and only the pullback reads it: a second
derivative starts anew from the arguments. So what differentiates a first derivative keeps
arguments and cotangents alone, whatever the depth of G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from gradtools.backend import Array
from gradtools.chunking import Chunks
from gradtools.jax.arrays import asarray
from gradtools.jax.rules import apply_rule
from gradtools.jax.trees import conj, is_inexact
from gradtools.rules import Linearized, Rule, spread

Entries = Sequence[Any]


def frozen_uses(budget: int | None) -> int:
    """The bytes of graphs that may be kept."""
    return budget or 0


def run_frozen(whole: Chunks, budget: int) -> list[Array]:
    """The outputs of one use."""
    arrays = [k for k, x in enumerate(whole.shared) if isinstance(x, jax.Array)]
    xs = [whole.shared[k] for k in arrays]

    def fun(*xs: Array) -> list[Array]:
        shared = list(whole.shared)
        for k, x in zip(arrays, xs, strict=True):
            shared[k] = x
        outs, _ = whole.call(0, 0, [], shared, [])
        return [y if isinstance(y, jax.Array) else asarray(y) for y in outs]

    return _Use(fun, xs).outs


class _Use:
    """One use of a function of flat arrays."""

    def __init__(self, fun: Callable[..., list[Array]], xs: list[Array]) -> None:
        self.fun, self.moving = fun, [is_inexact(x) for x in xs]
        rule = Rule("frozen", fun, linearize=self.linearize, written=(fun,))
        self.outs = apply_rule(rule, *xs)

    def of_moving(self, xs: Entries) -> Callable[..., Any]:
        """G of the arguments that can be differentiated: `(floating outputs, others)`."""

        def run(*moved: Array) -> tuple[list[Array], list[Array]]:
            new = iter(moved)
            ys = self.fun(*[next(new) if m else x for x, m in zip(xs, self.moving, strict=True)])
            self.inexact = [is_inexact(y) for y in ys]
            pairs = list(zip(ys, self.inexact, strict=True))
            return [y for y, i in pairs if i], [y for y, i in pairs if not i]

        return run

    def chosen(self, xs: Entries) -> list[Any]:
        """Those that can be differentiated."""
        return [x for x, m in zip(xs, self.moving, strict=True) if m]

    def linearize(self, *xs: Array) -> Linearized:
        """The evaluation, with what it leaves for the pullback."""
        fixed = [jax.lax.stop_gradient(x) for x in xs]
        ys, pull, others = jax.vjp(self.of_moving(fixed), *self.chosen(fixed), has_aux=True)
        left, treedef = jax.tree.flatten(pull)
        count, inexact, rest = len(xs), self.inexact, iter(others)
        floating = iter(ys)
        outs = [next(floating) if i else next(rest) for i in inexact]

        def tangent(saved: Entries, dxs: Entries) -> list[Any]:
            return self.pushed(saved[:count], dxs)

        def cotangent(saved: Entries, cts: Entries) -> list[Any]:
            there = [i and ct is not None for i, ct in zip(inexact, cts, strict=True)]
            given = [ct for ct, t in zip(cts, there, strict=True) if t]
            if not given:
                return [None] * count
            rule = _pullback(self, count, len(left), treedef, there)
            found = apply_rule(rule, *saved, *given)
            return spread(found, self.moving)

        reads = (*range(count), *range(count + len(outs), count + len(outs) + len(left)))
        return Linearized(outs, left, reads, tangent, cotangent)

    def pushed(self, xs: Entries, dxs: Entries) -> list[Any]:
        """The tangents of the outputs."""
        _, dys, _ = jax.jvp(
            self.of_moving(xs), self.chosen(xs), _filled(self.chosen(dxs), self.chosen(xs)), True
        )
        return spread(dys, self.inexact)

    def pulled(self, there: Sequence[bool], xs: Entries, cts: Entries) -> list[Any]:
        """The pullback, computed anew."""
        ys, pull, _ = jax.vjp(self.of_moving(xs), *self.chosen(xs), has_aux=True)
        return _through(pull, _full(ys, self.inexact, there, cts))


def _pullback(use: _Use, count: int, extras: int, treedef: Any, there: list[bool]) -> Rule:
    """The rule of (arguments, what the evaluation left, cotangents) to cotangents."""

    def primal(*operands: Array) -> list[Array]:
        fixed = [jax.lax.stop_gradient(x) for x in operands]
        pull = jax.tree.unflatten(treedef, fixed[count : count + extras])
        likes = jax.eval_shape(use.of_moving(fixed[:count]), *use.chosen(fixed[:count]))[0]
        return _through(pull, _full(likes, use.inexact, there, fixed[count + extras :]))

    def both(xs: Entries) -> Callable[..., list[Any]]:
        def run(moved: list[Array], cts: list[Array]) -> list[Any]:
            new = iter(moved)
            full = [next(new) if m else x for x, m in zip(xs, use.moving, strict=True)]
            return use.pulled(there, full, cts)

        return run

    def parts(operands: Entries) -> tuple[Entries, Entries]:
        return operands[:count], operands[count + extras :]

    def tangent(saved: Entries, dxs: Entries) -> list[Any]:
        xs, cts = saved[:count], list(saved[count:])
        dxs, dcts = parts(dxs)
        moved = use.chosen(xs)
        at = (moved, cts)
        along = (_filled(use.chosen(dxs), moved), _filled(dcts, cts))
        return list(jax.jvp(both(xs), at, along)[1])

    def cotangent(saved: Entries, us: Entries) -> list[Any]:
        xs, cts = saved[:count], list(saved[count:])
        moved = use.chosen(xs)
        along = _filled(us, moved)
        forward = use.pushed(xs, spread(along, use.moving))
        _, second = jax.jvp(lambda *m: both(xs)(list(m), cts), moved, along)
        to_cts = [dy for dy, t in zip(forward, there, strict=True) if t]
        return [*spread(second, use.moving), *([None] * extras), *to_cts]

    n = count + extras
    passive = tuple([i for i in range(n) if i >= count or not use.moving[i]])
    reads = (*range(count), *range(n, n + sum(there)))
    return Rule(
        "frozen's pullback",
        primal,
        tangent,
        cotangent,
        saves=reads,
        passive=passive,
        captures=True,
        written=(use.fun,),
    )


def _through(pull: Any, cts: list[Array]) -> list[Array]:
    return [conj(g) for g in pull([conj(ct) for ct in cts])]


def _full(likes: Any, inexact: Sequence[bool], there: Sequence[bool], cts: Entries) -> list[Any]:
    """Cotangents of all floating outputs, zero where none came."""
    given = spread(cts, there)
    floating = [ct for ct, i in zip(given, inexact, strict=True) if i]
    return _filled(floating, likes)


def _filled(values: Entries, likes: Entries) -> list[Any]:
    pairs = zip(values, likes, strict=True)
    return [jax.numpy.zeros(like.shape, like.dtype) if v is None else v for v, like in pairs]
