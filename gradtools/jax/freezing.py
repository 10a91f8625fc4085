"""Implements `frozen` in JAX with a rule whose pullback is also a rule.

Only the pullback reads the residuals of the first evaluation. A second derivative recomputes all
values from the arguments. Differentiating a first derivative therefore stores only arguments and
cotangents, independently of the depth of G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.arguments.chunks import Chunks
from gradtools.backend import Array
from gradtools.errors import is_of, warn
from gradtools.freezing import edit_in_frozen, name_of_function
from gradtools.jax.arrays import asarray
from gradtools.jax.jaxprs import equations, holds, named_after, traced
from gradtools.jax.known_errors import explained
from gradtools.jax.recomputing import stateful
from gradtools.jax.rules.installing import apply_rule
from gradtools.jax.rules.primitives import TracedRule, reverse_only_p
from gradtools.jax.rules.transposing import pull, transpose
from gradtools.jax.trees import conj, filled, is_inexact, zero_cotangent, zeros_of
from gradtools.rules import Linearized, Rule, replaced_at, spread

Entries = Sequence[Any]


def run_frozen(whole: Chunks, uses: None) -> list[Array]:
    """Evaluates a frozen function once and returns the outputs."""
    arrays = [k for k, x in enumerate(whole.shared) if isinstance(x, jax.Array)]
    arrays.sort(key=lambda k: not is_inexact(whole.shared[k]))  # differentiated arrays first
    xs = [whole.shared[k] for k in arrays]
    modules = stateful(whole.caller, whole.call.f, whole.arguments)
    state = [] if modules is None else [jax.lax.stop_gradient(x) for x in modules.leaves]
    call = replace(whole.call, f=modules or whole.call.f)
    # A compiled program references the rule, which must not contain tracers.
    rest = [None if isinstance(x, jax.Array) else x for x in whole.shared]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    def fun(*xs: Array) -> list[Array]:
        if modules is not None:
            modules.now = state
        outs, _ = call(0, 0, [], replaced_at(rest, arrays, xs), [])
        after = [] if modules is None else modules.after
        # A rule cannot return PRNG keys.
        plain = [jax.random.key_data(x) if is_key(x) else x for x in after]
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
    """A function of flat arrays that is traced once for all derivatives.

    Each derivative evaluates the jaxpr. Tracing the function again for each derivative would take
    exponential time in nested frozen functions. For arguments with other avals, such as arrays that
    vary over a mesh, the function itself is called.
    """

    def __init__(self, fun: Callable[..., list[Array]], xs: Sequence[Array]) -> None:
        self.fun = fun
        self.program, self.consts = traced(fun, *xs)
        # The arrays that the program closes over, or an empty list if one of the arrays is a
        # tracer. The captured arrays are the last inputs of the program, so compiled code stores
        # them once for all derivatives.
        self.captured = self.consts if all(map(_is_plain, self.consts)) else []
        self.count = len(self.program.jaxpr.invars)
        avals = [*[v.aval for v in self.program.jaxpr.invars], *map(jax.typeof, self.captured)]
        self.avals = [aval.update(weak_type=False) for aval in avals]

    def __call__(self, *xs: Array) -> list[Array]:
        known = self.avals[: len(xs)]
        xs, avals, consts = xs[: self.count], [*map(jax.typeof, xs)], xs[self.count :]
        if [aval.update(weak_type=False) for aval in avals] != known:
            return self.fun(*xs)
        return self.program(consts or tuple(self.consts), *xs)


def _is_plain(x: Any) -> bool:
    """Returns whether x is a numeric array that is not a tracer."""
    aval = jax.typeof(x)
    known = type(aval) is jax.core.ShapedArray and not isinstance(x, jax.core.Tracer)
    return known and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


class _Use:
    """A call of a frozen function of flat arrays. The first `count` arrays are inexact."""

    def __init__(self, caller: str, fun: Callable[..., list[Array]], xs: list[Array]) -> None:
        self.caller, self.name = caller, name_of_function(caller)
        self.rule_name = caller if caller == "frozen" else f"frozen: {caller}"
        self.fun, self.count = fun, sum(map(is_inexact, xs))
        self.user_functions: Any = (fun,)  # the objects that may capture further arrays
        self.captured: list[Any] = []  # arrays that are passed after the arguments
        if any(isinstance(x, jax.core.Tracer) for x in xs):  # otherwise G may branch on values
            self.fun = _TracedOnce(fun, xs)
            self.captured = self.fun.captured
            self.user_functions = () if self.captured else (list(self.fun.consts),)
        self.rule = TracedRule(
            self.rule_name,
            self.fun,
            linearize=self.linearize,
            user_functions=self.user_functions,
            flow=self.fun,
        )

    def at(self, xs: Entries) -> Callable[..., list[Array]]:
        """Returns G as a function of its inexact arguments."""
        return lambda *moved: self.fun(*moved, *xs[self.count :])

    def linearize(self, *xs: Array) -> Linearized:
        """Evaluates G, and returns the linear maps. The residuals of the pullback are extras."""
        fixed = [jax.lax.stop_gradient(x) for x in xs]
        with explained(self.caller, self.name):
            ys, native = jax.vjp(self.at(fixed), *fixed[: self.count])
        left, treedef = jax.tree.flatten(native)
        likes, n, m = [jax.typeof(y) for y in ys], len(xs), len(xs) + len(ys)

        def tangent(saved: Entries, dxs: Entries) -> list[Any]:
            xs, moved = saved[:n], saved[: self.count]
            if self.reverse_only(xs) is None:
                return _along(self.at(xs), moved, dxs[: self.count])
            # the transpose of the pullback
            mask = [*map(is_inexact, likes)]
            pulled = lambda xs, *cts: self.pulled(mask, xs, cts)
            zeros, dxs = [*map(zeros_of, compress(likes, mask))], filled(dxs[: self.count], moved)
            return spread(transpose(self.rule, "cotangent", pulled, xs, zeros, dxs), mask)

        def cotangent(saved: Entries, cts: Entries) -> list[Any]:
            mask = [ct is not None for ct in cts]
            if not any(mask):
                return [None] * n
            rule = _pullback(self, n, treedef, likes, mask)
            result = apply_rule(rule, *saved, *compress(cts, mask))
            return [*result, *([None] * (n - self.count))]

        saves = (*range(n), *range(m, m + len(left)))
        return Linearized(ys, left, saves, tangent, cotangent)

    def pulled(self, mask: Sequence[bool], xs: Entries, cts: Entries) -> list[Any]:
        """Applies the pullback of G. The residuals are recomputed from the arguments."""
        with explained(self.caller, self.name):
            return pull(self.at(xs), xs[: self.count], spread(cts, mask))

    def may_hold(self, xs: Entries, *names: str) -> bool:
        """Returns whether G contains a primitive in `names`, or True if G cannot be traced."""
        if isinstance(self.fun, _TracedOnce):
            return holds(self.fun.program.jaxpr, *names)
        try:
            return holds(jax.make_jaxpr(self.fun)(*xs), *names)
        except jax.errors.JAXTypeError:  # G branches on values
            return True

    def reverse_only(self, xs: Entries) -> str | None:
        """Describes a custom_vjp in G on which a tangent depends, or returns None if there is none.

        A custom_vjp does not support forward mode. Raises an error if the custom_vjp is an edit.
        """
        if not self.may_hold(xs, "custom_vjp_call", "custom_vjp_call_jaxpr"):
            return None
        moved = xs[: self.count]
        pushed = jax.make_jaxpr(lambda *dxs: _along(self.at(xs), moved, dxs))(*moved)
        # the primitives of a custom_vjp's tangents, which cannot be evaluated
        if not holds(pushed, "custom_lin", "unreachable"):
            return None
        edits = [e.params["name"] for e in equations(pushed) if e.primitive is reverse_only_p]
        if edits:
            raise edit_in_frozen(self.caller, edits[0])
        return f"a jax.custom_vjp in {self.name}"


def _pullback(
    use: _Use, inputs: int, treedef: Any, likes: Sequence[Any], mask: Sequence[bool]
) -> Rule:
    """Returns the pullback as a rule that maps (arguments, residuals, cotangents) to cotangents.

    Args:
        use: The call of the frozen function.
        inputs: The number of arguments of the frozen function.
        treedef: The treedef of the pullback that `jax.vjp` returned, whose leaves are the
            residuals.
        likes: The avals of the outputs.
        mask: For each output, whether its cotangent is given.
    """
    count, stop = use.count, inputs + treedef.num_leaves

    def primal(*operands: Array) -> list[Array]:
        fixed = [jax.lax.stop_gradient(x) for x in operands]
        native = jax.tree.unflatten(treedef, fixed[inputs:stop])
        pairs = zip(spread(fixed[stop:], mask), likes, strict=True)
        cts = [zero_cotangent(y) if ct is None else conj(ct) for ct, y in pairs]
        return [conj(g) for g in native(cts)]

    def recomputed(xs: Entries) -> Callable[..., list[Any]]:
        return lambda *both: use.pulled(mask, [*both[:count], *xs[count:]], both[count:])

    def tangent(saved: Entries, dxs: Entries) -> list[Any]:
        xs, cts = saved[:inputs], saved[inputs:]
        along = [*dxs[:count], *dxs[stop:]]
        if all(dx is None for dx in along[:count]):  # the pullback is linear in the cotangents
            return use.pulled(mask, xs, dxs[stop:])
        return _along(recomputed(xs), [*xs[:count], *cts], along)

    def cotangent(saved: Entries, us: Entries) -> list[Any]:
        """Maps cotangents `us` of the results to cotangents of the arguments and of `cts`."""
        xs, cts = saved[:inputs], saved[inputs:]
        lacking = use.reverse_only(xs)
        if lacking is None:
            try:
                both = in_forward_mode(xs, cts, us)
            except TypeError as error:
                # JAX raises an error for a symbolic zero tangent of a linear solve.
                if not (is_of("jax", error) and use.may_hold(xs, "custom_linear_solve")):
                    raise
                lacking = f"lax.custom_linear_solve in {use.name}"
        if lacking is not None:
            warn(
                f"{use.caller}: {lacking} does not support forward over reverse, so this pass "
                f"applies reverse mode twice, and stores a graph of {use.name} during the pass."
            )
            both = pull(recomputed(xs), [*xs[:count], *cts], us)
        return [*both[:count], *([None] * (stop - count)), *both[count:]]

    def in_forward_mode(xs: Entries, cts: Entries, us: Entries) -> list[Any]:
        """Computes tangents of the pullback and of the outputs whose cotangents are given."""

        def run(*moved: Array) -> list[Any]:
            values: list[Any] = []

            def with_values(ys: Sequence[Array]) -> list[Any]:
                values.extend(compress(ys, mask))
                return spread(cts, mask)

            with explained(use.caller, use.name):
                return [*pull(use.at(xs), moved, with_values), *values]

        return _along(run, xs[:count], us)

    return TracedRule(
        f"{use.rule_name}'s pullback",
        primal,
        tangent,
        cotangent,
        saves=(*range(inputs), *range(stop, stop + sum(mask))),
        nondifferentiable=tuple(range(count, stop)),
        user_functions=use.user_functions,
        flow=lambda *operands: use.pulled(mask, operands[:inputs], operands[stop:]),
    )


def _along(fun: Callable[..., list[Array]], xs: Entries, dxs: Entries) -> list[Any]:
    """Returns the tangents of fun at xs along dxs, where None means zero, in forward mode."""
    moved = [i for i, dx in enumerate(dxs) if dx is not None]
    run = lambda *new: fun(*replaced_at(xs, moved, new))
    return list(jax.jvp(run, [xs[i] for i in moved], [dxs[i] for i in moved])[1])
