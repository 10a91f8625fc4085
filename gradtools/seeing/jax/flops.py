"""Counts floating-point operations of a jaxpr.

XLA's own count includes a loop's body once. Here every body counts as often as it runs:

    flops = sum over bodies of  (trip count) * (flops of its own equations)

A scan's trip count is static. A program with while loops and branches is interpreted once with its
values, so that each body is counted when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradtools.jax.jaxprs import (
    CALLS,
    RULED,
    Eqn,
    HeldJaxpr,
    Jaxpr,
    bound,
    interpreted,
    is_inexact,
    live,
    programs_of,
    scan_counts,
)
from gradtools.jax.rules.kept_alive import LIFE, memoized
from gradtools.seeing import measures as costs


def counted(jaxpr: Jaxpr, consts: Sequence[Any], leaves: Sequence[Any]) -> Count:
    """The count of one run of a program, which runs only if its values determine the count."""
    count = Count()
    if any(map(_has_trips, jaxpr.eqns)):
        count.run(HeldJaxpr(jaxpr, tuple(consts)), list(leaves))
    else:
        count.flops = count.cost(jaxpr)
    return count


# --- bodies ------------------------------------------------------------------------------

# Host callbacks and kernels, whose operations are unknown.
_OPAQUE = {
    *("pure_callback", "io_callback", "gradtools_kernel", "ffi_call", "pallas_call"),
    *("custom_call", "tpu_custom_call", "triton_kernel_call", "run_state"),
}


def bodies(eqn: Eqn) -> list[HeldJaxpr]:
    """The bodies of an equation, including the implementation of gradtools' primitives."""
    name = eqn.primitive.name
    if name in _OPAQUE:
        return []
    if not name.startswith("gradtools_"):
        return programs_of(eqn)
    avals = tuple([v.aval for v in eqn.invars])
    params = {name: value for name, value in eqn.params.items() if name != LIFE}

    def make() -> HeldJaxpr:
        """What the primitive runs, without what no result of it needs."""
        closed = jax.make_jaxpr(lambda *xs: eqn.primitive.impl(*xs, **params))(*avals)
        return HeldJaxpr(live(closed.jaxpr), tuple(closed.consts))

    if "rule" not in params:
        return [make()]
    key = tuple([item for item in params.items() if item[0] != "rule"])
    return [memoized(params["rule"], (eqn.primitive, avals, key), make)]


def is_call(name: str) -> bool:
    """Whether an equation just calls its one body."""
    own = name.startswith("gradtools_") and name not in _OPAQUE
    return own or name in CALLS or name in RULED


def _has_trips(eqn: Eqn) -> bool:
    """Whether it is, or contains, a loop or a branch whose trip count depends on values."""
    name = eqn.primitive.name
    inside = bodies(eqn) if is_call(name) or name == "scan" else []
    inner = (inner for body in inside for inner in body.jaxpr.eqns)
    return name in ("while", "cond") or any(map(_has_trips, inner))


# --- counting ----------------------------------------------------------------------------


class Count:
    """Sums the cost of what runs.

    Attributes:
        flops: The operations so far.
        unknown: The names of primitives without a counting rule.
        notes: Remarks on the count.
    """

    def __init__(self) -> None:
        self.flops = 0
        self.unknown, self.notes = set[str](), set[str]()
        # by id: the jaxpr, which is held; its cost; the compiled program if all of it is static
        self._known: dict[int, tuple[Jaxpr, int, Any]] = {}

    def run(self, body: HeldJaxpr, args: list[Any]) -> list[Any]:
        """Counts a body that runs once, and returns its results."""
        jaxpr = body.jaxpr
        if id(jaxpr) not in self._known:
            dynamic, plain = any(map(_has_trips, jaxpr.eqns)), lambda i, eqn, xs: bound(eqn, xs)
            run = None if dynamic else jax.jit(lambda *xs: interpreted(jaxpr, xs, plain))
            self._known[id(jaxpr)] = jaxpr, 0 if dynamic else self.cost(jaxpr), run
        _, cost, run = self._known[id(jaxpr)]
        self.flops += cost
        entries = [*body.consts, *args]
        return interpreted(jaxpr, entries, self._ran) if run is None else run(*entries)

    def _ran(self, i: int, eqn: Eqn, xs: list[Any]) -> list[Any]:
        """Counts an equation that runs once, and returns its results."""
        name, params = eqn.primitive.name, eqn.params
        if not _has_trips(eqn) or (name == "scan" and not params["length"]):
            self.flops += self._cost_of(eqn)
            return bound(eqn, xs)
        inner = bodies(eqn)
        if name == "cond":
            return self.run(inner[min(max(int(xs[0]), 0), len(inner) - 1)], xs[1:])
        if name == "while":
            (gate, body), a, b = inner, params["cond_nconsts"], params["body_nconsts"]
            carry = xs[a + b :]
            while True:
                (go,) = self.run(gate, [*xs[:a], *carry])
                if not jnp.any(go):
                    return carry
                before, carry = carry, self.run(body, [*xs[a : a + b], *carry])
                if go.ndim:  # under vmap finished examples keep their carry
                    carry = [
                        lax.select(lax.broadcast_in_dim(go, new.shape, range(go.ndim)), new, old)
                        for new, old in zip(carry, before, strict=True)
                    ]
        if name == "scan":
            length, (n, carried) = params["length"], scan_counts(eqn)
            carry, rows = xs[n : n + carried], list[Any]([None] * length)
            for i in reversed(range(length)) if params["reverse"] else range(length):
                outs = self.run(inner[0], [*xs[:n], *carry, *(x[i] for x in xs[n + carried :])])
                carry, rows[i] = outs[:carried], outs[carried:]
            return [*carry, *map(jnp.stack, zip(*rows, strict=True))]
        return self.run(inner[0], xs)

    # --- without values

    def cost(self, jaxpr: Jaxpr) -> int:
        """The operations of a program."""
        return sum(map(self._cost_of, jaxpr.eqns))

    def _cost_of(self, eqn: Eqn) -> int:
        """The operations of an equation; loops and branches inside count once."""
        inner, name = bodies(eqn), eqn.primitive.name
        if not inner:
            cost = _cost(eqn)
            self.unknown |= {name} if cost is None else set()
            return cost or 0
        trips = 1
        if name == "scan":
            trips = eqn.params["length"]
        elif name == "shard_map":
            trips = eqn.params["mesh"].size
        elif name in ("while", "cond"):
            self.notes.add(f"a {name} inside of another kind of program is counted once")
        return trips * sum(self.cost(body.jaxpr) for body in inner if trips)


