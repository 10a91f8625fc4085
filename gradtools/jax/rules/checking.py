"""Checks from jaxprs that a user's maps satisfy `gradtools.rule_contract`.

What a jaxpr does not decide is evaluated: at the current values, or in a trace at made-up ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.errors import warn
from gradtools.jax.rules import linearity
from gradtools.jax.rules.primitives import READS_A_VALUE, Mask, eval_cotangent
from gradtools.jax.trees import all_known, filled, is_inexact, likes_of, without_none, zeros_of
from gradtools.rule_contract import is_linear
from gradtools.rules import JvpRule, Linearized, Rule, saved_from, spread

if TYPE_CHECKING:
    from gradtools.rule_contract import Contract


def avals_of(xs: Sequence[Any]) -> Any:
    """Shapes and dtypes, the key of a rule's checks."""
    return tuple([(aval.shape, str(aval.dtype)) for aval in map(jax.typeof, xs)])


def differentiated_inputs(rule: Rule, likes: Sequence[Any], perturbed: Mask | None) -> list[bool]:
    """Which inputs are differentiated."""
    return [
        like is not None and i not in rule.nondifferentiable and (perturbed is None or perturbed[i])
        for i, like in enumerate(likes)
    ]


def outside_of_trace(fun: Callable[..., list[Any]], xs: Sequence[Any]) -> list[Any]:
    """`fun(*xs)` at concrete xs, outside of the linearization that is running.

    For each jitted function called within a trace JAX caches an entry for that trace, which
    outlives it. A `custom_jvp` whose inputs have no tangents is evaluated outside of the trace.
    """
    if isinstance(jax.lax.neg(0.0), jax.core.Tracer):  # a program is being traced
        return fun(*xs)
    untraced = jax.custom_jvp(fun)
    untraced.defjvp(_no_tangents)
    return list(untraced(*xs))


def _no_tangents(xs: Any, dxs: Any) -> Any:
    raise AssertionError("concrete inputs have no tangents")


def check_maps(rule: Rule, xs: Sequence[Any], perturbed: Mask | None) -> bool:
    """Checks that the user's maps are zero at zero.

    Returns False if a cotangent map with kernels must be checked after the forward pass.
    """
    contract = rule.contract
    if contract is None:
        return True
    if isinstance(rule, JvpRule):
        avals = (avals_of(xs), perturbed)
        contract.check_once(
            "tangent", avals, check=lambda: _check_tangent_map(contract, rule, xs, perturbed)
        )
    if rule.linearize is not None and rule.fills("cotangent"):
        return contract.check_once(
            "cotangent", avals_of(xs), check=lambda: _check_cotangent_map(contract, rule, xs)
        )
    return True


def check_evaluated(rule: Rule, xs: Sequence[Any], maps: Linearized, out: Sequence[Any]) -> None:
    """`check_maps` of a cotangent map with kernels, at the residuals of the one forward pass."""
    contract, cotangent = rule.contract, maps.cotangent
    assert contract is not None and cotangent is not None
    saved = saved_from(maps.saves, xs, out)
    zeros = [*map(zeros_of, without_none(likes_of(out[: len(out) - len(maps.extras)])))]

    def check() -> bool:
        pulled = outside_of_trace(lambda *saved: cotangent(saved, zeros), saved)
        if not all_known(pulled):  # traced, though the arguments are not
            return False
        wrong = linearity.nonzero_at([np.zeros(()) if x is None else x for x in pulled])
        contract.check_zero("cotangent", wrong)
        return True

    contract.check_once("cotangent", avals_of(xs), check=check)


def _check_tangent_map(
    contract: Contract, rule: JvpRule, xs: Sequence[Any], perturbed: Mask | None
) -> bool:
    """Returns False if it is undecided because a kernel has no concrete inputs."""
    full_like, places = likes_of(xs), list[int]()

    def push(xs: Any, dxs: Any) -> list[Any]:
        full = spread(dxs, moving)
        dys = rule.jvp(xs, filled(full, full_like) if rule.fills("tangent") else full)[1]
        places[:] = [i for i, dy in enumerate(dys) if dy is not None]
        return without_none(dys)

    moving = differentiated_inputs(rule, full_like, perturbed)
    likes = [like for like, m in zip(full_like, moving, strict=True) if m]
    try:
        closed = jax.make_jaxpr(push)([jax.typeof(x) for x in xs], likes)
    except READS_A_VALUE:
        known = all_known(xs)
        wrong = linearity.nonzero_at(push(xs, [*map(zeros_of, likes)])) if known else None
        contract.check_zero("tangent", wrong, places)
        return True
    mask = [False] * len(xs) + [True] * len(likes)
    wrong, decided = linearity.first_nonzero(closed, mask, [*xs, *likes])
    contract.check_zero("tangent", wrong, places)
    lost = linearity.lost_input(closed, mask)
    if lost is not None:
        contract.lost_tangents[avals_of(xs)] = [i for i, m in enumerate(moving) if m][lost]
    return decided


