"""Counts floating-point operations of a jaxpr.

XLA's own count includes a loop's body once. Here every body counts as often as it runs:

    flops = sum over bodies of  (trip count) * (flops of its own equations)

A scan's trip count is static. For while loops and branches the program runs once in a jaxpr
interpreter that carries a counter for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.jax.jaxprs import (
    CALLS,
    RULED,
    Eqn,
    HeldJaxpr,
    Jaxpr,
    bound,
    interpreted,
    live,
    programs_of,
    scan_counts,
)
from gradtools.jax.rules.kept_alive import LIFE, memoized
from gradtools.seeing import measures as costs

Path = tuple[int, ...]  # a body's position: alternating indices of equations and bodies
Runs = dict[Path, Any]


def counted(jaxpr: Jaxpr, consts: Sequence[Any], leaves: Sequence[Any]) -> Count:
    runs: Runs = {}
    if any(True for _ in _sites(jaxpr, ())):
        result = jax.jit(lambda c, x: _interpreted(jaxpr, c, x, ())[1])
        runs = {k: int(n) for k, n in result(list(consts), list(leaves)).items()}
    count = Count(runs)
    count.jaxpr(jaxpr, 1, ())
    return count


# --- bodies ------------------------------------------------------------------------------

# Host callbacks and kernels, whose operations are unknown.
_OPAQUE = {
    *("pure_callback", "io_callback", "gradtools_kernel", "ffi_call", "pallas_call"),
    *("custom_call", "tpu_custom_call", "triton_kernel_call", "run_state"),
}


_CONTROL = ("scan", "while", "cond")


def bodies(eqn: Eqn) -> list[HeldJaxpr]:
    """The bodies of an equation, including the implementation of gradtools' primitives."""
    name = eqn.primitive.name
    if name in _OPAQUE:
        return []
    return [_implementation(eqn)] if name.startswith("gradtools_") else programs_of(eqn)


def is_call(name: str) -> bool:
    """Whether an equation just calls its one body."""
    own = name.startswith("gradtools_") and name not in _OPAQUE
    return own or name in CALLS or name in RULED


def _implementation(eqn: Eqn) -> HeldJaxpr:
    """What a primitive of gradtools runs, without what no result of it needs."""
    avals = tuple([v.aval for v in eqn.invars])
    params = {name: value for name, value in eqn.params.items() if name != LIFE}

    def make() -> HeldJaxpr:
        closed = jax.make_jaxpr(lambda *xs: eqn.primitive.impl(*xs, **params))(*avals)
        return HeldJaxpr(live(closed.jaxpr), tuple(closed.consts))

    if "rule" not in params:
        return make()
    key = tuple([item for item in params.items() if item[0] != "rule"])
    return memoized(params["rule"], (eqn.primitive, avals, key), make)


def _sites(jaxpr: Jaxpr, path: Path) -> Iterator[Path]:
    """The paths of the bodies whose trip count is dynamic."""
    for i, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        if not (is_call(name) or name in _CONTROL):
            continue
        for k, body in enumerate(bodies(eqn)):
            if name in ("while", "cond"):
                yield (*path, i, k)
            yield from _sites(body.jaxpr, (*path, i, k))


# --- running a program to count trips ----------------------------------------------------


def _interpreted(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], path: Path
) -> tuple[list[Any], Runs]:
    """The results of a jaxpr, and the trip count of each of its `_sites`."""
    runs: Runs = {}

    def step(i: int, eqn: Eqn, xs: list[Any]) -> list[Any]:
        outs, inside = _ran(eqn, xs, (*path, i))
        runs.update(inside)
        return outs

    return interpreted(jaxpr, [*consts, *args], step), runs


def _ran(eqn: Eqn, xs: list[Any], path: Path) -> tuple[list[Any], Runs]:
    inner = bodies(eqn)
    inside = [list(_sites(body.jaxpr, (*path, k))) for k, body in enumerate(inner)]
    name = eqn.primitive.name
    if name == "while":
        return _ran_while(eqn, inner, inside, xs, path)
    if name == "cond":
        return _ran_cond(inner, inside, xs, path)
    if is_call(name):
        return _interpreted(inner[0].jaxpr, inner[0].consts, xs, (*path, 0))
    if name == "scan" and any(inside):
        return _ran_scan(eqn, inner[0], xs, path)
    return bound(eqn, xs), {}


