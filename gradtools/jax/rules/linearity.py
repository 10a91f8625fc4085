"""Checks that a map is zero at zero: by abstract interpretation of its jaxpr, else numerically.

The abstract domain is {zero, anything}: a transfer rule for each primitive propagates zeros, and
loops run to a fixpoint. Outputs that are not proved zero are evaluated, at the concrete arrays or
at made-up numbers for tracers; only a nonzero number refutes a map. An output that can be neither
proved nor evaluated is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.jax import jaxprs, reachability
from gradtools.jax._upstream import Literal
from gradtools.jax.trees import is_inexact

Mask = Sequence[bool]

_ZERO_IF_ALL = (
    *("neg", "sign", "floor", "ceil", "round", "sqrt", "cbrt", "abs", "sin", "tan", "asin"),
    *("atan", "sinh", "tanh", "asinh", "atanh", "erf", "expm1", "log1p", "square", "real"),
    *("imag", "conj", "complex", "convert_element_type", "reduce_precision", "copy", "copy_p"),
    *("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "rev", "slice"),
    *("split", "concatenate", "pad", "tile", "reduce_sum", "reduce_max", "reduce_min"),
    *("cumsum", "cummax", "cummin", "add", "sub", "add_any", "max", "min", "psum", "psum2"),
    *("psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_to_all"),
    *("reduce_scatter", "pvary", "pbroadcast", "stop_gradient", "device_put"),
    *("sharding_constraint", "mesh_cast", "reshard", "optimization_barrier", "fft", "sort"),
    *("top_k", "reduce_window_sum", "select_and_scatter_add", "integer_pow", "or"),
    *("bitcast_convert_type"),
)
_ZERO_IF_ANY = frozenset(["mul", "dot_general", "conv_general_dilated", "and", "ragged_dot"])
_ZERO_IF_THESE: dict[str, Callable[[int], Sequence[int]]] = {
    "div": lambda n: [0],
    "rem": lambda n: [0],
    "atan2": lambda n: [0],
    "gather": lambda n: [0],
    "dynamic_slice": lambda n: [0],
    "dynamic_update_slice": lambda n: [0, 1],
    "select_n": lambda n: range(1, n),
    "triangular_solve": lambda n: [1],
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), lambda n: [0, 2]),
}
"""The operands of a primitive that must be zero for its result to be zero."""


def proved_zero(closed: Any, zero: Mask) -> list[bool]:
    """Which outputs of a jaxpr are zero if the inputs marked `zero` are, for any other inputs."""
    jaxpr = jaxprs.open_jaxpr(closed)
    return _outputs(jaxpr, zero, [_is_zero(c) for c in getattr(closed, "consts", ())])


def _outputs(jaxpr: Any, zero: Mask, consts: Mask = ()) -> list[bool]:
    env = dict(zip(jaxpr.invars, zero, strict=True))
    env.update(zip(jaxpr.constvars, consts, strict=False))

    def read(atom: Any) -> bool:
        return _is_zero(atom.val) if isinstance(atom, Literal) else env.get(atom, False)

    for eqn in jaxpr.eqns:
        if len(jaxprs.targets(eqn)) == len(eqn.outvars):  # it mutates no references
            env.update(zip(eqn.outvars, _step(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _is_zero(value: Any) -> bool:
    """Whether a constant is zero; False for a tracer."""
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return False
    return jnp.issubdtype(value.dtype, np.number) and not np.any(np.asarray(value))


def _step(eqn: Any, zero: list[bool]) -> list[bool]:
    name, outs = eqn.primitive.name, len(eqn.outvars)
    if name in ("gradtools_tangent", "gradtools_cotangent"):
        moved = zero[len(zero) - sum(eqn.params["given"]) :]
        return [all(moved)] * outs
    if name == "gradtools_value":
        return zero[eqn.params["xs"] :][:outs]
    program = _program(eqn)
    if program is not None:
        return proved_zero(program, zero)
    inner = jaxprs.bodies(eqn)
    if inner:
        return _through(inner, zero, outs)
    if name == "custom_linear_solve":
        return [all(zero[len(zero) - outs :])] * outs
    if name in _ZERO_IF_ANY:
        return [any(zero)] * outs
    if name in _ZERO_IF_ALL:
        return [all(zero)] * outs
    read = _ZERO_IF_THESE.get(name)
    return [read is not None and all(zero[i] for i in read(len(zero)))] * outs


def _through(inner: Sequence[Any], zero: list[bool], outs: int) -> list[bool]:
    result = [True] * outs
    for body in inner:
        if body.gate:
            continue
        entering = [zero[i] for i in body.inputs]
        while True:  # to a fixpoint: a carry is zero if it starts and ends each step as zero
            leaving = _outputs(body.jaxpr, entering)
            wrong = [i for k, i in body.carries if entering[i] and not leaving[k]]
            if not wrong:
                break
            for i in wrong:
                entering[i] = False
        carried = {k: entering[i] for k, i in body.carries}
        both = enumerate(zip(result, leaving, strict=True))
        result = [f and y and carried.get(k, True) for k, (f, y) in both]
    return result


# --- numerically -------------------------------------------------------------------------


def first_nonzero(
    closed: Any, zero: Mask, values: Sequence[Any], kernels: bool = True
) -> tuple[int | None, bool]:
    """The first output that is not zero if these inputs are (or None), and whether it is decided.

    Args:
        closed: The jaxpr.
        zero: The inputs that are set to zero.
        values: The inputs; tracers among them are replaced by made-up numbers.
        kernels: Whether host functions may run. They run at concrete arrays only.
    """
    proved = proved_zero(closed, zero)
    if all(proved):
        return None, True
    each = zip(zero, values, closed.in_avals, strict=True)
    if not kernels and _runs_kernel(closed):
        return None, False
    outs = computed(closed, [np.zeros(a.shape, a.dtype) if z else x for z, x, a in each])
    if outs is None:
        return None, not _runs_kernel(closed)
    pairs = zip(outs, proved, strict=True)
    return nonzero_at([np.zeros(()) if p else y for y, p in pairs]), True


def nonzero_at(ys: Sequence[Any]) -> int | None:
    """The index of the first array with a nonzero number; NaN and tracers do not count."""
    for i, y in enumerate(ys):
        if not isinstance(y, jax.core.Tracer):
            y = np.asarray(y)
            if np.any((y != 0) & (y == y)):
                return i
    return None


def computed(closed: Any, values: Sequence[Any]) -> list[np.ndarray] | None:
    """The outputs of a jaxpr, with made-up numbers for tracers; None if it cannot run."""
    made_up = any(isinstance(x, jax.core.Tracer) for x in (*closed.consts, *values))
    if jaxprs.uses_primitive(closed, _calls_back) or (made_up and _runs_kernel(closed)):
        return None  # a host function must not run at made-up numbers
    try:
        with jax.ensure_compile_time_eval():
            consts, xs = (
                [_made_up_if_traced(x) for x in group] for group in (closed.consts, values)
            )
            return [np.asarray(y) for y in jax.core.eval_jaxpr(closed.jaxpr, consts, *xs)]
    except jax.errors.JaxRuntimeError:  # for example out of memory
        raise
    except Exception:  # unbound axis names, values outside of a domain: undecided
        return None


def _calls_back(eqn: Any) -> bool:
    program = _program(eqn)
    return "callback" in eqn.primitive.name or (
        program is not None and jaxprs.uses_primitive(program, _calls_back)
    )


def _runs_kernel(closed: Any, *others: str) -> bool:
    """Whether a jaxpr calls a host function, or a primitive with one of these names."""

    def runs(eqn: Any) -> bool:
        program = _program(eqn)
        return eqn.primitive.name in ("gradtools_kernel", *others) or (
            program is not None and jaxprs.uses_primitive(program, runs)
        )

    return jaxprs.uses_primitive(closed, runs)


def can_be_tried(closed: Any, known: bool) -> bool:
    """Whether a jaxpr may be run for a check: it has no effects, no host functions, and ends.

    Args:
        closed: The jaxpr.
        known: Whether it runs at the user's own arrays; at made-up ones a `while` may not end.
    """
    return not closed.effects and not _runs_kernel(closed, *(() if known else ("while",)))


def _program(eqn: Any) -> Any:
    return getattr(eqn.primitive, "gradtools_program", lambda _: None)(eqn)


def _made_up_if_traced(x: Any) -> Any:
    return wave(x, 0.5, 1.0) if isinstance(x, jax.core.Tracer) else x


def wave(x: Any, shift: float, around: float) -> Any:
    """Made-up numbers shaped like x: multiples of 1/16, so that small sums of them are exact."""
    if not is_inexact(x):
        return jnp.zeros(x.shape, x.dtype)
    steps = np.round(8 * np.sin(np.arange(1, x.size + 1) * shift)) / 16
    return jnp.asarray((around + steps).reshape(x.shape), x.dtype)


# --- transposing twice -------------------------------------------------------------------


def lost_input(closed: Any, moved: Mask) -> int | None:
    """The first of these inputs from which the transpose would lose a path, or None.

    JAX either transposes exactly or raises, except for a path through an integer, which it
    silently treats as zero.
    """
    pairs = zip(reachability.raw_matrix(closed), reachability.reached_matrix(closed), strict=True)
    rows = [[r and not k for r, k in zip(*pair, strict=True)] for pair in pairs]
    lost = [any(column) for column in zip(*rows, strict=True)]
    at = [i for i, m in enumerate(moved) if m]
    return next((k for k, i in enumerate(at) if lost and lost[i]), None)