_ELEMENTWISE = frozenset(
    """
    add add_any sub mul div neg square
    rem max min abs sign floor ceil round nextafter exp exp2 expm1 log log1p logistic sqrt rsqrt
    cbrt pow sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erf_inv
    lgamma digamma polygamma zeta igamma igammac igamma_grad_a random_gamma_grad
    regularized_incomplete_beta bessel_i0e bessel_i1e mul_no_nan
    """.split()
)
_FREE = frozenset(
    """
    reshape broadcast_in_dim transpose slice dynamic_slice squeeze rev dynamic_update_slice
    gather scatter concatenate pad select_n copy iota convert_element_type reduce_precision
    bitcast_convert_type stop_gradient split real imag complex conj sort top_k expand_dims empty
    empty2 device_put optimization_barrier pvary pcast sharding_constraint reshard name
    debug_callback tile layout_constraint unstack approx_top_k broadcast rng_bit_generator
    random_unwrap random_wrap unvary axis_index
    """.split()
)


def _cost(eqn: Eqn) -> int | None:
    """The operations of an equation without bodies; None if they are unknown."""
    name, p = eqn.primitive.name, eqn.params
    if name in _OPAQUE:
        return None
    if name in _FREE or not any(map(is_inexact, eqn.outvars)):
        return 0
    out = eqn.outvars[0].aval
    is_complex = jnp.issubdtype(out.dtype, jnp.complexfloating)
    one = lambda kind: costs.weight(kind, is_complex)
    if name in _ELEMENTWISE:
        return out.size * one(name.removesuffix("_any"))
    avals = [v.aval for v in eqn.invars] or [out]
    x, last = avals[0], avals[-1]
    match name:
        case "dot_general":
            (contracted, _), _ = p["dimension_numbers"]
            return costs.product(out.size, math.prod(x.shape[d] for d in contracted), is_complex)
        case "conv_general_dilated":
            numbers = p["dimension_numbers"]
            specs = (out, numbers.out_spec), (last, numbers.rhs_spec), (x, numbers.lhs_spec)
            outs, taps, ins = ([of.shape[d] for d in spec[2:]] for of, spec in specs)
            low = [low for low, _ in p["padding"]]
            dilations = p["lhs_dilation"], p["rhs_dilation"]
            axes = zip(outs, taps, ins, p["window_strides"], low, *dilations, strict=True)
            meeting = [costs.meetings(*axis) for axis in axes]
            batch, channels = (out.shape[d] for d in numbers.out_spec[:2])
            group = last.shape[numbers.rhs_spec[1]]
            return costs.convolution(meeting, batch, group, channels, is_complex)
        case "reduce_window_sum" | "reduce_window_max" | "reduce_window_min":
            return out.size * (math.prod(p["window_dimensions"]) - 1)
        case "select_and_scatter_add":
            return x.size
        case "scatter-add" | "scatter_add":
            return last.size * one("add")
        case "scatter-mul" | "scatter_mul":
            return last.size * one("mul")
        case "integer_pow":
            return out.size * costs.whole_power(p["y"], is_complex)
        case "clamp":
            return 2 * out.size
        case "one_minus_square":
            return out.size * (one("mul") + one("sub"))
        case "fft":
            real = not (jnp.issubdtype(x.dtype, jnp.complexfloating) and is_complex)
            return costs.fourier_flops(max(x.size, out.size), math.prod(p["fft_lengths"]), real)
        case "cholesky":
            return costs.cholesky(x.shape)
        case "lu":
            return costs.lu(x.shape)
        case "triangular_solve":
            return costs.triangular_solve(x.shape, out.size)
        case "reduce_sum" | "reduce_prod" | "reduce_max" | "reduce_min":
            return max(x.size - out.size, 0) * one(name.removeprefix("reduce_"))
        case "cumsum" | "cumprod" | "cummax" | "cummin":
            return max(x.size - x.size // x.shape[p["axis"]], 0) * one(name.removeprefix("cum"))
    return None
