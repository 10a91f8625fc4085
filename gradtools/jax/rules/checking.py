"""Checks whether a linear map of a rule can be transposed to derive the missing map.

JAX transposes a linear map exactly or raises an error, with two exceptions: JAX silently drops a
constant part (L(0) is not zero), and a path through a stopped gradient, an integer or a comparison.
If gradtools derives a missing map, this module checks for both exceptions, once per signature.
`testing.check_rule` checks all other requirements of a rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.errors import GradtoolsError, warn
from gradtools.jax import jaxprs, reachability
from gradtools.jax._upstream import bind_again
from gradtools.jax.known_errors import READS_A_VALUE
from gradtools.jax.rules.primitives import memoized
from gradtools.jax.trees import all_known, is_inexact, zeros_of
from gradtools.rule_contract import is_linear
from gradtools.rules import Rule, replaced_where


def loss_of(
    rule: Rule, which: str, signature: Any, linear: Callable[..., list[Any]], likes: Sequence[Any]
) -> str:
    """Describes a term that the transposition of a user's map would drop, or returns "".

    which: The name of the map, "tangent" or "cotangent". The map is linear in vectors with the
        avals `likes`.
    """
    if rule.contract is None:
        return ""
    who = "the forward rule" if which == "tangent" else "bwd"

    def look() -> tuple[str]:
        zeros = [*map(zeros_of, likes)]
        try:
            closed = jax.make_jaxpr(linear)(*zeros)
        except READS_A_VALUE:  # outside of `make_jaxpr` zeros have values
            ys = linear(*zeros)
        else:
            matrices = [reachability.reached_matrix(closed, raw=raw) for raw in (True, False)]
            for raw, reached in zip(*matrices, strict=True):
                lost = [f and not r for f, r in zip(raw, reached, strict=True)]
                if any(lost):
                    return (
                        f"transposing {who} drops {which} {lost.index(True)}, which passes through "
                        "an operation without a derivative (a stopped gradient, an integer, a "
                        "comparison). Make the map linear, or give the other mode's rule.",
                    )
            ys = _at_zero(closed, likes)
        for i, y in enumerate(ys):
            known = y is not None and not isinstance(y, jax.core.Tracer)
            if known and np.any(np.nan_to_num(np.asarray(y))):
                return (
                    f"{who} is not zero where every {which} is zero (result {i}), so it is not "
                    f"linear, and transposing it drops the constant part. Did you forget to "
                    f"multiply by the {which}?",
                )
        return ("",)

    return memoized(rule.contract, ("loss", which, signature), look)[0]


def refuse_loss(rule: Rule, loss: str) -> None:
    """Raises an error if `loss_of` returned a description of a dropped term."""
    if loss:
        assert rule.contract is not None
        raise GradtoolsError(f"{rule.contract.name}: {loss}")


def _at_zero(closed: Any, likes: Sequence[Any]) -> list[Any]:
    """Evaluates a map at zero. Returns an empty list if the map cannot be evaluated."""
    known = all_known(closed.consts)
    names = "gradtools_kernel", *(() if known else ("while",))  # a while loop may not terminate
    used = [e.primitive.name for e in jaxprs.equations(closed, within_rules=True)]
    known_sizes = all(isinstance(n, int) for x in (*closed.consts, *likes) for n in x.shape)
    if closed.effects or not known_sizes or any(n in names or "callback" in n for n in used):
        return []

    def step(_: int, eqn: Any, xs: list[Any]) -> Sequence[Any]:
        """Evaluates an equation outside of the mesh in which it was traced."""
        if eqn.primitive.name in ("pvary", "pcast"):  # `shard_map` inserts these identities
            return xs
        out = bind_again(eqn, xs)
        return out if eqn.primitive.multiple_results else [out]

    number = lambda literal: np.asarray(literal.val)
    with _on_numbers():
        consts = [wave(c, 0.5, 1.0) if isinstance(c, jax.core.Tracer) else c for c in closed.consts]
        zeros = [jnp.zeros(x.shape, x.dtype) for x in likes]
        try:
            return jaxprs.interpreted(closed.jaxpr, [*consts, *zeros], step, number)
        except (NameError, ValueError):  # the program refers to a mesh axis by name
            return []


@contextmanager
def _on_numbers() -> Iterator[None]:
    """Context manager in which operations are evaluated immediately, also inside of `shard_map`."""
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(no_mesh):
        yield


_LINEAR: weakref.WeakSet[Any] = weakref.WeakSet()


def check_linear(rule: Rule, xs: Sequence[Any], moving: Sequence[bool]) -> None:
    """Raises an error if the function of a rule is not linear in the `moving` inputs.

    The function may be a host kernel without a jaxpr, so linearity is tested numerically, at the
    current values or, in a trace, at example values. Each rule is checked once.
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

    try:
        with _on_numbers():
            plain = [wave(x, 0.5, 1.0) if made_up else x for x in xs]
            linear_in = [x for x, m in zip(xs, moving, strict=True) if m]
            v, w = ([wave(x, shift, 0.0) for x in linear_in] for shift in (1.0, 2.0))
            same = is_linear(run, v, w, gap, lambda x: float(jnp.finfo(x.dtype).eps) ** 0.5)
    except Exception as error:
        if not made_up:
            raise
        warn(
            f"{rule.name} is transposed, but its linearity could not be checked: evaluation at "
            f"example values raises {type(error).__name__}: {error}"
        )
        same = True
    if not same:
        raise ValueError(
            f"{rule.name} is not linear in the inputs with respect to which it is transposed"
        )
    _LINEAR.add(rule.origin)


def wave(x: Any, shift: float, around: float) -> Any:
    """Returns an example array with the shape of x.

    All entries are multiples of 1/16, so that sums of a few entries are exact.
    """
    if not is_inexact(x):
        return jnp.zeros(x.shape, x.dtype)
    steps = np.round(8 * np.sin(np.arange(1, x.size + 1) * shift)) / 16
    return jnp.asarray((around + steps).reshape(x.shape), x.dtype)
