"""Checks from jaxprs that a user's maps satisfy `gradtools.rule_contract`.

A map must be zero at zero. This is proved by abstract interpretation of its jaxpr, in the domain
{zero, anything}: a transfer rule for each primitive propagates zeros, and loops run to a fixpoint.
Outputs that are not proved zero are evaluated, at the current arrays or in a trace at made-up ones;
only a nonzero number refutes a map. An output that can be neither proved nor evaluated is trusted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.errors import warn
from gradtools.jax import jaxprs, reachability
from gradtools.jax.rules.primitives import READS_A_VALUE, LinearizedRule, Mask, as_arrays
from gradtools.jax.trees import all_known, filled, is_inexact, likes_of, without_none, zeros_of
from gradtools.rule_contract import Contract, is_linear
from gradtools.rules import JvpRule, Rule, replaced_where, spread


def avals_of(xs: Sequence[Any]) -> Any:
    """Shapes and dtypes, the key of a rule's checks."""
    return tuple([(aval.shape, str(aval.dtype)) for aval in map(jax.typeof, xs)])


def differentiated_inputs(rule: Rule, likes: Sequence[Any], perturbed: Mask | None) -> list[bool]:
    """Which inputs are differentiated."""
    return [
        like is not None and i not in rule.nondifferentiable and (perturbed is None or perturbed[i])
        for i, like in enumerate(likes)
    ]


def check_forward_rule(rule: Rule, xs: Sequence[Any], perturbed: Mask | None) -> None:
    """Checks that a forward rule is zero at zero, and notes the tangents that transposing loses."""
    contract = rule.contract
    if contract is None or not isinstance(rule, JvpRule):
        return
    jvp, likes, avals = rule.jvp, likes_of(xs), avals_of(xs)
    moving = differentiated_inputs(rule, likes, perturbed)

    def push(*operands: Any) -> list[Any]:
        dxs = spread(operands[len(xs) :], moving)
        full = filled(dxs, likes) if rule.fills("tangent") else dxs
        return jvp(operands[: len(xs)], full)[1]

    def check() -> bool:
        steps = [like for like, m in zip(likes, moving, strict=True) if m]
        closed, decided = _check_zero(contract, "tangent", push, xs, steps)
        lost = None if closed is None else lost_input(closed, len(xs))
        if lost is not None:
            contract.lost_tangents[avals] = [i for i, m in enumerate(moving) if m][lost]
        return decided

    contract.check_once("tangent", (avals, perturbed), check=check)


def _check_zero(
    contract: Contract,
    which: str,
    run: Callable[..., list[Any]],
    xs: Sequence[Any],
    likes: Sequence[Any],
) -> tuple[Any, bool]:
    """Raises if `run(*xs, *zeros)`, a user's map, has a result that is neither zero nor None.

    Tracers among xs are replaced by made-up numbers; `likes` are the avals of the zeros. Host
    functions run at concrete arrays only. Returns the map's jaxpr (None if it reads values of
    arrays), and whether the check is decided.
    """
    places = list[int]()

    def present(*operands: Any) -> list[Any]:
        results = run(*operands)
        places[:] = [i for i, y in enumerate(results) if y is not None]
        return without_none(results)

    wrong, decided = None, True
    try:
        closed = jax.make_jaxpr(present)(*map(jax.typeof, xs), *likes)
    except READS_A_VALUE:
        closed = None
        if all_known(xs):
            wrong = nonzero_at(present(*xs, *map(zeros_of, likes)))
    else:
        proved = proved_zero(closed, [False] * len(xs) + [True] * len(likes))
        if not all(proved):
            kernels = _contains(closed, "gradtools_kernel")
            zeros = [np.zeros(a.shape, a.dtype) for a in likes]
            outs = computed(closed, [*xs, *zeros], users_errors=kernels)
            if outs is None:
                decided = not kernels
            else:
                wrong = nonzero_at([0.0 if p else y for p, y in zip(proved, outs, strict=True)])
    contract.check_zero(which, wrong, places)
    return closed, decided


def check_bwd(rule: Rule, saved: Sequence[Any], cts: Sequence[Any], given: Mask) -> None:
    """Checks that a bwd is zero at zero, in the cotangents that are given."""
    contract, pull, n = rule.contract, rule.cotangent, len(saved)
    if contract is None or pull is None or "bwd" not in contract.functions:
        return
    run = lambda *at: pull(at[:n], spread(at[n:], given))
    likes = [jax.typeof(ct) for ct in cts]
    check = lambda: _check_zero(contract, "cotangent", run, as_arrays(saved), likes)[1]
    perturbed = rule.perturbed if isinstance(rule, LinearizedRule) else None
    contract.check_once("cotangent", avals_of([*saved, *cts]), given, perturbed, check=check)


