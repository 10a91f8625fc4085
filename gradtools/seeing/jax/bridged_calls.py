"""Calls of bridged functions in a jaxpr, and how their arguments are laid out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gradtools.bridged_calls import Crossed
from gradtools.jax._upstream import Literal
from gradtools.seeing.jax import flops

_LAYS_OUT = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


def called_inside(eqn: Any) -> Iterator[Any]:
    """The bodies from a rule's call down to that of the function, each with a call at its end."""
    while eqn.primitive.name != "gradtools_kernel":
        (body,) = flops.bodies(eqn)
        yield body
        eqn = body.jaxpr.eqns[-1]


def crossing(eqn: Any) -> Crossed | None:
    """The call that an equation is; None for any other equation.

    A rule that says what it reaches is a bridged function's, and returns the call's results as
    they are (`Foreign.value`).
    """
    places: Sequence[int] = range(len(eqn.invars))
    while eqn.primitive.name != "gradtools_kernel":
        if not callable(getattr(eqn.params.get("rule"), "reaches", None)):
            return None
        (body,) = flops.bodies(eqn)
        jaxpr, known = body.jaxpr, dict(zip(body.jaxpr.invars, places, strict=True))
        if not jaxpr.eqns:  # of a function without results
            return None
        *before, eqn = jaxpr.eqns
        for each in before:  # under vmap
            if each.primitive.name not in _LAYS_OUT or each.invars[0] not in known:
                return None
            known[each.outvars[0]] = known[each.invars[0]]
        if any(isinstance(a, Literal) or a not in known for a in eqn.invars):
            return None
        places = [known[a] for a in eqn.invars]
    inside = eqn.params["call"].kernel.inside
    return inside and Crossed(inside, tuple(places), eqn.params["batch"])