def _check_cotangent_map(contract: Contract, rule: Rule, xs: Sequence[Any]) -> bool:
    places: list[int] = []

    def pull(*xs: Any) -> list[Any]:
        result = rule.at(*xs)
        assert result.cotangent is not None
        cts = [None if like is None else zeros_of(like) for like in likes_of(result.ys)]
        if not without_none(cts):
            return []
        pulled = result.cotangent(result.saved(xs), cts)
        places[:] = [i for i, ct in enumerate(pulled) if ct is not None]
        return without_none(pulled)

    try:
        closed = jax.make_jaxpr(pull)(*[jax.typeof(x) for x in xs])
        wrong, decided = linearity.first_nonzero(closed, [False] * len(xs), xs, kernels=False)
    except READS_A_VALUE:
        wrong, decided = linearity.nonzero_at(pull(*xs)) if all_known(xs) else None, True
    contract.check_zero("cotangent", wrong, places)
    return decided


def check_transposed(rule: Rule, avals: Any, pull: Any, likes: Sequence[Any]) -> None:
    """Raises if transposing bwd would lose one of its cotangents."""
    contract = rule.contract
    if contract is None:
        return

    def transposed() -> None:
        closed = jax.make_jaxpr(pull)(*map(zeros_of, likes))
        lost = linearity.lost_input(closed, [True] * len(likes))
        if lost is not None:
            raise contract.not_transposable("cotangent", lost)

    contract.check_once("transposed", avals, check=transposed)


def check_symbolic(contract: Contract, at: Sequence[Any], n: int, params: Any) -> None:
    """Checks that a bwd with symbolic zeros is zero at zero."""

    def check() -> bool:
        closed = jax.make_jaxpr(partial(eval_cotangent, **params))(*map(jax.typeof, at))
        zero = [i >= n for i in range(len(at))]
        wrong, decided = linearity.first_nonzero(closed, zero, at)
        places = [i for i, w in enumerate(params["wanted"]) if w]
        contract.check_zero("cotangent", wrong, places)
        return decided

    contract.check_once("cotangent", avals_of(at), params["given"], params["wanted"], check=check)


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
    zero = [True] * len(likes)
    lost = linearity.lost_input(closed, zero)
    return lost is not None or not all(linearity.proved_zero(closed, zero))


_LINEAR: weakref.WeakSet[Any] = weakref.WeakSet()


def check_linear(rule: Rule, xs: Sequence[Any], moving: Mask) -> None:
    """Raises if the rule's value is not linear in some inputs; once for each rule.

    A rule's value may be a kernel without a jaxpr, so linearity is tested numerically: at the
    current values, or in a trace at made-up ones.
    """
    if rule.origin in _LINEAR:
        return
    made_up = any(isinstance(x, jax.core.Tracer) for x in xs)
    try:
        with jax.ensure_compile_time_eval():
            same = _is_linear_at(rule, xs, moving, made_up)
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


def _is_linear_at(rule: Rule, xs: Sequence[Any], moving: Mask, made_up: bool) -> bool:
    plain = [linearity.wave(x, 0.5, 1.0) if made_up else x for x in xs]
    linear_in = [x for x, m in zip(xs, moving, strict=True) if m]
    v, w = ([linearity.wave(x, shift, 0.0) for x in linear_in] for shift in (1.0, 2.0))

    def run(vs: Sequence[Any]) -> list[Any]:
        new = iter(vs)
        changed = [next(new) if m else p for p, m in zip(plain, moving, strict=True)]
        return [y for y in rule.primal(*changed) if is_inexact(y)]

    return is_linear(run, v, w, _gap, _slack)


def _gap(a: Any, b: Any) -> float:
    alike = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    return float(jnp.max(jnp.where(alike, 0.0, jnp.abs(a - b)), initial=0.0))


def _slack(x: Any) -> float:
    return float(jnp.finfo(x.dtype).eps) ** 0.5