def _ran_scan(eqn: Eqn, body: HeldJaxpr, xs: list[Any], path: Path) -> tuple[list[Any], Runs]:
    n, carried = scan_counts(eqn)

    def step(carry: Any, row: Any) -> Any:
        outs, runs = _interpreted(body.jaxpr, body.consts, [*xs[:n], *carry, *row], (*path, 0))
        return outs[:carried], (outs[carried:], runs)

    carry, (ys, runs) = jax.lax.scan(
        step,
        xs[n : n + carried],
        xs[n + carried :],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    return [*carry, *ys], {k: jnp.sum(v) for k, v in runs.items()}


def _ran_while(
    eqn: Eqn, parts: list[HeldJaxpr], inside: list[list[Path]], xs: list[Any], path: Path
) -> tuple[list[Any], Runs]:
    gate, body = parts
    a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    keys = [(*path, 0), (*path, 1), *inside[0], *inside[1]]

    def condition(carry: Sequence[Any]) -> tuple[Any, Runs]:
        (go,), runs = _interpreted(gate.jaxpr, gate.consts, [*xs[:a], *carry], keys[0])
        return go, {keys[0]: 1, **runs}

    def step(state: Any) -> Any:
        carry, go, runs = state
        result, ran = _interpreted(body.jaxpr, body.consts, [*xs[a : a + b], *carry], keys[1])
        kept = [_where(go, new, old) for new, old in zip(result, carry, strict=True)]
        again, more = condition(kept)
        return kept, again, _added(runs, {keys[1]: 1}, ran, more)

    first, runs = condition(xs[a + b :])
    start = (xs[a + b :], first, _added(_none(keys), runs))
    outs, _, total = jax.lax.while_loop(lambda state: jnp.any(state[1]), step, start)
    return outs, total


def _where(go: Any, new: Any, old: Any) -> Any:
    """Selects the new carry where the loop continues; under vmap finished examples keep theirs."""
    if go.ndim == 0:
        return new
    return jax.lax.select(jax.lax.broadcast_in_dim(go, new.shape, range(go.ndim)), new, old)


def _ran_cond(
    parts: list[HeldJaxpr], inside: list[list[Path]], xs: list[Any], path: Path
) -> tuple[list[Any], Runs]:
    keys = [*((*path, k) for k in range(len(parts))), *[key for each in inside for key in each]]

    def branch(k: int, *operands: Any) -> Any:
        outs, runs = _interpreted(parts[k].jaxpr, parts[k].consts, operands, (*path, k))
        return outs, _added(_none(keys), {(*path, k): 1}, runs)

    branches = [partial(branch, k) for k in range(len(parts))]
    return jax.lax.switch(jnp.asarray(xs[0], jnp.int32), branches, *xs[1:])


def _none(keys: Sequence[Path]) -> Runs:
    return {key: jnp.zeros((), jnp.uint32) for key in keys}


def _added(runs: Runs, *more: Runs) -> Runs:
    total = dict(runs)
    for counts in more:
        for key, n in counts.items():
            total[key] = total[key] + jnp.asarray(n, jnp.uint32)
    return total


# --- counting ----------------------------------------------------------------------------


@dataclass
class Count:
    """Sums the cost of equations, times the trip counts of their bodies.

    Attributes:
        runs: The trip counts of loops and branches.
        flops: The operations so far.
        unknown: The names of primitives without a counting rule.
        notes: Remarks on the count.
    """

    runs: Runs
    flops: int = 0
    unknown: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)

    def jaxpr(self, jaxpr: Jaxpr, times: int, path: Path) -> None:
        """Adds all equations of a body that runs `times` times."""
        for i, eqn in enumerate(jaxpr.eqns if times else ()):
            self._equation(eqn, times, (*path, i))

    def _equation(self, eqn: Eqn, times: int, path: Path) -> None:
        inner, name = bodies(eqn), eqn.primitive.name
        for k, body in enumerate(inner):
            own = (*path, k)
            trips = times
            if name == "scan":
                trips *= eqn.params["length"]
            elif name == "shard_map":
                trips *= eqn.params["mesh"].size
            elif name in ("while", "cond"):
                trips = self.runs.get(own, trips)
                if own not in self.runs:
                    self.notes.add(f"a {name} inside of another kind of program is counted once")
            self.jaxpr(body.jaxpr, trips, own)
        if inner:
            return
        cost = _cost(eqn)
        if cost is None:
            self.unknown.add(name)
        else:
            self.flops += times * cost