def check_transposed(rule: Rule, of: Any, pull: Any, likes: Sequence[Any]) -> None:
    """Checks that a bwd is zero at zero, and that its transpose loses none of its cotangents.

    of: The avals of the inputs, and which of them are differentiated if the rule depends on it.
    """
    contract = rule.contract
    if contract is None:
        return

    def check() -> bool:
        closed, decided = _check_zero(contract, "cotangent", pull, (), likes)
        lost = None if closed is None else lost_input(closed)
        if lost is not None:
            raise contract.not_transposable("cotangent", lost)
        return decided

    contract.check_once("transposed", of, check=check)


def loses_tangents(rule: Rule, xs: Sequence[Any], push: Any, likes: Sequence[Any]) -> bool:
    """Whether transposing a forward rule's map would lose a tangent or a constant part.

    A map with check="never" is examined here: its own mode evaluates it unchanged.
    """
    contract = rule.contract
    if contract is None:
        return False
    if contract.check != "never":
        return avals_of(xs) in contract.lost_tangents
    try:
        closed = jax.make_jaxpr(push)(*map(zeros_of, likes))
    except READS_A_VALUE:
        return True
    return lost_input(closed) is not None or not all(proved_zero(closed, [True] * len(likes)))


_LINEAR: weakref.WeakSet[Any] = weakref.WeakSet()


def check_linear(rule: Rule, xs: Sequence[Any], moving: Sequence[bool]) -> None:
    """Raises if the rule's value is not linear in some inputs; once for each rule.

    A rule's value may be a kernel without a jaxpr, so linearity is tested numerically: at the
    current values, or in a trace at made-up ones.
    """
    if rule.origin in _LINEAR:
        return
    made_up = not all_known(xs)

    def run(vs: Sequence[Any]) -> list[Any]:
        ys = rule.primal(*replaced_where(plain, moving, vs))
        return [y for y in ys if is_inexact(y)]

    def gap(a: Any, b: Any) -> float:
        alike = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
        return float(jnp.max(jnp.where(alike, 0.0, jnp.abs(a - b)), initial=0.0))

    def slack(x: Any) -> float:
        return float(jnp.finfo(x.dtype).eps) ** 0.5

    try:
        with jax.ensure_compile_time_eval():
            plain = [wave(x, 0.5, 1.0) if made_up else x for x in xs]
            linear_in = [x for x, m in zip(xs, moving, strict=True) if m]
            v, w = ([wave(x, shift, 0.0) for x in linear_in] for shift in (1.0, 2.0))
            same = is_linear(run, v, w, gap, slack)
    except Exception as error:
        if not made_up:
            raise
        warn(
            f"{rule.name} is transposed, and whether it is linear could not be checked, for at "
            f"made-up values it raises {type(error).__name__}: {error}"
        )
        same = True
    if not same:
        raise ValueError(f"{rule.name} is not linear in what it is to be transposed in")
    _LINEAR.add(rule.origin)


# --- what a jaxpr proves ------------------------------------------------------------------

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


def proved_zero(closed: Any, zero: Sequence[bool]) -> list[bool]:
    """Which outputs of a jaxpr are zero if the inputs marked `zero` are, for any other inputs."""
    jaxpr, consts = jaxprs.open_jaxpr(closed), [*map(_is_zero, getattr(closed, "consts", ()))]
    unknown = [False] * (len(jaxpr.constvars) - len(consts))
    literal = lambda atom: _is_zero(atom.val)
    return jaxprs.interpreted(jaxpr, [*consts, *unknown, *zero], _step, literal)


def _is_zero(value: Any) -> bool:
    """Whether a constant is zero; False for a tracer."""
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return False
    return jnp.issubdtype(value.dtype, np.number) and not np.any(np.asarray(value))


