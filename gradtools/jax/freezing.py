"""Frozen functions in JAX: a rule whose pullback is a rule again.

The residuals of the first evaluation are read by the pullback only: a second derivative recomputes
from the arguments. So differentiating a first derivative keeps arguments and cotangents only,
independently of the depth of G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.arguments.chunks import Chunks
from gradtools.backend import Array
from gradtools.errors import is_of, warn
from gradtools.freezing import edit_in_frozen, name_of_function
from gradtools.jax._upstream import ClosedJaxpr, constants_of
from gradtools.jax.arrays import asarray
from gradtools.jax.jaxprs import equations, holds, named_after
from gradtools.jax.known_errors import explained
from gradtools.jax.recomputing import stateful
from gradtools.jax.rules.installing import apply_rule
from gradtools.jax.rules.primitives import TracedRule, reverse_only_p
from gradtools.jax.trees import conj, filled, is_inexact
from gradtools.rules import Linearized, Rule, replaced_at, replaced_where, spread

Entries = Sequence[Any]


def run_frozen(whole: Chunks, uses: None) -> list[Array]:
    """The outputs of one use."""
    arrays = [k for k, x in enumerate(whole.shared) if isinstance(x, jax.Array)]
    xs = [whole.shared[k] for k in arrays]
    modules = stateful(whole.caller, whole.call.f, whole.arguments)
    state = [] if modules is None else [jax.lax.stop_gradient(x) for x in modules.leaves]
    call = replace(whole.call, f=modules or whole.call.f)
    # A compiled program keeps the rule, which must not hold tracers.
    rest = [None if isinstance(x, jax.Array) else x for x in whole.shared]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    def fun(*xs: Array) -> list[Array]:
        shared = replaced_at(rest, arrays, xs)
        if modules is not None:
            modules.now = state
        outs, _ = call(0, 0, [], shared, [])
        after = [] if modules is None else modules.after
        plain = [jax.random.key_data(x) if is_key(x) else x for x in after]  # rules return numbers
        both = *outs, *map(jax.lax.stop_gradient, plain)
        return [y if isinstance(y, jax.Array) else asarray(y) for y in both]

    use = _Use(whole.caller, named_after(whole.call.f, fun), xs)
    ys = apply_rule(use.rule, *xs, *use.captured)
    if modules is None:
        return ys
    outs, after = ys[: len(ys) - len(state)], ys[len(ys) - len(state) :]
    modules.write(
        [
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(like)) if is_key(like) else x
            for x, like in zip(after, state, strict=True)
        ]
    )
    return outs


class _TracedOnce:
    """A function of flat arrays whose Python code runs once for all derivatives.

    Each derivative evaluates the jaxpr again. (Tracing the function again would take exponential
    time in nested frozen functions.) At other avals, such as arrays that vary over a mesh, the
    function itself runs.
    """

    def __init__(self, fun: Callable[..., list[Array]], xs: Sequence[Array]) -> None:
        closed = jax.make_jaxpr(fun)(*xs)
        # copies, since the user may write to NumPy arrays before the second derivative
        consts = [np.array(c) if isinstance(c, np.ndarray) else c for c in constants_of(closed)]
        self.fun, self.closed = fun, ClosedJaxpr(closed.jaxpr, consts)
        self.avals = [_strong(aval) for aval in self.closed.in_avals]
        # The arrays that the program closes over, if none is a tracer. They are its last inputs,
        # so that compiled code holds them once for all derivatives.
        self.captured: list[Any] = consts if all(map(_is_plain, consts)) else []

    def __call__(self, *xs: Array) -> list[Array]:
        xs, consts = xs[: len(self.avals)], xs[len(self.avals) :] or tuple(self.closed.consts)
        if [_strong(jax.typeof(x)) for x in xs] != self.avals:
            return self.fun(*xs)
        # JAX does not convert NumPy arrays here, and a scan would keep a copy of them.
        consts = tuple([jnp.asarray(c) if isinstance(c, np.ndarray) else c for c in consts])
        return list(jax.core.eval_jaxpr(self.closed.jaxpr, consts, *xs))


def _is_plain(x: Any) -> bool:
    """Whether x is an array of numbers and no tracer."""
    aval = jax.typeof(x)
    known = type(aval) is jax.core.ShapedArray and not isinstance(x, jax.core.Tracer)
    return known and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def _strong(aval: Any) -> Any:
    return aval.update(weak_type=False)


class _Use:
    """One use of a frozen function of flat arrays."""

    def __init__(self, caller: str, fun: Callable[..., list[Array]], xs: list[Array]) -> None:
        self.caller, self.name = caller, name_of_function(caller)
        self.fun, self.moving = fun, [is_inexact(x) for x in xs]
        self.user_functions: Any = (fun,)  # the objects that may capture further arrays
        self.captured: list[Any] = []  # arrays that are passed after the arguments
        if any(isinstance(x, jax.core.Tracer) for x in xs):  # else G may branch on values
            self.fun = _TracedOnce(fun, xs)
            self.captured = self.fun.captured
            self.user_functions = () if self.captured else (list(self.fun.closed.consts),)
            self.moving += [False] * len(self.captured)
        self.rule = TracedRule(
            "frozen",
            self.fun,
            linearize=self.linearize,
            user_functions=self.user_functions,
            flow=self.fun,
        )

    def of_moving(self, xs: Entries) -> Callable[..., Any]:
        """G as a function of its inexact arguments: `(inexact outputs, other outputs)`."""

        def run(*moved: Array) -> tuple[list[Array], list[Array]]:
            ys = self.fun(*replaced_where(xs, self.moving, moved))
            self.inexact = [is_inexact(y) for y in ys]
            pairs = list(zip(ys, self.inexact, strict=True))
            return [y for y, i in pairs if i], [y for y, i in pairs if not i]

        return run

    def chosen(self, xs: Entries) -> list[Any]:
        """The inexact ones among entries for the arguments."""
        return [x for x, m in zip(xs, self.moving, strict=True) if m]

    def linearize(self, *xs: Array) -> Linearized:
        """The evaluation, with the residuals of the pullback as extras."""
        fixed = [jax.lax.stop_gradient(x) for x in xs]
        with explained(self.caller):
            ys, pull, others = jax.vjp(self.of_moving(fixed), *self.chosen(fixed), has_aux=True)
        left, treedef = jax.tree.flatten(pull)
        count, inexact, rest = len(xs), self.inexact, iter(others)
        floating = iter(ys)
        outs = [next(floating if i else rest) for i in inexact]
        graph = _KeptPullback(count, len(left), treedef)

        def tangent(saved: Entries, dxs: Entries) -> list[Any]:
            return self.pushed(saved[:count], dxs)

        def cotangent(saved: Entries, cts: Entries) -> list[Any]:
            mask = [i and ct is not None for i, ct in zip(inexact, cts, strict=True)]
            given = [ct for ct, t in zip(cts, mask, strict=True) if t]
            if not given:
                return [None] * count
            result = apply_rule(_pullback(self, graph, mask), *saved, *given)
            return spread(result, self.moving)

        reads = (*range(count), *range(count + len(outs), count + len(outs) + len(left)))
        return Linearized(outs, left, reads, tangent, cotangent)

    def reverse_only(self, xs: Entries) -> str | None:
        """A custom_vjp in G, which has no forward mode; None if its tangents are not needed."""
        if not self.may_hold(xs, "custom_vjp_call", "custom_vjp_call_jaxpr"):
            return None
        moved = self.chosen(xs)
        pushed = jax.make_jaxpr(lambda *dxs: self.pushed(xs, spread(dxs, self.moving)))(*moved)
        return f"a jax.custom_vjp in {self.name}" if holds(pushed.jaxpr, *_TO_TRANSPOSE) else None

    def refuse_edit(self, xs: Entries) -> None:
        """Raises if G holds an edit without forward mode."""
        try:
            closed = (
                self.fun.closed
                if isinstance(self.fun, _TracedOnce)
                else jax.make_jaxpr(self.fun)(*xs)
            )
        except jax.errors.JAXTypeError:  # G branches on values
            return
        edits = [e.params["name"] for e in equations(closed) if e.primitive is reverse_only_p]
        if edits:
            raise edit_in_frozen(self.caller, edits[0])

    def may_hold(self, xs: Entries, *names: str) -> bool:
        """Whether G may contain such a primitive; True if G cannot be traced."""
        if isinstance(self.fun, _TracedOnce):
            return holds(self.fun.closed.jaxpr, *names)
        try:
            return holds(jax.make_jaxpr(self.fun)(*xs).jaxpr, *names)
        except jax.errors.JAXTypeError:
            return True

    def pushed(self, xs: Entries, dxs: Entries) -> list[Any]:
        """The tangents of the outputs."""
        dys = _along(
            lambda *moved: self.of_moving(xs)(*moved)[0], self.chosen(xs), self.chosen(dxs)
        )
        return spread(dys, self.inexact)

    def pulled(self, mask: Sequence[bool], xs: Entries, cts: Entries) -> list[Any]:
        """The pullback, recomputed from the arguments."""
        with explained(self.caller):
            ys, pull, _ = jax.vjp(self.of_moving(xs), *self.chosen(xs), has_aux=True)
        return _through(pull, _full(ys, self.inexact, mask, cts))


@dataclass(frozen=True)
class _KeptPullback:
    """The pullback of an evaluation, as flat residual arrays."""

    count: int  # the number of arguments
    size: int  # the number of residuals
    treedef: Any  # its structure

    @property
    def stop(self) -> int:
        """The number of operands before the cotangents or tangents."""
        return self.count + self.size

    def linear(self, operands: Entries) -> Any:
        """The pullback, with residuals that are not differentiated."""
        left = [jax.lax.stop_gradient(x) for x in operands[self.count : self.stop]]
        return jax.tree.unflatten(self.treedef, left)

    def nondifferentiable(self, moving: Sequence[bool]) -> tuple[int, ...]:
        """The operands that are not differentiated."""
        return tuple([i for i in range(self.stop) if i >= self.count or not moving[i]])

    def reads(self, more: int) -> tuple[int, ...]:
        """The operands that derivatives read; `more` of them follow the residuals."""
        return (*range(self.count), *range(self.stop, self.stop + more))


def _pullback(use: _Use, graph: _KeptPullback, mask: list[bool]) -> Rule:
    """The pullback as a rule, from (arguments, residuals, cotangents) to cotangents."""
    count, extras = graph.count, graph.size

    def primal(*operands: Array) -> list[Array]:
        fixed = [jax.lax.stop_gradient(x) for x in operands]
        moved = use.chosen(fixed[:count])
        likes = jax.eval_shape(use.of_moving(fixed[:count]), *moved)[0]
        cts = _full(likes, use.inexact, mask, fixed[graph.stop :])
        return _through(graph.linear(operands), cts)

    def recomputed(xs: Entries) -> Callable[..., list[Any]]:
        n = sum(use.moving)

        def run(*both: Array) -> list[Any]:
            return use.pulled(mask, replaced_where(xs, use.moving, both[:n]), both[n:])

        return run

    def tangent(saved: Entries, dxs: Entries) -> list[Any]:
        xs, cts = saved[:count], list(saved[len(saved) - sum(mask) :])
        along = [*use.chosen(dxs[:count]), *dxs[graph.stop :]]
        if all(dx is None for dx in along[: sum(use.moving)]):  # it is linear in the cotangents
            return use.pulled(mask, xs, dxs[graph.stop :])
        return _along(recomputed(xs), [*use.chosen(xs), *cts], along)

    def cotangent(saved: Entries, us: Entries) -> list[Any]:
        """The pullback of us, with respect to the arguments and to the cotangents."""
        xs, cts = saved[:count], list(saved[len(saved) - sum(mask) :])
        lacking = use.reverse_only(xs)
        if lacking is None:
            try:
                second, to_cts = in_forward_mode(saved, xs, cts, us)
            except TypeError as error:
                # JAX fails at a symbolic zero tangent of a linear solve.
                if not (is_of("jax", error) and use.may_hold(xs, "custom_linear_solve")):
                    raise
                lacking = f"lax.custom_linear_solve in {use.name}"
        if lacking is not None:
            use.refuse_edit(xs)
            warn(
                f"{use.caller}: {lacking} lacks the derivative that forward over reverse needs; "
                "that pass takes reverse mode twice, and keeps a graph of "
                f"{use.name} while it runs."
            )
            ys, pull = jax.vjp(recomputed(xs), *use.chosen(xs), *cts)
            both = _through(pull, filled(us, ys))
            second, to_cts = both[: sum(use.moving)], both[sum(use.moving) :]
        return [*spread(second, use.moving), *([None] * extras), *to_cts]

    def in_forward_mode(saved: Entries, xs: Entries, cts: list[Any], us: Entries) -> Any:
        along = spread(us, use.moving)
        forward = use.pushed(xs, along)
        second = _along(lambda *moved: recomputed(xs)(*moved, *cts), use.chosen(xs), us)
        return second, [dy for dy, t in zip(forward, mask, strict=True) if t]

    return TracedRule(
        "frozen's pullback",
        primal,
        tangent,
        cotangent,
        saves=graph.reads(sum(mask)),
        nondifferentiable=graph.nondifferentiable(use.moving),
        user_functions=use.user_functions,
        flow=lambda *operands: use.pulled(mask, operands[:count], operands[graph.stop :]),
    )


def _along(fun: Callable[..., list[Array]], xs: Entries, dxs: Entries) -> list[Any]:
    """The derivative of fun at xs along dxs (None: zero), in forward mode."""
    moved = [i for i, dx in enumerate(dxs) if dx is not None]

    run = lambda *new: fun(*replaced_at(xs, moved, new))
    return list(jax.jvp(run, [xs[i] for i in moved], [dxs[i] for i in moved])[1])


_TO_TRANSPOSE = ("custom_lin", "unreachable")  # a custom_vjp's tangents, which cannot be evaluated


def _through(pull: Any, cts: list[Array]) -> list[Array]:
    return [conj(g) for g in pull([conj(ct) for ct in cts])]


def _full(likes: Any, inexact: Sequence[bool], mask: Sequence[bool], cts: Entries) -> list[Any]:
    """Cotangents of all inexact outputs, with zeros for absent ones."""
    given = spread(cts, mask)
    floating = [ct for ct, i in zip(given, inexact, strict=True) if i]
    return filled(floating, likes)
