"""A jaxpr with its backward passes as one program, whose equations say what they come from.

The jaxpr is evaluated equation by equation inside of `jax.vjp`, each in a named scope with its
number. JAX attaches the scope to all equations that it derives from this one, forward and backward,
so each gets the line, the modules and the mark of its origin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import jax

from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal, scopes_of
from gradtools.jax.trees import conj
from gradtools.rules import replaced_at
from gradtools.seeing.graphs.passes import BACKWARD

_STEP = "gradtools_step_"


def differentiated(
    closed: Any, leaves: int, wrt: Sequence[int], outs: Sequence[int], order: int = BACKWARD
) -> Callable[..., list[Any]]:
    """The program of all passes: takes leaves and cotangents, returns outputs and gradients.

    Args:
        closed: The closed jaxpr of the forward pass.
        leaves: The number of its inputs.
        wrt: The differentiated inputs.
        outs: The outputs with a cotangent.
        order: 1 with backward, 2 with backward of the backward.
    """

    def step(i: int, eqn: Any, xs: list[Any]) -> list[Any]:
        with jax.named_scope(f"{_STEP}{i}"):
            return _with_its_line(eqn, xs)

    def backward(given: Any, active: Any, cts: Any) -> tuple[list[Any], list[Any]]:
        """The gradients, and the outputs."""

        def fun(*moving: Any) -> Any:
            full = replaced_at(given, wrt, moving)
            results = jaxprs.interpreted(closed.jaxpr, [*closed.consts, *full], step)
            return [results[k] for k in outs], results

        _, pull, results = jax.vjp(fun, *active, has_aux=True)
        return [conj(g) for g in pull([conj(ct) for ct in cts])], results

    def run(*flat: Any) -> list[Any]:
        rest = iter(flat)
        given, cts = [*islice(rest, leaves)], [*islice(rest, len(outs))]
        active = [given[k] for k in wrt]
        if order == BACKWARD:
            grads, results = backward(given, active, cts)
            return [*results, *grads]
        pulled = lambda active, cts: backward(given, active, cts)
        grads, pull, results = jax.vjp(pulled, active, cts, has_aux=True)
        seconds, of_cts = pull([conj(v) for v in rest])
        return [*results, *grads, *map(conj, seconds), *map(conj, of_cts)]

    return run


def step_of(eqn: Any) -> int | None:
    """The position of the equation of the forward pass from which JAX derived this one."""
    derived = (name for name, _ in scopes_of(eqn) if name.startswith(_STEP))
    return next((int(name.removeprefix(_STEP)) for name in derived), None)


def _with_its_line(eqn: Any, xs: Sequence[Any]) -> list[Any]:
    """The results of an equation at other operands; `eval_jaxpr` passes on its line."""
    pairs = zip(eqn.invars, xs, strict=True)
    given = {atom: x for atom, x in pairs if not isinstance(atom, Literal)}
    one = _empty().replace(eqns=[eqn], invars=list(given), outvars=list(eqn.outvars))
    return jax.core.eval_jaxpr(one, [], *given.values())


@cache
def _empty() -> Any:
    empty = jaxprs.open_jaxpr(jax.make_jaxpr(lambda: ())())
    return empty.replace(debug_info=empty.debug_info.with_unknown_names())
