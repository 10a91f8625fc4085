"""Whether an author's maps are what `gradtools.rule_contract` says: read from jaxprs.

What a jaxpr does not tell, numbers do: those at hand, or while a program is traced made-up ones.
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
from gradtools.linearity import is_linear
from gradtools.rules import JvpRule, Linearized, Rule, saved_from, spread

if TYPE_CHECKING:
    from gradtools.rule_contract import Contract


def avals_of(xs: Sequence[Any]) -> Any:
    """Shapes and dtypes, by which what was asked of a rule is remembered."""
    return tuple([(aval.shape, str(aval.dtype)) for aval in map(jax.typeof, xs)])


def moving_of(rule: Rule, likes: Sequence[Any], given: Mask | None) -> list[bool]:
    """Which inputs are differentiated."""
    return [
        like is not None and i not in rule.nondifferentiable and (given is None or given[i])
        for i, like in enumerate(likes)
    ]


def under_the_trace(fun: Callable[..., list[Any]], xs: Sequence[Any]) -> list[Any]:
    """`fun(*xs)` of numbers, outside of the linearization that is under way.

    Of each jitted function that is called within a trace JAX keeps an entry for that trace, when
    it is long over. To a `custom_jvp` it hands what it knows under the trace, where nothing is
    differentiated with respect to xs.
    """
    if isinstance(jax.lax.neg(0.0), jax.core.Tracer):  # a program is being traced
        return fun(*xs)
    under = jax.custom_jvp(fun)
    under.defjvp(_of_numbers)
    return list(under(*xs))


def _of_numbers(xs: Any, dxs: Any) -> Any:
    raise AssertionError("numbers have no tangents")


def hold_maps(rule: Rule, xs: Sequence[Any], given: Mask | None) -> bool:
    """Holds the maps that its author wrote to being zero at zero; see `contract`.

    Returns False where a cotangent map with kernels is to be held after the forward pass.
    """
    contract = rule.contract
    if contract is None:
        return True
    if isinstance(rule, JvpRule):
        avals = (avals_of(xs), given)
        contract.ask("tangent", avals, of=lambda: _hold_tangent(contract, rule, xs, given))
    if rule.linearize is not None and rule.fills("cotangent"):
        return contract.ask(
            "cotangent", avals_of(xs), of=lambda: _hold_cotangent(contract, rule, xs)
        )
    return True


def hold_evaluated(rule: Rule, xs: Sequence[Any], maps: Linearized, out: Sequence[Any]) -> None:
    """The same of a cotangent map with kernels, after the forward pass, which runs once."""
    contract, cotangent = rule.contract, maps.cotangent
    assert contract is not None and cotangent is not None
    saved = saved_from(maps.saves, xs, out)
    zeros = [*map(zeros_of, without_none(likes_of(out[: len(out) - len(maps.extras)])))]

    def check() -> bool:
        pulled = under_the_trace(lambda *saved: cotangent(saved, zeros), saved)
        if not all_known(pulled):  # mapped over, though the arguments are not
            return False
        wrong = linearity.nonzero_at([np.zeros(()) if x is None else x for x in pulled])
        contract.hold_zero("cotangent", wrong)
        return True

    contract.ask("cotangent", avals_of(xs), of=check)


def _hold_tangent(contract: Contract, rule: JvpRule, xs: Sequence[Any], given: Mask | None) -> bool:
    """Returns False where it cannot be told yet, for a kernel has no numbers."""
    full_like, places = likes_of(xs), list[int]()

    def push(xs: Any, dxs: Any) -> list[Any]:
        full = spread(dxs, moving)
        dys = rule.jvp(xs, filled(full, full_like) if rule.fills("tangent") else full)[1]
        places[:] = [i for i, dy in enumerate(dys) if dy is not None]
        return without_none(dys)

    moving = moving_of(rule, full_like, given)
    likes = [like for like, m in zip(full_like, moving, strict=True) if m]
    try:
        closed = jax.make_jaxpr(push)([jax.typeof(x) for x in xs], likes)
    except READS_A_VALUE:
        known = all_known(xs)
        wrong = linearity.nonzero_at(push(xs, [*map(zeros_of, likes)])) if known else None
        contract.hold_zero("tangent", wrong, places)
        return True
    mask = [False] * len(xs) + [True] * len(likes)
    wrong, told = linearity.first_nonzero(closed, mask, [*xs, *likes])
    contract.hold_zero("tangent", wrong, places)
    lost = linearity.lost_input(closed, mask)
    if lost is not None:
        contract.losing[avals_of(xs)] = [i for i, m in enumerate(moving) if m][lost]
    return told


def _hold_cotangent(contract: Contract, rule: Rule, xs: Sequence[Any]) -> bool:
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
        wrong, told = linearity.first_nonzero(closed, [False] * len(xs), xs, kernels=False)
    except READS_A_VALUE:
        wrong, told = linearity.nonzero_at(pull(*xs)) if all_known(xs) else None, True
    contract.hold_zero("cotangent", wrong, places)
    return told


def hold_transposed(rule: Rule, avals: Any, pull: Any, likes: Sequence[Any]) -> None:
    """Whether bwd keeps all of its cotangents when it is transposed."""
    contract = rule.contract
    if contract is None:
        return

    def transposed() -> None:
        closed = jax.make_jaxpr(pull)(*map(zeros_of, likes))
        lost = linearity.lost_input(closed, [True] * len(likes))
        if lost is not None:
            raise contract.lost("cotangent", lost)

    contract.ask("transposed", avals, of=transposed)


def hold_symbolic(contract: Contract, at: Sequence[Any], n: int, params: Any) -> None:
    """Holds bwd to being zero at zero where it is told which cotangents are there."""

    def check() -> bool:
        closed = jax.make_jaxpr(partial(eval_cotangent, **params))(*map(jax.typeof, at))
        zero = [i >= n for i in range(len(at))]
        wrong, told = linearity.first_nonzero(closed, zero, at)
        places = [i for i, w in enumerate(params["wanted"]) if w]
        contract.hold_zero("cotangent", wrong, places)
        return told

    contract.ask("cotangent", avals_of(at), params["given"], params["wanted"], of=check)


def would_lose(rule: Rule, xs: Sequence[Any], push: Any, likes: Sequence[Any]) -> bool:
    """Whether a forward rule's map may not be transposed twice.

    An unchecked one is looked at here: in its own mode it stays as its author wrote it.
    """
    contract = rule.contract
    if contract is None:
        return False
    if contract.check != "never":
        return avals_of(xs) in contract.losing
    try:
        closed = jax.make_jaxpr(push)(*map(zeros_of, likes))
    except READS_A_VALUE:
        return True
    zero = [True] * len(likes)
    lost = linearity.lost_input(closed, zero)
    return lost is not None or not all(linearity.proved_zero(closed, zero))


_LINEAR: weakref.WeakSet[Any] = weakref.WeakSet()


def check_linear(rule: Rule, xs: Sequence[Any], moving: Mask) -> None:
    """Whether the rule's value is linear in some inputs, once for each rule.

    A rule's value may be a kernel that nobody can transpose, so only numbers can tell. They are
    those at hand, or while a program is traced made-up ones.
    """
    if rule.origin in _LINEAR:
        return
    made_up = any(isinstance(x, jax.core.Tracer) for x in xs)
    try:
        with jax.ensure_compile_time_eval():
            same = _goes_through(rule, xs, moving, made_up)
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


def _goes_through(rule: Rule, xs: Sequence[Any], moving: Mask, made_up: bool) -> bool:
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