def _step(_: int, eqn: Any, zero: list[bool]) -> list[bool]:
    """Which results of an equation are zero if these operands are."""
    name, outs = eqn.primitive.name, len(eqn.outvars)
    if len(jaxprs.targets(eqn)) > outs:  # it mutates references
        return [False] * outs
    if name in ("gradtools_tangent", "gradtools_cotangent"):
        moved = zero[len(zero) - sum(eqn.params["given"]) :]
        return [all(moved)] * outs
    if name == "gradtools_value":
        return zero[eqn.params["xs"] :][:outs]
    program = getattr(eqn.primitive, "gradtools_program", None)
    if program is not None:
        return proved_zero(program(eqn), zero)
    result = None
    for body in jaxprs.bodies(eqn):
        result = result or [True] * outs
        if body.gate:
            continue
        entering = [zero[i] for i in body.inputs]
        while True:  # to a fixpoint: a carry is zero if it starts and ends each step as zero
            leaving = proved_zero(body.jaxpr, entering)
            wrong = [i for k, i in body.carries if entering[i] and not leaving[k]]
            if not wrong:
                break
            for i in wrong:
                entering[i] = False
        carried = {k: entering[i] for k, i in body.carries}
        both = enumerate(zip(result, leaving, strict=True))
        result = [f and y and carried.get(k, True) for k, (f, y) in both]
    if result is not None:
        return result
    if name == "custom_linear_solve":
        return [all(zero[len(zero) - outs :])] * outs
    if name in _ZERO_IF_ANY:
        return [any(zero)] * outs
    if name in _ZERO_IF_ALL:
        return [all(zero)] * outs
    read = _ZERO_IF_THESE.get(name)
    return [read is not None and all(zero[i] for i in read(len(zero)))] * outs


# --- numerically -------------------------------------------------------------------------


def nonzero_at(ys: Sequence[Any]) -> int | None:
    """The index of the first array with a nonzero number; NaN and tracers do not count."""
    for i, y in enumerate(ys):
        if not isinstance(y, jax.core.Tracer):
            y = np.asarray(y)
            if np.any((y != 0) & (y == y)):
                return i
    return None


def computed(
    closed: Any, values: Sequence[Any], users_errors: bool = False
) -> list[np.ndarray] | None:
    """The outputs of a jaxpr, with made-up numbers for tracers; None if it cannot run.

    users_errors: Whether exceptions are raised: at the user's arrays a host function's are its own.
    """
    made_up = not all_known((*closed.consts, *values))
    # A host function must not run at made-up numbers.
    if _contains(closed, "callback", *(("gradtools_kernel",) if made_up else ())):
        return None
    plain = lambda x: wave(x, 0.5, 1.0) if isinstance(x, jax.core.Tracer) else x
    try:
        with jax.ensure_compile_time_eval():
            consts, xs = map(plain, closed.consts), map(plain, values)
            return [np.asarray(y) for y in jax.core.eval_jaxpr(closed.jaxpr, [*consts], *xs)]
    except jax.errors.JaxRuntimeError:  # for example out of memory
        raise
    except Exception:  # unbound axis names, values outside of a domain: undecided
        if users_errors and not made_up:
            raise
        return None


def _contains(closed: Any, *parts: str) -> bool:
    """Whether a primitive's name has one of these parts, at any depth and in gradtools' rules."""
    names = (eqn.primitive.name for eqn in jaxprs.equations(closed, within_rules=True))
    return any(part in name for name in names for part in parts)


def can_be_tried(closed: Any, known: bool) -> bool:
    """Whether a jaxpr may be run for a check: it has no effects, no host functions, and ends.

    Args:
        closed: The jaxpr.
        known: Whether it runs at the user's own arrays; at made-up ones a `while` may not end.
    """
    names = ("gradtools_kernel",) if known else ("gradtools_kernel", "while")
    return not closed.effects and not _contains(closed, *names)


def wave(x: Any, shift: float, around: float) -> Any:
    """Made-up numbers shaped like x: multiples of 1/16, so that small sums of them are exact."""
    if not is_inexact(x):
        return jnp.zeros(x.shape, x.dtype)
    steps = np.round(8 * np.sin(np.arange(1, x.size + 1) * shift)) / 16
    return jnp.asarray((around + steps).reshape(x.shape), x.dtype)


# --- transposing twice -------------------------------------------------------------------


def lost_input(closed: Any, first: int = 0) -> int | None:
    """The index of an input, from `first` on, from which the transpose would lose a path, or None.

    JAX either transposes exactly or raises, except for a path through an integer, which it
    silently treats as zero.
    """
    rows = [*zip(reachability.raw_matrix(closed), reachability.reached_matrix(closed), strict=True)]
    is_lost = lambda i: any(flows[i] and not reached[i] for flows, reached in rows)
    return next((i - first for i in range(first, len(closed.in_avals)) if is_lost(i)), None)