_OTHERS = """
    rem max min abs sign floor ceil round nextafter exp exp2 expm1 log log1p logistic sqrt rsqrt
    cbrt pow sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erf_inv
    lgamma digamma polygamma zeta igamma igammac igamma_grad_a random_gamma_grad
    regularized_incomplete_beta bessel_i0e bessel_i1e mul_no_nan
""".split()
# One operation per element, by its kind in `costs.weight`.
_ELEMENTWISE = {
    **dict.fromkeys(("add", "add_any"), "add"),
    **{name: name for name in ("sub", "mul", "div", "neg", "square")},
    **dict.fromkeys(_OTHERS, "other"),
}
_REDUCTIONS = {"reduce_sum": "sum", "reduce_prod": "prod", "reduce_max": "max", "reduce_min": "max"}
_REDUCTIONS |= {"cumsum": "sum", "cumprod": "prod", "cummax": "max", "cummin": "max"}
_FREE = frozenset(
    """
    reshape broadcast_in_dim transpose slice dynamic_slice squeeze rev dynamic_update_slice
    gather scatter concatenate pad select_n copy iota convert_element_type reduce_precision
    bitcast_convert_type stop_gradient split real imag complex conj sort top_k expand_dims empty
    device_put optimization_barrier pvary pcast sharding_constraint reshard layout_constraint
    name debug_callback tile unstack approx_top_k broadcast rng_bit_generator random_unwrap
    random_wrap unvary axis_index
    """.split()
)


def _cost(eqn: Eqn) -> int | None:
    """The operations of an equation without bodies; None if they are unknown."""
    name = eqn.primitive.name
    rule = _RULES.get(name)
    if name in _OPAQUE:
        return None
    if name in _FREE or not any(map(_inexact, eqn.outvars)):
        return 0
    if name in _ELEMENTWISE:
        out = eqn.outvars[0].aval
        return out.size * costs.weight(_ELEMENTWISE[name], _complex(out))
    return None if rule is None else rule(eqn)


def _inexact(var: Any) -> bool:
    return hasattr(var.aval, "dtype") and jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _complex(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


def _dot(eqn: Eqn) -> int:
    left, out = eqn.invars[0].aval, eqn.outvars[0].aval
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return costs.product(out.size, math.prod(left.shape[d] for d in contracted), _complex(out))


def _conv(eqn: Eqn) -> int:
    left, right = (v.aval for v in eqn.invars)
    out, params = eqn.outvars[0].aval, eqn.params
    numbers = params["dimension_numbers"]
    axes = zip(
        *[
            [x.shape[d] for d in spec[2:]]
            for x, spec in zip(
                (out, right, left),
                (numbers.out_spec, numbers.rhs_spec, numbers.lhs_spec),
                strict=True,
            )
        ],
        params["window_strides"],
        [low for low, _ in params["padding"]],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    batch, channels = (out.shape[d] for d in numbers.out_spec[:2])
    ins = right.shape[numbers.rhs_spec[1]]
    return costs.convolution(
        [costs.meetings(*axis) for axis in axes], batch, ins, channels, _complex(out)
    )


def _reduction(eqn: Eqn) -> int:
    x, out, name = eqn.invars[0].aval, eqn.outvars[0].aval, eqn.primitive.name
    results = x.size // x.shape[eqn.params["axis"]] if name.startswith("cum") else out.size
    return max(x.size - results, 0) * costs.weight(_REDUCTIONS[name], _complex(x))


def _window(eqn: Eqn) -> int:
    out = eqn.outvars[0].aval
    return out.size * (math.prod(eqn.params["window_dimensions"]) - 1)


def _scattered(eqn: Eqn) -> int:
    updates = eqn.invars[-1].aval
    kind = "mul" if eqn.primitive.name == "scatter_mul" else "add"
    return updates.size * costs.weight(kind, _complex(updates))


def _power(eqn: Eqn) -> int:
    out = eqn.outvars[0].aval
    return out.size * costs.whole_power(eqn.params["y"], _complex(out))


def _one_minus_square(eqn: Eqn) -> int:
    out = eqn.outvars[0].aval
    return out.size * (costs.weight("mul", _complex(out)) + costs.weight("sub", _complex(out)))


def _fft(eqn: Eqn) -> int:
    lengths = eqn.params["fft_lengths"]
    elements = max(eqn.invars[0].aval.size, eqn.outvars[0].aval.size)
    real = any(not _complex(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    return costs.fourier_flops(elements, math.prod(lengths), real)


_RULES: dict[str, Callable[[Eqn], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    "select_and_scatter_add": lambda eqn: eqn.invars[0].aval.size,
    **dict.fromkeys(("scatter-add", "scatter_add", "scatter_mul", "scatter-mul"), _scattered),
    "integer_pow": _power,
    "clamp": lambda eqn: 2 * eqn.outvars[0].aval.size,
    "one_minus_square": _one_minus_square,
    "fft": _fft,
    "cholesky": lambda eqn: costs.cholesky(eqn.invars[0].aval.shape),
    "lu": lambda eqn: costs.lu(eqn.invars[0].aval.shape),
    "triangular_solve": lambda eqn: costs.triangular_solve(
        eqn.invars[0].aval.shape, eqn.outvars[0].aval.size
    ),
}
